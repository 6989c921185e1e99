"""How much memory a bundle needs: weights as they lie on disk, KV caches, relay state, the largest outputs."""

from __future__ import annotations

from dataclasses import dataclass

from dflow_trt import contract as c
from dflow_trt.bundle import Bundle
from dflow_trt.graphs.builder import NUMPY


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes. Caches are for ``slots`` requests of max_seq_len tokens; an operating system commits them as they fill."""

    slots: int
    weights: int
    target_cache: int
    drafter_cache: int
    relay_state: int
    outputs: int

    @property
    def total(self) -> int:
        return self.weights + self.target_cache + self.drafter_cache + self.relay_state + self.outputs


def plan_memory(bundle: Bundle, slots: int | None = None) -> MemoryPlan:
    """The plan for ``slots`` requests in flight, by default the bundle's max_batch_size."""
    slots = slots or bundle.build.max_batch_size
    item = NUMPY[bundle.build.dtype].itemsize
    caches = {(contract.engine, name): _cache_bytes(contract, slots, item) for name, contract in bundle.contracts()}
    rows, width = bundle.build.max_num_tokens, len(bundle.taps) * bundle.target.stack.hidden_size
    logits = slots * bundle.block_size * c.vocab_columns(bundle.target.vocab_size)
    return MemoryPlan(
        slots=slots,
        weights=sum(entry.size for name, entry in bundle.files.items() if name.endswith(".data")),
        target_cache=caches[c.TARGET, None],
        drafter_cache=sum(size for (engine, _), size in caches.items() if engine == c.DRAFTER),
        relay_state=sum(4 * slots * s.block_size * s.stack.hidden_size for s in bundle.specs if s.relay),
        outputs=item * (rows * width + logits),
    )


def _cache_bytes(contract: c.EngineContract, slots: int, item: int) -> int:
    if not contract.cache_layers:
        return 0
    size = contract.static
    return 2 * contract.cache_layers * slots * size["N"] * size["L"] * size["D"] * item


def show_bytes(count: int) -> str:
    """A size for people: 1.2 GB, 340 MB, 12 kB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
