"""The ensemble's interface, which also ends a request whose client is gone."""

from dflow_trt.serving.triton import DflowBlsModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
