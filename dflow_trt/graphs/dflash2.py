"""What DFlash 2 adds to a drafter: convolutions over the rows of a block, and a selector of its drafts.

Every layer becomes x + conv_out(attention(conv_in(norm(x)))), and its MLP likewise, with the kernels of both
convolutions made from norm(x). Drafts are chosen one after another among the best ids of each slot, by their logits and
by how well they follow the draft before. Unrolled over the rows of a kernel and over the drafts, every weight stored
once. Source: the ``dflash`` package, 0.1.0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from dflow_trt import contract as c
from dflow_trt.checkpoint.names import PREDECESSOR, SELECTOR_HIDDEN, SUCCESSOR
from dflow_trt.graphs import store
from dflow_trt.graphs.blocks import Part, Scores, Vocabulary, linear, lowest, output_transform
from dflow_trt.graphs.builder import NUMPY, GraphBuilder
from dflow_trt.spec import DFlashSpec, SelectorSpec


class Convolutions:
    """Grouped dynamic causal convolutions of a block's rows: y_t = sum_o (base_o + dynamic_{t,o}) * x_{t-o}.

    base has a value for every channel, dynamic one for every group. They see the block alone: what the context engine
    left in the cache is as without them.
    """

    def __init__(self, g: GraphBuilder, drafter: DFlashSpec) -> None:
        assert drafter.conv is not None
        self._g, self._rows, self._kernel_size = g, drafter.block_size, drafter.conv.kernel_size
        self._size, self._group_size = drafter.stack.hidden_size, drafter.conv.group_size

    def around(self, name: str, source: str, x: ir.Value, part: Part) -> ir.Value:
        """See :class:`dflow_trt.graphs.blocks.DecoderLayers`."""
        before, after = self._kernels(f"{name}.conv", f"{source}_conv", x)
        y = part(self._convolved(f"{name}.conv.in", x, before))
        return self._convolved(f"{name}.conv.out", y, after)

    def _kernels(self, name: str, source: str, x: ir.Value) -> tuple[Sequence[ir.Value], Sequence[ir.Value]]:
        """Normed rows x [B,J,E] -> both kernels, [B,J,groups,group size] for each offset."""
        g, groups = self._g, self._size // self._group_size
        labels = [f"{side}.{offset}" for side in ("in", "out") for offset in range(self._kernel_size)]
        base = g.source.read(f"{source}.base_kernel").reshape(len(labels), groups, self._group_size)
        bases = g.split(f"{name}.base", g.stored(f"{name}.base", base), [1] * len(labels), labels, axis=0)
        flat = linear(g, f"{name}.dynamic", x, [f"{source}.kernel_projection.weight"])
        columns = g.op(f"{name}.by_group", "Reshape", flat, g.ints(0, 0, -1, 1))
        dynamic = g.split(f"{name}.dynamic", columns, [groups] * len(labels), labels, axis=2)
        parts = zip(labels, bases, dynamic, strict=True)
        kernels = [g.op(f"{name}.kernel.{label}", "Add", *values) for label, *values in parts]
        return kernels[: self._kernel_size], kernels[self._kernel_size :]

    def _convolved(self, name: str, x: ir.Value, kernel: Sequence[ir.Value]) -> ir.Value:
        """x [B,J,E] under one kernel."""
        g = self._g
        rows = g.op(f"{name}.by_group", "Reshape", x, g.ints(0, 0, -1, self._group_size))
        sums = g.op(f"{name}.0", "Mul", kernel[0], rows)
        for offset, values in enumerate(self._shifted(name, rows), start=1):
            term = g.op(f"{name}.{offset}", "Mul", kernel[offset], values)
            sums = g.op(f"{name}.to_{offset}", "Add", sums, term)
        return g.op(name, "Reshape", sums, g.ints(0, 0, self._size))

    def _shifted(self, name: str, rows: ir.Value) -> Sequence[ir.Value]:
        """Row t - o in the place of row t, zero before the block, for each offset o from 1 on."""
        g, most = self._g, self._kernel_size - 1
        if not most:
            return []
        padded = g.op(f"{name}.padded", "Pad", rows, g.ints(0, most, 0, 0, 0, 0, 0, 0))
        starts = [most - offset for offset in range(1, self._kernel_size)]
        windows = [(g.ints(start), g.ints(start + self._rows), g.ints(1)) for start in starts]
        return [g.op(f"{name}.shifted_{o}", "Slice", padded, *window) for o, window in enumerate(windows, start=1)]


def select_in_turn(g: GraphBuilder, drafter: DFlashSpec, vocabulary: Vocabulary, z: ir.Value, scores: Scores) -> None:
    """Final-normed slots z [B,K,E] and their scores [B*K,V] -> the outputs of the engine."""
    selector = _Selector(g, drafter, vocabulary, z, scores)
    draft, ids, totals = g.op("selector.anchor", "Unsqueeze", g.input(c.ANCHOR_ID), g.ints(1)), [], []
    for i in range(drafter.num_drafts):
        totals.append(selector.totals(i, draft))
        draft = selector.best(i, totals[-1])
        ids.append(draft)
    g.output(c.DRAFT_IDS, g.op("draft_ids", "Concat", *ids, axis=1))
    if c.DRAFT_LOGITS in g.contract.outputs:
        g.output(c.DRAFT_LOGITS, selector.logits(g.op("selector.totals", "Concat", *totals, axis=1)))


class _Selector:
    """The candidates of every slot, and what is known of them before any is chosen; float32 whatever the engine's.

    There are never more candidates than ids with a token, so that no other id is one.
    """

    def __init__(
        self, g: GraphBuilder, drafter: DFlashSpec, vocabulary: Vocabulary, z: ir.Value, scores: Scores
    ) -> None:
        assert isinstance(drafter.head, SelectorSpec)
        self._g, self._drafter = g, drafter
        self._live = vocabulary.live or g.contract.static["V"]
        self._count = min(drafter.head.top_k, self._live)
        unary, self._candidates = self._best_of_slots(scores)
        self._unary = self._by_draft("selector.unary", unary)
        self._ids = self._by_draft("selector.candidates", self._candidates)
        self._weighted = self._by_draft("selector.weighted", self._successors(z))
        self._predecessor = self._codebook(PREDECESSOR)

    def _by_draft(self, name: str, x: ir.Value) -> Sequence[ir.Value]:
        """[B,K,..] -> K times [B,1,..]."""
        count = self._drafter.num_drafts
        return self._g.split(name, x, [1] * count, [str(i) for i in range(1, count + 1)], axis=1)

    def _best_of_slots(self, scores: Scores) -> tuple[ir.Value, ir.Value]:
        """(logits, ids) of the candidates, [B,K,k] each: k by the order of the scores, which is that of the logits."""
        g, shape = self._g, self._g.ints(-1, self._drafter.num_drafts, self._count)
        values, ids = g.top_k("selector.top", scores.values, self._count)
        if scores.step is not None:
            values = g.op("selector.top.logits", "Mul", values, scores.step)
        logits = output_transform(g, self._drafter, self._wide("selector.top", values), "float32")
        candidates = g.op("selector.candidates", "Reshape", ids, shape)
        candidates.type = ir.TensorType(ir.DataType.INT64)  # the self-check cuts the graph there
        return g.op("selector.unary", "Reshape", logits, shape), candidates

    def _successors(self, z: ir.Value) -> ir.Value:
        """W z_i * S[c] for every candidate c of slot i: [B,K,k,rank]."""
        g = self._g
        hidden = self._wide("selector.hidden", linear(g, "selector.hidden", z, [SELECTOR_HIDDEN]))
        rows = g.op("selector.successors", "Gather", self._codebook(SUCCESSOR), self._candidates)
        of_slot = g.op("selector.hidden.of_slot", "Unsqueeze", hidden, g.ints(2))
        return g.op("selector.weighted", "Mul", self._widened("selector.successors", rows), of_slot)

    def totals(self, i: int, draft: ir.Value) -> ir.Value:
        """The scores [B,1,k] of the candidates of draft i + 1 behind the draft before, [B,1]."""
        g, name = self._g, f"selector.{i + 1}"
        rows = g.op(f"{name}.predecessor", "Gather", self._predecessor, draft)
        before = g.op(f"{name}.before", "Unsqueeze", self._widened(f"{name}.predecessor", rows), g.ints(2))
        products = g.op(f"{name}.products", "Mul", self._weighted[i], before)
        follows = g.op(f"{name}.follows", "ReduceSum", products, g.ints(-1), keepdims=0)
        return g.op(f"{name}.totals", "Add", self._unary[i], follows)

    def best(self, i: int, totals: ir.Value) -> ir.Value:
        """The lowest id of the largest score: [B,1,k] -> [B,1]."""
        g, name = self._g, f"selector.{i + 1}"
        peak = g.op(f"{name}.peak", "ReduceMax", totals, g.ints(-1), keepdims=1)
        is_best = g.op(f"{name}.is_best", "GreaterOrEqual", totals, peak)
        last = g.constant("selector.last", np.array(self._live - 1, np.int64))  # no candidate is above it
        ids = g.op(f"{name}.best", "Where", is_best, self._ids[i], last)
        return g.op(f"{name}.id", "ReduceMin", ids, g.ints(-1), keepdims=0)

    def logits(self, totals: ir.Value) -> ir.Value:
        """The scores [B,K,k] of the candidates in their columns, all others as ids without a token: [B,K,V]."""
        g, dtype = self._g, self._g.lowering.dtype
        rows = g.op("selector.rows", "Shape", totals, start=0, end=2)
        shape = g.op("selector.shape", "Concat", rows, g.ints(g.contract.static["V"]), axis=0)
        none = g.op("selector.none", "Expand", g.scalar("selector.dead", max(c.DEAD_LOGIT, float(lowest(g)))), shape)
        updates = totals if dtype == "float32" else g.cast("selector.totals.cast", totals, dtype)
        return g.op("draft_logits", "ScatterElements", none, self._candidates, updates, axis=-1)

    def _codebook(self, name: str) -> ir.Value:
        """[vocabulary,rank], as the checkpoint has it: rows are widened when they are read."""
        g, dtype = self._g, NUMPY[self._drafter.checkpoint_dtype]
        chunks = (rows for _, rows in store.row_chunks(g.source, name))
        return g.weight(g.store.add_chunks(name, g.source.shape(name), dtype, chunks))

    def _widened(self, name: str, rows: ir.Value) -> ir.Value:
        """Rows of a codebook in float32."""
        return rows if self._drafter.checkpoint_dtype == "float32" else self._g.cast(f"{name}.wide", rows, "float32")

    def _wide(self, name: str, x: ir.Value) -> ir.Value:
        """What the engine computed, in float32."""
        return x if self._g.lowering.dtype == "float32" else self._g.cast(f"{name}.wide", x, "float32")
