"""dflow-trt: DFlow block-diffusion speculative decoding, compiled for ONNX Runtime, TensorRT and Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflow_trt.api import LLM, CompletionOutput, RequestOutput, StreamOutput
    from dflow_trt.errors import UserError
    from dflow_trt.method.sampling import SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StreamOutput", "UserError"]
__version__ = "0.1.0"

_HOMES = {
    "LLM": "dflow_trt.api",
    "CompletionOutput": "dflow_trt.api",
    "RequestOutput": "dflow_trt.api",
    "StreamOutput": "dflow_trt.api",
    "SamplingParams": "dflow_trt.method.sampling",
    "UserError": "dflow_trt.errors",
}


def __getattr__(name: str) -> Any:
    """Public names load on first use, so that ``import dflow_trt`` and ``dflow-trt --help`` stay quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dflow_trt' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
