"""Facts of a checkpoint folder as a whole: its licence and its fingerprint."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dflow_trt.checkpoint.reader import refuse
from dflow_trt.checkpoint.safetensors import KNOWN, SafetensorsWeights
from dflow_trt.checkpoint.weights import Weights
from dflow_trt.errors import UserError
from dflow_trt.spec import AUTOREGRESSIVE, NO_RELAY_SUFFIX, DrafterSpec

CONFIG = "config.json"
SMALL = 16 * 2**20
"""Files up to this size are hashed in full; of larger ones, evenly spaced samples."""
SAMPLES, SAMPLE = 256, 4096
RESERVED = (AUTOREGRESSIVE, "target", "vocab")


@dataclass(frozen=True)
class DrafterCheckpoint:
    """A validated drafter: what it is, and exactly the weights that this takes."""

    path: Path
    spec: DrafterSpec
    weights: Weights
    fingerprint: str


def checked_name(name: str) -> str:
    """A drafter's name among the request strategies; UserError where it may not be one."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name) or name in RESERVED or name.endswith(NO_RELAY_SUFFIX):
        allowed = f"[a-z0-9][a-z0-9_-]*, except {', '.join(RESERVED)} and names ending in {NO_RELAY_SUFFIX}"
        raise UserError(f"drafter name is {name!r}; allowed: {allowed}; choose another name")
    return name


def checked_folder(folder: Path | str) -> Path:
    """The folder, which must exist and have a ``config.json``."""
    path = Path(folder)
    if not (path / CONFIG).is_file():
        found = "missing" if path.is_dir() else "missing, there is no such folder"
        raise refuse(path, CONFIG, found, "a Hugging Face checkpoint folder", "check the path")
    return path


def licence(folder: Path) -> str | None:
    """``license`` in the YAML front matter of README.md, else the name of a LICENSE* file, else None."""
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    matter = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    line = re.search(r"^license:[ \t]*(?:\n[ \t]*-[ \t]*)?([^\n#]+)", matter[1], re.MULTILINE) if matter else None
    named = line[1].strip().strip("'\"[]") if line else ""
    return named or next((path.name for path in sorted(folder.glob("LICENSE*"))), None)


def fingerprint(weights: SafetensorsWeights, others: Iterable[Path]) -> str:
    """A sha256 over names, shapes and dtypes of the tensors and over the files' names, sizes and contents.

    Cheap and streaming: a file above ``SMALL`` bytes counts with its size and 256 samples of 4 KiB, so
    retrained weights of the same shapes differ too. The folder's own name does not count.
    """
    digest = hashlib.sha256()
    for name in sorted(weights.names()):
        entry = weights.entry(name)
        digest.update(f"{name} {entry.shape} {KNOWN[entry.dtype].name}\n".encode())
    for path in sorted({*weights.files(), *others}):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for offset in range(0, size, SAMPLE if size <= SMALL else size // SAMPLES):
                file.seek(offset)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()
