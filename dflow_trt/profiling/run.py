"""A profile from start to end: what is measured, and the record that is made of it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dflow_trt import __version__
from dflow_trt.bundle import Bundle, check_unchanged, open_bundle
from dflow_trt.compile import onnxruntime
from dflow_trt.errors import UserError
from dflow_trt.memory import plan_memory
from dflow_trt.profiling import machine, metrics
from dflow_trt.profiling.advice import advise
from dflow_trt.profiling.costs import measure_costs
from dflow_trt.profiling.device import DeviceClock
from dflow_trt.profiling.measure import Asked, LocalDriver, Run, Trace, arrivals
from dflow_trt.profiling.points import (
    Family,
    Options,
    Prompt,
    families,
    measured_turns,
    most_requests,
    warmup_turns,
)
from dflow_trt.profiling.points import Turn as PlannedTurn
from dflow_trt.profiling.prices import cost
from dflow_trt.profiling.record import (
    Lossless,
    Memory,
    Point,
    PointResult,
    Profile,
    Roofline,
    RoundCost,
    ServerCheck,
    Settings,
    Subject,
)
from dflow_trt.profiling.workload import Choice, Vocabulary, Workload, takes_chats, token_ids
from dflow_trt.runtime.base import Runtime
from dflow_trt.runtime.choose import open_runtime
from dflow_trt.runtime.ort import usable_cores
from dflow_trt.spec import AUTOREGRESSIVE
from dflow_trt.text import Tokenizer

MEMORY_SHARE = 0.9  # of the machine's memory, for the batch limit


class Driver(Protocol):
    """Runs turns: in this process, or on a server."""

    def run(self, point: Point, asked: Sequence[Asked], offsets: Sequence[float] | None = None) -> Run: ...


class Report(Protocol):
    """Who is told how far it is."""

    def begin(self, turns: int) -> None: ...

    def turn(self, point: Point) -> None: ...

    def note(self, line: str) -> None: ...


class Lost(UserError):
    """The server is gone: what was measured until then stays."""


@dataclass(frozen=True)
class Prices:
    """per_hour: of the machine; hosted: of a million output tokens elsewhere."""

    per_hour: float | None = None
    hosted: float | None = None

    def __post_init__(self) -> None:
        for flag, value in (("--price-per-hour", self.per_hour), ("--hosted-price", self.hosted)):
            if value is not None and not 0 < value < float("inf"):
                raise UserError(f"{flag}: {value:g}; allowed: more than 0")
        if self.hosted is not None and self.per_hour is None:
            raise UserError("--hosted-price: needs something to compare with; add --price-per-hour")


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
        warmup, measured = (
            list(warmup_turns(self.families, self.options)),
            list(measured_turns(self.families, self.options)),
        )
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
        return Run(run.point, run.start, run.end, run.cpu, run.traces, run.steps, turn.repetition, turn.number)

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


# -- a bundle here -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """The record, and the timelines behind it."""

    profile: Profile
    runs: Mapping[Point, Sequence[Run]]


def profile_bundle(
    path: str | Path,
    choice: Choice,
    options: Options,
    report: Report,
    *,
    prices: Prices | None = None,
    threads: int | None = None,
    roofline: bool = True,
    verify: bool = True,
) -> Result:
    """Profile a bundle on this machine. threads: of the CPU runtime, by default all cores."""
    bundle = open_bundle(path, verify)
    before, _ = machine.used_memory(on_gpu(bundle))
    names = check_strategies(options.strategies, tuple(bundle.strategies))
    slots = _slots(bundle, options)
    tokenizer = tokenizer_of(bundle)
    workloads = choice.workloads(vocabulary_of(bundle), takes_chats(tokenizer), most_requests(options), options.seed)
    prompts = {length: encode(each, tokenizer) for length, each in workloads.items()}
    planned = families(options, names, prompts)
    with ExitStack() as owned:
        runtime = open_runtime(bundle, threads, slots)
        owned.callback(runtime.close)
        check_unchanged(bundle)
        (opened, _), device = machine.used_memory(on_gpu(bundle)), device_clock(bundle, runtime)
        if device is not None:
            owned.callback(device.close)
        driver = LocalDriver(bundle, runtime, slots, device=device)
        for family in planned:
            driver.check(family.baseline, [each for turn in family.turns for each in turn])
        session = Session(driver, planned, options, report)
        session.measure()
        costs = _costs(driver, bundle, planned, options, report)
        memory = _memory(bundle, slots, before, opened)
    count = None if on_gpu(bundle) else threads or usable_cores()
    return assemble(
        session,
        workloads,
        subject_of(bundle),
        count,
        prices or Prices(),
        costs=costs,
        roof=_roofline(bundle, costs, count, report) if roofline and count is not None else None,
        memory=memory,
    )


def on_gpu(bundle: Bundle) -> bool:
    """Where its engines run."""
    return bundle.build.backend != onnxruntime.NAME


def device_clock(bundle: Bundle, runtime: Runtime) -> DeviceClock | None:
    """What times the engines of a GPU; None where calls are done when they return."""
    if not on_gpu(bundle):
        return None
    from dflow_trt.runtime.trt import TrtRuntime

    assert isinstance(runtime, TrtRuntime)
    return DeviceClock(runtime._stream)


def check_strategies(wanted: Sequence[str], offered: Sequence[str]) -> tuple[str, ...]:
    """Those that are profiled; UserError for one that there is not."""
    for name in wanted:
        if name not in offered:
            raise UserError(f"--strategy: there is no {name!r} here; it offers {', '.join(offered)}")
    return tuple(wanted) or tuple(offered)


def _slots(bundle: Bundle, options: Options) -> int:
    limit = bundle.build.max_batch_size
    if max(options.concurrency, default=1) > limit:
        raise UserError(
            f"--concurrency: {max(options.concurrency)}; allowed: up to {limit}, which the bundle was built for"
        )
    return limit if options.rates else max(options.concurrency, default=1)


def tokenizer_of(bundle: Bundle) -> Tokenizer | None:
    """The bundle's tokenizer, if it has one."""
    folder = bundle.tokenizer_path
    return Tokenizer.from_folder(folder) if folder else None


def vocabulary_of(bundle: Bundle) -> Vocabulary:
    """What random prompts are made of."""
    return Vocabulary(bundle.target.live_vocab, bundle.target.eos_ids)


def encode(workload: Workload, tokenizer: Tokenizer | None) -> list[Prompt]:
    """A workload's prompts with their token ids."""
    return [(item, tuple(token_ids(item, tokenizer))) for item in workload.items]


def _costs(
    driver: LocalDriver, bundle: Bundle, planned: Sequence[Family], options: Options, report: Report
) -> list[RoundCost]:
    """Of every closed loop, one point a strategy."""
    found: list[RoundCost] = []
    for family in planned:
        if family.baseline.concurrency is None:
            continue
        report.note(f"timing rounds by their drafts, {family.baseline.load}")
        plain = {point.strategy: _full_length(point) for point in family.points}
        asked = [each for turn in family.turns for each in turn]
        wanted = [each for each in options.draft_tokens if each is not None]
        found += measure_costs(driver, bundle, list(plain.values()), asked, wanted)
    return found


def _full_length(point: Point) -> Point:
    return point.model_copy(update={"draft_tokens": None, "draft_policy": "fixed"})


def _roofline(bundle: Bundle, costs: Sequence[RoundCost], threads: int, report: Report) -> Roofline:
    from dflow_trt.profiling.probes import measure_roof
    from dflow_trt.profiling.roofline import roofline, working_set

    report.note("measuring memory bandwidth and arithmetic of this machine")
    return roofline(bundle, costs, measure_roof(working_set(bundle), threads))


def _memory(bundle: Bundle, slots: int, before: int | None, opened: int | None) -> Memory:
    """Before the roofline's own arrays are there."""
    plan, (after, total) = plan_memory(bundle, slots), machine.used_memory(on_gpu(bundle))
    fixed = plan.total - plan.target_cache - plan.drafter_cache - plan.relay_state
    limit = int((MEMORY_SHARE * total - fixed) // ((plan.total - fixed) // slots)) if total is not None else None
    return Memory(
        device="GPU" if on_gpu(bundle) else "process",
        planned=plan.figures(),
        before=before,
        opened=opened,
        after=after,
        anonymous=None if on_gpu(bundle) else machine.anonymous(),
        peak=None if on_gpu(bundle) else machine.peak(),
        batch_limit=limit if limit is None else max(limit, 0),
    )


def subject_of(bundle: Bundle) -> Subject:
    """What the record says of a bundle."""
    build = bundle.build
    return Subject(
        kind="bundle",
        name=str(bundle.path),
        backend=build.backend,
        dtype=build.dtype,
        target=bundle.target_fingerprint[:12],
        target_weights=build.target_weights,
        draft_weights=build.draft_weights,
        max_batch_size=build.max_batch_size,
        max_seq_len=build.max_seq_len,
        drafters={spec.name: spec.block_size for spec in bundle.specs},
    )


# -- the record --------------------------------------------------------------------------------------------------------


def assemble(
    session: Session,
    workloads: Mapping[int | None, Workload],
    subject: Subject,
    threads: int | None,
    prices: Prices,
    *,
    costs: Sequence[RoundCost] = (),
    roof: Roofline | None = None,
    memory: Memory | None = None,
    server: ServerCheck | None = None,
) -> Result:
    """Everything that was measured, as one record."""
    results = session.results()
    profile = Profile(
        created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        tool=__version__,
        settings=_settings(session, workloads, threads),
        subject=subject,
        machine=machine.machine(),
        results=results,
        lossless=session.lossless(),
        costs=list(costs),
        advice=advise(costs, results),
        roofline=roof,
        memory=memory,
        cost=cost(results, prices.per_hour, prices.hosted) if prices.per_hour is not None else None,
        server=server,
        notes=_notes(subject, results),
        error=session.error,
    )
    return Result(profile, session.runs)


def _settings(session: Session, workloads: Mapping[int | None, Workload], threads: int | None) -> Settings:
    options = session.options
    return Settings(
        workload=[each.info(options.max_tokens) for each in workloads.values()],
        points=[point for family in session.families for point in family.points],
        requests={family.baseline.load: family.requests for family in session.families},
        repetitions=options.repetitions,
        warmup=options.warmup,
        max_tokens=options.max_tokens,
        ignore_eos=options.ignore_eos,
        seed=options.seed,
        threads=threads,
        ttft_bound=options.ttft_bound,
        tpot_bound=options.tpot_bound,
    )


def _notes(subject: Subject, results: Sequence[PointResult]) -> list[str]:
    """What a reader should know before the figures."""
    notes = []
    failed = sum(result.failed for result in results)
    if failed:
        notes.append(f"{failed} requests failed; figures are of the others, and of what these gave until then")
    if subject.dtype in ("float16", "bfloat16"):
        notes.append(f"{subject.dtype}: near ties may fall differently in calls of different shapes")
    if not any(result.point.strategy != AUTOREGRESSIVE for result in results):
        notes.append("there is no strategy but ar here: nothing to compare")
    return notes
