"""The context engine: what a target pass leaves behind for a drafter (DFlash, arXiv 2602.06036).

h = hidden_norm(fc(taps)), in float32 whatever the engine's dtype (tapped values above 2e4 overflow half precision);
its keys and values go straight into the drafter's cache, without the layers' input norms.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from dflow_trt import contract as c
from dflow_trt.graphs import store
from dflow_trt.graphs.blocks import Rope, by_head, linear, normed_rotated
from dflow_trt.graphs.builder import NUMPY, GraphBuilder
from dflow_trt.spec import DFlashSpec, Eagle3Spec


def build_context(g: GraphBuilder, drafter: DFlashSpec, taps: Sequence[int]) -> None:
    """``taps`` are the layers packed in ``hidden``; the drafter reads its own columns of them."""
    stack, positions, write_index = drafter.stack, g.input(c.POSITION_IDS), g.input(c.WRITE_INDEX)
    h = _project(g, drafter, own_columns(g, drafter, taps))
    rope = Rope.of(g, stack, positions)
    x = h if g.lowering.dtype == "float32" else g.cast("h.cast", h, g.lowering.dtype)
    for i in range(stack.num_layers):
        name, parts = f"layers.{i}.attn", [f"layers.{i}.self_attn.{label}_proj" for label in "kv"]
        bias = [f"{part}.bias" for part in parts] if stack.attention_bias else []
        fused = linear(g, f"{name}.kv_proj", x, [f"{part}.weight" for part in parts], bias)
        k, v = by_head(g, name, fused, {"k": stack.num_kv_heads, "v": stack.num_kv_heads}, stack.head_dim)
        keys = normed_rotated(g, f"{name}.k", k, f"layers.{i}.self_attn.k_norm.weight", rope, stack)
        g.update_cache(i, "k", keys, write_index)
        g.update_cache(i, "v", v, write_index)


def own_columns(g: GraphBuilder, drafter: DFlashSpec | Eagle3Spec, taps: Sequence[int]) -> ir.Value:
    """This drafter's taps in its own order, out of the packed ones."""
    hidden = g.input(c.HIDDEN)
    if tuple(taps) == drafter.taps:
        return hidden
    width = drafter.target_hidden_size
    parts = g.split("hidden", hidden, [width] * len(taps), [f"tap_{tap}" for tap in taps])
    own = [parts[taps.index(tap)] for tap in drafter.taps]
    return g.op("hidden.own", "Concat", *own, axis=-1)


def _project(g: GraphBuilder, drafter: DFlashSpec, hidden: ir.Value) -> ir.Value:
    wide = hidden if g.lowering.dtype == "float32" else g.cast("hidden.wide", hidden, "float32")
    weight = g.weight(g.store.add("fc.weight", store.transposed(g.source, ["fc.weight"], NUMPY["float32"])))
    norm = g.vector("hidden_norm.weight", "float32")
    projected = g.op("fc", "MatMul", wide, weight)
    h = g.op("h", "RMSNormalization", projected, norm, axis=-1, epsilon=drafter.stack.rms_norm_eps)
    g.output(c.H, h)
    return h
