"""TensorRT-RTX compiles the whole pair ahead of time, without a GPU: a real parser and a real builder.

Skipped where the package is missing (pip install '.[test-tensorrt]'), unless DFLOW_REQUIRE_RTX=1, which test.sh
--toolchain sets. Every engine is built in a process of its own. The C++ plugins are inside where their library can be
built; without it their ONNX bodies are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import plugin_toolchain
import pytest
from onnx import TensorProto
from pairs import FLOW
from tiny import make_drafter, make_target

from dflow_trt.api import LLM
from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.bundle import Bundle, open_bundle
from dflow_trt.compile.backends import BACKENDS
from dflow_trt.compile.base import EngineOptions
from dflow_trt.compile.engine import EngineJob
from dflow_trt.compile.tensorrt import plugin_library
from dflow_trt.compile.tensorrt_rtx import TensorRTRTX
from dflow_trt.errors import UserError
from dflow_trt.runtime.ort import OrtRuntime

CAPABILITY = "8.9"
REQUIRED = os.environ.get("DFLOW_REQUIRE_RTX", "0") not in ("", "0")

if importlib.util.find_spec("tensorrt_rtx") is None:
    if REQUIRED:
        raise ModuleNotFoundError("tensorrt_rtx: DFLOW_REQUIRE_RTX=1 asks for it; pip install '.[test-tensorrt]'")
    pytest.skip("tensorrt_rtx is missing; pip install '.[test-tensorrt]'", allow_module_level=True)


@pytest.fixture(scope="module")
def plugin() -> Path | None:
    """The library of the C++ plugins; where it cannot be built the one at its usual place, or None."""
    try:
        return plugin_toolchain.plugin_library()
    except pytest.skip.Exception:
        return plugin_library() if plugin_library().is_file() else None


@pytest.fixture(scope="module")
def compiled(example_folder: Path, plugin: Path | None) -> Bundle:
    """The example, and beside drafters of its own tiny random ones of other kinds."""
    target = json.loads((example_folder / "target" / "config.json").read_text())
    for name in ("domino", "dflash2"):
        keys: dict[str, Any] = {name: {}, "taps": (1, 3), "num_hidden_layers": 1}
        make_drafter(example_folder / name, {"bos_token_id": 0, **target}, **keys)
    make_target(example_folder / "small", vocab_size=target["vocab_size"], num_hidden_layers=1, tied=True)
    shutil.copyfile(example_folder / "target" / "tokenizer.json", example_folder / "small" / "tokenizer.json")
    sources = [DrafterSource(example_folder / name) for name in ("dflash", "dflow", "domino", "dflash2", "small")]
    sources += [DrafterSource(example_folder / "eagle3"), DrafterSource(Path("ngram"))]
    engine = EngineOptions(plugin=plugin, no_plugin=plugin is None, compute_capabilities=(CAPABILITY,))
    options = BuildOptions("tensorrt-rtx", max_batch_size=4, max_input_len=512, max_seq_len=704, engine=engine)
    return build_bundle(example_folder / "target", sources, example_folder / "rtx", options)


def test_all_engines_of_the_example_are_compiled(compiled: Bundle, plugin: Path | None) -> None:
    bundle = open_bundle(compiled.path)
    engines = {bundle.engine_path(contract.engine, name).name: contract for name, contract in bundle.contracts()}
    assert len(engines) == 16
    assert bundle.engines.keys() == engines.keys()
    for name, entry in bundle.engines.items():
        assert entry.build_seconds > 0
        assert entry.builder_memory > 50 << 20
        assert entry.plugins == (engines[name].plugins if plugin else ())
        assert bundle.files[name].size > 100_000


def test_a_bundle_has_engines_instead_of_graphs(compiled: Bundle, plugin: Path | None) -> None:
    suffixes = {Path(name).suffix for name in compiled.files if "/" not in name}
    assert suffixes == ({".engine", ".so"} if plugin else {".engine"})
    files = {str(p.relative_to(compiled.path)) for p in compiled.path.rglob("*") if p.is_file()}
    assert files == {*compiled.files, "dflow.json"}


def test_the_manifest_says_for_what_the_engines_are(compiled: Bundle, plugin: Path | None) -> None:
    notes = compiled.built_with
    assert notes["tensorrt_rtx"].count(".") == 3
    assert (notes["gpu"], notes["compute_capability"]) == ("", CAPABILITY)
    assert notes["plugin"] == ("1" if plugin else "none")
    assert (compiled.build.dtype, compiled.build.draft_weights) == ("bfloat16", "float")
    assert compiled.self_check["engines"] == "not run"
    assert max(compiled.self_check["errors"].values()) < 1e-2


def test_the_wrong_runtime_says_so_in_one_line(compiled: Bundle) -> None:
    with pytest.raises(
        UserError, match="engines are for tensorrt-rtx, this runtime runs onnxruntime; open it with LLM"
    ):
        OrtRuntime(compiled)


def test_without_a_gpu_the_bundle_says_what_is_missing(compiled: Bundle) -> None:
    with pytest.raises(UserError, match=r"^cuda: "):
        LLM(compiled.path)


# -- what is refused ---------------------------------------------------------------------------------------------------


class Captured(Exception):
    """Carries the job of the first engine instead of building it."""


@pytest.fixture(scope="module")
def relay_job(tmp_path_factory: pytest.TempPathFactory) -> EngineJob:
    """A small engine with a plugin node, ready to be built; its bundle stays in the folder."""
    folder, jobs = tmp_path_factory.mktemp("relay"), list[EngineJob]()
    config = make_target(folder / "target", vocab_size=256)
    make_drafter(folder / "flow", config, **FLOW)

    class Capturing(TensorRTRTX):
        def compile(self, bundle: Bundle, note: Any) -> Bundle:
            machine = self._machine(bundle.build)
            found = {c.engine: self._job(bundle, name, c, machine, None) for name, c in bundle.contracts()}
            jobs.append(found["relay"])
            raise Captured

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKENDS, "tensorrt-rtx", Capturing)
        patch.setattr("dflow_trt.build._staged", lambda output: contextlib.nullcontext(folder))
        engine = EngineOptions(no_plugin=True, compute_capabilities=(CAPABILITY,))
        with pytest.raises(Captured):
            build_bundle(
                folder / "target",
                [DrafterSource(folder / "flow")],
                folder / "bundle",
                BuildOptions("tensorrt-rtx", engine=engine),
            )
    return jobs[0]


def refusal(job: EngineJob) -> str:
    with pytest.raises(UserError) as raised:
        TensorRTRTX(EngineOptions())._run(job)
    assert "\n" not in str(raised.value)
    assert not Path(job.engine).exists()
    return str(raised.value)


def changed(job: EngineJob, **changes: Any) -> EngineJob:
    return dataclasses.replace(job, **changes)


def test_a_plugin_that_is_not_registered_is_refused(relay_job: EngineJob, tmp_path: Path) -> None:
    (tmp_path / "empty.so").write_bytes(b"")
    line = refusal(changed(relay_job, plugin=str(tmp_path / "empty.so")))
    assert "empty.so: does not give the plugin dflow::RelayInject version 1; make it with build_scripts" in line


def test_a_body_in_the_place_of_a_plugin_is_noticed(relay_job: EngineJob, plugin: Path | None) -> None:
    if plugin is None:
        pytest.skip("the plugin library cannot be built here")
    model = onnx.load(relay_job.graph, load_external_data=False)
    for node in model.graph.node:
        kept = [each for each in node.attribute if not each.name.startswith("plugin_")]
        del node.attribute[:]
        node.attribute.extend(kept)
    line = refusal(changed(relay_job, graph=saved(relay_job, model), plugin=str(plugin)))
    assert "its network has 0 C++ plugins, not 1 (RelayInject)" in line


def saved(job: EngineJob, model: onnx.ModelProto) -> str:
    """Beside the graph, as its weights lie there."""
    path = Path(job.graph).with_name("changed.onnx")
    path.write_bytes(model.SerializeToString())
    return str(path)


def test_a_plugin_is_found_by_its_name_alone(
    relay_job: EngineJob, plugin: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name without a folder is a file here, not one of the library path."""
    if plugin is None:
        pytest.skip("the plugin library cannot be built here")
    monkeypatch.chdir(plugin.parent)
    TensorRTRTX(EngineOptions())._run(changed(relay_job, plugin=plugin.name, engine=str(tmp_path / "relay.engine")))
    assert (tmp_path / "relay.engine").is_file()


def test_another_dtype_than_the_contract_s_is_refused(relay_job: EngineJob) -> None:
    model = onnx.load(relay_job.graph, load_external_data=False)
    for value in model.graph.input:
        if value.name == "block_ids":
            value.type.tensor_type.elem_type = TensorProto.INT32
    line = refusal(changed(relay_job, graph=saved(relay_job, model)))
    assert "its network has block_ids as DataType.INT32, not int64" in line


def test_another_set_of_tensors_is_refused(relay_job: EngineJob) -> None:
    line = refusal(changed(relay_job, outputs={**relay_job.outputs, "gate": "float32"}))
    assert "its network has the tensors ['block_embeds'], not ['block_embeds', 'gate']" in line


def test_a_shape_that_the_graph_does_not_have_is_refused(relay_job: EngineJob) -> None:
    wrong = {**relay_job.profiles[0], "block_ids": ((1, 5), (4, 5), (8, 5))}
    line = refusal(changed(relay_job, profiles=(wrong,)))
    assert line.startswith("engine dflow.relay: tensorrt-rtx refuses it: it cannot be built (")
    assert "profile has min=5, opt=5, max=5 but tensor has 8" in line


def test_a_best_shape_above_the_largest_is_refused(relay_job: EngineJob) -> None:
    wrong = {name: (least, most, best) for name, (least, best, most) in relay_job.profiles[0].items()}
    assert "engine dflow.relay: tensorrt-rtx refuses profile 1 (" in refusal(changed(relay_job, profiles=(wrong,)))


def test_a_graph_that_cannot_be_parsed_is_one_line(relay_job: EngineJob) -> None:
    model = onnx.load(relay_job.graph, load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type == "Sigmoid")
    node.op_type = "Sigmoidal"
    line = refusal(changed(relay_job, graph=saved(relay_job, model)))
    assert f"engine dflow.relay: tensorrt-rtx refuses it: {node.name}: " in line


def test_a_builder_that_dies_is_an_error_message(relay_job: EngineJob) -> None:
    assert "the builder of nowhere ended with code" in refusal(changed(relay_job, backend="nowhere"))


def test_gpus_that_cannot_be_compiled_for_are_named(tmp_path: Path) -> None:
    for dtype, named in (("bfloat16", ()), ("float16", ()), ("float16", ("7.5",))):
        build: Any = SimpleNamespace(dtype=dtype, target_weights="float")
        found = TensorRTRTX(EngineOptions(compute_capabilities=named))._compute_capabilities(build)
        assert found[0] == (named or ("8.0",))[0]
    for dtype, capability in (("bfloat16", "7.5"), ("bfloat16", "9.0"), ("float16", "sm_89")):
        engine = EngineOptions(no_plugin=True, compute_capabilities=(capability,))
        make_target(tmp_path / dtype / capability)
        options: Any = BuildOptions("tensorrt-rtx", dtype=dtype, engine=engine)
        with pytest.raises(UserError, match=rf"--compute-capability: {capability} in {dtype}; allowed: .*8\.9"):
            build_bundle(tmp_path / dtype / capability, [], tmp_path / "bundle", options)
