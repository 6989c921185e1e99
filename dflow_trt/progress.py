"""A progress bar on standard error, as long jobs of every kind show it."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, ProgressColumn, TaskID


class ProgressBar:
    """A bar of these columns for the time of a ``with``; not where ``console`` is no terminal, or it is not ``shown``.

    transient: it goes when it is done. What a job counts, and in how many tasks, is for those who derive from it.
    """

    def __init__(self, console: Console, *columns: ProgressColumn, shown: bool = True, transient: bool = False) -> None:
        self._console = console
        disabled = not (shown and console.is_terminal)
        self._bar = Progress(*columns, console=console, transient=transient, disable=disabled)
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, line: str) -> None:
        """A line that stays, above the bar or without one."""
        self._console.print(escape(line))
