"""Engines from graphs: profiles, options, refusals, and the builder's calls held against TensorRT's real bindings."""

from __future__ import annotations

import dataclasses
import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import fakegpu
import onnx
import pytest
from fakegpu.builder import STALE, make_builder, told
from onnx import TensorProto
from tiny import make_drafter, make_target

from dflow_trt import contract as c
from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.bundle import Bundle
from dflow_trt.compile import tensorrt
from dflow_trt.compile.base import EngineOptions
from dflow_trt.compile.engine import DIGEST, EngineJob, EngineResult, build_engine, read_job
from dflow_trt.compile.profiles import Profile, check_profile, profiles
from dflow_trt.errors import UserError

LIMITS: dict[str, Any] = {"max_batch_size": 8, "max_input_len": 120, "max_seq_len": 192, "max_num_tokens": 64}
LABELS = ("11.4", "10.16")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    config = make_target(folder / "target", vocab_size=256)
    make_drafter(folder / "flow", config, relay=True)
    return folder


@pytest.fixture
def on_fake(models: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    """A GPU and the builder of a version, in this process."""
    fakegpu.install(monkeypatch, fakegpu.Gpu())
    label = getattr(request, "param", LABELS[0])
    monkeypatch.setitem(sys.modules, "tensorrt", make_builder(fakegpu.VERSIONS[label]))
    monkeypatch.setattr(tensorrt, "run_job", in_this_process)


def in_this_process(job: EngineJob, environment: Any) -> EngineResult:
    return EngineResult("", 1.5, 1 << 20, build_engine(job))


def build(models: Path, output: Path, engine: EngineOptions, **options: Any) -> Bundle:
    given = BuildOptions(backend="tensorrt", engine=engine, **{**LIMITS, **options})
    return build_bundle(models / "target", [DrafterSource(models / "flow")], output, given, self_check="off")


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "plugins.so"
    path.write_bytes(b"code")
    return path


# -- a whole build -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_fake", LABELS, indirect=True)
def test_a_build_calls_nothing_that_these_bindings_lack(
    on_fake: None, models: Path, plugin: Path, tmp_path: Path
) -> None:
    options = EngineOptions(
        plugin, hardware_compatibility="ampere_plus", version_compatible=True, timing_cache=tmp_path / "timings"
    )
    bundle = build(models, tmp_path / "bundle", options)
    target, relay = (told(bundle.engine_path(*key)) for key in ((c.TARGET, None), (c.RELAY, "dflow")))
    assert (target["flags"], relay["flags"]) == (["TF32", "VERSION_COMPATIBLE"], ["VERSION_COMPATIBLE"])
    assert target["typed"] > 0
    assert target["hardware"] == "AMPERE_PLUS"
    assert (len(target["profiles"]), len(relay["profiles"])) == (2, 1)
    assert target["decomposed"] == 0
    notes = bundle.built_with
    assert (notes["gpu"], notes["compute_capability"], notes["plugin"]) == ("Fake RTX", "8.9", "1")
    assert (notes["hardware_compatibility"], notes["later_versions"]) == ("ampere_plus", "yes")
    assert bundle.engines["dflow.relay.engine"].plugins == ("RelayInject",)
    assert "libdflow_plugins.so" in bundle.files


def test_float32_engines_use_no_tf32_and_no_fused_attention(on_fake: None, models: Path, tmp_path: Path) -> None:
    bundle = build(models, tmp_path / "bundle", EngineOptions(no_plugin=True), dtype="float32")
    target = told(bundle.engine_path(c.TARGET, None))
    assert target["flags"] == []
    assert target["decomposed"] == bundle.target.stack.num_layers


def test_graphs_stay_where_they_are_asked_for(on_fake: None, models: Path, tmp_path: Path) -> None:
    kept = build(models, tmp_path / "kept", EngineOptions(no_plugin=True, keep_onnx=True))
    gone = build(models, tmp_path / "gone", EngineOptions(no_plugin=True))
    assert {"target.onnx", "target.data", "vocab.data", "target.engine"} <= kept.files.keys()
    assert not any(name.endswith((".onnx", ".data", ".so")) for name in gone.files)
    assert gone.built_with["plugin"] == "none"


def test_no_graph_has_what_tensorrt_drops_or_refuses(on_fake: None, models: Path, tmp_path: Path) -> None:
    bundle = build(models, tmp_path / "bundle", EngineOptions(no_plugin=True, keep_onnx=True))
    for name, contract in bundle.contracts():
        graph = onnx.load(str(bundle.graph_path(contract.engine, name)), load_external_data=False).graph
        for node in graph.node:
            assert len(node.input) <= 4 or node.op_type != "Attention", "nonpad_kv_seqlen is silently dropped"
            assert not node.input or node.input[-1], "an optional input at the end"
        kinds = {value.type.tensor_type.elem_type for value in graph.input}
        assert TensorProto.INT32 not in kinds
        wide = {"fc.weight", "hidden_norm.weight", "relay_mlp.2.weight", "relay_norm.weight"}
        found = [each for each in graph.initializer if each.name in wide]
        assert all(each.data_type == TensorProto.FLOAT for each in found)
        assert bool(found) == (contract.engine in (c.CONTEXT, c.RELAY))


# -- timings -----------------------------------------------------------------------------------------------------------


def test_timings_are_kept_by_version_and_gpu(on_fake: None, models: Path, tmp_path: Path) -> None:
    options = EngineOptions(no_plugin=True, timing_cache=tmp_path)
    build(models, tmp_path / "bundle", options)
    [file] = tmp_path.glob("*.timings")
    assert file.name == "11.4.0.106-Fake-RTX-8.9-none.timings"
    assert file.read_bytes()[DIGEST:] == b"+" * 4, "one engine went on from where the last one ended"


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 100, sha256(STALE).digest() + STALE])
def test_unreadable_timings_are_ignored_with_one_line(
    on_fake: None, models: Path, tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "some.timings"
    file.write_bytes(content)
    job = dataclasses.replace(captured(models, tmp_path / "kept"), timing_cache=str(file))
    assert build_engine(job) == (f"timing cache: {file} is damaged or of another version, ignored",)
    assert build_engine(job) == ()


def captured(models: Path, output: Path, contract: str = c.RELAY) -> EngineJob:
    """The job of one engine of a bundle that keeps its graphs."""
    bundle = build(models, output, EngineOptions(no_plugin=True, keep_onnx=True))
    backend = tensorrt.TensorRT(EngineOptions(no_plugin=True))
    drafter = None if contract == c.TARGET else "dflow"
    found = next(each for name, each in bundle.contracts() if (name, each.engine) == (drafter, contract))
    return backend._job(bundle, drafter, found, {}, None)


def test_a_job_is_the_same_behind_its_json(on_fake: None, models: Path, tmp_path: Path) -> None:
    job = captured(models, tmp_path / "kept", c.TARGET)
    again = read_job(json.dumps(dataclasses.asdict(job)))
    assert (again.caches, again.inputs, again.label) == (job.caches, job.inputs, "target")


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_cache_that_is_read_twice_is_refused(on_fake: None, models: Path, tmp_path: Path) -> None:
    job = captured(models, tmp_path / "kept", c.TARGET)
    model = onnx.load(job.graph, load_external_data=False)
    model.graph.node.append(onnx.helper.make_node("Abs", ["past_k_1"], ["spare"]))
    onnx.save(model, job.graph)
    with pytest.raises(UserError, match="reads past_k_1 2 times, not once: it would be copied"):
        build_engine(job)


def test_a_cache_that_is_not_updated_in_place_is_refused(on_fake: None, models: Path, tmp_path: Path) -> None:
    job = captured(models, tmp_path / "kept", c.TARGET)
    model = onnx.load(job.graph, load_external_data=False)
    next(node for node in model.graph.node if node.op_type == "TensorScatter").op_type = "Scatter"
    onnx.save(model, job.graph)
    with pytest.raises(UserError, match="engine target: its network updates the caches"):
        build_engine(job)


OPTIONS: list[tuple[EngineOptions, dict[str, Any], str]] = [
    (
        EngineOptions(),
        {"draft_weights": "int8"},
        "--draft-weights: int8 is ONNX Runtime's own form; allowed on tensorrt",
    ),
    (EngineOptions(), {"target_weights": "int8"}, "--target-weights: int8 is ONNX Runtime's own form"),
    (
        EngineOptions(compute_capabilities=("8.9",)),
        {},
        "--compute-capability: tensorrt compiles for the GPU that it runs",
    ),
    (
        EngineOptions(Path("nowhere.so")),
        {},
        "--plugin: nowhere.so: no such file; make it with build_scripts/build_plugins",
    ),
]


@pytest.mark.parametrize(("engine", "options", "line"), OPTIONS)
def test_what_tensorrt_does_not_offer_is_refused(
    on_fake: None, models: Path, tmp_path: Path, engine: EngineOptions, options: dict[str, Any], line: str
) -> None:
    with pytest.raises(UserError) as raised:
        build(models, tmp_path / "bundle", engine, **options)
    assert str(raised.value).startswith(line)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_whole_engines_are_not_checked_here(on_fake: None, models: Path, tmp_path: Path) -> None:
    options = BuildOptions("tensorrt", engine=EngineOptions(no_plugin=True), **LIMITS)
    with pytest.raises(UserError, match=r"--self-check: full runs whole engines, .* allowed on tensorrt: layer, off"):
        build_bundle(models / "target", [], tmp_path / "bundle", options, self_check="full")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_graphs_in_half_precision_pass_the_self_check(on_fake: None, models: Path, tmp_path: Path, dtype: Any) -> None:
    options = BuildOptions("tensorrt", dtype, engine=EngineOptions(no_plugin=True, keep_onnx=True), **LIMITS)
    sources = [DrafterSource(models / "flow")]
    bundle = build_bundle(models / "target", sources, tmp_path / "bundle", options, self_check="layer")
    errors = bundle.self_check["errors"]
    assert 1e-5 < max(errors.values()) < {"bfloat16": 2e-2, "float16": 3e-3}[dtype]
    assert errors["dflow.context.h"] < 1e-6, "fc and hidden_norm are float32 in every build"
    assert bundle.self_check["engines"] == "not run"
    assert not list(bundle.path.glob("*.check.*"))


@pytest.mark.parametrize(("head_dim", "dtype"), [(8, "bfloat16"), (288, "float16"), (36, "bfloat16")])
def test_heads_without_a_fused_attention_are_refused(on_fake: None, tmp_path: Path, head_dim: int, dtype: str) -> None:
    make_target(tmp_path / "target", head_dim=head_dim)
    options: Any = BuildOptions("tensorrt", dtype=dtype, **LIMITS)
    with pytest.raises(UserError, match=f"target: head_dim is {head_dim}; allowed in {dtype}: 16 to 256 in steps of 8"):
        build_bundle(tmp_path / "target", [], tmp_path / "bundle", options)


def test_without_tensorrt_the_line_says_how_to_install_it(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(UserError, match=r"^tensorrt: cannot be imported .*pip install"):
        build(models, tmp_path / "bundle", EngineOptions(no_plugin=True))


# -- profiles ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def target(on_fake: None, models: Path, tmp_path: Path) -> tuple[Bundle, c.EngineContract]:
    bundle = build(models, tmp_path / "bundle", EngineOptions(no_plugin=True))
    return bundle, next(contract for _, contract in bundle.contracts())


def test_profiles_cover_a_verify_pass_and_a_chunk(target: tuple[Bundle, c.EngineContract]) -> None:
    decode, prefill = profiles(*target)
    assert decode["input_ids"] == ((1, 1), (4, 8), (8, 8))
    assert prefill["input_ids"] == ((1, 1), (1, 64), (8, 64))
    assert decode["logit_rows"] == decode["input_ids"]
    assert prefill["logit_rows"] == ((1, 1), (1, 1), (8, 1))
    assert decode["kv_index"] == prefill["kv_index"] == ((64,), (128,), (256,))
    assert decode["past_k_0"] == ((1, 2, 256, 32), (4, 2, 256, 32), (8, 2, 256, 32))


def with_shapes(name: str, *shapes: tuple[int, ...]) -> Any:
    return lambda profile: {**profile, name: shapes}


BROKEN: dict[str, tuple[Any, str]] = {
    "another largest batch": (
        with_shapes("past_v_1", (1, 2, 256, 32), (4, 2, 256, 32), (4, 2, 256, 32)),
        "past_v_1, dimension B: 1..4..4; allowed: 1..4..8, as in input_ids",
    ),
    "more rows than the cache": (
        with_shapes("kv_index", (64,), (128,), (320,)),
        "kv_index, dimension T: 64..128..320; allowed: up to 256, the rows of a cache",
    ),
    "no row at all": (
        with_shapes("kv_index", (0,), (128,), (256,)),
        "0..128..256; allowed: 1 <= least <= best <= most",
    ),
    "the best above the most": (with_shapes("kv_index", (64,), (320,), (256,)), "allowed: 1 <= least <= best <= most"),
    "a cache of another length": (
        with_shapes("past_k_0", (1, 2, 64, 32), (4, 2, 128, 32), (8, 2, 256, 32)),
        "past_k_0, dimension L: 64..128..256; allowed: 256, which is static",
    ),
    "another rank": (with_shapes("kv_index", (1, 64), (1, 128), (1, 256)), "the profile has no kv_index of rank 1"),
    "a missing input": (
        lambda profile: {name: shapes for name, shapes in profile.items() if name != "write_index"},
        "the profile has no write_index of rank 1",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_profiles_that_the_builder_takes_and_should_not_are_refused(
    target: tuple[Bundle, c.EngineContract], name: str
) -> None:
    break_it, line = BROKEN[name]
    broken: Profile = break_it(profiles(*target)[0])
    with pytest.raises(UserError) as raised:
        check_profile(target[1], broken)
    assert line in str(raised.value)
