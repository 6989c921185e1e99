"""The runtime: one stream, every buffer allocated once, a CUDA graph for each decoding shape that recurs.

A call is: wait until the engine's staging memory is free, write its small integers there, launch; where the caller
fetches something, wait for it. What engines leave to each other, and the caches, never cross to the host.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflow_trt import contract as c
from dflow_trt.bundle import Bundle, check_backend
from dflow_trt.errors import UserError
from dflow_trt.runtime.base import Array, Drawer
from dflow_trt.runtime.cuda import Box, CudaError, Event, Graph, Place, Stream
from dflow_trt.runtime.draw import Draw
from dflow_trt.runtime.trt.buffers import (
    DRAWN,
    DRAWS,
    WORKSPACE,
    Buffers,
    Key,
    MemoryNeeds,
    Stage,
    aligned,
    block_name,
    ids,
    numpy_dtype,
    pending_bytes,
    staged,
)
from dflow_trt.runtime.trt.engine import Engine, EngineError
from dflow_trt.runtime.trt.library import Library, plugin_path
from dflow_trt.runtime.trt.sampler import RECORD, DeviceSampler, load_entry, record
from dflow_trt.runtime.trt.shapes import Limits, Padded, Shape, Sizes, dynamic_sizes, padded, shape_of

MAX_CALLS = 512  # call shapes kept with their graphs; the graph of a deep engine takes some hundred kilobytes


@dataclass
class _Call:
    """One padded call shape of one engine: what is bound where, and the graph once there is one.

    inputs: pinned arrays, the first ``staged_bytes`` of the engine's stage. spare_row: where padding rows are written.
    """

    key: Key
    profile: int
    padded: Padded
    shapes: Mapping[str, Shape]
    addresses: Mapping[str, int]
    inputs: Mapping[str, Array]
    staged_bytes: int
    spare_row: int
    graph: Graph | None = None

    def fill(self, slots: range, feeds: Mapping[str, Array]) -> None:
        """The feeds, padded: :mod:`dflow_trt.runtime.trt.shapes` says where padding rows stand and write."""
        first = slots.start - self.padded.window.start
        live = slice(first, first + len(slots))
        for name, array in self.inputs.items():
            if name == c.POSITION_IDS.name:
                array[...] = np.arange(array.shape[1])
                array[live] += feeds[name][:, :1]
            else:
                array[...] = self.spare_row if name == c.WRITE_INDEX.name else 0
                array[(live, *map(slice, feeds[name].shape[1:]))] = feeds[name]


@dataclass(frozen=True)
class _Left:
    """How a drafter's last call lies in its ``h``: its slots, and the rows of each."""

    window: range
    rows: int


class TrtRuntime:
    """:class:`~dflow_trt.runtime.base.Runtime` on TensorRT. Not thread-safe.

    Raises UserError where TensorRT, the GPU, the plugin or an engine is not what the bundle needs, and where the GPU
    has no room; EngineError or CudaError where a call fails all the same: then the runtime can only be closed.
    """

    def __init__(self, bundle: Bundle, slots: int | None = None) -> None:
        check_backend(bundle, "tensorrt", "tensorrt-rtx")
        self.slots = slots or bundle.build.max_batch_size
        self._bundle, self._limits = bundle, Limits.of(bundle, self.slots)
        self._contracts = {(contract.engine, name): contract for name, contract in bundle.contracts()}
        self._calls: OrderedDict[Any, _Call] = OrderedDict()
        self._uncaptured: set[Key] = set()
        self._readers = {
            str(key[1]): contract for key, contract in self._contracts.items() if c.PENDING_H in contract.inputs
        }
        self._left: dict[str, _Left] = {}  # by drafter
        self._passed: Padded | None = None  # and the last target call in the logits
        with ExitStack() as owned:
            library = Library(bundle)
            self._sampler = self._load_sampler()
            self._stream = owned.enter_context(Stream())
            self._engines = {key: self._load(library, key, owned) for key in self._contracts}
            self.buffers = owned.enter_context(closing(Buffers(self._needs(), self._stream)))
            self._stages = {key: Stage(self.buffers, key, each, owned) for key, each in self._contracts.items()}
            self._drawn = owned.enter_context(Event())
            self._start()
            owned.callback(self._drop_calls)
            self._owned = owned.pop_all()

    def _load(self, library: Library, key: Key, owned: ExitStack) -> Engine:
        path, contract = self._bundle.engine_path(*key), self._contracts[key]
        found = library.deserialize(path, self._bundle.files[path.name].sha256)
        engine = Engine(library, found, f"{key[1]}.{key[0]}" if key[1] else key[0], contract, self._bundle.build.dtype)
        owned.callback(engine.close)
        return engine

    def _load_sampler(self) -> DeviceSampler | None:
        """What draws on the device, where the plugin library can; without it logits are fetched."""
        path, target = plugin_path(self._bundle), self._contracts[c.TARGET, None]
        entry = load_entry(path) if path else None
        live = self._bundle.target.live_vocab
        return DeviceSampler(entry, self._bundle.build.dtype, target.static["V"], live) if entry else None

    def _needs(self) -> MemoryNeeds:
        weights = sum(entry.size for entry in self._bundle.files.values())
        workspace = max(engine.workspace_size for engine in self._engines.values())
        draws = RECORD.itemsize if self._sampler else 0
        return MemoryNeeds(self._contracts, self._limits, self._bundle.build.dtype, weights, workspace, draws)

    def _start(self) -> None:
        """What is done once: profiles and workspace, and the cache rows 0..L-1, of which every call takes the first."""
        for engine in self._engines.values():
            engine.prepare(self.buffers[WORKSPACE], self._stream)
        rows = np.arange(self._limits.cache_rows)
        host = self.buffers.pinned(c.KV_INDEX.name)
        host.view(0, rows.shape, rows.dtype)[:] = rows
        self._stream.copy_in(self.buffers[c.KV_INDEX.name], host, rows.nbytes)
        self._stream.synchronize()

    # -- the protocol ------------------------------------------------------------------------------------------------

    def run(
        self, engine: str, drafter: str | None, slots: range, feeds: Mapping[str, Array], fetch: Sequence[str] = ()
    ) -> list[Array]:
        """See :meth:`dflow_trt.runtime.base.Runtime.run`."""
        key = engine, drafter
        sizes = dynamic_sizes(self._contracts[key], {name: array.shape for name, array in feeds.items()})
        call, stage = self._call(key, slots, sizes), self._stages[key]
        stage.done.wait()
        call.fill(slots, feeds)
        self._launch(call)
        for name in fetch:
            self._fetch_wide(call, name)
        stage.done.record(self._stream)
        self._remember(call)
        if fetch:
            stage.done.wait()
        return [self._fetched(call, name, slots, sizes) for name in fetch]

    def _remember(self, call: _Call) -> None:
        """How what the call left on the device lies there."""
        (engine, drafter), contract = call.key, self._contracts[call.key]
        if engine == c.TARGET:
            self._passed = call.padded
        for spec in contract.outputs:
            if spec.name == c.H.name:
                rows = shape_of(contract, spec, call.padded.sizes)[1]
                self._left[str(drafter)] = _Left(call.padded.window, rows)

    def keep_pending(self, drafter: str, rows: Mapping[int, int], slots: range) -> None:
        """See :meth:`dflow_trt.runtime.base.Runtime.keep_pending`."""
        left, contract = self._left[drafter], self._readers[drafter]
        row_bytes, slot_bytes = 4 * contract.static["E"], pending_bytes(contract)
        h, pending = (self.buffers[f"{drafter}.{spec.name}"] for spec in (c.H, c.PENDING_H))
        h_step = left.rows * row_bytes
        for run in _adjacent(rows):
            source = Place(h.address + (run.start - left.window.start) * h_step, h_step, len(run))
            target = Place(pending.address + run.start * slot_bytes, slot_bytes, len(run))
            box = Box(max(rows[slot] for slot in run) * row_bytes, len(run))
            self._stream.copy_box(target, source, box)

    def swap(self, a: int, b: int, rows: int) -> None:
        """See :meth:`dflow_trt.runtime.base.Runtime.swap`."""
        for name in self.buffers.caches:
            self.buffers.exchange(name, a, b, rows)
        for drafter, contract in self._readers.items():
            self.buffers.exchange_pending(f"{drafter}.{c.PENDING_H.name}", pending_bytes(contract), a, b)

    def close(self) -> None:
        """See :meth:`dflow_trt.runtime.base.Runtime.close`."""
        self._owned.close()

    @property
    def drawer(self) -> Drawer | None:
        """:meth:`draw`, where the plugin library has the kernel."""
        return self.draw if self._sampler else None

    def draw(self, draws: Sequence[Draw]) -> Array:
        """The tokens [n] that are drawn from the last target pass; its logits stay where they are.

        See :mod:`dflow_trt.runtime.draw`. Valid until the next call of this method.
        """
        assert self._sampler is not None
        assert self._passed is not None
        window, width = self._passed.window, self._passed.sizes["R"]
        host, ids = self.buffers.pinned(DRAWS), self.buffers.pinned(DRAWN)
        rows = [(each.slot - window.start) * width + each.row for each in draws]
        records = [record(each, row) for each, row in zip(draws, rows, strict=True)]
        host.view(0, (len(draws),), RECORD)[:] = records
        self._stream.copy_in(self.buffers[DRAWS], host, len(draws) * RECORD.itemsize)
        logits, asked, drawn = (self.buffers[name].address for name in (c.LOGITS.name, DRAWS, DRAWN))
        self._sampler.enqueue(logits, asked, len(draws), drawn, self._stream)
        self._stream.copy_out(ids, drawn, len(draws) * 8)
        self._drawn.record(self._stream)
        self._drawn.wait()
        return ids.view(0, (len(draws),), np.dtype(np.int64))

    @property
    def stream(self) -> Stream:
        """Where all of its work is queued, in order: events recorded on it stand between calls."""
        return self._stream

    @property
    def num_graphs(self) -> int:
        """CUDA graphs that stand ready: one a decoding shape that was used, if its engine can be captured."""
        return sum(call.graph is not None for call in self._calls.values())

    # -- calls -------------------------------------------------------------------------------------------------------

    def _call(self, key: Key, slots: range, sizes: Sizes) -> _Call:
        """The call of this shape: made at its first use, kept with its graph."""
        shape = padded(self._limits, slots, sizes)
        lookup = (key, shape.window.start, tuple(shape.sizes.items()))
        found = self._calls.get(lookup)
        if found is None:
            found = self._calls[lookup] = self._make_call(key, shape)
            if len(self._calls) > MAX_CALLS:
                self._drop_calls(len(self._calls) - MAX_CALLS)
        self._calls.move_to_end(lookup)
        return found

    def _make_call(self, key: Key, shape: Padded) -> _Call:
        contract, engine, stage = self._contracts[key], self._engines[key], self._stages[key]
        self._check_room(key, shape.sizes)
        shapes = {spec.name: shape_of(contract, spec, shape.sizes) for spec in contract.inputs}
        cache = (len(shape.window), *(contract.static.get(dim, 0) for dim in "NLD"))
        shapes |= {name: cache for name in engine.inputs if name not in shapes}
        addresses = self.buffers.addresses(key, contract, shape.window.start)
        inputs, offset = {}, 0
        for spec in staged(contract):
            inputs[spec.name] = stage.host.view(offset, shapes[spec.name], np.dtype(spec.kind))
            addresses[spec.name] = stage.device.address + offset
            offset += aligned(inputs[spec.name].nbytes)
        written = shapes.get(c.POSITION_IDS.name, (0, 0))[1]
        spare_row = self._limits.cache_rows - written
        return _Call(key, engine.profile_for(shapes), shape, shapes, addresses, inputs, offset, spare_row)

    def _check_room(self, key: Key, sizes: Sizes) -> None:
        """UserError where a call has more rows than the buffers: profiles alone would let B and S be large both."""
        batch, rows, wide = sizes["B"], sizes.get("S", 1), sizes.get("R", 1)
        limits = self._limits
        if batch > limits.slots or batch * rows > limits.rows or batch * wide > limits.slots * limits.verify_rows:
            raise UserError(
                f"engine {self._engines[key].name}: {batch} requests of {rows} rows, {wide} with logits; allowed: "
                f"{limits.slots} requests, {limits.rows} rows in all, {limits.verify_rows} with logits a request; "
                "build with larger limits (--max-batch-size, --max-num-tokens)"
            )

    def _drop_calls(self, count: int | None = None) -> None:
        """Forget calls and their graphs, those first that were not used for the longest time; by default all."""
        self._stream.synchronize()  # a graph may be running
        for _ in range(len(self._calls) if count is None else count):
            _, call = self._calls.popitem(last=False)
            if call.graph is not None:
                call.graph.close()

    def _launch(self, call: _Call) -> None:
        """Run a call by its graph, or step by step; the first time of a decoding shape also records its graph."""
        if call.graph is not None:
            call.graph.launch(self._stream)
            return
        self._engines[call.key].bind(call.profile, call.shapes, call.addresses)
        self._enqueue(call)
        if call.padded.decoding and call.key not in self._uncaptured:
            self._capture(call)

    def _enqueue(self, call: _Call) -> None:
        """Staged inputs in, the engine, ids out."""
        stage = self._stages[call.key]
        self._stream.copy_in(stage.device, stage.host, call.staged_bytes)
        self._engines[call.key].enqueue(call.profile, self._stream)
        for spec in ids(self._contracts[call.key].outputs):
            host = self.buffers.pinned(block_name(call.key, spec))
            self._stream.copy_out(host, call.addresses[spec.name], self._output_bytes(call, spec))

    def _capture(self, call: _Call) -> None:
        """TensorRT can be captured once a shape was run. An engine that refuses is run step by step from then on."""
        try:
            call.graph = self._stream.capture(lambda: self._enqueue(call))
        except (CudaError, EngineError):
            self._uncaptured.add(call.key)

    # -- results -----------------------------------------------------------------------------------------------------

    def _output_bytes(self, call: _Call, spec: c.TensorSpec) -> int:
        shape = shape_of(self._contracts[call.key], spec, call.padded.sizes)
        return math.prod(shape) * numpy_dtype(spec.kind, self._bundle.build.dtype).itemsize

    def _fetch_wide(self, call: _Call, name: str) -> None:
        """Begin to copy logits to the host, where that is what is fetched: ids are copied in every call."""
        spec = self._contracts[call.key].tensor(name)
        if spec.kind != "engine":
            return
        host = self.buffers.pinned(block_name(call.key, spec))
        self._stream.copy_out(host, call.addresses[name], self._output_bytes(call, spec))

    def _fetched(self, call: _Call, name: str, slots: range, sizes: Sizes) -> Array:
        """A host output as the caller asked for it: without padding, logits in float32."""
        contract = self._contracts[call.key]
        spec = contract.tensor(name)
        dtype = numpy_dtype(spec.kind, self._bundle.build.dtype)
        host = self.buffers.pinned(block_name(call.key, spec))
        whole = host.view(0, shape_of(contract, spec, call.padded.sizes), dtype)
        first, wanted = slots.start - call.padded.window.start, shape_of(contract, spec, sizes)
        part = whole[(slice(first, first + wanted[0]), *map(slice, wanted[1:]))]
        return part.astype(np.float32, copy=False) if spec.kind == "engine" else part


def _adjacent(slots: Iterable[int]) -> Iterator[range]:
    """Slots as runs of adjacent ones."""
    for _, group in itertools.groupby(enumerate(sorted(slots)), key=lambda item: item[1] - item[0]):
        run = [slot for _, slot in group]
        yield range(run[0], run[-1] + 1)
