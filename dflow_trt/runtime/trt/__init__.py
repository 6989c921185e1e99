"""TensorRT on a GPU, behind the protocol of :mod:`dflow_trt.runtime.base`.

library.py    TensorRT itself, the plugin, and whether this machine is what the engines were built for
engine.py     one engine: checked against its contract, a context for each profile
shapes.py     what calls are padded to, and where padding rows write
buffers.py    all device memory, allocated once
sampler.py    tokens drawn on the device, by the plugin library's C entry point
runtime.py    :class:`TrtRuntime`: calls, CUDA graphs, the exchange of slots
"""

from __future__ import annotations

from dflow_trt.runtime.trt.runtime import TrtRuntime

__all__ = ["TrtRuntime"]
