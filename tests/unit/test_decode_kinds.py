"""Draft models and prompt lookup in the decoder, on the scripted runtime: no schedule changes a token or a draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from fake import Script, draft_model_spec, drafter_spec, make_bundle
from hypothesis import given, settings
from hypothesis import strategies as st
from lookup import by_definition
from test_decode import (
    BUILDS,
    TOY,
    Bench,
    Plan,
    Turn,
    check_schedule,
    check_turns,
    plans_of,
    prompt,
    toy_tokens,
    turns_of,
)

from dflow_trt.method.policy import Candidate, FixedLength
from dflow_trt.spec import NgramSpec

SPECS = (
    drafter_spec("flow", 6, "after_rejection"),
    draft_model_spec("small", 5),
    draft_model_spec("narrow", 3, heads_per_group=1),
    NgramSpec("lookup", None, 1, 3, 7),
)
SCRIPTS = {"flow": Script("mixed", 75, 1), "small": Script("mixed", 70, 2), "narrow": Script("mixed", 50, 3)}
STRATEGIES = ("ar", "flow", "small", "small", "narrow", "lookup")


def make_bench(scripts: dict[str, Script] = SCRIPTS, **build: Any) -> Bench:
    return Bench(make_bundle(SPECS, **build), scripts)


@settings(max_examples=150, deadline=None)
@given(plans_of(STRATEGIES), BUILDS, st.integers(0, 2**32))
def test_no_schedule_changes_a_token_or_a_draft(plans: list[Plan], build: dict[str, Any], seed: int) -> None:
    """Arrivals, lengths, kinds of drafters, cancels in any phase, holds, shorter verifies, chunk budgets, all mixed."""
    check_schedule(make_bench(**build), plans, seed)


@settings(max_examples=100, deadline=None)
@given(turns_of(STRATEGIES), st.integers(1, 4), st.sampled_from(["fixed", "adaptive"]))
def test_shared_beginnings_in_any_order_change_no_token(turns: list[Turn], slots: int, policy: Any) -> None:
    check_turns(make_bench(max_batch_size=slots, max_num_tokens=60, eos_ids=()), turns, policy)


class Turns(FixedLength):
    """So many rounds with drafts for some of the requests, so many for others, and so on from the beginning."""

    def __init__(self, turns: Sequence[tuple[int, Sequence[bool]]]) -> None:
        self._rounds, self._round = [on for length, on in turns for _ in range(length)], 0

    def lengths(self, requests: Sequence[Candidate | None]) -> list[int]:
        on = self._rounds[self._round % len(self._rounds)]
        self._round += 1
        return super().lengths([each if on[i % len(on)] else None for i, each in enumerate(requests)])


ON = st.lists(st.booleans(), min_size=1, max_size=4)
ROUNDS = st.lists(st.tuples(st.integers(1, 25), ON), min_size=1, max_size=6)


@settings(max_examples=80, deadline=None)
@given(ROUNDS, st.lists(st.sampled_from(STRATEGIES), min_size=1, max_size=5), st.integers(1, 60))
def test_rounds_without_drafts_change_no_draft_of_later_ones(
    rounds: list[tuple[int, list[bool]]], strategies: list[str], length: int
) -> None:
    """What a model did not read in the meantime it reads when it drafts again: whatever it says follows from all."""
    bench = make_bench(max_batch_size=3, max_num_tokens=24, eos_ids=())
    bench.decoder._policy = Turns(rounds)
    requests = [
        bench.request(prompt(i, length + i), strategy, id=str(i), max_tokens=60)
        for i, strategy in enumerate(strategies)
    ]
    bench.run(*requests)
    for request in requests:
        spec = bench.bundle.drafters[request.strategy.drafter].spec if request.strategy.drafter else None
        tokens = [*request.prompt_ids, *bench.tokens[request.id]]
        assert bench.tokens[request.id] == toy_tokens(request.prompt_ids, 60)
        for position, (_, *drafts) in bench.blocks(request):
            known = tokens[: position + 1]
            if isinstance(spec, NgramSpec) and drafts:
                assert drafts == by_definition(known, 1, 3, len(drafts))
            elif spec is not None and spec.kind == "draft-model":
                assert drafts == spoken(request.strategy.name, known, len(drafts))


def spoken(name: str, tokens: Sequence[int], count: int) -> list[int]:
    text = list(tokens)
    for _ in range(count):
        text.append(SCRIPTS[name].speaks(TOY, text))
    return text[len(tokens) :]


@pytest.mark.parametrize("strategy", ["small", "narrow", "lookup"])
def test_a_request_alone_gives_the_method_round_by_round(strategy: str) -> None:
    for length in (1, 5, 16, 17, 50):
        bench = make_bench()
        request = bench.request(prompt(length % 60, length), strategy, max_tokens=40)
        bench.run(request)
        bench.check(request)


def test_a_model_that_is_always_right_takes_as_few_rounds_as_it_can() -> None:
    bench = make_bench({**SCRIPTS, "small": Script("self")})
    request = bench.request(prompt(3, 9), "small", max_tokens=1 + 6 * 6)
    assert bench.run(request) == [toy_tokens(request.prompt_ids, 37)]
    stats = bench.last[request.id].stats
    assert (stats.rounds, stats.drafted, stats.accepted) == (6, 30, 30)
    assert bench.runtime.calls.count("drafter") == 1 + 6 * 5, "the prompt, and a step a draft"


def test_lookup_calls_no_engine_but_the_target() -> None:
    bench = make_bench()
    request = bench.request([5, 6, 7, 5, 6, 7, 5, 6], "lookup", max_tokens=30)
    bench.run(request)
    bench.check(request)
    assert set(bench.runtime.calls) == {"target"}
    assert bench.last[request.id].stats.drafted > 0


@pytest.mark.parametrize(("strategy", "kept"), [("small", 10), ("lookup", 11)])
def test_a_next_turn_goes_on_from_what_was_read(strategy: str, kept: int) -> None:
    """Eleven of twelve tokens are in the target's cache; the last draft, being right, is in no model's."""
    bench = make_bench({**SCRIPTS, "small": Script("self")}, eos_ids=())
    [output] = bench.run(bench.request(prompt(7, 40), strategy, max_tokens=12))
    request = bench.request([*prompt(7, 40), *output, *prompt(9, 20)], strategy, max_tokens=15)
    bench.runtime.target_calls.clear()
    bench.run(request)
    bench.check(request)
    assert bench.last[request.id].stats.reused_tokens == 40 + kept


def test_rows_are_reused_only_with_the_model_that_read_them() -> None:
    bench, ids = make_bench(eos_ids=(), max_batch_size=1), prompt(7, 40)

    def reused(strategy: str) -> int:
        request = bench.request(ids, strategy, max_tokens=4)
        bench.run(request)
        assert bench.tokens[request.id] == toy_tokens(ids, 4)
        return bench.last[request.id].stats.reused_tokens

    order = ["small", "small", "lookup", "small", "narrow", "narrow", "ar", "narrow", "flow", "lookup"]
    assert [reused(name) for name in order] == [0, 39, 39, 0, 0, 39, 39, 0, 0, 39]
