"""``dflow-trt example``."""

from __future__ import annotations

from pathlib import Path

import click

from dflow_trt.cli.common import FOLDER
from dflow_trt.cli.interrupts import loading

OTHERS = ("target", "prompts.jsonl")
SETTINGS = dict.fromkeys(("eagle3", "draft-model"), ":drafts=7")  # as many as the blocks of the others have


@click.command()
@click.argument("folder", type=FOLDER)
def example(folder: Path) -> None:
    """Write the example (a target, drafters of several kinds, prompts) into FOLDER."""
    with loading():
        from dflow_trt.example import write_example

    names = write_example(folder)
    click.echo(f"{folder}: {', '.join(names)}")
    sources = [f"{folder / name}{SETTINGS.get(name, '')}" for name in names if name not in OTHERS]
    drafters = " ".join(f"--drafter {source}" for source in [*sources, "ngram"])
    click.echo(f"next: dflow-trt build --target {folder / 'target'} {drafters} --output {folder / 'bundle'}")
