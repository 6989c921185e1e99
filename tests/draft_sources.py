"""Serial drafters and prompt lookup for the bundles of tests: random ones, and the target as its own draft model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tiny import Config, make_eagle3, make_target

from dflow_trt.build import DrafterSource

MODEL: Config = {
    "seed": 6,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "tied": True,
    "theta": 5000.0,
}
MODEL_DRAFTS = 5
CHAIN: Config = {"draft_vocab_size": 20, "seed": 8}
CHAIN_DRAFTS = 4
LOOKUP: Mapping[str, int] = {"min": 1, "max": 3, "drafts": 7}


def draft_sources(
    folder: Path, vocab: int, models: Mapping[str, Config | None], lookup: Mapping[str, int] | None
) -> list[DrafterSource]:
    """Draft models by name, written beside the ``target`` in the folder, as ``make_target`` takes them; None is the
    target itself. Then lookup, where it has settings."""
    sources = []
    for name, keys in models.items():
        if keys is not None:
            make_target(folder / name, vocab_size=vocab, **keys)
        sources.append(DrafterSource(folder / ("target" if keys is None else name), name, {"drafts": MODEL_DRAFTS}))
    return sources + ([] if lookup is None else [DrafterSource(Path("ngram"), settings=lookup)])


def chain_sources(folder: Path, target: Config, chains: Mapping[str, Config]) -> list[DrafterSource]:
    """EAGLE-3 drafters by name, written beside the target, as ``make_eagle3`` takes them."""
    for name, keys in chains.items():
        make_eagle3(folder / name, target, **keys)
    return [DrafterSource(folder / name, name, {"drafts": CHAIN_DRAFTS}) for name in chains]
