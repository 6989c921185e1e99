"""What this machine can do at most: bytes and operations a second, with the threads that run the engines."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from dflow_trt.profiling.record import Roof
from dflow_trt.runtime.ort import exact_int8

SECONDS = 0.3  # of one probe
MAIN_MEMORY = 256 << 20  # bytes, more than most caches hold
ROWS, INPUTS, OUTPUTS = 256, 1024, 1024  # of the product that is timed
OPSET, IR_VERSION = 21, 10
SWEEP = 8 << 20  # bytes that a thread reads before it looks at the clock


def measure_roof(working_set: int, threads: int) -> Roof:
    """The roof for a model of so many bytes on so many threads. Takes about a second."""
    return Roof(
        memory_bandwidth=bandwidth(MAIN_MEMORY, threads),
        working_set=working_set,
        working_set_bandwidth=bandwidth(min(working_set, MAIN_MEMORY), threads),
        operations={"float32": operations("float32", threads), "int8": operations("int8", threads)},
        threads=threads,
    )


def _best(call: Callable[[], Any]) -> float:
    """The shortest time of one call in seconds: what else the machine does only adds to it."""
    call()
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def bandwidth(size: int, threads: int) -> float:
    """Bytes a second, read over and over from ``size`` bytes that the threads share out."""
    parts = [np.ones(max(1, size // 4 // threads), np.float32) for _ in range(threads)]
    sweeps = max(1, SWEEP // parts[0].nbytes)

    def read(part: Any) -> None:
        for _ in range(sweeps):
            part.max()

    total = sweeps * sum(part.nbytes for part in parts)
    if threads == 1:
        return total / _best(lambda: read(parts[0]))
    with ThreadPoolExecutor(threads) as pool:
        return total / _best(lambda: list(pool.map(read, parts)))


def operations(form: str, threads: int) -> float:
    """Operations a second of a large product in float32, or of int8 matrices in integers; a multiply-add is two."""
    model, feed = _float_product() if form == "float32" else _integer_product()
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    exact_int8(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return 2 * ROWS * INPUTS * OUTPUTS / _best(lambda: session.run(None, {"x": feed}))


def _float_product() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((INPUTS, OUTPUTS), np.float32)
    return _product("MatMul", TensorProto.FLOAT, TensorProto.FLOAT, weight), np.ones((ROWS, INPUTS), np.float32)


def _integer_product() -> tuple[Any, Any]:
    weight = np.random.default_rng(0).integers(-127, 128, (INPUTS, OUTPUTS), np.int8)
    model = _product("MatMulInteger", TensorProto.UINT8, TensorProto.INT32, weight)
    return model, np.full((ROWS, INPUTS), 7, np.uint8)


def _product(op: str, kind: int, result: int, weight: Any) -> Any:
    graph = helper.make_graph(
        [helper.make_node(op, ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", kind, [ROWS, INPUTS])],
        [helper.make_tensor_value_info("y", result, [ROWS, OUTPUTS])],
        [numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
