"""The backends by the names that users give them."""

from __future__ import annotations

from collections.abc import Callable

from dflow_trt.compile.base import Backend, EngineOptions
from dflow_trt.compile.onnxruntime import OnnxRuntime
from dflow_trt.compile.tensorrt import TensorRT
from dflow_trt.compile.tensorrt_rtx import TensorRTRTX
from dflow_trt.errors import UserError

BACKENDS: dict[str, Callable[[EngineOptions], Backend]] = {
    "onnxruntime": lambda options: OnnxRuntime(),
    "tensorrt": TensorRT,
    "tensorrt-rtx": TensorRTRTX,
}


def choose_backend(name: str, options: EngineOptions) -> Backend:
    """The backend of that name; UserError if there is none."""
    if name not in BACKENDS:
        raise UserError(f"--backend: {name!r} is not offered; allowed: {', '.join(BACKENDS)}")
    return BACKENDS[name](options)
