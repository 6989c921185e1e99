"""Rotary tables in float32, as transformers computes them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dflow_trt.spec import RopeSpec

Table = np.ndarray[Any, np.dtype[np.float32]]


def rope_tables(rope: RopeSpec, head_dim: int, rows: int) -> tuple[Table, Table]:
    """cos and sin for positions 0 .. rows-1, each [rows, head_dim / 2] float32, ``attention_factor``
    multiplied in.

    The angle is the float32 product of position and frequency, as in transformers: far out its rounding is
    coarse, and exact angles would not give the same logits. cos and sin of that angle are correctly rounded.
    """
    angle = np.arange(rows, dtype=np.float32)[:, None] * inv_frequencies(rope, head_dim)[None, :]
    scale = np.float32(rope.attention_factor)
    cos, sin = np.empty_like(angle), np.empty_like(angle)
    np.cos(angle, out=cos, dtype=np.float64, casting="same_kind")
    np.sin(angle, out=sin, dtype=np.float64, casting="same_kind")
    return np.multiply(cos, scale, out=cos), np.multiply(sin, scale, out=sin)


def inv_frequencies(rope: RopeSpec, head_dim: int) -> Table:
    """The float32 inverse frequencies [head_dim / 2].

    theta ** (2i / head_dim) is rounded once from float64. transformers' float32 power is that value too on
    most processors, and within one unit in the last place on the others.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    period = np.power(rope.theta, exponent.astype(np.float64)).astype(np.float32)
    plain: Table = np.float32(1) / period
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / np.float32(rope.factor)
    keep = np.float32(1) - _ramp(rope, head_dim)
    stretched = np.float32(1) / (np.float32(rope.factor) * period)
    return stretched * (np.float32(1) - keep) + plain * keep


def _ramp(rope: RopeSpec, head_dim: int) -> Table:
    """YaRN's ramp [head_dim / 2]: 0 keeps a frequency, 1 divides it by ``factor``."""
    low, high = (_correction_dim(rope, head_dim, beta) for beta in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = np.float32(high - low if high != low else 0.001)
    ramp: Table = np.clip((np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / width, 0, 1)
    return ramp


def _correction_dim(rope: RopeSpec, head_dim: int, rotations: float) -> float:
    """The dimension whose angle turns this often over the original length."""
    turns = math.log(rope.original_max_position / (rotations * 2 * math.pi))
    return head_dim * turns / (2 * math.log(rope.theta))
