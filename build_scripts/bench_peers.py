"""The peers' side seen from ours: their environment, their worker processes, and these as contenders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dflow_trt.profiling.measure import PREFILL, Asked, Run, Step, Tick, Trace
from dflow_trt.profiling.record import Point


@dataclass(frozen=True)
class Package:
    """What a peer is installed from. imports: the modules that its worker needs."""

    name: str
    imports: str
    requirements: tuple[str, ...]
    worker: Path


def _package(name: str, imports: str, worker: str, *requirements: str) -> Package:
    return Package(name, imports, requirements, Path(__file__).with_name(worker))


CONTEXT = 2048  # rows of llama.cpp's caches
OPENVINO = _package(
    "OpenVINO GenAI", "openvino_genai", "bench_openvino.py", "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0"
)
LLAMA = _package(
    "llama.cpp", "llama_cpp, gguf, safetensors", "bench_llama.py", "llama-cpp-python==0.3.36", "gguf", "safetensors"
)


PACKAGES = (OPENVINO, LLAMA)
LOOKUP = {"min": 1, "max": 2, "drafts": 10}
"""Of prompt lookup, ours and llama.cpp's: its defaults."""


class PeerError(Exception):
    """A peer does not run; its own words."""


# -- their environment -------------------------------------------------------------------------------------------------


def make_environment(folder: Path) -> None:
    """A virtual environment with the peers, as far as they install: some GB, most of them torch; llama.cpp is compiled
    where there is no wheel of it, for minutes. What does not install is said in a line."""
    python = folder / "bin" / "python"
    if not python.exists():
        if failure := _failure([sys.executable, "-m", "venv", str(folder)]):
            raise PeerError(f"{folder}: {failure}")
        (folder / ".gitignore").write_text("*\n")
    for package in PACKAGES:
        if not has_package(folder, package) and (failure := _failure(_pip(python, "install", *package.requirements))):
            print(f"{package.name} does not install: {failure}")
    if has_package(folder, OPENVINO) and not _works(python, "import torchvision"):
        _failure(_pip(python, "uninstall", "--yes", "torchvision"))  # transformers fails on one that is broken


def has_package(folder: Path, package: Package) -> bool:
    """Whether the peer can be run from there."""
    return _works(folder / "bin" / "python", f"import {package.imports}")


def _works(python: Path, statement: str) -> bool:
    return python.exists() and subprocess.run([python, "-c", statement], capture_output=True).returncode == 0


def _pip(python: Path, *arguments: str) -> list[str]:
    return [str(python), "-m", "pip", "--quiet", *arguments]


def _failure(command: list[str]) -> str | None:
    """The last line of what went wrong; None if nothing did."""
    done = subprocess.run(command, capture_output=True, text=True)
    return (done.stderr.strip().splitlines() or ["no reason given"])[-1] if done.returncode else None


# -- their processes ---------------------------------------------------------------------------------------------------


class Worker:
    """One peer's process, with ``threads`` threads; use it as a context manager."""

    def __init__(self, package: Package, environment: Path, threads: int, log: Path) -> None:
        self.threads = threads
        self._log: IO[bytes] = log.open("wb")
        self._process = subprocess.Popen(
            [environment / "bin" / "python", package.worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)},
        )
        self.versions: dict[str, str] = {}

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._log.close()

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """One command; PeerError with the worker's words if it fails."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the worker ended; see its log"}
        if "error" in answer:
            raise PeerError(f"{op}: {answer['error']} (log: {self._log.name})")
        return answer

    def open(self, name: str, **arguments: Any) -> None:
        """A model under that name."""
        self.versions |= self.ask("open", name=name, threads=self.threads, **arguments)["versions"]


@dataclass(frozen=True)
class Peer:
    """A model of a worker as a driver of turns, one request at a time. rounds: as in
    :class:`dflow_trt.profiling.measure.LocalDriver`."""

    worker: Worker
    name: str
    rounds: int | None = None

    def run(self, point: Point, asked: Sequence[Asked], offsets: Sequence[float] | None = None) -> Run:
        """See :class:`dflow_trt.profiling.session.Driver`."""
        start, traces, steps = time.perf_counter(), list[Trace](), list[Step]()
        for each in asked:
            traces.append(Trace(each, time.perf_counter()))
            wanted = {"prompt": each.prompt_ids, "max_tokens": each.params.max_tokens, "rounds": self.rounds}
            _record(traces[-1], steps, self.worker.ask("generate", name=self.name, **wanted)["steps"])
        cpu = sum(step.cpu for step in steps)
        return Run(point, start, time.perf_counter(), cpu, tuple(traces), tuple(steps))


def _record(trace: Trace, steps: list[Step], found: Sequence[tuple[float, float, list[int]]]) -> None:
    """Its own clock's steps, one behind the other."""
    now = trace.arrival
    for i, (wall, cpu, tokens) in enumerate(found):
        stages = {} if i else {PREFILL: 1e3 * wall}
        steps.append(Step(now, now + wall, int(i > 0), len(tokens), stages, cpu))
        now += wall
        trace.ticks.append(Tick(now, len(tokens), None if i else 0, max(0, len(tokens) - 1), i > 0))
        trace.token_ids += tokens
    trace.finish_reason = "length"


def open_worker(
    package: Package, environment: Path | None, threads: int, work: Path, owned: ExitStack
) -> Worker | None:
    """A peer's process, its log in ``work``; None where it is not installed."""
    if environment is None or not has_package(environment, package):
        return None
    return owned.enter_context(Worker(package, environment, threads, work / f"{package.worker.stem}.log"))


def open_llama(worker: Worker, target: Path, gguf: Path, stop_ids: Sequence[int]) -> tuple[str, str]:
    """A target in llama.cpp, and the same with its prompt lookup: the names of both."""
    if not gguf.is_file():
        worker.ask("export", source=str(target), output=str(gguf))
    lookup = {"max_ngram_size": LOOKUP["max"], "num_pred_tokens": LOOKUP["drafts"]}
    for name, settings in (("plain", None), ("lookup", lookup)):
        worker.open(name, path=str(gguf), context=CONTEXT, stop_ids=list(stop_ids), lookup=settings)
    return "plain", "lookup"
