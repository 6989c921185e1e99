"""How far a profile is, on standard error."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeRemainingColumn

from dflow_trt.profiling.record import Point
from dflow_trt.progress import ProgressBar


class Progress(ProgressBar):
    """:class:`dflow_trt.profiling.session.Report` as a bar of turns."""

    def __init__(self, console: Console) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn())
        super().__init__(console, *columns, TimeRemainingColumn(), transient=True)
        self._running = False

    def begin(self, turns: int) -> None:
        self._task = self._bar.add_task("profile", total=turns)

    def turn(self, point: Point) -> None:
        """One begins, so the one before is done."""
        assert self._task is not None
        self._bar.update(self._task, description=f"{point.label}, {point.load}", advance=int(self._running))
        self._running = True

    def note(self, line: str) -> None:
        if self._task is not None:
            self._bar.update(self._task, description=line)
