"""The group of all commands."""

from __future__ import annotations

from importlib import import_module

import click

from dflow_trt import __version__

COMMANDS = (
    "build:build",
    "doctor:doctor",
    "example:example",
    "export:export_trtllm",
    "generate:generate",
    "inspect:inspect",
    "package:package",
    "plan:plan",
    "profile:profile",
    "serve:serve",
    "train:train",
)
"""module:command in this package. The modules declare options; what a command needs, it imports when it runs."""


@click.group(
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings={
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
)
@click.version_option(__version__, prog_name="dflow-trt")
@click.pass_context
def cli(context: click.Context) -> None:
    """DFlow block-diffusion speculative decoding: build a bundle, generate from it, look inside."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        context.exit(2)


for _entry in COMMANDS:
    _module, _, _command = _entry.partition(":")
    cli.add_command(getattr(import_module(f"{__package__}.{_module}"), _command))
