"""Domino's causal head: its corrections after the engine's own drafts."""

from __future__ import annotations

import numpy as np

from dflow_trt import contract as c
from dflow_trt import reference as ref
from dflow_trt.checkpoint.weights import Array
from dflow_trt.selfcheck.base import rms
from dflow_trt.selfcheck.drafter import BASE, Drafter, Z
from dflow_trt.spec import WeightForm


def check_domino(drafter: Drafter) -> None:
    """The causal head alone: its corrections, and the drafts.

    The base logits are given, no larger than the corrections: beside large ones, a wrong correction changes no id.
    """
    checks, form, live = drafter.checks, drafter.form, drafter.checks.live_vocab
    spec, label = drafter.spec, f"{drafter.spec.name}.correction"
    z, anchor = drafter.slots(), checks.ids(1)
    base, block = _small_base(drafter, z), checks.head("float").embed(anchor.tolist())
    names = [f"domino.{i}.correction" for i in spec.corrected_drafts]
    feeds = {Z: z[None], BASE: base[None], c.BLOCK_EMBEDS.name: block[None]}
    found = drafter.engine.section(feeds, [*drafter.engine.given(c.DRAFT_IDS, c.DRAFT_LOGITS), *names])
    ids = found[c.DRAFT_IDS.name][0]
    checks.check_live(label, ids)
    read = np.concatenate([anchor, ids[:-1]])
    wanted, plain = (corrections(drafter, z, read, each) for each in (form, "float"))
    added, noise = np.concatenate([found[name][0] for name in names])[:, :live], rms(wanted - plain)
    checks.compare(label, added, wanted[spec.corrected_drafts[0] - 1 :], form, noise=noise)
    checks.compare_best(f"{label}.ids", ids, base[:, :live] + wanted, form)
    if c.DRAFT_LOGITS.name in found:
        logits = found[c.DRAFT_LOGITS.name][0, :, :live]
        checks.compare(f"{label}.logits", logits, base[:, :live] + wanted, form, noise=noise)


def _small_base(drafter: Drafter, z: Array) -> Array:
    """Random base logits [K,V] of the size of the corrections; what is no token is as dead as behind the head."""
    size = rms(corrections(drafter, z, drafter.checks.ids(len(z)), "float"))
    base = np.float32(size) * drafter.checks.rows(len(z), c.vocab_columns(drafter.spec.vocab_size))
    base[:, drafter.checks.live_vocab :] = c.DEAD_LOGIT
    return base


def corrections(drafter: Drafter, z: Array, read: Array, form: WeightForm) -> Array:
    """The reference's corrections [K,live vocabulary]; ``read`` [K] are the anchor and all drafts but the last."""
    embeds = drafter.checks.head("float").embed(read.tolist())
    found = ref.domino_corrections(drafter.draft.weights, drafter.spec, z, embeds, ref.LINEAR[form])
    return found[:, : drafter.checks.live_vocab]
