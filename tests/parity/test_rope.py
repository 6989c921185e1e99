"""Rotary tables against transformers' own module, at positions beyond the original length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflow_trt.checkpoint.config import Config, read_rope
from dflow_trt.rope import inv_frequencies, rope_tables

torch = pytest.importorskip("torch", reason="the reference is torch code")
transformers = pytest.importorskip("transformers", reason="the reference is transformers' Qwen3RotaryEmbedding")

LENGTH = 2048
ROWS = 5000
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH}
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "yarn": YARN,
    "yarn original length from max_position_embeddings": {"rope_type": "yarn", "factor": 4.0},
    "yarn attention_factor": {**YARN, "attention_factor": 0.8},
    "yarn mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.3},
    "yarn mscale alone": {**YARN, "mscale": 0.707},
    "yarn mscale zero": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.0},
    "yarn not truncated": {**YARN, "truncate": False},
    "yarn betas": {**YARN, "beta_fast": 20, "beta_slow": 2.0},
    "yarn beta zero is the default": {**YARN, "beta_fast": 0},
    "yarn one ramp step": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
}
SIZES = [(32, 10000.0), (64, 1e6), (128, 1e6), (80, 5e5)]


def _reference(parameters: dict[str, Any], head_dim: int, theta: float, layout: int) -> Any:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    config = transformers.Qwen3Config(**_keys(parameters, head_dim, theta, layout))
    return Qwen3RotaryEmbedding(config)


def _keys(parameters: dict[str, Any], head_dim: int, theta: float, layout: int) -> dict[str, Any]:
    keys: dict[str, Any] = {"max_position_embeddings": LENGTH, "head_dim": head_dim}
    if layout == 4:
        return {**keys, "rope_theta": theta, "rope_scaling": dict(parameters)}
    return {**keys, "rope_parameters": {**parameters, "rope_theta": theta}}


@pytest.mark.parametrize("layout", [4, 5])
@pytest.mark.parametrize(("head_dim", "theta"), SIZES)
@pytest.mark.parametrize("parameters", CASES.values(), ids=CASES.keys())
def test_tables_equal_transformers(parameters: dict[str, Any], head_dim: int, theta: float, layout: int) -> None:
    keys = _keys(parameters, head_dim, theta, layout)
    cos, sin = rope_tables(read_rope(Config(keys, Path("config.json")), head_dim), head_dim, ROWS)
    reference = _reference(parameters, head_dim, theta, layout)
    with torch.no_grad():
        both = reference(torch.zeros(1), torch.arange(ROWS)[None])
    for ours, theirs in zip((cos, sin), (table[0].numpy() for table in both), strict=True):
        assert ours.dtype == np.float32
        assert ours.shape == (ROWS, head_dim // 2)
        np.testing.assert_array_equal(theirs[:, : head_dim // 2], theirs[:, head_dim // 2 :])
        np.testing.assert_allclose(ours, theirs[:, : head_dim // 2], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("head_dim", "theta"), SIZES)
@pytest.mark.parametrize("parameters", CASES.values(), ids=CASES.keys())
def test_frequencies_are_within_one_unit_in_the_last_place(
    parameters: dict[str, Any], head_dim: int, theta: float
) -> None:
    rope = read_rope(Config(_keys(parameters, head_dim, theta, 5), Path("config.json")), head_dim)
    theirs = _reference(parameters, head_dim, theta, 5).inv_freq.numpy()
    np.testing.assert_array_max_ulp(inv_frequencies(rope, head_dim), theirs, maxulp=2)


def test_far_positions_use_the_float32_angle_of_transformers() -> None:
    rope = read_rope(Config(_keys({"rope_type": "default"}, 32, 10000.0, 5), Path("config.json")), 32)
    position = 130_001
    cos, _ = rope_tables(rope, 32, position + 1)
    theirs, _ = _reference({"rope_type": "default"}, 32, 10000.0, 5)(torch.zeros(1), torch.tensor([[position]]))
    exact = np.cos(position * 10000.0 ** (-np.arange(16) / 16))
    assert np.abs(theirs[0, 0, :16].numpy() - exact).max() > 1e-4
    np.testing.assert_allclose(cos[position], theirs[0, 0, :16].numpy(), rtol=0, atol=1e-5)
