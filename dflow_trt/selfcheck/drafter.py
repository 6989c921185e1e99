"""A DFlash drafter beside its reference: what the checks of its heads share, and the plain head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dflow_trt import contract as c
from dflow_trt import reference as ref
from dflow_trt.checkpoint.drafter import DFlashCheckpoint
from dflow_trt.checkpoint.weights import Array
from dflow_trt.selfcheck.base import Checks
from dflow_trt.selfcheck.engine import Engine
from dflow_trt.spec import DFlashSpec, SelectorSpec, WeightForm

# values of a drafter's graph, where the sections of a causal head and of a selector begin
Z, BASE, SCORES, STEP = "final_norm", "domino.base", "head", "head.step"


@dataclass(frozen=True)
class Drafter:
    """One drafter of the DFlash family."""

    checks: Checks
    draft: DFlashCheckpoint

    @property
    def spec(self) -> DFlashSpec:
        return self.draft.spec

    @property
    def form(self) -> WeightForm:
        return self.checks.draft_form

    @cached_property
    def engine(self) -> Engine:
        """The engine of that name."""
        return Engine(self.checks.bundle, c.DRAFTER, self.spec.name)

    @property
    def stack(self) -> ref.ReferenceStack:
        linear = ref.LINEAR[self.form]
        return ref.ReferenceStack(self.draft.weights, self.spec.stack, "", linear, conv=self.spec.conv)

    @property
    def out(self) -> str:
        """What the last layer gives, in the engine."""
        return f"layers.{self.spec.stack.num_layers - 1}.out"

    def block(self) -> Array:
        """A random row for every slot, [B,E]."""
        return self.checks.rows(self.spec.block_size, self.spec.stack.hidden_size)

    def slots(self) -> Array:
        """Random final-normed slots, one a draft: [K,E]."""
        return self.checks.rows(self.spec.num_drafts, self.spec.stack.hidden_size)

    def final_normed(self, x: Array) -> Array:
        """Of a block's rows behind the last layer, the slots that draft: [K,E]."""
        return ref.rms_norm(x[self.spec.first_slot :], self.stack.read("norm.weight"), self.spec.stack.rms_norm_eps)

    def logits(self, z: Array) -> Array:
        """Base logits of final-normed slots, [K,live vocabulary]."""
        return self.checks.head(self.form).logits(z)

    def shown(self, logits: Array) -> Array:
        """The draft logits as an engine gives them: multiplied, then softcapped."""
        scaled, cap = logits * self.spec.output_multiplier, self.spec.final_logit_softcapping
        return np.asarray(np.tanh(scaled / cap) * cap if cap else scaled)


def check_head(drafter: Drafter) -> None:
    """Final norm, head and argmax; the logits too, where the engine gives them."""
    checks, label, x = drafter.checks, f"{drafter.spec.name}.head", drafter.block()
    outputs = drafter.engine.given(c.DRAFT_IDS, c.DRAFT_LOGITS)
    found = drafter.engine.section({drafter.out: x[None]}, outputs)
    wanted = drafter.logits(drafter.final_normed(x))
    checks.compare_best(label, found[c.DRAFT_IDS.name][0], wanted, drafter.form)
    if c.DRAFT_LOGITS.name in found:
        live = found[c.DRAFT_LOGITS.name][0, :, : wanted.shape[1]]
        checks.compare(f"{label}.logits", live, drafter.shown(wanted), drafter.form)


def check_base(drafter: Drafter) -> None:
    """Final norm and head of a drafter whose drafts do not hang on them alone: the base logits themselves."""
    checks, label, x = drafter.checks, f"{drafter.spec.name}.head", drafter.block()
    found, wanted = _base_logits(drafter, x), drafter.logits(drafter.final_normed(x))
    checks.compare_best(label, found.argmax(axis=1), wanted, drafter.form)
    checks.compare(f"{label}.logits", found[:, : wanted.shape[1]], wanted, drafter.form)


def _base_logits(drafter: Drafter, x: Array) -> Array:
    """The base logits [K,V] that follow from the last layer's rows x [B,E]."""
    engine, feeds = drafter.engine, {drafter.out: x[None]}
    if not isinstance(drafter.spec.head, SelectorSpec):
        return np.asarray(engine.section(feeds, [BASE])[BASE][0])
    found = engine.section(feeds, [SCORES] if drafter.form == "float" else [SCORES, STEP])
    return found[SCORES] * found.get(STEP, np.float32(1))
