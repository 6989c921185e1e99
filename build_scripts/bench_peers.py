"""The peers' side seen from ours: their environment, their worker process, their models."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

WORKER = Path(__file__).with_name("bench_openvino.py")
REQUIREMENTS = ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0")
FORMS = ("fp32", "int8")


class PeerError(Exception):
    """A peer could not be set up or does not run; its own words."""


def make_environment(folder: Path) -> None:
    """A virtual environment with the peers, if it is not there. Some GB, most of them torch."""
    python = folder / "bin" / "python"
    if not python.exists():
        _run([sys.executable, "-m", "venv", str(folder)])
        (folder / ".gitignore").write_text("*\n")
    if _works(python, "import openvino_genai, optimum.exporters.openvino"):
        return
    _run([str(python), "-m", "pip", "install", "--quiet", *REQUIREMENTS])
    if not _works(python, "import torchvision"):  # of no use for text, but transformers fails if it is broken
        _run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision"])


def has_environment(folder: Path) -> bool:
    """Whether the peers can be run from there."""
    return _works(folder / "bin" / "python", "import openvino_genai")


def _works(python: Path, statement: str) -> bool:
    return python.exists() and subprocess.run([python, "-c", statement], capture_output=True).returncode == 0


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PeerError(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")


class OpenVino:
    """The worker process; use it as a context manager."""

    def __init__(self, environment: Path, threads: int, log: Path) -> None:
        self._threads = threads
        self._log: IO[bytes] = log.open("wb")
        self._process = subprocess.Popen(
            [environment / "bin" / "python", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)},
        )
        self.versions: dict[str, str] = {}

    def __enter__(self) -> OpenVino:
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

    def export(self, folders: Mapping[str, Path], output: Path) -> None:
        """Every folder as output/<name>-fp32 and output/<name>-int8, unless they are there from an earlier run."""
        for name, folder in folders.items():
            float_folder, int8_folder = (output / f"{name}-{form}" for form in FORMS)
            if (int8_folder / "config.json").is_file():
                continue
            for stale in (float_folder, int8_folder):
                shutil.rmtree(stale, ignore_errors=True)
            self.ask("export", source=str(folder), output=str(float_folder), int8_output=str(int8_folder))

    def open(self, name: str, target: Path, drafter: Path | None) -> None:
        """A pipeline under that name."""
        drafting = str(drafter) if drafter else None
        self.versions = self.ask("open", name=name, target=str(target), drafter=drafting, threads=self._threads)[
            "versions"
        ]
