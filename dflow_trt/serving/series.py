"""Metric families as data, their series in memory, and the sinks that publish them.

One update of Triton's endpoint is a message between two processes (11 us measured), so events move numbers in memory
and a thread hands on what has changed, once a second. Histograms are published as counters ``_bucket`` (with ``le``),
``_sum`` and ``_count``, as Prometheus reads them: Triton's own histogram takes one message an observation.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, Protocol

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, eq=False)
class Family:
    """One metric family.

    buckets: upper bounds of a histogram. One of lengths has none here: they are 0, 1, 2, ... to the longest that there
    can be; it has ``reached``, the counter, with one more label ``position``, of lengths that were so long or longer.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    reached: Family | None = None

    @property
    def series_names(self) -> tuple[str, ...]:
        """The names of its series."""
        suffixes = ("_bucket", "_sum", "_count") if self.kind == "histogram" else ("",)
        return tuple(self.name + suffix for suffix in suffixes)

    @property
    def series_labels(self) -> tuple[str, ...]:
        """The labels that its series may have."""
        return (*self.labels, "le") if self.kind == "histogram" else self.labels


# -- sinks -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Series:
    """One line of an endpoint: one of its family's series_names, and labels."""

    name: str
    family: Family
    labels: Mapping[str, str]


class Sink(Protocol):
    """Where series go. Called by one thread at a time, with one and the same Series for a line."""

    def write(self, series: Series, value: float) -> None:
        """The value of a series now: of a counter its total, which never falls."""


class MemorySink:
    """Series in a dictionary."""

    def __init__(self) -> None:
        self.values: dict[Series, float] = {}

    def write(self, series: Series, value: float) -> None:
        self.values[series] = value

    def sum(self, name: str, **labels: str) -> float:
        """The sum of all series of that name that have these labels."""
        wanted = labels.items()
        return sum(value for each, value in self.values.items() if each.name == name and wanted <= each.labels.items())


class TritonSink:
    """Triton's metrics endpoint.

    utils: the module ``triton_python_backend_utils``, which exists in a Python model alone. The server keeps a series
    when its model is unloaded; a model that is loaded again counts on from there.
    """

    def __init__(self, utils: Any) -> None:
        self._kinds = utils.MetricFamily
        self._families: dict[str, Any] = {}
        self._metrics: dict[Series, Any] = {}
        self._sent: dict[Series, float] = {}

    def write(self, series: Series, value: float) -> None:
        metric = self._metrics.get(series)
        if metric is None:
            metric = self._metrics[series] = self._family(series).Metric(labels=dict(series.labels))
        if series.family.kind == "gauge":
            metric.set(value)
        else:
            metric.increment(value - self._sent.get(series, 0.0))
            self._sent[series] = value

    def _family(self, series: Series) -> Any:
        if series.name not in self._families:
            kind = self._kinds.GAUGE if series.family.kind == "gauge" else self._kinds.COUNTER
            self._families[series.name] = self._kinds(name=series.name, description=series.family.help, kind=kind)
        return self._families[series.name]


# -- cells -------------------------------------------------------------------------------------------------------------


class Number:
    """The value of a counter or gauge with given labels."""

    def __init__(self, family: Family, labels: Mapping[str, str]) -> None:
        self.lines: tuple[Series, ...] = (Series(family.name, family, labels),)
        self.value = 0.0

    def values(self) -> list[float]:
        """One for each of the lines."""
        return [self.value]


class Histogram:
    """Observations by bucket with given labels; the last count is of all above the highest bound."""

    def __init__(self, family: Family, labels: Mapping[str, str], bounds: tuple[float, ...]) -> None:
        self._bounds, self._reached = bounds, family.reached
        self._counts, self._total = [0] * (len(self._bounds) + 1), 0.0
        bucket, total, count = family.series_names
        edges = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        self.lines = (
            *(Series(bucket, family, {**labels, "le": edge}) for edge in edges),
            Series(total, family, labels),
            Series(count, family, labels),
            *self._positions(labels),
        )

    def _positions(self, labels: Mapping[str, str]) -> list[Series]:
        if self._reached is None:
            return []
        name, family = self._reached.name, self._reached
        return [Series(name, family, {**labels, "position": str(p)}) for p in range(1, len(self._bounds))]

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._total += value * count

    def values(self) -> list[float]:
        """One for each of the lines."""
        below: list[float] = list(accumulate(self._counts))
        count = below[-1]
        reached = [count - shorter for shorter in below[:-2]] if self._reached else []
        return [*below, self._total, count, *reached]


class Registry:
    """All series of a process. Their owner makes and moves the cells, holding ``lock``.

    A flush reads without the lock: what it read of a cell half moved is corrected by the next one.
    """

    def __init__(self, sink: Sink) -> None:
        self.lock = threading.Lock()
        self._sink, self._flushing = sink, threading.Lock()
        self._numbers: dict[tuple[Family, tuple[str, ...]], Number] = {}
        self._histograms: list[Histogram] = []
        self._written: dict[Number | Histogram, list[float]] = {}

    def number(self, family: Family, labels: tuple[str, ...] = ()) -> Number:
        """The counter or gauge of a family with these labels, in the family's order."""
        cell = self._numbers.get((family, labels))
        if cell is None:
            cell = self._numbers[family, labels] = Number(family, _named(family, labels))
        return cell

    def histogram(self, family: Family, labels: tuple[str, ...], bounds: tuple[float, ...]) -> Histogram:
        """A new histogram of a family, with these labels in the family's order and these upper bounds."""
        self._histograms.append(Histogram(family, _named(family, labels), bounds))
        return self._histograms[-1]

    def flush(self) -> None:
        """Hand the sink what has changed since the last time; new series are handed over whatever their value."""
        with self._flushing:
            cells: list[Number | Histogram] = [*list(self._numbers.values()), *list(self._histograms)]
            for cell in cells:
                values, written = cell.values(), self._written.get(cell)
                if values == written:
                    continue
                for i, (series, value) in enumerate(zip(cell.lines, values, strict=True)):
                    if written is None or value != written[i]:
                        self._sink.write(series, value)
                self._written[cell] = values


def _named(family: Family, labels: Sequence[str]) -> dict[str, str]:
    return dict(zip(family.labels, labels, strict=True))


class Repeater:
    """Calls something every so many seconds, in a thread of its own, and once more when it is closed."""

    def __init__(self, action: Callable[[], None], seconds: float) -> None:
        self._action, self._seconds, self._stop = action, seconds, threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._seconds):
            self._action()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._action()
