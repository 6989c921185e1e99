"""The thin layer over CUDA on the fake GPU: the checks that tests/gpu makes on a real one, and its calls."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator

import fakegpu
import pytest
from fakegpu.behaviour import CHECKS
from fakegpu.signatures import CUDA, RECORDED

from dflow_trt.errors import UserError
from dflow_trt.runtime.cuda import CudaError, DeviceMemory, PinnedMemory, Stream, current_device


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[fakegpu.Gpu]:
    gpu = fakegpu.Gpu()
    fakegpu.install(monkeypatch, gpu)
    yield gpu
    assert gpu.leaks == {}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_on_the_fake_gpu(gpu: fakegpu.Gpu, check: Callable[[], None]) -> None:
    check()


def test_nothing_runs_before_somebody_waits(gpu: fakegpu.Gpu) -> None:
    """Otherwise the tests of the runtime could not see it reading too early."""
    with Stream() as stream, PinnedMemory(4) as host, DeviceMemory(4) as memory:
        stream.fill(memory.address, 5, 4)
        stream.copy_out(host, memory.address, 4)
        assert not host.bytes.any()
        stream.synchronize()
        assert host.bytes.all()


def test_a_failure_while_releasing_is_raised_and_the_handle_is_gone(gpu: fakegpu.Gpu) -> None:
    memory = DeviceMemory(16)
    gpu.fail["cudaFree"] = (1, "cudaErrorIllegalAddress")
    with pytest.raises(CudaError, match=r"^cudaFree: cudaErrorIllegalAddress"):
        memory.close()
    memory.close()
    gpu.device.clear()  # the fake still has what could not be freed


PROBE = """
from cuda.bindings import runtime as r
from dflow_trt.runtime import cuda
kinds, parameters = r.cudaMemcpyKind, r.cudaMemcpy3DParms()
parameters.dstPtr = parameters.srcPtr = r.make_cudaPitchedPtr(1024, 8, 8, 4)
parameters.extent, parameters.kind = r.make_cudaExtent(8, 4, 2), kinds.cudaMemcpyDeviceToDevice
stream = r.cudaStream_t(0)
for name, arguments in {
    "cudaMalloc": (16,), "cudaHostAlloc": (16, 0), "cudaMemGetInfo": (),
    "cudaMemcpyAsync": (1024, 2048, 16, kinds.cudaMemcpyHostToDevice, stream), "cudaMemsetAsync": (1024, 0, 3, stream),
    "cudaMemcpy3DAsync": (parameters, stream), "cudaStreamCreateWithFlags": (r.cudaStreamNonBlocking,),
    "cudaEventCreateWithFlags": (r.cudaEventDisableTiming,), "cudaGetDevice": (), "cudaGetDeviceProperties": (0,),
    "cudaStreamBeginCapture": (stream, r.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal),
}.items():
    try:
        cuda._call(name, *arguments)
        print(name, "ran")
    except cuda.CudaError as error:
        print(name, error.name)
print(*cuda.versions())
"""


def test_the_real_bindings_take_the_arguments_that_we_give() -> None:
    """Without a GPU every call fails, but for want of a driver or device and not for its arguments."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        pytest.skip("cuda-bindings is not installed")
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    *calls, versions = probe.stdout.splitlines()
    assert len(calls) == 11
    allowed = {"ran", "cudaErrorInsufficientDriver", "cudaErrorNoDevice", "cudaErrorInvalidValue"}
    assert {line.split()[1] for line in calls} <= allowed
    assert len(versions.split()) == 2


def test_the_fake_offers_no_call_that_the_real_bindings_lack(gpu: fakegpu.Gpu) -> None:
    fake = vars(sys.modules["cuda.bindings.runtime"])
    names = {name for name in fake if name.startswith(("cuda", "make_cuda"))}
    recorded = RECORDED[CUDA]
    assert names <= {*recorded["calls"], *recorded["enums"], *recorded["numbers"], "cudaMemcpy3DParms"}
    assert {*recorded["calls"]} <= names, "and it lacks none that is recorded"


def test_the_fake_is_forgotten_with_its_test() -> None:
    """What is found of CUDA is kept for good: a fake that stayed would be taken for a GPU by the next test."""
    with pytest.MonkeyPatch.context() as patch:
        fakegpu.install(patch, fakegpu.Gpu())
        assert current_device().name == "Fake RTX"
    with contextlib.suppress(UserError):  # there is no GPU
        assert current_device().name != "Fake RTX"
