"""dflow:: nodes parsed and built by the real TensorRT-RTX, with no GPU: it calls the plugins' build-time methods."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import plugin_toolchain as toolchain
import pytest
from onnx_ir.tape import Tape
from plugin_toolchain import run

from dflow_trt.contract import PLUGIN_DOMAIN, PLUGIN_VERSION
from dflow_trt.graphs.functions import hidden_state_extract, relay_inject

PROBE = Path(__file__).with_name("rtx_probe.py")
LIBS = "tensorrt_rtx_libs"
Tensor = tuple[ir.DataType, Sequence[int | str]]

FLOAT, HALF, BF16 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16
INT32, INT64, BOOL = ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The parser opens libtensorrt_rtx.so, and ends the process without it; the wheel has libtensorrt_rtx.so.1."""
    spec = importlib.util.find_spec(LIBS)
    if spec is None or spec.origin is None:
        toolchain.unavailable("tensorrt_rtx is not installed; pip install '.[test-tensorrt]'")
    libraries = Path(spec.origin).parent
    links = tmp_path_factory.mktemp("links")
    (links / "libtensorrt_rtx.so").symlink_to(next(libraries.glob("libtensorrt_rtx.so.*")))
    return {"LD_LIBRARY_PATH": f"{links}:{libraries}"}


def node(function: ir.Function, inputs: Sequence[Tensor], **attributes: float) -> ir.Model:
    """A model of one plugin node, with its local function, as the graph builder emits it."""
    tape = Tape()
    values = [ir.val(f"in_{i}", dtype, shape) for i, (dtype, shape) in enumerate(inputs)]
    tags = {"plugin_namespace": PLUGIN_DOMAIN, "plugin_version": PLUGIN_VERSION}
    output = tape.op(function.name, values, tags | attributes, domain=PLUGIN_DOMAIN, name="the node")
    output.name, output.type = "out", ir.TensorType(inputs[0][0])
    opsets = {"": 24, PLUGIN_DOMAIN: 1}
    graph = ir.Graph(values, [output], nodes=tape.nodes, opset_imports=opsets, name="one node")
    return ir.Model(graph, ir_version=11, functions=[function])


def extract(dtype: ir.DataType, taps: int = 3, row_count: ir.DataType = INT64, last: int = 64) -> ir.Model:
    sizes = [64] * (taps - 1) + [last]
    return node(hidden_state_extract(taps), [*((dtype, ("B", "S", size)) for size in sizes), (row_count, ("B",))])


def inject(dtype: ir.DataType, on: ir.DataType = INT64, width: int = 128) -> ir.Model:
    row, norm = (dtype, ("B", 16, 64)), (dtype, (64,))
    inputs = [row, row, (dtype, ("B", 16, width)), norm, norm, (on, ("B", 16))]
    return node(relay_inject(), inputs, epsilon=1e-5)


def probe(model: ir.Model, folder: Path, environment: dict[str, str], *library: Path) -> dict[str, Any]:
    ir.save(model, folder / "model.onnx")
    result = run([sys.executable, PROBE, folder / "model.onnx", *library], **environment)
    assert result.returncode == 0, result.stdout
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("dtype", [FLOAT, HALF, BF16], ids=str)
@pytest.mark.parametrize(("make", "shape"), [(extract, [-1, -1, 192]), (inject, [-1, 16, 64])])
def test_nodes_become_plugin_layers_and_engines(
    make: Any, shape: list[int], dtype: ir.DataType, tmp_path: Path, environment: dict[str, str]
) -> None:
    report = probe(make(dtype), tmp_path, environment, toolchain.plugin_library())
    assert report["layers"] == ["PLUGIN_V3"], report["log"]
    assert report["outputs"] == [shape]
    assert report["bytes"] > 0, report["log"]


WRONG = {
    "row_count int32": (
        extract(HALF, row_count=INT32),
        "HiddenStateExtract: input 3 'row_count' is int32; expected int64",
    ),
    "tap of another size": (
        extract(BF16, last=32),
        "HiddenStateExtract: input 2 'tap_2' has shape [?,?,32]; expected [B,S,E=64]",
    ),
    "relay_on bool": (inject(FLOAT, on=BOOL), "RelayInject: input 5 'relay_on' is bool; expected int64"),
    "beta_gamma too wide": (
        inject(FLOAT, width=192),
        "RelayInject: input 2 'beta_gamma' has shape [?,16,192]; expected [B,J=16,2E=128]",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_tensors_are_refused_in_the_users_log(case: str, tmp_path: Path, environment: dict[str, str]) -> None:
    model, message = WRONG[case]
    report = probe(model, tmp_path, environment, toolchain.plugin_library())
    assert not report["parsed"]
    assert f"dflow::{message}" in report["log"]


def test_without_the_library_the_function_is_inlined_silently(tmp_path: Path, environment: dict[str, str]) -> None:
    """Why the builder has to look for PLUGIN_V3 layers after parsing."""
    report = probe(inject(FLOAT), tmp_path, environment)
    assert report["parsed"]
    assert "PLUGIN_V3" not in report["layers"]
