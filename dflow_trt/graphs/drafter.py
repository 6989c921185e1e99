"""The drafter engine: one non-causal pass over a block of mask slots and the target's context.

DFlash, arXiv 2602.06036. The block's keys and values go to the cache rows from A on, where the next context pass
overwrites them. The drafts are chosen at once, or one after another where the drafter has a causal head or a selector.
"""

from __future__ import annotations

import onnx_ir as ir

from dflow_trt import contract as c
from dflow_trt.graphs.blocks import (
    DecoderLayers,
    Rope,
    Scores,
    Visibility,
    Vocabulary,
    argmax,
    output_transform,
    rms_norm,
)
from dflow_trt.graphs.builder import GraphBuilder
from dflow_trt.graphs.dflash2 import Convolutions, select_in_turn
from dflow_trt.graphs.domino import draft_in_turn
from dflow_trt.spec import DFlashSpec, SelectorSpec

END = 2**31 - 1


def build_drafter(g: GraphBuilder, drafter: DFlashSpec, vocabulary: Vocabulary) -> None:
    """Slot 0 is the anchor's; draft 1 comes from ``drafter.first_slot``, and each slot behind it gives the next."""
    z = _final_states(g, drafter)
    scores = vocabulary.scores(g, g.op("head.flat", "Reshape", z, g.ints(-1, drafter.stack.hidden_size)))
    if isinstance(drafter.head, SelectorSpec):
        select_in_turn(g, drafter, vocabulary, z, scores)
    elif drafter.corrected_drafts:
        draft_in_turn(g, drafter, vocabulary, z, scores.logits(g))
    else:
        _draft_at_once(g, drafter, scores)


def _final_states(g: GraphBuilder, drafter: DFlashSpec) -> ir.Value:
    """The block through all layers and the final norm: [B,K,E] of the slots that draft."""
    stack, write_index = drafter.stack, g.input(c.BLOCK_WRITE_INDEX)
    positions, kv_index = g.input(c.BLOCK_POSITION_IDS), g.input(c.KV_INDEX)
    end = g.op("block.end", "Add", write_index, g.ints(drafter.block_size))
    visibility = Visibility(g, stack, positions, kv_index, end)
    around = Convolutions(g, drafter).around if drafter.conv else None
    layers = DecoderLayers(g, stack, "", Rope.of(g, stack, positions), visibility, write_index, kv_index, around)
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
        logits = output_transform(g, drafter, scores.logits(g), g.lowering.dtype)
        shape = g.ints(-1, drafter.num_drafts, g.contract.static["V"])
        g.output(c.DRAFT_LOGITS, g.op("draft_logits", "Reshape", logits, shape))
