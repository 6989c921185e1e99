"""The quantised folders that NVIDIA ModelOpt exported (see modelopt_folders/make.py), and changed copies of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tiny import DELETE, TARGET_DEFAULTS, Config

FOLDERS = Path(__file__).parent / "modelopt_folders"
ALGOS = {"fp8": "FP8", "int8": "W8A8_SQ_PER_CHANNEL", "int8_weights": "W8A16", "int4_awq": "W4A16_AWQ"}
KEPT = "model.layers.1.mlp.down_proj"  # float in all of them
SAID, CONFIG, MODEL = "hf_quant_config.json", "config.json", "model.safetensors"
DTYPES = {
    "F32": np.dtype("f4"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
}
DTYPES |= {"BF16": np.dtype(ml_dtypes.bfloat16), "I32": np.dtype("i4")}


def copy_folder(name: str, place: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """A copy of one of them, with changed tensors: see :func:`edit`."""
    shutil.copytree(FOLDERS / name, place, dirs_exist_ok=True)
    edit(place, changes or {})
    return place


def edit(folder: Path, changes: Mapping[str, Any]) -> None:
    """Replace, add or (with ``DELETE``) remove tensors."""
    changed = {**tensors(folder), **changes}
    save_file({name: value for name, value in changed.items() if value is not DELETE}, folder / MODEL)


def tensors(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """All tensors, those too that the safetensors package gives numpy no dtype for."""
    content = (folder / MODEL).read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    data = memoryview(content)[start:]
    return {name: _tensor(entry, data) for name, entry in header.items()}


def _tensor(entry: Mapping[str, Any], data: memoryview) -> np.ndarray[Any, Any]:
    first, last = entry["data_offsets"]
    return np.frombuffer(data[first:last], DTYPES[entry["dtype"]]).reshape(entry["shape"]).copy()


def edit_json(path: Path, section: str, **changes: Any) -> None:
    """Change keys in one section of a JSON file; None removes a key."""
    data = json.loads(path.read_text())
    data[section] = {key: value for key, value in {**data[section], **changes}.items() if value is not None}
    path.write_text(json.dumps(data))


def target_config(folder: Path) -> Config:
    """What ``make_drafter`` wants to know of a target."""
    return {**TARGET_DEFAULTS, **json.loads((folder / CONFIG).read_text())}


def values(stored: Mapping[str, np.ndarray[Any, Any]], module: str) -> np.ndarray[Any, Any]:
    """The weights [out,in] of a layer in float64, number by number as ModelOpt's layout says."""
    weight, scale = stored[f"{module}.weight"], stored[f"{module}.weight_scale"].astype(np.float64)
    if weight.dtype != np.uint8:
        return weight.astype(np.float64) * scale.reshape(-1, 1)
    outputs, inputs = 2 * weight.shape[0], weight.shape[1]
    found = np.empty((outputs, inputs))
    for o in range(outputs):
        for i in range(inputs):
            nibble = int(weight[o // 2, i]) >> (4 if o % 2 else 0) & 15
            found[o, i] = (nibble - 16 if nibble > 7 else nibble) * scale[o, i * scale.shape[1] // inputs]
    return found
