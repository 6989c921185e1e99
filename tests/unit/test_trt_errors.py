"""What may be wrong with a bundle, a machine or a call on TensorRT: one line that says what to do, nothing leaked."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import fakegpu
import numpy as np
import pytest
from fakegpu.bundles import make_jobs, run_jobs, tiny_bundle
from test_trt_runtime import prefill_feeds

from dflow_trt import contract as c
from dflow_trt.bundle import Bundle, FileEntry
from dflow_trt.errors import UserError
from dflow_trt.runtime import cuda
from dflow_trt.runtime.trt import TrtRuntime
from dflow_trt.runtime.trt.engine import EngineError
from dflow_trt.spec import BuildSpec

Open = Callable[..., TrtRuntime]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return tiny_bundle(tmp_path_factory.mktemp("trt"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[fakegpu.Gpu]:
    """A fake GPU; whatever a test does to it, nothing may stay allocated."""
    gpu = fakegpu.Gpu("Fake RTX", "8.9")
    fakegpu.install(monkeypatch, gpu)
    yield gpu
    assert gpu.leaks == {}


@pytest.fixture
def bundle(gpu: fakegpu.Gpu, on_cpu: Bundle) -> Bundle:
    return fakegpu.offer(gpu, on_cpu)


def refusal(bundle: Bundle, kind: type[Exception] = UserError) -> str:
    """The one line with which a bundle is refused."""
    with pytest.raises(kind) as raised:
        TrtRuntime(bundle)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def noted(bundle: Bundle, **notes: str) -> Bundle:
    return replace(bundle, built_with={**bundle.built_with, **notes})


# -- the machine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "notes",
    [
        {"gpu": "NVIDIA H200", "compute_capability": "9.0"},
        {"gpu": "Fake RTX Ti"},
        {"tensorrt": "10.16.1.11"},
        {"tensorrt": "11.2.0.9"},
        {"tensorrt": "10.16.1.11", "later_versions": "yes"},
        {"compute_capability": "9.0", "hardware_compatibility": "same_compute_capability"},
    ],
)
def test_engines_for_another_machine_are_refused_with_the_machine_that_fits_and_the_command(
    bundle: Bundle, notes: dict[str, str]
) -> None:
    other = noted(bundle, **notes)
    line = refusal(other)
    built = other.built_with
    fits = f"{built['gpu']} of compute capability {built['compute_capability']} with version {built['tensorrt']}"
    found = "Fake RTX of compute capability 8.9 with version 11.4.0.106"
    assert f"these tensorrt engines run on {fits}, and this is {found}; rebuild here: " in line
    assert "dflow-trt build --backend tensorrt --target TARGET --drafter DRAFTER --output" in line


@pytest.mark.parametrize(
    "notes",
    [
        {"gpu": "Fake RTX Ti", "hardware_compatibility": "same_compute_capability"},
        {"gpu": "NVIDIA A100", "compute_capability": "8.0", "hardware_compatibility": "ampere_plus"},
        {"gpu": "", "compute_capability": "8.6, 8.9, 12.0"},
        {"tensorrt": "11.2.0.9", "later_versions": "yes"},
    ],
)
def test_engines_that_were_built_for_this_machine_among_others_run(bundle: Bundle, notes: dict[str, str]) -> None:
    TrtRuntime(noted(bundle, **notes)).close()


@pytest.mark.parametrize("note", ["tensorrt", "compute_capability"])
def test_a_manifest_that_does_not_say_what_for_is_refused(bundle: Bundle, note: str) -> None:
    notes = {name: value for name, value in bundle.built_with.items() if name != note}
    assert f"built_with has no '{note}'; build the bundle again" in refusal(replace(bundle, built_with=notes))


def test_without_a_gpu_or_its_driver_the_line_says_so(gpu: fakegpu.Gpu, bundle: Bundle) -> None:
    gpu.fail["cudaGetDevice"] = (1, "cudaErrorInsufficientDriver")
    assert refusal(bundle) == (
        "cuda: no usable GPU (cudaGetDevice: cudaErrorInsufficientDriver (what it means)); "
        "needed: an NVIDIA GPU and its driver"
    )


def test_without_the_bindings_of_cuda_the_line_says_what_to_install(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda._api.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    assert refusal(bundle).endswith("cuda-bindings is missing; in the checkout: pip install '.[tensorrt]'")


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_without_tensorrt_the_line_says_what_to_install(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, backend: Any
) -> None:
    monkeypatch.setitem(sys.modules, backend.replace("-", "_"), None)
    build: BuildSpec = replace(bundle.build, backend=backend)
    line = refusal(replace(bundle, build=build))
    assert re.fullmatch(rf"{backend}: cannot be imported \(.*\); in the checkout: pip install '\.\[{backend}\]'", line)


# -- the files ---------------------------------------------------------------------------------------------------------


def test_the_plugin_is_loaded_before_any_engine(gpu: fakegpu.Gpu, bundle: Bundle) -> None:
    TrtRuntime(bundle).close()
    assert gpu.events[0] == f"load {bundle.path / fakegpu.PLUGIN}"
    assert gpu.events[1:] == ["deserialize"] * 7


def test_two_runtimes_of_one_process_share_the_plugin(bundle: Bundle) -> None:
    """The second load is refused by TensorRT, which knows the plugins already."""
    TrtRuntime(bundle).close()
    TrtRuntime(bundle).close()


def test_a_bundle_without_its_plugin_is_refused(bundle: Bundle) -> None:
    files = {name: entry for name, entry in bundle.files.items() if name != fakegpu.PLUGIN}
    assert "lists no plugin library; build the bundle again" in refusal(replace(bundle, files=files))


@pytest.mark.parametrize("plugin", ["HiddenStateExtract", "RelayInject"])
def test_a_library_that_lacks_a_plugin_is_refused(gpu: fakegpu.Gpu, bundle: Bundle, plugin: str) -> None:
    gpu.creators[str(bundle.path / fakegpu.PLUGIN)].discard(f"dflow::{plugin}/1")
    assert (
        f"does not give the plugin dflow::{plugin} version 1; make it with build_scripts/build_plugins.sh"
        in refusal(bundle)
    )
    assert "deserialize" not in gpu.events


def test_an_engine_with_another_hash_never_reaches_tensorrt(gpu: fakegpu.Gpu, bundle: Bundle) -> None:
    files = {**bundle.files, "target.engine": FileEntry("f" * 64, bundle.files["target.engine"].size)}
    line = refusal(replace(bundle, files=files))
    assert re.search(r"target\.engine: sha256 [0-9a-f]{12}, dflow\.json says ffffffffffff; copy", line)
    assert "deserialize" not in gpu.events


def test_a_plugin_library_with_another_hash_is_never_loaded(gpu: fakegpu.Gpu, bundle: Bundle) -> None:
    (bundle.path / fakegpu.PLUGIN).write_bytes(b"another library")
    assert re.search(r"libdflow_plugins\.so: sha256 [0-9a-f]{12}, dflow\.json says [0-9a-f]{12}; copy", refusal(bundle))
    assert gpu.events == []


def test_an_engine_that_tensorrt_cannot_load_is_refused_with_its_reason(gpu: fakegpu.Gpu, bundle: Bundle) -> None:
    del gpu.graphs[bundle.engine_path("relay", "dflow").read_bytes()]
    line = refusal(bundle)
    assert "dflow.relay.engine: TensorRT cannot load it ([deserialize] magic tag does not match); build" in line


def test_an_engine_that_does_not_fit_is_refused_with_what_to_do(gpu: fakegpu.Gpu, bundle: Bundle) -> None:
    gpu.memory = 1000
    line = refusal(bundle)
    assert (
        "target.engine: TensorRT cannot load it ([defaultAllocator] Cuda failure: out of memory); free memory" in line
    )


def test_an_engine_with_other_tensors_is_refused(gpu: fakegpu.Gpu, bundle: Bundle) -> None:
    relay, context = bundle.engine_path("relay", "dflow"), bundle.graph_path("context", "dflow")
    gpu.graphs[relay.read_bytes()] = context
    assert re.match(r"engine dflow\.relay: the tensor '\w+' is (unknown|missing); it is of another", refusal(bundle))


def test_an_engine_of_another_dtype_is_refused(gpu: fakegpu.Gpu, bundle: Bundle) -> None:
    gpu.dtype = "bfloat16"
    assert re.match(r"engine target: the tensor '\w+' is DataType.BF16, not float32; it is", refusal(bundle))


def test_a_cache_that_is_copied_and_not_updated_in_place_is_refused(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["tensorrt"].ICudaEngine, "get_aliased_input_tensor", lambda self, name: None)  # type: ignore[attr-defined]
    assert "engine target: 'present_k_0' is not 'past_k_0' updated in place" in refusal(bundle)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_no_room_is_explained_with_what_is_wanted(gpu: fakegpu.Gpu, bundle: Bundle) -> None:
    gpu.memory = 2_000_000
    line = refusal(bundle)
    assert re.match(
        r"max_batch_size: no room for target\.cache, 0\.00 GB with 0\.00 GB of the GPU free; wanted: ", line
    )
    assert "KV 0.01 GB for 8 slots, workspace 0.00 GB, state and outputs 0.00 GB; take fewer slots" in line


@pytest.mark.parametrize("call", ["cudaMalloc", "cudaHostAlloc"])
def test_whichever_allocation_fails_nothing_stays_behind(gpu: fakegpu.Gpu, bundle: Bundle, call: str) -> None:
    TrtRuntime(bundle).close()
    count = gpu.calls[call]
    assert count > 8
    for n in range(1, count + 1):
        gpu.fail[call] = (n, "cudaErrorMemoryAllocation")
        assert "no room for" in refusal(bundle)
        assert gpu.leaks == {}, f"allocation {n} of {count}"


@pytest.mark.parametrize("call", ["cudaStreamCreateWithFlags", "cudaEventCreateWithFlags", "cudaMemsetAsync"])
def test_whatever_else_fails_at_the_start_nothing_stays_behind(gpu: fakegpu.Gpu, bundle: Bundle, call: str) -> None:
    gpu.fail[call] = (1, "cudaErrorIllegalAddress")
    assert refusal(bundle, cuda.CudaError) == f"{call}: cudaErrorIllegalAddress (what it means)"


def test_no_pinned_memory_for_logits_fails_the_call_that_asks_for_them(gpu: fakegpu.Gpu, bundle: Bundle) -> None:
    on_gpu = TrtRuntime(bundle)
    gpu.fail["cudaHostAlloc"] = (1, "cudaErrorMemoryAllocation")
    with pytest.raises(UserError, match="no room for logits in pinned host memory"):
        on_gpu.run(c.TARGET, None, range(1), prefill_feeds(np.full((1, 4), 3)), (c.LOGITS.name,))
    assert len(on_gpu.run(c.TARGET, None, range(1), prefill_feeds(np.full((1, 4), 3)), (c.NEXT_IDS.name,))) == 1
    on_gpu.close()


# -- calls -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepted", [0, 1, 7, 20])
def test_a_run_that_tensorrt_refuses_raises_with_its_reason(gpu: fakegpu.Gpu, bundle: Bundle, accepted: int) -> None:
    on_gpu = TrtRuntime(bundle)
    gpu.refuse["target"] = accepted

    def many_shapes() -> None:  # one that recurs would be run by its graph, and TensorRT not asked
        for rows in range(1, 60):
            on_gpu.run(c.TARGET, None, range(1), prefill_feeds(np.full((1, rows), 3)), (c.NEXT_IDS.name,))

    with pytest.raises(EngineError, match=r"^target: TensorRT refuses to run \(\[enqueueV3\] ordered by the test\)$"):
        many_shapes()
    on_gpu.close()


@pytest.mark.parametrize("call", ["cudaGraphLaunch", "cudaEventSynchronize", "cudaMemcpyAsync"])
def test_a_fault_of_the_gpu_raises_by_cudas_name_and_everything_is_released(
    gpu: fakegpu.Gpu, bundle: Bundle, call: str
) -> None:
    on_gpu = TrtRuntime(bundle)
    gpu.fail[call] = (3, "cudaErrorIllegalAddress")
    with pytest.raises(cuda.CudaError, match=f"^{call}: cudaErrorIllegalAddress"):
        run_jobs(bundle, on_gpu, make_jobs(bundle, 6))
    on_gpu.close()


def test_a_capture_that_fails_in_the_driver_leaves_the_engine_to_run_step_by_step(
    gpu: fakegpu.Gpu, bundle: Bundle
) -> None:
    on_gpu = TrtRuntime(bundle)
    gpu.fail["cudaGraphInstantiate"] = (1, "cudaErrorMemoryAllocation")
    feeds = prefill_feeds(np.full((1, 4), 3))
    first, second = (on_gpu.run(c.TARGET, None, range(1), feeds, (c.NEXT_IDS.name,))[0].copy() for _ in range(2))
    assert (first == second).all()
    assert on_gpu.num_graphs == 0
    on_gpu.close()


@pytest.mark.parametrize(
    ("batch", "rows", "logit_rows", "message"),
    [
        (2, 65, 1, r"engine target: 2 requests of 65 rows, 1 with logits; allowed: 8 requests, 64 rows in all, 8 with"),
        (8, 9, 1, r"engine target: 8 requests of 9 rows, 1 with logits; allowed: 8 requests, 64 rows in all"),
        (1, 9, 9, r"engine target: logit_rows is \[1, 9\]; allowed: \[1\.\.8, 1\.\.8\] or \[1\.\.8, 1\]; build with"),
        (1, 64, 2, r"engine target: logit_rows is \[1, 2\]; allowed: \[1\.\.8, 1\.\.8\] or \[1\.\.8, 1\]; build with"),
    ],
)
def test_a_call_beyond_the_profiles_or_the_buffers_is_refused(
    bundle: Bundle, batch: int, rows: int, logit_rows: int, message: str
) -> None:
    on_gpu = TrtRuntime(bundle)
    feeds = prefill_feeds(np.full((batch, rows), 3), logit_rows=logit_rows)
    with pytest.raises(UserError, match=message):
        on_gpu.run(c.TARGET, None, range(batch), feeds, (c.NEXT_IDS.name,))
    on_gpu.close()


def test_closing_twice_is_closing_once(gpu: fakegpu.Gpu, bundle: Bundle) -> None:
    on_gpu = TrtRuntime(bundle)
    on_gpu.close()
    on_gpu.close()
