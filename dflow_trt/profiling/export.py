"""What ``--output`` writes: the record, the report, and tables for other programs."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflow_trt.files import staged_folder
from dflow_trt.profiling.measure import Run, Trace
from dflow_trt.profiling.metrics import MILLISECONDS, survival, tpot, ttft
from dflow_trt.profiling.record import PERCENTILES, RECORD_FILE, Point, PointResult, Profile, write_record
from dflow_trt.profiling.report import LATENCIES, report
from dflow_trt.profiling.run import Result

REPORT_FILE = "report.html"
Row = dict[str, Any]


def write_output(result: Result, output: Path, force: bool) -> None:
    """The folder, whole or not at all. UserError where it was filled meanwhile."""
    profile = result.profile
    with staged_folder(output, replace=force) as folder:
        write_record(profile, folder / RECORD_FILE)
        (folder / REPORT_FILE).write_text(report(profile), encoding="utf-8")
        _write_csv(folder / "points.csv", map(_point_row, profile.results))
        _write_csv(folder / "acceptance.csv", _acceptance_rows(profile.results))
        _write_csv(folder / "requests.csv", _request_rows(result.runs))
        _write_csv(folder / "rounds.csv", _cost_rows(profile))


def _write_csv(path: Path, rows: Iterable[Row]) -> None:
    """A header and the rows; an empty cell is a figure that there is not."""
    listed = list(rows)
    names = list(dict.fromkeys(name for row in listed for name in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(listed)


def _point(point: Point) -> Row:
    return point.model_dump()


def _point_row(result: PointResult) -> Row:
    total, speed = result.total, result.throughput
    row = _point(result.point) | {"requests": result.requests, "failed": result.failed}
    row |= {"compared": result.compared, "same_as_ar": result.same}
    row |= {name: getattr(total, name) for name in ("rounds", "drafted", "accepted", "emitted")}
    row |= {name: getattr(total, name) for name in ("tau_accepted", "tau_emitted", "wasted")}
    row |= speed.model_dump()
    if result.speedup is not None:
        wall = result.speedup.wall
        row |= {"speedup": wall.value, "speedup_low": wall.low, "speedup_high": wall.high}
    row |= {f"goodput_{name}": value for name, value in (result.goodput.model_dump() if result.goodput else {}).items()}
    row |= {f"stage_{name}_ms": value for name, value in (result.stages.milliseconds if result.stages else {}).items()}
    for name in LATENCIES:
        found = getattr(result.latency, name)
        row |= {f"{name}_n": found.n, f"{name}_mean_ms": found.mean}
        row |= {f"{name}_p{which}_ms": found.percentile(which) for which in PERCENTILES}
    return row


def _acceptance_rows(results: Sequence[PointResult]) -> Iterator[Row]:
    for result in results:
        for counts in (*result.by_task, result.total):
            for i, share in enumerate(survival(counts)):
                accepted = counts.accepted_at[i] if i < len(counts.accepted_at) else 0
                reached = counts.reached_at[i] if i < len(counts.reached_at) else 0
                row = {"task": counts.task, "position": i + 1, "drafted": counts.drafted_at[i], "reached": reached}
                yield _point(result.point) | row | {"accepted": accepted, "survival": share}


def _request_rows(runs: Mapping[Point, Sequence[Run]]) -> Iterator[Row]:
    for point, mine in runs.items():
        for run in mine:
            for trace in run.traces:
                yield _point(point) | {"repetition": run.repetition, "turn": run.number} | _trace_row(trace)


def _trace_row(trace: Trace) -> Row:
    first, each, rounds = ttft(trace), tpot(trace), trace.rounds
    return {
        "item": trace.asked.index,
        "task": trace.asked.item.task,
        "prompt_tokens": len(trace.asked.prompt_ids) if trace.asked.prompt_ids is not None else None,
        "output_tokens": trace.tokens,
        "rounds": len(rounds),
        "accepted": sum(tick.accepted for tick in rounds),
        "ttft_ms": first * MILLISECONDS if first is not None else None,
        "tpot_ms": each * MILLISECONDS if each is not None else None,
        "request_ms": (trace.ticks[-1].time - trace.arrival) * MILLISECONDS if trace.ticks else None,
        "finish_reason": trace.finish_reason,
        "error": trace.error,
    }


def _cost_rows(profile: Profile) -> Iterator[Row]:
    for cost in profile.costs:
        row = cost.model_dump(exclude={"milliseconds"})
        yield row | {f"{name}_ms": value for name, value in cost.milliseconds.items()} | {"total_ms": cost.total}
