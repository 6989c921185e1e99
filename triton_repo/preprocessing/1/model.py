"""Text in, token ids out."""

from dflow_trt.serving.triton import PreprocessingModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
