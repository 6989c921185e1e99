"""EAGLE-3 for a build: two engines of one decoder layer on one cache, and its own vocabulary (:mod:`.kind`).

Row p reads [input_layernorm(E(t_{p+1})) ; hidden_norm(f_p)], twice as wide as the layer's output h_p; the residual is
f_p itself, un-normed unless the checkpoint says otherwise. f_p = fc(taps of row p) where the target has been, and the
feature that row p-1 passed on behind that. argmax(lm_head(norm(h_p))), a draft id, drafts t_{p+2}. EAGLE-3, arXiv
2503.01840; the options of EAGLE 3.1 (arXiv 2605.09992) as vLLM and SGLang compute them.

Projected taps, residual and norms of it are float32 whatever the engine's dtype: tapped values above 2e4 overflow half
precision, and features are as large as a target's hidden states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from dflow_trt import contract as c
from dflow_trt.checkpoint.eagle3 import Eagle3Checkpoint, read_eagle3, without_copied_embedding
from dflow_trt.checkpoint.names import DRAFT_EMBEDDING, HEAD, eagle3_tensors
from dflow_trt.checkpoint.target import TargetCheckpoint
from dflow_trt.graphs import store
from dflow_trt.graphs.blocks import (
    DecoderLayers,
    Rope,
    Visibility,
    Vocabulary,
    argmax,
    by_head,
    linear,
    rms_norm,
    swiglu,
)
from dflow_trt.graphs.builder import NUMPY, GraphBuilder
from dflow_trt.graphs.context import own_columns
from dflow_trt.graphs.kind import Engines, Kept, Settings, Stored, Tables, Writer, describe_stack
from dflow_trt.spec import Eagle3Spec

LAYER = "layers.0"
_FUSION = ("fc.weight", "input_norm.weight", "fc_norm.")  # what makes a feature of taps
_WIDE = (*_FUSION, f"{LAYER}.hidden_norm.weight", f"{LAYER}.post_attention_layernorm.weight", "norm.weight")


@dataclass(frozen=True)
class DraftVocabulary(Vocabulary):
    """The drafter's own head, with the target's embedding or its own. target_ids: int64 [V], of each column."""

    target_ids: ir.ExternalTensor


def build_eagle3_context(
    g: GraphBuilder, drafter: Eagle3Spec, vocabulary: DraftVocabulary, taps: Sequence[int]
) -> None:
    """Keys and values of every row of a target pass; behind ``logit_rows`` the first draft and what the next row reads.

    Only that row needs queries, an MLP and a head. ``taps`` are the layers packed in ``hidden``.
    """
    features = _fused(g, drafter, own_columns(g, drafter, taps))
    rows = _rows(g, drafter, vocabulary, g.input(c.NEXT_INPUT_IDS), features, g.input(c.POSITION_IDS))
    index = g.op("drafting.rows", "Unsqueeze", g.input(c.LOGIT_ROWS), g.ints(2))

    def chosen(label: str, x: ir.Value) -> ir.Value:
        return g.op(f"drafting.{label}", "GatherND", x, index, batch_dims=1)

    queries = _Rows(*(chosen(each.name, getattr(rows, each.name)) for each in dataclasses.fields(rows)))
    _draft(g, drafter, vocabulary, rows, queries)


def build_eagle3_step(g: GraphBuilder, drafter: Eagle3Spec, vocabulary: DraftVocabulary) -> None:
    """One more row behind the last one, from the feature that it passed on and the draft made there."""
    features, positions = g.input(c.PENDING_H), g.input(c.BLOCK_POSITION_IDS)
    rows = _rows(g, drafter, vocabulary, g.input(c.STEP_IDS), features, positions)
    _draft(g, drafter, vocabulary, rows, rows)


def _fused(g: GraphBuilder, drafter: Eagle3Spec, hidden: ir.Value) -> ir.Value:
    """fc of the taps [B,S,X], normed together or each one where the drafter wants it: [B,S,E] float32."""
    x, eps = g.widened("hidden.wide", hidden), drafter.stack.rms_norm_eps
    if drafter.norm_before_fc:
        x = rms_norm(g, "hidden.normed", x, "input_norm.weight", eps, "float32")
    if drafter.fc_norm:
        x = _each_normed(g, drafter, x)
    weight = store.transposed(g.source, ["fc.weight"], NUMPY["float32"])
    return g.op("fc", "MatMul", x, g.weight(g.store.add("fc.weight", weight)))


def _each_normed(g: GraphBuilder, drafter: Eagle3Spec, x: ir.Value) -> ir.Value:
    labels = [f"fc_norm.{i}" for i in range(len(drafter.taps))]
    parts = g.split("hidden.taps", x, [drafter.target_hidden_size] * len(labels), labels)
    eps = drafter.stack.rms_norm_eps
    normed = [rms_norm(g, name, x, f"{name}.weight", eps, "float32") for name, x in zip(labels, parts, strict=True)]
    return g.op("hidden.each_normed", "Concat", *normed, axis=-1)


@dataclass(frozen=True)
class _Rows:
    """Rows of the layer: what its projections read [B,S,2E], the residual [B,S,E] float32 and positions [B,S]."""

    inputs: ir.Value
    residual: ir.Value
    positions: ir.Value


def _rows(
    g: GraphBuilder,
    drafter: Eagle3Spec,
    vocabulary: DraftVocabulary,
    ids: ir.Value,
    features: ir.Value,
    positions: ir.Value,
) -> _Rows:
    eps = drafter.stack.rms_norm_eps
    tokens = vocabulary.embedding(g, "embed", ids)
    normed_tokens = rms_norm(g, f"{LAYER}.input_norm", tokens, f"{LAYER}.input_layernorm.weight", eps)
    normed = rms_norm(g, f"{LAYER}.hidden_norm", features, f"{LAYER}.hidden_norm.weight", eps, "float32")
    narrow = g.narrowed(f"{LAYER}.hidden_norm.narrow", normed)
    inputs = g.op(f"{LAYER}.inputs", "Concat", normed_tokens, narrow, axis=-1)
    return _Rows(inputs, normed if drafter.norm_before_residual else features, positions)


def _draft(g: GraphBuilder, drafter: Eagle3Spec, vocabulary: DraftVocabulary, rows: _Rows, queries: _Rows) -> None:
    """All rows into the cache; through the layer and the head those that draft, one of each request."""
    eps = drafter.stack.rms_norm_eps
    attended = g.widened(f"{LAYER}.attn.wide", _attention(g, drafter, rows, queries))
    x = g.op(f"{LAYER}.attended", "Add", queries.residual, attended)
    normed = rms_norm(g, f"{LAYER}.mlp_norm", x, f"{LAYER}.post_attention_layernorm.weight", eps, "float32")
    mlp = swiglu(g, f"{LAYER}.mlp", LAYER, g.narrowed(f"{LAYER}.mlp_norm.narrow", normed))
    h = g.op(f"{LAYER}.out", "Add", x, g.widened(f"{LAYER}.mlp.wide", mlp))
    normed = rms_norm(g, "final_norm", h, "norm.weight", eps, "float32")
    g.output(c.FEATURE, normed if drafter.norm_output else h)
    _predict(g, drafter, vocabulary, g.narrowed("final_norm.narrow", normed))


def _attention(g: GraphBuilder, drafter: Eagle3Spec, rows: _Rows, queries: _Rows) -> ir.Value:
    """Queries over the cache, in which the rows are: [B,1,E]."""
    stack, kv_index, name = drafter.stack, g.input(c.KV_INDEX), f"{LAYER}.attn"
    rope, visibility = Rope.of(g, stack, rows.positions), Visibility(g, stack, queries.positions, kv_index)
    layers = DecoderLayers(g, stack, "", rope, visibility, g.input(c.WRITE_INDEX), kv_index)
    (q,) = by_head(g, f"{name}.queries", _projected(g, drafter, "q", queries), {"q": stack.num_heads}, stack.head_dim)
    counts = {"k": stack.num_kv_heads, "v": stack.num_kv_heads}
    k, v = by_head(g, name, _projected(g, drafter, "kv", rows), counts, stack.head_dim)
    return layers.attend(0, q, k, v, dataclasses.replace(rope, position_ids=queries.positions))


def _projected(g: GraphBuilder, drafter: Eagle3Spec, labels: str, rows: _Rows) -> ir.Value:
    parts = [f"{LAYER}.self_attn.{label}_proj" for label in labels]
    bias = [f"{part}.bias" for part in parts] if drafter.stack.attention_bias else []
    return linear(g, f"{LAYER}.attn.{labels}_proj", rows.inputs, [f"{part}.weight" for part in parts], bias)


def _predict(g: GraphBuilder, drafter: Eagle3Spec, vocabulary: DraftVocabulary, normed: ir.Value) -> None:
    """The best draft id of the final-normed row [B,1,E], as the target's id."""
    scores = vocabulary.scores(g, g.op("head.flat", "Reshape", normed, g.ints(-1, drafter.stack.hidden_size)))
    ids = g.op("target_ids", "Gather", g.weight(vocabulary.target_ids), argmax(g, "argmax", scores.values))
    g.output(c.DRAFT_IDS, g.op("draft_ids", "Reshape", ids, g.ints(-1, 1)))
    if c.DRAFT_LOGITS in g.contract.outputs:
        shape = g.ints(-1, 1, g.contract.static["V"])
        g.output(c.DRAFT_LOGITS, g.op("draft_logits", "Reshape", scores.logits(g), shape))


# -- what a build asks of this kind ------------------------------------------------------------------------------------


def read(folder: Path, target: TargetCheckpoint, name: str | None, settings: Settings) -> Eagle3Checkpoint:
    """An EAGLE-3 folder; setting: drafts."""
    return without_copied_embedding(read_eagle3(folder, target.spec, name, settings), target)


def write(writer: Writer, draft: Eagle3Checkpoint, engines: Engines) -> None:
    """context, and the drafter on the same weights."""
    spec = draft.spec
    with writer.engine(engines[c.CONTEXT], spec.name, draft.weights) as g:
        vocabulary = draft_vocabulary(g, draft, writer.vocabulary)
        build_eagle3_context(g, spec, vocabulary, writer.taps)
        written = g.store
    with writer.engine(engines[c.DRAFTER], spec.name, draft.weights) as g:
        g.store.reuse(written)
        build_eagle3_step(g, spec, vocabulary)


def draft_vocabulary(g: GraphBuilder, draft: Eagle3Checkpoint, target: Vocabulary) -> DraftVocabulary:
    """The tables, written to the data file of ``g``. A draft id without a token of the target is never chosen."""
    spec, weights, columns = draft.spec, draft.weights, c.vocab_columns(draft.spec.draft_vocab_size)
    ids = np.zeros(columns, np.int64)
    ids[: len(draft.target_ids)] = draft.target_ids
    alive = (np.arange(columns) < spec.draft_vocab_size) & (target.live is None or ids < target.live)
    dead = None if alive.all() else np.where(alive, 0, c.DEAD_LOGIT).astype(np.float32)
    embed, head, head_int8 = target.embed, None, None
    if spec.own_embedding:
        dtype = weights.dtype(DRAFT_EMBEDDING)
        embed = store.table(g.store, weights, DRAFT_EMBEDDING, "draft.embed", spec.vocab_size, dtype)
    if g.lowering.weights == "float":
        head = store.table(g.store, weights, HEAD, "draft.head", columns, NUMPY[g.lowering.dtype])
    else:
        head_int8 = store.int8_table(g.store, weights, HEAD, "draft.head_int8", columns)
    return DraftVocabulary(embed, head, head_int8, dead, g.store.add("draft.target_ids", ids))


def stored(spec: Eagle3Spec) -> dict[str, Stored]:
    """The context's file holds everything; the drafter's graph refers to all but what makes a feature of taps."""
    shapes, columns = eagle3_tensors(spec), c.vocab_columns(spec.draft_vocab_size)
    embedding = {DRAFT_EMBEDDING: shapes.pop(DRAFT_EMBEDDING)} if spec.own_embedding else {}
    wide = {name: shape for name, shape in shapes.items() if name.startswith(_WIDE)}
    formed = {name: shape for name, shape in shapes.items() if name not in wide}
    formed[HEAD] = (columns, spec.stack.hidden_size)
    wide["draft.target_ids"] = (2 * columns,)  # int64
    kept: list[Kept] = [(embedding, spec.checkpoint_dtype), ({"head.dead": (columns,)}, None)]
    step = {name: shape for name, shape in wide.items() if not name.startswith(_FUSION)}
    return {
        c.CONTEXT: Stored(wide, formed, kept, rope=spec.stack),
        c.DRAFTER: Stored(step, formed, kept, rope=spec.stack, shared_with=c.CONTEXT),
    }


def borrowed(spec: Eagle3Spec) -> list[Tables]:
    """Both engines embed tokens."""
    return [] if spec.own_embedding else [frozenset({"embed"})] * 2


def describe(spec: Eagle3Spec) -> str:
    """A line for people."""
    layer = describe_stack(spec.stack, spec.draft_vocab_size)
    return f"EAGLE-3 of {layer}, {spec.drafts} drafts, taps {list(spec.target_layer_ids)}"
