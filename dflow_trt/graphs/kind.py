"""What a build asks of a kind of drafter: the functions of each module that :mod:`dflow_trt.kinds` names on this side.

read(folder, target, name, settings) -> DrafterCheckpoint    intake; UserError for what is not supported or not whole
write(writer, draft, engines)                                its graphs, each engine once
stored(spec) -> {engine: Stored}                             the weights of each engine, as they lie in data files
borrowed(spec) -> [tables, ...]                              the target's vocabulary tables that each engine reads
describe(spec) -> str                                        a line for people
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from dflow_trt.checkpoint.names import Shapes
from dflow_trt.checkpoint.target import TargetCheckpoint
from dflow_trt.checkpoint.weights import Weights
from dflow_trt.contract import EngineContract
from dflow_trt.graphs.blocks import Vocabulary
from dflow_trt.graphs.builder import GraphBuilder, Lowering
from dflow_trt.spec import BuildSpec, DType, StackSpec, TargetSpec

Engines = Mapping[str, EngineContract]
Tables = frozenset[Literal["embed", "head"]]
Settings = Mapping[str, int]
"""What ``--drafter DIR:key=value`` says besides the folder."""
Kept = tuple[Shapes, DType | None]
"""Tensors and their dtype; None is the build's."""


@dataclass(frozen=True)
class Stored:
    """What an engine's data file holds.

    wide: tensors in float32 whatever the build's dtype. formed: tensors in the form of the build's drafters. kept:
    those that stay float in any form. rope: the layers whose rotary tables it has. head: whether it has the target's
    head, and with it the bias of dead columns. tables: the model whose vocabulary tables lie in a file of their own
    beside it. shared_with: the engine in whose file all of it lies, where it has none of its own.
    """

    wide: Shapes = field(default_factory=dict)
    formed: Shapes = field(default_factory=dict)
    kept: Sequence[Kept] = ()
    rope: StackSpec | None = None
    head: bool = False
    tables: TargetSpec | None = None
    shared_with: str | None = None


class Writer(Protocol):
    """The bundle that is being written.

    lowering: of drafters. vocabulary: the target's tables. taps: the layers packed in ``hidden``.
    """

    build: BuildSpec
    lowering: Lowering
    vocabulary: Vocabulary
    taps: tuple[int, ...]

    def engine(
        self, contract: EngineContract, drafter: str, weights: Weights, lowering: Lowering | None = None
    ) -> AbstractContextManager[GraphBuilder]:
        """A graph to fill; by default lowered as drafters are."""
        ...

    def tables(self, drafter: str, source: TargetCheckpoint) -> Vocabulary:
        """A drafter's own vocabulary tables, written to its own file in the form of drafters."""
        ...


def describe_stack(stack: StackSpec, vocab: int) -> str:
    """The size of a model, for people."""
    heads = f"{stack.num_heads}/{stack.num_kv_heads} heads of {stack.head_dim}"
    return f"{stack.num_layers} layers, hidden {stack.hidden_size}, {heads}, vocabulary {vocab}"
