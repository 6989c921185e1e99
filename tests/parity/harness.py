"""The engines driven by hand, call by call: ragged batches, poisoned caches, every row's logits.

Shape suffixes: B requests of one call, S token rows, J block slots, V vocabulary columns, X packed taps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from tiny import Config, edit_tensors, make_drafter, make_target

from dflow_trt import contract as c
from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.bundle import Bundle
from dflow_trt.feeds import positions
from dflow_trt.method.draft import block_ids
from dflow_trt.method.relay import RelayState, relay_rows
from dflow_trt.runtime.ort import OrtRuntime
from dflow_trt.spec import CACHE_STEP, SelectorSpec

Array = np.ndarray[Any, np.dtype[Any]]
Rows = Sequence[Sequence[int]]

# Largest absolute difference against a float32 oracle, unless said otherwise. Token ids are compared exactly.
TOLERANCE = {
    "target logits": 1e-4,
    "target hidden": 1e-4,
    "context h": 2e-4,
    "draft logits": 2e-4,
    "relay, relative to the largest value": 1e-5,
    "draft logits of a wrong tap, at least": 1e-1,
}
POISON = 1e4  # finite: what a masked cache row may hold
DEAD = -1e29  # ids without a token score at most this


@dataclass(frozen=True)
class Pair:
    """A bundle and the checkpoint folders that it was built from."""

    bundle: Bundle
    target: Path
    drafters: dict[str, Path]
    config: Config


def build_pair(
    folder: Path,
    target: Config | None = None,
    drafters: dict[str, Config] | None = None,
    **options: Any,
) -> Pair:
    """Random checkpoints with the given keys (see ``tiny.py``), built.

    ``sharpness`` of a drafter scales its attention scores: random ones are so peaked that they amplify rounding.
    """
    config = make_target(folder / "target", **(target or {}))
    folders = {name: folder / name for name in drafters or {}}
    for name, keys in (drafters or {}).items():
        make_drafter(folders[name], config, **{key: value for key, value in keys.items() if key != "sharpness"})
        _soften(folders[name], keys.get("sharpness", 1.0))
    chosen = BuildOptions(**{"max_seq_len": 256, "draft_weights": "float", "draft_logits": True, **options})
    sources = [DrafterSource(path, name) for name, path in folders.items()]
    bundle = build_bundle(folder / "target", sources, folder / "bundle", chosen, self_check="off")
    return Pair(bundle, folder / "target", folders, config)


def _soften(folder: Path, sharpness: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    queries = {name: value for name, value in tensors.items() if name.endswith("q_norm.weight")}
    edit_tensors(folder, {name: (value * sharpness).astype(value.dtype) for name, value in queries.items()})


@dataclass(frozen=True)
class TargetPass:
    """What a target pass gave, copied out of the runtime's buffers."""

    next_ids_BS: Array
    logits_BSV: Array
    hidden_BSX: Array | None


class Engines:
    """One runtime; every call poisons the cache rows that nobody may read, or leaves them with ``poison=None``."""

    def __init__(self, bundle: Bundle, threads: int = 1, poison: float | None = POISON) -> None:
        self.bundle, self.poison = bundle, poison
        self.runtime = OrtRuntime(bundle, threads)
        self.anchors: dict[str, Array] = {}
        self.min_rows = 2 if bundle.target.stack.heads_per_group == 1 else 1

    def target(self, slots: range, tokens: Rows, starts: Sequence[int], width: int = 0, bucket: int = 0) -> TargetPass:
        """tokens[i] at positions from starts[i] on, in rows padded to ``width``; T is ``bucket`` or what suffices."""
        width = max(width, self.min_rows, *map(len, tokens))
        start_B = np.array(starts, np.int64)
        kv_index = live_rows(int(start_B.max()) + width, bucket)
        feeds = {
            c.INPUT_IDS.name: _padded(tokens, width, self.bundle.target.vocab_size - 1),
            c.POSITION_IDS.name: positions(start_B, width),
            c.ROW_COUNT.name: np.array([len(row) for row in tokens], np.int64),
            c.LOGIT_ROWS.name: np.tile(np.arange(width), (len(tokens), 1)),
            c.WRITE_INDEX.name: start_B,
            c.KV_INDEX.name: kv_index,
        }
        self._poison(self.runtime.caches[c.TARGET, None], slots, starts, len(kv_index))
        fetch = [c.NEXT_IDS.name, c.LOGITS.name] + ([c.HIDDEN.name] if self.bundle.taps else [])
        outputs = [array.copy() for array in self.runtime.run(c.TARGET, None, slots, feeds, fetch)]
        return TargetPass(outputs[0], outputs[1], outputs[2] if self.bundle.taps else None)

    def context(self, drafter: str, slots: range, starts: Sequence[int], width: int) -> Array:
        """Right after :meth:`target` with the same arguments: h [B,S,E] of its rows."""
        width, start_B = max(width, self.min_rows), np.array(starts, np.int64)
        feeds = {c.POSITION_IDS.name: positions(start_B, width), c.WRITE_INDEX.name: start_B}
        return self.runtime.run(c.CONTEXT, drafter, slots, feeds, (c.H.name,))[0].copy()

    def embeds(
        self,
        drafter: str,
        slots: range,
        anchors: Sequence[int],
        states: Sequence[RelayState | None] | None = None,
    ) -> Array:
        """The relay engine: block_embeds [B,J,E], with the relay of each state that is not None."""
        spec = self.bundle.drafters[drafter].spec
        self.anchors[drafter] = np.array(anchors, np.int64)
        feeds: dict[str, Array] = {c.BLOCK_IDS.name: block_ids(anchors, spec.mask_token_id, spec.block_size)}
        if spec.relay:
            feeds |= self._relay_feeds(drafter, states or [None] * len(anchors))
        return self.runtime.run(c.RELAY, drafter, slots, feeds, (c.BLOCK_EMBEDS.name,))[0].copy()

    def _relay_feeds(self, drafter: str, states: Sequence[RelayState | None]) -> dict[str, Array]:
        spec, count = self.bundle.drafters[drafter].spec, len(states)
        assert spec.relay is not None
        source_BJ = np.zeros((count, spec.block_size), np.int64)
        on_BJ = np.zeros((count, spec.block_size), np.bool_)
        bonus_B, reject_B = np.zeros(count, np.int64), np.zeros(count, np.int64)
        for i, state in enumerate(states):
            if state is not None:
                source_BJ[i], on_BJ[i] = relay_rows(state, spec.relay.start, spec.block_size)
                bonus_B[i], reject_B[i] = state.bonus_id, state.reject_id
        return {
            c.RELAY_SRC.name: source_BJ,
            c.RELAY_ON.name: on_BJ,
            c.BONUS_ID.name: bonus_B,
            c.REJECT_ID.name: reject_B,
        }

    def draft(self, drafter: str, slots: range, starts: Sequence[int], bucket: int = 0) -> tuple[Array, Array]:
        """Right after :meth:`embeds`: (draft_ids [B,K], draft_logits [B,K,V]) of blocks at ``starts``."""
        spec, start_B = self.bundle.drafters[drafter].spec, np.array(starts, np.int64)
        size = spec.block_size
        kv_index = live_rows(int(start_B.max()) + size, bucket)
        feeds = {
            c.BLOCK_POSITION_IDS.name: positions(start_B, size),
            c.BLOCK_WRITE_INDEX.name: start_B,
            c.KV_INDEX.name: kv_index,
        }
        if isinstance(spec.head, SelectorSpec):
            feeds[c.ANCHOR_ID.name] = self.anchors[drafter]
        self._poison(self.runtime.caches[c.DRAFTER, drafter], slots, starts, len(kv_index))
        fetch = (c.DRAFT_IDS.name, c.DRAFT_LOGITS.name)
        ids, logits = self.runtime.run(c.DRAFTER, drafter, slots, feeds, fetch)
        return ids.copy(), logits.copy()

    def _poison(self, caches: list[Array], slots: range, starts: Sequence[int], live: int) -> None:
        """Large finite values in rows that are masked, NaN in rows that no call of this length reads at all."""
        if self.poison is None:
            return
        for cache in caches:
            for slot, start in zip(slots, starts, strict=True):
                cache[slot, :, start:live] = self.poison
                cache[slot, :, live:] = np.nan


def live_rows(length: int, bucket: int = 0) -> Array:
    """kv_index: 0..T-1 in whole steps, at least ``bucket``."""
    return np.arange(max(-(-length // CACHE_STEP) * CACHE_STEP, bucket))


def _padded(rows: Rows, width: int, fill: int) -> Array:
    out_BS = np.full((len(rows), width), fill, np.int64)
    for i, row in enumerate(rows):
        out_BS[i, : len(row)] = row
    return out_BS


def random_tokens(rng: np.random.Generator, count: int, vocab: int) -> list[int]:
    return [int(token) for token in rng.integers(2, vocab, count)]


@dataclass(frozen=True)
class Step:
    """One target pass of a schedule: tokens[i] from starts[i] on, of which the first kept[i] are committed."""

    tokens: list[list[int]]
    starts: list[int]
    kept: list[int]
    width: int


def ragged_steps(rng: np.random.Generator, sequences: Rows, prompts: Sequence[int], chunk: int = 16) -> Iterator[Step]:
    """Sequences through prefill in ragged chunks, then plain steps and verifies whose wrong drafts are rolled back."""
    done, decoding = [0] * len(sequences), 0
    while any(at < len(sequence) for at, sequence in zip(done, sequences, strict=True)):
        prefill = any(at < prompt for at, prompt in zip(done, prompts, strict=True))
        width = chunk if prefill else (1, 4, 1, 1, 7)[decoding % 5]
        decoding += not prefill
        tokens, kept = [], []
        for at, prompt, sequence in zip(done, prompts, sequences, strict=True):
            limit = prompt if prefill else len(sequence)
            low = 0 if prefill else 1
            count = min(int(rng.integers(low, width + 1)), limit - at)
            wrong = 0 if prefill or count == 0 else int(rng.integers(0, width - count + 1))
            tokens.append([*sequence[at : at + count], *random_tokens(rng, wrong, max(sequence) + 1)])
            kept.append(count)
        if max(kept) > 0:
            yield Step(tokens, list(done), kept, width)
            done = [at + count for at, count in zip(done, kept, strict=True)]
