"""The target engine: Qwen3 over a slot KV cache, with its tapped layers packed for the drafters.

A draft model is one without taps, whose logits nobody asks for.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from dflow_trt import contract as c
from dflow_trt.graphs.blocks import DecoderLayers, Rope, Visibility, Vocabulary, argmax, rms_norm
from dflow_trt.graphs.builder import GraphBuilder
from dflow_trt.graphs.functions import hidden_state_extract
from dflow_trt.spec import TargetSpec


def build_target(g: GraphBuilder, target: TargetSpec, vocabulary: Vocabulary, taps: Sequence[int]) -> None:
    """Row i of a request predicts position write_index + i + 1; ``taps`` are the layers whose outputs are packed."""
    stack = target.stack
    positions, kv_index = g.input(c.POSITION_IDS), g.input(c.KV_INDEX)
    rope, visibility = Rope.of(g, stack, positions), Visibility(g, stack, positions, kv_index)
    layers = DecoderLayers(g, stack, "model.", rope, visibility, g.input(c.WRITE_INDEX), kv_index)
    x = vocabulary.embedding(g, "embed", g.input(c.INPUT_IDS))
    outputs = []
    for i in range(stack.num_layers):
        x = layers.layer(i, x)
        outputs.append(x)
    _predict(g, target, vocabulary, x)
    if taps:
        _extract(g, [outputs[tap] for tap in taps])


def _predict(g: GraphBuilder, target: TargetSpec, vocabulary: Vocabulary, x: ir.Value) -> None:
    """Logits and their argmax at ``logit_rows`` alone: the head is a large part of a pass."""
    rows = g.input(c.LOGIT_ROWS)
    index = g.op("head.rows", "Unsqueeze", rows, g.ints(2))
    chosen = g.op("head.chosen", "GatherND", x, index, batch_dims=1)
    normed = rms_norm(g, "final_norm", chosen, "model.norm.weight", target.stack.rms_norm_eps)
    flat = g.op("head.flat", "Reshape", normed, g.ints(-1, target.stack.hidden_size))
    scores = vocabulary.scores(g, flat)
    shape = g.op("head.shape", "Shape", rows)
    g.output(c.NEXT_IDS, g.op("next_ids", "Reshape", argmax(g, "argmax", scores.values), shape))
    if c.LOGITS in g.contract.outputs:
        width = g.ints(g.contract.static["V"])
        shape = g.op("logits.shape", "Concat", shape, width, axis=0)
        g.output(c.LOGITS, g.op("logits", "Reshape", scores.logits(g), shape))


def _extract(g: GraphBuilder, taps: Sequence[ir.Value]) -> None:
    function = hidden_state_extract(len(taps))
    g.output(c.HIDDEN, g.plugin("hidden", c.HIDDEN_STATE_EXTRACT, function, *taps, g.input(c.ROW_COUNT)))
