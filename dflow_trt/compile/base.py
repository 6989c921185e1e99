"""What a backend decides: whether it can run a build, how graphs are lowered, and what makes engines of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dflow_trt.bundle import Bundle
from dflow_trt.graphs.builder import Lowering
from dflow_trt.spec import BackendName, BuildSpec, DrafterSpec, DType, Hardware, TargetSpec, WeightForm

Note = Callable[[str], None]
"""Takes a line that the user should read now."""


@dataclass(frozen=True)
class EngineOptions:
    """How engines are compiled; ONNX Runtime, whose engines are the graphs, reads none of it.

    plugin: the library of the dflow:: plugins, by default the one at its usual place. no_plugin: compile the nodes'
    ONNX bodies instead. compute_capabilities: for which GPUs TensorRT-RTX compiles, all that it can by default.
    hardware_compatibility, version_compatible: on what else than this GPU and version TensorRT's engines shall run.
    timing_cache: folder in which TensorRT's timings are kept from build to build. keep_onnx: leave the graphs in the
    bundle, beside the engines.
    """

    plugin: Path | None = None
    no_plugin: bool = False
    compute_capabilities: tuple[str, ...] = ()
    hardware_compatibility: Hardware = "none"
    version_compatible: bool = False
    timing_cache: Path | None = None
    keep_onnx: bool = False


class Backend(Protocol):
    """One value of ``--backend``. dtype, draft_weights: of a build that asks for nothing else."""

    name: BackendName
    dtype: DType
    draft_weights: WeightForm

    def check(self, build: BuildSpec, target: TargetSpec, drafters: Sequence[DrafterSpec]) -> None:
        """UserError for what cannot be built, or could not be run, on any machine; before anything is written."""
        ...

    def check_machine(self, build: BuildSpec, drafters: Sequence[DrafterSpec]) -> None:
        """UserError for what this machine lacks to build it."""
        ...

    def target_lowering(self, build: BuildSpec) -> Lowering: ...

    def draft_lowering(self, build: BuildSpec) -> Lowering:
        """Of the drafter and of the context's key/value projections."""
        ...

    def compile(self, bundle: Bundle, note: Note) -> Bundle:
        """Make engines of the graphs in a bundle's folder; the bundle as it is then. UserError where one fails."""
        ...
