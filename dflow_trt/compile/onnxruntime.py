"""ONNX Runtime: the graph file is the engine; what the backend decides is how the graph is lowered."""

from __future__ import annotations

from collections.abc import Sequence

from dflow_trt.bundle import Bundle
from dflow_trt.compile.base import Note
from dflow_trt.errors import UserError
from dflow_trt.graphs.builder import Lowering
from dflow_trt.spec import BackendName, BuildSpec, DrafterSpec, DType, TargetSpec, WeightForm

NAME: BackendName = "onnxruntime"
SUPPORTED: tuple[DType, ...] = ("float32",)
MAX_HEAD_DIM = 128  # longer products are summed in an order that depends on the cache length: not lossless


def check(build: BuildSpec, target: TargetSpec) -> None:
    """UserError where ONNX Runtime's CPU provider cannot run the build losslessly, or at all (no bfloat16 MatMul)."""
    if target.stack.head_dim > MAX_HEAD_DIM:
        raise UserError(
            f"target: head_dim is {target.stack.head_dim}; allowed on {NAME}: up to {MAX_HEAD_DIM}; use another target"
        )
    if build.dtype not in SUPPORTED:
        raise UserError(
            f"--dtype: {build.dtype} does not run on {NAME}'s CPU provider; allowed: {', '.join(SUPPORTED)}"
        )


class OnnxRuntime:
    """See :class:`dflow_trt.compile.base.Backend`."""

    name = NAME
    dtype: DType = "float32"
    draft_weights: WeightForm = "int8"

    def check(self, build: BuildSpec, target: TargetSpec, drafters: Sequence[DrafterSpec]) -> None:
        check(build, target)

    def check_machine(self, build: BuildSpec, drafters: Sequence[DrafterSpec]) -> None:
        """Any machine that runs this package can."""

    def target_lowering(self, build: BuildSpec) -> Lowering:
        return Lowering(build.dtype, build.target_form, "fold")

    def draft_lowering(self, build: BuildSpec) -> Lowering:
        return Lowering(build.dtype, build.draft_weights, "fold")

    def compile(self, bundle: Bundle, note: Note) -> Bundle:
        return bundle
