"""The small integer arrays that engines are fed.

Shape suffixes: B requests of one call, S token rows, T live cache length.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from dflow_trt.spec import CACHE_STEP

Ids = np.ndarray[Any, np.dtype[np.int64]]


def positions(first_B: Ids, rows: int) -> Ids:
    """[B,rows]: absolute positions first, first + 1, ... of each request."""
    return first_B[:, None] + np.arange(rows)


def padded(rows: Sequence[Sequence[int]], width: int) -> Ids:
    """[B,width], zeros behind each row: id 0 is valid, and what padding rows compute is never read."""
    out_BS = np.zeros((len(rows), max(width, 1)), np.int64)
    for i, row in enumerate(rows):
        out_BS[i, : len(row)] = row
    return out_BS


def kv_index(length: int) -> Ids:
    """[T]: the live cache rows, in whole steps."""
    return _arange(-(-length // CACHE_STEP) * CACHE_STEP)


@lru_cache(maxsize=256)
def _arange(length: int) -> Ids:
    """0..length-1, shared and read-only."""
    rows = np.arange(length)
    rows.setflags(write=False)
    return rows
