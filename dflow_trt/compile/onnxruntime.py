"""ONNX Runtime: the graph file is the engine; what the backend decides is how the graph is lowered."""

from __future__ import annotations

from dflow_trt.errors import UserError
from dflow_trt.graphs.builder import Lowering
from dflow_trt.spec import BuildSpec, DType

NAME = "onnxruntime"
SUPPORTED: tuple[DType, ...] = ("float32",)


def check(build: BuildSpec) -> None:
    """UserError where ONNX Runtime's CPU provider cannot run the build (it has no bfloat16 MatMul)."""
    if build.dtype not in SUPPORTED:
        raise UserError(
            f"--dtype: {build.dtype} does not run on {NAME}'s CPU provider; allowed: {', '.join(SUPPORTED)}"
        )


def target_lowering(build: BuildSpec) -> Lowering:
    return Lowering(build.dtype, build.target_weights, "fold")


def draft_lowering(build: BuildSpec) -> Lowering:
    """Of the drafter and of the context's key/value projections."""
    return Lowering(build.dtype, build.draft_weights, "fold")
