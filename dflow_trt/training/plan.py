"""What a training job is asked to do, and everything that can be refused before it costs any time."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dflow_trt.errors import UserError
from dflow_trt.spec import DFlashSpec, DominoSpec, TargetSpec

Mode = Literal["dflash", "self-conditioned", "dflow"]
Rollout = Literal["real", "teacher-forced"]

RECORD = "training.json"
"""Beside a drafter that was trained here: how, for which target, with what result."""
OUTPUT_FILES = ("config.json", "model.safetensors", "README.md", RECORD)
MASK_NAMES = ("<|mask|>", "<|MASK|>", "<mask>", "[MASK]")
DEFAULT_BLOCK, DEFAULT_LAYERS, DEFAULT_START, DEFAULT_ROUNDS = 16, 5, "after_rejection", 2
DEFAULT_HELD_OUT = 32
DEFAULT_HEAD_STATE, DEFAULT_HEAD_RANK, DEFAULT_HEAD_PREFIX = 1024, 256, 1  # those of released Domino drafters


@dataclass(frozen=True)
class TargetSource:
    """The target's folder, validated."""

    path: Path
    spec: TargetSpec
    fingerprint: str


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

    rounds: conditioned rounds after the mask-only one. accumulate: batches a step. held_out: prompts that tau is
    measured on and that are not trained on. every: steps from one measurement and checkpoint to the next. rollout:
    whether the drafts of a causal head are its own, as in decoding, or those it would make after the true tokens.
    """

    block_size: int | None = None
    taps: tuple[int, ...] | None = None
    layers: int | None = None
    intermediate_size: int | None = None
    mask_token_id: int | None = None
    relay_start: str | None = None
    head: Literal["domino"] | None = None
    head_state: int | None = None
    head_rank: int | None = None
    head_prefix: int | None = None
    rollout: Rollout | None = None
    rounds: int | None = None
    every: int | None = None
    mode: Mode = "dflash"
    decay: float = 4.0
    steps: int = 1000
    batch_size: int = 8
    anchors: int = 8
    learning_rate: float = 6e-4
    accumulate: int = 1
    max_new_tokens: int = 256
    temperature: float = 0.0
    held_out: int | None = None
    seed: int = 0

    @property
    def conditioned_rounds(self) -> int:
        """k: rounds that start where the drafts of the round before were rejected."""
        return 0 if self.mode == "dflash" else DEFAULT_ROUNDS if self.rounds is None else self.rounds

    @property
    def interval(self) -> int:
        """Steps from one measurement and checkpoint to the next: a tenth of all steps unless said."""
        return self.every or max(1, self.steps // 10)


@dataclass(frozen=True)
class Shape:
    """What a drafter is built to: the resolved first group of :class:`Options`."""

    block_size: int
    taps: tuple[int, ...]
    layers: int
    intermediate_size: int
    mask_token_id: int
    relay_start: str | None
    head: DominoSpec | None


@dataclass(frozen=True)
class Plan:
    """A job that has been checked. `training` and `held_out` prompts are all different."""

    target: TargetSource
    source: DrafterSource | None
    training: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    shape: Shape
    options: Options


def check_output(output: Path, cache: Path, force: bool, inputs: Sequence[Path] = ()) -> None:
    """UserError unless a drafter may be written to `output`: absent, empty, or with `force` an older drafter."""
    if output.exists() and not output.is_dir():
        raise UserError(f"--output: {output} is a file; name a folder")
    entries = sorted(path.name for path in output.iterdir()) if output.exists() else []
    if output.resolve() in (cache.resolve(), *cache.resolve().parents):
        raise UserError(f"--cache: {cache} is in the output folder; choose a folder outside {output}")
    if any(output.resolve() == path.resolve() for path in inputs):
        raise UserError(f"--output: {output} is what is read; choose another folder")
    foreign = [name for name in entries if name not in OUTPUT_FILES]
    if foreign:  # replacing the folder would remove it
        raise UserError(f"--output: {output} holds {foreign[0]!r}, no part of a drafter; choose another folder")
    if entries and not force:
        raise UserError(f"--output: {output} exists already; give --force to replace it, or another folder")


def make_plan(
    target: TargetSource,
    source: DrafterSource | None,
    prompts: Sequence[Prompt],
    options: Options,
    held_out: Sequence[Prompt] | None = None,
) -> Plan:
    """Check everything that can be known before the target runs; UserError, in one line, for what does not fit.

    held_out: prompts to measure on, none of which is trained on; by default some of `prompts`, drawn by the seed.
    """
    _check_target(target)
    _check_options(options)
    shape = _shape(target, options) if source is None else _continued_shape(source, target, options)
    _check_head(shape, options)
    _check_prompts("--prompts", prompts, target.spec, options)
    if held_out is None:
        return Plan(target, source, *_split(prompts, options), shape, options)
    _check_prompts("--held-out-prompts", held_out, target.spec, options)
    return Plan(target, source, _others(prompts, held_out, options), _different(held_out), shape, options)


def _check_target(target: TargetSource) -> None:
    if any(window is not None for window in target.spec.stack.windows):
        raise UserError(f"--target: {target.path} has sliding-window layers; allowed: full attention in every layer")
    if target.spec.stack.num_layers < 2:
        raise UserError(f"--target: {target.path} has one layer; allowed: 2 or more, as the last is no tap")


def _check_options(options: Options) -> None:
    for name in ("decay", "learning_rate", "temperature"):
        value = getattr(options, name)
        if not math.isfinite(value) or value < 0 or (value == 0 and name != "temperature"):
            raise UserError(f"--{name.replace('_', '-')}: {value}; allowed: a finite number above 0")
    if options.mode == "dflash" and options.rounds is not None:
        raise UserError("--rounds: mode dflash has the mask-only round alone; allowed: with self-conditioned or dflow")
    if options.mode != "dflow" and options.relay_start is not None:
        raise UserError(f"--relay-start: mode {options.mode} has no relay; allowed: with --mode dflow")


def _check_head(shape: Shape, options: Options) -> None:
    """Flags of the causal head need one, and its own drafts are a matter of the rounds after the first."""
    for name in ("head_state", "head_rank", "head_prefix", "rollout"):
        if shape.head is None and getattr(options, name) is not None:
            raise UserError(f"--{name.replace('_', '-')}: the drafter has no causal head; allowed: with --head domino")
    if shape.head is not None and shape.head.prefix_length >= shape.block_size:
        found, most = shape.head.prefix_length, shape.block_size - 1
        raise UserError(f"--head-prefix: {found}; allowed: 0 to {most}, the drafts of a block")
    if options.rollout is not None and options.conditioned_rounds == 0:
        raise UserError("--rollout: mode dflash has no round after drafts; allowed: with self-conditioned or dflow")


def _shape(target: TargetSource, options: Options) -> Shape:
    """The shape of a new drafter."""
    layers = DEFAULT_LAYERS if options.layers is None else options.layers
    taps = spread_taps(target.spec.stack.num_layers, layers) if options.taps is None else options.taps
    _check_taps(taps, target.spec.stack.num_layers)
    block = DEFAULT_BLOCK if options.block_size is None else options.block_size
    start = (options.relay_start or DEFAULT_START) if options.mode == "dflow" else None
    inner = options.intermediate_size or target.spec.stack.intermediate_size
    return Shape(block, taps, layers, inner, _mask_token(target, options.mask_token_id), start, _new_head(options))


def _new_head(options: Options) -> DominoSpec | None:
    """The causal head that the flags ask for."""
    if options.head is None:
        return None
    state = DEFAULT_HEAD_STATE if options.head_state is None else options.head_state
    rank = DEFAULT_HEAD_RANK if options.head_rank is None else options.head_rank
    prefix = DEFAULT_HEAD_PREFIX if options.head_prefix is None else options.head_prefix
    return DominoSpec(prefix_length=prefix, state_size=state, rank=rank, shifted=False)


def spread_taps(target_layers: int, count: int) -> tuple[int, ...]:
    """Up to `count` layers spread evenly from the second to the last but two, as DFlash's released drafters have it."""
    first, last = min(1, target_layers - 2), max(target_layers - 3, min(1, target_layers - 2))
    if count == 1:
        return ((first + last) // 2,)
    return tuple(sorted({round(first + index * (last - first) / (count - 1)) for index in range(count)}))


def _check_taps(taps: Sequence[int], target_layers: int) -> None:
    allowed = f"0 to {target_layers - 2}, each once"
    if target_layers - 1 in taps:
        raise UserError(f"--taps: {target_layers - 1} is the target's last layer, no tap; allowed: {allowed}")
    if not taps or any(not 0 <= tap < target_layers for tap in taps) or len(set(taps)) != len(taps):
        raise UserError(f"--taps: {','.join(map(str, taps)) or 'none'}; allowed: {allowed}")


def _mask_token(target: TargetSource, given: int | None) -> int:
    """The mask token: as given, else the first row past the tokenizer's ids, else a token of that name."""
    spec = target.spec
    if given is not None:
        if not 0 <= given < spec.vocab_size or given in (*spec.eos_ids, spec.pad_id):
            allowed = f"0 to {spec.vocab_size - 1}, neither pad nor end of text"
            raise UserError(f"--mask-token-id: {given}; allowed: {allowed}")
        return given
    if spec.live_vocab < spec.vocab_size:
        return spec.live_vocab
    named = _named_mask(target.path / "tokenizer.json")
    if named is None or named in (*spec.eos_ids, spec.pad_id):
        raise UserError("--mask-token-id: the target has neither a spare row nor a mask token; name an unused id")
    return named


def _named_mask(tokenizer: Path) -> int | None:
    if not tokenizer.is_file():
        return None
    from tokenizers import Tokenizer

    ids = map(Tokenizer.from_file(str(tokenizer)).token_to_id, MASK_NAMES)
    return next((token for token in ids if token is not None), None)


def _continued_shape(source: DrafterSource, target: TargetSource, options: Options) -> Shape:
    """The shape of the drafter to go on from, which flags may repeat but not change."""
    spec = source.spec
    _check_source(source, target)
    relay_start: str | None = spec.relay.start if spec.relay else None
    for name, has in _fixed(spec).items():
        if getattr(options, name) not in (None, has):
            raise UserError(f"--{name.replace('_', '-')}: the drafter of --from has {has}; leave the flag out")
    if relay_start is not None and options.mode != "dflow":
        raise UserError(f"--mode: the drafter of --from has a relay; allowed: dflow, not {options.mode}")
    if options.mode == "dflow":
        relay_start = relay_start or options.relay_start or DEFAULT_START
    stack = spec.stack
    return Shape(
        spec.block_size,
        spec.target_layer_ids,
        stack.num_layers,
        stack.intermediate_size,
        spec.mask_token_id,
        relay_start,
        spec.head or _new_head(options),
    )


def _fixed(spec: DFlashSpec) -> dict[str, Any]:
    """What a drafter to go on from has settled, by the flag."""
    fixed: dict[str, Any] = {
        "block_size": spec.block_size,
        "taps": spec.target_layer_ids,
        "layers": spec.stack.num_layers,
    }
    fixed |= {"intermediate_size": spec.stack.intermediate_size, "mask_token_id": spec.mask_token_id}
    relay = {"relay_start": spec.relay.start} if spec.relay else {}
    return fixed | relay | (_head_flags(spec.head) if spec.head else {})


def _head_flags(head: DominoSpec) -> dict[str, int]:
    return {"head_state": head.state_size, "head_rank": head.rank, "head_prefix": head.prefix_length}


def _check_source(source: DrafterSource, target: TargetSource) -> None:
    """Training knows the plain drafter; what it cannot represent is refused by name."""
    spec, stack = source.spec, source.spec.stack
    for refused, what in (
        ("transformer_layer_config" in _json(source.path / "config.json"), "the layout of the speculators project"),
        (any(window is not None for window in stack.windows), "sliding-window layers"),
        (any(stack.causal), "causal layers"),
        (stack.attention_bias, "attention_bias"),
        (spec.input_embedding_scale != 1.0, "input_embedding_scale"),
        (spec.output_multiplier != 1.0, "output_multiplier"),
        (spec.final_logit_softcapping is not None, "final_logit_softcapping"),
        (spec.head is not None and spec.head.shifted, "shift_label"),
    ):
        if refused:
            raise UserError(f"--from: {source.path} has {what}, which training does not support")
    trained_for = _json(source.path / RECORD).get("target_fingerprint", target.fingerprint)
    if trained_for != target.fingerprint:
        todo = f"use a drafter of this target, or remove its {RECORD} if the weights are the same"
        raise UserError(f"--from: {source.path} was trained for another target than {target.path}; {todo}")


def _json(path: Path) -> dict[str, Any]:
    """A JSON object; {} where there is no such file or it holds something else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _check_prompts(flag: str, prompts: Sequence[Prompt], spec: TargetSpec, options: Options) -> None:
    longest = spec.max_position - options.max_new_tokens
    for prompt in prompts:
        where, count = f"{flag}: line {prompt.line}", len(prompt.ids)
        outside = [token for token in prompt.ids if not 0 <= token < spec.live_vocab]
        if outside:
            raise UserError(f"{where}: token id {outside[0]}; allowed: 0 to {spec.live_vocab - 1}, the vocabulary")
        if not prompt.ids:
            raise UserError(f"{where}: the prompt has no token; give some text")
        if count > longest:
            limit = f"{spec.max_position} positions less --max-new-tokens {options.max_new_tokens}"
            raise UserError(f"{where}: {count} tokens; allowed: up to {longest}, the target's {limit}")


def _split(prompts: Sequence[Prompt], options: Options) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """Training and held-out prompts, drawn by the seed; a prompt that is there twice counts once."""
    different, count = _different(prompts), DEFAULT_HELD_OUT if options.held_out is None else options.held_out
    if len(different) <= count:
        allowed = f"up to {len(different) - 1}, of {len(different)} different prompts"
        raise UserError(f"--held-out: {count}; allowed: {allowed}; give more prompts or hold out fewer")
    chosen = set(random.Random(options.seed).sample(range(len(different)), count))
    training = tuple(prompt for index, prompt in enumerate(different) if index not in chosen)
    return training, tuple(different[index] for index in sorted(chosen))


def _different(prompts: Sequence[Prompt]) -> tuple[Prompt, ...]:
    return tuple({prompt.ids: prompt for prompt in reversed(prompts)}.values())[::-1]


def _others(prompts: Sequence[Prompt], held_out: Sequence[Prompt], options: Options) -> tuple[Prompt, ...]:
    """The prompts to train on: those that are not held out."""
    if options.held_out is not None:
        raise UserError("--held-out: --held-out-prompts names the prompts already; give one of the two")
    excluded = {prompt.ids for prompt in held_out}
    if not (training := tuple(prompt for prompt in _different(prompts) if prompt.ids not in excluded)):
        raise UserError("--prompts: every prompt is held out by --held-out-prompts; give others to train on")
    return training
