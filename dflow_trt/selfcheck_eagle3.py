"""The self-check's sections of an EAGLE-3 drafter: both of its engines, at the first positions and behind a full cache.

Engines are of one layer, so each is checked whole: what it writes into the cache, what its layer adds to the residual,
and the draft, which must score as high as the reference's best.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dflow_trt import contract as c
from dflow_trt import reference as ref
from dflow_trt.bundle import Bundle
from dflow_trt.checkpoint.eagle3 import Eagle3Checkpoint
from dflow_trt.checkpoint.names import DRAFT_EMBEDDING
from dflow_trt.checkpoint.weights import Array
from dflow_trt.spec import CACHE_STEP, WeightForm

ROWS, ROW = 5, 3  # of a context call, and the one that drafts
REACH = 2112  # the farthest position checked


class Checks(Protocol):
    """What the self-check offers: see :mod:`dflow_trt.selfcheck`."""

    bundle: Bundle

    def rows(self, count: int, width: int) -> Array: ...

    def ids(self, count: int) -> Array: ...

    def compare(
        self,
        section: str,
        found: Array,
        wanted: Array,
        form: WeightForm = "float",
        *,
        noise: float = 0.0,
        whole: bool = False,
    ) -> None: ...

    def compare_best(
        self, section: str, chosen: Array, wanted: Array, form: WeightForm, *, whole: bool = False
    ) -> None: ...

    def head(self, form: WeightForm) -> ref.ReferenceHead: ...


class Graph(Protocol):
    """One engine's graph."""

    def gives(self, spec: c.TensorSpec) -> bool: ...

    def section(self, feeds: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]: ...


@dataclass(frozen=True)
class _Place:
    """Where rows stand: behind ``past`` [C,2E], what the layer's projections read of the rows before."""

    label: str
    past: Array | None

    @property
    def start(self) -> int:
        return 0 if self.past is None else len(self.past)


def check_eagle3(check: Checks, context: Graph, step: Graph, draft: Eagle3Checkpoint) -> None:
    """Both engines of one drafter; UserError naming the section that differs."""
    sections = _Sections(check, draft)
    for place in sections.places():
        sections.context(context, place)
        sections.step(step, place)


@dataclass(frozen=True)
class _Rows:
    """Rows to compare: embeddings and features [S,E] behind a place, the row that drafts, and what a graph gave."""

    place: _Place
    embeds: Array
    features: Array
    row: int
    found: dict[str, Array]


@dataclass(frozen=True)
class _Sections:
    check: Checks
    draft: Eagle3Checkpoint

    @property
    def form(self) -> WeightForm:
        return self.check.bundle.build.draft_weights

    @property
    def plain(self) -> ref.ReferenceEagle3:
        return ref.ReferenceEagle3(self.draft.weights, self.draft.spec)

    @property
    def ours(self) -> ref.ReferenceEagle3:
        """The reference in the form of the engines' weights."""
        return dataclasses.replace(self.plain, linear=ref.LINEAR[self.form])

    def places(self) -> Iterator[_Place]:
        yield _Place("", None)
        start, width = min(self.check.bundle.build.max_seq_len, REACH) - ROWS, 2 * self.draft.spec.stack.hidden_size
        if start > 0:  # many random values average out; with the factor the cache contributes as much as the rest
            yield _Place(".far", self.check.rows(start, width) * np.float32(start**0.5))

    def context(self, graph: Graph, place: _Place) -> None:
        """Taps of a few rows in; all of their keys and values, and what follows from one of them."""
        spec, taps, label = self.draft.spec, self.check.bundle.taps, f"{self.draft.spec.name}.context{place.label}"
        width, positions = spec.target_hidden_size, place.start + np.arange(ROWS)
        packed, ids = self.check.rows(ROWS, len(taps) * width), self.check.ids(ROWS)
        own = np.concatenate([packed[:, taps.index(tap) * width :][:, :width] for tap in spec.taps], axis=1)
        feeds = {
            c.HIDDEN.name: packed[None],
            c.NEXT_INPUT_IDS.name: ids[None],
            c.POSITION_IDS.name: positions[None],
            c.LOGIT_ROWS.name: np.array([[ROW]]),
        }
        found = self._run(graph, place, feeds, ROWS)
        rows = _Rows(place, self._embeds(ids), self.plain.features(own), ROW, found)
        inputs = self.plain.inputs(rows.embeds, rows.features)
        for tensor in c.CACHE_TENSORS:
            written = found[c.present(tensor, 0)][0, :, place.start : place.start + ROWS]
            wanted, exact = (each.stack.heads(0, tensor, inputs, positions) for each in (self.ours, self.plain))
            self.check.compare(f"{label}.{tensor}", written, wanted, self.form, noise=_rms(wanted - exact))
        self._compare(label, rows)

    def step(self, graph: Graph, place: _Place) -> None:
        """One row behind the others, from a feature that was passed on."""
        features, ids = self.check.rows(1, self.draft.spec.stack.hidden_size), self.check.ids(1)
        feeds = {
            c.PENDING_H.name: features[None],
            c.STEP_IDS.name: ids[None],
            c.BLOCK_POSITION_IDS.name: np.array([[place.start]]),
        }
        found = self._run(graph, place, feeds, 1)
        self._compare(f"{self.draft.spec.name}.step{place.label}", _Rows(place, self._embeds(ids), features, 0, found))

    def _run(self, graph: Graph, place: _Place, feeds: dict[str, Array], rows: int) -> dict[str, Array]:
        """A whole engine behind the keys and values of the place's past."""
        stack = self.draft.spec.stack
        shape = (1, stack.num_kv_heads, self.check.bundle.cache_rows, stack.head_dim)
        feeds[c.WRITE_INDEX.name] = np.array([place.start])
        feeds[c.KV_INDEX.name] = np.arange(-(-(place.start + rows) // CACHE_STEP) * CACHE_STEP)
        for tensor in c.CACHE_TENSORS:
            cache = feeds[c.past(tensor, 0)] = np.zeros(shape, np.float32)
            if place.past is not None:
                cache[0, :, : place.start] = self.ours.stack.heads(0, tensor, place.past, np.arange(place.start))
        outputs = [spec.name for spec in (c.FEATURE, c.DRAFT_IDS, c.DRAFT_LOGITS) if graph.gives(spec)]
        return graph.section(feeds, [*outputs, *(c.present(tensor, 0) for tensor in c.CACHE_TENSORS)])

    def _compare(self, label: str, rows: _Rows) -> None:
        """What the row passes on, and its draft."""
        h, exact = (self._h(each, rows) for each in (self.ours, self.plain))
        wanted, noise = self.ours.passed_on(h), _rms(self.ours.passed_on(h) - self.plain.passed_on(exact))
        residual = np.zeros_like(h)
        if not self.draft.spec.norm_output:  # beside the residual, an error in a small update would not show
            residual = self.plain.residual(rows.embeds, rows.features)[rows.row][None]
        passed = rows.found[c.FEATURE.name][0]
        self.check.compare(f"{label}.h", passed - residual, wanted - residual, self.form, noise=noise)
        logits, live = self.ours.logits(h), self.check.bundle.target.live_vocab
        alive = self.draft.target_ids < live
        if c.DRAFT_LOGITS.name in rows.found:
            shown, noise = rows.found[c.DRAFT_LOGITS.name][0, :, : len(alive)], _rms(logits - self.plain.logits(exact))
            self.check.compare(f"{label}.logits", shown[:, alive], logits[:, alive], self.form, noise=noise)
        by_target_id = np.full((1, live), c.DEAD_LOGIT, np.float32)
        by_target_id[:, self.draft.target_ids[alive]] = logits[:, alive]
        self.check.compare_best(f"{label}.draft", rows.found[c.DRAFT_IDS.name][0], by_target_id, self.form)

    def _h(self, reference: ref.ReferenceEagle3, rows: _Rows) -> Array:
        """[1,E], of the row that drafts."""
        positions = rows.place.start + np.arange(len(rows.embeds))
        h = reference.layer(rows.embeds, rows.features, positions, rows.place.past)
        return h[rows.row : rows.row + 1]

    def _embeds(self, ids: Array) -> Array:
        if not self.draft.spec.own_embedding:
            return self.check.head("float").embed(ids.tolist())
        rows = [self.draft.weights.read(DRAFT_EMBEDDING, slice(i, i + 1)) for i in ids]
        return np.asarray(np.concatenate(rows), np.float32)


def _rms(values: Array) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
