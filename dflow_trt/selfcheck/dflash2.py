"""DFlash 2: the convolutions around attention and MLP, and the selector among candidates."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from dflow_trt import contract as c
from dflow_trt import reference as ref
from dflow_trt.checkpoint.weights import Array
from dflow_trt.selfcheck.base import ROUNDED, TOLERANCE, WHOLE_ENGINE, differs, rms
from dflow_trt.selfcheck.drafter import SCORES, STEP, Drafter, Z
from dflow_trt.selfcheck.engine import Engine
from dflow_trt.spec import ConvSpec, SelectorSpec, WeightForm

DEAD_BELOW = -3e4  # where the logits of ids that are none lie, in every dtype
CANDIDATES, UNARY = "selector.candidates", "selector.unary"
# the convolutions around a part of a layer: how their values begin, and what goes into the first and into the second
SIDES = ("in", "out")
CONVOLVED = {"attention": ("attn", "input_norm", "attn.o_proj"), "mlp": ("mlp", "mlp_norm", "mlp.down_proj")}


# -- convolutions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Convolution:
    """Both convolutions around one part of a layer, in an engine's graph; ``place`` is how their values begin."""

    engine: Engine
    conv: ConvSpec
    place: str

    def _names(self, side: int) -> list[str]:
        return [f"{self.place}.kernel.{SIDES[side]}.{offset}" for offset in range(self.conv.kernel_size)]

    def kernels(self, source: str, x: Array) -> tuple[Array, Array]:
        """What follows from normed rows x [J,E]: the dynamic parts as projected, the kernels [J,2,kernel size,E]."""
        names, dynamic = [*self._names(0), *self._names(1)], f"{self.place}.dynamic"
        found = self.engine.section({source: x[None]}, [dynamic, *names])
        kernels = np.stack([found[name][0] for name in names], axis=1)
        return found[dynamic][0], kernels.reshape(len(x), 2, self.conv.kernel_size, -1)

    def rows(self, side: int, source: str, x: Array, kernel: Array) -> Array:
        """Rows x [J,E] under a given kernel [J,kernel size,E]."""
        shape, output = (1, len(x), -1, self.conv.group_size), f"{self.place}.{SIDES[side]}"
        feeds = {name: kernel[:, i].reshape(shape) for i, name in enumerate(self._names(side))}
        result: Array = self.engine.section({source: x[None], **feeds}, [output])[output][0]
        return result


def check_convolutions(drafter: Drafter, conv: ConvSpec, i: int) -> None:
    """The convolutions around attention and MLP of layer i: their kernels, then what given kernels make of rows.

    Each beside its own size: in a whole layer, a wrong small kernel would not show.
    """
    biased = ".biased" if drafter.spec.stack.attention_bias else ""
    x, layer = drafter.block(), f"layers.{i}"
    given = drafter.checks.rows(2 * conv.kernel_size * len(x), x.shape[1]).reshape(len(x), 2, conv.kernel_size, -1)
    for part, (short, first, second) in CONVOLVED.items():
        source, found = f"{layer}.{part}_conv", Convolution(drafter.engine, conv, f"{layer}.{short}.conv")
        _check_kernels(drafter, found, source, f"{layer}.{first}", x)
        second += biased if part == "attention" else ""
        for side, name in enumerate((first, second)):
            rows = found.rows(side, f"{layer}.{name}", x, given[:, side])
            wanted = ref.convolved(x, given[:, side])
            drafter.checks.compare(f"{drafter.spec.name}.{source}.rows", rows, wanted)


def _check_kernels(drafter: Drafter, found: Convolution, source: str, normed: str, x: Array) -> None:
    """What rows x [J,E] make of the kernels, and what these are without that."""
    (dynamic, kernels), stack = found.kernels(normed, x), drafter.stack
    label, plain = f"{drafter.spec.name}.{source}", dataclasses.replace(stack, linear=ref.LINEAR["float"])
    wanted, unrounded = (each.project(f"{source}.kernel_projection", x) for each in (stack, plain))
    drafter.checks.compare(f"{label}.dynamic", dynamic, wanted, drafter.form, noise=rms(unrounded - wanted))
    base = np.broadcast_to(stack.read(f"{source}.base_kernel"), kernels.shape)
    drafter.checks.compare(f"{label}.base", kernels - stack.by_channel(dynamic), base)


# -- the selector ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selected:
    """What the selector of an engine made of given slots: ids [K]; candidates, their logits and scores [K,k]; [K,V]."""

    ids: Array
    candidates: Array
    unary: Array
    totals: Array
    logits: Array | None

    @classmethod
    def run(cls, drafter: Drafter, z: Array, logits: Array, anchor: Array) -> Selected:
        """For final-normed slots z [K,E] with these base logits [K,V] behind the anchor [1]."""
        engine, feeds = drafter.engine, {Z: z[None], SCORES: logits, c.ANCHOR_ID.name: anchor}
        feeds |= {} if drafter.form == "float" else {STEP: np.ones((len(z), 1), np.float32)}
        names = [f"selector.{i}.totals" for i in range(1, len(z) + 1)]
        outputs = engine.given(c.DRAFT_IDS, c.DRAFT_LOGITS)
        found = engine.section(feeds, [CANDIDATES, UNARY, *outputs, *names])
        shown = found[c.DRAFT_LOGITS.name][0] if c.DRAFT_LOGITS.name in found else None
        totals = np.concatenate([found[name][0] for name in names])
        return cls(found[c.DRAFT_IDS.name][0], found[CANDIDATES][0], found[UNARY][0], totals, shown)

    def of_candidates(self, logits: Array) -> Array:
        """[K,V] -> [K,k]."""
        return np.take_along_axis(logits, self.candidates, axis=1)

    def lowest_best(self, above: int) -> Array:
        """The drafts that follow from the scores: [K]. above: more than any id."""
        is_best = self.totals == self.totals.max(axis=1, keepdims=True)
        return np.asarray(np.where(is_best, self.candidates, above).min(axis=1))


def check_selector(drafter: Drafter, head: SelectorSpec) -> None:
    """The selector alone: its candidates and their logits, what it adds to these behind its own drafts, the drafts.

    The base logits are given: as large as a softcap, then no larger than what is added to them.
    """
    z, anchor = drafter.slots(), drafter.checks.ids(1)
    count = min(head.top_k, drafter.checks.live_vocab)
    _check_candidates(drafter, z, anchor, count)
    _check_choice(drafter, z, anchor, count)


def _check_candidates(drafter: Drafter, z: Array, anchor: Array, count: int) -> None:
    """The best ids, and their logits."""
    checks, label = drafter.checks, f"{drafter.spec.name}.selector"
    logits = _random_logits(drafter, drafter.spec.final_logit_softcapping or 1.0)
    found = Selected.run(drafter, z, logits, anchor)
    best = np.argsort(-logits[:, : checks.live_vocab], axis=1, kind="stable")[:, :count]
    checks.check_ids(f"{label}.candidates", np.sort(found.candidates), np.sort(best))
    checks.compare(f"{label}.unary", found.unary, found.of_candidates(drafter.shown(logits)))


def _check_choice(drafter: Drafter, z: Array, anchor: Array, count: int) -> None:
    """What is added to their logits, and the drafts that follow from that."""
    checks, label, form = drafter.checks, f"{drafter.spec.name}.selector", drafter.form
    logits = _random_logits(drafter, _follow_size(drafter, z, count))
    found = Selected.run(drafter, z, logits, anchor)
    previous = np.concatenate([anchor, found.ids[:-1]])
    follows, plain = (_follows(drafter, z, previous, found.candidates, each) for each in (form, "float"))
    checks.compare(label, found.totals - found.unary, follows, form, noise=rms(follows - plain))
    checks.check_ids(f"{label}.ids", found.ids, found.lowest_best(checks.live_vocab))
    if found.logits is not None:
        given = np.zeros(logits.shape, bool)
        np.put_along_axis(given, found.candidates, True, axis=1)
        checks.check_ids(f"{label}.logits", found.logits > DEAD_BELOW, given)
        checks.compare(f"{label}.logits", found.of_candidates(found.logits), found.totals)


def _follows(drafter: Drafter, z: Array, previous: Array, candidates: Array, form: WeightForm) -> Array:
    """How well candidates [K,k] follow the tokens before them [K]."""
    weights, linear = drafter.draft.weights, ref.LINEAR[form]
    return ref.selector_scores(weights, drafter.spec, z, previous, candidates, linear)


def _follow_size(drafter: Drafter, z: Array, count: int) -> float:
    """The size of what a selector adds to logits; less where a softcap would cut off logits of that size."""
    candidates = drafter.checks.ids(len(z) * count).reshape(len(z), count)
    size = rms(_follows(drafter, z, drafter.checks.ids(len(z)), candidates, "float")) or 1.0
    return min(size, (drafter.spec.final_logit_softcapping or np.inf) / 4)


def _random_logits(drafter: Drafter, size: float) -> Array:
    """Random base logits [K,V], of that size once they are multiplied; what is no token is dead."""
    spec = drafter.spec
    scale = np.float32(size / spec.output_multiplier)
    logits = scale * drafter.checks.rows(spec.num_drafts, c.vocab_columns(spec.vocab_size))
    logits[:, drafter.checks.live_vocab :] = c.DEAD_LOGIT
    return logits


def check_path(drafter: Drafter, head: SelectorSpec, z: Array, path: Array) -> None:
    """Drafts path[1:] of whole engines behind the anchor path[0] must score as high as the reference's best.

    Which ids are candidates hangs on rounding where logits are near that of the last: those may be chosen, but need not
    be. z [K,E]: the final-normed slots.
    """
    section, form, logits = f"{drafter.spec.name}.draft", drafter.form, drafter.logits(z)
    count, rounded = min(head.top_k, logits.shape[1]), ROUNDED[drafter.checks.bundle.build.dtype]
    margin = WHOLE_ENGINE * max(TOLERANCE[form][0], rounded[0]) * rms(logits)
    order = np.argsort(-logits, axis=1)[:, : 2 * count]
    values, chosen = np.take_along_axis(logits, order, axis=1), order == path[1:, None]
    last = values[:, count - 1 : count]
    if not (chosen & (values >= last - margin)).any(axis=1).all():
        raise differs(section, f"with an id that is none of the {count} best of its slot")
    totals = drafter.shown(values) + _follows(drafter, z, path[:-1], order, form)
    sure = (values > last + margin) | chosen
    best = np.where(sure, totals, -np.inf).max(axis=1)
    drafter.checks.compare(section, totals[chosen], best, form, whole=True)
