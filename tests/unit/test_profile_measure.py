"""Requests driven through the scripted runtime on a clock that only the engines move: every time can be worked out."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import fake
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflow_trt import contract as c
from dflow_trt.bundle import Bundle
from dflow_trt.errors import UserError
from dflow_trt.method.sampling import SamplingParams
from dflow_trt.profiling import metrics, points
from dflow_trt.profiling.costs import lengths, measure_costs
from dflow_trt.profiling.measure import Asked, LocalDriver, Run, Trace, arrivals
from dflow_trt.profiling.points import Options, families, measured_turns, warmup_turns
from dflow_trt.profiling.record import Point
from dflow_trt.profiling.session import Lost, Session
from dflow_trt.profiling.workload import Item
from dflow_trt.request import Request

COST = {c.TARGET: 10.0, c.CONTEXT: 1.0, c.RELAY: 0.5, c.DRAFTER: 2.0}  # seconds a call
PLAIN, DRAFTED = Point(strategy="ar", concurrency=1), Point(strategy="dflow", concurrency=1)


@dataclasses.dataclass
class ScriptedClock:
    """Time as tests move it; processor time runs twice as fast."""

    time: float = 0.0

    def now(self) -> float:
        return self.time

    def cpu(self) -> float:
        return 2 * self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


class TimedRuntime(fake.FakeRuntime):
    """Engine calls take their COST."""

    def __init__(self, bundle: Bundle, clock: ScriptedClock, rule: fake.Rule = "mixed") -> None:
        super().__init__(bundle, fake.Toy(), {"dflow": fake.Script(rule)})
        self._clock = clock

    def run(self, engine: str, *rest: Any, **more: Any) -> list[Any]:
        self._clock.time += COST[engine]
        return super().run(engine, *rest, **more)


@dataclasses.dataclass
class Bench:
    bundle: Bundle
    clock: ScriptedClock
    driver: LocalDriver
    rule: fake.Rule

    @classmethod
    def make(cls, rule: fake.Rule = "mixed", **limits: Any) -> Bench:
        bundle = fake.make_bundle([fake.drafter_spec("dflow", 8, "after_rejection")], **limits)
        clock = ScriptedClock()
        driver = LocalDriver(bundle, TimedRuntime(bundle, clock, rule), bundle.build.max_batch_size, clock)
        return cls(bundle, clock, driver, rule)

    def expected(self, asked: Asked, strategy: str) -> fake.Expected:
        assert asked.prompt_ids is not None
        request = Request("0", asked.prompt_ids, asked.params, self.bundle.strategy(strategy), asked.params.seed or 0)
        return fake.expect(self.bundle, fake.Toy(), {"dflow": fake.Script(self.rule)}, request)


def asked(index: int, max_tokens: int = 20, length: int = 5, temperature: float = 0.0) -> Asked:
    ids = tuple(1 + (7 * index + i) % 50 for i in range(length))
    params = SamplingParams(max_tokens=max_tokens, seed=index, temperature=temperature)
    return Asked(index, Item(f"line {index + 1}", "t", {"prompt_token_ids": list(ids)}), ids, params)


# -- one request -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["self", "wrong", "mixed"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_timeline_is_the_requests_own_life(rule: fake.Rule, temperature: float) -> None:
    bench = Bench.make(rule)
    one = asked(3, temperature=temperature)
    run = bench.driver.run(DRAFTED, [one])
    expected = bench.expected(one, "dflow")
    [trace] = run.traces
    assert trace.token_ids == list(expected.tokens)
    assert trace.finish_reason == expected.finish_reason
    assert [(tick.drafted, tick.accepted) for tick in trace.rounds] == [
        (len(each.block) - 1, each.accepted) for each in expected.rounds
    ]
    prefill, full, last = COST[c.TARGET] + COST[c.CONTEXT], sum(COST.values()), trace.rounds[-1]
    assert metrics.ttft(trace) == prefill
    assert [gap for gap, _ in metrics.gaps(trace)[:-1]] == [full] * (len(trace.rounds) - 1)
    assert metrics.gaps(trace)[-1][0] == (full if last.drafted else prefill)
    assert run.seconds == trace.ticks[-1].time == run.cpu / 2  # type: ignore[operator]
    assert run.tokens == 20


def test_plain_decoding_has_rounds_without_drafts() -> None:
    bench = Bench.make()
    [trace] = bench.driver.run(PLAIN, [asked(0, max_tokens=6)]).traces
    assert [(tick.tokens, tick.drafted, tick.is_round) for tick in trace.ticks] == [(1, 0, False)] + [(1, 0, True)] * 5
    assert metrics.tpot(trace) == COST[c.TARGET]


def test_a_request_of_one_token_has_no_round() -> None:
    run = Bench.make().driver.run(DRAFTED, [asked(0, max_tokens=1)])
    assert metrics.total(list(run.traces)).rounds == 0
    assert metrics.stages([run]) is None


def test_steps_say_what_they_did() -> None:
    run = Bench.make().driver.run(DRAFTED, [asked(0), asked(1)])
    assert sum(step.tokens for step in run.steps) == run.tokens == 40
    assert sum(step.rounds for step in run.steps) == sum(len(trace.rounds) for trace in run.traces)
    for step in run.steps:
        assert step.decodes_alone == ("prefill" not in step.milliseconds and step.rounds > 0)
        assert ("sampling" in step.milliseconds) == (step.tokens > 0)
        assert step.cpu == 2 * (step.end - step.start)


def test_a_request_can_be_left_after_some_rounds() -> None:
    """All of them are full ones, however many tokens are asked for, and the next request takes the place."""
    bench = Bench.make("wrong")
    driver = LocalDriver(bench.bundle, TimedRuntime(bench.bundle, bench.clock, "wrong"), 2, bench.clock, rounds=3)
    point = DRAFTED.model_copy(update={"concurrency": 2})
    requests = [asked(i, max_tokens=60) for i in range(3)]
    run = driver.run(point, requests)
    assert [[tick.drafted for tick in trace.rounds] for trace in run.traces] == [[7, 7, 7]] * 3
    for trace in run.traces:
        assert trace.token_ids == list(bench.expected(trace.asked, "ar").tokens)[: len(trace.token_ids)]
    assert sum(step.rounds for step in run.steps) == 9
    assert [trace.token_ids for trace in driver.run(point, requests).traces] == [t.token_ids for t in run.traces]


# -- loops -------------------------------------------------------------------------------------------------------------


def in_flight(run: Run, time: float) -> int:
    return sum(trace.arrival <= time < trace.ticks[-1].time for trace in run.traces)


@given(st.integers(1, 6), st.integers(1, 4), st.lists(st.integers(1, 12), min_size=8, max_size=8))
def test_a_closed_loop_keeps_its_places_full(count: int, concurrency: int, limits: list[int]) -> None:
    bench = Bench.make()
    point = PLAIN.model_copy(update={"concurrency": concurrency})
    run = bench.driver.run(point, [asked(i, max_tokens=limits[i]) for i in range(count)])
    assert [trace.tokens for trace in run.traces] == limits[:count]
    starts = sorted(trace.arrival for trace in run.traces)
    ends = sorted(trace.ticks[-1].time for trace in run.traces)
    assert starts[:concurrency] == [0.0] * min(count, concurrency)
    assert starts[concurrency:] == ends[: max(0, count - concurrency)], "the next begins when one ends"
    assert all(in_flight(run, step.start) <= concurrency for step in run.steps)


def test_an_open_loop_counts_from_the_arrival() -> None:
    """The second arrives while the first is decoded in one slot: it waits, and that is part of its time."""
    bench = Bench.make(max_batch_size=1)
    point = Point(strategy="ar", rate=1.0)
    run = bench.driver.run(point, [asked(0, max_tokens=3), asked(1, max_tokens=1), asked(2, max_tokens=1)], [5, 6, 100])
    first, second, third = run.traces
    assert (first.arrival, second.arrival, third.arrival) == (5, 6, 100)
    assert metrics.ttft(first) == 10.0, "it sleeps until something comes"
    assert metrics.ttft(second) == 35 - 6 + 10
    assert metrics.ttft(third) == 10.0
    assert run.seconds == 110


def test_arrivals_are_a_poisson_process() -> None:
    times = arrivals(4000, 5.0, (1, 2))
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert sum(gaps) / len(gaps) == pytest.approx(0.2, rel=0.06)
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(2.718281828**-1, abs=0.03)
    assert arrivals(4000, 5.0, (1, 2)) == times
    assert arrivals(3, 5.0, (1, 3)) != times[:3]


def test_a_prompt_that_is_too_long_is_named() -> None:
    bench = Bench.make()
    with pytest.raises(UserError, match=r"^line 8: the prompt has 81 tokens, this bundle takes 80"):
        bench.driver.check(PLAIN, [asked(0), asked(7, length=81)])


def test_points_do_not_disturb_each_other() -> None:
    bench = Bench.make(max_batch_size=3)
    requests = [asked(i) for i in range(5)]
    for point in (PLAIN, DRAFTED, DRAFTED.model_copy(update={"concurrency": 3, "draft_policy": "adaptive"}), PLAIN):
        for trace in bench.driver.run(point, requests).traces:
            assert trace.token_ids == list(bench.expected(trace.asked, "ar").tokens)


# -- the schedule ------------------------------------------------------------------------------------------------------


def prompts(count: int) -> dict[int | None, list[points.Prompt]]:
    return {None: [(each.item, each.prompt_ids) for each in map(asked, range(count))]}


def test_families_and_their_turns() -> None:
    options = Options(concurrency=(1, 2), rates=(3.0,), draft_tokens=(None, 3), temperatures=(0.0, 0.5), requests=9)
    made = families(options, {"ar": 0, "dflow": 7, "dflow-norelay": 7}, prompts(4))
    assert len(made) == 6
    for family in made:
        assert [point.strategy for point in family.points] == ["ar", "dflow", "dflow", "dflow-norelay", "dflow-norelay"]
        assert [point.draft_tokens for point in family.points] == [None, None, 3, None, 3]
        assert len(set(family.points)) == 5
        assert family.requests == 9
        everything = [each for turn in family.turns for each in turn]
        assert [each.index for each in everything] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
        assert [each.params.seed for each in everything] == [each.index for each in everything]
    by_load = {(f.baseline.concurrency, f.baseline.rate): list(map(len, f.turns)) for f in made}
    assert by_load == {(1, None): [4, 4, 1], (2, None): [8, 1], (None, 3.0): [9]}


def test_enough_requests_where_no_number_is_given() -> None:
    made = families(Options(concurrency=(1, 32)), {"ar": 0}, prompts(4))
    assert [family.requests for family in made] == [24, 256]


def test_every_point_has_every_turn_in_both_orders() -> None:
    options = Options(concurrency=(1,), requests=8, repetitions=4, warmup=2)
    made = families(options, {"ar": 0, "dflow": 7}, prompts(4))
    turns = list(measured_turns(made, options))
    counts = Counter((turn.point.strategy, turn.repetition, turn.number) for turn in turns)
    assert len(counts) == 2 * 4 * 2
    assert set(counts.values()) == {1}
    pairs = [(a.point.strategy, b.point.strategy) for a, b in zip(turns[::2], turns[1::2], strict=True)]
    assert Counter(pairs) == {("ar", "dflow"): 4, ("dflow", "ar"): 4}
    for a, b in zip(turns[::2], turns[1::2], strict=True):
        assert (a.repetition, a.number, a.seed, a.asked) == (b.repetition, b.number, b.seed, b.asked)
    assert len(list(warmup_turns(made, options))) == 4


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"concurrency": (1, 0)}, "--concurrency: 0; allowed: 1 or more"),
        ({"rates": (0.0,)}, "--rate: 0; allowed: more than 0"),
        ({"rates": (float("nan"),)}, "--rate: nan"),
        ({"draft_tokens": (0,)}, "--draft-tokens: 0"),
        ({"policies": ("greedy",)}, "draft_policy: 'greedy'"),
        ({"temperatures": (-1.0,)}, "--temperature: -1"),
        ({"requests": 0}, "--requests: 0"),
        ({"repetitions": 0}, "--repetitions: 0"),
        ({"warmup": -1}, "--warmup: -1"),
        ({"max_tokens": 0}, "--max-tokens: 0"),
        ({"ttft_bound": 0.0}, "--ttft-bound: 0"),
    ],
)
def test_options_that_do_not_fit(given: dict[str, Any], fault: str) -> None:
    with pytest.raises(UserError, match=fault):
        Options(**given)


# -- a session ---------------------------------------------------------------------------------------------------------


class Silent:
    def begin(self, turns: int) -> None:
        self.turns = turns

    def turn(self, point: Point) -> None:
        self.turns -= 1

    def note(self, line: str) -> None: ...


def session(driver: Any, **given: Any) -> Session:
    options = Options(**({"requests": 3, "repetitions": 2} | given))
    return Session(driver, families(options, {"ar": 0, "dflow": 7}, prompts(3)), options, Silent())


def test_a_session_is_lossless_and_says_so() -> None:
    made = session(Bench.make().driver)
    made.measure()
    assert made.report.turns == 0  # type: ignore[attr-defined]
    assert made.lossless().model_dump() == {"compared": 12, "same": 12, "first": None}
    plain, drafted = made.results()
    assert plain.speedup is None
    assert drafted.speedup is not None
    assert drafted.speedup.wall.value == pytest.approx(plain.throughput.seconds / drafted.throughput.seconds, rel=1e-9)
    assert (drafted.compared, drafted.same, len(drafted.turns)) == (6, 6, 2)


class Wrapped:
    """A driver whose runs a test changes."""

    def __init__(self, change: Any) -> None:
        self._driver, self._change, self._count = Bench.make().driver, change, 0

    def run(self, point: Point, asked: Sequence[Asked], offsets: Sequence[float] | None = None) -> Run:
        self._count += 1
        run = self._driver.run(point, asked, offsets)
        self._change(self._count, run.traces)
        return run


def test_a_difference_from_ar_is_found_and_named() -> None:
    def spoil(count: int, traces: Sequence[Trace]) -> None:
        if count == 4:  # after two warm-up turns: dflow's first
            traces[1].token_ids[2] = 60

    made = session(Wrapped(spoil))
    made.measure()
    found = made.lossless()
    assert (found.compared, found.same) == (12, 11)
    assert found.first is not None
    assert found.first.startswith("dflow, 1 at once: line 2, token 2 is 60, ar has ")
    assert [each.same for each in made.results()] == [6, 5]


def test_a_sequence_that_ends_early_differs() -> None:
    def cut(count: int, traces: Sequence[Trace]) -> None:
        if count == 4:
            del traces[0].token_ids[5:]

    made = session(Wrapped(cut))
    made.measure()
    assert "token 5 is the end, ar has" in (made.lossless().first or "")


def test_requests_that_failed_are_counted_and_not_compared() -> None:
    def fail(count: int, traces: Sequence[Trace]) -> None:
        traces[0].error = "no"

    made = session(Wrapped(fail))
    made.measure()
    assert [(each.failed, each.compared) for each in made.results()] == [(2, 4), (2, 4)]


def test_a_server_that_is_lost_leaves_what_was_measured() -> None:
    def lose(count: int, traces: Sequence[Trace]) -> None:
        if count == 6:
            raise Lost("server: the server went away")

    made = session(Wrapped(lose))
    made.measure()
    assert made.error == "server: the server went away; 3 of 4 turns were done, and are what is shown"
    assert sum(len(each.turns) for each in made.results()) == 3

    def lose_early(count: int, traces: Sequence[Trace]) -> None:
        raise Lost("server: the server went away")

    with pytest.raises(Lost):
        session(Wrapped(lose_early)).measure()


# -- costs -------------------------------------------------------------------------------------------------------------


def test_lengths_to_time() -> None:
    assert lengths(7) == [1, 3, 7]
    assert lengths(15, (4, 0, 99)) == [1, 3, 4, 7, 15]
    assert lengths(1) == [1]


def test_rounds_of_every_length_are_timed_at_full_batch() -> None:
    bench = Bench.make("wrong", max_seq_len=512)
    family = [point.model_copy(update={"concurrency": 3}) for point in (PLAIN, DRAFTED)]
    found = measure_costs(bench.driver, bench.bundle, family, [asked(0), asked(1)], wanted=[2])
    assert [(cost.strategy, cost.drafts) for cost in found] == [("ar", 0), *(("dflow", k) for k in (1, 2, 3, 7))]
    for cost in found:
        assert cost.batch == 3
        assert cost.rounds >= 4
        assert cost.total > 0
        assert ("draft" in cost.milliseconds) == (cost.strategy == "dflow")
    assert bench.driver.decoder(PLAIN).idle


def test_a_short_context_ends_the_timing_early() -> None:
    bench = Bench.make("self", max_seq_len=24)
    assert measure_costs(bench.driver, bench.bundle, [DRAFTED], [asked(0, length=16)]) == []


def test_costs_leave_the_driver_as_it_was() -> None:
    bench = Bench.make(max_seq_len=256)
    requests = [asked(i) for i in range(3)]
    before: Mapping[int, list[int]] = {t.asked.index: t.token_ids for t in bench.driver.run(PLAIN, requests).traces}
    measure_costs(bench.driver, bench.bundle, [PLAIN, DRAFTED], requests)
    after = {t.asked.index: t.token_ids for t in bench.driver.run(DRAFTED, requests).traces}
    assert after == before
