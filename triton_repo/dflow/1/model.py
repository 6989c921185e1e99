"""Token ids in, text out, batched in flight."""

from dflow_trt.serving.triton import DflowModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
