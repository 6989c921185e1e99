"""ONNX Runtime: the graph file is the engine; what the backend decides is how the graph is lowered."""

from __future__ import annotations

from dflow_trt.errors import UserError
from dflow_trt.graphs.builder import Lowering
from dflow_trt.spec import BuildSpec, DType, TargetSpec

NAME = "onnxruntime"
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


def target_lowering(build: BuildSpec) -> Lowering:
    return Lowering(build.dtype, build.target_weights, "fold")


def draft_lowering(build: BuildSpec) -> Lowering:
    """Of the drafter and of the context's key/value projections."""
    return Lowering(build.dtype, build.draft_weights, "fold")
