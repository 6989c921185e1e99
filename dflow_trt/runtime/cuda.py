"""CUDA through ``cuda-bindings``: memory, one stream, events, graphs. Every call is checked.

Nothing here knows of engines: it works alone on any GPU. Importing this module needs neither CUDA nor its bindings.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any, Self

import numpy as np

from dflow_trt.errors import UserError

ALIGNMENT = 256  # of what CUDA allocates, and of every address that TensorRT takes

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class CudaError(RuntimeError):
    """A CUDA call that failed, under CUDA's name for the error."""

    def __init__(self, call: str, name: str, meaning: str) -> None:
        super().__init__(f"{call}: {name} ({meaning})")
        self.name = name


class OutOfMemory(CudaError):
    """No room on the GPU, or none for pinned memory on the host."""


@cache
def _api() -> Any:
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        raise UserError(
            "cuda: the Python package cuda-bindings is missing; in the checkout: pip install '.[tensorrt]'"
        ) from None


def _call(name: str, *arguments: Any) -> Any:
    """The result of a CUDA call; raises CudaError (OutOfMemory) where its status is another than success."""
    api = _api()
    status, *results = getattr(api, name)(*arguments)
    if status != api.cudaError_t.cudaSuccess:
        raise _error(name, status)
    return results[0] if len(results) == 1 else tuple(results)


def _error(call: str, status: Any) -> CudaError:
    api = _api()
    api.cudaGetLastError()  # forgets it: a kernel launch later on would report it as its own
    name, meaning = (api.cudaGetErrorName(status)[1], api.cudaGetErrorString(status)[1])
    kind = OutOfMemory if status == api.cudaError_t.cudaErrorMemoryAllocation else CudaError
    return kind(call, name.decode(), meaning.decode())


def check_status(call: str, status: int) -> None:
    """For C code besides the bindings: raises CudaError unless its status, a cudaError_t, is success."""
    if status:
        raise _error(call, _api().cudaError_t(status))


# -- the device --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """A GPU. compute_capability: as in "8.9". free: bytes that nobody had taken when this was asked."""

    name: str
    compute_capability: str
    memory: int
    free: int


def current_device() -> Device:
    """The GPU that this thread works on. UserError where there is none, or no driver for it."""
    try:
        properties = _call("cudaGetDeviceProperties", _call("cudaGetDevice"))
        free, memory = _call("cudaMemGetInfo")
    except CudaError as error:
        raise UserError(f"cuda: no usable GPU ({error}); needed: an NVIDIA GPU and its driver") from error
    return Device(properties.name.decode(), f"{properties.major}.{properties.minor}", memory, free)


def versions() -> tuple[str, str]:
    """(the newest CUDA that the driver supports, or "0.0" without a driver; the CUDA of the bindings)."""
    numbers = (_call("cudaDriverGetVersion"), _call("cudaRuntimeGetVersion"))
    driver, runtime = (f"{number // 1000}.{number % 1000 // 10}" for number in numbers)
    return driver, runtime


# -- what is owned -----------------------------------------------------------------------------------------------------


class _Owned:
    """Something of CUDA's that is released once: by :meth:`close`, or at the end of a ``with``."""

    _release: str

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            _call(self._release, handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class DeviceMemory(_Owned):
    """``size`` bytes on the GPU, at ``address``; what they hold is anything."""

    _release = "cudaFree"

    def __init__(self, size: int) -> None:
        super().__init__(_call("cudaMalloc", size))
        self.address, self.size = int(self._handle), size


class PinnedMemory(_Owned):
    """``size`` bytes of the host that the GPU reads and writes on its own; zeroed. ``bytes`` dies with the memory."""

    _release = "cudaFreeHost"

    def __init__(self, size: int) -> None:
        super().__init__(_call("cudaHostAlloc", size, 0))
        self.address, self.size = int(self._handle), size
        self.bytes: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.address))
        self.bytes[:] = 0

    def view(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, np.dtype[Any]]:
        """An array that lies ``offset`` bytes into the memory."""
        size = int(np.prod(shape)) * dtype.itemsize
        return self.bytes[offset : offset + size].view(dtype).reshape(shape)


class Event(_Owned):
    """A point in a stream. With ``timing``, two of them give the milliseconds between."""

    _release = "cudaEventDestroy"

    def __init__(self, timing: bool = False) -> None:
        api = _api()
        super().__init__(
            _call("cudaEventCreateWithFlags", api.cudaEventDefault if timing else api.cudaEventDisableTiming)
        )

    def record(self, stream: Stream) -> None:
        """Here: behind all that the stream was given."""
        _call("cudaEventRecord", self._handle, stream.handle)

    def wait(self) -> None:
        """Until the stream has come to this point; at once if it was never recorded."""
        _call("cudaEventSynchronize", self._handle)

    def milliseconds_since(self, start: Event) -> float:
        """Both events recorded with ``timing`` and waited for."""
        return float(_call("cudaEventElapsedTime", start._handle, self._handle))


class Graph(_Owned):
    """Work that was recorded from a stream, launched with one call. Addresses and shapes are those of the recording."""

    _release = "cudaGraphExecDestroy"

    def launch(self, stream: Stream) -> None:
        _call("cudaGraphLaunch", self._handle, stream.handle)


@dataclass(frozen=True)
class Box:
    """``depth`` planes of ``height`` rows of ``width`` bytes: what :meth:`Stream.copy_box` copies."""

    width: int
    height: int
    depth: int = 1


@dataclass(frozen=True)
class Place:
    """Where a :class:`Box` lies on the device.

    address: of its first byte. row_step: bytes from row to row. plane_rows: such rows from plane to plane.
    """

    address: int
    row_step: int
    plane_rows: int


class Stream(_Owned):
    """A queue of work for the GPU: what is given first is done first. Only :meth:`synchronize` waits.

    Whatever a call names has to stay as it is until the stream has come to it, pinned memory included.
    """

    _release = "cudaStreamDestroy"

    def __init__(self) -> None:
        super().__init__(_call("cudaStreamCreateWithFlags", _api().cudaStreamNonBlocking))

    @property
    def handle(self) -> Any:
        """CUDA's own, for those calls that take a stream; ``int()`` of it is the pointer."""
        return self._handle

    def copy_in(self, target: DeviceMemory, source: PinnedMemory, size: int) -> None:
        """The first ``size`` bytes, host to device."""
        self._copy(target.address, source.address, size, "cudaMemcpyHostToDevice")

    def copy_out(self, target: PinnedMemory, address: int, size: int) -> None:
        """``size`` bytes from ``address`` on the device to the beginning of ``target``."""
        self._copy(target.address, address, size, "cudaMemcpyDeviceToHost")

    def copy(self, target: int, source: int, size: int) -> None:
        """``size`` bytes from address to address, both on the device."""
        self._copy(target, source, size, "cudaMemcpyDeviceToDevice")

    def _copy(self, target: int, source: int, size: int, kind: str) -> None:
        _call("cudaMemcpyAsync", target, source, size, getattr(_api().cudaMemcpyKind, kind), self._handle)

    def copy_box(self, target: Place, source: Place, box: Box) -> None:
        """As :meth:`copy`, of bytes that do not lie together."""
        api = _api()
        parameters = api.cudaMemcpy3DParms()
        parameters.dstPtr, parameters.srcPtr = _pitched(target, box), _pitched(source, box)
        parameters.extent = api.make_cudaExtent(box.width, box.height, box.depth)
        parameters.kind = api.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        _call("cudaMemcpy3DAsync", parameters, self._handle)

    def fill(self, address: int, value: int, size: int) -> None:
        """``size`` bytes on the device, all of that value."""
        _call("cudaMemsetAsync", address, value, size, self._handle)

    def synchronize(self) -> None:
        """Wait until all is done. An error of any of it is raised here."""
        _call("cudaStreamSynchronize", self._handle)

    def capture(self, work: Callable[[], None]) -> Graph:
        """A graph of what ``work`` gives the stream, none of it being done. Raises CudaError if it cannot be recorded.

        What ``work`` raises passes through; the stream can be used again after either.
        """
        mode = _api().cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        _call("cudaStreamBeginCapture", self._handle, mode)
        try:
            work()
        except BaseException:
            self._drop_capture()
            raise
        recorded = _call("cudaStreamEndCapture", self._handle)
        try:
            return Graph(_call("cudaGraphInstantiate", recorded, 0))
        finally:
            _call("cudaGraphDestroy", recorded)

    def _drop_capture(self) -> None:
        """End a capture that failed halfway; CUDA gives its graph only where the capture itself is still valid."""
        status, recorded = _api().cudaStreamEndCapture(self._handle)
        if status == _api().cudaError_t.cudaSuccess:
            _call("cudaGraphDestroy", recorded)
        else:
            _api().cudaGetLastError()


def _pitched(place: Place, box: Box) -> Any:
    return _api().make_cudaPitchedPtr(place.address, place.row_step, box.width, place.plane_rows)
