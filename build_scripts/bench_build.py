"""How long a build takes and how much memory it needs, on random checkpoints of real sizes.

Writes a random Qwen3 target (bfloat16 shards) and a DFlow drafter into a temporary folder, runs ``dflow-trt build`` on
them in a process of its own, and watches that process's peak resident memory (VmHWM). Prints a table for people; the
last line is JSON. Fails if a peak is above the bound: 600 MB plus twice the largest tensor as it is stored.

    python build_scripts/bench_build.py                     # 1.7B dimensions, default options; about 16 GB of disk
    python build_scripts/bench_build.py --size small        # the same in seconds
    python build_scripts/bench_build.py --case default --case int8 --folder /big/disk
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dflow_trt.memory import show_bytes

FIXED_BYTES = 600_000_000
SHARD_BYTES = 1_900_000_000
PIECE = 4 << 20  # elements written at a time
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]

# hidden, layers, heads, kv heads, head_dim, intermediate, vocabulary, drafter layers
SIZES = {
    "8b": (4096, 36, 32, 8, 128, 12288, 151936, 5),
    "4b": (2560, 36, 32, 8, 128, 9728, 151936, 5),
    "1.7b": (2048, 28, 16, 8, 128, 6144, 151936, 5),
    "0.6b": (1024, 28, 16, 8, 128, 3072, 151936, 5),
    "small": (512, 2, 4, 2, 128, 1024, 151936, 2),
}
UNTIED = ("8b",)  # the released model has a head of its own
CASES = {
    "default": [],
    "int8": ["--target-weights", "int8"],
    "float": ["--draft-weights", "float"],
    "unchecked": ["--self-check", "off"],
    "full": ["--self-check", "full"],
}
UNBOUND = {"full"}  # a whole engine is loaded there, and the build says so


def configs(size: str, layers: int | None = None) -> tuple[Config, Config]:
    """config.json of target and drafter; ``layers``: of both, instead of as many as the size has."""
    hidden, full_layers, heads, kv_heads, head_dim, inner, vocab, draft_layers = SIZES[size]
    layers, draft_layers = layers or full_layers, min(layers or draft_layers, draft_layers)
    stack = {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
    }
    tied = size not in UNTIED
    target = stack | {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": tied, "eos_token_id": 1}
    taps = sorted({int(tap) for tap in np.linspace(0, layers - 2, draft_layers).round()})
    draft = {"block_size": 16, "mask_token_id": vocab - 1, "target_layer_ids": taps}
    drafter = stack | {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": draft_layers,
        "num_target_layers": layers,
        "dflash_config": draft,
        "dflow_config": {"relay_start": "after_rejection"},
    }
    return target, drafter


def _layers(config: Config, prefix: str) -> Shapes:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer: Shapes = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "self_attn.o_proj.weight": (hidden, q),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    names = range(config["num_hidden_layers"])
    shapes = {f"{prefix}layers.{i}.{name}": shape for i in names for name, shape in layer.items()}
    return shapes | {f"{prefix}norm.weight": (hidden,)}


def target_shapes(config: Config) -> Shapes:
    table = (config["vocab_size"], config["hidden_size"])
    head: Shapes = {} if config["tie_word_embeddings"] else {"lm_head.weight": table}
    return {"model.embed_tokens.weight": table} | _layers(config, "model.") | head


def drafter_shapes(config: Config) -> Shapes:
    hidden, taps = config["hidden_size"], len(config["dflash_config"]["target_layer_ids"])
    relay: Shapes = {
        "relay_norm.weight": (hidden,),
        "relay_norm.bias": (hidden,),
        "relay_mlp.0.weight": (2 * hidden, 3 * hidden),
        "relay_mlp.0.bias": (2 * hidden,),
        "relay_mlp.2.weight": (2 * hidden, 2 * hidden),
        "relay_mlp.2.bias": (2 * hidden,),
    }
    return {"fc.weight": (hidden, taps * hidden), "hidden_norm.weight": (hidden,)} | _layers(config, "") | relay


class RandomTensors:
    """Random bfloat16 tensors in pieces: slices of one pool of normal numbers, scaled by 1/sqrt(fan-in)."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._pool = self._random.standard_normal(2 * PIECE, np.float32)

    def pieces(self, name: str, shape: tuple[int, ...]) -> Iterator[bytes]:
        left = int(np.prod(shape))
        while left:
            count = min(left, PIECE)
            start = int(self._random.integers(0, PIECE))
            values = self._pool[start : start + count] * np.float32(shape[-1] ** -0.5)
            if "norm.weight" in name or "layernorm" in name:
                values = 1 + 0.1 * self._pool[start : start + count]
            yield values.astype(BFLOAT16).tobytes()
            left -= count


def write_checkpoint(folder: Path, config: Config, shapes: Shapes, seed: int = 0) -> int:
    """Write config.json and safetensors shards, streamed; the bytes of all tensors."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    shards: list[Shapes] = [{}]
    for name, shape in shapes.items():
        if shards[-1] and _size(shards[-1]) + _size({name: shape}) > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = shape
    random, index = RandomTensors(seed), {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(folder / file, shard, random)
        index |= dict.fromkeys(shard, file)
    total = _size(shapes)
    data = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(data, indent=1) + "\n")
    return total


def _size(shapes: Shapes) -> int:
    return sum(BFLOAT16.itemsize * int(np.prod(shape)) for shape in shapes.values())


def _write_shard(path: Path, shapes: Shapes, random: RandomTensors) -> None:
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + _size({name: shape})
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            for piece in random.pieces(name, shape):
                file.write(piece)


@dataclass
class PeakMemory:
    """Watches one process until it ends: its high-water mark, and how much of that was its own (not file pages)."""

    pid: int
    resident: int = 0
    anonymous: int = 0
    _done: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> PeakMemory:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            try:
                lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
            except OSError:
                return
            values = {key: int(rest.split()[0]) * 1024 for key, _, rest in (line.partition(":") for line in lines)
                      if key in ("VmHWM", "RssAnon")}  # fmt: skip
            self.resident = max(self.resident, values.get("VmHWM", 0))
            self.anonymous = max(self.anonymous, values.get("RssAnon", 0))


def measure(target: Path, drafter: Path, output: Path, flags: list[str]) -> Config:
    """One build in its own process: seconds, peak memory, file sizes. Raises if it fails."""
    command = [sys.executable, "-c", "from dflow_trt.cli import main; main()", "build", "--json"]
    command += ["--target", str(target), "--drafter", str(drafter), "--output", str(output), *flags]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        with PeakMemory(process.pid) as peak:
            stdout, stderr = process.communicate()
    finally:
        process.kill()  # no effect on one that has ended
        process.wait()
    seconds = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"build failed with exit code {process.returncode}: {stderr.strip()}")
    built = json.loads(stdout)
    files = {name: entry["size"] for name, entry in built["files"].items()}
    errors = built["self_check"].get("errors", {})
    return {
        "seconds": round(seconds, 2),
        "bytes": sum(files.values()),
        "peak_bytes": peak.resident,
        "peak_anonymous_bytes": peak.anonymous,
        "files": files,
        "self_check_worst": max(errors.values(), default=None),
        "agreement": built["self_check"].get("agreement"),
    }


def show(rows: list[Config]) -> None:
    """The table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("case", *(_right(name) for name in ("seconds", "MB/s", "peak RSS", "of it own", "bound", "written")))
    for row in rows:
        bound = show_bytes(row["bound_bytes"]) if row["bound_bytes"] else "-"
        speed = f"{row['bytes'] / 1e6 / row['seconds']:.0f}"
        sizes = (row["peak_bytes"], row["peak_anonymous_bytes"])
        memory = [show_bytes(size) for size in sizes]
        table.add_row(row["case"], f"{row['seconds']:.1f}", speed, *memory, bound, show_bytes(row["bytes"]))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for row in rows:
        files = sorted(row["files"].items(), key=lambda item: -item[1])[:4]
        console.print(f"{row['case']}: largest files " + ", ".join(f"{n} {show_bytes(size)}" for n, size in files))


def _right(name: str) -> Any:
    from rich.table import Column

    return Column(name, justify="right")


def bench(size: str, cases: list[str], folder: Path | None) -> list[Config]:
    """Write the checkpoints, measure every case, leave nothing behind."""
    target, drafter = configs(size)
    shapes = target_shapes(target)
    largest = max(_size({name: shape}) for name, shape in (shapes | drafter_shapes(drafter)).items())
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-build-", dir=folder) as temporary:
        place = Path(temporary)
        print(f"writing random checkpoints of size {size} to {place}", file=sys.stderr)
        read = write_checkpoint(place / "target", target, shapes)
        read += write_checkpoint(place / "drafter", drafter, drafter_shapes(drafter), 1)
        for case in cases:
            print(f"building: {case}", file=sys.stderr)
            row = measure(place / "target", place / "drafter", place / "bundle", [*CASES[case], "--force"])
            bound = None if case in UNBOUND else FIXED_BYTES + 2 * largest
            rows.append({"case": case, "size": size, "checkpoint_bytes": read, "bound_bytes": bound, **row})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and peak memory of `dflow-trt build` on random checkpoints.")
    parser.add_argument("--size", choices=SIZES, default="1.7b")
    parser.add_argument("--case", choices=CASES, action="append", help="repeatable; default: default")
    parser.add_argument("--folder", type=Path, help="where the temporary folder goes (the system's, if not given)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: the temporary folder goes too
    rows = bench(options.size, options.case or ["default"], options.folder)
    show(rows)
    broken = [row["case"] for row in rows if row["bound_bytes"] and row["peak_bytes"] > row["bound_bytes"]]
    print(json.dumps({"ok": not broken, "rows": rows}))
    if broken:
        raise SystemExit(f"peak memory above the bound: {', '.join(broken)}")


if __name__ == "__main__":
    main()
