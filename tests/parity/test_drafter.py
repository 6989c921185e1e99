"""Context, relay (embeddings alone) and drafter engines, chained over cached rounds, against the ``dflash`` package.

Domino's head is torch's GRU and linear layers on that package's states, after the drafts that the engine itself chose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import TOLERANCE, Array, Engines, Pair, build_pair, random_tokens
from oracles import TargetOracle, oracle_of

pytest.importorskip("torch", reason="the reference is torch code")
pytest.importorskip("transformers", reason="the reference is transformers' Qwen3")
pytest.importorskip("dflash", reason="the reference is the dflash package")

ROUNDS, CHUNK, PROMPTS = 9, 16, (47, 30, 11)
TARGET: dict[str, Any] = {"num_hidden_layers": 4}
WINDOW = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}
SHIFTED = {"shift_label": True, "pure_draft_prefix_len": 1}
ODD_HEAD = {"gru_hidden_dim": 13, "emb_dim": 7}
BOTH = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "block of 2": {"block_size": 2},
    "block of 16": {"block_size": 16},
    "taps out of order": {"taps": (2, 0, 1)},
    "one tap": {"taps": (2,)},
    "one layer": {"num_hidden_layers": 1},
    "sliding window, causal by default": WINDOW,
    "sliding window by layer_types": BOTH,
    "sliding window, not causal": {**WINDOW, "is_causal": False},
    "sliding window smaller than the block": {**WINDOW, "is_causal": False, "sliding_window": 5},
    "sliding window, all causal": {**BOTH, "is_causal": True},
    "causal": {"is_causal": True},
    "not causal": {"is_causal": False},
    "attention_bias": {"attention_bias": True},
    "input_embedding_scale": {"input_embedding_scale": 3.5},
    "output_multiplier": {"output_multiplier": 0.25},
    "softcap": {"final_logit_softcapping": 6.0},
    "scale, multiplier and softcap": {
        "input_embedding_scale": 0.5,
        "output_multiplier": 1.25,
        "final_logit_softcapping": 3.0,
    },
    "keys at the top level": {"top_level": True, "output_multiplier": 0.5},
    "heads unlike the target's": {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16},
    "one head a group": {"num_key_value_heads": 4},
    "one kv head": {"num_key_value_heads": 1},
    "theta and width of its own": {"theta": 1e6, "intermediate_size": 97},
    "bfloat16": {"dtype": "bfloat16"},
    "yarn": {"rope": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "domino": {"domino": {}},
    "domino behind one draft": {"domino": {"pure_draft_prefix_len": 1}},
    "domino behind all drafts": {"domino": {"pure_draft_prefix_len": 7}},
    "domino with a relay": {"domino": {}, "relay": True},
    "domino, block of 2": {"domino": {}, "block_size": 2},
    "domino, shifted": {"domino": SHIFTED},
    "domino, shifted, block of 16 and odd sizes": {"domino": {**SHIFTED, **ODD_HEAD}, "block_size": 16},
    "domino, shifted, behind all drafts": {"domino": {**SHIFTED, "pure_draft_prefix_len": 8}},
    "domino, bfloat16": {"domino": {}, "dtype": "bfloat16"},
}


@dataclass
class Drafted:
    """One request's block from both sides, ready to compare."""

    drafter: str
    ids_K: Array
    ours_KV: Array
    theirs_KV: Array


class Chain:
    """Ragged requests through every engine, and each drafter's oracle beside it on the oracle's own target states."""

    def __init__(
        self,
        pair: Pair,
        engines: Engines,
        tap_offset: int = 1,
        seed: int = 0,
        prompts: Sequence[int] = PROMPTS,
    ) -> None:
        self.engines, self.rng, self.prompts = engines, np.random.default_rng(seed), prompts
        self.rows = pair.bundle.verify_rows
        self.vocab = pair.bundle.target.live_vocab
        length = max(prompts) + ROUNDS * self.rows + 1
        self.sequences = [random_tokens(self.rng, length, self.vocab) for _ in prompts]
        target = TargetOracle(pair.target)
        kinds = {spec.name: oracle_of(spec.head) for spec in pair.bundle.specs}
        self.oracles = {name: kinds[name](path, target, tap_offset) for name, path in pair.drafters.items()}
        states = [target(sequence)[1] for sequence in self.sequences]
        self.features = {name: [oracle.features(state) for state in states] for name, oracle in self.oracles.items()}
        self.caches = {name: [oracle.cache() for _ in prompts] for name, oracle in self.oracles.items()}
        self.drafted_to = {name: [0] * len(prompts) for name in self.oracles}
        self.at = [0] * len(prompts)
        self.worst_h = 0.0

    def run(self) -> Iterator[Drafted]:
        self._prefill()
        for round_ in range(ROUNDS):
            if round_ not in (2, 3, 6):  # plain steps in between: several passes become context of one draft
                yield from self._draft(round_)
                self._verify(self.rows - 1)
            else:
                self._verify(0)

    def _prefill(self) -> None:
        while any(at < prompt for at, prompt in zip(self.at, self.prompts, strict=True)):
            counts = [
                min(int(self.rng.integers(0, CHUNK + 1)), prompt - at)
                for at, prompt in zip(self.at, self.prompts, strict=True)
            ]
            rows = [self._committed(i, count) for i, count in enumerate(counts)]
            self._pass(rows, counts, CHUNK)

    def _committed(self, i: int, count: int) -> list[int]:
        return self.sequences[i][self.at[i] : self.at[i] + count]

    def _draft(self, round_: int) -> Iterator[Drafted]:
        """All requests, or a part of the batch that does not begin at slot 0."""
        slots = range(len(self.at)) if round_ % 3 else range(round_ % 2, len(self.at) - 1)
        starts = [self.at[i] for i in slots]
        anchors = [self.sequences[i][start] for i, start in zip(slots, starts, strict=True)]
        for name, oracle in self.oracles.items():
            self.engines.embeds(name, slots, anchors)
            ids, logits = self.engines.draft(name, slots, starts)
            for row, i in enumerate(slots):
                since = slice(self.drafted_to[name][i], starts[row])
                features, drafts = self.features[name][i][since], ids[row].tolist()
                theirs = oracle.draft(self.caches[name][i], features, anchors[row], starts[row], drafts)
                self.drafted_to[name][i] = starts[row]
                assert theirs.shape[0] == len(drafts)
                yield Drafted(name, ids[row], logits[row, :, : self.vocab], theirs[:, : self.vocab])

    def _verify(self, drafts: int) -> None:
        """[anchor, drafts]: a random number of them right, the others wrong."""
        rows, kept = [], []
        for i in range(len(self.at)):
            length = int(self.rng.integers(0, drafts + 1))
            accepted = int(self.rng.integers(0, length + 1))
            wrong = random_tokens(self.rng, length - accepted, self.vocab)
            rows.append([*self._committed(i, accepted + 1), *wrong])
            kept.append(accepted + 1)
        self._pass(rows, kept, max(map(len, rows)))

    def _pass(self, rows: list[list[int]], kept: list[int], width: int) -> None:
        slots = range(len(rows))
        self.engines.target(slots, rows, self.at, width)
        for name, oracle in self.oracles.items():
            h_BSE = self.engines.context(name, slots, self.at, width)
            for i, count in enumerate(kept):
                theirs = oracle.h(self.features[name][i][self.at[i] : self.at[i] + count])
                self.worst_h = max(self.worst_h, float(np.abs(h_BSE[i, :count] - theirs).max(initial=0)))
        self.at = [at + count for at, count in zip(self.at, kept, strict=True)]


def _target_keys(drafter: dict[str, Any]) -> dict[str, Any]:
    """The target of a case: four layers; the drafter writes its own attention keys over those it inherits."""
    return {**TARGET, "dtype": drafter.get("dtype", "float32")}


def _compare(chain: Chain) -> tuple[float, int]:
    """(largest difference of logits, blocks): proposals must be equal wherever the oracle's are clear."""
    worst, blocks, rows, unclear = 0.0, 0, 0, 0
    for drafted in chain.run():
        worst = max(worst, float(np.abs(drafted.ours_KV - drafted.theirs_KV).max()))
        top = np.sort(drafted.theirs_KV, axis=-1)[:, -2:]
        clear = top[:, 1] - top[:, 0] > 2 * TOLERANCE["draft logits"]
        rows, unclear = rows + len(clear), unclear + int((~clear).sum())
        if worst <= TOLERANCE["draft logits"]:
            np.testing.assert_array_equal(drafted.ids_K[clear], drafted.theirs_KV.argmax(-1)[clear])
        blocks += 1
    assert unclear <= 0.05 * rows
    return worst, blocks


@pytest.mark.parametrize("keys", CASES.values(), ids=CASES.keys())
def test_chained_rounds_equal_the_reference(tmp_path: Path, keys: dict[str, Any], measure: Any) -> None:
    pair = build_pair(tmp_path, _target_keys(keys), {"draft": {"taps": (0, 2), "sharpness": 0.3, **keys}})
    chain = Chain(pair, Engines(pair.bundle))
    worst, blocks = _compare(chain)
    measure("draft logits", worst)
    measure("context h", chain.worst_h)
    assert blocks >= 3 * 4
    assert chain.worst_h <= TOLERANCE["context h"]
    assert worst <= TOLERANCE["draft logits"]


def test_two_drafters_of_one_bundle_read_their_own_taps(tmp_path: Path, measure: Any) -> None:
    first = {"taps": (2, 1), "seed": 1, "sharpness": 0.3}
    second = {"taps": (1, 0), "seed": 2, "block_size": 5, "num_hidden_layers": 3, "sharpness": 0.3}
    pair = build_pair(tmp_path, TARGET, {"first": first, "second": second})
    assert pair.bundle.taps == (2, 1, 0)
    chain = Chain(pair, Engines(pair.bundle))
    worst, blocks = _compare(chain)
    measure("draft logits", worst)
    assert blocks >= 2 * 3 * 4
    assert chain.worst_h <= TOLERANCE["context h"]
    assert worst <= TOLERANCE["draft logits"]


@pytest.mark.parametrize("offset", [0, 2])
def test_a_wrong_tap_offset_makes_the_comparison_fail(tmp_path: Path, offset: int) -> None:
    pair = build_pair(tmp_path, TARGET, {"draft": {"taps": (0, 2)}})
    chain = Chain(pair, Engines(pair.bundle), tap_offset=offset)
    worst, _ = _compare(chain)
    assert chain.worst_h > 100 * TOLERANCE["context h"]
    assert worst > TOLERANCE["draft logits of a wrong tap, at least"]


def test_taps_in_another_order_make_the_comparison_fail(tmp_path: Path) -> None:
    pair = build_pair(tmp_path, TARGET, {"draft": {"taps": (2, 1)}})
    chain = Chain(pair, Engines(pair.bundle))
    chain.features["draft"] = [np.roll(rows, rows.shape[1] // 2, axis=-1) for rows in chain.features["draft"]]
    assert _compare(chain)[0] > TOLERANCE["draft logits of a wrong tap, at least"]


def test_what_stale_cache_rows_hold_changes_no_draft(tmp_path: Path) -> None:
    drafters = {"full": {"seed": 1}, "window": {"seed": 2, **WINDOW, "is_causal": False}}
    pair = build_pair(tmp_path, TARGET, drafters)
    runs = []
    for poison in (None, 1e4, -3e4):
        chain = Chain(pair, Engines(pair.bundle, poison=poison))
        runs.append(np.concatenate([drafted.ours_KV.reshape(-1) for drafted in chain.run()]))
    for run in runs[1:]:
        np.testing.assert_array_equal(run, runs[0])


INT8: dict[str, dict[str, Any]] = {
    "plain": {},
    "odd width": {"block_size": 16, "intermediate_size": 97},
    "domino": {"domino": {"pure_draft_prefix_len": 1}},
    "domino, shifted": {"domino": {**SHIFTED, **ODD_HEAD}, "block_size": 16},
}


@pytest.mark.parametrize("keys", INT8.values(), ids=INT8.keys())
def test_an_int8_drafter_agrees_with_the_float_one(tmp_path: Path, keys: dict[str, Any], measure: Any) -> None:
    drafters = {"draft": {"taps": (0, 2), **keys}}
    pair = build_pair(tmp_path, TARGET, drafters, draft_weights="int8")
    same, total, errors = 0, 0, []
    for drafted in Chain(pair, Engines(pair.bundle)).run():
        same += int((drafted.ids_K == drafted.theirs_KV.argmax(-1)).sum())
        total += len(drafted.ids_K)
        errors.append(np.std(drafted.ours_KV - drafted.theirs_KV) / np.std(drafted.theirs_KV))
        np.testing.assert_array_equal(drafted.ids_K, drafted.ours_KV.argmax(-1))
    measure("agreement", same / total)
    measure("relative error", float(np.mean(errors)))
    assert 0.8 < same / total < 1
    assert np.mean(errors) < 0.1


@pytest.mark.parametrize("weights", ["float", "int8"])
@pytest.mark.parametrize(
    "keys", [{}, {"domino": {**SHIFTED, **ODD_HEAD}}, {"dflash2": {}}], ids=["plain", "domino", "dflash2"]
)
def test_drafts_of_a_request_do_not_depend_on_its_batch_or_call_shape(
    tmp_path: Path, keys: dict[str, Any], weights: str
) -> None:
    """Alone or among others, in any slot, over a longer cache slice, its prompt chunked otherwise, on two threads."""
    pair = build_pair(tmp_path, TARGET, {"draft": {"taps": (2, 1), **keys}}, draft_weights=weights)
    rng = np.random.default_rng(7)
    prompts = [random_tokens(rng, length, 256) for length in (61, 37, 90, 5, 61, 20, 44, 3)]

    def draft(slots: range, who: int, slot: int, chunk: int, bucket: int, threads: int) -> Array:
        engines = Engines(pair.bundle, threads)
        rows = [prompts[who] if i == slot else prompts[i] for i in slots]
        for start in range(0, 96, chunk):
            tokens = [row[start : start + chunk] for row in rows]
            starts = [min(start, len(row)) for row in rows]
            engines.target(slots, tokens, starts, chunk, bucket)
            engines.context("draft", slots, starts, chunk)
        engines.embeds("draft", slots, [7] * len(rows))
        return engines.draft("draft", slots, [len(row) for row in rows], bucket)[1][slot - slots.start]

    expected = draft(range(1), 0, 0, 96, 0, 1)
    for shape in [
        (range(8), 0, 0, 96, 0, 1),
        (range(8), 0, 7, 96, 0, 2),
        (range(3), 0, 1, 16, 0, 1),
        (range(2, 4), 0, 3, 5, 192, 2),
        (range(1), 0, 0, 1, 256, 2),
    ]:
        np.testing.assert_array_equal(draft(*shape), expected, err_msg=str(shape))
