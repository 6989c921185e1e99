"""How long TensorRT-RTX compiles engines ahead of time, how much memory that takes and how large they become.

Random weights of Qwen3's sizes, a DFlow drafter beside the target. Sizes that are compiled at two depths are
extrapolated to their own: layers are alike, so time, size and memory grow linearly with them; not so the context, whose
projection grows with the taps, and a shallow target has fewer. 0.6B, which is compiled whole too, shows how well that
holds. Needs no GPU. Prints a table for people; the last line is JSON.

    python build_scripts/bench_rtx.py                                  # 0.6B whole, every size at 2 and 4 layers
    python build_scripts/bench_rtx.py --case 1.7b:2 --case 1.7b:4 --folder /big/disk --output rtx.json
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_build import SIZES, configs, drafter_shapes, target_shapes, write_checkpoint
from bench_common import print_settings, print_table, settings

from dflow_trt import contract as c
from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.bundle import Bundle
from dflow_trt.compile import backends
from dflow_trt.compile.base import EngineOptions
from dflow_trt.compile.engine import EngineJob, EngineResult
from dflow_trt.compile.tensorrt_rtx import TensorRTRTX

DEFAULT_CASES = ("0.6b", *(f"{size}:{layers}" for size in ("0.6b", "1.7b", "4b", "8b") for layers in (2, 4)))
FULL_LAYERS, DRAFT_LAYERS = 1, 7  # places in SIZES
FIGURES = ("seconds", "cpu_seconds", "size", "memory")


class Watched(TensorRTRTX):
    """The backend, noting the processor time of every engine's own process."""

    cpu_seconds: dict[str, float]

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self.cpu_seconds = {}

    def _run(self, job: EngineJob) -> EngineResult:
        before = _children_seconds()
        result = super()._run(job)
        self.cpu_seconds[Path(job.engine).name] = _children_seconds() - before
        return result


def _children_seconds() -> float:
    """Processor seconds of the processes that have ended, all their threads together."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def build(case: str, place: Path, engine: EngineOptions) -> dict[str, Any]:
    """Compile one pair, each engine in a process of its own; their figures."""
    size, _, layers = case.partition(":")
    target, drafter = configs(size, int(layers) if layers else None)
    write_checkpoint(place / "target", target, target_shapes(target))
    write_checkpoint(place / "drafter", drafter, drafter_shapes(drafter), 1)
    backend = Watched(engine)
    backends.BACKENDS[Watched.name] = lambda options: backend
    start = time.perf_counter()
    sources, options = [DrafterSource(place / "drafter")], BuildOptions(Watched.name, engine=engine)
    bundle = build_bundle(place / "target", sources, place / "bundle", options, self_check="off")
    row = {"case": case, "layers": target["num_hidden_layers"], "draft_layers": drafter["num_hidden_layers"]}
    return row | {
        "build_seconds": round(time.perf_counter() - start, 1),
        "built_with": bundle.built_with,
        "engines": _figures(bundle, backend.cpu_seconds),
    }


def _figures(bundle: Bundle, cpu_seconds: dict[str, float]) -> dict[str, dict[str, float]]:
    return {
        name.removesuffix(".engine"): {
            "seconds": entry.build_seconds,
            "cpu_seconds": round(cpu_seconds[name], 2),
            "size": bundle.files[name].size,
            "memory": entry.builder_memory,
        }
        for name, entry in bundle.engines.items()
    }


def extrapolate(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the sizes that were compiled at two depths would need whole."""
    found = []
    for size in dict.fromkeys(row["case"].partition(":")[0] for row in rows if ":" in row["case"]):
        pair = [row for row in rows if row["case"].startswith(f"{size}:")][:2]
        if len(pair) == 2:
            found.append(_whole(size, *pair))
    return found


def _whole(size: str, few: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    layers, draft_layers = SIZES[size][FULL_LAYERS], SIZES[size][DRAFT_LAYERS]
    engines = {}
    for name in [name for name in few["engines"] if not name.endswith(c.CONTEXT)]:
        kind, full = ("layers", layers) if name == "target" else ("draft_layers", draft_layers)
        step = more[kind] - few[kind]
        ends = zip(FIGURES, *([row["engines"][name][figure] for figure in FIGURES] for row in (few, more)), strict=True)
        engines[name] = {figure: a + (b - a) * (full - few[kind]) / step for figure, a, b in ends}
    return {"case": f"{size}, extrapolated", "layers": layers, "draft_layers": draft_layers, "engines": engines}


def show(rows: Sequence[dict[str, Any]]) -> None:
    """One line an engine."""
    cells = [
        (f"{row['case']} {name}", *(figures[key] for key in FIGURES[:2]), *(figures[key] / 1e6 for key in FIGURES[2:]))
        for row in rows
        for name, figures in row["engines"].items()
    ]
    headers = ("pair and engine", "seconds", "processor seconds", "MB", "peak MB of the builder")
    print_table("engines compiled ahead of time", headers, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time, memory and size of engines that TensorRT-RTX compiles.")
    parser.add_argument("--case", action="append", metavar="SIZE[:LAYERS]", help=f"of {', '.join(SIZES)}; repeatable")
    parser.add_argument("--compute-capability", default="8.9")
    parser.add_argument("--plugin", type=Path, help="the dflow:: plugins; without it their ONNX bodies are compiled")
    parser.add_argument("--folder", type=Path, help="where the temporary folder goes (the system's, if not given)")
    parser.add_argument("--output", type=Path, help="file for the JSON")
    options = parser.parse_args()
    capabilities = (options.compute_capability,)
    engine = EngineOptions(options.plugin, no_plugin=options.plugin is None, compute_capabilities=capabilities)
    rows = []
    for case in options.case or DEFAULT_CASES:
        print(f"compiling {case}", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="bench-rtx-", dir=options.folder) as place:
            rows.append(build(case, Path(place), engine))
    run = settings(1, compute_capability=options.compute_capability, built_with=rows[0]["built_with"])
    rows += extrapolate(rows)
    print_settings(run)
    show(rows)
    text = json.dumps({"settings": run, "rows": rows})
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
