"""Builds of quantised targets: what is planned is what is written, and what a GPU cannot compute is refused."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import fakegpu
import onnx
import pytest
from fakegpu.builder import make_builder
from modelopt_copies import ALGOS, FOLDERS, SAID, copy_folder
from tiny import make_target

from dflow_trt import contract as c
from dflow_trt.build import BuildOptions, build_bundle, estimate_bytes
from dflow_trt.bundle import Bundle
from dflow_trt.checkpoint.names import target_tensors
from dflow_trt.checkpoint.target import read_target
from dflow_trt.compile import tensorrt
from dflow_trt.compile.base import EngineOptions
from dflow_trt.compile.engine import EngineJob, EngineResult, build_engine
from dflow_trt.errors import UserError
from dflow_trt.graphs import quantised
from dflow_trt.graphs.store import ALIGNMENT
from dflow_trt.memory import plan_memory, unbuilt
from dflow_trt.plan import make_plan
from dflow_trt.spec import BuildSpec, QuantAlgo, QuantSpec, TargetSpec, TargetWeights

LIMITS: dict[str, Any] = {"max_batch_size": 2, "max_input_len": 40, "max_seq_len": 96}
BACKENDS = ("onnxruntime", "tensorrt")


@pytest.fixture
def on_fake(monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    """A GPU of a compute capability, by default 8.9, and TensorRT's builder, in this process."""
    fakegpu.install(monkeypatch, fakegpu.Gpu(compute_capability=getattr(request, "param", "8.9")))
    monkeypatch.setitem(sys.modules, "tensorrt", make_builder(fakegpu.VERSIONS["11.4"]))
    monkeypatch.setattr(tensorrt, "run_job", in_this_process)
    monkeypatch.setattr(tensorrt.TensorRT, "group_sizes", (16, 64, 128))  # as the tiny target needs them


def in_this_process(job: EngineJob, environment: Any) -> EngineResult:
    return EngineResult("", 1.5, 1 << 20, build_engine(job))


def options(backend: str, **given: Any) -> BuildOptions:
    engine = EngineOptions(no_plugin=True, keep_onnx=True) if backend == "tensorrt" else EngineOptions()
    return BuildOptions(backend, **{"engine": engine, **LIMITS, **given})


def build(name: str, output: Path, backend: str, check: str = "off", **given: Any) -> Bundle:
    return build_bundle(FOLDERS / name, [], output, options(backend, **given), self_check=check)


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ALGOS)
def test_data_files_are_planned_within_a_page_a_tensor(on_fake: None, tmp_path: Path, name: str, backend: str) -> None:
    bundle = build(name, tmp_path / "bundle", backend)
    written = {file: entry.size for file, entry in bundle.files.items() if file.endswith(".data")}
    planned = {file: entry.size for file, entry in unbuilt(bundle.target, {}, bundle.build).files.items()}
    assert planned.keys() == written.keys()
    tensors = 3 * len(target_tensors(bundle.target)) + 8  # scales and smoothing beside each weight
    for file, size in written.items():
        assert size <= planned[file] <= size + ALIGNMENT * tensors
    assert make_plan(FOLDERS / name, [], options(backend)).memory == plan_memory(
        unbuilt(bundle.target, {}, bundle.build)
    )


@pytest.mark.parametrize("name", ALGOS)
def test_a_build_is_estimated_from_above(on_fake: None, tmp_path: Path, name: str) -> None:
    bundle = build(name, tmp_path / "bundle", "onnxruntime")
    source = read_target(FOLDERS / name, quantised=True)
    assert sum(entry.size for entry in bundle.files.values()) <= estimate_bytes(source, [], bundle.build)


@pytest.mark.parametrize(
    ("algo", "group_size", "least", "most"),
    [("W4A16_AWQ", 128, 0.255, 0.275), ("W8A16", None, 0.5, 0.51), ("FP8", None, 0.5, 0.51)],
)
def test_a_plan_counts_the_bits_of_the_weights(
    tmp_path: Path, algo: QuantAlgo, group_size: int | None, least: float, most: float
) -> None:
    """Against the same model in bfloat16: the linear layers are most of a wide decoder."""
    make_target(tmp_path, hidden_size=1024, intermediate_size=4096, num_hidden_layers=2)
    plain, quantisation = read_target(tmp_path).spec, QuantSpec(algo, group_size, ())
    few = planned(dataclasses.replace(plain, quantisation=quantisation), algo)
    assert least < few / planned(plain, "float") < most


def planned(target: TargetSpec, form: TargetWeights) -> int:
    """Bytes of the target's decoder in a build for TensorRT-RTX."""
    made = BuildSpec("tensorrt-rtx", "bfloat16", 2, 40, 96, 256, form, "float", False)
    return plan_memory(unbuilt(target, {}, made)).target_weights


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ALGOS)
def test_graphs_for_tensorrt_pass_the_self_check(on_fake: None, tmp_path: Path, name: str, dtype: Any) -> None:
    bundle = build(name, tmp_path / "bundle", "tensorrt", "layer", dtype=dtype)
    errors = bundle.self_check["errors"]
    assert {"target.layers.0", "target.layers.1.far", "target.head.logits"} <= errors.keys()
    assert max(errors.values()) < (4e-2 if name == "int8" else 1e-2)  # smoothed in half precision: other levels
    assert bundle.self_check["engines"] == "not run"
    graph = onnx.load(str(bundle.graph_path(c.TARGET, None)), load_external_data=False).graph
    nodes = Counter(node.op_type for node in graph.node)
    rounded = 7 if name in ("fp8", "int8") else 0  # qkv, o, gate and up, down in two layers; one of the downs is float
    assert (nodes["DequantizeLinear"], nodes["QuantizeLinear"]) == (7 + rounded, rounded)


def test_a_wrong_scale_does_not_pass_the_self_check(
    monkeypatch: pytest.MonkeyPatch, on_fake: None, tmp_path: Path
) -> None:
    right = quantised.stacked_scale
    monkeypatch.setattr(quantised, "stacked_scale", lambda layers: right(layers) * 2)
    with pytest.raises(UserError, match=r"self-check: target.layers.0 differs from the reference"):
        build("int8", tmp_path / "bundle", "tensorrt", "layer")


def test_dequantising_layers_that_get_lost_are_noticed(
    monkeypatch: pytest.MonkeyPatch, on_fake: None, tmp_path: Path
) -> None:
    monkeypatch.setitem(fakegpu.builder.LAYERS, "DequantizeLinear", "SCALE")
    with pytest.raises(UserError, match=r"engine target: its network has 0 dequantising layers, not 14"):
        build("fp8", tmp_path / "bundle", "tensorrt")


# -- refusals ----------------------------------------------------------------------------------------------------------


def refusal(output: Path, name: str, backend: str, **given: Any) -> str:
    with pytest.raises(UserError) as raised:
        build(name, output, backend, **given)
    assert "\n" not in str(raised.value)
    assert not output.exists()
    return str(raised.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_quantised_weights_are_not_quantised_again(on_fake: None, tmp_path: Path, backend: str) -> None:
    line = refusal(tmp_path / "bundle", "int4_awq", backend, target_weights="int8")
    assert line == "--target-weights: int8; the target's are W4A16_AWQ already; leave it out"


@pytest.mark.parametrize("on_fake", ["8.0", "8.6"], indirect=True)
def test_fp8_needs_a_gpu_that_computes_it(on_fake: None, tmp_path: Path) -> None:
    line = refusal(tmp_path / "bundle", "fp8", "tensorrt")
    assert line.startswith("target: its weights are FP8, which Fake RTX of compute capability 8.")
    assert "needed: 8.9 or later" in line
    build("int8", tmp_path / "bundle", "tensorrt")
    build("int4_awq", tmp_path / "other", "tensorrt")


@pytest.mark.parametrize("on_fake", ["7.5"], indirect=True)
def test_int4_needs_a_gpu_that_computes_it(on_fake: None, tmp_path: Path) -> None:
    assert "its weights are W4A16_AWQ" in refusal(tmp_path / "bundle", "int4_awq", "tensorrt", dtype="float16")


def test_fp8_engines_cannot_be_for_every_ampere_gpu(on_fake: None, tmp_path: Path) -> None:
    engine = EngineOptions(no_plugin=True, hardware_compatibility="ampere_plus")
    line = refusal(tmp_path / "bundle", "fp8", "tensorrt", engine=engine)
    assert line.startswith("--hardware-compatibility: ampere_plus, but FP8 needs compute capability 8.9; allowed")
    build("int8", tmp_path / "bundle", "tensorrt", engine=engine)


def test_int4_groups_are_of_the_sizes_that_tensorrt_takes(
    on_fake: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt.TensorRT, "group_sizes", (64, 128))
    line = refusal(tmp_path / "bundle", "int4_awq", "tensorrt")
    assert line.startswith("target: its int4 weights share scales in groups of 16; allowed on tensorrt: 64 or 128;")


def test_a_folder_that_is_not_covered_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = copy_folder("fp8", tmp_path / "target")
    (folder / SAID).write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(UserError, match=r"quantization_config.quant_algo is 'FP8'; allowed: 'NVFP4', as in hf_quant"):
        build_bundle(folder, [], tmp_path / "bundle", options("onnxruntime"))
    assert not (tmp_path / "bundle").exists()
