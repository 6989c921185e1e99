"""Draft lengths: they follow what is accepted and what rounds cost, and they do not flap."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow_trt.errors import UserError
from dflow_trt.method.policy import (
    HOPE,
    KNEE,
    PRIOR_ROUNDS,
    Acceptance,
    AdaptiveLength,
    Candidate,
    FixedLength,
    LineCost,
    check_policy,
    draft_load,
    make_policy,
)

K = 15
Cost = Callable[[int], float]


def memory_bound(rows: int) -> float:
    return 35 + 0.1 * rows


def compute_bound(rows: int) -> float:
    return 1.0 * rows


def play(
    policy: FixedLength,
    requests: list[Candidate],
    chance: float,
    cost: Cost,
    rounds: int,
    draft: float = 7.0,
    rng: np.random.Generator | None = None,
) -> list[list[int]]:
    """Rounds of a batch whose drafts are each accepted with one chance; gives the lengths of each round."""
    rng, chosen = rng or np.random.default_rng(0), []
    for _ in range(rounds):
        lengths = policy.lengths(list(requests))
        rows = len(requests) * (max(lengths) + 1)
        for request, length in zip(requests, lengths, strict=True):
            wrong = np.flatnonzero(rng.random(length) >= chance)
            policy.accepted(request, length, int(wrong[0]) if len(wrong) else length)
        policy.timed(rows, cost(rows), draft_load(requests, lengths), draft if max(lengths) else 0.0)
        chosen.append(lengths)
    return chosen


def batch(count: int) -> list[Candidate]:
    return [Candidate("dflow", K, Acceptance()) for _ in range(count)]


def test_fixed_lengths_are_the_limits() -> None:
    policy = make_policy("fixed")
    assert policy.lengths([Candidate("a", 3, Acceptance()), None, Candidate("b", 7, Acceptance())]) == [3, 0, 7]
    assert play(policy, batch(2), 0.0, compute_bound, 3) == [[K, K]] * 3


def test_good_drafts_on_a_memory_bound_target_keep_their_whole_length() -> None:
    chosen = play(AdaptiveLength(), batch(1), 0.95, memory_bound, 200)
    assert np.mean([lengths[0] for lengths in chosen[20:]]) > 0.9 * K


def test_drafts_that_are_never_right_end_in_plain_decoding_with_a_rare_try() -> None:
    chosen = play(AdaptiveLength(), batch(1), 0.0, memory_bound, 600)
    tries = [lengths[0] > 0 for lengths in chosen]
    assert sum(tries[:60]) > 0
    assert 0 < sum(tries[100:]) < 0.1 * len(tries[100:]), "hope returns, now and then"


def test_drafting_comes_back_when_drafts_are_right_again() -> None:
    policy, requests, rng = AdaptiveLength(), batch(1), np.random.default_rng(1)
    play(policy, requests, 0.0, memory_bound, 200, rng=rng)
    chosen = play(policy, requests, 0.95, memory_bound, 300, rng=rng)
    assert np.mean([lengths[0] for lengths in chosen[-100:]]) > 0.8 * K


def test_a_large_batch_on_a_compute_bound_target_drafts_less_and_a_small_one_again_more() -> None:
    policy = AdaptiveLength()
    cost: Cost = lambda rows: max(35.0, 2.0 * rows)  # noqa: E731
    alone = play(policy, batch(1), 0.7, cost, 150)
    crowd = play(policy, batch(32), 0.7, cost, 150)
    again = play(policy, batch(1), 0.7, cost, 300)
    mean = [np.mean([lengths[0] for lengths in each[-50:]]) for each in (alone, crowd, again)]
    assert mean[0] > 4
    assert mean[1] < 2
    assert mean[2] > 4


def test_lengths_do_not_flap_under_steady_load() -> None:
    chosen = play(AdaptiveLength(), batch(8), 0.6, lambda rows: 35 + 1.5 * rows, 400)
    widths = [max(lengths) for lengths in chosen[100:]]
    assert sum(a != b for a, b in itertools.pairwise(widths)) < 30


def test_it_is_never_far_below_the_better_of_always_and_never() -> None:
    """Tokens a millisecond over a run, against every fixed length with the same drafts."""
    for count, chance, cost in [(1, 0.2, memory_bound), (8, 0.5, compute_bound), (4, 0.9, memory_bound)]:

        def speed(
            policy: FixedLength, limit: int, count: int = count, chance: float = chance, cost: Cost = cost
        ) -> float:
            rng, requests = np.random.default_rng(3), [Candidate("d", limit, Acceptance()) for _ in range(count)]
            tokens = time = 0.0
            for _ in range(400):
                lengths = policy.lengths(list(requests)) if limit else [0] * count
                for request, length in zip(requests, lengths, strict=True):
                    wrong = np.flatnonzero(rng.random(length) >= chance)
                    kept = int(wrong[0]) if len(wrong) else length
                    policy.accepted(request, length, kept)
                    tokens += kept + 1
                rows = count * (max(lengths) + 1)
                time += cost(rows) + (7 if max(lengths) else 0)
                policy.timed(rows, cost(rows), draft_load(requests, lengths), 7.0 if max(lengths) else 0.0)
            return tokens / time

        best = max(speed(FixedLength(), limit) for limit in (0, 1, 2, 4, 8, K))
        assert speed(AdaptiveLength(), K) > 0.85 * best, (count, chance)


def test_a_request_without_drafts_or_near_its_end_stays_within_its_limit() -> None:
    lengths = AdaptiveLength().lengths([None, Candidate("a", 2, Acceptance()), Candidate("a", 9, Acceptance())])
    assert lengths[0] == 0
    assert lengths[1] <= 2
    assert lengths[2] <= 9
    assert AdaptiveLength().lengths([None, None]) == [0, 0]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=40))
def test_rates_are_those_of_a_plain_sum_over_rounds(rounds: list[tuple[int, int]]) -> None:
    acceptance = Acceptance(memory=0.9)
    tried, kept = np.zeros(6), np.zeros(6)
    for age, (drafted, wanted) in enumerate(rounds):
        accepted = min(drafted, wanted)
        acceptance.record(drafted, accepted, 6)
        weight = 0.9 ** (len(rounds) - 1 - age)
        for position in range(drafted):
            tried[position] += weight * (position <= accepted)
            kept[position] += weight * (position < accepted)
    prior = np.full(6, HOPE)
    np.testing.assert_allclose(acceptance.rates(prior), (kept + PRIOR_ROUNDS * prior) / (tried + PRIOR_ROUNDS))


@settings(max_examples=50)
@given(st.floats(0.5, 50), st.floats(0.01, 5), st.integers(0, 1000))
def test_a_line_through_times_is_found(start: float, slope: float, seed: int) -> None:
    cost = LineCost()
    for rows in np.random.default_rng(seed).integers(1, 200, 60).tolist():
        cost.record(rows, start + slope * rows)
    for rows in (1, 50, 150):
        assert cost.at(rows) == pytest.approx(start + slope * rows, rel=0.15, abs=0.1 * cost.milliseconds)


def settle(policy: AdaptiveLength, request: Candidate, step_ms: float, rounds: int = 300) -> int:
    """The length that the policy settles on for one serial request whose drafts are all accepted: 10 ms a target row
    block, ``step_ms`` a draft."""
    length = 0
    for _ in range(rounds):
        length = policy.lengths([request])[0]
        policy.timed(length + 1, 10.0, draft_load([request], [length]), step_ms * length)
        policy.accepted(request, length, length)
    return length


def test_a_serial_drafter_pays_by_the_draft() -> None:
    """Each draft saves a target pass of 10 ms: worth a step of 2 ms, not one of 30, whatever the first rounds were."""
    assert settle(AdaptiveLength(), Candidate("small", 4, Acceptance(), serial=True), step_ms=2.0) == 4
    assert settle(AdaptiveLength(), Candidate("slow", 4, Acceptance(), serial=True), step_ms=30.0) <= 1


def test_the_load_counts_steps_and_rows() -> None:
    block = [Candidate("flow", 7, Acceptance()) for _ in range(3)]
    serial = [Candidate("small", 7, Acceptance(), serial=True) for _ in range(3)]
    assert draft_load(block, [7, 0, 2]) == 2
    assert draft_load(serial, [1, 1, 1]) == draft_load(block, [1, 1, 1]) == 3
    assert draft_load(serial, [4, 1, 0]) == 4 * (KNEE + 2) - KNEE
    assert draft_load([None, *serial], [0, 0, 0, 0]) == 0


def test_drafts_that_cost_nothing_say_nothing_of_those_that_do() -> None:
    policy, free = AdaptiveLength(), [Candidate("ngram", 8, Acceptance(), free=True)]
    assert draft_load(free, [8]) == 0
    policy.timed(9, 10.0, draft_load(free, [8]), 0.0)
    slow = Candidate("slow", 4, Acceptance(), serial=True)
    assert settle(policy, slow, step_ms=30.0) == settle(AdaptiveLength(), slow, step_ms=30.0) <= 1


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="'greedy'; allowed: fixed, adaptive"):
        check_policy("greedy")
