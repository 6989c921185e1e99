"""Drawing on the device: the C entry point of the plugin library, and its records."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dflow_trt.runtime.cuda import Stream, check_status
from dflow_trt.runtime.draw import Draw
from dflow_trt.spec import DType

ENTRY = "dflow_sample"
DTYPES: dict[DType, int] = {"float32": 0, "float16": 1, "bfloat16": 2}  # DType of plugins/kernels/kernels.h

Entry = Callable[..., int]

# DflowDraw of plugins/kernels/sampling.h.
RECORD = np.dtype(
    [
        ("seed", np.uint64),
        ("sample_index", np.uint64),
        ("position", np.uint64),
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("top_k", np.int64),
        ("row", np.int64),
    ]
)
ARGUMENTS = (
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_int64,
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_void_p,
)


def load_entry(library: Path) -> Entry | None:
    """The entry point of a plugin library; None where it has none, being of an earlier version."""
    try:
        entry = getattr(ctypes.CDLL(str(library.resolve())), ENTRY)
    except (OSError, AttributeError):
        return None
    entry.argtypes, entry.restype = ARGUMENTS, ctypes.c_int32
    return entry  # type: ignore[no-any-return]


def record(draw: Draw, row: int) -> tuple[float, ...]:
    """A draw as a RECORD; ``row`` is that of the logits in the device's memory."""
    params = draw.params
    shape = (params.temperature, params.top_p, params.min_p, params.top_k)
    return (draw.seed, draw.sample_index, draw.position, *shape, row)


class DeviceSampler:
    """The entry point for logits of one width and dtype. live: ids below it may be drawn."""

    def __init__(self, entry: Entry, dtype: DType, columns: int, live: int) -> None:
        self._entry, self._dtype, self._columns, self._live = entry, DTYPES[dtype], columns, live

    def enqueue(self, logits: int, records: int, count: int, ids: int, stream: Stream) -> None:
        """``count`` records at an address become as many int64 at ``ids``; raises CudaError where they cannot."""
        where = (logits, self._dtype, self._columns, self._live, records, count, ids, int(stream.handle))
        check_status(ENTRY, self._entry(*where))
