"""A draft model: the sections of a target, without logits."""

from __future__ import annotations

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
    """The token after each of the prompt's: as high as the reference's best."""
    feeds = prompt_feeds(prompt.ids)
    found = prompt.run(c.DRAFTER, draft.spec.name, feeds, [c.NEXT_IDS.name])
    linear = ref.LINEAR[checks.draft_form]
    wanted, _ = ref.target_forward(draft.weights, draft.model.spec, prompt.ids.tolist(), linear)
    checks.compare_best(f"{draft.spec.name}.draft", found[0][0], wanted, checks.draft_form, whole=True)
