"""``dflow-trt plan``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from dflow_trt.cli.build import build
from dflow_trt.cli.common import FOLDER, drafter_source, print_json
from dflow_trt.cli.interrupts import loading


def _options_of_build(*names: str) -> Callable[[Any], Any]:
    """These options of `build`, word for word."""

    def add(command: Any) -> Any:
        shared = [param for param in build.params if param.name in names]
        command.__click_params__ = [*getattr(command, "__click_params__", []), *reversed(shared)]
        return command

    return add


@click.command()
@click.argument("target", type=FOLDER)
@click.argument("drafters", nargs=-1, metavar="[[NAME=]DRAFTER]...")
@click.option("--gpu-memory", metavar="SIZE", help="Of the card (or the machine), e.g. 80GiB; adds what fits into it.")
@click.option(
    "--memory-fraction", type=float, help="What may be used of it: the CUDA context takes some. [default: 0.9]"
)
@click.option("--backend", default="tensorrt", show_default=True, help="As in build; it need not be installed.")
@_options_of_build(
    "dtype",
    "max_batch_size",
    "max_input_len",
    "max_seq_len",
    "max_num_tokens",
    "draft_weights",
    "target_weights",
    "draft_logits",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def plan(
    target: Path,
    drafters: Sequence[str],
    gpu_memory: str | None,
    memory_fraction: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Show the memory that a pair needs and, with --gpu-memory, which batches and lengths fit. Nothing is loaded."""
    with loading():
        from dflow_trt import console
        from dflow_trt.build import BuildOptions
        from dflow_trt.plan import MEMORY_FRACTION, make_plan, parse_size

    memory = None if gpu_memory is None else parse_size("--gpu-memory", gpu_memory)
    fraction = MEMORY_FRACTION if memory_fraction is None else memory_fraction
    made = make_plan(target, [drafter_source(text) for text in drafters], BuildOptions(**options), memory, fraction)
    if as_json:
        print_json(made.figures())
    else:
        console.show_plan(made)
