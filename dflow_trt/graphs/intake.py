"""A drafter of any kind in: its folder says which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflow_trt.checkpoint.folder import CONFIG, DrafterCheckpoint, checked_folder
from dflow_trt.checkpoint.reader import read_config
from dflow_trt.checkpoint.target import TargetCheckpoint
from dflow_trt.graphs.kind import Settings
from dflow_trt.kinds import KINDS, Kind


def read_any_drafter(
    folder: Path, target: TargetCheckpoint, name: str | None = None, settings: Settings | None = None
) -> DrafterCheckpoint:
    """Read and validate a drafter for this target; UserError, in one line, for what is not supported or not whole."""
    read: Any = _kind(folder).graphs_module().read
    found: DrafterCheckpoint = read(folder, target, name, settings or {})
    return found


def _kind(folder: Path) -> Kind:
    """By the architecture that config.json names; a kind without architectures goes by its own name."""
    weightless = KINDS.get(folder.name)
    if weightless is not None and not weightless.architectures and len(folder.parts) == 1:
        return weightless
    config = read_config(checked_folder(folder) / CONFIG)
    names = config.get("architectures")
    named = names[0] if isinstance(names, list) and len(names) == 1 else None
    found = next((kind for kind in KINDS.values() if named in kind.architectures), None)
    if found is None:
        known = " or ".join(f"[{each!r}]" for kind in KINDS.values() for each in kind.architectures)
        raise config.error("architectures", known, "use a drafter of a supported architecture")
    return found
