"""The drafter engine: one non-causal pass over a block of mask slots and the target's context.

DFlash, arXiv 2602.06036. The block's keys and values go to the cache rows from A on, where the next context pass
overwrites them. The drafts are chosen at once, or one after another where the drafter has a causal head.
"""

from __future__ import annotations

import onnx_ir as ir

from dflow_trt import contract as c
from dflow_trt.graphs.blocks import DecoderLayers, Rope, Scores, Visibility, Vocabulary, argmax, rms_norm
from dflow_trt.graphs.builder import GraphBuilder
from dflow_trt.graphs.domino import draft_in_turn
from dflow_trt.spec import DFlashSpec

END = 2**31 - 1


def build_drafter(g: GraphBuilder, drafter: DFlashSpec, vocabulary: Vocabulary) -> None:
    """Slot 0 is the anchor's; draft 1 comes from ``drafter.first_slot``, and each slot behind it gives the next."""
    z = _final_states(g, drafter)
    scores = vocabulary.scores(g, g.op("head.flat", "Reshape", z, g.ints(-1, drafter.stack.hidden_size)))
    if drafter.corrected_drafts:
        draft_in_turn(g, drafter, vocabulary, z, scores.logits(g))
    else:
        _draft_at_once(g, drafter, scores)


def _final_states(g: GraphBuilder, drafter: DFlashSpec) -> ir.Value:
    """The block through all layers and the final norm: [B,K,E] of the slots that draft."""
    stack, write_index = drafter.stack, g.input(c.BLOCK_WRITE_INDEX)
    positions, kv_index = g.input(c.BLOCK_POSITION_IDS), g.input(c.KV_INDEX)
    end = g.op("block.end", "Add", write_index, g.ints(drafter.block_size))
    visibility = Visibility(g, stack, positions, kv_index, end)
    layers = DecoderLayers(g, stack, "", Rope.of(g, stack, positions), visibility, write_index, kv_index)
    x = g.input(c.BLOCK_EMBEDS)
    for i in range(stack.num_layers):
        x = layers.layer(i, x)
    if drafter.first_slot:
        x = g.op("slots", "Slice", x, g.ints(drafter.first_slot), g.ints(END), g.ints(1))
    return rms_norm(g, "final_norm", x, "norm.weight", stack.rms_norm_eps)


def _draft_at_once(g: GraphBuilder, drafter: DFlashSpec, scores: Scores) -> None:
    best = argmax(g, "argmax", scores.values)
    g.output(c.DRAFT_IDS, g.op("draft_ids", "Reshape", best, g.ints(-1, drafter.num_drafts)))
    if c.DRAFT_LOGITS in g.contract.outputs:
        logits = _output_transform(g, drafter, scores.logits(g))
        shape = g.ints(-1, drafter.num_drafts, g.contract.static["V"])
        g.output(c.DRAFT_LOGITS, g.op("draft_logits", "Reshape", logits, shape))


def _output_transform(g: GraphBuilder, drafter: DFlashSpec, x: ir.Value) -> ir.Value:
    """logits * output_multiplier, then softcapped. Both keep the order of logits, so the argmax goes without them."""
    if drafter.output_multiplier != 1.0:
        x = g.op("logits.multiplied", "Mul", x, g.scalar("output_multiplier", drafter.output_multiplier))
    if drafter.final_logit_softcapping:
        cap = g.scalar("softcap", drafter.final_logit_softcapping)
        x = g.op("logits.softcapped", "Mul", g.op("logits.tanh", "Tanh", g.op("logits.capped", "Div", x, cap)), cap)
    return x
