"""Two profiles: whether they can be compared, and what changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from dflow_trt.profiling import words
from dflow_trt.profiling.metrics import unpaired_interval
from dflow_trt.profiling.record import Interval, Part, Point, PointResult, Profile
from dflow_trt.profiling.record import Turn as TurnRecord

LATER = ("created", "load_average")  # differ between any two runs
NAMES_ONLY = ("source",)  # what a workload is called does not matter; its digest does


class Change(Part):
    """A figure in A and in B. ratio: B over A, with an interval where there are turns to draw from."""

    point: Point
    figure: str
    a: float | None
    b: float | None
    ratio: Interval | None


class Difference(Part):
    """settings: those that differ, in words; with any, the profiles are not comparable. around: what else differs, of
    bundle, machine and versions: what a comparison may be about. only_a, only_b: points that the other has not, in
    words. changes: of points that both have."""

    comparable: bool
    settings: list[str]
    around: list[str]
    only_a: list[str]
    only_b: list[str]
    changes: list[Change]


def compare(a: Profile, b: Profile) -> Difference:
    """What is different in B. Points of one alone are left out: they were measured in turn with the others."""
    settings = list(_differences("", *_settings(a, b)))
    around = [
        *_differences("", _plain(a.subject), _plain(b.subject)),
        *_differences("", _plain(a.machine), _plain(b.machine)),
    ]
    settings += [f"{name}: ended early ({each.error})" for name, each in (("A", a), ("B", b)) if each.error]
    theirs = {result.point: result for result in b.results}
    shared = [result for result in a.results if result.point in theirs]
    settings += [] if shared else ["points: none that both have"]
    return Difference(
        comparable=not settings,
        settings=settings,
        around=around,
        only_a=_only(a, b),
        only_b=_only(b, a),
        changes=[change for result in shared for change in _changes(result, theirs[result.point])],
    )


def _settings(a: Profile, b: Profile) -> list[Any]:
    """Of both, but for their points; of requests by load, those of loads that both have."""
    loads = a.settings.requests.keys() & b.settings.requests.keys()
    found = []
    for each in (a, b):
        plain = _plain(each.settings)
        requests = {load: count for load, count in plain.pop("requests").items() if load in loads}
        found.append({name: value for name, value in plain.items() if name != "points"} | {"requests": requests})
    return found


def _only(a: Profile, b: Profile) -> list[str]:
    """What B has not: strategies of which it has no point, and points of the others."""
    strategies = {result.point.strategy for result in b.results}
    points = {result.point for result in b.results}
    missing = [result.point for result in a.results if result.point not in points]
    names = (f"{each.label}, {each.load}" if each.strategy in strategies else each.strategy for each in missing)
    return list(dict.fromkeys(names))


def _plain(part: Part) -> Any:
    return part.model_dump(mode="json")


def _differences(where: str, a: Any, b: Any) -> Iterator[str]:
    """Each value that differs, by its name."""
    if isinstance(a, dict) and isinstance(b, dict):
        for name in dict.fromkeys([*a, *b]):
            if name not in LATER and name not in NAMES_ONLY:
                yield from _differences(f"{where}.{name}" if where else name, a.get(name), b.get(name))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _differences(f"{where}[{i}]", x, y)
    elif a != b:
        yield f"{where}: {_shown(a)} in A, {_shown(b)} in B"


def _shown(value: Any) -> str:
    if value is None:
        return words.NOTHING
    return f"{len(value)} entries" if isinstance(value, list) else str(value)


def _changes(a: PointResult, b: PointResult) -> Iterator[Change]:
    rates = (a.throughput.tokens_per_second, b.throughput.tokens_per_second)
    yield Change(point=a.point, figure="tokens/s", a=rates[0], b=rates[1], ratio=_rate_ratio(a.turns, b.turns))
    yield _change(a.point, "tau", a.total.tau_emitted, b.total.tau_emitted)
    yield _change(a.point, "over ar", *(each.speedup.wall.value if each.speedup else None for each in (a, b)))
    for name, of in (("TTFT p50 ms", "ttft"), ("TPOT p50 ms", "tpot")):
        yield _change(a.point, name, getattr(a.latency, of).p50, getattr(b.latency, of).p50)
    for stage in dict.fromkeys([*_stage_times(a), *_stage_times(b)]):
        yield _change(a.point, f"{stage} ms a round", _stage_times(a).get(stage), _stage_times(b).get(stage))


def _stage_times(result: PointResult) -> dict[str, float]:
    return result.stages.milliseconds if result.stages else {}


def _change(point: Point, figure: str, a: float | None, b: float | None) -> Change:
    return Change(point=point, figure=figure, a=a, b=b, ratio=None)


def _rate_ratio(a: Sequence[TurnRecord], b: Sequence[TurnRecord]) -> Interval | None:
    """Tokens a second in B over those in A, each side's turns drawn by themselves: they were not run in turn."""
    sides = [np.array([(t.tokens, t.seconds) for t in turns if t.tokens and t.seconds]) for turns in (a, b)]
    if not all(map(len, sides)):
        return None
    ours, theirs = sides[1], sides[0]
    return unpaired_interval(ours[:, 0], ours[:, 1], theirs[:, 0], theirs[:, 1])


def show_difference(found: Difference, out: Console) -> None:
    """For people."""
    for line in found.settings:
        out.print(f"[bold red]setting[/]   {escape(line)}", soft_wrap=True)
    for line in found.around:
        out.print(f"differs   {escape(line)}", soft_wrap=True)
    for name, points in (("A", found.only_a), ("B", found.only_b)):
        if points:
            out.print(f"only in {name} {escape('; '.join(points))}", soft_wrap=True)
    columns = (Column(name, justify="right", no_wrap=True) for name in ("A", "B", "B over A"))
    table = Table("load", "strategy", "figure", *columns, box=box.SIMPLE_HEAD)
    for change in found.changes:
        if change.a is not None or change.b is not None:
            table.add_row(change.point.load, change.point.label, change.figure, *_cells(change))
    if found.changes:
        out.print(table)
    verdict = "[green]comparable[/]: every setting is the same" if found.comparable else "[bold red]not comparable[/]"
    out.print(f"verdict   {verdict}")


def _cells(change: Change) -> tuple[str, str, str]:
    ratio = words.interval(change.ratio)
    if change.ratio is None and change.a and change.b is not None:
        ratio = words.times(change.b / change.a)
    return words.number(change.a), words.number(change.b), ratio
