"""One TensorRT engine: what it must offer by its contract, its profiles, and an execution context for each of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflow_trt import contract as c
from dflow_trt.errors import UserError
from dflow_trt.runtime.cuda import DeviceMemory, Stream
from dflow_trt.runtime.trt.library import Library
from dflow_trt.runtime.trt.shapes import Shape
from dflow_trt.spec import DType

TYPES: dict[str, str] = {
    "int64": "INT64",
    "bool": "BOOL",
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BF16",
}
"""Our dtypes -> TensorRT's."""


class EngineError(RuntimeError):
    """TensorRT refused a call that by its own rules was right, or failed in it."""


@dataclass(frozen=True)
class Profile:
    """An optimisation profile: the least and the most of every input."""

    index: int
    least: Mapping[str, Shape]
    most: Mapping[str, Shape]

    def admits(self, shapes: Mapping[str, Shape]) -> bool:
        return all(self.admits_one(name, shape) for name, shape in shapes.items())

    def admits_one(self, name: str, shape: Shape) -> bool:
        limits = zip(self.least[name], shape, self.most[name], strict=True)
        return all(least <= size <= most for least, size, most in limits)

    def range_of(self, name: str) -> str:
        limits = zip(self.least[name], self.most[name], strict=True)
        return f"[{', '.join(f'{low}..{high}' if low != high else str(low) for low, high in limits)}]"

    @property
    def volume(self) -> int:
        return sum(math.prod(shape) for shape in self.most.values())


class Engine:
    """A deserialised engine, checked against its contract.

    name: as people know it, e.g. "dflow.relay". dtype: what the contract's kind "engine" means.
    Raises UserError where the engine is another than this version builds.
    """

    def __init__(self, library: Library, engine: Any, name: str, contract: c.EngineContract, dtype: DType) -> None:
        self.name, self.contract, self._library, self._engine = name, contract, library, engine
        self.inputs, self.outputs = tensor_types(contract, dtype)
        self._check_tensors()
        self._check_caches()
        found = [self._profile(index) for index in range(engine.num_optimization_profiles)]
        self.profiles = sorted(found, key=lambda profile: profile.volume)  # the narrowest that admits a call serves it
        self._contexts = {profile.index: self._context(profile.index) for profile in found}
        self._bound: dict[int, object] = {}

    def _check_tensors(self) -> None:
        engine, trt = self._engine, self._library.trt
        found = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
        wanted = self.inputs | self.outputs
        if found != wanted.keys():
            odd = min(found ^ wanted.keys())
            raise self._unfit(f"the tensor {odd!r} is {'unknown' if odd in found else 'missing'}")
        for name, kind in wanted.items():
            mode = trt.TensorIOMode.INPUT if name in self.inputs else trt.TensorIOMode.OUTPUT
            if engine.get_tensor_mode(name) != mode:
                raise self._unfit(f"the tensor {name!r} is an input where an output is wanted, or the reverse")
            if engine.get_tensor_dtype(name) != getattr(trt.DataType, TYPES[kind]):
                raise self._unfit(f"the tensor {name!r} is {engine.get_tensor_dtype(name)}, not {kind}")
            if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
                raise self._unfit(f"the tensor {name!r} is read on the host")

    def _check_caches(self) -> None:
        """A cache has to be updated in place: there is no second buffer for it."""
        for past, present in cache_tensors(self.contract):
            if self._engine.get_aliased_input_tensor(present) != past:
                raise self._unfit(f"{present!r} is not {past!r} updated in place")

    def _unfit(self, found: str) -> UserError:
        return UserError(f"engine {self.name}: {found}; it is of another version, build the bundle again")

    def _profile(self, index: int) -> Profile:
        limits = {name: self._engine.get_tensor_profile_shape(name, index) for name in self.inputs}
        least = {name: tuple(shapes[0]) for name, shapes in limits.items()}
        most = {name: tuple(shapes[2]) for name, shapes in limits.items()}
        return Profile(index, least, most)

    def _context(self, index: int) -> Any:
        """Without memory of its own: engines take turns, so all contexts share one workspace."""
        strategy = self._library.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy)
        if context is None:
            raise EngineError(f"{self.name}: no execution context ({self._library.last_words()})")
        return context

    @property
    def workspace_size(self) -> int:
        """Bytes that the hungriest profile needs while it runs."""
        return int(self._engine.device_memory_size_v2)

    def prepare(self, workspace: DeviceMemory, stream: Stream) -> None:
        """Select every context's profile and give it the workspace. Call this once, before anything is run."""
        for index, context in self._contexts.items():
            if not context.set_optimization_profile_async(index, int(stream.handle)):
                raise EngineError(f"{self.name}: profile {index} was refused ({self._library.last_words()})")
            context.set_device_memory(workspace.address, workspace.size)

    def profile_for(self, shapes: Mapping[str, Shape]) -> int:
        """The profile that serves inputs of these shapes; UserError names the tensor that fits in none."""
        for profile in self.profiles:
            if profile.admits(shapes):
                return profile.index
        widest = self.profiles[-1]
        name = next((name for name, shape in shapes.items() if not widest.admits_one(name, shape)), min(shapes))
        allowed = " or ".join(dict.fromkeys(profile.range_of(name) for profile in self.profiles))
        raise UserError(
            f"engine {self.name}: {name} is {list(shapes[name])}; allowed: {allowed}; build with larger limits"
        )

    def bind(self, profile: int, shapes: Mapping[str, Shape], addresses: Mapping[str, int]) -> None:
        """Give a profile's context the shapes of its inputs and the addresses of all tensors."""
        context = self._contexts[profile]
        if self._bound.get(profile) is addresses:
            return
        self._bound.pop(profile, None)
        for name, shape in shapes.items():
            self._accepted(context.set_input_shape(name, shape), f"the shape {list(shape)} of {name}")
        for name, address in addresses.items():
            self._accepted(context.set_tensor_address(name, address), f"the address of {name}")
        self._bound[profile] = addresses

    def _accepted(self, answer: bool, what: str) -> None:
        if not answer:
            raise EngineError(f"{self.name}: TensorRT refuses {what} ({self._library.last_words()})")

    def enqueue(self, profile: int, stream: Stream) -> None:
        """Run what :meth:`bind` set up, after all that the stream was given before."""
        self._accepted(self._contexts[profile].execute_async_v3(int(stream.handle)), "to run")

    def close(self) -> None:
        """Let go of TensorRT's objects, contexts before their engine."""
        self._contexts.clear()
        self._bound.clear()
        self._engine = None


def cache_tensors(contract: c.EngineContract) -> list[tuple[str, str]]:
    """(input, output) of every cache, layer by layer, k before v."""
    layers = range(contract.cache_layers)
    return [(c.past(tensor, layer), c.present(tensor, layer)) for layer in layers for tensor in c.CACHE_TENSORS]


def tensor_types(contract: c.EngineContract, dtype: DType) -> tuple[dict[str, str], dict[str, str]]:
    """(inputs, outputs) of an engine with their dtypes, caches included."""

    def types(specs: tuple[c.TensorSpec, ...]) -> dict[str, str]:
        return {spec.name: dtype if spec.kind == "engine" else spec.kind for spec in specs}

    caches = cache_tensors(contract)
    inputs = types(contract.inputs) | {past: dtype for past, _ in caches}
    return inputs, types(contract.outputs) | {present: dtype for _, present in caches}
