"""The target engine through the ONNX Runtime runtime, against transformers' Qwen3ForCausalLM on the same folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import DEAD, TOLERANCE, Engines, Pair, build_pair, ragged_steps, random_tokens
from oracles import TargetOracle

pytest.importorskip("torch", reason="the reference is torch code")
pytest.importorskip("transformers", reason="the reference is transformers' Qwen3")

PROMPTS, LENGTHS = (61, 38, 17), (101, 70, 45)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
WINDOW = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
CASES: dict[str, dict[str, Any]] = {
    "untied float32": {},
    "tied": {"tied": True},
    "tied bfloat16": {"tied": True, "dtype": "bfloat16"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "config of transformers 4": {"layout": 4, "theta": 5e5},
    "theta of Qwen3": {"theta": 1e6},
    "linear rope": {"rope": {"rope_type": "linear", "factor": 2.5}},
    "linear rope, transformers 4": {"layout": 4, "rope": {"rope_type": "linear", "factor": 2.5}},
    "yarn beyond the original length": {"rope": YARN},
    "yarn, transformers 4": {"layout": 4, "rope": YARN},
    "yarn with attention_factor": {"rope": {**YARN, "attention_factor": 0.7}},
    "head_dim below hidden / heads": {"head_dim": 8},
    "head_dim above hidden / heads": {"head_dim": 48},
    "attention_bias": {"attention_bias": True},
    "sliding window from layer 1": WINDOW,
    "sliding window by layer_types": MIXED,
    "one kv head": {"num_key_value_heads": 1},
    "one head a group": {"num_key_value_heads": 4},
    "one head": {"num_attention_heads": 1, "num_key_value_heads": 1},
    "sharded": {"shards": 3},
    "padded vocabulary": {"vocab_size": 256, "tokenizer": 201},
    "vocabulary not in whole blocks": {"vocab_size": 300},
    "tied, padded, not in whole blocks": {"tied": True, "vocab_size": 300, "tokenizer": 250},
    "odd sizes": {"hidden_size": 60, "head_dim": 30, "intermediate_size": 97, "vocab_size": 301},
    "eps": {"rms_norm_eps": 1e-3},
}


def _pair(folder: Path, keys: dict[str, Any], **options: Any) -> Pair:
    plain = {"dtype": keys.get("dtype", "float32"), "attention_bias": False, "use_sliding_window": False}
    return build_pair(folder, keys, {"draft": {"taps": (1, 0), **plain}}, **options)


def _sequences(seed: int, vocab: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [random_tokens(rng, length, vocab) for length in LENGTHS]


@pytest.mark.parametrize("keys", CASES.values(), ids=CASES.keys())
def test_logits_and_hidden_equal_transformers(tmp_path: Path, keys: dict[str, Any], measure: Any) -> None:
    pair = _pair(tmp_path, keys)
    target, taps = pair.bundle.target, pair.bundle.taps
    assert taps == (1, 0)
    engines, sequences = Engines(pair.bundle), _sequences(1, target.live_vocab)
    expected = [TargetOracle(pair.target)(sequence) for sequence in sequences]
    worst, live = {"logits": 0.0, "hidden": 0.0}, target.live_vocab
    rows = 0
    for step in ragged_steps(np.random.default_rng(2), sequences, PROMPTS):
        passed = engines.target(range(3), step.tokens, step.starts, step.width)
        assert passed.hidden_BSX is not None
        for i, (start, kept) in enumerate(zip(step.starts, step.kept, strict=True)):
            logits, states = expected[i]
            ours_SV, span = passed.logits_BSV[i, :kept], slice(start, start + kept)
            hidden = np.concatenate([states[tap + 1][span] for tap in taps], axis=-1)
            worst["logits"] = max(worst["logits"], _worst(ours_SV[:, :live], logits[span, :live]))
            worst["hidden"] = max(worst["hidden"], _worst(passed.hidden_BSX[i, :kept], hidden))
            assert (ours_SV[:, live:] <= DEAD).all()
            assert (passed.hidden_BSX[i, len(step.tokens[i]) :] == 0).all()
            np.testing.assert_array_equal(passed.next_ids_BS[i, :kept], ours_SV.argmax(-1))
            clear = _clear_rows(logits[span, :live])
            np.testing.assert_array_equal(passed.next_ids_BS[i, :kept][clear], logits[span, :live].argmax(-1)[clear])
            rows += kept
    assert rows == sum(LENGTHS)
    for name, error in worst.items():
        measure(name, error)
        assert error <= TOLERANCE[f"target {name}"], (name, error)


def _worst(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max(initial=0.0))


def _clear_rows(logits: np.ndarray) -> np.ndarray:
    """Rows whose two best logits differ by more than both models may."""
    top = np.sort(logits, axis=-1)[:, -2:]
    return top[:, 1] - top[:, 0] > 2 * TOLERANCE["target logits"]


def test_an_int8_target_agrees_with_the_float_model(tmp_path: Path) -> None:
    pair = _pair(tmp_path, {}, target_weights="int8")
    sequence = _sequences(3, 256)[0]
    logits, _ = TargetOracle(pair.target)(sequence)
    ours = Engines(pair.bundle).target(range(1), [sequence], [0]).logits_BSV[0]
    assert (ours.argmax(-1) == logits.argmax(-1)).mean() > 0.8
    assert np.abs(ours - logits).max() > TOLERANCE["target logits"]


@pytest.mark.parametrize("keys", [{}, MIXED, {"num_key_value_heads": 4}], ids=["full", "window", "one head a group"])
def test_what_stale_cache_rows_hold_changes_no_bit(tmp_path: Path, keys: dict[str, Any]) -> None:
    pair = _pair(tmp_path, keys)
    sequences = _sequences(4, 256)
    runs = []
    for poison in (None, 1e4, -3e4):
        engines, outputs = Engines(pair.bundle, poison=poison), []
        for step in ragged_steps(np.random.default_rng(5), sequences, PROMPTS):
            passed = engines.target(range(3), step.tokens, step.starts, step.width)
            for i, kept in enumerate(step.kept):
                assert passed.hidden_BSX is not None
                outputs += [passed.logits_BSV[i, :kept], passed.hidden_BSX[i]]
        runs.append(np.concatenate([array.reshape(-1) for array in outputs]))
    assert np.isfinite(runs[0]).all()
    for run in runs[1:]:
        np.testing.assert_array_equal(run, runs[0])


def test_a_wrong_position_would_be_seen(tmp_path: Path) -> None:
    pair = _pair(tmp_path, {})
    sequence = _sequences(6, 256)[0]
    logits, _ = TargetOracle(pair.target)(sequence)
    engines = Engines(pair.bundle, poison=None)
    engines.target(range(1), [sequence[:20]], [0])
    right = engines.target(range(1), [sequence[20:30]], [20]).logits_BSV[0]
    assert _worst(right, logits[20:30]) <= TOLERANCE["target logits"]
    shifted = engines.target(range(1), [sequence[20:30]], [21]).logits_BSV[0]
    assert _worst(shifted, logits[20:30]) > 100 * TOLERANCE["target logits"]
