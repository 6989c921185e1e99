"""The self-check of one bundle: the target's sections, then every drafter's; whole engines where they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dflow_trt.bundle import Bundle
from dflow_trt.checkpoint.folder import DrafterCheckpoint
from dflow_trt.checkpoint.target import TargetCheckpoint
from dflow_trt.kinds import KINDS
from dflow_trt.memory import plan_memory, show_bytes
from dflow_trt.selfcheck.agreement import quantised_agreement
from dflow_trt.selfcheck.base import Checks
from dflow_trt.selfcheck.full import check_engines
from dflow_trt.selfcheck.model import check_target

Say = Callable[[str], None]


def run_self_check(
    bundle: Bundle,
    target: TargetCheckpoint,
    drafts: Sequence[DrafterCheckpoint],
    mode: str,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Run the check; {"mode", "errors": {section: relative error}} and, for a quantised target, its "agreement".

    Graphs that are yet to be compiled run on ONNX Runtime in float32, with their weights as rounded; what a compiler
    makes of them does not run here: then "engines" says so.
    Raises UserError naming the section that differs.
    """
    result: dict[str, Any] = {"mode": mode}
    if mode == "off":
        return result
    if mode == "full":
        say(f"full self-check: needs about {show_bytes(2 * plan_memory(bundle, 1).weights)} of memory")
    result["errors"] = _errors(bundle, target, drafts, mode)
    if bundle.build.backend != "onnxruntime":
        result["engines"] = "not run"
    if bundle.build.target_form != "float":
        result["agreement"] = quantised_agreement(bundle, target)
    return result


def _errors(
    bundle: Bundle, target: TargetCheckpoint, drafts: Sequence[DrafterCheckpoint], mode: str
) -> dict[str, float]:
    checks = Checks(bundle, target)
    check_target(checks)
    for draft in drafts:
        KINDS[draft.spec.kind].check_module().check(checks, draft)
    if mode == "full":
        check_engines(checks, drafts)
    return checks.errors
