"""``dflow-trt``: the command line. Every command imports what it needs when it runs, so that help is quick."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from dflow_trt.cli.interrupts import INTERRUPTED, loading

if TYPE_CHECKING:
    from dflow_trt.cli.group import cli

__all__ = ["cli", "main"]


def __getattr__(name: str) -> Any:
    """The group ``cli`` loads on first use: importing this package takes no time in which Ctrl-C could fall."""
    if name != "cli":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dflow_trt.cli.group import cli

    return cli


def main() -> None:
    """The console script: exits with 0, 1 for a UserError, 2 for wrong arguments, 130 for Ctrl-C; one line says why."""
    try:
        with loading():
            from dflow_trt.cli.script import run
        code = run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)
