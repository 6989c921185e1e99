"""The drafter engine: one non-causal pass over a block of mask slots and the target's context.

DFlash, arXiv 2602.06036. The block's keys and values go to cache rows A..A+K, where the next context pass overwrites
them.
"""

from __future__ import annotations

import onnx_ir as ir

from dflow_trt import contract as c
from dflow_trt.graphs.blocks import DecoderLayers, Rope, Visibility, Vocabulary, argmax, rms_norm
from dflow_trt.graphs.builder import GraphBuilder
from dflow_trt.spec import DrafterSpec

END = 2**31 - 1


def build_drafter(g: GraphBuilder, drafter: DrafterSpec, vocabulary: Vocabulary) -> None:
    """Slot j of the block drafts position A + j; slot 0 is the anchor and drafts nothing."""
    stack, write_index = drafter.stack, g.input(c.BLOCK_WRITE_INDEX)
    positions, kv_index = g.input(c.BLOCK_POSITION_IDS), g.input(c.KV_INDEX)
    end = g.op("block.end", "Add", write_index, g.ints(drafter.block_size))
    visibility = Visibility(g, stack, positions, kv_index, end)
    layers = DecoderLayers(g, stack, "", Rope.of(g, stack, positions), visibility, write_index, kv_index)
    x = g.input(c.BLOCK_EMBEDS)
    for i in range(stack.num_layers):
        x = layers.layer(i, x)
    slots = g.op("slots", "Slice", x, g.ints(1), g.ints(END), g.ints(1))
    normed = rms_norm(g, "final_norm", slots, "norm.weight", stack.rms_norm_eps)
    scores = vocabulary.scores(g, g.op("head.flat", "Reshape", normed, g.ints(-1, stack.hidden_size)))
    g.output(c.DRAFT_IDS, g.op("draft_ids", "Reshape", argmax(g, scores.values), g.ints(-1, drafter.num_drafts)))
    if c.DRAFT_LOGITS in g.contract.outputs:
        logits = _output_transform(g, drafter, scores.logits(g))
        shape = g.ints(-1, drafter.num_drafts, g.contract.static["V"])
        g.output(c.DRAFT_LOGITS, g.op("draft_logits", "Reshape", logits, shape))


def _output_transform(g: GraphBuilder, drafter: DrafterSpec, x: ir.Value) -> ir.Value:
    """logits * output_multiplier, then softcapped. Both keep the order of logits, so the argmax goes without them."""
    if drafter.output_multiplier != 1.0:
        x = g.op("logits.multiplied", "Mul", x, g.scalar("output_multiplier", drafter.output_multiplier))
    if drafter.final_logit_softcapping:
        cap = g.scalar("softcap", drafter.final_logit_softcapping)
        x = g.op("logits.softcapped", "Mul", g.op("logits.tanh", "Tanh", g.op("logits.capped", "Div", x, cap)), cap)
    return x
