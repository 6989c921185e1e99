"""Prompt lookup: no engines, so nothing to check."""

from __future__ import annotations

from dflow_trt.checkpoint.folder import DrafterCheckpoint
from dflow_trt.selfcheck.base import Checks
from dflow_trt.selfcheck.full import Prompt


def check(checks: Checks, draft: DrafterCheckpoint) -> None:
    """Nothing."""


def check_whole(checks: Checks, prompt: Prompt, draft: DrafterCheckpoint) -> None:
    """Nothing."""
