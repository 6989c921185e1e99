"""Updates as OpenAI's objects: whole answers, chunks of a stream, log-probabilities, usage."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dflow_trt.method.sampling import Pick
from dflow_trt.request import RequestStats
from dflow_trt.serving.openai.translate import Job, Update
from dflow_trt.text import Detokenizer, Tokenizer

JsonObject = dict[str, Any]


@dataclass(frozen=True)
class TokenText:
    """A token and where its own text starts in that of its sample, in characters."""

    pick: Pick
    start: int


class TokenTexts:
    """Text token by token, beside the model's own, which holds back what may become a stop string."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._length = 0
        self._waiting: deque[tuple[str, bool]] = deque()

    def push(self, update: Update) -> list[TokenText]:
        """The update's tokens with their places."""
        return [self._one(pick, i < update.num_accepted) for i, pick in enumerate(update.picks)]

    def _one(self, pick: Pick, drafted: bool) -> TokenText:
        start, text = self._length, self._detokenizer.push([pick.token])
        self._length += len(text)
        self._waiting.append((text, drafted))
        return TokenText(pick, start)

    def pieces(self, text: str) -> list[JsonObject]:
        """The model's next text, cut where drafted and other tokens meet."""
        pieces: list[JsonObject] = []
        while text and self._waiting:
            part, drafted = self._waiting.popleft()
            _extend(pieces, text[: len(part)], drafted)
            if len(part) > len(text):
                self._waiting.appendleft((part[len(text) :], drafted))
            text = text[len(part) :]
        _extend(pieces, text, False)  # half a character at the end, which no token completed
        return pieces


def _extend(pieces: list[JsonObject], text: str, drafted: bool) -> None:
    if pieces and pieces[-1]["drafted"] == drafted:
        pieces[-1]["text"] += text
    elif text:
        pieces.append({"text": text, "drafted": drafted})


class Form(Protocol):
    """How one of the endpoints spells a choice."""

    prefix: str
    whole: str
    part: str

    def choice(self, text: str) -> JsonObject:
        """A whole choice's text."""

    def delta(self, text: str, first: bool) -> JsonObject:
        """What a chunk adds to a choice; ``first`` of that choice."""

    def logprobs(self, tokens: Sequence[TokenText], tokenizer: Tokenizer) -> JsonObject:
        """Log-probabilities of these tokens."""


class CompletionForm:
    """``/v1/completions``."""

    prefix, whole, part = "cmpl-", "text_completion", "text_completion"

    def choice(self, text: str) -> JsonObject:
        return {"text": text}

    def delta(self, text: str, first: bool) -> JsonObject:
        return {"text": text}

    def logprobs(self, tokens: Sequence[TokenText], tokenizer: Tokenizer) -> JsonObject:
        """Four lists, an entry a token; the alternatives include the token itself, as OpenAI's do."""
        return {
            "tokens": [_name(token.pick.token, tokenizer) for token in tokens],
            "token_logprobs": [token.pick.logprob for token in tokens],
            "top_logprobs": [
                {_name(each, tokenizer): logprob for each, logprob in [*_top(token.pick), _chosen(token.pick)]}
                for token in tokens
            ],
            "text_offset": [token.start for token in tokens],
        }


class ChatForm:
    """``/v1/chat/completions``."""

    prefix, whole, part = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, text: str) -> JsonObject:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str, first: bool) -> JsonObject:
        return {"delta": {"role": "assistant", "content": text} if first else {"content": text}}

    def logprobs(self, tokens: Sequence[TokenText], tokenizer: Tokenizer) -> JsonObject:
        content = [
            _entry(*_chosen(token.pick), tokenizer)
            | {"top_logprobs": [_entry(*pair, tokenizer) for pair in _top(token.pick)]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}


def _chosen(pick: Pick) -> tuple[int, float]:
    assert pick.logprob is not None
    return pick.token, pick.logprob


def _top(pick: Pick) -> Sequence[tuple[int, float]]:
    return pick.top_logprobs or ()


def _entry(token: int, logprob: float, tokenizer: Tokenizer) -> JsonObject:
    text, raw = _text_and_bytes(token, tokenizer)
    return {"token": text, "logprob": logprob, "bytes": list(raw)}


def _text_and_bytes(token: int, tokenizer: Tokenizer) -> tuple[str, bytes]:
    text = tokenizer.token_text(token)
    return text, tokenizer.token_bytes(token) if tokenizer.byte_level else text.encode()


def _name(token: int, tokenizer: Tokenizer) -> str:
    """A token as a text of its own; part of a character by its bytes, as OpenAI names it."""
    text, raw = _text_and_bytes(token, tokenizer)
    return text if raw == text.encode() else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@dataclass
class Choice:
    """One sample of one prompt while it is answered. drafted: drafts that the round of its last update verified."""

    texts: TokenTexts | None
    text: list[str] = field(default_factory=list)
    tokens: list[TokenText] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    last: Update | None = None
    drafted: int = 0

    def add(self, update: Update) -> list[TokenText]:
        """Keep an update; its tokens with their texts, where these are needed."""
        self.drafted = update.stats.drafted - (self.last.stats.drafted if self.last is not None else 0)
        self.text.append(update.text)
        self.ids += [pick.token for pick in update.picks]
        self.last = update
        tokens = self.texts.push(update) if self.texts is not None else []
        self.tokens += tokens
        return tokens


@dataclass(frozen=True)
class Wanted:
    """What an answer shows beside the text. Of a stream: drafts, usage at its end, running_usage in every chunk."""

    logprobs: bool = False
    ids: bool = False
    drafts: bool = False
    usage: bool = False
    running_usage: bool = False


class Answer:
    """The answer to one request, as it grows: ``len(jobs) * n`` choices, numbered prompt by prompt."""

    def __init__(
        self,
        form: Form,
        model: str,
        fingerprint: str,
        jobs: Sequence[Job],
        tokenizer: Tokenizer | None,
        wanted: Wanted,
    ) -> None:
        self.id = form.prefix + uuid.uuid4().hex
        self._form, self._jobs, self._tokenizer, self._wanted = form, jobs, tokenizer, wanted
        self._head = {"id": self.id, "created": int(time.time()), "model": model, "system_fingerprint": fingerprint}
        self._samples = jobs[0].params.n
        self._choices = [self._new_choice() for _ in range(len(jobs) * self._samples)]

    def _new_choice(self) -> Choice:
        follow = self._tokenizer is not None and (self._wanted.logprobs or self._wanted.drafts)
        return Choice(TokenTexts(self._tokenizer) if follow and self._tokenizer is not None else None)

    def add(self, job: int, update: Update) -> JsonObject:
        """Keep an update of a prompt; it as a chunk of a stream."""
        index = job * self._samples + update.index
        choice = self._choices[index]
        first = choice.last is None
        tokens = choice.add(update)
        body = self._form.delta(update.text, first)
        shown = self._choice(index, body, tokens, [pick.token for pick in update.picks], update.finish_reason)
        chunk = {**self._head, "object": self._form.part, "choices": [shown]}
        if self._wanted.drafts:
            chunk["dflow"] = self._drafts(choice, update)
        if self._wanted.usage or self._wanted.running_usage:
            chunk["usage"] = self.usage() if self._wanted.running_usage else None
        return chunk

    def _choice(
        self, index: int, body: JsonObject, tokens: Sequence[TokenText], ids: Sequence[int], reason: str | None
    ) -> JsonObject:
        logprobs = None
        if self._wanted.logprobs and self._tokenizer is not None:
            logprobs = self._form.logprobs(tokens, self._tokenizer)
        shown = {"index": index, **body, "logprobs": logprobs, "finish_reason": reason}
        if self._wanted.ids:
            shown["token_ids"] = list(ids)
        return shown

    def _drafts(self, choice: Choice, update: Update) -> JsonObject:
        """Of one round: its tokens and drafts, how many of the tokens were drafts, and which text these were."""
        pieces = choice.texts.pieces(update.text) if choice.texts is not None else []
        counts = {"num_drafted": choice.drafted, "num_accepted": update.num_accepted}
        return {"num_tokens": len(update.picks), **counts, "pieces": pieces}

    def body(self) -> JsonObject:
        """The whole answer."""
        choices = [
            self._choice(i, self._form.choice("".join(choice.text)), choice.tokens, choice.ids, _reason(choice))
            for i, choice in enumerate(self._choices)
        ]
        return {**self._head, "object": self._form.whole, "choices": choices, "usage": self.usage()}

    def usage_chunk(self) -> JsonObject:
        """The last chunk of a stream."""
        return {**self._head, "object": self._form.part, "choices": [], "usage": self.usage()}

    def usage(self) -> JsonObject:
        """Tokens of all prompts and samples. ``dflow``: what the drafts did; tau is tokens a round."""
        stats = [choice.last.stats for choice in self._choices if choice.last is not None]
        prompt, output = sum(len(job.prompt_ids) for job in self._jobs), sum(each.output_tokens for each in stats)
        total = _sum(stats)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "completion_tokens_details": {
                "accepted_prediction_tokens": total.accepted,
                "rejected_prediction_tokens": total.drafted - total.accepted,
            },
            "dflow": {
                "strategy": self._jobs[0].strategy,
                "rounds": total.rounds,
                "tau_emitted": round(total.tau_emitted, 4),
                "tau_accepted": round(total.tau_accepted, 4),
                "seeds": [choice.last.seed for choice in self._choices[:: self._samples] if choice.last is not None],
            },
        }


def _reason(choice: Choice) -> str | None:
    return choice.last.finish_reason if choice.last is not None else None


def _sum(stats: Iterable[RequestStats]) -> RequestStats:
    total = RequestStats()
    for each in stats:
        total.rounds += each.rounds
        total.drafted += each.drafted
        total.accepted += each.accepted
        total.emitted += each.emitted
    return total
