"""The kernels give what the local functions in the ONNX files give: one node, two bodies."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import plugin_toolchain as toolchain
import pytest
from onnx_ir.tape import Tape
from plugin_toolchain import TESTS

from dflow_trt.contract import PLUGIN_DOMAIN
from dflow_trt.graphs.functions import hidden_state_extract, relay_inject

MAX_TAPS = 64
DTYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(ml_dtypes.bfloat16): 2}
Array = np.ndarray


class ExtractArgs(ctypes.Structure):
    """HiddenStateExtractArgs of plugins/kernels/kernels.h."""

    _fields_ = (
        ("taps", ctypes.c_void_p * MAX_TAPS),
        ("row_count", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("num_taps", ctypes.c_int32),
        ("columns", ctypes.c_int32),
    )


class InjectArgs(ctypes.Structure):
    """RelayInjectArgs of plugins/kernels/kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "h", "beta_gamma", "weight", "bias", "relay_on", "relayed")),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
    )


@pytest.fixture(scope="module")
def kernels() -> ctypes.CDLL:
    sources = [TESTS / "host_library.cpp"]
    return ctypes.CDLL(str(toolchain.host_program("libkernels_on_cpu.so", sources, "-shared", "-fPIC")))


def extract(kernels: ctypes.CDLL, taps: Sequence[Array], row_count: Array) -> Array:
    batch, rows, columns = taps[0].shape
    hidden = np.full((batch, rows, len(taps) * columns), 7, taps[0].dtype)
    pointers = (ctypes.c_void_p * MAX_TAPS)(*[tap.ctypes.data for tap in taps])
    args = ExtractArgs(pointers, row_count.ctypes.data, hidden.ctypes.data, batch, rows, len(taps), columns)
    assert kernels.launch_hidden_state_extract(ctypes.byref(args), DTYPES[hidden.dtype]) == 0
    return hidden


def inject(kernels: ctypes.CDLL, inputs: Sequence[Array], epsilon: float) -> Array:
    relayed = np.full_like(inputs[0], 7)
    batch, slots, columns = relayed.shape
    pointers = [array.ctypes.data for array in (*inputs, relayed)]
    args = InjectArgs(*pointers, batch * slots, columns, epsilon)
    assert kernels.launch_relay_inject(ctypes.byref(args), DTYPES[relayed.dtype]) == 0
    return relayed


def run_function(function: ir.Function, inputs: Sequence[Array], **attributes: float) -> Array:
    """The local function in ONNX Runtime, called as a dflow:: node."""
    tape = Tape()
    values = [ir.val(f"in_{i}", ir.DataType.from_numpy(a.dtype), a.shape) for i, a in enumerate(inputs)]
    output = tape.op(function.name, values, attributes, domain=PLUGIN_DOMAIN)
    output.name, output.type = "out", ir.TensorType(values[0].dtype)
    graph = ir.Graph(values, [output], nodes=tape.nodes, opset_imports={"": 24, PLUGIN_DOMAIN: 1}, name="one node")
    model = ir.Model(graph, ir_version=11, functions=[function])
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    [result] = session.run(None, {value.name: array for value, array in zip(values, inputs, strict=True)})
    return result


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("taps", "columns"), [(1, 7), (3, 64), (5, 2048)])
def test_hidden_state_extract_gives_the_functions_bits(
    kernels: ctypes.CDLL, dtype: type, taps: int, columns: int
) -> None:
    rng = np.random.default_rng(columns)
    inputs = [rng.normal(0, 3e4, (3, 5, columns)).clip(-6e4, 6e4).astype(dtype) for _ in range(taps)]
    row_count = np.array([5, 0, 2])
    for tap in inputs:
        tap[1] = tap[2, 2:] = np.nan
    ours = extract(kernels, inputs, row_count)
    theirs = run_function(hidden_state_extract(taps), [*inputs, row_count])
    assert np.isfinite(ours).all()
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("columns", [6, 64, 1001, 2560])
@pytest.mark.parametrize("epsilon", [1e-6, 1e-2])
def test_relay_inject_gives_what_the_function_gives(kernels: ctypes.CDLL, columns: int, epsilon: float) -> None:
    rng = np.random.default_rng(columns)
    shapes = [(3, 8, columns), (3, 8, columns), (3, 8, 2 * columns), (columns,), (columns,)]
    inputs = [rng.standard_normal(shape, np.float32) for shape in shapes]
    on = rng.random((3, 8)) < 0.7
    inputs[1][~on] = inputs[2][~on] = np.nan
    inputs.append(on.astype(np.int64))
    ours = inject(kernels, inputs, epsilon)
    theirs = run_function(relay_inject(), inputs, epsilon=epsilon)
    np.testing.assert_array_equal(ours[~on], inputs[0][~on])
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_the_function_in_float32_rounded_once(kernels: ctypes.CDLL, dtype: type) -> None:
    rng = np.random.default_rng(0)
    shapes = [(2, 4, 512), (2, 4, 512), (2, 4, 1024), (512,), (512,)]
    inputs = [rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes]
    on = np.ones((2, 4), np.int64)
    ours = inject(kernels, [*inputs, on], 1e-6)
    exact = run_function(relay_inject(), [*(array.astype(np.float32) for array in inputs), on], epsilon=1e-6)
    step = np.finfo(np.float16).eps if dtype is np.float16 else 2.0**-7
    np.testing.assert_allclose(ours.astype(np.float32), exact, rtol=0.51 * float(step), atol=1e-5)
