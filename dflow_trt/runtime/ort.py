"""ONNX Runtime on the CPU: the default runtime, and the reference for every other.

The KV caches are updated in place: one buffer is bound both as ``past_*`` and as ``present_*``. Bindings are cached by
call shape with their small arrays, so that a call in steady state binds and allocates nothing.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort

from dflow_trt import contract as c
from dflow_trt.bundle import Bundle, check_backend
from dflow_trt.errors import UserError
from dflow_trt.runtime.base import Array

NUMPY_KINDS: dict[str, Any] = {"int64": np.int64, "bool": np.bool_, "float32": np.float32, "engine": np.float32}
MAX_THREADS = 512  # far more than cores only slows down, and very many never start
MAX_BINDINGS = 256  # an IoBinding of a deep model holds a few hundred entries

Key = tuple[str, str | None]
Shapes = tuple[Any, ...]


@dataclass
class _Binding:
    """One call shape, ready to run: the arrays that its host tensors are bound to."""

    io: Any
    inputs: dict[str, Array]
    outputs: dict[str, Array]


class OrtRuntime:
    """:class:`~dflow_trt.runtime.base.Runtime` on ONNX Runtime's CPU provider. Not thread-safe."""

    def __init__(
        self,
        bundle: Bundle,
        threads: int | None = None,
        slots: int | None = None,
        engines: Sequence[str] = (c.TARGET, *c.DRAFT_ENGINES),
    ) -> None:
        check_backend(bundle, "onnxruntime")
        self.slots = slots or bundle.build.max_batch_size
        wanted = (item for item in bundle.contracts() if item[1].engine in engines)
        self._contracts = {(contract.engine, name): contract for name, contract in wanted}
        threads = _checked_threads(threads)
        self._sessions = {
            key: _session(bundle, key, _session_options(_engine_threads(contract, threads)))
            for key, contract in self._contracts.items()
        }
        self._bindings: OrderedDict[Shapes, _Binding] = OrderedDict()
        self._scratch: dict[str, Array] = {}
        self._h: dict[str, Array] = {}
        self.caches = {key: self._cache(contract) for key, contract in self._contracts.items()}
        self.pending = {
            str(name): _pending(self.slots, contract)
            for (_, name), contract in self._contracts.items()
            if c.PENDING_H in contract.inputs
        }
        self._share_drafter_caches()

    def _cache(self, contract: c.EngineContract) -> list[Array]:
        """k and v of every layer, [slots,N,L,D], zeroed: masked rows still enter arithmetic."""
        if not contract.cache_layers:
            return []
        shape = (self.slots, contract.static["N"], contract.static["L"], contract.static["D"])
        try:
            return [np.zeros(shape, np.float32) for _ in range(2 * contract.cache_layers)]
        except MemoryError:
            raise UserError(
                f"max_batch_size: no memory for the caches of {self.slots} requests of {shape[2]} rows; take fewer"
            ) from None

    def _share_drafter_caches(self) -> None:
        """Context and drafter engine work on one cache."""
        for name in (name for engine, name in self._contracts if engine == c.CONTEXT):
            self.caches[c.CONTEXT, name] = self.caches[c.DRAFTER, name]

    @property
    def drawer(self) -> None:
        """None: logits are in the host's memory already."""
        return None

    def run(
        self, engine: str, drafter: str | None, slots: range, feeds: Mapping[str, Array], fetch: Sequence[str] = ()
    ) -> list[Array]:
        """See :meth:`dflow_trt.runtime.base.Runtime.run`."""
        binding = self._binding((engine, drafter), slots, feeds, fetch)
        for name, array in feeds.items():
            np.copyto(binding.inputs[name], array)
        self._sessions[engine, drafter].run_with_iobinding(binding.io)
        if c.H.name in binding.outputs:
            self._h[str(drafter)] = binding.outputs[c.H.name]
        return [binding.outputs[name] for name in fetch]

    def keep_pending(self, drafter: str, rows: Mapping[int, int], slots: range) -> None:
        """See :meth:`dflow_trt.runtime.base.Runtime.keep_pending`."""
        h, pending = self._h[drafter], self.pending[drafter]
        for slot, count in rows.items():
            pending[slot, :count] = h[slot - slots.start, :count]

    def swap(self, a: int, b: int, rows: int) -> None:
        """See :meth:`dflow_trt.runtime.base.Runtime.swap`."""
        for (engine, _), caches in self.caches.items():
            if engine == c.CONTEXT:
                continue  # the drafter's, again
            for cache in caches:
                cache[[a, b], :, :rows] = cache[[b, a], :, :rows]
        for pending in self.pending.values():
            pending[[a, b]] = pending[[b, a]]

    def close(self) -> None:
        """See :meth:`dflow_trt.runtime.base.Runtime.close`."""
        self._bindings.clear()
        self._sessions.clear()
        self._scratch.clear()

    def _binding(self, key: Key, slots: range, feeds: Mapping[str, Array], fetch: Sequence[str]) -> _Binding:
        lookup = (key, slots.start, tuple((name, array.shape) for name, array in feeds.items()), tuple(fetch))
        found = self._bindings.get(lookup)
        if found is None:
            sizes = _sizes(self._contracts[key], feeds)
            found = self._bindings[lookup] = self._bind(key, slots, sizes, fetch)
            if len(self._bindings) > MAX_BINDINGS:
                self._bindings.popitem(last=False)
        else:
            self._bindings.move_to_end(lookup)
        return found

    def _bind(self, key: Key, slots: range, sizes: Mapping[str, int], fetch: Sequence[str]) -> _Binding:
        contract = self._contracts[key]
        binding = _Binding(self._sessions[key].io_binding(), {}, {})
        for spec in contract.inputs:
            array = self._array(spec, key, slots, _shape(contract, spec, sizes))
            binding.inputs[spec.name] = array
            _bind_array(binding.io.bind_input, spec.name, array)
        for spec in contract.outputs:
            if spec.home == "device" or spec.name in fetch:
                array = self._array(spec, key, slots, _shape(contract, spec, sizes))
                binding.outputs[spec.name] = array
                _bind_array(binding.io.bind_output, spec.name, array)
        for i, cache in enumerate(self.caches[key]):
            layer, tensor = i // 2, c.CACHE_TENSORS[i % 2]
            rows = cache[slots.start : slots.stop]
            _bind_array(binding.io.bind_input, c.past(tensor, layer), rows)
            _bind_array(binding.io.bind_output, c.present(tensor, layer), rows)
        return binding

    def _array(self, spec: c.TensorSpec, key: Key, slots: range, shape: tuple[int, ...]) -> Array:
        if spec.name == c.PENDING_H.name:
            return self.pending[str(key[1])][slots.start : slots.stop]
        dtype = NUMPY_KINDS[spec.kind]
        if spec.home == "host" and spec.name not in (c.LOGITS.name, c.DRAFT_LOGITS.name):
            return np.zeros(shape, dtype)
        owner = "" if spec.name in (c.HIDDEN.name, c.LOGITS.name) else f".{key[1]}"
        return self._scratch_view(spec.name + owner, shape, dtype)

    def _scratch_view(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """A view of a buffer that all call shapes share; it grows, and bindings keep what they were bound to alive."""
        size = int(np.prod(shape))
        if name not in self._scratch or self._scratch[name].size < size:
            self._scratch[name] = np.zeros(size, dtype)
            self._forget_bindings()
        return self._scratch[name][:size].reshape(shape)

    def _forget_bindings(self) -> None:
        """A buffer has moved: bindings to the old one would no longer meet those to the new one."""
        self._bindings.clear()


def _pending(slots: int, reader: c.EngineContract) -> Array:
    """The h rows that wait for the next draft, [slots,J,E]; zeroed."""
    return np.zeros((slots, reader.static["J"], reader.static["E"]), np.float32)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def _engine_threads(contract: c.EngineContract, threads: int) -> int:
    """No more threads than key/value heads where an engine attends.

    With more, ONNX Runtime splits the product of one head's weights and values among threads and sums it in another
    order from some 128 cache rows on: results would depend on the batch, on the rows of a call and on the machine.
    """
    return min(threads, contract.static["N"]) if c.KV_INDEX in contract.inputs else threads


def _checked_threads(threads: int | None) -> int:
    if threads is None:
        return usable_cores()
    if not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS:
        raise UserError(f"threads: {threads!r}; allowed: 1 to {MAX_THREADS}")
    return threads


def _session_options(threads: int) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Every engine has threads of its own. Left to spin after a call, they take the cores from the next engine: with two
    # threads a round of four engines took 99 ms instead of 35.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    exact_int8(options)
    return options


def exact_int8(options: Any) -> None:
    """Keep int8 products exact on CPUs without VNNI, whose fastest instructions saturate; no change on the others."""
    options.add_session_config_entry("session.x64quantprecision", "1")


def _session(bundle: Bundle, key: Key, options: Any) -> Any:
    path = bundle.engine_path(key[0], key[1])
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the library raises classes of its own
        reason = str(error).splitlines()[0][:200]
        raise UserError(f"{path}: ONNX Runtime cannot load it ({reason}); build the bundle again") from error


def _sizes(contract: c.EngineContract, feeds: Mapping[str, Array]) -> dict[str, int]:
    """The dynamic dimensions of a call, read off its feeds."""
    sizes: dict[str, int] = {}
    for name, array in feeds.items():
        for dim, size in zip(contract.tensor(name).dims, array.shape, strict=True):
            if dim not in contract.static:
                sizes[dim] = size
    return sizes


def _shape(contract: c.EngineContract, spec: c.TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(contract.static[dim] if dim in contract.static else sizes[dim] for dim in spec.dims)


def _bind_array(bind: Any, name: str, array: Array) -> None:
    bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
