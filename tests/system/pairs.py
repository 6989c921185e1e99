"""What the system tests share: random tiny pairs as bundles, and a runtime with garbage in its unused cache rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from draft_sources import CHAIN, LOOKUP, MODEL, chain_sources, draft_sources
from tiny import Config, make_drafter, make_target

from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.bundle import Bundle
from dflow_trt.runtime.base import Array
from dflow_trt.runtime.ort import OrtRuntime
from dflow_trt.spec import WeightForm

VOCAB = 24  # small, so that random drafts are right often enough to be accepted
PEERS: dict[str, Any] = {"num_key_value_heads": 4}
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}
FLASH: Config = {"block_size": 5, "taps": (1, 0), "seed": 3}
FLOW: Config = {"block_size": 8, "relay": True}


@dataclass(frozen=True)
class Pair:
    """A built bundle and the checkpoints that it was built from; ``runtime`` has 8 slots and is shared."""

    bundle: Bundle
    target: Path
    runtime: OrtRuntime

    @property
    def strategies(self) -> list[str]:
        return list(self.bundle.strategies)


@dataclass(frozen=True)
class Variant:
    """How one tiny pair differs from the plain one; drafters by name, as ``make_drafter`` takes them.

    models, lookup, chains: see :mod:`draft_sources`.
    """

    target: Mapping[str, Any]
    weights: WeightForm = "float"
    drafters: Mapping[str, Config] = field(default_factory=lambda: {"dflash": FLASH, "dflow": FLOW})
    models: Mapping[str, Config | None] = field(default_factory=dict)
    lookup: Mapping[str, int] | None = None
    chains: Mapping[str, Config] = field(default_factory=dict)
    draft_weights: WeightForm | None = None


DOMINO: dict[str, Config] = {
    "domino": {**FLASH, "domino": {}},
    "shifted": {"block_size": 7, "seed": 4, "domino": {"shift_label": True, "pure_draft_prefix_len": 1}},
    "domino-dflow": {**FLOW, "domino": {"pure_draft_prefix_len": 2}},
}
VARIANTS = {
    "plain": Variant({}),
    "heads are kv heads": Variant(PEERS, drafters={"dflash": FLASH, "dflow": {**FLOW, "relay_start": "at_rejection"}}),
    "sliding window": Variant(WINDOW),
    "int8 target": Variant({}, weights="int8"),
    "domino": Variant({}, drafters=DOMINO),
    "other kinds": Variant(
        {}, drafters={"dflow": FLOW}, models={"self": None, "model": MODEL}, lookup=LOOKUP, chains={"eagle3": CHAIN}
    ),
}


def build_tiny(folder: Path, variant: Variant) -> Pair:
    config = make_target(folder / "target", vocab_size=VOCAB, eos=[1], **variant.target)
    draft: Config = {**config, "use_sliding_window": False, "sliding_window": None}
    draft.pop("layer_types", None)
    for name, keys in variant.drafters.items():
        make_drafter(folder / name, draft, **keys)
    options = BuildOptions(
        max_batch_size=8,
        max_input_len=120,
        max_seq_len=192,
        max_num_tokens=64,
        target_weights=variant.weights,
        draft_weights=variant.draft_weights,
    )
    sources = [DrafterSource(folder / name, name) for name in variant.drafters]
    sources += draft_sources(folder, VOCAB, variant.models, variant.lookup)
    sources += chain_sources(folder, draft, variant.chains)
    bundle = build_bundle(folder / "target", sources, folder / "bundle", options)
    return Pair(bundle, folder / "target", OrtRuntime(bundle, threads=1))


class PoisonedRuntime:
    """A runtime whose cache rows hold large finite garbage wherever no live row lies.

    Before every pass, all rows from the write index on; after a move, all rows that were not moved; and every row of
    ``pending_h`` that was not kept.
    """

    def __init__(self, inner: OrtRuntime, seed: int = 0) -> None:
        self.inner, self._rng = inner, np.random.default_rng(seed)
        self.drawer = inner.drawer
        self.poison_all()

    def _fill(self, array: Array) -> None:
        array[...] = self._rng.choice([-3e4, 1e4, 2e4], array.shape)

    def poison_all(self) -> None:
        """Everything; only while nothing is in flight."""
        for caches in self.inner.caches.values():
            for cache in caches:
                self._fill(cache)
        for pending in self.inner.pending.values():
            self._fill(pending)

    def run(
        self, engine: str, drafter: str | None, slots: range, feeds: Mapping[str, Array], fetch: Any = ()
    ) -> list[Array]:
        if "write_index" in feeds:
            for slot, start in zip(slots, feeds["write_index"].tolist(), strict=True):
                for cache in self.inner.caches[engine, drafter]:
                    self._fill(cache[slot, :, start:])
        return self.inner.run(engine, drafter, slots, feeds, fetch)

    def keep_pending(self, drafter: str, rows: Mapping[int, int], slots: range) -> None:
        self.inner.keep_pending(drafter, rows, slots)
        for slot, count in rows.items():
            self._fill(self.inner.pending[drafter][slot, count:])

    def swap(self, a: int, b: int, rows: int) -> None:
        self.inner.swap(a, b, rows)
        for caches in self.inner.caches.values():
            for cache in caches:
                self._fill(cache[a, :, rows:])
                self._fill(cache[b, :, rows:])

    def close(self) -> None:
        self.inner.close()
