"""One engine's graph, and the running of sections cut out of it: on ONNX Runtime, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from dflow_trt import contract as c
from dflow_trt.bundle import Bundle
from dflow_trt.checkpoint.weights import Array
from dflow_trt.feeds import kv_index
from dflow_trt.runtime.ort import exact_int8

HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class Engine:
    """One engine's graph as it lies in the bundle."""

    def __init__(self, bundle: Bundle, engine: str, drafter: str | None) -> None:
        self._path = bundle.graph_path(engine, drafter)
        self._model, self._dtype = ir.load(self._path), bundle.build.dtype
        self._contract = next(k for name, k in bundle.contracts() if (name, k.engine) == (drafter, engine))

    def given(self, *specs: c.TensorSpec) -> list[str]:
        """The names of those that are outputs of this engine."""
        return [spec.name for spec in specs if spec in self._contract.outputs]

    @property
    def _embed_name(self) -> str:
        """The embedding's value: cast where the table has another dtype than the engine."""
        names = {node.outputs[0].name for node in self._model.graph}
        return "embed.cast" if "embed.cast" in names else "embed"

    def embed(self, ids: Array) -> Array:
        """The embeddings [S,E] of ids [S]."""
        result: Array = self.section({c.INPUT_IDS.name: ids[None]}, [self._embed_name])[self._embed_name][0]
        return result

    def block(self, i: int, x: Array, cached: Sequence[Array] = ()) -> Array:
        """Rows x [S,E] through decoder layer i alone, behind the cached keys and values [N,C,D] (or none)."""
        rows, start = len(x), cached[0].shape[1] if cached else 0
        source = f"layers.{i - 1}.out" if i else (c.BLOCK_EMBEDS.name if self._takes_embeds else self._embed_name)
        feeds = {
            source: x[None],
            c.POSITION_IDS.name: start + np.arange(rows)[None],
            c.WRITE_INDEX.name: np.array([start]),
            c.KV_INDEX.name: kv_index(start + rows),
            **self.caches(i, cached),
        }
        result: Array = self.section(feeds, [f"layers.{i}.out"])[f"layers.{i}.out"][0]
        return result

    @property
    def _takes_embeds(self) -> bool:
        return c.BLOCK_EMBEDS in self._contract.inputs

    def caches(self, layer: int, cached: Sequence[Array] = ()) -> dict[str, Array]:
        """The two caches of a layer, with the given keys and values [N,C,D] (or none) in their first rows."""
        size = self._contract.static
        shape = (1, size["N"], size["L"], size["D"])
        found = {c.past(tensor, layer): np.zeros(shape, np.float32) for tensor in c.CACHE_TENSORS}
        for tensor, array in zip(c.CACHE_TENSORS, cached, strict=False):
            found[c.past(tensor, layer)][0, :, : array.shape[1]] = array
        return found

    def section(self, feeds: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        """Run the part of the graph between ``feeds`` and ``outputs``; only its own weights are loaded."""
        graph = ir.convenience.extract(self._model.graph, list(feeds), list(outputs))
        for value in graph.inputs:
            array = feeds[str(value.name)]
            value.type, value.shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), ir.Shape(array.shape)
        for value in graph.outputs:
            value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
        cut, data = self._path.with_suffix(".check.onnx"), self._path.with_suffix(".check.data")
        functions = tuple(self._model.functions.values())
        model = ir.Model(graph, ir_version=self._model.ir_version, functions=functions)
        if self._dtype == "float32":
            ir.save(model, cut)
        else:
            ir.save(_widened(model), cut, external_data=data.name)
        try:
            return _run(cut, feeds, outputs)
        finally:
            cut.unlink()
            data.unlink(missing_ok=True)

    def whole(self, feeds: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        """Run the whole engine, its caches zeroed."""
        for layer in range(self._contract.cache_layers):
            feeds |= self.caches(layer)
        return self.section(feeds, outputs)


def _widened(model: ir.Model) -> ir.Model:
    """The same with every half-precision value in float32, weights as they were rounded: what a CPU can run."""
    for value in model.graph.initializers.values():
        if value.const_value is not None and value.const_value.dtype in HALF:
            value.const_value = ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)
    for node in model.graph:
        for key in ("to", "output_dtype"):  # of Cast, of DequantizeLinear
            if key in node.attributes and node.attributes[key].value in HALF:
                node.attributes[key] = ir.AttrInt64(key, int(ir.DataType.FLOAT))
        for each in (*node.inputs, *node.outputs):
            if each is not None and each.dtype in HALF:
                each.type = ir.TensorType(ir.DataType.FLOAT)
    return model


def _run(path: Path, feeds: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_prepacking", "1")  # a packed copy would double the memory
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # one call: nothing to wait for
    options.add_session_config_entry("session.disable_quant_qdq", "1")  # quantised layers as written, not fused
    exact_int8(options)
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return dict(zip(outputs, session.run(list(outputs), feeds), strict=True))
