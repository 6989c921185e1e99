"""``dflow-trt inspect``."""

from __future__ import annotations

from pathlib import Path

import click

from dflow_trt.cli.common import FOLDER, bundle_json, print_json
from dflow_trt.cli.interrupts import loading


@click.command()
@click.argument("bundle", type=FOLDER)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def inspect(bundle: Path, as_json: bool) -> None:
    """Show what a bundle holds, and check it."""
    with loading():
        from dflow_trt import console
        from dflow_trt.bundle import open_bundle

    opened = open_bundle(bundle)
    if as_json:
        print_json(bundle_json(opened))
    else:
        console.show_bundle(opened)
