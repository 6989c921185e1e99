"""Sampling: what a request asks for (:class:`SamplingParams`) and how its next token is chosen (:class:`Sampler`).

Shapes: V is the target's vocabulary with its padding; ids from ``live_vocab`` on are padding and are never considered.

Order and definitions are those of vLLM's sampler (vllm/v1/sample/sampler.py, ops/penalties.py, ops/bad_words.py):
masks and biases, penalties, temperature, min_p, top_k, top_p. Logit bias is a sum and min_tokens and bad_words are
masks, so their order among themselves is immaterial; the same holds for min_p and top_k, each of which keeps the head
of one and the same ranking. Two definitions are sharper than vLLM's: top_k keeps exactly k ids, and ties are always
broken towards the lowest id.
"""

from __future__ import annotations

import dataclasses
import secrets
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple, Self

import numpy as np

from dflow_trt.errors import UserError

Array = np.ndarray[Any, np.dtype[Any]]

# fmt: off
NOT_OFFERED = frozenset(
    {
        "allowed_token_ids", "beam_search_diversity_rate", "beam_width", "beam_width_array", "best_of",
        "detokenize", "early_stopping", "embedding_bias", "guided_choice", "guided_decoding",
        "guided_decoding_backend", "guided_grammar", "guided_json", "guided_regex",
        "include_stop_str_in_output", "length_penalty", "logits_processor", "logits_processors",
        "lora_request", "lookahead_config", "no_repeat_ngram_size", "num_beams", "prompt_logprobs",
        "response_format", "return_context_logits", "return_generation_logits",
        "spaces_between_special_tokens", "structured_outputs", "tools", "top_p_decay", "top_p_min",
        "top_p_reset_ids", "truncate_prompt_tokens", "typical_p", "use_beam_search",
    }
)
# fmt: on
"""Options of TensorRT-LLM, vLLM and the OpenAI protocol that are known here, and refused."""

_SORTED_AT_ONCE = 4096  # candidates of top_p; sorting that many costs less than another pass


@dataclass(frozen=True)
class _Range:
    """The numbers that a field takes: low <= value <= high, low itself excluded where ``above``."""

    kind: type
    low: float
    high: float = sys.float_info.max
    above: bool = False
    none: bool = False

    def accepts(self, value: Any) -> bool:
        value = value.item() if isinstance(value, np.generic) else value  # np.float32 cannot hold the default ``high``
        number = isinstance(value, Integral if self.kind is int else Real) and not isinstance(value, bool)
        return number and self.low <= value <= self.high and not (self.above and value == self.low)

    def __str__(self) -> str:
        text = "an integer" if self.kind is int else "a number"
        text += f" {'>' if self.above else '>='} {self.low:g}"
        text += f" and <= {self.high:g}" if self.high < sys.float_info.max else ""
        return text + (", or None" if self.none else "")


_RANGES = {
    "max_tokens": _Range(int, 1),
    "temperature": _Range(float, 0),
    "top_k": _Range(int, -1),
    "top_p": _Range(float, 0, 1, above=True),
    "min_p": _Range(float, 0, 1),
    "seed": _Range(int, 0, 2**64 - 1, none=True),
    "n": _Range(int, 1, 128),
    "min_tokens": _Range(int, 0),
    "repetition_penalty": _Range(float, 0.01, 100),
    "presence_penalty": _Range(float, -2, 2),
    "frequency_penalty": _Range(float, -2, 2),
    "logprobs": _Range(int, 0, none=True),
}
_ID = _Range(int, 0)
_BIAS = _Range(float, float(np.finfo(np.float32).min), float(np.finfo(np.float32).max))


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What a request asks of sampling, by the names of TensorRT-LLM and vLLM. Raises UserError on any bad value.

    max_tokens: the most tokens to emit. min_tokens: nothing but max_tokens ends the output (eos, stop token or string)
        before that many were emitted.
    temperature: 0 is greedy, and the default: speculation accepts most there, and a run repeats itself without a seed.
        (vLLM's default is 1.0.) Small values are taken as they are, not raised to a floor.
    top_k: 0 or -1 is off. top_p: 1 is off. min_p: relative to the most probable token, 0 is off.
    seed: of the random draws, 0 to 2**64 - 1; None has one drawn for the request.
    n: samples of one prompt; sample i draws from its own stream of the same seed.
    stop: a string or several; output ends before the first one. stop_token_ids: ids that end the output as eos does.
    ignore_eos: go on after eos.
    repetition_penalty: divides positive and multiplies negative logits of every token in prompt or output.
    presence_penalty, frequency_penalty: subtracted from the logits of tokens in the output, once or per occurrence.
    logit_bias: token id -> number added to its logit; -inf bans the id. JSON's string keys are taken for ids.
    bad_words: texts or token id sequences that the output must not contain; the prompt is not searched.
    bad_words_ids: the same as id sequences; ``Tokenizer.bad_words_ids`` of dflow_trt.text makes them from texts.
    logprobs: None is off; otherwise each token comes with its log-probability and that of so many top alternatives.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    bad_words_ids: Sequence[Sequence[int]] = ()
    logprobs: int | None = None

    def __new__(cls, *_args: Any, **options: Any) -> Self:
        """Refuses an unknown option by name before ``__init__`` would raise a bare TypeError."""
        _check_names(options, [field.name for field in dataclasses.fields(cls)])
        return super().__new__(cls)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """Params from JSON data, where null means "not given". Raises UserError on unknown names and bad values."""
        if not isinstance(options, Mapping):
            raise UserError(f"sampling params are {_show(options)}; allowed: a mapping of names to values")
        return cls(**{str(name): value for name, value in options.items() if value is not None})

    def __post_init__(self) -> None:
        for name, allowed in _RANGES.items():
            self._set(name, _number(name, getattr(self, name), allowed))
        if not isinstance(self.ignore_eos, bool):
            raise UserError(f"ignore_eos is {_show(self.ignore_eos)}; allowed: True or False")
        if self.min_tokens > self.max_tokens:
            raise UserError(f"min_tokens is {self.min_tokens}; allowed: at most max_tokens, {self.max_tokens}")
        self._set("stop", _texts("stop", self.stop))
        self._set("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        self._set("logit_bias", _bias(self.logit_bias))
        self._set("bad_words", tuple(_bad_word(word) for word in _items("bad_words", self.bad_words)))
        words = _items("bad_words_ids", self.bad_words_ids)
        self._set("bad_words_ids", tuple(_word_ids("bad_words_ids", word) for word in words))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen for its readers

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def banned_sequences(self) -> tuple[tuple[int, ...], ...]:
        """Every bad word as token ids; raises UserError while bad_words holds text that nobody has turned into ids."""
        texts = [word for word in self.bad_words if isinstance(word, str)]
        if texts and not self.bad_words_ids:
            raise UserError(
                f"bad_words holds text ({_show(texts[0])}); allowed without a tokenizer: token id sequences"
            )
        given = [tuple(word) for word in self.bad_words if not isinstance(word, str)]
        return tuple(dict.fromkeys([*given, *map(tuple, self.bad_words_ids)]))


def fresh_seed() -> int:
    """A seed for a request that gave none: 63 random bits of the operating system. The caller reports it."""
    return secrets.randbits(63)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_names(options: Iterable[str], offered: Sequence[str]) -> None:
    for name in options:
        if name in NOT_OFFERED:
            raise UserError(f"sampling option {name!r} is not offered; offered: {', '.join(offered)}")
        if name not in offered:
            raise UserError(f"unknown sampling option {_show(name)}; offered: {', '.join(offered)}")


def _number(name: str, value: Any, allowed: _Range) -> Any:
    if value is None and allowed.none:
        return None
    if not allowed.accepts(value):
        raise UserError(f"{name} is {_show(value)}; allowed: {allowed}")
    return allowed.kind(value)


def _items(name: str, value: Any) -> tuple[Any, ...]:
    """A list-like field as a tuple; None is the empty one."""
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise UserError(f"{name} is {_show(value)}; allowed: a list")
    return tuple(value)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else _items(name, value)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise UserError(f"{name} holds {_show(text)}; allowed: non-empty strings")
    return texts


def _ids(name: str, value: Any) -> tuple[int, ...]:
    ids = _items(name, value)
    for token in ids:
        if not _ID.accepts(token):
            raise UserError(f"{name} holds {_show(token)}; allowed: token ids, integers >= 0")
    return tuple(int(token) for token in ids)


def _word_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = _ids(name, value)
    if not ids:
        raise UserError(f"{name} holds an empty sequence; allowed: sequences of at least one token id")
    return ids


def _bad_word(word: Any) -> str | tuple[int, ...]:
    if isinstance(word, str) and word:
        return word
    if isinstance(word, str) or not isinstance(word, Iterable):
        raise UserError(f"bad_words holds {_show(word)}; allowed: non-empty strings, or token id sequences")
    return _word_ids("bad_words", word)


def _bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise UserError(f"logit_bias is {_show(value)}; allowed: a mapping of token ids to numbers")
    return dict(_bias_entry(key, bias) for key, bias in value.items())


def _bias_entry(key: Any, bias: Any) -> tuple[int, float]:
    token = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else key
    if not _ID.accepts(token):
        raise UserError(f"logit_bias has the key {_show(key)}; allowed: token ids, integers >= 0")
    if bias != -np.inf and not _BIAS.accepts(bias):
        raise UserError(f"logit_bias of id {int(token)} is {_show(bias)}; allowed: {_BIAS}, or -inf")
    return int(token), float(bias)


class Pick(NamedTuple):
    """A chosen token. ``logprob`` and ``top_logprobs`` are None unless asked for.

    Log-probabilities are the log-softmax of the target's raw logits over the live vocabulary, before any processor,
    temperature or filter (vLLM's ``raw_logprobs``). top_logprobs: (id, logprob), most probable first, then lowest id.
    """

    token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None


class Workspace:
    """Scratch rows of one vocabulary's width (20 bytes an id), so that no pick allocates them; samplers may share one.

    Not for use from two threads at once.
    """

    def __init__(self, live_vocab: int) -> None:
        self.scores_V = np.empty(live_vocab, np.float32)
        self.weights_V = np.empty(live_vocab, np.float64)
        self.sums_V = np.empty(live_vocab, np.float64)


class _Counts:
    """How often each token was seen; distinct ids and their counts stay arrays, ready for a gather."""

    def __init__(self, capacity: int) -> None:
        self._rows: dict[int, int] = {}
        self._ids = np.empty(capacity, np.int64)
        self._counts = np.zeros(capacity, np.float32)

    def add(self, token: int) -> None:
        row = self._rows.setdefault(token, len(self._rows))
        self._ids[row] = token
        self._counts[row] += 1

    @property
    def ids(self) -> Array:
        return self._ids[: len(self._rows)]

    @property
    def counts(self) -> Array:
        return self._counts[: len(self._rows)]


class Sampler:
    """The sampling state of one sample of one request.

    params: what was asked. prompt_ids: the prompt (for repetition_penalty). live_vocab: ids below it may be chosen.
    stop_ids: the ids that end this request, masked until min_tokens. seed: the request's, or :func:`fresh_seed`.
    sample_index: which of the ``n`` samples. workspace: shared scratch of the same live_vocab, else its own is made.

    Raises UserError when logit_bias or a bad word names an id that does not exist.

    ``pick`` reads the state and ``commit`` changes it: calling them in turn, one token at a time, gives each row
    exactly the tokens before it, however many rows a verify pass scored. So a speculative run equals a plain one.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        live_vocab: int,
        stop_ids: Iterable[int],
        seed: int,
        sample_index: int,
        workspace: Workspace | None = None,
    ) -> None:
        self._params = params
        self._live_vocab = live_vocab
        self._key = np.array([seed, sample_index], np.uint64)
        self._emitted = 0
        self._workspace = workspace or Workspace(live_vocab)
        self._stop_ids = np.array(sorted({i for i in stop_ids if i < live_vocab}), np.int64)
        self._set_bias(params.logit_bias or {})
        self._set_bad_words(params.banned_sequences)
        self._set_penalties(prompt_ids)
        self._always_processes = self._has_processors()

    def _set_bias(self, bias: Mapping[int, float]) -> None:
        self._check_ids("logit_bias", bias)
        self._bias_ids = np.array(list(bias), np.int64)
        self._biases = np.array(list(bias.values()), np.float32)

    def _set_bad_words(self, words: Sequence[tuple[int, ...]]) -> None:
        self._check_ids("bad_words", (i for word in words for i in word))
        self._banned_ids = np.array([word[0] for word in words if len(word) == 1], np.int64)
        self._bad_words = [(word[:-1], word[-1]) for word in words if len(word) > 1]
        self._tail: deque[int] = deque(maxlen=max((len(head) for head, _ in self._bad_words), default=0))

    def _set_penalties(self, prompt_ids: Sequence[int]) -> None:
        p = self._params
        self._output: _Counts | None = None
        self._seen: _Counts | None = None
        if p.presence_penalty or p.frequency_penalty:
            self._output = _Counts(min(self._live_vocab, p.max_tokens))
        if p.repetition_penalty != 1:
            self._seen = _Counts(min(self._live_vocab, len(prompt_ids) + p.max_tokens))
            for token in prompt_ids:
                if token < self._live_vocab:
                    self._seen.add(int(token))

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        for token in ids:
            if token >= self._live_vocab:
                raise UserError(
                    f"{name} names the id {token}; allowed: ids below {self._live_vocab}, the vocabulary's size"
                )

    @property
    def needs_logits(self) -> bool:
        """False while the engine's own argmax over the live vocabulary is the answer."""
        return self._processes or not self._params.greedy or self._params.logprobs is not None

    @property
    def _processes(self) -> bool:
        """Whether any processor changes the logits of the next token."""
        return self._always_processes or self._masks_stops

    def _has_processors(self) -> bool:
        """Those that last as long as the request; only min_tokens comes to an end."""
        has_words = len(self._banned_ids) > 0 or len(self._bad_words) > 0
        penalised = self._output is not None or self._seen is not None
        return len(self._bias_ids) > 0 or has_words or penalised

    @property
    def _masks_stops(self) -> bool:
        return self._emitted < self._params.min_tokens and len(self._stop_ids) > 0

    def pick(self, logits_V: Array, position: int) -> Pick:
        """The token at absolute ``position``, given everything committed so far; changes no state.

        logits_V: float32, at least live_vocab long, only read. Raises UserError, which concerns this request alone,
        when no token is left to choose or when the logits hold NaN or +inf.
        """
        raw_V = logits_V[: self._live_vocab]
        scores_V = self._processed(raw_V) if self._processes else raw_V
        token = int(scores_V.argmax())
        _check_peak(float(scores_V[token]), position)
        if not self._params.greedy:
            token = self._draw(scores_V, scores_V[token], position)
        return Pick(token, *self._logprobs(raw_V, token))

    def commit(self, token: int) -> None:
        """Records that ``token`` was emitted."""
        self._emitted += 1
        self._tail.append(token)
        for counts in (self._seen, self._output):
            if counts is not None:
                counts.add(token)

    def _processed(self, raw_V: Array) -> Array:
        """Bias, masks and penalties on a working copy, float32 as in vLLM."""
        scores_V = self._workspace.scores_V
        np.copyto(scores_V, raw_V)
        scores_V[self._bias_ids] += self._biases
        if self._masks_stops:
            scores_V[self._stop_ids] = -np.inf
        scores_V[self._banned_ids] = -np.inf
        tail = tuple(self._tail)
        for head, last in self._bad_words:
            if tail[-len(head) :] == head:
                scores_V[last] = -np.inf
        self._penalise(scores_V)
        return scores_V

    def _penalise(self, scores_V: Array) -> None:
        p = self._params
        if self._seen is not None:
            seen = scores_V[self._seen.ids]
            penalty = np.float32(p.repetition_penalty)
            scores_V[self._seen.ids] = np.where(seen > 0, seen / penalty, seen * penalty)
        if self._output is not None:
            scores_V[self._output.ids] -= np.float32(p.frequency_penalty) * self._output.counts
            scores_V[self._output.ids] -= np.float32(p.presence_penalty)

    def _draw(self, scores_V: Array, peak: np.float32, position: int) -> int:
        """Temperature and filters, then the inverse CDF in id order. Each filter yields indices into the one before."""
        p, scores, kept = self._params, scores_V, []
        if 0 < p.top_k < len(scores):
            kept.append(_top(scores, p.top_k, np.partition(scores, -p.top_k)[-p.top_k]))
            scores = scores[kept[-1]]
        weights = _weights(scores, peak, p.temperature, self._workspace.weights_V[: len(scores)])
        if p.min_p > 0:
            kept.append(np.flatnonzero(weights >= p.min_p))
            scores, weights = scores[kept[-1]], weights[kept[-1]]
        if p.top_p < 1:
            kept.append(_nucleus(scores, weights, p.top_p))
            weights = weights[kept[-1]]
        token = _invert(weights, uniform(self._key, position), self._workspace.sums_V[: len(weights)])
        for indices in reversed(kept):
            token = int(indices[token])
        return token

    def _logprobs(self, raw_V: Array, token: int) -> tuple[float | None, tuple[tuple[int, float], ...] | None]:
        count = self._params.logprobs
        if count is None:
            return None, None
        peak = raw_V.max()
        log_sum = float(peak) + float(np.log(_weights(raw_V, peak, 1.0, self._workspace.weights_V).sum()))
        top = _ranked(raw_V, min(count, len(raw_V)))
        return float(raw_V[token]) - log_sum, tuple((int(i), float(raw_V[i]) - log_sum) for i in top)


def uniform(key: Array, position: int) -> float:
    """The request's random number for one absolute position: float64 in [0, 1), from 53 bits of Philox 4x64.

    key: uint64 [2], (seed, sample index). The position is the counter's second word, so it depends on nothing else.
    """
    bits = np.random.Philox(key=key, counter=np.array([0, position, 0, 0], np.uint64)).random_raw()
    return (int(bits) >> 11) * 2.0**-53


def _check_peak(peak: float, position: int) -> None:
    if peak == -np.inf:
        raise UserError(
            f"position {position}: logit_bias, bad_words and min_tokens ban every token; loosen one of them"
        )
    if not np.isfinite(peak):
        raise UserError(
            f"position {position}: the logits hold {peak}; a dtype that overflows (float16) gives such values"
        )


def _weights(scores: Array, peak: np.float32, temperature: float, out: Array) -> Array:
    """exp((scores - peak) / temperature) in float64: the softmax without its denominator, 1 at the peak."""
    np.subtract(scores, np.float64(peak), out=out)
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature: -inf, hence weight 0, is the right limit
        np.divide(out, temperature, out=out)
        return np.exp(out, out=out)


def _top(scores: Array, count: int, cutoff: np.float32) -> Array:
    """Indices, ascending, of the ``count`` largest scores; ``cutoff`` is the smallest of them, lowest ids first."""
    keep = scores > cutoff
    ties = np.flatnonzero(scores == cutoff)
    keep[ties[: count - np.count_nonzero(keep)]] = True
    return np.flatnonzero(keep)


def _ranked(scores: Array, count: int) -> Array:
    """Indices of the ``count`` largest scores, largest first, the lowest index first on ties."""
    if count == 0:
        return np.empty(0, np.int64)
    indices = _top(scores, count, np.partition(scores, -count)[-count])
    return indices[np.argsort(-scores[indices], kind="stable")]


def _nucleus(scores: Array, weights: Array, top_p: float) -> Array:
    """Indices, ascending, of the smallest head of the ranking whose weight is at least ``top_p`` of the total.

    What lies below the threshold sums to less than half of 1 - top_p of the total, so the nucleus ends above it.
    """
    total = weights.sum()
    wide = np.flatnonzero(weights >= 0.5 * (1 - top_p) * total / len(weights))
    candidates = scores.take(wide)
    return wide[_top(candidates, *_head(candidates, weights.take(wide), top_p * total))]


def _head(scores: Array, weights: Array, mass: float) -> tuple[int, np.float32]:
    """How many of the largest scores it takes to weigh at least ``mass``, and the smallest of these scores.

    Halves the range of scores, keeping the half where the head ends, until little is left to sort.
    """
    count = 0
    while len(scores) > _SORTED_AT_ONCE and (low := scores.min()) < (high := scores.max()):
        upper = scores > min(low / 2 + high / 2, np.nextafter(high, low))
        kept = np.flatnonzero(upper)
        upper_mass = float(weights.take(kept).sum())
        if upper_mass < mass:
            count, mass, kept = count + len(kept), mass - upper_mass, np.flatnonzero(~upper)
        scores, weights = scores.take(kept), weights.take(kept)
    order = np.argsort(-scores, kind="stable")
    last = min(int(np.searchsorted(np.cumsum(weights[order]), mass)), len(order) - 1)
    return count + last + 1, scores[order[last]]


def _invert(weights: Array, u: float, sums: Array) -> int:
    """The first index whose cumulative weight exceeds u times the total: never one of weight zero."""
    np.cumsum(weights, out=sums)
    return int(np.searchsorted(sums, min(u * sums[-1], np.nextafter(sums[-1], 0)), side="right"))
