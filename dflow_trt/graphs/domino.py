"""Domino's causal head: the drafts of a block are chosen one after another, each knowing those before it.

d_i = argmax(base_i + W_2 silu(W_1 [z_i ; s_i])), but argmax(base_i) for the first p drafts (arXiv 2605.29707). s_i is
the state of a GRU that has read E(anchor), E(d_1) .. E(d_{i-1}). Unrolled over the K drafts, every weight stored once.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from dflow_trt import contract as c
from dflow_trt.graphs.blocks import Vocabulary, argmax, silu, stored_matrix, times
from dflow_trt.graphs.builder import GraphBuilder
from dflow_trt.spec import DFlashSpec, DominoSpec


def draft_in_turn(g: GraphBuilder, drafter: DFlashSpec, vocabulary: Vocabulary, z: ir.Value, base: ir.Value) -> None:
    """Final-normed slots z [B,K,E] and their base logits [B*K,V] -> the outputs of the engine."""
    base = g.op("domino.base", "Reshape", base, g.ints(-1, drafter.num_drafts, g.contract.static["V"]))
    plain, correction, gru = _by_draft(g, "domino.base", base, drafter), _Correction(g, drafter, z), _Gru(g, drafter)
    read = _anchor(g)
    state, ids, logits = gru.before(read), [], []
    for i in range(1, drafter.num_drafts + 1):
        state = gru.step(f"domino.{i}.gru", read, state)
        logits.append(correction.add(i, plain[i - 1], state) if i in drafter.corrected_drafts else plain[i - 1])
        best = argmax(g, f"domino.{i}.argmax", logits[-1])
        ids.append(g.op(f"domino.{i}.id", "Unsqueeze", best, g.ints(1)))
        if i < drafter.num_drafts:
            read = vocabulary.embedding(g, f"domino.{i}.embed", ids[-1])
    g.output(c.DRAFT_IDS, g.op("draft_ids", "Concat", *ids, axis=1))
    if c.DRAFT_LOGITS in g.contract.outputs:
        g.output(c.DRAFT_LOGITS, g.op("draft_logits", "Concat", *logits, axis=1))


def _anchor(g: GraphBuilder) -> ir.Value:
    """E(anchor) [B,1,E]: what stands in slot 0, which no relay changes."""
    return g.op("domino.anchor", "Slice", g.input(c.BLOCK_EMBEDS), g.ints(0), g.ints(1), g.ints(1))


def _by_draft(g: GraphBuilder, name: str, x: ir.Value, drafter: DFlashSpec) -> Sequence[ir.Value]:
    """[B,K,..] -> K times [B,1,..]."""
    labels = [str(i) for i in range(1, drafter.num_drafts + 1)]
    return g.split(name, x, [1] * drafter.num_drafts, labels, axis=1)


class _Correction:
    """W_2 silu(W_1 [z ; s]). W_1 is split by input, so that what it makes of z is one product for all slots."""

    def __init__(self, g: GraphBuilder, drafter: DFlashSpec, z: ir.Value) -> None:
        self._g, size = g, drafter.stack.hidden_size
        down = ["embed_proj.0.weight"]
        of_z = times(g, "domino.down.z", z, stored_matrix(g, "domino.down.z", down, slice(size)))
        self._of_z = _by_draft(g, "domino.down.z", of_z, drafter)
        self._down = stored_matrix(g, "domino.down.s", down, slice(size, None), shared=True)
        self._up = stored_matrix(g, "domino.up", ["embed_proj.2.weight"], padded=g.contract.static["V"], shared=True)

    def add(self, i: int, base: ir.Value, state: ir.Value) -> ir.Value:
        """Base logits of draft i [B,1,V] and the state [B,1,G] -> its logits; dead columns are as dead as before."""
        g, name = self._g, f"domino.{i}"
        of_state = times(g, f"{name}.down", state, self._down)
        inner = silu(g, name, g.op(f"{name}.inner", "Add", self._of_z[i - 1], of_state))
        return g.op(f"{name}.logits", "Add", base, times(g, f"{name}.correction", inner, self._up))


class _Gru:
    """torch.nn.GRU of one layer without biases, a token at a time; its weights hold the gates in the order r, z, n."""

    def __init__(self, g: GraphBuilder, drafter: DFlashSpec) -> None:
        assert isinstance(drafter.head, DominoSpec)
        self._g, self._size = g, drafter.head.state_size
        self._input = stored_matrix(g, "domino.gru.input", ["prefix_gru.weight_ih_l0"], shared=True)
        self._hidden = stored_matrix(g, "domino.gru.hidden", ["prefix_gru.weight_hh_l0"], shared=True)

    def before(self, x: ir.Value) -> ir.Value:
        """The state that has read nothing yet, zero: [B,1,G] for a first token x [B,1,E]."""
        g = self._g
        rows = g.op("domino.gru.rows", "Shape", x, start=0, end=2)
        shape = g.op("domino.gru.shape", "Concat", rows, g.ints(self._size), axis=0)
        return g.op("domino.gru.before", "Expand", g.scalar("zero", 0.0), shape)

    def step(self, name: str, x: ir.Value, state: ir.Value) -> ir.Value:
        """r = sigmoid(x_r + s_r), z = sigmoid(x_z + s_z), n = tanh(x_n + r * s_n), s' = n + z * (s - n)."""
        g = self._g
        x_r, x_z, x_n = self._gates(f"{name}.input", times(g, f"{name}.input", x, self._input))
        s_r, s_z, s_n = self._gates(f"{name}.hidden", times(g, f"{name}.hidden", state, self._hidden))
        reset = g.op(f"{name}.reset", "Sigmoid", g.op(f"{name}.reset.in", "Add", x_r, s_r))
        keep = g.op(f"{name}.keep", "Sigmoid", g.op(f"{name}.keep.in", "Add", x_z, s_z))
        remembered = g.op(f"{name}.remembered", "Mul", reset, s_n)
        new = g.op(f"{name}.new", "Tanh", g.op(f"{name}.new.in", "Add", x_n, remembered))
        kept = g.op(f"{name}.kept", "Mul", keep, g.op(f"{name}.change", "Sub", state, new))
        return g.op(name, "Add", new, kept)

    def _gates(self, name: str, fused: ir.Value) -> Sequence[ir.Value]:
        return self._g.split(name, fused, [self._size] * 3, ("r", "z", "n"))
