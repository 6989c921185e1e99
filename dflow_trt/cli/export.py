"""``dflow-trt export-trtllm``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from dflow_trt.cli.common import FOLDER, print_json, size_option
from dflow_trt.cli.interrupts import loading, undo_on_sigterm
from dflow_trt.spec import DTYPES

SERVER_LIMIT = "As in build; written where given."


@click.command("export-trtllm")
@click.option("--target", type=FOLDER, required=True, help="Folder of the target model.")
@click.option("--drafter", type=FOLDER, required=True, help="Folder of the drafter.")
@click.option("--output", type=FOLDER, required=True, help="Folder of the export.")
@click.option("--trtllm-version", "version", help="Whose configuration is written. [default: 1.4]")
@click.option(
    "--dtype", type=click.Choice(DTYPES[1:]), help="Of the drafter. [default: the target's; bfloat16 for float32]"
)
@size_option("max-batch-size", SERVER_LIMIT)
@size_option("max-input-len", SERVER_LIMIT)
@size_option("max-seq-len", SERVER_LIMIT)
@size_option("max-num-tokens", SERVER_LIMIT)
@click.option("--force", is_flag=True, help="Replace an existing export.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def export_trtllm(
    target: Path,
    drafter: Path,
    output: Path,
    version: str | None,
    dtype: Any,
    force: bool,
    as_json: bool,
    **limits: int | None,
) -> None:
    """Write a drafter for TensorRT-LLM's DFlash, with the YAML files that serve the pair there."""
    with loading():
        from dflow_trt.trtllm.export import Limits, export_trtllm
        from dflow_trt.trtllm.schema import DEFAULT_VERSION

    undo_on_sigterm()
    chosen = version or DEFAULT_VERSION
    made = export_trtllm(target, drafter, output, version=chosen, dtype=dtype, limits=Limits(**limits), force=force)
    if as_json:
        print_json(dataclasses.asdict(made))
        return
    click.echo(f"{made.path}: {', '.join(made.files)}")
    for note in made.notes:
        click.echo(f"note: {note}")
