"""How long TensorRT-RTX compiles engines ahead of time, how much memory that takes and how large they become.

Random weights of Qwen3's sizes, a DFlow drafter beside the target. Sizes that are compiled at two depths are
extrapolated to their own: layers are alike, so time, size and memory grow linearly with them. Needs no GPU. Prints a
table for people; the last line is JSON.

    python build_scripts/bench_rtx.py                                  # 0.6B whole, the others at 2 and 4 layers
    python build_scripts/bench_rtx.py --case 1.7b:2 --case 1.7b:4 --folder /big/disk --output rtx.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_build import SIZES, configs, drafter_shapes, target_shapes, write_checkpoint
from bench_common import print_settings, print_table, settings

DEFAULT_CASES = ("0.6b", *(f"{size}:{layers}" for size in ("1.7b", "4b", "8b") for layers in (2, 4)))
FULL_LAYERS, DRAFT_LAYERS = 1, 7  # places in SIZES
FIGURES = ("seconds", "size", "memory")


def build(case: str, place: Path, flags: Sequence[str]) -> dict[str, Any]:
    """Compile one pair in a process of its own; the figures of every engine."""
    size, _, layers = case.partition(":")
    target, drafter = configs(size, int(layers) if layers else None)
    write_checkpoint(place / "target", target, target_shapes(target))
    write_checkpoint(place / "drafter", drafter, drafter_shapes(drafter), 1)
    command = [sys.executable, "-m", "dflow_trt", "build", "--json", "--backend", "tensorrt-rtx", "--self-check", "off"]
    command += ["--target", place / "target", "--drafter", place / "drafter", "--output", place / "bundle", *flags]
    start = time.perf_counter()
    ended = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{case}: the build failed, see above")
    built = json.loads(ended.stdout)
    row = {"case": case, "layers": target["num_hidden_layers"], "draft_layers": drafter["num_hidden_layers"]}
    return row | {"build_seconds": round(time.perf_counter() - start, 1), "engines": _figures(built)}


def _figures(built: dict[str, Any]) -> dict[str, dict[str, float]]:
    manifest = json.loads((Path(built["path"]) / "dflow.json").read_text(encoding="utf-8"))
    return {
        name.removesuffix(".engine"): {
            "seconds": entry["build_seconds"],
            "size": manifest["files"][name]["size"],
            "memory": entry["builder_memory"],
        }
        for name, entry in manifest["compiled"].items()
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
    for name in few["engines"]:
        kind, full = ("layers", layers) if name == "target" else ("draft_layers", draft_layers)
        step = more[kind] - few[kind]
        ends = zip(FIGURES, *([row["engines"][name][figure] for figure in FIGURES] for row in (few, more)), strict=True)
        engines[name] = {figure: a + (b - a) * (full - few[kind]) / step for figure, a, b in ends}
    return {"case": f"{size}, extrapolated", "layers": layers, "draft_layers": draft_layers, "engines": engines}


def show(rows: Sequence[dict[str, Any]]) -> None:
    """One line an engine."""
    cells = [
        (f"{row['case']} {name}", figures["seconds"], figures["size"] / 1e6, figures["memory"] / 1e6)
        for row in rows
        for name, figures in row["engines"].items()
    ]
    print_table("engines compiled ahead of time", ("pair and engine", "seconds", "MB", "builder MB"), cells)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time, memory and size of engines that TensorRT-RTX compiles.")
    parser.add_argument("--case", action="append", metavar="SIZE[:LAYERS]", help=f"of {', '.join(SIZES)}; repeatable")
    parser.add_argument("--compute-capability", default="8.9")
    parser.add_argument("--plugin", type=Path, help="the dflow:: plugins; without it their ONNX bodies are compiled")
    parser.add_argument("--folder", type=Path, help="where the temporary folder goes (the system's, if not given)")
    parser.add_argument("--output", type=Path, help="file for the JSON")
    options = parser.parse_args()
    flags = ["--compute-capability", options.compute_capability]
    flags += ["--plugin", str(options.plugin)] if options.plugin else ["--no-plugin"]
    rows = []
    for case in options.case or DEFAULT_CASES:
        print(f"compiling {case}", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="bench-rtx-", dir=options.folder) as place:
            rows.append(build(case, Path(place), flags))
    rows += extrapolate(rows)
    run = settings(1, compute_capability=options.compute_capability)
    print_settings(run)
    show(rows)
    text = json.dumps({"settings": run, "rows": rows})
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
