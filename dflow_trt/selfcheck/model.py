"""A whole model, the target or a draft model: its embedding, its first and last block, its head."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from dflow_trt import contract as c
from dflow_trt import reference as ref
from dflow_trt.checkpoint.target import TargetCheckpoint
from dflow_trt.checkpoint.weights import Array
from dflow_trt.selfcheck.base import Checks, rms
from dflow_trt.selfcheck.engine import Engine
from dflow_trt.spec import WeightForm

ROWS = 4


def check_target(checks: Checks) -> None:
    """The target's sections."""
    engine, form = Engine(checks.bundle, c.TARGET, None), checks.bundle.build.target_form
    check_model(checks, "target", engine, checks.target, form, checks.target_form)


def check_model(
    checks: Checks, label: str, engine: Engine, model: TargetCheckpoint, form: WeightForm, block_form: WeightForm
) -> None:
    """A target's graph, or a draft model's. block_form: how near its layers must be."""
    stack, ids, head = model_stack(model, form), checks.ids(ROWS), ref.ReferenceHead(model.weights, model.spec)
    checks.compare(f"{label}.embed", engine.embed(ids), head.embed(ids.tolist()))
    last, blocks = stack.stack.num_layers - 1, Blocks(checks, label, engine, stack, block_form)
    for i in sorted({0, last}):
        blocks.check(i, ROWS)
    x = checks.rows(ROWS, stack.stack.hidden_size)
    feeds = {f"layers.{last}.out": x[None], c.LOGIT_ROWS.name: np.arange(ROWS)[None]}
    found = engine.section(feeds, engine.given(c.NEXT_IDS, c.LOGITS))
    z = ref.rms_norm(x, stack.read("model.norm.weight"), stack.stack.rms_norm_eps)
    wanted = dataclasses.replace(head, linear=ref.LINEAR[form]).logits(z)
    checks.compare_best(f"{label}.head", found[c.NEXT_IDS.name][0], wanted, form)
    if c.LOGITS.name in found:
        checks.compare(f"{label}.head.logits", found[c.LOGITS.name][0, :, : wanted.shape[1]], wanted, form)


def model_stack(model: TargetCheckpoint, form: WeightForm) -> ref.ReferenceStack:
    """The model's layers with weights of that form."""
    return ref.ReferenceStack(model.weights, model.spec.stack, "model.", ref.LINEAR[form])


@dataclass(frozen=True)
class Blocks:
    """The decoder layers of one engine beside the reference's. form: how near they must be."""

    checks: Checks
    label: str
    engine: Engine
    stack: ref.ReferenceStack
    form: WeightForm

    def check(self, i: int, rows: int) -> None:
        """One layer twice: alone at the first positions, and far out, behind a full cache."""
        x, width = self.checks.rows(rows, self.stack.stack.hidden_size), self.stack.stack.hidden_size
        self._compare(f"{self.label}.layers.{i}", self.engine.block(i, x), i, x, np.arange(rows), None)
        start = self.checks.far(rows)
        if not start:
            return
        context = self.checks.past_rows(start, width)
        cached = [self.stack.heads(i, part, context, np.arange(start)) for part in c.CACHE_TENSORS]
        found, positions = self.engine.block(i, x, cached), start + np.arange(rows)
        self._compare(f"{self.label}.layers.{i}.far", found, i, x, positions, context)

    def _compare(self, section: str, found: Array, i: int, x: Array, positions: Array, context: Array | None) -> None:
        """What a layer adds to its input: beside that, an error in a small update would not show."""
        wanted, noise = self.stack.layer(i, x, positions, context), 0.0
        if self.form != "float":
            plain = dataclasses.replace(self.stack, linear=ref.LINEAR["float"], rounded=False)
            noise = rms(plain.layer(i, x, positions, context) - wanted)
        self.checks.compare(section, found - x, wanted - x, self.form, noise=noise)
