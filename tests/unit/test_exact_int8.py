"""int8 products are whole numbers: exact on every CPU, with the worst weights and activations there are."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from dflow_trt.runtime.ort import exact_int8

INNER = 64


def product(weight: Any) -> bytes:
    """(levels - 128) @ weight, as `graphs.blocks.int8_matmul` writes it."""
    node = helper.make_node("MatMulIntegerToFloat", ["x", "w", "one", "scale", "zero"], ["y"], domain="com.microsoft")
    constants = {
        "w": weight,
        "one": np.float32(1),
        "scale": np.ones(weight.shape[1], np.float32),
        "zero": np.uint8(128),
    }
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, [None, INNER])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString())


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("fill", ["largest", "random"])
def test_products_are_exact(rows: int, fill: str) -> None:
    rng = np.random.default_rng(0)
    weight, levels = np.full((INNER, 32), 127, np.int8), np.full((rows, INNER), 255, np.uint8)
    if fill == "random":
        weight = rng.integers(-127, 128, weight.shape).astype(np.int8)
        levels = rng.integers(0, 256, levels.shape).astype(np.uint8)
    options = ort.SessionOptions()
    exact_int8(options)
    session = ort.InferenceSession(product(weight), options, providers=["CPUExecutionProvider"])
    expected = (levels.astype(np.int64) - 128) @ weight.astype(np.int64)
    assert np.array_equal(session.run(None, {"x": levels})[0], expected)
