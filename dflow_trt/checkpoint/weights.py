"""The one way in which weights are read: by canonical name, lazily, in row ranges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from dflow_trt.spec import QuantSpec

Array = np.ndarray[Any, np.dtype[Any]]


class QuantisedLinear(Protocol):
    """A linear layer that a checkpoint stores in few bits: y = round(x * pre_quant_scale) @ (levels * scale)^T.

    Rounding is to a multiple of the input scale, in the algorithm's 8-bit type, where there is one.
    """

    @property
    def spec(self) -> QuantSpec: ...

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, input features)."""
        ...

    def levels(self, rows: slice | None = None) -> Array:
        """As stored, or a range of the first axis of that: int8 or float8_e4m3fn [out,in]; int4 as uint8 [out/2,in],
        where a byte holds output 2i in its low and 2i + 1 in its high half."""
        ...

    def scale(self) -> Array:
        """float32, of all weights [], a channel [out], or a group of input features [out, in / group_size]."""
        ...

    def input_scale(self) -> Array | None:
        """float32 [], or None where inputs are not rounded."""
        ...

    def pre_quant_scale(self) -> Array | None:
        """float32 [in], by which inputs are multiplied first; None where they are not."""
        ...


class Weights(Protocol):
    """Named tensors of a checkpoint. Nothing is kept in memory between reads."""

    def names(self) -> Iterator[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> np.dtype[Any]:
        """float32, float16 or ml_dtypes.bfloat16."""
        ...

    def read(self, name: str, rows: slice | None = None) -> Array:
        """A copy of the tensor, or of a range of its first axis, in that dtype; quantised values in float32."""
        ...

    def quantised(self, name: str) -> QuantisedLinear | None:
        """The layer of a linear weight that is stored in few bits; None for every other tensor."""
        ...


class NoWeights:
    """Those of a drafter that has none."""

    def names(self) -> Iterator[str]:
        return iter(())

    def shape(self, name: str) -> tuple[int, ...]:
        raise KeyError(name)

    def dtype(self, name: str) -> np.dtype[Any]:
        raise KeyError(name)

    def read(self, name: str, rows: slice | None = None) -> Array:
        raise KeyError(name)

    def quantised(self, name: str) -> QuantisedLinear | None:
        return None
