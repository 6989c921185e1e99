"""A profile from start to end: what is measured, and the record that is made of it."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from dflow_trt import __version__
from dflow_trt.bundle import Bundle, check_unchanged, open_bundle
from dflow_trt.errors import UserError
from dflow_trt.memory import drafter_memory, plan_memory
from dflow_trt.profiling import machine
from dflow_trt.profiling.advice import advise
from dflow_trt.profiling.costs import measure_costs
from dflow_trt.profiling.device import DeviceClock
from dflow_trt.profiling.measure import LocalDriver, Run
from dflow_trt.profiling.points import Family, Options, Prompt, families, most_requests
from dflow_trt.profiling.prices import Prices, cost
from dflow_trt.profiling.record import (
    DrafterInfo,
    DrafterSizes,
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
from dflow_trt.profiling.session import Report, Session
from dflow_trt.profiling.workload import Choice, Vocabulary, Workload, takes_chats, token_ids
from dflow_trt.runtime.base import Runtime
from dflow_trt.runtime.choose import open_runtime
from dflow_trt.runtime.ort import usable_cores
from dflow_trt.spec import AUTOREGRESSIVE
from dflow_trt.text import Tokenizer

MEMORY_SHARE = 0.9  # of the machine's memory, for the batch limit


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
    check_strategies(options.strategies, bundle.strategies)
    slots = _slots(bundle, options)
    tokenizer = tokenizer_of(bundle)
    workloads = choice.workloads(vocabulary_of(bundle), takes_chats(tokenizer), most_requests(options), options.seed)
    prompts = {length: encode(each, tokenizer) for length, each in workloads.items()}
    planned = families(options, most_drafts(bundle), prompts)
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
    return bundle.build.backend != "onnxruntime"


def device_clock(bundle: Bundle, runtime: Runtime) -> DeviceClock | None:
    """What times the engines of a GPU; None where calls are done when they return."""
    if not on_gpu(bundle):
        return None
    from dflow_trt.runtime.trt import TrtRuntime

    assert isinstance(runtime, TrtRuntime)
    return DeviceClock(runtime.stream)


def check_strategies(wanted: Sequence[str], offered: Collection[str]) -> None:
    """UserError for one that there is not."""
    for name in wanted:
        if name not in offered:
            raise UserError(f"--strategy: there is no {name!r} here; it offers {', '.join(offered)}")


def most_drafts(bundle: Bundle) -> dict[str, int | None]:
    """Strategies, with the most drafts of a round."""
    return {
        name: bundle.drafters[each.drafter].spec.num_drafts if each.drafter is not None else 0
        for name, each in bundle.strategies.items()
    }


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
        drafters={name: DrafterSizes(**vars(each)) for name, each in drafter_memory(bundle, slots).items()},
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
        drafters={spec.name: DrafterInfo(kind=spec.kind, drafts=spec.num_drafts) for spec in bundle.specs},
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
