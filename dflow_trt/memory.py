"""How much memory a bundle needs: weights, KV caches, relay state, the tensors between engines, and their workspace.

All of it is products of shapes: the contract's for what a runtime allocates, the checkpoints' for weights. A bundle
that is not built yet is planned by the same code, through :func:`unbuilt`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from dflow_trt import contract as c
from dflow_trt.bundle import Bundle, FileEntry, engine_file, planned
from dflow_trt.checkpoint.names import EMBEDDING, HEAD, Shapes, linear_layers, target_tensors
from dflow_trt.graphs.builder import NUMPY
from dflow_trt.graphs.kind import Stored, Tables
from dflow_trt.graphs.store import ALIGNMENT
from dflow_trt.kinds import KINDS
from dflow_trt.spec import BuildSpec, DrafterSpec, DType, QuantSpec, StackSpec, TargetSpec, WeightForm

FLOAT32 = NUMPY["float32"].itemsize
ARENA = 2  # what ONNX Runtime's arenas hold for a byte in use: they grow by doubling


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes. Caches are for ``slots`` requests of max_seq_len tokens; an operating system commits them as they fill.

    cache_rows: L, the rows of every cache. vocabulary: embedding and head tables, every copy of them. relay_state:
    ``pending_h``. outputs: ``hidden``, ``h``, block embeddings and logits of the largest calls. All that is exact (for
    weights see :func:`unbuilt`); workspace, what engines hold between their own layers, is an estimate.
    """

    slots: int
    cache_rows: int
    target_weights: int
    draft_weights: int
    vocabulary: int
    target_cache: int
    drafter_cache: int
    relay_state: int
    outputs: int
    workspace: int

    @property
    def weights(self) -> int:
        return self.target_weights + self.draft_weights + self.vocabulary

    @property
    def total(self) -> int:
        state = self.target_cache + self.drafter_cache + self.relay_state
        return self.weights + state + self.outputs + self.workspace

    def per_slot(self, part: int) -> int:
        """The share of one request in a cache or in the relay state."""
        return part // self.slots

    def per_token(self, cache: int) -> int:
        """The share of one cache row, that is of one token of one request."""
        return cache // (self.slots * self.cache_rows)

    def figures(self) -> dict[str, int]:
        """Every field and the sums, for JSON."""
        caches = self.target_cache + self.drafter_cache
        sums = {"cache_per_slot": self.per_slot(caches), "cache_per_token": self.per_token(caches)}
        return dataclasses.asdict(self) | sums | {"weights": self.weights, "total": self.total}


@dataclass(frozen=True)
class DrafterMemory:
    """What one drafter has of a plan's draft_weights (tables of its own among them), drafter_cache and relay_state."""

    weights: int
    cache: int
    relay_state: int


def plan_memory(bundle: Bundle, slots: int | None = None) -> MemoryPlan:
    """The plan for ``slots`` requests in flight, by default the bundle's max_batch_size."""
    slots = slots or bundle.build.max_batch_size
    contracts = list(bundle.contracts())
    calls, data = _Calls(bundle, slots), _data_sizes(bundle)
    drafters = drafter_memory(bundle, slots).values()
    return MemoryPlan(
        slots=slots,
        cache_rows=bundle.cache_rows,
        target_weights=data.get(_data_file(c.TARGET, None), 0),
        draft_weights=sum(each.weights for each in drafters),
        vocabulary=data.get(c.VOCAB_DATA, 0) + _packed_heads(bundle) if _on_cpu(bundle) else _table_copies(bundle),
        target_cache=sum(calls.cache(contract) for _, contract in contracts if contract.engine == c.TARGET),
        drafter_cache=sum(each.cache for each in drafters),
        relay_state=sum(each.relay_state for each in drafters),
        outputs=calls.outputs(contracts),
        workspace=_workspace([calls.workspace(contract, name) for name, contract in contracts], _on_cpu(bundle)),
    )


def drafter_memory(bundle: Bundle, slots: int) -> dict[str, DrafterMemory]:
    """Each drafter's share, by name."""
    calls, data, found = _Calls(bundle, slots), _data_sizes(bundle), dict[str, DrafterMemory]()
    for spec in bundle.specs:
        mine = [contract for name, contract in bundle.contracts() if name == spec.name]
        files = {_data_file(contract.engine, spec.name) for contract in mine} | {f"{spec.name}.{c.VOCAB_DATA}"}
        found[spec.name] = DrafterMemory(
            weights=sum(size for file, size in data.items() if file in files) + _copies(bundle, spec),
            cache=sum(calls.cache(contract) for contract in mine if contract.engine == c.DRAFTER),
            relay_state=sum(calls.tensor(contract, c.PENDING_H) for contract in mine if _is_relay(contract)),
        )
    return found


def _on_cpu(bundle: Bundle) -> bool:
    return bundle.build.backend == "onnxruntime"


def _is_relay(contract: c.EngineContract) -> bool:
    return c.PENDING_H in contract.inputs


def _workspace(engines: Sequence[int], on_cpu: bool) -> int:
    """ONNX Runtime's sessions have an arena each; TensorRT's engines take turns in one workspace."""
    return ARENA * sum(engines) if on_cpu else max(engines)


# -- what a runtime allocates ------------------------------------------------------------------------------------------


class _Calls:
    """Bytes of tensors in the largest calls that the decoder makes."""

    def __init__(self, bundle: Bundle, slots: int) -> None:
        self._bundle, self._slots = bundle, slots
        self._item = NUMPY[bundle.build.dtype].itemsize
        # B x S together: a pass never has more token rows, however they are spread over the slots. One row a slot may
        # be padded to two.
        rows = max(bundle.build.max_num_tokens, 2 * slots)
        self._sizes = {"B": slots, "BS": rows, "R": bundle.verify_rows}

    def tensor(self, contract: c.EngineContract, spec: c.TensorSpec) -> int:
        dims = ["BS", *spec.dims[2:]] if spec.dims.startswith("BS") else list(spec.dims)
        sizes = self._sizes | contract.static
        return prod(sizes[dim] for dim in dims) * (self._item if spec.kind == "engine" else FLOAT32)

    def outputs(self, contracts: Iterable[tuple[str | None, c.EngineContract]]) -> int:
        """What engines hand on, and logits: one buffer for all engines of a drafter. Ids are too small to count."""
        sizes: dict[tuple[str | None, str], int] = {}
        for drafter, contract in contracts:
            for spec in (spec for spec in contract.outputs if spec.kind != "int64"):
                key = drafter, spec.name
                sizes[key] = max(sizes.get(key, 0), self.tensor(contract, spec))
        return sum(sizes.values())

    def cache(self, contract: c.EngineContract) -> int:
        """k and v [slots,N,L,D] of every layer."""
        return 2 * contract.cache_layers * self._live_cache(contract) if contract.cache_layers else 0

    def _live_cache(self, contract: c.EngineContract) -> int:
        """One cache of one layer, filled: [slots,N,L,D]."""
        return self._slots * prod(contract.static[dim] for dim in "NLD") * self._item

    def workspace(self, contract: c.EngineContract, drafter: str | None) -> int:
        """What one engine holds at most at a time: in attention, in its MLP or in its head."""
        rows = self._sizes["BS"] if _takes_passes(contract) else self._slots * contract.static["J"]
        width = contract.static["E"]
        if contract.engine == c.RELAY:
            return FLOAT32 * rows * 8 * width  # block, h, and what the MLP makes of it: three tensors of 2E
        if c.H in contract.outputs and contract.engine == c.CONTEXT and c.KV_INDEX not in contract.inputs:
            heads = contract.static["N"] * contract.static["D"]
            return rows * (FLOAT32 * (contract.static["X"] + width) + self._item * (width + 4 * heads))
        stack = self._bundle.target.stack if drafter is None else self._bundle.drafters[drafter].spec.decoder
        assert stack is not None, "only engines with layers have caches to attend to"
        layers = max(self._attention(contract, stack, rows), self._item * rows * _mlp(stack))
        return max(layers, 2 * self._logits(contract))

    def _logits(self, contract: c.EngineContract) -> int:
        """Logits of a call's every row that gets some."""
        rows = self._sizes["R"] if contract.engine == c.TARGET else contract.static.get("K", 1)
        return self._slots * rows * contract.static["V"] * self._item

    def _attention(self, contract: c.EngineContract, stack: StackSpec, rows: int) -> int:
        """Residual, queries, keys and values, and the live part of a layer's two caches, which is sliced off.

        The folded form also has the keys transposed and the scores, before and after the softmax; the operator keeps
        them to itself, but in float32 it is decomposed into the same.
        """
        heads = (stack.num_heads + 2 * stack.num_kv_heads) * stack.head_dim
        size = self._item * rows * (2 * stack.hidden_size + 2 * heads) + 2 * self._live_cache(contract)
        if _on_cpu(self._bundle) or self._bundle.build.dtype == "float32":
            scores = self._item * rows * stack.num_heads * contract.static["L"]
            size += self._live_cache(contract) + 2 * scores
        return size


def _takes_passes(contract: c.EngineContract) -> bool:
    """Whether its calls have the rows of target passes."""
    return any(spec.dims.startswith("BS") for spec in contract.inputs)


def _mlp(stack: StackSpec) -> int:
    """Elements a row: residual and normed row, gate and up, their product."""
    return 2 * stack.hidden_size + 3 * stack.intermediate_size


# -- weights -----------------------------------------------------------------------------------------------------------

_DATA = ".data"


def unbuilt(target: TargetSpec, drafters: Mapping[str, DrafterSpec], build: BuildSpec) -> Bundle:
    """The bundle that a build would write, as far as a plan reads it: specs, and data files by size.

    The sizes are from above: at most a page (ALIGNMENT bytes) a tensor, and the scales of int8 matrices that lie in the
    graphs, more than what a build writes.
    """
    bundle = planned(target, drafters.values(), build)
    files = {name: FileEntry("", size) for name, size in _data_files(bundle)}
    return dataclasses.replace(bundle, files=files)


def _data_sizes(bundle: Bundle) -> dict[str, int]:
    """Data files by name: those on disk, or, where they went into compiled engines, those that a build would write."""
    if _on_cpu(bundle):
        return {name: entry.size for name, entry in bundle.files.items() if name.endswith(_DATA)}
    return dict(_data_files(bundle))


def _data_file(engine: str, drafter: str | None) -> str:
    return Path(engine_file(engine, drafter)).with_suffix(_DATA).name


def _data_files(bundle: Bundle) -> Iterator[tuple[str, int]]:
    """(name, bytes) of every data file."""
    target, build = bundle.target, bundle.build
    layers = {name: shape for name, shape in target_tensors(target).items() if name not in (EMBEDDING, HEAD)}
    dead = _dead(target, build)
    yield c.VOCAB_DATA, sum(_Tables.of(bundle).sizes.values())
    yield _data_file(c.TARGET, None), _target_layers(bundle, layers) + _rope(bundle, target.stack) + dead
    for name, entry in bundle.drafters.items():
        for engine, data in _stored_by(entry.spec).items():
            if data.tables is not None:
                tables = _Tables(data.tables, build, {build.draft_weights})
                yield f"{name}.{c.VOCAB_DATA}", sum(tables.sizes.values())
            size = _engine(bundle, data)
            if size and data.shared_with is None:
                yield _data_file(engine, name), size


def _stored_by(spec: DrafterSpec) -> dict[str, Stored]:
    """The weights of each engine of a drafter."""
    found: dict[str, Stored] = KINDS[spec.kind].graphs_module().stored(spec)
    return found


def _engine(bundle: Bundle, data: Stored) -> int:
    """Bytes of an engine's weights; vocabulary tables that other engines may read are not among them."""
    build = bundle.build
    size = _stored(data.wide, "float32", "float") + _stored(data.formed, build.dtype, build.draft_weights)
    size += sum(_stored(shapes, dtype or build.dtype, "float") for shapes, dtype in data.kept)
    size += _rope(bundle, data.rope) if data.rope else 0
    size += _dead(bundle.target, build) if data.head else 0
    return size + (_dead(data.tables, build) if data.tables else 0)


def _copies(bundle: Bundle, spec: DrafterSpec) -> int:
    """What a drafter's engines have of its files beside the first that has it.

    TensorRT's engines share nothing; ONNX Runtime's share the files, but each packs its matrices anew.
    """
    shared = [data for data in _stored_by(spec).values() if data.shared_with]
    if _on_cpu(bundle):
        return sum(_stored(data.formed, bundle.build.dtype, bundle.build.draft_weights) for data in shared)
    return sum(_engine(bundle, data) for data in shared)


def _target_layers(bundle: Bundle, shapes: Shapes) -> int:
    """The target's decoder as an engine has it: ONNX Runtime's has quantised layers of the checkpoint in floats."""
    build, quantisation = bundle.build, bundle.target.quantisation
    if quantisation is None:
        return _stored(shapes, build.dtype, build.target_form)
    quantised = [module for module in linear_layers(bundle.target.stack, "model.") if module not in quantisation.kept]
    wide = {name: shape for name, shape in shapes.items() if name.removesuffix(".weight") not in quantised}
    item, size = NUMPY[build.dtype].itemsize, _stored(wide, build.dtype, "float")
    matrices = (shapes[f"{module}.weight"] for module in quantised)
    return size + sum(_quantised(quantisation, shape[0], shape[1], item, _on_cpu(bundle)) for shape in matrices)


def _quantised(spec: QuantSpec, outputs: int, inputs: int, item: int, wide: bool) -> int:
    """One quantised matrix with its scales: of channels in float32, of groups and of input features in ``item`` bytes.

    wide: it lies there as floats.
    """
    smoothing = _pages(item * inputs)
    if wide:
        return _pages(item * outputs * inputs) + smoothing
    scales = FLOAT32 * outputs if spec.group_size is None else item * outputs * inputs // spec.group_size
    return _pages(outputs * inputs * spec.bits // 8) + _pages(scales) + smoothing


def _stored(shapes: Shapes, dtype: DType, form: WeightForm) -> int:
    """Tensors as an engine has them, in whole pages: matrices in their form, int8 with a float32 scale a channel."""
    item = NUMPY[dtype].itemsize
    sizes = (
        prod(shape) + FLOAT32 * shape[0] if form == "int8" and len(shape) > 1 else prod(shape) * item
        for shape in shapes.values()
    )
    return sum(map(_pages, sizes))


def _pages(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _rope(bundle: Bundle, stack: StackSpec) -> int:
    """cos and sin, float32 [L, D / 2] each."""
    return 2 * _pages(FLOAT32 * bundle.cache_rows * stack.head_dim // 2)


def head_forms(build: BuildSpec, specs: Iterable[DrafterSpec]) -> set[WeightForm]:
    """The weight forms in which some engine wants the target's head."""
    borrowed = any("head" in tables for spec in specs for tables in _borrowed(spec))
    return {build.target_form} | ({build.draft_weights} if borrowed else set())


def _borrowed(spec: DrafterSpec) -> list[Tables]:
    """The target's tables that each engine of a drafter reads."""
    found: list[Tables] = KINDS[spec.kind].graphs_module().borrowed(spec)
    return found


def _dead(target: TargetSpec, build: BuildSpec) -> int:
    """The bias [V] of an engine with a head, where some columns are no token."""
    columns = c.vocab_columns(target.vocab_size)
    return _pages(columns * NUMPY[build.dtype].itemsize) if target.live_vocab != columns else 0


class _Tables:
    """A model's vocabulary tables by name, their bytes, and which one is the head in a weight form."""

    def __init__(self, target: TargetSpec, build: BuildSpec, forms: Collection[WeightForm]) -> None:
        elements = c.vocab_columns(target.vocab_size) * target.stack.hidden_size
        tied = target.tied_head and "float" in forms
        embed: DType = build.dtype if tied else target.checkpoint_dtype
        self.heads: dict[WeightForm, str] = {"float": "embed" if tied else "head", "int8": "head_int8"}
        self.sizes = {"embed": _pages(elements * NUMPY[embed].itemsize)}
        if "float" in forms and not tied:
            self.sizes["head"] = _pages(elements * NUMPY[build.dtype].itemsize)
        if "int8" in forms:
            self.sizes["head_int8"] = _pages(elements) + _pages(FLOAT32 * c.vocab_columns(target.vocab_size))

    @classmethod
    def of(cls, bundle: Bundle) -> _Tables:
        """The target's, as the engines of a bundle want them."""
        return cls(bundle.target, bundle.build, head_forms(bundle.build, bundle.specs))


def _packed_heads(bundle: Bundle) -> int:
    """What ONNX Runtime adds to the one file that all engines map: each packs its head anew, the first of a form
    instead of the mapping."""
    tables, build = _Tables.of(bundle), bundle.build
    heads = [each for spec in bundle.specs for each in _borrowed(spec) if "head" in each]
    forms = Counter([build.target_form, *(build.draft_weights for _ in heads)])
    return sum((count - 1) * tables.sizes[tables.heads[form]] for form, count in forms.items())


def _table_copies(bundle: Bundle) -> int:
    """TensorRT's engines share nothing: each holds every table that it reads."""
    tables, build = _Tables.of(bundle), bundle.build
    engines = [{"embed", tables.heads[build.target_form]}]
    names = {"embed": "embed", "head": tables.heads[build.draft_weights]}
    engines += [{names[table] for table in each} for spec in bundle.specs for each in _borrowed(spec)]
    return sum(tables.sizes[name] for names in engines for name in names)


def show_bytes(count: int) -> str:
    """A size for people: 1.2 GB, 340 MB, 12 kB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
