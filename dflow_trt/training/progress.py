"""How a long job tells where it is: a progress bar on standard error, or nothing."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


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


class Bar:
    """A :class:`Report` as a progress bar on standard error; without a terminal its lines alone."""

    def __init__(self, shown: bool = True) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        rest = (TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
        self._bar = Progress(*columns, *rest, console=self._console, disable=not (shown and self._console.is_terminal))
        self._task: Any = None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def stage(self, title: str, total: int, done: int = 0) -> None:
        self._task = self._bar.add_task(title, total=total, completed=done, note="")

    def advance(self, done: int, note: str = "") -> None:
        self._bar.update(self._task, completed=done, note=note)

    def say(self, line: str) -> None:
        self._console.print(escape(line))
