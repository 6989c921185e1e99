"""What `dflow-trt train` is asked: target, prompts, flags, and which flag is for which mode."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dflow_trt.errors import UserError
from dflow_trt.spec import DFlashSpec, TargetSpec

Mode = Literal["dflash", "self-conditioned", "dflow", "draft-model", "eagle3"]
Rollout = Literal["real", "teacher-forced"]

RECORD = "training.json"
"""Beside a drafter that was trained here: how, for which target, with what result."""
BLOCK_MODES: tuple[Mode, ...] = ("dflash", "self-conditioned", "dflow")
"""Drafters that fill a block in one pass."""
SERIAL_MODES: tuple[Mode, ...] = ("draft-model", "eagle3")
"""Drafters that make one draft after another."""

_OF_A_BLOCK = (
    *("block_size", "mask_token_id", "relay_start", "rounds", "anchors"),
    *("head", "head_state", "head_rank", "head_prefix", "rollout"),
)
_ALLOWED: dict[str, tuple[Mode, ...]] = {
    **dict.fromkeys(_OF_A_BLOCK, BLOCK_MODES),
    **dict.fromkeys(("taps", "decay"), (*BLOCK_MODES, "eagle3")),
    "layers": (*BLOCK_MODES, "draft-model"),
    "hidden_size": ("draft-model",),
    **dict.fromkeys(("heads", "kv_heads", "head_dim", "drafts"), SERIAL_MODES),
    "draft_vocab": ("eagle3",),
}
"""The modes that a flag is for; flags that are not here are for all."""
DEFAULT_ROUNDS, DEFAULT_ANCHORS, DEFAULT_DECAY = 2, 8, 4.0


@dataclass(frozen=True)
class TargetSource:
    """The target's folder, validated. tokenizer_files: those of it that any model of the same vocabulary needs."""

    path: Path
    spec: TargetSpec
    fingerprint: str
    tokenizer_files: tuple[Path, ...] = ()


@dataclass(frozen=True)
class DrafterSource:
    """A drafter to go on from, validated for the target. read: tensor name -> numpy array in the checkpoint's dtype."""

    path: Path
    spec: DFlashSpec
    fingerprint: str
    read: Callable[[str], Any]


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids, and the line of the file it stands on."""

    line: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Options:
    """The flags of `dflow-trt train`. None in the first group means: as in the drafter to go on from, or by default.

    drafts: of a round, where there is no block; an EAGLE-3 head is unrolled over as many steps. rollout: whether the
    drafts of a causal head are its own, as in decoding, or those it would make after the true tokens. rounds:
    conditioned rounds after the mask-only one. anchors: blocks a sequence and batch. decay: draft j weighs
    exp(-(j - 1) / decay). every: steps from one measurement and checkpoint to the next. accumulate: batches a step.
    held_out: prompts that tau is measured on and that are not trained on.
    """

    block_size: int | None = None
    taps: tuple[int, ...] | None = None
    layers: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    draft_vocab: int | None = None
    drafts: int | None = None
    mask_token_id: int | None = None
    relay_start: str | None = None
    head: Literal["domino"] | None = None
    head_state: int | None = None
    head_rank: int | None = None
    head_prefix: int | None = None
    rollout: Rollout | None = None
    rounds: int | None = None
    anchors: int | None = None
    decay: float | None = None
    every: int | None = None
    mode: Mode = "dflash"
    steps: int = 1000
    batch_size: int = 8
    learning_rate: float = 6e-4
    accumulate: int = 1
    max_new_tokens: int = 256
    temperature: float = 0.0
    held_out: int | None = None
    seed: int = 0

    @property
    def conditioned_rounds(self) -> int:
        """k: rounds that start where the drafts of the round before were rejected."""
        asked = DEFAULT_ROUNDS if self.rounds is None else self.rounds
        return asked if self.mode in ("self-conditioned", "dflow") else 0

    @property
    def interval(self) -> int:
        """Steps from one measurement and checkpoint to the next: a tenth of all steps unless said."""
        return self.every or max(1, self.steps // 10)


def check_options(options: Options) -> None:
    """UserError, in one line, for values out of range and for flags that the mode does not have."""
    for name in ("decay", "learning_rate", "temperature"):
        value = getattr(options, name)
        if value is not None and (not math.isfinite(value) or value < 0 or (value == 0 and name != "temperature")):
            raise UserError(f"{flag(name)}: {value}; allowed: a finite number above 0")
    if options.mode == "dflash" and options.rounds is not None:
        raise UserError("--rounds: mode dflash has the mask-only round alone; allowed: with self-conditioned or dflow")
    if options.mode in BLOCK_MODES and options.mode != "dflow" and options.relay_start is not None:
        raise UserError(f"--relay-start: mode {options.mode} has no relay; allowed: with --mode dflow")
    for name, modes in _ALLOWED.items():
        if getattr(options, name) is not None and options.mode not in modes:
            raise UserError(f"{flag(name)}: mode {options.mode} has no use for it; allowed: with {_either(modes)}")


def settled(options: Options) -> Options:
    """The options with the defaults of `anchors` and `decay` where the mode has them."""
    anchors = DEFAULT_ANCHORS if options.anchors is None else options.anchors
    decay = DEFAULT_DECAY if options.decay is None else options.decay
    return replace(
        options,
        anchors=anchors if options.mode in _ALLOWED["anchors"] else None,
        decay=decay if options.mode in _ALLOWED["decay"] else None,
    )


def check_goes_on(options: Options) -> None:
    """UserError unless a drafter of this mode can go on from another."""
    if options.mode not in BLOCK_MODES:
        raise UserError(f"--from: mode {options.mode} starts anew; allowed: with {_either(BLOCK_MODES)}")


def flag(name: str) -> str:
    """An option as it is typed."""
    return f"--{name.replace('_', '-')}"


def _either(modes: tuple[Mode, ...]) -> str:
    return f"--mode {', '.join(modes[:-1])} or {modes[-1]}" if len(modes) > 1 else f"--mode {modes[0]}"
