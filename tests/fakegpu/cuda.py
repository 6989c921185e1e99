"""``cuda.bindings.runtime`` on the fake GPU: the calls that dflow_trt.runtime.cuda makes."""

from __future__ import annotations

import enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from fakegpu.gpu import FakeStream, Gpu
from fakegpu.signatures import CUDA, RECORDED, check_cuda

DRIVER, RUNTIME = 13000, 13050


class cudaMemcpy3DParms:
    """The fields of a box copy; a name that the real structure lacks is refused."""

    def __setattr__(self, name: str, value: Any) -> None:
        assert name in RECORDED[CUDA]["parameters"], f"cudaMemcpy3DParms has no {name}"
        object.__setattr__(self, name, value)


class _Handle:
    """A stream, an event or a graph as CUDA hands it out: ``int()`` of it is its pointer."""

    def __init__(self, thing: Any, number: int) -> None:
        self.thing, self.number = thing, number

    def __int__(self) -> int:
        return self.number


class _Calls:
    """Each method is a CUDA call: it gives its result, or the name of an error."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.streams = gpu.streams
        self.numbers = iter(range(1, 1 << 30))

    def _handle(self, kind: str, thing: Any) -> _Handle:
        self.gpu.alive[kind] += 1
        return _Handle(thing, next(self.numbers))

    # memory

    def cudaMalloc(self, size: int) -> Any:
        address = self.gpu.allocate(size)
        return "cudaErrorMemoryAllocation" if address is None else address

    def cudaFree(self, address: int) -> None:
        for stream in self.streams.values():
            stream.run()  # freeing waits for the device
        self.gpu.free(address)

    def cudaHostAlloc(self, size: int, flags: int) -> int:
        block = np.full(size, 0xFF, np.uint8)
        self.gpu.pinned[block.ctypes.data] = block
        self.gpu.alive["pinned memory"] += 1
        return int(block.ctypes.data)

    def cudaFreeHost(self, address: int) -> None:
        for stream in self.streams.values():
            stream.run()
        self.gpu.pinned.pop(address)[:] = 0xFF
        self.gpu.alive["pinned memory"] -= 1

    def cudaMemGetInfo(self) -> tuple[int, int]:
        return self.gpu.memory - self.gpu.used, self.gpu.memory

    # copies

    def cudaMemcpyAsync(self, target: int, source: int, size: int, kind: Any, stream: _Handle) -> None:
        to_host, from_host = kind.name.endswith("ToHost"), "HostTo" in kind.name
        into = (self.gpu.pinned_bytes if to_host else self.gpu.bytes)(target, size)
        outof = (self.gpu.pinned_bytes if from_host else self.gpu.bytes)(source, size)
        if to_host:
            self.gpu.copied_out.append(source)
        stream.thing.give(lambda: np.copyto(into, outof))

    def cudaMemsetAsync(self, address: int, value: int, size: int, stream: _Handle) -> None:
        block = self.gpu.bytes(address, size)
        stream.thing.give(lambda: block.fill(value))

    def cudaMemcpy3DAsync(self, parameters: Any, stream: _Handle) -> None:
        assert parameters.kind.name == "cudaMemcpyDeviceToDevice"
        box = parameters.extent
        assert min(box.width, box.height, box.depth) > 0, "a box of nothing"
        rows = [
            (self._row(parameters.dstPtr, box, y, z), self._row(parameters.srcPtr, box, y, z))
            for z in range(box.depth)
            for y in range(box.height)
        ]
        stream.thing.give(lambda: [np.copyto(target, source) for target, source in rows] and None)

    def _row(self, place: Any, box: Any, y: int, z: int) -> Any:
        assert box.width <= place.pitch or box.height * box.depth == 1, "rows that overlap"
        assert box.height <= place.ysize, "planes that overlap"
        return self.gpu.bytes(place.ptr + (z * place.ysize + y) * place.pitch, box.width)

    def make_cudaPitchedPtr(self, pointer: int, pitch: int, xsize: int, ysize: int) -> Any:
        return SimpleNamespace(ptr=pointer, pitch=pitch, xsize=xsize, ysize=ysize)

    def make_cudaExtent(self, width: int, height: int, depth: int) -> Any:
        return SimpleNamespace(width=width, height=height, depth=depth)

    # streams and events

    def cudaStreamCreateWithFlags(self, flags: int) -> _Handle:
        handle = self._handle("stream", FakeStream())
        self.streams[handle.number] = handle.thing
        return handle

    def cudaStreamDestroy(self, stream: _Handle) -> None:
        self.streams.pop(stream.number).run()
        self.gpu.alive["stream"] -= 1

    def cudaStreamSynchronize(self, stream: _Handle) -> None:
        stream.thing.run()

    def cudaEventCreateWithFlags(self, flags: int) -> _Handle:
        return self._handle("event", SimpleNamespace(stream=None, place=0, timed=flags == 0))

    def cudaEventDestroy(self, event: _Handle) -> None:
        self.gpu.alive["event"] -= 1

    def cudaEventRecord(self, event: _Handle, stream: _Handle) -> None:
        assert stream.thing.capture is None, "an event recorded in a capture is a node of its graph"
        event.thing.stream, event.thing.place = stream.thing, stream.thing.given

    def cudaEventSynchronize(self, event: _Handle) -> None:
        if event.thing.stream is not None:
            event.thing.stream.run(event.thing.place)

    def cudaEventElapsedTime(self, start: _Handle, end: _Handle) -> Any:
        timed = start.thing.timed and end.thing.timed
        return float(end.thing.place - start.thing.place) if timed else "cudaErrorInvalidResourceHandle"

    # graphs

    def cudaStreamBeginCapture(self, stream: _Handle, mode: Any) -> None:
        assert stream.thing.capture is None
        stream.thing.capture, stream.thing.broken = [], False

    def cudaStreamEndCapture(self, stream: _Handle) -> Any:
        recorded, stream.thing.capture = stream.thing.capture, None
        assert recorded is not None
        return "cudaErrorStreamCaptureInvalidated" if stream.thing.broken else self._handle("graph", recorded)

    def cudaGraphInstantiate(self, graph: _Handle, flags: int) -> _Handle:
        return self._handle("graph exec", list(graph.thing))

    def cudaGraphDestroy(self, graph: _Handle) -> None:
        self.gpu.alive["graph"] -= 1

    def cudaGraphExecDestroy(self, graph: _Handle) -> None:
        assert not any(stream.waiting for stream in self.streams.values()), "a graph is destroyed that may be running"
        self.gpu.alive["graph exec"] -= 1

    def cudaGraphLaunch(self, graph: _Handle, stream: _Handle) -> None:
        for work in graph.thing:
            stream.thing.give(work)

    # the device

    def cudaGetDevice(self) -> int:
        return 0

    def cudaGetDeviceProperties(self, device: int) -> Any:
        major, minor = map(int, self.gpu.compute_capability.split("."))
        return SimpleNamespace(name=self.gpu.name.encode(), major=major, minor=minor, totalGlobalMem=self.gpu.memory)

    def cudaDriverGetVersion(self) -> int:
        return DRIVER

    def cudaRuntimeGetVersion(self) -> int:
        return RUNTIME


def make_cuda(gpu: Gpu) -> ModuleType:
    """The module. A call gives (status, results..), as the real one does."""
    module, calls = ModuleType("cuda.bindings.runtime"), _Calls(gpu)
    for name, values in RECORDED[CUDA]["enums"].items():
        setattr(module, name, enum.IntEnum(name, values))
    for name, value in RECORDED[CUDA]["numbers"].items():
        setattr(module, name, value)
    for name in (name for name in dir(calls) if name.startswith("cuda")):
        setattr(module, name, _answering(gpu, module, name, getattr(calls, name)))
    for name in ("make_cudaPitchedPtr", "make_cudaExtent"):
        setattr(module, name, _checking(name, getattr(calls, name)))
    errors: Any = module.cudaError_t  # type: ignore[attr-defined]
    module.cudaGetErrorName = lambda status: (errors.cudaSuccess, status.name.encode())  # type: ignore[attr-defined]
    module.cudaGetErrorString = lambda status: (errors.cudaSuccess, b"what it means")  # type: ignore[attr-defined]
    module.cudaGetLastError = lambda: (errors.cudaSuccess,)  # type: ignore[attr-defined]
    module.cudaMemcpy3DParms = cudaMemcpy3DParms  # type: ignore[attr-defined]
    return module


def _checking(name: str, call: Any) -> Any:
    def made(*arguments: Any) -> Any:
        check_cuda(name, arguments)
        return call(*arguments)

    return made


def _answering(gpu: Gpu, module: Any, name: str, call: Any) -> Any:
    def answer(*arguments: Any) -> tuple[Any, ...]:
        check_cuda(name, arguments)
        gpu.calls[name] += 1
        result = _injected(gpu, name) or call(*arguments)
        if isinstance(result, str):
            gpu.events.append(f"{name}: {result}")
            return (module.cudaError_t[result], *_nothing(name))
        if result is None:
            return (module.cudaError_t.cudaSuccess,)
        return (module.cudaError_t.cudaSuccess, *(result if isinstance(result, tuple) else (result,)))

    return answer


def _injected(gpu: Gpu, name: str) -> str | None:
    """The error that a test has ordered for this call."""
    if name not in gpu.fail:
        return None
    left, error = gpu.fail[name]
    gpu.fail[name] = (left - 1, error)
    return error if left == 1 else None


def _nothing(name: str) -> tuple[Any, ...]:
    """What stands for results beside an error."""
    return (None, None) if name == "cudaMemGetInfo" else (None,)
