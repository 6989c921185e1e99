"""The relay engine: block embeddings, plus what the last verify pass left of its rejected suffix.

[beta ; gamma] = W2 silu(W1 [E(b) ; E(y_hat) ; h] + b1) + b2,  x_j = E(mask) + beta * LN(h) + gamma
(DFlow, arXiv 2609.06498). Float32 whatever the other engines compute in.
"""

from __future__ import annotations

import onnx_ir as ir

from dflow_trt import contract as c
from dflow_trt.graphs import store
from dflow_trt.graphs.blocks import Vocabulary, silu
from dflow_trt.graphs.builder import NUMPY, GraphBuilder, Lowering
from dflow_trt.graphs.functions import relay_inject
from dflow_trt.spec import DFlashSpec, DType

RELAY_LOWERING = Lowering("float32", "float", "fold")


def build_relay(g: GraphBuilder, drafter: DFlashSpec, vocabulary: Vocabulary, block_dtype: DType) -> None:
    """``block_dtype`` is what the drafter engine takes. A drafter without relay gets its embeddings alone."""
    embed = _Embedding(g, vocabulary, drafter.input_embedding_scale)
    block = embed.rows("block", g.input(c.BLOCK_IDS))
    if drafter.relay:
        block = _inject(g, drafter, embed, block, drafter.relay.norm_eps)
    if block_dtype != "float32":
        block = g.cast("block_embeds.cast", block, block_dtype)
    g.output(c.BLOCK_EMBEDS, block, block_dtype)


class _Embedding:
    """Token embeddings as the drafter sees them: scaled, every id alike."""

    def __init__(self, g: GraphBuilder, vocabulary: Vocabulary, scale: float) -> None:
        self._g, self._vocabulary, self._scale = g, vocabulary, scale

    def rows(self, name: str, ids: ir.Value) -> ir.Value:
        rows = self._vocabulary.embedding(self._g, f"{name}.embed", ids)
        if self._scale == 1.0:
            return rows
        return self._g.op(f"{name}.scaled", "Mul", rows, self._g.scalar("embed.scale", self._scale))


def _inject(g: GraphBuilder, drafter: DFlashSpec, embed: _Embedding, block: ir.Value, eps: float) -> ir.Value:
    source = g.op("relay.source", "Unsqueeze", g.input(c.RELAY_SRC), g.ints(2))
    h = g.op("relay.h", "GatherND", g.input(c.PENDING_H), source, batch_dims=1)
    beta_gamma = _mlp(g, drafter.stack.hidden_size, h, _pair(g, embed))
    norm = (g.vector("relay_norm.weight"), g.vector("relay_norm.bias"))
    on = g.op("relay.on", "Cast", g.input(c.RELAY_ON), to=int(ir.DataType.INT64))
    inputs = (block, h, beta_gamma, *norm, on)
    return g.plugin("relayed", c.RELAY_INJECT, relay_inject(), *inputs, epsilon=eps)


def _pair(g: GraphBuilder, embed: _Embedding) -> ir.Value:
    """[E(b) ; E(y_hat)] of each request: [B,1,2E]."""
    ids = [g.op(f"{name}.row", "Unsqueeze", g.input(spec), g.ints(1)) for name, spec in _PAIR]
    rows = [embed.rows(name, row) for (name, _), row in zip(_PAIR, ids, strict=True)]
    return g.op("pair", "Concat", *rows, axis=-1)


_PAIR = (("bonus", c.BONUS_ID), ("reject", c.REJECT_ID))


def _mlp(g: GraphBuilder, size: int, h: ir.Value, pair: ir.Value) -> ir.Value:
    """The first layer is split by input, so that the token pair is projected once a request, not once a slot."""
    per_request = _columns(g, "relay.mlp.pair", pair, slice(0, 2 * size))
    per_request = g.op("relay.mlp.pair.biased", "Add", per_request, g.vector("relay_mlp.0.bias"))
    per_slot = _columns(g, "relay.mlp.h", h, slice(2 * size, 3 * size))
    x = silu(g, "relay.mlp", g.op("relay.mlp.in", "Add", per_slot, per_request))
    out = store.transposed(g.source, ["relay_mlp.2.weight"], NUMPY["float32"])
    y = g.op("relay.mlp.out", "MatMul", x, g.weight(g.store.add("relay_mlp.2.weight", out)))
    return g.op("beta_gamma", "Add", y, g.vector("relay_mlp.2.bias"))


def _columns(g: GraphBuilder, name: str, x: ir.Value, columns: slice) -> ir.Value:
    array = store.transposed(g.source, ["relay_mlp.0.weight"], NUMPY["float32"], columns)
    return g.op(name, "MatMul", x, g.weight(g.store.add(f"{name}.weight", array)))
