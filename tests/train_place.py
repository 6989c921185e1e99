"""`dflow-trt train` in a folder of its own, for tests."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflow_trt import cli
from dflow_trt.training import job
from dflow_trt.training.progress import Silent

SMALL = {
    "steps": 4,
    "every": 2,
    "batch-size": 4,
    "anchors": 2,
    "max-new-tokens": 12,
    "held-out": 3,
    "learning-rate": 3e-3,
}


@dataclass
class Result:
    code: int
    stdout: str
    stderr: str


@dataclass
class Place:
    """A folder with a target and prompts, and the command on it."""

    folder: Path
    run: Callable[..., Result]

    def arguments(self, output: str, flags: dict[str, Any]) -> list[Any]:
        values = {**SMALL, **{name.replace("_", "-"): value for name, value in flags.items()}}
        values = {"target": self.folder / "target", "prompts": self.folder / "prompts.jsonl", "threads": 1} | values
        given = [part for name, value in values.items() if value is not None for part in (f"--{name}", value)]
        return ["train", "--output", self.folder / output, "--json", *given]

    def train(self, output: str = "drafter", *extra: str, **flags: Any) -> Result:
        return self.run(*self.arguments(output, flags), *extra)

    def trained(self, output: str = "drafter", *extra: str, **flags: Any) -> dict[str, Any]:
        result = self.train(output, *extra, **flags)
        assert result.code == 0, result.stderr
        return json.loads(result.stdout)

    def trained_by_two(self, output: str, **flags: Any) -> dict[str, Any]:
        """The same in two processes on the CPU."""
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "dflow_trt"]
        run = [sys.executable, *launch, *map(str, self.arguments(output, flags))]
        environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        found = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert found.returncode == 0, found.stderr[-2000:]
        return json.loads(found.stdout)


def make_prompts(path: Path, count: int = 14) -> None:
    """Random prompts of 3 to 8 tokens."""
    rng = random.Random(0)
    lines = [{"prompt_token_ids": [rng.randrange(2, 250) for _ in range(rng.randint(3, 8))]} for _ in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def open_place(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> Place:
    """A place with the target and the prompts of another folder."""
    for name in ("target", "prompts.jsonl"):
        (tmp_path / name).symlink_to(files / name)
    patch.setattr(signal, "signal", lambda *_: None)
    threads = torch.get_num_threads()
    patch.setattr(job, "set_threads", lambda count: torch.set_num_threads(count or threads))

    def run(*arguments: Any) -> Result:
        patch.setattr(sys, "argv", ["dflow-trt", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return Place(tmp_path, run)


def tensors(folder: Path) -> dict[str, Any]:
    return load_file(folder / "model.safetensors")


def close(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(torch.allclose(left[name], right[name], atol=1e-6) for name in left)


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


class StopAt(Silent):
    """Interrupts the job when it reports a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def advance(self, done: int, note: str = "") -> None:
        if note and done == self.step:
            raise KeyboardInterrupt
