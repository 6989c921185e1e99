"""Ctrl-C and SIGTERM: an end without a traceback, whenever they come."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 130  # the exit code, as a shell gives it: 128 and the signal's number


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Around imports: Ctrl-C ends the process at once, for there is nothing to undo yet.

    A KeyboardInterrupt may be lost there, or become another error: extension modules and the import system's own
    callbacks do not pass it on. Whoever ignores the signal or handles it in another way keeps that.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def undo_on_sigterm() -> None:
    """Let SIGTERM do what Ctrl-C does: nothing half-written stays."""
    signal.signal(signal.SIGTERM, _raise)


def _raise(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
