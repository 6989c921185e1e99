"""How a long job tells where it is: a progress bar on standard error, or nothing."""

from __future__ import annotations

from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dflow_trt.progress import ProgressBar


class Report(Protocol):
    """What a job tells while it runs."""

    def stage(self, title: str, total: int, done: int = 0) -> None:
        """A new stage begins; `done` of its `total` parts are there already."""

    def advance(self, done: int, note: str = "") -> None:
        """So many parts of the stage are done now."""

    def say(self, line: str) -> None:
        """A line that stays."""


class Silent:
    """A :class:`Report` to nobody."""

    def stage(self, title: str, total: int, done: int = 0) -> None:
        pass

    def advance(self, done: int, note: str = "") -> None:
        pass

    def say(self, line: str) -> None:
        pass


class Bar(ProgressBar):
    """A :class:`Report` as a progress bar on standard error; without a terminal its lines alone."""

    def __init__(self, shown: bool = True) -> None:
        columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        rest = (TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
        super().__init__(Console(stderr=True, highlight=False, soft_wrap=True), *columns, *rest, shown=shown)

    def stage(self, title: str, total: int, done: int = 0) -> None:
        self._task = self._bar.add_task(title, total=total, completed=done, note="")

    def advance(self, done: int, note: str = "") -> None:
        assert self._task is not None, "within a stage"
        self._bar.update(self._task, completed=done, note=note)
