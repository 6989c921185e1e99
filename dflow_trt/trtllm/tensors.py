"""A safetensors file, written a chunk of rows at a time: peak memory is a chunk, however large the tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np

from dflow_trt.checkpoint.safetensors import DTYPES
from dflow_trt.checkpoint.weights import Weights
from dflow_trt.graphs.builder import NUMPY
from dflow_trt.graphs.store import row_chunks
from dflow_trt.spec import DType

HEADER_ALIGNMENT = 8  # the data section starts at a multiple of it
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_tensors(path: Path, weights: Weights, names: Sequence[str], dtype: DType | None = None) -> None:
    """Write these tensors, in this order, in ``dtype`` or each in its own."""
    kinds = {name: weights.dtype(name) if dtype is None else NUMPY[dtype] for name in names}
    with path.open("wb") as file:
        file.write(_header(weights, kinds))
        for name, kind in kinds.items():
            for _, rows in row_chunks(weights, name):
                file.write(np.ascontiguousarray(rows, kind).reshape(-1).view(np.uint8).data)


def _header(weights: Weights, kinds: dict[str, np.dtype[np.generic]]) -> bytes:
    """Length and JSON: dtype, shape and place of each tensor. "format" is what readers of PyTorch models look for."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, kind in kinds.items():
        shape = weights.shape(name)
        begin, end = end, end + prod(shape) * kind.itemsize
        entries[name] = {"dtype": _NAMES[kind], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
