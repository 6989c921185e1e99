"""Figures from timelines, against numpy and against what can be worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_cases import DRAFTED, PLAIN, run, trace

from dflow_trt.profiling import metrics
from dflow_trt.profiling.measure import Run, Step, Trace
from dflow_trt.profiling.record import PERCENTILES, Turn

TIMES = st.floats(0, 1e6, allow_nan=False)
ROUNDS = st.lists(st.integers(0, 15).flatmap(lambda made: st.tuples(st.just(made), st.integers(0, made))), max_size=12)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    rounds = draw(ROUNDS)
    gaps = draw(st.lists(st.floats(1e-4, 10), min_size=len(rounds) + 1, max_size=len(rounds) + 1))
    arrival = draw(st.floats(0, 100))
    return trace([arrival + time for time in np.cumsum(gaps).tolist()], rounds, arrival)


# -- percentiles -------------------------------------------------------------------------------------------------------


def test_samples_that_a_percentile_needs() -> None:
    assert [metrics.needed(which) for which in PERCENTILES] == [6, 29, 59, 299]


@pytest.mark.parametrize("percent", [50, 90, 95, 99])
def test_fewer_would_not_bracket_it_often_enough(percent: int) -> None:
    """The least and the greatest of n samples lie on either side of a percentile with 95 %, from n on and no sooner."""
    share, n = percent / 100, metrics.needed(percent)

    def missed(count: int) -> float:
        return float(share**count + (1 - share) ** count)

    assert missed(n) <= 0.05 < missed(n - 1)


def interpolated(values: Sequence[float], percent: float) -> float:
    """By the definition: between the two order statistics around (n - 1) q."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@given(st.lists(TIMES, max_size=400))
def test_percentiles_are_told_where_there_are_samples_enough(values: list[float]) -> None:
    found = metrics.distribution(values)
    assert found.n == len(values)
    for percent in PERCENTILES:
        value = found.percentile(percent)
        if len(values) < metrics.needed(percent):
            assert value is None
        else:
            assert value == pytest.approx(interpolated(values, percent), abs=1e-6)
    if values:
        assert (found.curve[0], found.curve[-1]) == (min(values), max(values))
        assert found.curve == sorted(found.curve)
        assert found.mean == pytest.approx(np.mean(values))
    else:
        assert (found.mean, found.curve) == (None, [])


# -- timelines ---------------------------------------------------------------------------------------------------------


def test_tokens_that_come_together_share_the_gap() -> None:
    one = trace([2.0, 5.0, 6.0], [(7, 2), (7, 0)], arrival=1.0)
    assert metrics.ttft(one) == 1.0
    assert metrics.gaps(one) == [(3.0, 3), (1.0, 1)]
    assert metrics.token_gaps(one) == [1.0, 1.0, 1.0, 1.0]
    assert metrics.tpot(one) == 1.0  # four tokens after the first, in four seconds
    found = metrics.latency([one])
    assert (found.itl.n, found.itl.mean) == (4, 1000.0)
    assert (found.round_gap.n, found.round_gap.mean) == (2, 2000.0)
    assert found.request.mean == 5000.0


@given(traces())
def test_the_mean_of_token_gaps_is_the_time_a_token(one: Trace) -> None:
    per_token, spread = metrics.tpot(one), metrics.token_gaps(one)
    assert len(spread) == one.tokens - 1
    if per_token is None:
        assert not spread
    else:
        assert per_token == pytest.approx(np.mean(spread), rel=1e-6)
        end = one.ticks[-1].time - one.arrival
        first = metrics.ttft(one)
        assert first is not None
        assert first + sum(spread) == pytest.approx(end, rel=1e-6)


def test_a_request_that_gave_nothing_has_no_times() -> None:
    empty = trace([], [])
    assert (metrics.ttft(empty), metrics.tpot(empty), metrics.gaps(empty)) == (None, None, [])
    found = metrics.latency([empty])
    assert {each.n for each in (found.ttft, found.tpot, found.itl, found.round_gap, found.request)} == {0}


# -- acceptance --------------------------------------------------------------------------------------------------------


def test_counts_by_position() -> None:
    found = metrics.total([trace([0, 1, 2, 3], [(3, 3), (3, 1), (2, 0)])])
    assert (found.rounds, found.drafted, found.accepted, found.emitted) == (3, 8, 4, 7)
    assert found.drafted_at == [3, 3, 2]
    assert found.accepted_at == [2, 1, 1]
    assert found.reached_at == [3, 2, 1]
    assert metrics.survival(found) == [2 / 3, 1 / 3, 1 / 3]
    assert (found.tau_accepted, found.tau_emitted, found.wasted) == (4 / 3, 7 / 3, 1 / 2)


@given(st.lists(traces(), max_size=5))
def test_counts_add_up(found: list[Trace]) -> None:
    total = metrics.total(found)
    rounds = [tick for one in found for tick in one.rounds]
    assert (sum(total.drafted_at), sum(total.accepted_at)) == (total.drafted, total.accepted)
    for i, count in enumerate(total.reached_at):
        assert count == sum((tick.drafted or 0) > i and tick.accepted >= i for tick in rounds)
    assert all(0 <= share <= 1 for share in metrics.survival(total))
    assert sum(metrics.survival(total)) == pytest.approx(total.tau_accepted or 0)
    if rounds:
        assert total.tau_emitted == pytest.approx((total.tau_accepted or 0) + 1)


@pytest.mark.parametrize("found", [[], [trace([], [])], [trace([1.0], [])], [trace([0, 1], [(0, 0)])]])
def test_nothing_drafted_divides_nothing(found: list[Trace]) -> None:
    total = metrics.total(found)
    assert total.wasted is None
    assert metrics.survival(total) == []
    assert total.tau_accepted == (0.0 if total.rounds else None)


def test_zero_accepted_is_a_figure() -> None:
    total = metrics.total([trace([0, 1], [(7, 0)])])
    assert (total.tau_accepted, total.tau_emitted, total.wasted) == (0.0, 1.0, 1.0)
    assert metrics.survival(total) == [0.0] * 7


def test_what_a_server_does_not_say_is_not_known() -> None:
    total = metrics.total([trace([0, 1, 2], [(None, 2), (None, 0)])])
    assert (total.drafted, total.wasted, total.drafted_at, total.reached_at) == (None, None, [], [])
    assert (total.tau_accepted, total.tau_emitted) == (1.0, 2.0)


def test_tasks_are_told_apart() -> None:
    found = metrics.by_task([trace([0, 1], [(7, 7)], task="b"), trace([0, 1], [(7, 0)], task="a")])
    assert [(each.task, each.tau_accepted) for each in found] == [("a", 0.0), ("b", 7.0)]


# -- speed -------------------------------------------------------------------------------------------------------------


def steps(count: int, milliseconds: dict[str, float], rounds: int = 1, tokens: int = 4) -> list[Step]:
    return [Step(i, i + 0.5, rounds, tokens, milliseconds) for i in range(count)]


def test_throughput_counts_emitted_tokens_alone() -> None:
    one = run(DRAFTED, [trace([1, 2], [(7, 3)])], seconds=2.0, cpu=4.0, steps=steps(2, {"verify": 1.0}))
    found = metrics.throughput([one])
    assert (found.output_tokens, found.tokens_per_second, found.tokens_per_cpu_second) == (5, 2.5, 1.25)
    assert (found.requests_per_second, found.mean_batch) == (0.5, 1.0)
    assert found.decode_tokens_per_second == 8.0  # four tokens in half a second


def test_decode_rate_is_of_full_steps_without_prefill() -> None:
    mixed = steps(3, {"verify": 1.0, "prefill": 1.0}, tokens=100)
    alone, half = steps(2, {"verify": 1.0}, rounds=2), steps(5, {"verify": 1.0}, rounds=1)
    full = DRAFTED.model_copy(update={"concurrency": 2})
    assert metrics.decode_rate([run(full, [], 9.0, steps=[*mixed, *alone, *half])]) == 8.0
    assert metrics.decode_rate([run(full, [], 9.0, steps=half)]) is None


def test_a_turn_without_time_or_tokens_is_no_rate() -> None:
    found = metrics.throughput([run(PLAIN, [], 0.0)])
    assert (found.tokens_per_second, found.requests_per_second, found.mean_batch) == (None, None, None)


def test_goodput_needs_both_bounds_met() -> None:
    quick, slow = trace([0.1, 0.2], [(7, 0)]), trace([0.1, 2.0], [(7, 0)])
    late, short, nothing = trace([1.0, 1.1], [(7, 0)]), trace([0.1], []), trace([], [])
    found = metrics.goodput([run(DRAFTED, [quick, slow, late, short, nothing], 2.0)], 500, 500)
    assert found is not None
    assert (found.requests, found.share, found.requests_per_second, found.tokens_per_second) == (2, 0.4, 1.0, 1.5)
    assert metrics.goodput([], None, None) is None
    one_bound = metrics.goodput([run(DRAFTED, [quick, slow, late], 2.0)], 500, None)
    assert one_bound is not None
    assert one_bound.requests == 2


def test_stages_are_of_steps_that_decode_alone() -> None:
    found = metrics.stages(
        [run(DRAFTED, [], 1.0, steps=[*steps(1, {"drafter": 2.0, "host": 1.0}), *steps(1, {"prefill": 9.0})])]
    )
    assert found is not None
    assert (found.rounds, found.milliseconds, found.total) == (1, {"draft": 2.0, "host": 1.0}, 3.0)
    assert found.relay_share is None
    relayed = metrics.stages([run(DRAFTED, [], 1.0, steps=steps(2, {"relay": 1.0, "verify": 4.0}))])
    assert relayed is not None
    assert relayed.relay_share == 0.2
    assert metrics.stages([run(DRAFTED, [], 1.0, steps=steps(3, {"prefill": 1.0}))]) is None


# -- comparisons -------------------------------------------------------------------------------------------------------


def turn(number: int, seconds: float, tokens: int = 100, cpu: float | None = None) -> Turn:
    return Turn(repetition=0, number=number, requests=1, tokens=tokens, seconds=seconds, cpu_seconds=cpu)


def test_speed_up_is_of_the_turns_that_both_have() -> None:
    base = [turn(i, 2.0, cpu=1.0) for i in range(8)]
    found = metrics.speedup(base, [turn(i, 1.0, cpu=2.0) for i in range(7)] + [turn(99, 50.0, cpu=1.0)])
    assert found is not None
    wall, cpu = found
    assert (wall.value, wall.low, wall.high, wall.pairs) == (2.0, 2.0, 2.0, 7)
    assert cpu is not None
    assert cpu.value == 0.5


def test_pairs_cancel_what_slows_both_down() -> None:
    """One half of the turns ran on a machine ten times slower: the pairs still all say two."""
    slow = [10.0 if i % 2 else 1.0 for i in range(20)]
    base = np.array([(100, 2 * each) for each in slow])
    ours = np.array([(100, each) for each in slow])
    columns = ours[:, 0], ours[:, 1], base[:, 0], base[:, 1]
    paired = metrics.paired_interval(*columns)
    assert (paired.low, paired.high) == (pytest.approx(2), pytest.approx(2))
    unpaired = metrics.unpaired_interval(*columns)
    assert unpaired.low is not None
    assert unpaired.high is not None
    assert unpaired.low < 1.5 < 2.5 < unpaired.high


@given(st.floats(0.2, 5), st.integers(0, 1000))
def test_intervals_hold_the_ratio(true: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    seconds = rng.uniform(0.9, 1.1, 30)
    base = np.array([(100, each * true) for each in seconds * rng.uniform(0.99, 1.01, 30)])
    found = metrics.paired_interval(np.full(30, 100.0), seconds, base[:, 0], base[:, 1])
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.value <= found.high
    assert found.value == pytest.approx(true, rel=0.02)


def test_few_pairs_give_a_ratio_without_an_interval() -> None:
    found = metrics.speedup([turn(i, 2.0) for i in range(5)], [turn(i, 1.0) for i in range(5)])
    assert found is not None
    assert (found[0].value, found[0].low, found[0].high) == (2.0, None, None)
    assert found[1] is None, "processor time is not known"


@pytest.mark.parametrize("ours", [[], [turn(0, 1.0, tokens=0)], [turn(0, 0.0)], [turn(1, 1.0)]])
def test_nothing_to_pair(ours: list[Turn]) -> None:
    assert metrics.speedup([turn(0, 1.0)], ours) is None


def test_decode_speed_up() -> None:
    def of(point: Run) -> list[Run]:
        return [point]

    base = of(run(PLAIN, [trace([1, 2], [(0, 0)])], 1.0, steps=steps(2, {"verify": 1.0}, tokens=1)))
    ours = of(run(DRAFTED, [trace([1, 2], [(7, 3)])], 1.0, steps=steps(2, {"verify": 1.0}, tokens=4)))
    found = metrics.speedups(base, ours)
    assert found is not None
    assert found.decode == 4.0
