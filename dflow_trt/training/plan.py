"""What a training job is asked to do, and everything that can be refused before it costs any time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflow_trt.errors import UserError
from dflow_trt.spec import TargetSpec
from dflow_trt.training.options import (
    RECORD,
    DrafterSource,
    Options,
    Prompt,
    TargetSource,
    check_goes_on,
    check_options,
    settled,
)
from dflow_trt.training.shapes import Shape, make_shape

OUTPUT_FILES = ("config.json", "model.safetensors", "README.md", RECORD)
DEFAULT_HELD_OUT = 32


@dataclass(frozen=True)
class Plan:
    """A job that has been checked. `training` and `held_out` prompts are all different."""

    target: TargetSource
    source: DrafterSource | None
    training: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    shape: Shape
    options: Options


def check_output(
    output: Path, cache: Path, force: bool, inputs: Sequence[Path] = (), parts: Sequence[str] = OUTPUT_FILES
) -> None:
    """UserError unless a drafter may be written to `output`: absent, empty, or with `force` an older drafter.

    parts: the files that an older drafter may have.
    """
    if output.exists() and not output.is_dir():
        raise UserError(f"--output: {output} is a file; name a folder")
    entries = sorted(path.name for path in output.iterdir()) if output.exists() else []
    if output.resolve() in (cache.resolve(), *cache.resolve().parents):
        raise UserError(f"--cache: {cache} is in the output folder; choose a folder outside {output}")
    if any(output.resolve() == path.resolve() for path in inputs):
        raise UserError(f"--output: {output} is what is read; choose another folder")
    foreign = [name for name in entries if name not in parts]
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
    check_options(options)
    if source is not None:
        check_goes_on(options)
    shape = make_shape(target, source, options)
    options = settled(options)
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
