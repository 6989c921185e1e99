"""Timelines and records for tests of profiles: made by hand, so that every figure can be worked out beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflow_trt.method.sampling import SamplingParams
from dflow_trt.profiling import metrics
from dflow_trt.profiling.measure import Asked, Run, Step, Tick, Trace
from dflow_trt.profiling.record import (
    DrafterInfo,
    Lossless,
    Machine,
    Point,
    PointResult,
    Profile,
    Settings,
    Subject,
    WorkloadInfo,
)
from dflow_trt.profiling.workload import Item

PLAIN = Point(strategy="ar", concurrency=1)
DRAFTED = Point(strategy="dflow", concurrency=1)


def asked(index: int = 0, task: str = "sums") -> Asked:
    item = Item(f"line {index + 1}", task, {"prompt_token_ids": [3, 4]})
    return Asked(index, item, (3, 4), SamplingParams(max_tokens=64, seed=index))


def trace(
    times: Sequence[float], rounds: Sequence[tuple[int | None, int]], arrival: float = 0.0, index: int = 0, **more: Any
) -> Trace:
    """A request whose prefill token comes at times[0] and whose rounds, (drafted, accepted), end at the times after."""
    ticks = [Tick(times[0], 1, is_round=False)] if times else []
    ticks += [Tick(time, kept + 1, made, kept) for time, (made, kept) in zip(times[1:], rounds, strict=True)]
    ids = list(range(sum(tick.tokens for tick in ticks)))
    found = Trace(asked(index, **more), arrival, ticks, ids)
    found.finish_reason = "length"
    return found


def run(
    point: Point,
    traces: Sequence[Trace],
    seconds: float,
    cpu: float | None = None,
    steps: Sequence[Step] = (),
    **at: int,
) -> Run:
    return Run(point, 0.0, seconds, cpu, tuple(traces), tuple(steps), **at)


def result(point: Point, runs: Sequence[Run], base: Sequence[Run] | None = None) -> PointResult:
    """A point's result, as a session makes it."""
    traces = [each for run in runs for each in run.traces]
    return PointResult(
        point=point,
        requests=len(traces),
        failed=0,
        compared=len(traces),
        same=len(traces),
        total=metrics.total(traces),
        by_task=metrics.by_task(traces),
        latency=metrics.latency(traces),
        throughput=metrics.throughput(runs),
        goodput=None,
        stages=metrics.stages(runs),
        speedup=metrics.speedups(base, runs) if base is not None else None,
        turns=metrics.turns(runs),
    )


def profile(results: Sequence[PointResult], **changes: Any) -> Profile:
    """A record around results."""
    info = WorkloadInfo(kind="file", source="p.jsonl", digest="d", prompts=2, tasks={"sums": 2})
    settings = Settings(
        workload=[info],
        points=[each.point for each in results],
        requests={"1 at once": 2},
        repetitions=1,
        warmup=0,
        max_tokens=64,
        ignore_eos=False,
        seed=0,
        threads=1,
        ttft_bound=None,
        tpot_bound=None,
    )
    subject = Subject(
        kind="bundle",
        name="bundle",
        backend="onnxruntime",
        dtype="float32",
        target="t",
        target_weights="float",
        draft_weights="int8",
        max_batch_size=8,
        max_seq_len=128,
        drafters={"dflow": DrafterInfo(kind="dflash", drafts=7)},
    )
    machine = Machine(
        cpu="c", cpu_features=[], cores=2, memory=None, platform="p", load_average=[0.0], versions={"numpy": "2"}
    )
    compared = sum(each.compared for each in results)
    made = Profile(
        created="2026-01-01T00:00:00+0000",
        tool="0.1.0",
        settings=settings,
        subject=subject,
        machine=machine,
        results=list(results),
        lossless=Lossless(compared=compared, same=compared, first=None),
        costs=[],
        advice=[],
        roofline=None,
        memory=None,
        cost=None,
        server=None,
        notes=[],
    )
    return made.model_copy(update=changes)
