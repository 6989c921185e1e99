"""``dflow-trt package``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from dflow_trt.cli.common import FOLDER, print_json, serving_options
from dflow_trt.cli.interrupts import loading, undo_on_sigterm


@click.command()
@click.argument("bundle", type=FOLDER)
@click.option("--output", type=FOLDER, required=True, help="Folder of the model repository.")
@click.option("--timeout", type=float, help="Seconds a request may take, waiting included. [default: no limit]")
@serving_options
@click.option("--force", is_flag=True, help="Replace an existing folder.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def package(bundle: Path, output: Path, shares: Sequence[str], force: bool, as_json: bool, **options: Any) -> None:
    """Write a bundle as a Triton model repository, which a stock tritonserver loads."""
    with loading():
        from dflow_trt.serving.package import PackageOptions, package_bundle, read_share

    undo_on_sigterm()
    chosen = PackageOptions(shares=dict(map(read_share, shares)), **options)
    made = package_bundle(bundle, output, chosen, force)
    if as_json:
        print_json(dataclasses.asdict(made))
        return
    click.echo(f"{made.path}: {', '.join(made.models)}")
    click.echo(f"a tritonserver whose Python has dflow-trt takes it: tritonserver --model-repository={made.path}")
    click.echo(f"with an OpenAI endpoint, and with pip's server: dflow-trt serve {bundle}")
