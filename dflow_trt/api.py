"""The Python API: ``LLM(bundle).generate(prompts, SamplingParams(...))``, with the names of TensorRT-LLM and vLLM."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from dflow_trt.bundle import Bundle, check_unchanged, open_bundle
from dflow_trt.decode import Decoder
from dflow_trt.errors import UserError
from dflow_trt.method.policy import check_policy
from dflow_trt.method.sampling import Pick, SamplingParams, fresh_seed
from dflow_trt.request import Emission, Request, RequestStats
from dflow_trt.runtime.base import Runtime
from dflow_trt.runtime.choose import open_runtime
from dflow_trt.spec import DraftPolicy
from dflow_trt.text import TextStream, Tokenizer

Prompt = str | Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None
Strategies = str | Sequence[str] | None


@dataclass(frozen=True)
class CompletionOutput:
    """One sample of one prompt.

    finish_reason: "stop" (eos, a stop id or a stop string), "length", "cancelled" or "error" (then ``error`` says why).
    logprobs: one entry a token where asked for. seed: the one that was used, given or drawn.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stats: RequestStats
    seed: int
    logprobs: tuple[Pick, ...] | None = None
    error: str | None = None


@dataclass(frozen=True)
class RequestOutput:
    """All samples of one prompt; the properties are those of the first."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    strategy: str
    outputs: tuple[CompletionOutput, ...]

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> tuple[Pick, ...] | None:
        return self.outputs[0].logprobs

    @property
    def stats(self) -> RequestStats:
        return self.outputs[0].stats


@dataclass(frozen=True)
class StreamOutput:
    """What one round added to one sample: num_accepted of its tokens were drafts.

    finish_reason is None until the last.
    """

    request_id: str
    prompt_index: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    num_accepted: int
    finish_reason: str | None
    stats: RequestStats
    logprobs: tuple[Pick, ...] | None = None
    error: str | None = None


@dataclass
class _Sample:
    """One sequence while it is generated."""

    prompt_index: int
    prompt: str | None
    request: Request
    text: TextStream | None
    picks: list[Pick] = field(default_factory=list)
    last: Emission | None = None

    def record(self, emission: Emission) -> None:
        """Keep what one round gave."""
        self.picks += emission.picks
        self.last = emission

    def piece(self, emission: Emission) -> StreamOutput:
        """What that round added, for a stream."""
        delta = ""
        if self.text is not None:
            delta = self.text.finish() if emission.finish_reason else self.text.take()
        return StreamOutput(
            self.request.id,
            self.prompt_index,
            self.request.sample_index,
            delta,
            emission.tokens,
            emission.num_accepted,
            emission.finish_reason,
            dataclasses.replace(emission.stats),
            self._logprobs(emission.picks),
            emission.error,
        )

    def _logprobs(self, picks: Sequence[Pick]) -> tuple[Pick, ...] | None:
        return None if self.request.params.logprobs is None else tuple(picks)

    def output(self) -> CompletionOutput:
        assert self.last is not None
        assert self.last.finish_reason is not None
        return CompletionOutput(
            index=self.request.sample_index,
            text=self.text.finish() if self.text is not None else "",
            token_ids=tuple(pick.token for pick in self.picks),
            finish_reason=self.last.finish_reason,
            stats=self.last.stats,
            seed=self.request.seed,
            logprobs=self._logprobs(self.picks),
            error=self.last.error,
        )


class LLM:
    """A bundle, ready to generate.

    threads: of the CPU runtime, by default the cores of this process. max_batch_size: requests in flight, at most (and
    by default) what the bundle was built for. draft_policy: "fixed" verifies every draft, "adaptive" those that were
    measured to pay. prefix_reuse: a prompt goes on from what a finished request with the same beginning left in the
    caches. Neither changes any output. verify: check every file's hash on open.
    Calls from several threads take turns. Use it as a context manager, or :meth:`close` it.
    """

    def __init__(
        self,
        bundle: str | Path | Bundle,
        *,
        threads: int | None = None,
        max_batch_size: int | None = None,
        max_queue: int = 1024,
        draft_policy: DraftPolicy = "fixed",
        prefix_reuse: bool = True,
        verify: bool = True,
        runtime: Runtime | None = None,
    ) -> None:
        _check_int("max_queue", max_queue, 1)
        check_policy(draft_policy)
        self.bundle = bundle if isinstance(bundle, Bundle) else open_bundle(bundle, verify)
        folder = self.bundle.tokenizer_path
        self.tokenizer = Tokenizer.from_folder(folder) if folder else None
        slots = self._num_slots(max_batch_size)
        self._runtime = runtime or open_runtime(self.bundle, threads, slots)
        check_unchanged(self.bundle)
        self._max_queue = max_queue
        options: dict[str, Any] = {"draft_policy": draft_policy, "prefix_reuse": prefix_reuse}
        self._decoder = Decoder(self.bundle, self._runtime, max_queue, slots, **options)
        self._lock, self._stepping = threading.Lock(), threading.RLock()
        self._running_in: int | None = None
        self._closed = False
        self._ids = itertools.count()

    def _num_slots(self, wanted: int | None) -> int:
        limit = self.bundle.build.max_batch_size
        if wanted is None:
            return limit
        _check_int("max_batch_size", wanted, 1, limit, ", what the bundle was built for")
        return wanted

    def __repr__(self) -> str:
        build, state = self.bundle.build, ", closed" if self._closed else ""
        strategies = ", ".join(self.bundle.strategies)
        return f"<LLM {self.bundle.path}: {build.backend} {build.dtype}, strategies {strategies}{state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the engines; the LLM cannot be used any more."""
        self._closed = True
        with self._stepping:  # another thread's round ends first, and is its last
            self._runtime.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        strategy: Strategies = None,
        draft_tokens: int | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt, batched in flight; results in the order of the prompts.

        A prompt is a text, ``{"prompt": text}``, ``{"prompt_token_ids": ids}`` or ``{"messages": [...]}`` (a chat).
        strategy: one that the bundle offers (or one a prompt), by default its best. draft_tokens: most drafts verified
        in a round.
        Raises UserError, before any work, when a prompt or an option is not acceptable.
        """
        samples = self._samples(prompts, sampling_params, strategy, draft_tokens)
        for sample, emission in self._run(samples):
            sample.record(emission)
        grouped = itertools.groupby(samples, key=lambda sample: sample.prompt_index)
        return [self._request_output(list(group)) for _, group in grouped]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: Params = None,
        *,
        strategy: Strategies = None,
        draft_tokens: int | None = None,
    ) -> list[RequestOutput]:
        """:meth:`generate` for one conversation, formatted by the model's chat template."""
        return self.generate([{"messages": messages}], sampling_params, strategy=strategy, draft_tokens=draft_tokens)

    def generate_stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        strategy: Strategies = None,
        draft_tokens: int | None = None,
    ) -> Iterator[StreamOutput]:
        """As :meth:`generate`, a piece a round as it comes. Leaving the iterator early cancels what is unfinished."""
        return self._pieces(self._samples(prompts, sampling_params, strategy, draft_tokens))

    def _pieces(self, samples: Sequence[_Sample]) -> Iterator[StreamOutput]:
        with contextlib.closing(self._run(samples)) as rounds:
            for sample, emission in rounds:
                yield sample.piece(emission)

    def cancel(self, request_id: str) -> bool:
        """End one request of a running stream at its next round; False if it is not in flight."""
        return self._decoder.cancel(request_id)

    def _request_output(self, samples: Sequence[_Sample]) -> RequestOutput:
        first = samples[0]
        return RequestOutput(
            request_id=first.request.id,
            prompt=first.prompt,
            prompt_token_ids=tuple(first.request.prompt_ids),
            strategy=first.request.strategy.name,
            outputs=tuple(sample.output() for sample in samples),
        )

    def _run(self, samples: Sequence[_Sample]) -> Generator[tuple[_Sample, Emission], None, None]:
        if self._running_in == threading.get_ident():
            raise UserError("generate: a stream of this LLM is open in this thread; read it to its end or close it")
        with self._lock:
            waiting, by_id = deque(samples), {sample.request.id: sample for sample in samples}
            try:
                while waiting or not self._decoder.idle:
                    self._running_in = threading.get_ident()  # a stream may be read on by another thread
                    with self._stepping:
                        self._check_open()
                        while waiting and self._decoder.num_queued < self._max_queue:
                            self._decoder.submit(waiting.popleft().request)
                        emissions = self._decoder.step().emissions
                    for emission in emissions:
                        yield by_id[emission.request_id], emission
            finally:
                self._running_in = None
                self._abandon(by_id)

    def _check_open(self) -> None:
        if self._closed:
            raise UserError("this LLM was closed; open the bundle again")

    def _abandon(self, ids: Mapping[str, Any]) -> None:
        """Free the slots of what a caller did not wait for."""
        with self._stepping:
            if not self._decoder.idle and not self._closed:
                for request_id in ids:
                    self._decoder.cancel(request_id)
                self._decoder.step()

    # -- requests ----------------------------------------------------------------------------------------------------

    def _samples(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params,
        strategy: Strategies,
        draft_tokens: int | None,
    ) -> list[_Sample]:
        """n samples a prompt, every one of them checked."""
        self._check_open()
        listed = _listed_prompts(prompts)
        if draft_tokens is not None:
            _check_int("draft_tokens", draft_tokens, 0)
        params = _one_each("sampling_params", sampling_params or SamplingParams(), len(listed))
        for each in params:
            if not isinstance(each, SamplingParams):
                raise UserError(f"sampling_params: {type(each).__name__}; allowed: SamplingParams, or one a prompt")
        chosen = [self.bundle.strategy(name) for name in _one_each("strategy", strategy, len(listed))]
        samples = []
        for i, (prompt, each) in enumerate(zip(listed, params, strict=True)):
            text, ids = self._prompt_ids(prompt, i)
            each = with_word_ids(self.tokenizer, each)
            seed = fresh_seed() if each.seed is None else each.seed
            number = next(self._ids)
            for k in range(each.n):
                stream = text_stream(self.tokenizer, each)
                stop = stream.push if stream is not None else None
                request = Request(f"{number}-{k}", ids, each, chosen[i], seed, k, draft_tokens, stop)
                self._check(request, i)
                samples.append(_Sample(i, text, request, stream))
        return samples

    def _check(self, request: Request, index: int) -> None:
        """The decoder's own check, its message naming the prompt as the caller knows it."""
        try:
            self._decoder.check(request)
        except UserError as error:
            raise UserError(str(error).replace(f"request {request.id}", f"prompt {index}", 1)) from None

    def _prompt_ids(self, prompt: Prompt, index: int) -> tuple[str | None, list[int]]:
        kind, value = _prompt_kind(prompt, index)
        if kind == "prompt_token_ids":
            return None, _token_ids(value, index)
        if self.tokenizer is None:
            raise UserError(f"prompt {index}: this bundle has no tokenizer; give prompt_token_ids instead of {kind}")
        try:
            if kind == "messages":
                return None, self.tokenizer.encode_chat(value)
            return value, self.tokenizer.encode(value)
        except UserError as error:
            raise UserError(f"prompt {index}: {error}") from None


def with_word_ids(tokenizer: Tokenizer | None, params: SamplingParams) -> SamplingParams:
    """bad_words as token ids, for the sampler; UserError for what needs a tokenizer where there is none."""
    for name in ("stop", "bad_words"):
        texts = [word for word in _listed(getattr(params, name)) if isinstance(word, str)]
        if texts and tokenizer is None:
            raise UserError(f"{name}: this bundle has no tokenizer, texts cannot be matched; use token ids")
    if not params.bad_words or tokenizer is None:
        return params
    ids = tokenizer.bad_words_ids(params.bad_words)
    return dataclasses.replace(params, bad_words=(), bad_words_ids=(*params.bad_words_ids, *ids))


def text_stream(tokenizer: Tokenizer | None, params: SamplingParams) -> TextStream | None:
    """The output text of one sample, or None without a tokenizer."""
    if tokenizer is None:
        return None
    return TextStream(tokenizer, _listed(params.stop), min_tokens=params.min_tokens)


def _one_each(name: str, given: Any, count: int) -> list[Any]:
    """One value for all prompts, or one a prompt."""
    if not isinstance(given, list | tuple):
        return [given] * count
    if len(given) != count:
        raise UserError(f"{name}: {len(given)} given for {count} prompts; give one, or one a prompt")
    return list(given)


def _check_int(name: str, value: Any, low: int, high: int | None = None, why: str = "") -> None:
    """UserError unless ``value`` is an integer from ``low`` to ``high``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        allowed = f"{low} or more" if high is None else f"{low} to {high}"
        raise UserError(f"{name}: {value!r}; allowed: {allowed}{why}")


def _listed_prompts(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise UserError(f"prompts: {type(prompts).__name__}; allowed: a prompt, or a list of prompts")
    return list(prompts)


def _token_ids(value: Any, index: int) -> list[int]:
    """Plain integers; numpy's are taken too. What they may be is the decoder's to say."""
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise UserError(f"prompt {index}: prompt_token_ids is {type(value).__name__}; allowed: a list of token ids")
    return [int(token) if isinstance(token, np.integer) else token for token in value]


def _listed(value: Any) -> Sequence[Any]:
    return [value] if isinstance(value, str) else value


def _prompt_kind(prompt: Prompt, index: int) -> tuple[str, Any]:
    """What a prompt is given as, and the value."""
    if isinstance(prompt, str):
        return "prompt", prompt
    kinds = ("prompt", "prompt_token_ids", "messages")
    if isinstance(prompt, Mapping):
        given = [kind for kind in kinds if kind in prompt]
        if len(given) == 1 and (given[0] != "prompt" or isinstance(prompt["prompt"], str)):
            return given[0], prompt[given[0]]
    found = sorted(map(str, prompt)) if isinstance(prompt, Mapping) else type(prompt).__name__
    raise UserError(f"prompt {index}: {found}; allowed: a text, or a dict with one of {', '.join(kinds)}")
