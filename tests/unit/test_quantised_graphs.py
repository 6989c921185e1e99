"""Quantised linear layers in graphs: one product where inputs are treated alike, and the numbers of the definition.

y = round(x * pre_quant_scale) @ weight^T, held against float64, packed as TensorRT gets it and wide as a CPU does.
"""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from modelopt_copies import ALGOS, FOLDERS, SAID, copy_folder, edit, edit_json, tensors, values
from tiny import DELETE

from dflow_trt import contract as c
from dflow_trt.checkpoint.target import read_target
from dflow_trt.checkpoint.weights import Array
from dflow_trt.graphs import store
from dflow_trt.graphs.blocks import linear
from dflow_trt.graphs.builder import GraphBuilder, Lowering
from dflow_trt.spec import DType, QuantSpec

SOURCE = "model.layers.0.self_attn"
QKV = [f"{SOURCE}.{label}_proj" for label in "qkv"]
ROWS = 7
X = c.TensorSpec("x", "engine", "BSE", "host", "the input of the layer")
Y = c.TensorSpec("y", "engine", "BSV", "host", "its output")


@dataclass(frozen=True)
class Made:
    """The graph of one linear layer, and how many nodes of each kind it has."""

    path: Path
    nodes: Counter[str]

    def run(self, x: Array) -> Array:
        options = ort.SessionOptions()
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        session = ort.InferenceSession(str(self.path), options, providers=["CPUExecutionProvider"])
        found: Array = session.run(None, {"x": x[None].astype(np.float32)})[0][0]
        return found

    def kinds(self) -> set[int]:
        """The dtypes of the initializers."""
        return {tensor.data_type for tensor in onnx.load(str(self.path), load_external_data=False).graph.initializer}


def make(folder: Path, place: Path, modules: list[str], packed: bool, dtype: DType = "float32") -> Made:
    """One linear layer of these modules of a folder, as a graph."""
    weights = read_target(folder, quantised=True).weights
    names = [f"{module}.weight" for module in modules]
    shapes = [weights.shape(name) for name in names]
    contract = c.EngineContract("linear", (X,), (Y,), 0, {"E": shapes[0][1], "V": sum(shape[0] for shape in shapes)})
    data = store.WeightFile(place / "linear.data", lambda count: None)
    g = GraphBuilder(contract, Lowering(dtype, "float", "op", packed), weights, data)
    g.output(Y, linear(g, "linear", g.input(X), names))
    data.close()
    g.save(place / "linear.onnx")
    onnx.checker.check_model(str(place / "linear.onnx"), full_check=True)
    graph = onnx.load(str(place / "linear.onnx"), load_external_data=False).graph
    return Made(place / "linear.onnx", Counter(node.op_type for node in graph.node))


def definition(folder: Path, module: str, x: Array) -> Array:
    """One layer in float64, from the tensors themselves."""
    stored = tensors(folder)
    if f"{module}.weight_scale" not in stored:
        return x.astype(np.float64) @ stored[f"{module}.weight"].astype(np.float64).T
    x = (x * stored.get(f"{module}.pre_quant_scale", np.float32(1))).astype(np.float32)
    scale = stored.get(f"{module}.input_scale")
    if scale is not None:
        levels = (x / scale).astype(np.float32)
        x = np.clip(levels, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * np.float64(scale)
        if stored[f"{module}.weight"].dtype == np.int8:
            x = np.clip(np.rint(levels), -128, 127) * np.float64(scale)
    return x.astype(np.float64) @ values(stored, module).T


def inputs(width: int, size: float = 1.0) -> Array:
    return (size * np.random.default_rng(0).standard_normal((ROWS, width))).astype(np.float32)


@pytest.fixture(params=[True, False], ids=["packed", "wide"])
def packed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


LAYERS = [QKV, [f"{SOURCE}.o_proj"], ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]]
LAYERS += [["model.layers.0.mlp.down_proj"], ["model.layers.1.mlp.down_proj"]]


@pytest.mark.parametrize("size", [0.3, 3.0, 300.0], ids=["small", "usual", "beyond the last level"])
@pytest.mark.parametrize("modules", LAYERS, ids=["qkv", "o", "gate, up", "down", "down, kept"])
@pytest.mark.parametrize("name", ALGOS)
def test_a_layer_is_what_its_tensors_say(
    tmp_path: Path, name: str, modules: list[str], packed: bool, size: float
) -> None:
    folder = FOLDERS / name
    made = make(folder, tmp_path, modules, packed)
    x = inputs(64 if modules[0].endswith("down_proj") else 32, size)
    wanted = np.concatenate([definition(folder, module, x) for module in modules], axis=1)
    np.testing.assert_allclose(made.run(x), wanted, rtol=1e-5, atol=2e-6 * np.abs(wanted).max())
    assert made.nodes["MatMul"] == 1


@pytest.mark.parametrize("name", ALGOS)
def test_packed_weights_keep_their_few_bits(tmp_path: Path, name: str) -> None:
    made = make(FOLDERS / name, tmp_path, QKV, True, "bfloat16")
    kinds = {"fp8": "FLOAT8E4M3FN", "int8": "INT8", "int8_weights": "INT8", "int4_awq": "INT4"}
    assert int(ir.DataType[kinds[name]]) in made.kinds()
    inputs_rounded, smoothed = name in ("fp8", "int8"), name == "int8"
    assert made.nodes == Counter(
        {"MatMul": 1, "DequantizeLinear": 1 + inputs_rounded, "QuantizeLinear": inputs_rounded, "Mul": smoothed}
    )
    size = 32 * 64 * (1 if name != "int4_awq" else 0.5)
    groups = 2 * 64 * 2 if name == "int4_awq" else 0  # scales in bfloat16
    smoothing = 2 * 32 if smoothed else 0
    whole = [-(-part // store.ALIGNMENT) * store.ALIGNMENT for part in (size, groups, smoothing) if part]
    written = (tmp_path / "linear.data").stat().st_size
    assert sum(whole) - store.ALIGNMENT < written <= sum(whole)


def test_scales_of_eight_bits_are_float32_in_every_build(tmp_path: Path) -> None:
    """TensorRT-RTX multiplies sums of integer products by them in their own dtype: float16 would overflow."""
    for dtype in ("float16", "bfloat16"):
        for name in ("fp8", "int8", "int8_weights"):
            place = tmp_path / f"{dtype}-{name}"
            place.mkdir()
            graph = onnx.load(str(make(FOLDERS / name, place, QKV, True, dtype).path), load_external_data=False).graph
            kinds = {tensor.name: tensor.data_type for tensor in graph.initializer if tensor.name.endswith("_scale")}
            kinds.pop("linear.pre_quant_scale", None)
            assert set(kinds.values()) == {onnx.TensorProto.FLOAT}


# -- what shares a product ---------------------------------------------------------------------------------------------


def changed(place: Path, name: str, module: str, kind: str, change: Callable[[Array], Any]) -> Path:
    """A copy in which one scale of one module differs."""
    tensor = f"{module}.{kind}"
    return copy_folder(name, place / "folder", {tensor: np.asarray(change(tensors(FOLDERS / name)[tensor]))})


SPLIT: list[tuple[str, str, str, int]] = [
    ("fp8", QKV[0], "input_scale", 2),  # q | k v
    ("fp8", QKV[1], "input_scale", 3),  # q | k | v
    ("int8", QKV[2], "pre_quant_scale", 2),  # q k | v
    ("fp8", QKV[1], "weight_scale", 1),
    ("int8", QKV[1], "weight_scale", 1),
    ("int4_awq", QKV[1], "weight_scale", 1),
]


@pytest.mark.parametrize(("name", "module", "kind", "products"), SPLIT)
def test_layers_whose_inputs_differ_have_products_of_their_own(
    tmp_path: Path, packed: bool, name: str, module: str, kind: str, products: int
) -> None:
    folder = changed(tmp_path, name, module, kind, lambda scale: (scale * np.float32(1.5)).astype(np.float32))
    made, x = make(folder, tmp_path, QKV, packed), inputs(32)
    wanted = np.concatenate([definition(folder, part, x) for part in QKV], axis=1)
    np.testing.assert_allclose(made.run(x), wanted, rtol=1e-5, atol=2e-6 * np.abs(wanted).max())
    assert (made.nodes["MatMul"], made.nodes["Concat"]) == (products, products > 1)


@pytest.mark.parametrize(("scales", "rank"), [((0.5, 0.5, 0.5), 0), ((0.5, 0.25, 0.5), 1)])
def test_equal_scales_of_tensors_stay_one_scale(tmp_path: Path, scales: tuple[float, ...], rank: int) -> None:
    """One number is folded into the product; a number a channel is another pass over its result."""
    changes = {f"{m}.weight_scale": np.array(value, np.float32) for m, value in zip(QKV, scales, strict=True)}
    made = make(copy_folder("fp8", tmp_path / "folder", changes), tmp_path, QKV, True)
    graph = onnx.load(str(made.path), load_external_data=False).graph
    assert [len(tensor.dims) for tensor in graph.initializer if tensor.name == "linear.weight_scale"] == [rank]


def test_a_float_layer_beside_quantised_ones(tmp_path: Path, packed: bool) -> None:
    stored = tensors(FOLDERS / "int8_weights")
    floats = {f"{QKV[1]}.weight": values(stored, QKV[1]).astype(np.float32)}
    folder = copy_folder("int8_weights", tmp_path / "folder", floats)
    edit(folder, {f"{QKV[1]}.weight_scale": DELETE})
    edit_json(folder / SAID, "quantization", exclude_modules=["lm_head", QKV[1], "model.layers.1.mlp.down_proj"])
    made, x = make(folder, tmp_path, QKV, packed), inputs(32)
    wanted = np.concatenate([definition(folder, part, x) for part in QKV], axis=1)
    np.testing.assert_allclose(made.run(x), wanted, rtol=1e-5, atol=2e-6 * np.abs(wanted).max())
    assert made.nodes["MatMul"] == 3


# -- weights on their way ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Random:
    """A quantised layer of random levels, made row by row as they are read."""

    shape: tuple[int, int]
    spec: QuantSpec

    def levels(self, rows: slice | None = None) -> Array:
        outputs = self.shape[0] * self.spec.bits // 8
        chosen = range(*(rows or slice(None)).indices(outputs))
        kind = np.uint8 if self.spec.bits == 4 else np.int8
        return np.stack([np.random.default_rng(i).integers(0, 100, self.shape[1], kind) for i in chosen])


@pytest.mark.parametrize("algo", ["W4A16_AWQ", "W8A16"])
@pytest.mark.parametrize("chunk", [1, 100, 1 << 20], ids=["a row a chunk", "odd chunks", "one chunk"])
def test_levels_are_stacked_and_transposed(monkeypatch: pytest.MonkeyPatch, algo: Any, chunk: int) -> None:
    monkeypatch.setattr(store, "CHUNK_BYTES", chunk)
    layers: list[Any] = [Random((outputs, 24), QuantSpec(algo, None, ())) for outputs in (16, 6, 30)]
    wanted = np.concatenate([layer.levels() for layer in layers]).T
    found = store.packed(layers)
    np.testing.assert_array_equal(found, wanted)
    assert found.dtype == wanted.dtype
    assert found.flags.c_contiguous


@pytest.mark.parametrize("algo", ["W4A16_AWQ", "W8A16"])
def test_memory_is_the_packed_tensor_and_a_chunk(monkeypatch: pytest.MonkeyPatch, algo: Any) -> None:
    monkeypatch.setattr(store, "CHUNK_BYTES", 1 << 20)
    layer: Any = Random((8192, 2048), QuantSpec(algo, None, ()))
    tracemalloc.start()
    size = store.packed([layer]).nbytes
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size == 8192 * 2048 * (4 if algo == "W4A16_AWQ" else 8) // 8
    assert peak <= size + (6 << 20)
