"""Environments beside the one that tests run in: of a server, and of a load client. Each is made once, in ``build``."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
AIPERF = "aiperf==0.13.0"


def make_environment(python: Path) -> Path:
    """The Python of ``build/serve-venv``: dflow-trt with the extras triton and serve."""
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    return _made("serve-venv", python, wanted, "-e", f"{ROOT}[triton,serve]")


def make_load_client(python: Path) -> Path:
    """The Python of ``build/aiperf-venv``: NVIDIA's load client, whose requirements fit no other environment."""
    return _made("aiperf-venv", python, AIPERF, AIPERF)


def _made(name: str, python: Path, wanted: str, *packages: str) -> Path:
    """Made, or made again where ``wanted`` is another than last time, by one of the test processes for all."""
    folder = ROOT / "build" / name
    made, stamp = folder / "bin" / "python", folder / "requirements"
    folder.parent.mkdir(exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.is_file() or stamp.read_text() != wanted:
            subprocess.run([python, "-m", "venv", folder], check=True)
            subprocess.run([made, "-m", "pip", "install", "-qq", *packages], check=True)
            stamp.write_text(wanted)
    return made
