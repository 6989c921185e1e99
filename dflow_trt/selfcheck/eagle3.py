"""EAGLE-3: both of its engines, at the first positions and behind a full cache; whole, a chain behind a prompt.

Engines are of one layer, so each is checked whole: what it writes into the cache, what its layer adds to the residual,
and the draft, which must score as high as the reference's best.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dflow_trt import contract as c
from dflow_trt import reference as ref
from dflow_trt.checkpoint.eagle3 import Eagle3Checkpoint
from dflow_trt.checkpoint.names import DRAFT_EMBEDDING
from dflow_trt.checkpoint.weights import Array
from dflow_trt.feeds import kv_index
from dflow_trt.selfcheck.base import Checks, rms
from dflow_trt.selfcheck.engine import Engine
from dflow_trt.selfcheck.full import Prompt
from dflow_trt.spec import Eagle3Spec, WeightForm

ROWS, ROW = 5, 3  # of a context call, and the one that drafts
STEPS = 3  # of a chain behind a prompt


def check(checks: Checks, draft: Eagle3Checkpoint) -> None:
    """See :mod:`dflow_trt.selfcheck`."""
    context, step = (Engine(checks.bundle, engine, draft.spec.name) for engine in (c.CONTEXT, c.DRAFTER))
    drafter = Drafter(checks, draft)
    for place in _places(drafter):
        _check_context(drafter, context, place)
        _check_step(drafter, step, place)


@dataclass(frozen=True)
class Place:
    """Where rows stand: behind ``past`` [C,2E], what the layer's projections read of the rows before."""

    label: str
    past: Array | None

    @property
    def start(self) -> int:
        return 0 if self.past is None else len(self.past)


@dataclass(frozen=True)
class Rows:
    """Rows to compare: embeddings and features [S,E] behind a place, the row that drafts, and what an engine gave.

    given: whether the engine had these very features; if not, it made its own of what the target gave.
    """

    place: Place
    embeds: Array
    features: Array
    row: int
    found: dict[str, Array]
    given: bool = True

    @property
    def positions(self) -> Array:
        return self.place.start + np.arange(len(self.embeds))


@dataclass(frozen=True)
class Drafter:
    """One drafter beside its references. whole: it reads what a whole target gave."""

    checks: Checks
    draft: Eagle3Checkpoint
    whole: bool = False

    @property
    def spec(self) -> Eagle3Spec:
        return self.draft.spec

    @property
    def form(self) -> WeightForm:
        """Of the engines' weights."""
        return self.checks.draft_form

    @property
    def near(self) -> WeightForm:
        """How near to the reference: as near as int8 weights where the target that is read has some."""
        return self.checks.target_form if self.whole and self.form == "float" else self.form

    @property
    def plain(self) -> ref.ReferenceEagle3:
        return ref.ReferenceEagle3(self.draft.weights, self.spec)

    @property
    def ours(self) -> ref.ReferenceEagle3:
        """With weights in that form."""
        return dataclasses.replace(self.plain, linear=ref.LINEAR[self.form])

    def embeds(self, ids: Array) -> Array:
        if not self.spec.own_embedding:
            return self.checks.head("float").embed(ids.tolist())
        rows = [self.draft.weights.read(DRAFT_EMBEDDING, slice(i, i + 1)) for i in ids]
        return np.asarray(np.concatenate(rows), np.float32)

    def compare(self, label: str, rows: Rows) -> None:
        """What the row passes on, and its draft."""
        h, exact = (self._h(each, rows) for each in (self.ours, self.plain))
        wanted, noise = self.ours.passed_on(h), rms(self.ours.passed_on(h) - self.plain.passed_on(exact))
        passed, residual = rows.found[c.FEATURE.name][0], np.zeros_like(h)
        if rows.given and not self.spec.norm_output:  # beside it, an error in a small update would not show
            residual = self.plain.residual(rows.embeds, rows.features)[rows.row][None]
        self._compare(f"{label}.h", passed - residual, wanted - residual, noise)
        self._compare_draft(label, rows, self.ours.logits(h), self.plain.logits(exact))

    def _compare_draft(self, label: str, rows: Rows, logits: Array, exact: Array) -> None:
        """The row's logits [1,draft vocabulary] where it gives some, and its draft. exact: of float weights."""
        live = self.checks.live_vocab
        alive = self.draft.target_ids < live
        if c.DRAFT_LOGITS.name in rows.found:
            shown = rows.found[c.DRAFT_LOGITS.name][0, :, : len(alive)]
            self._compare(f"{label}.logits", shown[:, alive], logits[:, alive], rms(logits - exact))
        by_target_id = np.full((1, live), c.DEAD_LOGIT, np.float32)
        by_target_id[:, self.draft.target_ids[alive]] = logits[:, alive]
        chosen = rows.found[c.DRAFT_IDS.name][0]
        self.checks.compare_best(f"{label}.draft", chosen, by_target_id, self.near, whole=self.whole)

    def _compare(self, label: str, found: Array, wanted: Array, noise: float) -> None:
        self.checks.compare(label, found, wanted, self.near, noise=noise, whole=self.whole)

    def _h(self, reference: ref.ReferenceEagle3, rows: Rows) -> Array:
        """[1,E], of the row that drafts."""
        h = reference.layer(rows.embeds, rows.features, rows.positions, rows.place.past)
        return h[rows.row : rows.row + 1]


# -- sections ----------------------------------------------------------------------------------------------------------


def _places(drafter: Drafter) -> Iterator[Place]:
    yield Place("", None)
    start = drafter.checks.far(ROWS)
    if start:
        yield Place(".far", drafter.checks.past_rows(start, 2 * drafter.spec.stack.hidden_size))


def _check_context(drafter: Drafter, engine: Engine, place: Place) -> None:
    """Taps of a few rows in; all of their keys and values, and what follows from one of them."""
    checks, label = drafter.checks, f"{drafter.spec.name}.context{place.label}"
    packed, own = checks.taps(ROWS, drafter.spec.taps)
    ids, positions = checks.ids(ROWS), place.start + np.arange(ROWS)
    feeds = {
        c.HIDDEN.name: packed[None],
        c.NEXT_INPUT_IDS.name: ids[None],
        c.POSITION_IDS.name: positions[None],
        c.LOGIT_ROWS.name: np.array([[ROW]]),
    }
    found = _run(drafter, engine, place, feeds, ROWS)
    rows = Rows(place, drafter.embeds(ids), drafter.plain.features(own), ROW, found)
    inputs = drafter.plain.inputs(rows.embeds, rows.features)
    for tensor in c.CACHE_TENSORS:
        written = found[c.present(tensor, 0)][0, :, place.start : place.start + ROWS]
        wanted, exact = (each.stack.heads(0, tensor, inputs, positions) for each in (drafter.ours, drafter.plain))
        checks.compare(f"{label}.{tensor}", written, wanted, drafter.form, noise=rms(wanted - exact))
    drafter.compare(label, rows)


def _check_step(drafter: Drafter, engine: Engine, place: Place) -> None:
    """One row behind the others, from a feature that was passed on."""
    features, ids = drafter.checks.rows(1, drafter.spec.stack.hidden_size), drafter.checks.ids(1)
    feeds = {
        c.PENDING_H.name: features[None],
        c.STEP_IDS.name: ids[None],
        c.BLOCK_POSITION_IDS.name: np.array([[place.start]]),
    }
    found = _run(drafter, engine, place, feeds, 1)
    rows = Rows(place, drafter.embeds(ids), features, 0, found)
    drafter.compare(f"{drafter.spec.name}.step{place.label}", rows)


def _run(drafter: Drafter, engine: Engine, place: Place, feeds: dict[str, Array], rows: int) -> dict[str, Array]:
    """A whole engine behind the keys and values of the place's past."""
    feeds |= {c.WRITE_INDEX.name: np.array([place.start]), c.KV_INDEX.name: kv_index(place.start + rows)}
    cached: list[Array] = []
    if place.past is not None:
        before = np.arange(place.start)
        cached = [drafter.ours.stack.heads(0, tensor, place.past, before) for tensor in c.CACHE_TENSORS]
    outputs = engine.given(c.FEATURE, c.DRAFT_IDS, c.DRAFT_LOGITS)
    outputs += [c.present(tensor, 0) for tensor in c.CACHE_TENSORS]
    return engine.section(feeds | engine.caches(0, cached), outputs)


# -- whole engines -----------------------------------------------------------------------------------------------------


def check_whole(checks: Checks, prompt: Prompt, draft: Eagle3Checkpoint) -> None:
    """The prompt read, then a chain of steps, each of which follows from what the engines gave before."""
    drafter, name = Drafter(checks, draft, whole=True), draft.spec.name
    rows = _read_prompt(drafter, prompt)
    drafter.compare(f"{name}.prompt", rows)
    for i in range(min(draft.spec.drafts - 1, STEPS)):
        rows = _next_row(drafter, prompt, rows)
        drafter.compare(f"{name}.chain.{i + 1}", rows)


def _read_prompt(drafter: Drafter, prompt: Prompt) -> Rows:
    """Every row of the prompt into the cache; the last one drafts behind a random token."""
    length, ids = len(prompt.ids), np.concatenate([prompt.ids[1:], drafter.checks.ids(1)])
    feeds = {
        c.NEXT_INPUT_IDS.name: ids[None],
        c.POSITION_IDS.name: np.arange(length)[None],
        c.LOGIT_ROWS.name: np.array([[length - 1]]),
        c.WRITE_INDEX.name: np.zeros(1, np.int64),
        c.KV_INDEX.name: kv_index(length),
    }
    found, features = _call(drafter, prompt, c.CONTEXT, feeds), drafter.plain.features(prompt.taps(drafter.spec))
    return Rows(Place("", None), drafter.embeds(ids), features, length - 1, found, given=False)


def _next_row(drafter: Drafter, prompt: Prompt, rows: Rows) -> Rows:
    """One step behind rows whose last one drafted."""
    past = drafter.plain.inputs(rows.embeds, rows.features)
    if rows.place.past is not None:
        past = np.concatenate([rows.place.past, past])
    ids, features = rows.found[c.DRAFT_IDS.name][0], rows.found[c.FEATURE.name][0]
    feeds = {
        c.STEP_IDS.name: ids[None],
        c.BLOCK_POSITION_IDS.name: np.array([[len(past)]]),
        c.BLOCK_WRITE_INDEX.name: np.array([len(past)]),
        c.KV_INDEX.name: kv_index(len(past) + 1),
    }
    prompt.runtime.keep_pending(drafter.spec.name, {0: 1}, range(1))
    found = _call(drafter, prompt, c.DRAFTER, feeds)
    return Rows(Place("", past), drafter.embeds(ids), features, 0, found)


def _call(drafter: Drafter, prompt: Prompt, engine: str, feeds: dict[str, Array]) -> dict[str, Array]:
    """One call through the runtime: what the row passes on, its draft and its logits, if it gives some."""
    fetch = [c.FEATURE.name, c.DRAFT_IDS.name]
    if drafter.checks.bundle.build.draft_logits:
        fetch.append(c.DRAFT_LOGITS.name)
    found = prompt.run(engine, drafter.spec.name, feeds, fetch)
    return {name: array.copy() for name, array in zip(fetch, found, strict=True)}
