"""What calls are padded to, so that few shapes recur: each of them becomes a CUDA graph.

A decoding call is widened to a *window* of slots and to whole buckets of rows. Nothing of that may touch what other
requests own, hence the padding rows of a call:

- a slot of the window that the call is not about writes its rows at the very end of its own cache, at L - S. No live
  row lies there: a cache has room for max_seq_len rows and for the longest write behind them;
- its queries stand at positions 0, 1, 2 .., so that each sees at least one finite row: attention over nothing would
  make NaNs, and a NaN in a cache outlives every mask;
- rows behind a request's own are written behind its live rows, as the prefill's padding is anyway.

Dimensions are the letters of :mod:`dflow_trt.contract`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dflow_trt import contract as c
from dflow_trt.bundle import Bundle
from dflow_trt.spec import CACHE_STEP

LIVE_STEPS = 8  # buckets of the live cache length in each of its doublings

Sizes = Mapping[str, int]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Limits:
    """The most that a runtime can be asked: what its buffers are allocated for.

    rows: B x S of a call. verify_rows: the most rows of one request in a decoding call. cache_rows: L.
    """

    slots: int
    rows: int
    verify_rows: int
    cache_rows: int

    @classmethod
    def of(cls, bundle: Bundle, slots: int) -> Limits:
        verify_rows = max(bundle.verify_rows, 2)  # the decoder pads some targets to two rows
        rows = max(bundle.build.max_num_tokens, slots * verify_rows)
        return cls(slots, rows, verify_rows, bundle.cache_rows)

    def elements(self, contract: c.EngineContract, spec: c.TensorSpec) -> int:
        """The most elements that a tensor has in any call."""
        dynamic = "".join(dim for dim in spec.dims if dim not in contract.static)
        static = math.prod(contract.static[dim] for dim in spec.dims if dim in contract.static)
        most = {"B": self.slots, "BS": self.rows, "BR": self.slots * self.verify_rows, "T": self.cache_rows}
        return most[dynamic] * static


@dataclass(frozen=True)
class Padded:
    """A call as it is run: the slots that are bound, and every dynamic dimension."""

    window: range
    sizes: Sizes
    decoding: bool


def padded(limits: Limits, slots: range, sizes: Sizes) -> Padded:
    """What a call on ``slots`` of these ``sizes`` is padded to.

    The same slots and rows give the same window and rows in every engine, so that what one engine leaves on the device
    is what the next one takes. A prefill chunk stays as it is: its shapes hardly recur.
    """
    rows = sizes.get("S", 1)
    if rows > limits.verify_rows:
        return Padded(slots, {**sizes, "T": _live(sizes, limits)} if "T" in sizes else sizes, decoding=False)
    window = _window(slots, limits.slots)
    wider = {"B": len(window)}
    wider |= {dim: bucket(sizes[dim], limits.verify_rows) for dim in "SR" if dim in sizes}
    wider |= {"T": _live(sizes, limits)} if "T" in sizes else {}
    return Padded(window, {**sizes, **wider}, decoding=True)


def bucket(count: int, most: int) -> int:
    """The power of two from ``count`` on, or ``most`` if that is less."""
    return min(1 << (count - 1).bit_length(), most)


def _window(slots: range, total: int) -> range:
    size = bucket(len(slots), total)
    start = min(slots.start, total - size)
    return range(start, start + size)


def _live(sizes: Sizes, limits: Limits) -> int:
    """T in steps that grow with it: the last bucket is at most an eighth too long."""
    length = sizes["T"]
    step = max(CACHE_STEP, (1 << (length - 1).bit_length()) // (2 * LIVE_STEPS))
    return min(-(-length // step) * step, limits.cache_rows)


def shape_of(contract: c.EngineContract, spec: c.TensorSpec, sizes: Sizes) -> Shape:
    """The shape of a tensor in a call."""
    return tuple(contract.static[dim] if dim in contract.static else sizes[dim] for dim in spec.dims)


def dynamic_sizes(contract: c.EngineContract, feeds: Mapping[str, Shape]) -> dict[str, int]:
    """The dynamic dimensions of a call, read off the shapes of its host inputs."""
    sizes: dict[str, int] = {}
    for name, shape in feeds.items():
        for dim, size in zip(contract.tensor(name).dims, shape, strict=True):
            if dim not in contract.static:
                sizes[dim] = size
    return sizes
