"""A request as jobs for Triton's ``dflow`` model, and that model's responses as updates. Plain data on both sides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflow_trt.bundle import Bundle
from dflow_trt.errors import UserError
from dflow_trt.method.sampling import Pick, SamplingParams
from dflow_trt.request import RequestStats
from dflow_trt.serving import tensors as t
from dflow_trt.serving.openai.protocol import ChatRequest, CompletionRequest
from dflow_trt.serving.options import StrategyChooser, check_length, check_words
from dflow_trt.serving.responses import DTYPES
from dflow_trt.text import Tokenizer

Array = np.ndarray[Any, np.dtype[Any]]
Feed = tuple[t.Tensor, Array]

_LOGPROBS = {t.OUTPUT_LOG_PROBS, t.TOP_IDS, t.TOP_LOG_PROBS}
_LARGEST = int(np.iinfo(np.int32).max)
_FLOATS = float(np.finfo(np.float32).smallest_subnormal), float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Job:
    """One prompt for the model: its n samples are one request there.

    stream: updates as rounds come, else one with everything. task: label of the metrics.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    strategy: str
    draft_tokens: int | None = None
    stream: bool = False
    task: str | None = None


@dataclass(frozen=True)
class Update:
    """What one response adds to one sample. finish_reason is None while it goes on; stats and seed are those so far.

    picks: the new tokens, with log-probabilities where they were asked for; the first num_accepted were drafts.
    """

    index: int
    text: str
    picks: tuple[Pick, ...]
    num_accepted: int
    finish_reason: str | None
    stats: RequestStats
    seed: int


def jobs(
    request: CompletionRequest | ChatRequest, bundle: Bundle, tokenizer: Tokenizer | None, chooser: StrategyChooser
) -> list[Job]:
    """One job a prompt, all of one strategy: chosen here, so that the answer can name it.

    UserError in one line names the field at fault.
    """
    if request.num_logprobs() is not None:
        _needed(tokenizer, "logprobs")
    limit = min(bundle.build.max_input_len, bundle.build.max_seq_len - 1)
    prompts, strategy = list(_prompts(request, tokenizer, limit)), chooser.choose(request.strategy).name
    made = [_job(request, ids, bundle, strategy) for ids in prompts]
    check_words(made[0].params)
    feeds(made[0])  # numbers that no tensor can hold; all jobs have the same
    return made


def _job(request: CompletionRequest | ChatRequest, ids: Sequence[int], bundle: Bundle, strategy: str) -> Job:
    vocab = bundle.target.vocab_size
    wrong = next((token for token in ids if not 0 <= token < vocab), None)
    if wrong is not None:
        raise UserError(f"prompt: token id {wrong}; allowed: 0 to {vocab - 1}")
    params = request.sampling(room=max(1, bundle.build.max_seq_len - len(ids)))
    stream = request.streams is not None
    return Job(ids, params, strategy, request.draft_tokens, stream, request.task)


def _prompts(
    request: CompletionRequest | ChatRequest, tokenizer: Tokenizer | None, limit: int
) -> Iterator[Sequence[int]]:
    if isinstance(request, ChatRequest):
        messages = [message.model_dump(include={"role", "content", "name"}) for message in request.messages]
        encoder = _needed(tokenizer, "messages")
        text = encoder.render_chat(messages, **(request.chat_template_kwargs or {}))
        check_length(encoder, text, limit)
        yield encoder.encode_rendered(text)
        return
    for prompt in request.prompt:
        if isinstance(prompt, list):
            yield prompt
        else:
            encoder = _needed(tokenizer, "prompt")
            check_length(encoder, prompt, limit)
            yield encoder.encode(prompt)


def _needed(tokenizer: Tokenizer | None, field: str) -> Tokenizer:
    if tokenizer is None:
        raise UserError(
            f"{field}: this bundle has no tokenizer; give token ids to /v1/completions, and return_token_ids"
        )
    return tokenizer


def feeds(job: Job) -> list[Feed]:
    """The input tensors of a job, [1, ...]; what was not asked for is left out."""
    params, values = job.params, dict[t.Tensor, Any]()
    values |= {tensor: getattr(params, tensor.name) for tensor in t.SAMPLING}
    values |= {t.STOP_WORDS: params.stop, t.BAD_WORDS: params.bad_words, t.LOGPROBS: params.logprobs}
    values |= {t.LOGIT_BIAS_IDS: tuple(params.logit_bias or ()), t.STRATEGY: job.strategy}
    values |= {t.LOGIT_BIAS_VALUES: tuple((params.logit_bias or {}).values()), t.DRAFT_TOKENS: job.draft_tokens}
    values |= {t.NUM_SEQUENCES: params.n, t.MAX_TOKENS: params.max_tokens, t.STREAM: job.stream}
    values |= {t.INPUT_IDS: job.prompt_ids}
    return [(tensor, _array(tensor, value)) for tensor, value in values.items() if value is not None and value != ()]


def _array(tensor: t.Tensor, value: Any) -> Array:
    """[1, items]; UserError for a number that the tensor cannot hold: no option may become another one on its way."""
    items = list(value) if isinstance(value, list | tuple) else [value]
    if tensor.type == "STRING":
        return np.array([[item.encode() for item in items]], np.object_)
    if tensor.type == "INT32" and max(map(abs, items), default=0) > _LARGEST:
        raise UserError(f"{tensor.name} is {max(items, key=abs)}; allowed: up to {_LARGEST}")
    if tensor.type == "FP32" and tensor in t.SAMPLING:  # a bias that is 0 as a float32 changes no logit
        _check_float(tensor, *items)
    return np.array([items], DTYPES[tensor.type])


def _check_float(tensor: t.Tensor, value: float) -> None:
    least, most = _FLOATS
    if value and not least <= abs(value) <= most:
        raise UserError(
            f"{tensor.name} is {value}; allowed: 0, or in size {least:.2g} to {most:.2g}, which a float32 holds"
        )


def fetches(job: Job) -> list[str]:
    """The outputs to ask for: each one costs time in every round."""
    unread = {t.ACCEPTANCE_RATE, t.CUM_LOG_PROBS} | (_LOGPROBS if job.params.logprobs is None else set())
    return [tensor.name for tensor in t.DFLOW.outputs if tensor not in unread]


def updates(outputs: Mapping[str, Array]) -> Iterator[Update]:
    """The updates in one response: one a sequence, whose tokens follow each other in the flat outputs."""
    flat = {name: array.reshape(-1) for name, array in outputs.items()}
    indices = flat[t.SEQUENCE_INDEX.name]
    ids = flat[t.OUTPUT_IDS.name]
    counts = [len(ids)] if len(indices) == 1 else flat[t.NUM_OUTPUT_TOKENS.name].tolist()
    picks, start = _picks(flat), 0
    for i, count in enumerate(counts):
        yield _update(flat, i, tuple(picks[start : start + count]))
        start += count


def _update(flat: Mapping[str, Array], i: int, picks: tuple[Pick, ...]) -> Update:
    def number(tensor: t.Tensor) -> int:
        return int(flat[tensor.name][i])

    made = number(t.NUM_OUTPUT_TOKENS)
    stats = RequestStats(
        prompt_tokens=number(t.NUM_INPUT_TOKENS),
        output_tokens=made,
        rounds=number(t.NUM_ROUNDS),
        drafted=number(t.TOTAL_DRAFT_TOKENS),
        accepted=number(t.TOTAL_ACCEPTED),
        emitted=max(0, made - 1),  # the prefill's own token belongs to no round
    )
    text, reason = flat[t.TEXT_OUTPUT.name][i].decode(), flat[t.FINISH_REASON.name][i].decode()
    return Update(
        number(t.SEQUENCE_INDEX), text, picks, number(t.NUM_ACCEPTED), reason or None, stats, number(t.SEED_USED)
    )


def _picks(flat: Mapping[str, Array]) -> list[Pick]:
    """Tokens with their log-probabilities, where asked for; the alternatives are equally many for each."""
    tokens = flat[t.OUTPUT_IDS.name].tolist()
    if t.OUTPUT_LOG_PROBS.name not in flat:
        return [Pick(token) for token in tokens]
    logprobs = flat[t.OUTPUT_LOG_PROBS.name].tolist()
    pairs = list(zip(flat[t.TOP_IDS.name].tolist(), flat[t.TOP_LOG_PROBS.name].tolist(), strict=True))
    width = len(pairs) // max(1, len(tokens))
    return [Pick(token, logprobs[i], tuple(pairs[i * width : (i + 1) * width])) for i, token in enumerate(tokens)]
