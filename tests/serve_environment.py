"""The environment of a server, ``build/serve-venv``: dflow-trt with the extras triton and serve."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "serve-venv"


def make_environment(python: Path) -> Path:
    """Its Python. Made, or made again where the requirements changed, by one of the test processes for all."""
    made, stamp = FOLDER / "bin" / "python", FOLDER / "requirements"
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    FOLDER.parent.mkdir(exist_ok=True)
    with open(FOLDER.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.is_file() or stamp.read_text() != wanted:
            subprocess.run([python, "-m", "venv", FOLDER], check=True)
            subprocess.run([made, "-m", "pip", "install", "-qq", "-e", f"{ROOT}[triton,serve]"], check=True)
            stamp.write_text(wanted)
    return made
