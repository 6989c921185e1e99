"""What the benchmarks share: clocks, interleaving, checks of equal output, tables, and the settings of a run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflow_trt.profiling.machine import machine, package_version
from dflow_trt.profiling.measure import Asked, Run
from dflow_trt.profiling.record import Point
from dflow_trt.profiling.session import Driver

REPO = Path(__file__).resolve().parent.parent
NEAR_TIE = 1e-3  # a first difference is a rounding matter when the top two logits are closer than this
PACKAGES = ("torch", "transformers", "dflash")  # beside those of every profile


class Disagreement(Exception):
    """Two runs that must emit the same tokens do not."""


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The names, beginning with another one each turn: nobody always runs first."""
    start = turn % len(names)
    return [*names[start:], *names[:start]]


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Median of a[i] / b[i], the repetitions taken in pairs: slow phases of the machine hit both sides."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def check_equal(name: str, expected: Sequence[Sequence[int]], got: Sequence[Sequence[int]]) -> dict[str, int]:
    """Every sequence the same, token by token; raises Disagreement."""
    wrong = [i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if tuple(a) != tuple(b)]
    if wrong:
        raise Disagreement(f"{name}: sequences {wrong[:5]} of {len(expected)} differ from ar")
    return {"sequences": len(expected), "same": len(expected)}


def check_near_ties(
    name: str,
    model: Any,
    prompts: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Equal up to first differences at which the model's top two logits are nearly tied; raises Disagreement.

    model: the float32 transformers model that settles it.
    """
    gaps = []
    for i, (prompt, a, b) in enumerate(zip(prompts, ours, theirs, strict=True)):
        first = common_prefix(a, b)
        if first == len(a) == len(b):
            continue
        gaps.append(top_two_gap(model, [*prompt, *a[:first]]))
        if gaps[-1] >= NEAR_TIE:
            raise Disagreement(f"{name}: sequence {i} differs from ar at token {first}, logit gap {gaps[-1]:.4f}")
    return {"sequences": len(ours), "same": len(ours) - len(gaps), "near_tie_gaps": gaps}


def top_two_gap(model: Any, tokens: Sequence[int]) -> float:
    """The distance of the two largest next-token logits after ``tokens``."""
    import torch

    with torch.inference_mode():
        top = model(torch.tensor([list(tokens)])).logits[0, -1].float().topk(2).values
    return float(top[0] - top[1])


def float_model(folder: Path) -> Any:
    """A target in transformers, float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


# -- turns -------------------------------------------------------------------------------------------------------------


class Contenders:
    """Ours and the peers as one driver: a point's strategy names the contender."""

    def __init__(self, drivers: Mapping[str, Driver]) -> None:
        self._drivers = drivers

    def run(self, point: Point, asked: Sequence[Asked], offsets: Sequence[float] | None = None) -> Run:
        """See :class:`dflow_trt.profiling.session.Driver`."""
        return self._drivers[point.strategy].run(point, asked, offsets)


# -- what a run ran on -------------------------------------------------------------------------------------------------


def settings(threads: int, **more: Any) -> dict[str, Any]:
    """Versions, processor, threads and load; ``more`` is added as it is."""
    found = machine()
    versions = found.versions | {name: version for name in PACKAGES if (version := package_version(name))}
    return found.model_dump() | {"versions": versions, "threads": threads, **more}


# -- output ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goal:
    """A figure that we hold ourselves to: at least, or at most, ``bound``."""

    name: str
    value: float
    bound: float
    at_least: bool

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def as_json(self) -> dict[str, Any]:
        sign = ">=" if self.at_least else "<="
        return {"name": self.name, "value": round(self.value, 4), "goal": f"{sign} {self.bound:g}", "met": self.met}


def print_table(title: str, headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table in plain text: the first column to the left, figures to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    print(f"\n{title}")
    for row in [list(headers), ["-" * width for width in widths], *cells]:
        figures = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        print("  ".join([row[0].ljust(widths[0]), *figures]).rstrip())


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


def print_settings(run: Mapping[str, Any]) -> None:
    """The settings, a line each."""
    for name, value in run.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        print(f"{name:14} {text}")


def print_goals(goals: Sequence[Goal]) -> None:
    """Goals, and whether this run meets them."""
    rows = []
    for goal in goals:
        line = goal.as_json()
        rows.append((goal.name, goal.value, line["goal"], "met" if goal.met else "MISSED"))
    print_table("Goals", ("goal", "measured", "wanted", ""), rows)
