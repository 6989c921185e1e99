"""Prompt lookup for a build: nothing but its settings (:mod:`.kind`)."""

from __future__ import annotations

from pathlib import Path

from dflow_trt.checkpoint.folder import DrafterCheckpoint, checked_name
from dflow_trt.checkpoint.reader import known_settings, setting
from dflow_trt.checkpoint.target import TargetCheckpoint
from dflow_trt.checkpoint.weights import NoWeights
from dflow_trt.errors import UserError
from dflow_trt.graphs.kind import Engines, Settings, Stored, Tables, Writer
from dflow_trt.spec import NgramSpec

LONGEST_MATCH, MOST_DRAFTS = 16, 64
MIN_MATCH, MAX_MATCH, DRAFTS = 2, 4, 8


def read(folder: Path, target: TargetCheckpoint, name: str | None, settings: Settings) -> DrafterCheckpoint:
    """``ngram``, with the settings min, max (of the match) and drafts."""
    known_settings(folder, settings, "min", "max", "drafts")
    least = setting(folder, settings, "min", MIN_MATCH, 1, LONGEST_MATCH)
    most = setting(folder, settings, "max", max(MAX_MATCH, least), 1, LONGEST_MATCH)
    if "min" not in settings:
        least = min(least, most)
    if least > most:
        raise UserError(f"--drafter: {folder}:min={least},max={most}; allowed: min up to max")
    drafts = setting(folder, settings, "drafts", DRAFTS, 1, MOST_DRAFTS)
    spec = NgramSpec(checked_name(name or NgramSpec.kind), None, least, most, drafts)
    return DrafterCheckpoint(folder, spec, NoWeights(), "none")


def write(writer: Writer, draft: DrafterCheckpoint, engines: Engines) -> None:
    """Nothing."""


def stored(spec: NgramSpec) -> dict[str, Stored]:
    """Nothing."""
    return {}


def borrowed(spec: NgramSpec) -> list[Tables]:
    """Nothing."""
    return []


def describe(spec: NgramSpec) -> str:
    """One line for people."""
    return f"prompt lookup of the last {spec.min_match} to {spec.max_match} tokens, {spec.drafts} drafts"
