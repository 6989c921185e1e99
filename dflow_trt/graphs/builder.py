"""A thin layer over onnx-ir: named nodes, declared engine tensors, weights by reference, dflow:: local functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from dflow_trt.checkpoint.weights import Weights
from dflow_trt.contract import (
    PLUGIN_DOMAIN,
    PLUGIN_VERSION,
    CacheTensor,
    EngineContract,
    TensorSpec,
    past,
    present,
)
from dflow_trt.graphs.store import WeightFile
from dflow_trt.spec import DType, WeightForm

OPSET = 24
IR_VERSION = 11
INLINE_CHANNELS = 1 << 15  # longer scales, those of a vocabulary, lie in the data file
CONTRIB = "com.microsoft"
NUMPY: dict[DType, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class Lowering:
    """How one topology becomes an engine: the dtype, the weights of its linear layers, the form of attention.

    attention: "fold" is the group-folded MatMul form (its results do not depend on the shape of the call on a CPU),
    "op" is the ONNX Attention operator (what TensorRT wants). packed: whether layers that the checkpoint quantised keep
    their few bits, with operators that widen them; otherwise their weights are stored wide.
    """

    dtype: DType
    weights: WeightForm
    attention: Literal["fold", "op"]
    packed: bool = False


class GraphBuilder:
    """Collects one engine's graph. Values are named by the path of what they are, e.g. ``layers.0.attn.scores``."""

    def __init__(self, contract: EngineContract, lowering: Lowering, source: Weights, store: WeightFile) -> None:
        self.contract = contract
        self.lowering = lowering
        self.source = source
        self.store = store
        self._tape = Tape()
        self._named: dict[str, ir.Value] = {}
        self._functions: list[ir.Function] = []
        self._inputs = {spec.name: self._declare(spec) for spec in contract.inputs}
        self._outputs: dict[str, ir.Value] = {}
        self._caches: list[tuple[ir.Value, ir.Value]] = []

    @property
    def engine_type(self) -> ir.DataType:
        return ir.DataType.from_numpy(NUMPY[self.lowering.dtype])

    def _kind(self, kind: str) -> ir.DataType:
        return self.engine_type if kind == "engine" else ir.DataType[_KINDS[kind]]

    def _declare(self, spec: TensorSpec) -> ir.Value:
        return ir.val(spec.name, self._kind(spec.kind), self.contract.shape(spec))

    def input(self, spec: TensorSpec) -> ir.Value:
        """An input that the contract declares."""
        return self._inputs[spec.name]

    def output(self, spec: TensorSpec, value: ir.Value, dtype: DType | None = None) -> None:
        """Name ``value`` as an output that the contract declares; ``dtype`` where it has another than this engine's."""
        kind = self._kind(spec.kind) if dtype is None else ir.DataType.from_numpy(NUMPY[dtype])
        value.name = spec.name
        value.type, value.shape = ir.TensorType(kind), ir.Shape(self.contract.shape(spec))
        self._outputs[spec.name] = value

    def op(self, name: str, kind: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any) -> ir.Value:
        """One node with one output, both called ``name``. Inputs that are None at the end are left out.

        TensorRT refuses a node with an empty name in their place.
        """
        while inputs and inputs[-1] is None:
            inputs = inputs[:-1]
        attributes = {key: value for key, value in attributes.items() if value is not None}
        value = self._tape.op(kind, inputs, attributes, domain=domain, name=name)
        value.name = name
        return value

    def once(self, name: str, kind: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """:meth:`op`, but the same value for every call with the same name."""
        if name not in self._named:
            self._named[name] = self.op(name, kind, *inputs, **attributes)
        return self._named[name]

    def split(
        self, name: str, x: ir.Value, sizes: Sequence[int], labels: Sequence[str], axis: int = -1
    ) -> Sequence[ir.Value]:
        """Split an axis, by default the last, into labelled parts."""
        outputs = [ir.val(f"{name}.{label}") for label in labels]
        inputs = [x, self.ints(*sizes)]
        return self._tape.op_multi_out("Split", inputs, {"axis": axis}, outputs=outputs, name=f"{name}.split")

    def top_k(self, name: str, x: ir.Value, count: int) -> tuple[ir.Value, ir.Value]:
        """The largest values along the last axis, called ``name``, and their indices; the lower index goes first."""
        outputs = [ir.val(name), ir.val(f"{name}.indices")]
        values, indices = self._tape.op_multi_out(
            "TopK", [x, self.ints(count)], {"axis": -1}, outputs=outputs, name=name
        )
        return values, indices

    def constant(self, name: str, array: np.ndarray[Any, Any]) -> ir.Value:
        """A small initializer that lies in the graph itself; one value a name."""
        if name not in self._named:
            self._named[name] = self._tape.initializer(ir.tensor(array, name=name))
        return self._named[name]

    def ints(self, *values: int) -> ir.Value:
        """A one-dimensional int64 constant."""
        return self.constant("ints." + "_".join(map(str, values)), np.array(values, np.int64))

    def scalar(self, name: str, value: float) -> ir.Value:
        """A scalar constant in the engine's dtype."""
        return self.constant(name, np.array(value, NUMPY[self.lowering.dtype]))

    def weight(self, tensor: ir.TensorProtocol) -> ir.Value:
        """An initializer that lies in a data file; one value a name."""
        name = tensor.name
        assert name is not None
        if name not in self._named:
            self._named[name] = self._tape.initializer(tensor)
        return self._named[name]

    def stored(self, name: str, array: np.ndarray[Any, Any], dtype: DType | None = None) -> ir.Value:
        """Write an array to the data file in the engine's dtype (or the given one) and refer to it."""
        return self.weight(self.store.add(name, array.astype(NUMPY[dtype or self.lowering.dtype])))

    def channel_scale(self, name: str, scale: np.ndarray[Any, Any]) -> ir.Value:
        """float32 scales, one for all or one a channel."""
        return self.constant(name, scale) if scale.size < INLINE_CHANNELS else self.stored(name, scale, "float32")

    def vector(self, name: str, dtype: DType | None = None) -> ir.Value:
        """A whole one-dimensional checkpoint tensor: norms and biases."""
        return self.stored(name, self.source.read(name), dtype)

    def cast(self, name: str, x: ir.Value, dtype: DType) -> ir.Value:
        return self.op(name, "Cast", x, to=int(ir.DataType.from_numpy(NUMPY[dtype])))

    def widened(self, name: str, x: ir.Value) -> ir.Value:
        """A value of the engine's dtype in float32."""
        return x if self.lowering.dtype == "float32" else self.cast(name, x, "float32")

    def narrowed(self, name: str, x: ir.Value) -> ir.Value:
        """A float32 value in the engine's dtype."""
        return x if self.lowering.dtype == "float32" else self.cast(name, x, self.lowering.dtype)

    def update_cache(self, layer: int, tensor: CacheTensor, rows: ir.Value, write_index: ir.Value) -> ir.Value:
        """Write rows [B,N,S,D] into the cache at ``write_index`` [B]; gives the whole cache [B,N,L,D].

        The input must be used here alone: a second reader makes ONNX Runtime copy the cache, and TensorRT refuse it.
        """
        size = self.contract.static
        shape: tuple[int | str, ...] = ("B", size["N"], size["L"], size["D"])
        cache = ir.val(past(tensor, layer), self.engine_type, shape)
        updated = self.op(present(tensor, layer), "TensorScatter", cache, rows, write_index, axis=2)
        updated.type, updated.shape = ir.TensorType(self.engine_type), ir.Shape(shape)
        self._caches.append((cache, updated))
        return updated

    def plugin(self, name: str, kind: str, function: ir.Function, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """A dflow:: node: the C++ plugin in TensorRT, the local function everywhere else."""
        self._functions.append(function)
        tags = {"plugin_namespace": PLUGIN_DOMAIN, "plugin_version": PLUGIN_VERSION}
        return self.op(name, kind, *inputs, domain=PLUGIN_DOMAIN, **tags, **attributes)

    def model(self) -> ir.Model:
        """The finished model; every output of the contract must have been named."""
        inputs = [*self._inputs.values(), *(cache for cache, _ in self._caches)]
        outputs = [self._outputs[spec.name] for spec in self.contract.outputs]
        outputs += [updated for _, updated in self._caches]
        opsets = {"": OPSET, CONTRIB: 1} | ({PLUGIN_DOMAIN: 1} if self._functions else {})
        graph = ir.Graph(
            inputs,
            outputs,
            nodes=self._tape.nodes,
            initializers=self._tape.initializers,
            opset_imports=opsets,
            name=self.contract.engine,
        )
        return ir.Model(graph, ir_version=IR_VERSION, producer_name="dflow-trt", functions=self._functions)

    def save(self, path: Path) -> None:
        """Write the graph; its weights are already in their data files."""
        ir.save(self.model(), path)


_KINDS = {"int64": "INT64", "bool": "BOOL", "float32": "FLOAT"}
