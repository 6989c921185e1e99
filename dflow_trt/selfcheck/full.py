"""Whole engines through the runtime: a prompt's logits and taps, and what every drafter makes of them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflow_trt import contract as c
from dflow_trt import reference as ref
from dflow_trt.checkpoint.folder import DrafterCheckpoint
from dflow_trt.checkpoint.weights import Array
from dflow_trt.feeds import kv_index
from dflow_trt.kinds import KINDS
from dflow_trt.runtime.base import Runtime
from dflow_trt.runtime.ort import OrtRuntime
from dflow_trt.selfcheck.base import Checks, rms
from dflow_trt.spec import DrafterSpec

ROWS = 8


@dataclass(frozen=True)
class Prompt:
    """A prompt in slot 0 of a runtime, which the target has just read.

    ids [S]. layers: the outputs [S,E] of the target's decoder layers, the reference's.
    """

    runtime: Runtime
    ids: Array
    layers: Sequence[Array]

    def taps(self, spec: DrafterSpec) -> Array:
        """What a drafter reads of the target, [S,X]."""
        return np.concatenate([self.layers[tap] for tap in spec.taps], axis=1)

    def run(self, engine: str, drafter: str, feeds: Mapping[str, Array], fetch: Sequence[str] = ()) -> list[Array]:
        """One call of a drafter's engine on that slot."""
        return self.runtime.run(engine, drafter, range(1), feeds, fetch)


def check_engines(checks: Checks, drafts: Sequence[DrafterCheckpoint]) -> None:
    """The engines of target and drafters, each whole."""
    with contextlib.closing(OrtRuntime(checks.bundle, slots=1)) as runtime:
        prompt = _read_prompt(checks, runtime)
        for draft in drafts:
            KINDS[draft.spec.kind].check_module().check_whole(checks, prompt, draft)


def _read_prompt(checks: Checks, runtime: Runtime) -> Prompt:
    """The target reads a random prompt; its logits must be the reference's."""
    target, ids = checks.target, checks.ids(ROWS)
    linear = ref.LINEAR[checks.bundle.build.target_form]
    logits, layers = ref.target_forward(target.weights, target.spec, ids.tolist(), linear)
    found, noise = target_pass(runtime, ids), 0.0
    if checks.target_form != "float":
        plain = ref.target_forward(target.weights, target.spec, ids.tolist(), rounded=False)[0]
        noise = rms(plain - logits)
    live = found[:, : checks.live_vocab]
    checks.compare("target.logits", live, logits, checks.target_form, noise=noise, whole=True)
    return Prompt(runtime, ids, layers)


def target_pass(runtime: Runtime, ids: Array) -> Array:
    """One prompt through a runtime's target, alone in slot 0: logits [S,V]."""
    feeds = {**prompt_feeds(ids), c.ROW_COUNT.name: np.array([len(ids)])}
    logits: Array = runtime.run(c.TARGET, None, range(1), feeds, [c.LOGITS.name])[0][0]
    return logits


def prompt_feeds(ids: Array, start: int = 0) -> dict[str, Array]:
    """What a model is fed to read tokens [S] of a prompt, ``start`` of which it has, and to say what follows each."""
    rows = np.arange(len(ids))[None]
    return {
        c.INPUT_IDS.name: ids[None],
        c.POSITION_IDS.name: start + rows,
        c.LOGIT_ROWS.name: rows,
        c.WRITE_INDEX.name: np.array([start]),
        c.KV_INDEX.name: kv_index(start + len(ids)),
    }
