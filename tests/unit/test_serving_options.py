"""Tensors of a request as what the loop runs: all are honoured, or refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake import drafter_spec, make_bundle

from dflow_trt.errors import UserError
from dflow_trt.method.sampling import SamplingParams
from dflow_trt.serving import tensors as t
from dflow_trt.serving.options import Ask, StrategyChooser, read_ask
from dflow_trt.serving.responses import DTYPES

TENSORS = {tensor.name: tensor for tensor in t.DFLOW.inputs}
BUNDLE = make_bundle([drafter_spec("flow", 8, "after_rejection"), drafter_spec("flash", 5, None)])


def read(parameters: dict[str, Any] | None = None, **values: Any) -> Ask:
    """A request with these tensors, as Triton gives them."""
    given = {"input_ids": [1, 2], "max_tokens": 9, **values}
    arrays = {}
    for name, value in given.items():
        items = value if isinstance(value, list) else [value]
        items = [item.encode() if isinstance(item, str) else item for item in items]
        arrays[name] = np.array([items], DTYPES[TENSORS[name].type])
    return read_ask(arrays, parameters or {}, None)


def test_what_is_not_sent_has_the_defaults_of_the_python_api() -> None:
    ask = read()
    assert ask == Ask([1, 2], SamplingParams(max_tokens=9), None, None, False, None, "", "")
    assert all(type(token) is int for token in ask.prompt_ids)


VALUES: dict[str, tuple[Any, Any]] = {
    "temperature": (0.7, 0.7),
    "top_k": (5, 5),
    "top_p": (0.9, 0.9),
    "min_p": (0.05, 0.05),
    "seed": (2**64 - 1, 2**64 - 1),
    "min_tokens": (3, 3),
    "repetition_penalty": (1.1, 1.1),
    "presence_penalty": (-0.3, -0.3),
    "frequency_penalty": (0.3, 0.3),
    "ignore_eos": (True, True),
    "stop_token_ids": ([4, 5], (4, 5)),
}


def test_every_sampling_tensor_is_a_field() -> None:
    assert set(VALUES) == {tensor.name for tensor in t.SAMPLING}


@pytest.mark.parametrize("name", VALUES)
def test_sampling_fields_are_read_exactly(name: str) -> None:
    """A float32 does not turn 0.7 into 0.699999988: the same seed gives the same text everywhere."""
    sent, wanted = VALUES[name]
    assert getattr(read(**{name: sent}).params, name) == wanted


def test_a_temperature_that_is_0_as_a_float32_is_greedy() -> None:
    assert read(temperature=1e-50).params.greedy
    assert read(temperature=1e-40).params.temperature == 1e-40


def test_the_other_options() -> None:
    ask = read(
        {"task": "sums", "id": "mine"},
        stream=True,
        strategy="flow",
        draft_tokens=3,
        timeout_ms=1500,
        prefix="before",
        num_return_sequences=4,
        stop_words=["", "end"],
        bad_words=["bad"],
        logit_bias_ids=[3, 4, 3],
        logit_bias_values=[1.0, float("-inf"), 0.5],
    )
    assert (ask.stream, ask.strategy, ask.draft_tokens, ask.timeout) == (True, "flow", 3, 1.5)
    assert (ask.task, ask.prefix) == ("sums", "before")
    assert (ask.params.n, ask.params.stop, ask.params.bad_words) == (4, ("end",), ("bad",))
    assert ask.params.logit_bias == {3: 1.5, 4: float("-inf")}


def test_log_probabilities_of_both_kinds() -> None:
    assert read(return_log_probs=True).params.logprobs == 0
    assert read(return_log_probs=True, logprobs=2).params.logprobs == 2
    assert read(return_log_probs=False).params.logprobs is None


def test_an_end_id_takes_the_place_of_the_models() -> None:
    params = read(end_id=7, stop_token_ids=[5]).params
    assert (params.ignore_eos, params.stop_token_ids) == (True, (5, 7))
    assert read(end_id=-1).params.stop_token_ids == ()


def test_biases_of_texts_need_a_tokenizer() -> None:
    with pytest.raises(UserError, match="embedding_bias_words: this bundle has no tokenizer"):
        read(embedding_bias_words=["a"], embedding_bias_weights=[1.0])


def test_what_is_not_offered_is_taken_at_its_neutral_value_alone() -> None:
    for tensor in t.NOT_OFFERED:
        read(**{tensor.name: tensor.neutral})
        other = (not tensor.neutral) if tensor.type == "BOOL" else tensor.neutral + 1  # type: ignore[operator]
        with pytest.raises(UserError, match=f"^{tensor.name} is"):
            read(**{tensor.name: other})


@pytest.mark.parametrize(
    ("message", "values"),
    [
        ("^num_return_sequences is 0", {"num_return_sequences": 0}),
        ("^max_tokens is 0", {"max_tokens": 0}),
        ("^temperature: 2 values", {"temperature": [0.1, 0.2]}),
        ("^stop_words: bytes that are not UTF-8", {"stop_words": [b"\xff"]}),
        ("^timeout_ms is 0", {"timeout_ms": 0}),
        ("^end_id is -2", {"end_id": -2}),
        ("^logit_bias_ids: 1 for 2", {"logit_bias_ids": [1], "logit_bias_values": [1.0, 2.0]}),
    ],
)
def test_refusals_name_the_tensor(message: str, values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=message):
        read(**values)


def test_parameters_that_are_no_options() -> None:
    with pytest.raises(UserError, match=r"^temperatur: no such option"):
        read({"temperatur": 1.0})
    with pytest.raises(UserError, match=r"^task is 3"):
        read({"task": 3})


# -- shares of traffic -------------------------------------------------------------------------------------------------


def test_shares_are_kept_and_repeat_themselves() -> None:
    chosen = [chooser_names(400) for _ in range(2)]
    assert chosen[0] == chosen[1]
    counts = {name: chosen[0].count(name) for name in set(chosen[0])}
    assert set(counts) == {"flash", "ar", "flow"}
    assert counts["ar"] == pytest.approx(400 * 0.25, rel=0.3)
    assert counts["flash"] == pytest.approx(400 * 0.05, rel=0.6)
    runs = [name == "ar" for name in chosen[0]]
    assert runs[:100] != sorted(runs[:100]), "mixed, not in blocks"


def chooser_names(count: int) -> list[str]:
    chooser = StrategyChooser(BUNDLE, None, {"flash": 0.05, "ar": 0.25})
    return [chooser.choose(None).name for _ in range(count)]


def test_a_request_that_names_a_strategy_gets_it_and_counts_in_no_share() -> None:
    plain, mixed = (StrategyChooser(BUNDLE, "flash", {"ar": 0.5}) for _ in range(2))
    expected = [plain.choose(None).name for _ in range(50)]
    found = []
    for _ in range(50):
        assert mixed.choose("flow").name == "flow"
        found.append(mixed.choose(None).name)
    assert found == expected
    assert set(expected) == {"ar", "flash"}


@pytest.mark.parametrize(
    ("default", "shares"), [("nope", {}), (None, {"nope": 0.1}), (None, {"ar": 1.5}), (None, {"ar": 0.6, "flow": 0.6})]
)
def test_shares_that_are_none(default: str | None, shares: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"^strategy"):
        StrategyChooser(BUNDLE, default, shares)
