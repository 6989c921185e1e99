"""The console script: how a command ends, and what it says then."""

from __future__ import annotations

import io
import os
import sys

import click

from dflow_trt.cli.group import cli
from dflow_trt.errors import UserError


def run() -> int:
    """Run the command line; its exit code. What is wrong is one line: code 2 for its words, 1 for what they led to.

    Raises KeyboardInterrupt where the user ended it.
    """
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="replace")  # a terminal that cannot show a character shows a mark
    try:
        code: int | None = cli(prog_name="dflow-trt", standalone_mode=False)
        if sys.stdout is not None:  # None where the caller closed it
            sys.stdout.flush()
    except UserError as error:
        return _failed(str(error))
    except click.exceptions.Abort:
        raise KeyboardInterrupt from None
    except click.ClickException as error:
        return _failed(_one_line(error), error.exit_code)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _failed(f"{error.filename or 'the system'}: {error.strerror or error}")
    return code or 0


def _failed(line: str, code: int = 1) -> int:
    click.echo(f"error: {line}", err=True)
    return code


def _one_line(error: click.ClickException) -> str:
    """Click's message in our style; where options or arguments are wrong, with the place that lists them."""
    message = " ".join(error.format_message().split()).rstrip(".")
    found = message[:1].lower() + message[1:]
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"{found} (see {error.ctx.command_path} --help)"
    return found
