"""The runtime that a bundle needs."""

from __future__ import annotations

from dflow_trt.bundle import Bundle
from dflow_trt.runtime.base import Runtime
from dflow_trt.runtime.ort import OrtRuntime


def open_runtime(bundle: Bundle, threads: int | None, slots: int) -> Runtime:
    """A runtime of the backend that the bundle was built for. threads: of the CPU's, by default all cores."""
    if bundle.build.backend == "onnxruntime":
        return OrtRuntime(bundle, threads, slots)
    from dflow_trt.runtime.trt import TrtRuntime

    return TrtRuntime(bundle, slots)
