"""What several commands share."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflow_trt.cli.interrupts import loading
from dflow_trt.errors import UserError
from dflow_trt.spec import DRAFT_POLICIES

if TYPE_CHECKING:
    from dflow_trt.api import Prompt
    from dflow_trt.build import DrafterSource
    from dflow_trt.bundle import Bundle

FOLDER = click.Path(path_type=Path, file_okay=False)
FILE = click.Path(path_type=Path)
POSITIVE = click.IntRange(1)
SETTINGS = r"[a-z_]+=\d{1,9}(,[a-z_]+=\d{1,9})*"  # behind a drafter's folder


def size_option(name: str, help_text: str, default: int | None = None) -> Callable[[Any], Any]:
    """An integer flag, spelled with dashes and, as trtllm-build does, with underscores."""
    return click.option(f"--{name}", f"--{name.replace('-', '_')}", type=int, default=default, help=help_text)


def serving_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How a served model behaves: what ``package`` writes down and ``serve`` runs with."""
    for option in (
        click.option("--threads", type=POSITIVE, help="CPU threads of the model. [default: all cores]"),
        click.option(
            "--draft-policy",
            type=click.Choice(DRAFT_POLICIES),
            default="fixed",
            show_default=True,
            help="adaptive: draft less where drafts do not pay. The text stays the same.",
        ),
        click.option(
            "--strategy-share",
            "shares",
            multiple=True,
            metavar="NAME=SHARE",
            help="Give this share of them to another strategy, e.g. dflow=0.05; repeatable.",
        ),
        click.option("--strategy", help="Of requests that name none. [default: the bundle's best]"),
        click.option(
            "--max-queue", type=click.IntRange(0), default=128, show_default=True, help="Sequences that may wait."
        ),
    ):
        command = option(command)
    return command


def drafter_source(text: str) -> DrafterSource:
    """The drafter that ``[NAME=]DIR[:KEY=NUMBER,..]`` names; UserError where it is spelt otherwise."""
    with loading():
        from dflow_trt.build import DrafterSource

    folder, settings = _settings(text)
    name, separator, path = folder.partition("=")
    if separator and not Path(folder).exists():
        if not name:
            raise UserError(f"--drafter: {text!r} has no name before '='; allowed: NAME=DIR, or DIR alone")
        return DrafterSource(_folder(path), name, settings)
    return DrafterSource(_folder(folder), None, settings)


def _folder(text: str) -> Path:
    """A path. ngram alone is no folder; ./ngram is one, and stays one where a path drops the dot."""
    if not text:
        raise UserError("--drafter: the name of its folder is empty; allowed: [NAME=]DIR[:KEY=NUMBER,..]")
    path = Path(text)
    return path.absolute() if len(path.parts) == 1 and text != str(path) else path


def _settings(text: str) -> tuple[str, dict[str, int]]:
    """What stands before the last colon, and the numbers behind it; all of it where a folder's own name has a colon."""
    folder, colon, tail = text.rpartition(":")
    name, separator, path = text.partition("=")
    if not colon or Path(text).exists() or (separator and ":" not in name and Path(path).exists()):
        return text, {}
    if not re.fullmatch(SETTINGS, tail, re.ASCII):
        raise UserError(
            f"--drafter: {text!r} is no folder, and {tail!r} behind its colon no settings; allowed: KEY=NUMBER,.. with "
            "whole numbers of up to 9 digits, e.g. drafts=5"
        )
    pairs = [part.split("=") for part in tail.split(",")]
    names = [key for key, _ in pairs]
    if len(set(names)) < len(names):
        raise UserError(f"--drafter: {text!r} sets {max(names, key=names.count)} twice; allowed: once")
    return folder, {key: int(value) for key, value in pairs}


def bundle_json(bundle: Bundle) -> dict[str, Any]:
    """A bundle as JSON shows it: the manifest, its tensors, its memory."""
    with loading():
        from dflow_trt.memory import plan_memory

    engines = {
        f"{name}.{contract.engine}" if name else contract.engine: dataclasses.asdict(contract)
        for name, contract in bundle.contracts()
    }
    manifest = json.loads((bundle.path / "dflow.json").read_text(encoding="utf-8"))
    return {
        "path": str(bundle.path),
        **manifest,
        "engines": engines,
        "strategies": list(bundle.strategies),
        "memory": plan_memory(bundle).figures(),
    }


def as_chat(prompt: Prompt) -> Prompt:
    """A text as one user message; token ids and messages as they are."""
    text = prompt if isinstance(prompt, str) else prompt.get("prompt")
    return prompt if text is None else {"messages": [{"role": "user", "content": text}]}


def print_json(data: Any) -> None:
    """Data as one line of JSON on standard output."""
    click.echo(json.dumps(data, ensure_ascii=False, default=str))
