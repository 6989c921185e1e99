"""The device: memory, and streams that do nothing until somebody waits for them.

Real work is done later than it is asked for, so a host that reads too early, or writes staging memory too early, is
found out here: nothing runs before a wait. Fresh memory holds NaNs, and so does what was freed.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Work = Callable[[], None]

BASE, GAP, ALIGNMENT = 0x7000_0000_0000, 4096, 256
POISON = 0xFF  # as any float: NaN; as an integer: -1


@dataclass
class FakeStream:
    """Work in order. done: how many pieces were done of those that were ever given."""

    waiting: list[Work] = field(default_factory=list)
    given: int = 0
    capture: list[Work] | None = None
    broken: bool = False  # the capture was invalidated

    def give(self, work: Work) -> None:
        if self.capture is not None:
            self.capture.append(work)
            return
        self.waiting.append(work)
        self.given += 1

    def run(self, until: int | None = None) -> None:
        """Do what waits, up to the ``until``-th piece ever given."""
        assert self.capture is None, "waiting for a stream that is being captured"
        until = self.given if until is None else until
        while self.waiting and self.given - len(self.waiting) < until:
            self.waiting.pop(0)()


class Gpu:
    """One fake GPU. ``graphs`` maps the content of an engine file to the ONNX file that it stands for.

    fail: name of a CUDA call -> (which call of it from now on fails, its error). refuse: engine -> how many runs are
    still accepted before TensorRT refuses one. profiles: engine -> ranges of dimensions, one dict a profile.
    """

    def __init__(self, name: str = "Fake RTX", compute_capability: str = "8.9", memory: int = 1 << 32) -> None:
        self.name, self.compute_capability, self.memory = name, compute_capability, memory
        self.device: dict[int, Bytes] = {}
        self.pinned: dict[int, Bytes] = {}
        self.alive: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.fail: dict[str, tuple[int, str]] = {}
        self.refuse: dict[str, int] = {}
        self.uncapturable: set[str] = set()
        self.graphs: dict[bytes, Path] = {}
        self.profiles: dict[str, list[dict[str, tuple[int, int]]]] = {}
        self.dtype = "float32"
        self.workspace = 1000
        self.creators: dict[str, set[str]] = {}
        self.loaded: list[str] = []
        self.events: list[str] = []
        self.copied_out: list[int] = []
        self.streams: dict[int, FakeStream] = {}
        self._next = BASE

    # -- memory ------------------------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        return sum(len(block) for block in self.device.values())

    def allocate(self, size: int) -> int | None:
        if self.used + size > self.memory:
            return None
        address = self._next
        self._next += -(-size // ALIGNMENT) * ALIGNMENT + GAP  # a gap that nobody owns
        self.device[address] = np.full(size, POISON, np.uint8)
        return address

    def free(self, address: int) -> None:
        self.device.pop(address)[:] = POISON

    def bytes(self, address: int, size: int) -> Bytes:
        """``size`` bytes of device memory; AssertionError where they are not all inside one allocation."""
        return _inside(self.device, address, size, "device")

    def pinned_bytes(self, address: int, size: int) -> Bytes:
        return _inside(self.pinned, address, size, "pinned")

    def array(self, address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        """Device memory as an array."""
        dtype = np.dtype(dtype)
        return self.bytes(address, int(np.prod(shape)) * dtype.itemsize).view(dtype).reshape(shape)

    @property
    def leaks(self) -> dict[str, int]:
        """What was made and not released."""
        counts = {name: count for name, count in self.alive.items() if count}
        return counts | ({"device memory": len(self.device)} if self.device else {})


def _inside(blocks: dict[int, Bytes], address: int, size: int, kind: str) -> Bytes:
    starts = sorted(blocks)
    i = bisect.bisect_right(starts, address) - 1
    assert i >= 0, f"{kind} address {address:#x} belongs to nobody"
    offset, block = address - starts[i], blocks[starts[i]]
    assert offset + size <= len(block), f"{kind} bytes {offset}..{offset + size} of a block of {len(block)}"
    return block[offset : offset + size]
