"""The texts of dflow as NVIDIA's clients read them."""

from dflow_trt.serving.triton import PostprocessingModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
