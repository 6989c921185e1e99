"""A draft model: the sections of a target, without logits."""

from __future__ import annotations

import numpy as np

from dflow_trt import contract as c
from dflow_trt import reference as ref
from dflow_trt.graphs.draft_model import DraftModelCheckpoint
from dflow_trt.selfcheck.base import Checks
from dflow_trt.selfcheck.engine import Engine
from dflow_trt.selfcheck.full import Prompt, prompt_feeds
from dflow_trt.selfcheck.model import check_model


def check(checks: Checks, draft: DraftModelCheckpoint) -> None:
    """See :mod:`dflow_trt.selfcheck`."""
    engine = Engine(checks.bundle, c.DRAFTER, draft.spec.name)
    check_model(checks, draft.spec.name, engine, draft.model, checks.draft_form, checks.draft_form)


def check_whole(checks: Checks, prompt: Prompt, draft: DraftModelCheckpoint) -> None:
    """The prompt, read in two calls: the token after each of its own must score as high as the reference's best."""
    name, form, half = draft.spec.name, checks.draft_form, len(prompt.ids) // 2
    chosen = []
    for start, ids in ((0, prompt.ids[:half]), (half, prompt.ids[half:])):
        found = prompt.run(c.DRAFTER, name, prompt_feeds(ids, start), [c.NEXT_IDS.name])
        chosen.append(found[0][0].copy())
    wanted, _ = ref.target_forward(draft.weights, draft.model.spec, prompt.ids.tolist(), ref.LINEAR[form])
    checks.compare_best(f"{name}.draft", np.concatenate(chosen), wanted, form, whole=True)
