"""The turns of one profile: run in their order, and what came of them by point."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from dflow_trt.errors import UserError
from dflow_trt.profiling import metrics
from dflow_trt.profiling.measure import Asked, Run, Trace, arrivals
from dflow_trt.profiling.points import Family, Options, PlannedTurn, measured_turns, warmup_turns
from dflow_trt.profiling.record import Lossless, Point, PointResult


class Driver(Protocol):
    """Runs turns: in this process, or on a server."""

    def run(self, point: Point, asked: Sequence[Asked], offsets: Sequence[float] | None = None) -> Run:
        """One turn: an open loop with arrivals at these seconds, else a closed one."""
        ...


class Report(Protocol):
    """Who is told how far it is."""

    def begin(self, turns: int) -> None:
        """So many turns are to come."""
        ...

    def turn(self, point: Point) -> None:
        """One begins."""
        ...

    def note(self, line: str) -> None:
        """What is done beside the turns."""
        ...


class Silent:
    """A :class:`Report` to nobody."""

    def begin(self, turns: int) -> None:
        """See :class:`Report`."""

    def turn(self, point: Point) -> None:
        """See :class:`Report`."""

    def note(self, line: str) -> None:
        """See :class:`Report`."""


class Lost(UserError):
    """The server is gone: what was measured until then stays."""


@dataclass
class Session:
    """The turns of one profile. warm: those that count for nothing but a server's counters."""

    driver: Driver
    families: Sequence[Family]
    options: Options
    report: Report
    runs: dict[Point, list[Run]] = field(default_factory=lambda: defaultdict(list))
    warm: list[Run] = field(default_factory=list)
    error: str | None = None

    def measure(self) -> None:
        """Warm up, then all turns; a server that is lost ends it early."""
        warmup = list(warmup_turns(self.families, self.options))
        measured = list(measured_turns(self.families, self.options))
        self.report.begin(len(warmup) + len(measured))
        done = 0
        try:
            for turn in warmup:
                self.warm.append(self._run(turn))
            for turn in measured:
                self.runs[turn.point].append(self._run(turn))
                done += 1
        except Lost as error:
            if not done:
                raise
            self.error = f"{error}; {done} of {len(measured)} turns were done, and are what is shown"

    def _run(self, turn: PlannedTurn) -> Run:
        self.report.turn(turn.point)
        rate = turn.point.rate
        offsets = arrivals(len(turn.asked), rate, turn.seed) if rate is not None else None
        run = self.driver.run(turn.point, turn.asked, offsets)
        return replace(run, repetition=turn.repetition, number=turn.number)

    # -- what came of it ---------------------------------------------------------------------------------------------

    def results(self) -> list[PointResult]:
        """Every point that has run."""
        found = []
        for family in self.families:
            texts = self._baseline(family)
            found += [self._result(point, family, texts) for point in family.points if self.runs[point]]
        return found

    def _baseline(self, family: Family) -> dict[int, list[int]]:
        """What ar gave for each item, the first time."""
        texts: dict[int, list[int]] = {}
        for run in self.runs[family.baseline]:
            for trace in run.traces:
                if trace.error is None:
                    texts.setdefault(trace.asked.index, trace.token_ids)
        return texts

    def _result(self, point: Point, family: Family, texts: Mapping[int, list[int]]) -> PointResult:
        runs, base = self.runs[point], self.runs[family.baseline]
        traces = [trace for run in runs for trace in run.traces]
        compared = [trace for trace in traces if _comparable(trace, texts)]
        return PointResult(
            point=point,
            requests=len(traces),
            failed=sum(trace.error is not None for trace in traces),
            compared=len(compared),
            same=sum(trace.token_ids == texts[trace.asked.index] for trace in compared),
            total=metrics.total(traces),
            by_task=metrics.by_task(traces),
            latency=metrics.latency(traces),
            throughput=metrics.throughput(runs),
            goodput=metrics.goodput(runs, self.options.ttft_bound, self.options.tpot_bound),
            stages=metrics.stages(runs),
            speedup=metrics.speedups(base, runs) if point != family.baseline else None,
            turns=metrics.turns(runs),
        )

    def lossless(self) -> Lossless:
        """All sequences held against ar's; ar's own repetitions too."""
        compared = same = 0
        first = None
        for family in self.families:
            texts = self._baseline(family)
            for trace, point in self._traces(family):
                if not _comparable(trace, texts):
                    continue
                expected = texts[trace.asked.index]
                compared, same = compared + 1, same + (trace.token_ids == expected)
                if first is None and trace.token_ids != expected:
                    first = _difference(point, trace, expected)
        return Lossless(compared=compared, same=same, first=first)

    def _traces(self, family: Family) -> list[tuple[Trace, Point]]:
        return [(trace, point) for point in family.points for run in self.runs[point] for trace in run.traces]


def _comparable(trace: Trace, texts: Mapping[int, list[int]]) -> bool:
    return trace.error is None and trace.asked.index in texts


def _difference(point: Point, trace: Trace, expected: Sequence[int]) -> str:
    """Where a sequence leaves ar's, in words."""
    pairs = enumerate(zip(trace.token_ids, expected, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(trace.token_ids), len(expected)))
    ours = trace.token_ids[place] if place < len(trace.token_ids) else "the end"
    theirs = expected[place] if place < len(expected) else "the end"
    return f"{point.label}, {point.load}: {trace.asked.item.where}, token {place} is {ours}, ar has {theirs}"
