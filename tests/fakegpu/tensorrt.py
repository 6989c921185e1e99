"""``tensorrt`` on the fake GPU. An engine is a bundle's ONNX graph, run by ONNX Runtime on the fake device's memory.

What TensorRT leaves undefined is refused here: a misaligned or missing address, a cache that is not updated in place,
too little workspace, a capture of a shape that was never run. With ``gpu.dtype`` bfloat16 or float16 the engines' own
tensors have that type on the device and are rounded to it; the arithmetic stays float32.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort

from dflow_trt.runtime.ort import exact_int8
from fakegpu.gpu import ALIGNMENT, FakeStream, Gpu
from fakegpu.signatures import RECORDED, checked

NUMPY = {"INT64": np.int64, "BOOL": np.bool_, "FLOAT": np.float32, "HALF": np.float16, "BF16": ml_dtypes.bfloat16}
ONNX = {"tensor(int64)": "INT64", "tensor(bool)": "BOOL", "tensor(float)": "FLOAT"}
ENGINE_DTYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16"}
ALWAYS_FLOAT32 = ("h", "pending_h")
NARROW = ("HALF", "BF16")


@dataclass(frozen=True)
class _Tensor:
    name: str
    shape: tuple[int | str, ...]
    kind: str


class _File:
    """An engine file: its tensors, and the session that stands for it. Sessions are kept by the test process."""

    _sessions: dict[Any, Any] = {}  # noqa: RUF012 - one process, one cache

    def __init__(self, gpu: Gpu, content: bytes) -> None:
        path = gpu.graphs[content]
        self.name = path.name.removesuffix(".onnx")
        if path not in self._sessions:
            options = ort.SessionOptions()
            options.intra_op_num_threads = options.inter_op_num_threads = 1
            options.log_severity_level = 3
            exact_int8(options)
            self._sessions[path] = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.session = self._sessions[path]
        self.inputs = {i.name: self._tensor(gpu, i) for i in self.session.get_inputs()}
        self.outputs = {o.name: self._tensor(gpu, o) for o in self.session.get_outputs()}
        self.profiles = gpu.profiles[self.name]

    @staticmethod
    def _tensor(gpu: Gpu, value: Any) -> _Tensor:
        kind = ONNX[value.type]
        if kind == "FLOAT" and value.name not in ALWAYS_FLOAT32:
            kind = ENGINE_DTYPES[gpu.dtype]
        return _Tensor(value.name, tuple(value.shape), kind)

    def limits(self, name: str, profile: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        ranges, shape = self.profiles[profile], self.inputs[name].shape
        pairs = [ranges[dim] if isinstance(dim, str) else (dim, dim) for dim in shape]
        return tuple(low for low, _ in pairs), tuple(high for _, high in pairs)


def _alias(output: str) -> str | None:
    """KVCacheUpdate: the input whose buffer an output shares."""
    return output.replace("present_", "past_") if output.startswith("present_") else None


def make_tensorrt(gpu: Gpu, label: str, version: str) -> ModuleType:
    """The module, with the signatures of the bindings recorded under ``label``."""
    recorded = RECORDED[label]
    module: Any = ModuleType("tensorrt")
    for name, members in recorded["enums"].items():
        setattr(module, name, enum.Enum(name, members))
    module.__version__ = version
    severity = enum.Enum("Severity", recorded["severities"])

    class Dims(tuple[int, ...]):
        """A shape as TensorRT gives it."""

    class ILogger:
        Severity = severity

        def __init__(self) -> None: ...

        def log(self, severity: Any, msg: str) -> None:
            raise AssertionError("TensorRT's logger has to be derived from")

    class IPluginRegistry:
        def load_library(self, plugin_path: str) -> object | None:
            gpu.events.append(f"load {plugin_path}")
            if plugin_path in gpu.loaded:
                return None
            gpu.loaded.append(plugin_path)
            return object()

        def get_creator(self, type: str, version: str, plugin_namespace: str = "") -> object | None:
            given = {name for path in gpu.loaded for name in gpu.creators.get(path, ())}
            return object() if f"{plugin_namespace}::{type}/{version}" in given else None

    class Runtime:
        def __init__(self, logger: ILogger) -> None:
            self._logger = logger

        def deserialize_cuda_engine(self, serialized_engine: Any) -> ICudaEngine | None:
            gpu.events.append("deserialize")
            if gpu.memory - gpu.used < len(serialized_engine):
                self._logger.log(severity.ERROR, "[defaultAllocator] Cuda failure: out of memory")
                return None
            if bytes(serialized_engine) not in gpu.graphs:
                self._logger.log(severity.ERROR, "[deserialize] magic tag does not match")
                return None
            return ICudaEngine(_File(gpu, bytes(serialized_engine)), self._logger)

    class ICudaEngine:
        def __init__(self, file: _File, logger: ILogger) -> None:
            self._file, self._logger = file, logger
            self._names = [*file.inputs, *file.outputs]

        @property
        def num_io_tensors(self) -> int:
            return len(self._names)

        @property
        def num_optimization_profiles(self) -> int:
            return len(self._file.profiles)

        @property
        def device_memory_size_v2(self) -> int:
            return gpu.workspace

        def get_tensor_name(self, index: int) -> str:
            return self._names[index]

        def get_tensor_mode(self, name: str) -> Any:
            return module.TensorIOMode.INPUT if name in self._file.inputs else module.TensorIOMode.OUTPUT

        def get_tensor_dtype(self, name: str) -> Any:
            return module.DataType[(self._file.inputs | self._file.outputs)[name].kind]

        def get_tensor_location(self, name: str) -> Any:
            return module.TensorLocation.DEVICE

        def get_aliased_input_tensor(self, name: str) -> str | None:
            return _alias(name)

        def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Any]:
            low, high = self._file.limits(name, profile_index)
            return [Dims(low), Dims(high), Dims(high)]

        def create_execution_context(self, strategy: Any) -> IExecutionContext:
            assert strategy.name == "USER_MANAGED", "every other strategy allocates on its own"
            return IExecutionContext(self._file, self._logger)

    class IExecutionContext:
        def __init__(self, file: _File, logger: ILogger) -> None:
            self._file, self._logger = file, logger
            self._profile: int | None = None
            self._shapes: dict[str, tuple[int, ...]] = {}
            self._addresses: dict[str, int] = {}
            self._workspace: tuple[int, int] | None = None
            self._ran: dict[str, tuple[int, ...]] | None = None

        def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
            self._profile = profile_index
            return 0 <= profile_index < len(self._file.profiles)

        def set_device_memory(self, memory: int, size: int) -> None:
            assert memory % ALIGNMENT == 0
            gpu.bytes(memory, size)
            self._workspace = (memory, size)

        def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
            assert self._profile is not None, "a shape before the profile"
            low, high = self._file.limits(name, self._profile)
            fits = len(low) == len(shape) and all(a <= x <= b for a, x, b in zip(low, shape, high, strict=True))
            if fits:
                self._shapes[name] = shape
            else:
                self._logger.log(severity.ERROR, f"[setInputShape] {name} {shape} is outside of {low}..{high}")
            return fits

        def set_tensor_address(self, name: str, memory: int) -> bool:
            assert memory % ALIGNMENT == 0, f"{self._file.name}: {name} lies at {memory:#x}, not on a boundary of 256"
            self._addresses[name] = memory
            return name in self._file.inputs or name in self._file.outputs

        def execute_async_v3(self, stream_handle: int) -> bool:
            stream: FakeStream = gpu.streams[stream_handle]
            refused = self._refusal(stream)
            if refused:
                self._logger.log(severity.ERROR, f"[enqueueV3] {refused}")
                return False
            if stream.capture is None:
                self._ran = dict(self._shapes)
            call = _Call(gpu, self._file, dict(self._shapes), dict(self._addresses))
            stream.give(call.run)
            return True

        def _refusal(self, stream: FakeStream) -> str | None:
            assert self._workspace is not None, "no device memory"
            assert self._workspace[1] >= gpu.workspace
            missing = (self._file.inputs.keys() - self._shapes) | (
                (self._file.inputs | self._file.outputs).keys() - self._addresses
            )
            assert not missing, f"{self._file.name} is run without {sorted(missing)}"
            if self._file.name in gpu.refuse:
                gpu.refuse[self._file.name] -= 1
                if gpu.refuse[self._file.name] < 0:
                    return "ordered by the test"
            if stream.capture is not None and (self._file.name in gpu.uncapturable or self._ran != self._shapes):
                stream.broken = True
                return "operation not permitted when stream is capturing"
            return None

    registry = IPluginRegistry()
    for cls in (ILogger, IPluginRegistry, Runtime, ICudaEngine, IExecutionContext):
        members = dict(recorded["classes"][cls.__name__])
        if cls in (ICudaEngine, IExecutionContext):
            members["__init__"] = "untyped"  # nobody but TensorRT makes them
        setattr(module, cls.__name__, checked(cls, members))
    module.get_plugin_registry = lambda: registry
    return module  # type: ignore[no-any-return]


class _Call:
    """One run of an engine, with the shapes and addresses that it was enqueued with."""

    def __init__(self, gpu: Gpu, file: _File, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        self.gpu, self.file, self.addresses = gpu, file, addresses
        sizes = dict(self._sizes(shapes))
        self.shapes = {
            tensor.name: tuple(sizes[dim] if isinstance(dim, str) else dim for dim in tensor.shape)
            for tensor in (file.inputs | file.outputs).values()
        }
        for output in file.outputs:
            alias = _alias(output)
            assert alias is None or addresses[alias] == addresses[output], f"{output} is not {alias} in place"

    def _sizes(self, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, int]]:
        sizes: dict[str, int] = {}
        for tensor in self.file.inputs.values():
            for dim, size in zip(tensor.shape, shapes[tensor.name], strict=True):
                if isinstance(dim, str):
                    assert sizes.setdefault(dim, size) == size, f"{self.file.name}: {dim} is {sizes[dim]} and {size}"
        return iter(sizes.items())

    def run(self) -> None:
        """Inputs and outputs that ONNX Runtime cannot take as they are go through float32 copies."""
        binding, copies, outputs = self.file.session.io_binding(), [], []
        for tensor in self.file.inputs.values():
            array = self._array(tensor)
            if tensor.kind in NARROW:
                array = array.astype(np.float32)
                copies.append(array)  # ONNX Runtime is given an address: the array behind it has to stay
            _bind(binding.bind_input, tensor.name, array)
        for tensor in self.file.outputs.values():
            array = self._array(tensor)
            if tensor.kind in NARROW:
                outputs.append((array, np.zeros(array.shape, np.float32)))
                array = outputs[-1][1]
            _bind(binding.bind_output, tensor.name, array)
        self.file.session.run_with_iobinding(binding)
        with np.errstate(over="ignore"):  # the logits of ids that are no tokens become -inf in float16
            for array, wide in outputs:
                array[...] = wide.astype(array.dtype)

    def _array(self, tensor: _Tensor) -> Any:
        return self.gpu.array(self.addresses[tensor.name], self.shapes[tensor.name], NUMPY[tensor.kind])


def _bind(bind: Any, name: str, array: Any) -> None:
    bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
