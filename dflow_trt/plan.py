"""What a pair needs and what fits, from the specs alone: the sums that people do before they choose a batch limit."""

from __future__ import annotations

import dataclasses
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflow_trt.build import MAX_BATCH, BuildOptions, DrafterSource, build_spec, read_drafters
from dflow_trt.checkpoint.target import read_target
from dflow_trt.compile import onnxruntime
from dflow_trt.compile.backends import choose_backend
from dflow_trt.compile.base import Backend
from dflow_trt.errors import UserError
from dflow_trt.memory import MemoryPlan, plan_memory, show_bytes, unbuilt
from dflow_trt.spec import BuildSpec, DrafterSpec, TargetSpec

MEMORY_FRACTION = 0.9  # the rest: the CUDA context, fragmentation, and whatever else lives on the card
UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
SHORTEST = 1024  # of the table's context lengths, which double from here


@dataclass(frozen=True)
class Cell:
    """One pair of limits and the bytes that it needs in all; ``fits`` in the budget."""

    max_batch_size: int
    max_seq_len: int
    total: int
    fits: bool


@dataclass(frozen=True)
class Fit:
    """What fits into ``budget`` bytes, which is what ``memory_fraction`` leaves of ``memory``.

    max_batch_size: the largest with the planned max_seq_len. max_seq_len: the longest with the planned max_batch_size.
    0: not even the smallest fits. table: batches and context lengths, rows of equal batch.
    """

    memory: int
    memory_fraction: float
    budget: int
    max_batch_size: int
    max_seq_len: int
    table: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Plan:
    """The limits that were planned, what they need, and what fits where a memory size was given."""

    build: BuildSpec
    memory: MemoryPlan
    fit: Fit | None

    def figures(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return dataclasses.asdict(self) | {"memory": self.memory.figures()}


def parse_size(flag: str, text: str) -> int:
    """Bytes of "80GiB", "24 GB" or "85899345920"; UserError naming the flag."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([a-z]*)", text.strip().lower())
    size = int(float(match[1]) * UNITS.get(match[2], 0)) if match else 0
    if not size:
        raise UserError(f"{flag}: {text!r}; allowed: bytes, or a number with its unit, e.g. 80GiB or 24GB")
    return size


def make_plan(
    target: Path,
    drafters: Sequence[DrafterSource],
    options: BuildOptions,
    memory: int | None = None,
    memory_fraction: float = MEMORY_FRACTION,
) -> Plan:
    """Plan a build of these checkpoints, whose headers alone are read.

    options: as for a build, for which nothing of the backend has to be installed here. memory: bytes of the card, or of
    the machine. UserError for limits that a build would refuse, and where weights alone do not fit.
    """
    backend = choose_backend(options.backend, options.engine)
    if not 0 < memory_fraction <= 1:
        raise UserError(f"--memory-fraction: {memory_fraction:g}; allowed: above 0, at most 1")
    source = read_target(target, quantised=True)
    specs: dict[str, DrafterSpec] = {draft.spec.name: draft.spec for draft in read_drafters(drafters, source)}
    limits = _Limits(source.spec, specs, options, backend)
    build = limits.build()
    backend.check(build, source.spec, tuple(specs.values()))
    fit = None if memory is None else _fit(limits, build, memory, memory_fraction)
    return Plan(build, limits.plan(build), fit)


@dataclass(frozen=True)
class _Limits:
    """A pair and the options given for it, of which batch and context length may be varied."""

    target: TargetSpec
    drafters: dict[str, DrafterSpec]
    options: BuildOptions
    backend: Backend

    @property
    def verify_rows(self) -> int:
        return max((spec.verify_rows for spec in self.drafters.values()), default=1)

    def build(self, batch: int | None = None, length: int | None = None) -> BuildSpec:
        """The limits of a build with these two instead of the ones given."""
        options = dataclasses.replace(
            self.options,
            max_batch_size=self.options.max_batch_size if batch is None else batch,
            max_seq_len=self.options.max_seq_len if length is None else length,
        )
        return build_spec(options, self.backend, self.target, self.verify_rows)

    def plan(self, build: BuildSpec) -> MemoryPlan:
        return plan_memory(unbuilt(self.target, self.drafters, build))

    def cell(self, batch: int, length: int, budget: int) -> Cell:
        """These two limits, what they need, and whether that fits."""
        total = self.plan(self.build(batch, length)).total
        return Cell(batch, length, total, total <= budget)

    @property
    def batches(self) -> range:
        """The batch sizes that a build takes: a given max_num_tokens bounds them."""
        tokens = self.options.max_num_tokens
        most = MAX_BATCH if tokens is None else min(MAX_BATCH, tokens // self.verify_rows)
        return range(1, most + 1)

    @property
    def lengths(self) -> range:
        """The context lengths that a build takes: a given max_input_len bounds them."""
        return range(max(2, (self.options.max_input_len or 1) + 1), self.target.max_position + 1)


def _fit(limits: _Limits, build: BuildSpec, memory: int, fraction: float) -> Fit:
    budget = int(memory * fraction)
    _check_weights(limits, build, memory, budget)
    batch, length = build.max_batch_size, build.max_seq_len
    most = _last(limits.batches, lambda n: limits.cell(n, length, budget).fits)
    longest = _last(limits.lengths, lambda n: limits.cell(batch, n, budget).fits)
    return Fit(memory, fraction, budget, most, longest, tuple(_table(limits, build, budget)))


def _last(candidates: range, fits: Callable[[int], bool]) -> int:
    """The largest candidate that fits, where none fits above one that does not; 0 where none does."""
    count = bisect_left(candidates, True, key=lambda n: not fits(n))
    return candidates[count - 1] if count else 0


def _table(limits: _Limits, build: BuildSpec, budget: int) -> Iterator[tuple[Cell, ...]]:
    """Doubling batches by doubling context lengths, the planned ones and the longest too; rows where something fits."""
    lengths = {*_doubling(SHORTEST, limits.lengths), build.max_seq_len, limits.lengths[-1]}
    for batch in sorted({*_doubling(1, limits.batches), build.max_batch_size}):
        row = tuple(limits.cell(batch, length, budget) for length in sorted(lengths))
        if any(cell.fits for cell in row):
            yield row


def _doubling(first: int, within: range) -> Iterator[int]:
    while first <= within[-1]:
        if first in within:
            yield first
        first *= 2


def _check_weights(limits: _Limits, build: BuildSpec, memory: int, budget: int) -> None:
    weights = limits.plan(build).weights
    if weights <= budget:
        return
    on_cpu = build.backend == onnxruntime.NAME  # int8 weights are its own form, and float32 its only dtype
    todo = ["take --target-weights int8"] if on_cpu and build.target_weights == "float" else []
    todo += ["take --draft-weights int8"] if on_cpu and build.draft_weights == "float" and limits.drafters else []
    todo += ["take --dtype bfloat16"] if not on_cpu and build.dtype == "float32" else []
    raise UserError(
        f"--gpu-memory: weights alone take {show_bytes(weights)}, {show_bytes(weights - budget)} more than the "
        f"{show_bytes(budget)} that --memory-fraction leaves of {show_bytes(memory)}; "
        f"{', '.join([*todo, 'use a smaller model'])}, or more memory"
    )
