"""``dflow-trt build``."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from dflow_trt.cli.common import FILE, FOLDER, bundle_json, drafter_source, print_json, size_option
from dflow_trt.cli.interrupts import loading, undo_on_sigterm
from dflow_trt.spec import DTYPES, HARDWARE, WEIGHT_FORMS

ENGINE_OPTIONS: dict[str, dict[str, Any]] = {
    "--plugin": {
        "type": FILE,
        "help": "Library of the dflow:: plugins. [default: the checkout's]",
    },
    "--no-plugin": {"is_flag": True, "help": "Compile the ONNX bodies of the plugins' nodes instead."},
    "--compute-capability": {
        "multiple": True,
        "metavar": "N.N",
        "help": "GPUs of tensorrt-rtx; repeatable. [default: 8.0 and all later that it has]",
    },
    "--hardware-compatibility": {
        "type": click.Choice(HARDWARE),
        "default": "none",
        "show_default": True,
        "help": "On what else than this GPU engines of tensorrt run.",
    },
    "--version-compatible": {"is_flag": True, "help": "Let engines of tensorrt run on later versions, too."},
    "--timing-cache": {"type": FOLDER, "help": "Where tensorrt keeps its timings from build to build."},
    "--keep-onnx": {"is_flag": True, "help": "Leave the graphs in the bundle, beside the compiled engines."},
}
"""How engines are compiled; see :class:`dflow_trt.compile.base.EngineOptions`."""


def _engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of compiled engines, gathered into one argument ``engine``."""

    @functools.wraps(command)
    def gathered(*arguments: Any, **options: Any) -> Any:
        names = [flag.removeprefix("--").replace("-", "_") for flag in ENGINE_OPTIONS]
        return command(*arguments, engine={name: options.pop(name) for name in names}, **options)

    for flag, settings in reversed(ENGINE_OPTIONS.items()):
        gathered = click.option(flag, **settings)(gathered)
    return gathered


@click.command()
@click.option("--target", type=FOLDER, required=True, help="Folder of the target model (Qwen3, safetensors).")
@click.option(
    "--drafter",
    "drafters",
    multiple=True,
    metavar="[NAME=]DIR[:KEY=N,..]",
    help="A DFlash, DFlow, Domino or EAGLE-3 drafter, a smaller model (drafts=N), or ngram; repeatable.",
)
@click.option("--output", type=FOLDER, required=True, help="Folder of the bundle.")
@click.option(
    "--backend", default="onnxruntime", show_default=True, help="onnxruntime (CPU), tensorrt, or tensorrt-rtx."
)
@click.option("--dtype", type=click.Choice(DTYPES), help="[default: float32 on onnxruntime, else bfloat16]")
@size_option("max-batch-size", "Requests in flight. [default: 8]", 8)
@size_option("max-input-len", "Longest prompt. [default: 1024, or what fits]")
@size_option("max-seq-len", "Longest prompt and output together. [default: 2048, or what the target takes]")
@size_option("max-num-tokens", "Token rows of one step. [default: 256, or batch x (drafts + 1)]")
@click.option("--draft-weights", type=click.Choice(WEIGHT_FORMS), help="[default: int8 on onnxruntime, else float]")
@click.option("--target-weights", type=click.Choice(WEIGHT_FORMS), default="float", show_default=True)
@_engine_options
@click.option("--self-check", type=click.Choice(["off", "layer", "full"]), default="layer", show_default=True)
@click.option("--draft-logits", is_flag=True, help="Also give the drafter's logits (for analysis; slower).")
@click.option("--force", is_flag=True, help="Replace an existing bundle.")
@click.option("--json", "as_json", is_flag=True, help="Print what was built as JSON.")
def build(
    target: Path,
    drafters: Sequence[str],
    output: Path,
    self_check: str,
    force: bool,
    as_json: bool,
    engine: dict[str, Any],
    **options: Any,
) -> None:
    """Build a bundle from a target and its drafters."""
    with loading():
        from dflow_trt import console
        from dflow_trt.build import BuildOptions, build_bundle
        from dflow_trt.compile.base import EngineOptions

    start = time.perf_counter()
    engine["compute_capabilities"] = engine.pop("compute_capability")
    sources = [drafter_source(text) for text in drafters]
    undo_on_sigterm()
    with console.BuildProgress() as progress:
        bundle = build_bundle(
            target,
            sources,
            output,
            BuildOptions(**options, engine=EngineOptions(**engine)),
            force=force,
            self_check=self_check,
            report=progress,
        )
    if as_json:
        print_json(bundle_json(bundle))
    else:
        console.show_built(bundle, time.perf_counter() - start)
