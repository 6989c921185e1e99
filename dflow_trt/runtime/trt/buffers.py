"""All memory of a runtime: planned from the contracts, allocated once, explained where it does not fit.

A block that several engines share is named by its tensor, one that belongs to a drafter by both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from dflow_trt import contract as c
from dflow_trt.errors import UserError
from dflow_trt.runtime.cuda import ALIGNMENT, Box, DeviceMemory, Event, OutOfMemory, PinnedMemory, Place, Stream
from dflow_trt.runtime.cuda import current_device as device
from dflow_trt.runtime.trt.engine import cache_tensors
from dflow_trt.runtime.trt.shapes import Limits
from dflow_trt.spec import DType

Key = tuple[str, str | None]
Contracts = Mapping[Key, c.EngineContract]

ENGINE_DTYPES: dict[DType, np.dtype[np.generic]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
SHARED = (c.HIDDEN.name, c.KV_INDEX.name)
WORKSPACE, DRAWS, DRAWN = "workspace", "draws", "drawn"


def numpy_dtype(kind: c.Kind, dtype: DType) -> np.dtype[np.generic]:
    """The dtype of a tensor; ``dtype`` is what kind "engine" means."""
    return ENGINE_DTYPES[dtype] if kind == "engine" else np.dtype(kind)


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def staged(contract: c.EngineContract) -> tuple[c.TensorSpec, ...]:
    """The inputs that come from the host at every call: all small. ``kv_index`` is the same in every call."""
    return tuple(spec for spec in contract.inputs if spec.home == "host" and spec.name != c.KV_INDEX.name)


def ids(outputs: Iterable[c.TensorSpec]) -> list[c.TensorSpec]:
    """The outputs that are small and always come to the host: next_ids, draft_ids."""
    return [spec for spec in outputs if spec.kind == "int64"]


def block_name(key: Key, spec: c.TensorSpec) -> str:
    """The block in which a tensor lies."""
    return spec.name if key[1] is None or spec.name in SHARED else f"{key[1]}.{spec.name}"


def cache_name(key: Key) -> str:
    """The block of an engine's caches: context and drafter work on one."""
    return f"{key[1] or c.TARGET}.cache"


def pending_bytes(relay: c.EngineContract) -> int:
    """Bytes of one slot's ``pending_h``; UserError where a slot's address would be none that TensorRT takes."""
    size = 4 * relay.static["J"] * relay.static["E"]
    if size % ALIGNMENT:
        raise UserError(f"drafter: hidden size {relay.static['E']}; allowed on TensorRT: multiples of 64")
    return size


# -- what is wanted ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CacheBlock:
    """k and v of every layer as one block, [tensors,slots,N,L,D], tensors in the order of :func:`cache_tensors`."""

    tensors: int
    slots: int
    heads: int
    rows: int
    row_bytes: int

    @classmethod
    def of(cls, contract: c.EngineContract, slots: int, dtype: DType) -> CacheBlock:
        size = contract.static
        row_bytes = size["D"] * ENGINE_DTYPES[dtype].itemsize
        return cls(2 * contract.cache_layers, slots, size["N"], size["L"], row_bytes)

    @property
    def slot_bytes(self) -> int:
        """What one slot has in one tensor."""
        return self.heads * self.rows * self.row_bytes

    @property
    def size(self) -> int:
        return self.tensors * self.slots * self.slot_bytes

    def offset(self, tensor: int, slot: int) -> int:
        return (tensor * self.slots + slot) * self.slot_bytes

    def place(self, address: int, tensor: int, slot: int) -> Place:
        """The rows of a slot, a plane a tensor, from ``tensor`` on."""
        return Place(address + self.offset(tensor, slot), self.rows * self.row_bytes, self.slots * self.heads)


@dataclass(frozen=True)
class MemoryNeeds:
    """Every block on the device with its bytes.

    weights: what the engines themselves hold, about. record: bytes of a draw, 0 where none are made.
    """

    contracts: Contracts
    limits: Limits
    dtype: DType
    weights: int
    workspace: int
    record: int

    @property
    def caches(self) -> dict[str, CacheBlock]:
        with_caches = {key: contract for key, contract in self.contracts.items() if contract.cache_layers}
        return {
            cache_name(key): CacheBlock.of(contract, self.limits.slots, self.dtype)
            for key, contract in with_caches.items()
        }

    @property
    def blocks(self) -> dict[str, int]:
        sizes = self._tensors() | {name: block.size for name, block in self.caches.items()}
        # Idle between calls, the workspace also serves an exchange of slots: it holds what one slot has in one tensor.
        pending = [pending_bytes(each) for each in self.contracts.values() if c.PENDING_H in each.inputs]
        least = max([ALIGNMENT, *pending, *(block.slot_bytes for block in self.caches.values())])
        draws = self.limits.slots * self.limits.verify_rows if self.record else 0
        sizes |= {DRAWS: draws * self.record, DRAWN: draws * 8} if draws else {}
        return sizes | {WORKSPACE: max(self.workspace, least)}

    def _tensors(self) -> dict[str, int]:
        """Blocks that are no cache; an engine's staged inputs are one together."""
        sizes: dict[str, int] = {}
        for key, contract in self.contracts.items():
            for spec in (*contract.inputs, *contract.outputs):
                if spec not in staged(contract):
                    name = block_name(key, spec)
                    sizes[name] = max(sizes.get(name, 0), self.tensor(contract, spec))
            sizes[stage_name(key)] = self.stage(contract)
        return sizes

    def tensor(self, contract: c.EngineContract, spec: c.TensorSpec) -> int:
        """Bytes of a tensor in the largest call."""
        return self.limits.elements(contract, spec) * numpy_dtype(spec.kind, self.dtype).itemsize

    def stage(self, contract: c.EngineContract) -> int:
        """Bytes of the largest call's staged inputs."""
        return sum(aligned(self.tensor(contract, spec)) for spec in staged(contract))

    def no_room(self, block: str, size: int) -> UserError:
        """What did not fit, what is wanted in all, and what to do."""
        blocks, caches = self.blocks, sum(block.size for block in self.caches.values())
        rest, free = sum(blocks.values()) - caches - blocks[WORKSPACE], device().free
        return UserError(
            f"max_batch_size: no room for {block}, {_gb(size)} with {_gb(free)} of the GPU free; wanted: weights "
            f"{_gb(self.weights)}, KV {_gb(caches)} for {self.limits.slots} slots, workspace {_gb(blocks[WORKSPACE])}, "
            f"state and outputs {_gb(rest)}; take fewer slots (--batch-size), or see `dflow-trt plan` and build anew"
        )


def stage_name(key: Key) -> str:
    return f"{key[1]}.{key[0]}.stage" if key[1] else f"{key[0]}.stage"


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


# -- what there is -----------------------------------------------------------------------------------------------------


class Buffers:
    """The blocks of a runtime by name, allocated until :meth:`close`.

    Raises UserError where there is no room, in one line that lists what was wanted; then nothing stays allocated.
    """

    def __init__(self, needs: MemoryNeeds, stream: Stream) -> None:
        self._needs, self._stream, self._owned = needs, stream, ExitStack()
        self.caches, self._pinned = needs.caches, dict[str, PinnedMemory]()
        sizes = sorted(needs.blocks.items(), key=lambda item: -item[1])
        with self._owned:
            self._blocks = {name: self._allocated(name, size) for name, size in sizes}
            for name, block in self._blocks.items():
                if name in self.caches or name.endswith(f".{c.PENDING_H.name}"):
                    stream.fill(block.address, 0, block.size)  # masked rows still enter arithmetic
            self._owned = self._owned.pop_all()

    def close(self) -> None:
        self._owned.close()

    def __getitem__(self, name: str) -> DeviceMemory:
        return self._blocks[name]

    @property
    def names(self) -> list[str]:
        return list(self._blocks)

    def _allocated(self, name: str, size: int) -> DeviceMemory:
        try:
            return self._owned.enter_context(DeviceMemory(size))
        except OutOfMemory:
            raise self._needs.no_room(name, size) from None

    def pinned(self, name: str) -> PinnedMemory:
        """A block's twin on the host, allocated at its first use: logits may never be asked for."""
        if name not in self._pinned:
            size = self._blocks[name].size
            try:
                self._pinned[name] = self._owned.enter_context(PinnedMemory(size))
            except OutOfMemory:
                raise self._needs.no_room(f"{name} in pinned host memory", size) from None
        return self._pinned[name]

    def addresses(self, key: Key, contract: c.EngineContract, first_slot: int) -> dict[str, int]:
        """Where the tensors of a call begin, but for those that are staged; ``first_slot`` is that of the call."""
        inputs = [spec for spec in contract.inputs if spec not in staged(contract)]
        found = {spec.name: self._blocks[block_name(key, spec)].address for spec in (*inputs, *contract.outputs)}
        if c.PENDING_H.name in found:
            found[c.PENDING_H.name] += first_slot * pending_bytes(contract)
        for tensor, names in enumerate(cache_tensors(contract)):
            block = self.caches[cache_name(key)]
            found |= dict.fromkeys(names, self._blocks[cache_name(key)].address + block.offset(tensor, first_slot))
        return found

    def exchange(self, name: str, a: int, b: int, rows: int) -> None:
        """Swap the first ``rows`` rows of two slots in every cache of a block."""
        if rows == 0:
            return  # two requests that wait for their first chunk
        block, address, spare = self.caches[name], self._blocks[name].address, self._blocks[WORKSPACE]
        step = spare.size // block.slot_bytes
        for first in range(0, block.tensors, step):
            box = Box(rows * block.row_bytes, block.heads, min(step, block.tensors - first))
            place_a, place_b = (block.place(address, first, slot) for slot in (a, b))
            between = Place(spare.address, rows * block.row_bytes, block.heads)
            for target, source in ((between, place_a), (place_a, place_b), (place_b, between)):
                self._stream.copy_box(target, source, box)

    def exchange_pending(self, name: str, size: int, a: int, b: int) -> None:
        """Swap ``pending_h`` of two slots, ``size`` bytes each."""
        address, spare = self._blocks[name].address, self._blocks[WORKSPACE].address
        place_a, place_b = address + a * size, address + b * size
        for target, source in ((spare, place_a), (place_a, place_b), (place_b, spare)):
            self._stream.copy(target, source, size)


class Stage:
    """An engine's way in: pinned memory and its twin on the device, for one call at a time.

    ``done`` tells when the call is over, so that its memory may be written again.
    """

    def __init__(self, buffers: Buffers, key: Key, contract: c.EngineContract, owned: ExitStack) -> None:
        self.device, self.host = buffers[stage_name(key)], buffers.pinned(stage_name(key))
        self.done = owned.enter_context(Event())
        for spec in ids(contract.outputs):
            buffers.pinned(block_name(key, spec))  # now, not in the middle of a call
