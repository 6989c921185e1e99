"""One request's tensors as what the loop runs. Every input is honoured, or refused by its name."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflow_trt.bundle import Bundle, Strategy
from dflow_trt.errors import UserError
from dflow_trt.method.sampling import SamplingParams
from dflow_trt.serving import tensors as t
from dflow_trt.text import Tokenizer

Array = np.ndarray[Any, np.dtype[Any]]
Values = Mapping[str, Array]
"""Input tensors by name, as Triton gives them: [1, ...], texts as bytes."""

MAX_WORDS, MAX_WORD_CHARACTERS = 256, 1024
"""Stop and bad words of one request: each costs time at every token, which the requests beside it pay as well."""
PARAMETERS = (t.TASK_PARAMETER, t.HANDLE_PARAMETER, "id")  # Triton's generate endpoint leaves the id among them
_NAMES = {"n": t.NUM_SEQUENCES.name, "stop": t.STOP_WORDS.name}  # fields of SamplingParams whose tensors differ


@dataclass(frozen=True)
class Ask:
    """What a request asks for. timeout: seconds from its arrival, or None. strategy: None where it names none.

    prefix: comes before the text of each sequence.
    """

    prompt_ids: list[int]
    params: SamplingParams
    strategy: str | None
    draft_tokens: int | None
    stream: bool
    timeout: float | None
    task: str
    prefix: str


def read_ask(values: Values, parameters: Mapping[str, Any], tokenizer: Tokenizer | None) -> Ask:
    """The request in these tensors. UserError names the tensor or parameter at fault."""
    _refuse_what_is_not_offered(values)
    params = _sampling(values, tokenizer)
    check_words(params)
    return Ask(
        prompt_ids=_items(values, t.INPUT_IDS),
        params=params,
        strategy=one(values, t.STRATEGY) or None,
        draft_tokens=one(values, t.DRAFT_TOKENS),
        stream=bool(one(values, t.STREAM)),
        timeout=_timeout(one(values, t.TIMEOUT_MS)),
        task=read_task(parameters),
        prefix=one(values, t.PREFIX) or "",
    )


def check_words(params: SamplingParams) -> None:
    """UserError for more or longer stop and bad words than one request may have."""
    for name, given in (("stop", params.stop), ("bad_words", params.bad_words)):
        words = [given] if isinstance(given, str) else list(given)
        longest = max(map(len, words), default=0)
        if len(words) > MAX_WORDS or longest > MAX_WORD_CHARACTERS:
            raise UserError(
                f"{name}: {len(words)} texts, the longest of {longest} characters; allowed: {MAX_WORDS} texts of up to "
                f"{MAX_WORD_CHARACTERS}"
            )


def check_length(tokenizer: Tokenizer, text: str, limit: int) -> None:
    """UserError, without encoding it, for a text that must have more tokens than a bundle takes."""
    least = tokenizer.least_tokens(text)
    if least > limit:
        raise UserError(f"the prompt has {least} tokens or more, this server takes {limit}; shorten it")


def one(values: Values, tensor: t.Tensor) -> Any:
    """The single value of a tensor, None where it was not sent."""
    items = _items(values, tensor)
    if tensor.name in values and len(items) != 1:
        raise UserError(f"{tensor.name}: {len(items)} values; allowed: one")
    return items[0] if items else None


def _items(values: Values, tensor: t.Tensor) -> list[Any]:
    """A tensor's values as Python's. A float32 is read as the shortest decimal that gives it: 0.7 is 0.7."""
    array = values.get(tensor.name)
    if array is None:
        return []
    flat = array.reshape(-1)
    if tensor.type == "STRING":
        return [_text(tensor, item) for item in flat]
    return [float(str(item)) for item in flat] if tensor.type == "FP32" else flat.tolist()


def _text(tensor: t.Tensor, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise UserError(f"{tensor.name}: bytes that are not UTF-8; allowed: UTF-8 text") from None


def _refuse_what_is_not_offered(values: Values) -> None:
    for tensor in t.NOT_OFFERED:
        given = one(values, tensor)
        if given is not None and given != tensor.neutral:
            raise UserError(f"{tensor.name} is {given}; allowed: {tensor.neutral}. {tensor.meaning}")


def _sampling(values: Values, tokenizer: Tokenizer | None) -> SamplingParams:
    options = {tensor.name: (_items if tensor.dims == t.ANY else one)(values, tensor) for tensor in t.SAMPLING}
    options["n"], options["max_tokens"] = one(values, t.NUM_SEQUENCES), one(values, t.MAX_TOKENS)
    options["stop"] = _words(values, t.STOP_WORDS)
    options["bad_words"] = _words(values, t.BAD_WORDS)
    options["logit_bias"] = _biases(values, tokenizer) or None
    options["logprobs"] = one(values, t.LOGPROBS)
    if options["logprobs"] is None and one(values, t.RETURN_LOG_PROBS):
        options["logprobs"] = 0
    end_id = one(values, t.END_ID)
    if end_id is not None:
        options |= {"ignore_eos": True, "stop_token_ids": [*options["stop_token_ids"], *_end_ids(end_id)]}
    try:
        return SamplingParams.from_dict(options)
    except UserError as error:
        raise UserError(_by_tensor(str(error))) from None


def _words(values: Values, tensor: t.Tensor) -> list[str]:
    """NVIDIA's clients send one empty text for none."""
    return [text for text in _items(values, tensor) if text]


def _end_ids(end_id: int) -> list[int]:
    if end_id < -1:
        raise UserError(f"{t.END_ID.name} is {end_id}; allowed: a token id, or -1 for none")
    return [end_id] if end_id >= 0 else []


def _by_tensor(message: str) -> str:
    """A message of SamplingParams, the field at its beginning by the name of its tensor."""
    field, space, rest = message.partition(" ")
    return _NAMES.get(field, field) + space + rest


def _biases(values: Values, tokenizer: Tokenizer | None) -> dict[int, float]:
    """What is added to logits: by id, and by the tokens of texts."""
    biases: dict[int, float] = {}
    for token, bias in _pairs(values, t.LOGIT_BIAS_IDS, t.LOGIT_BIAS_VALUES):
        biases[token] = biases.get(token, 0.0) + bias
    for text, bias in _pairs(values, t.BIAS_WORDS, t.BIAS_WEIGHTS):
        if tokenizer is None:
            raise UserError(f"{t.BIAS_WORDS.name}: this bundle has no tokenizer; use {t.LOGIT_BIAS_IDS.name}")
        for token in tokenizer.encode(text):
            biases[token] = biases.get(token, 0.0) + bias
    return biases


def _pairs(values: Values, keys: t.Tensor, numbers: t.Tensor) -> list[tuple[Any, float]]:
    left, right = _items(values, keys), _items(values, numbers)
    if len(left) != len(right):
        raise UserError(f"{keys.name}: {len(left)} for {len(right)} {numbers.name}; allowed: as many of each")
    return list(zip(left, right, strict=True))


def _timeout(milliseconds: int | None) -> float | None:
    if milliseconds is None:
        return None
    if milliseconds <= 0:
        raise UserError(f"{t.TIMEOUT_MS.name} is {milliseconds}; allowed: 1 or more")
    return milliseconds / 1e3


def read_task(parameters: Mapping[str, Any]) -> str:
    """The label for metrics. UserError for a parameter that is none of ours.

    Triton makes parameters of JSON keys in a generate request that are no inputs: a misspelt option must not pass.
    """
    for name in parameters:
        if name not in PARAMETERS:
            raise UserError(f"{name}: no such option; allowed: the model's inputs, and the parameter {PARAMETERS[0]}")
    task = parameters.get(t.TASK_PARAMETER, "")
    if not isinstance(task, str):
        raise UserError(f"{t.TASK_PARAMETER} is {task!r}; allowed: a text")
    return task


class StrategyChooser:
    """The strategy of each request: what it names, else a share of requests each to ``shares``, else the default.

    default: None is the bundle's own. shares: by name, their sum at most 1. Which request goes where depends on its
    number alone. Raises UserError for a strategy that the bundle lacks, and for shares that are none.
    """

    def __init__(self, bundle: Bundle, default: str | None, shares: Mapping[str, float]) -> None:
        self._bundle, self._default, self._shares = bundle, bundle.strategy(default), shares
        for name, share in shares.items():
            bundle.strategy(name)
            if not 0 <= share <= 1:
                raise UserError(f"strategy share: {name}={share:g}; allowed: 0 to 1")
        if sum(shares.values()) > 1 + 1e-9:
            raise UserError(f"strategy share: together {sum(shares.values()):g}; allowed: at most 1")
        self._numbers = itertools.count()

    def choose(self, named: str | None) -> Strategy:
        """The strategy of the next request."""
        if named is not None:
            return self._bundle.strategy(named)
        point = _point(next(self._numbers))
        for name, share in self._shares.items():
            if point < share:
                return self._bundle.strategy(name)
            point -= share
        return self._default


def _point(number: int) -> float:
    """A number in [0, 1) for each request, without order."""
    digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64
