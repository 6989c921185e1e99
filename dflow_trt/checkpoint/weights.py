"""The one way in which weights are read: by canonical name, lazily, in row ranges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class Weights(Protocol):
    """Named tensors of a checkpoint. Nothing is kept in memory between reads."""

    def names(self) -> Iterator[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> np.dtype[Any]:
        """float32, float16 or ml_dtypes.bfloat16."""
        ...

    def read(self, name: str, rows: slice | None = None) -> Array:
        """A copy of the tensor, or of a range of its first axis, in the checkpoint's dtype."""
        ...
