"""TensorRT's builder without TensorRT: a network that knows of an ONNX graph what ours is asked about, and no more.

Every call is held against the recorded signatures of the real bindings. A layer is an ONNX node; an engine is the list
of what the builder was told.
"""

from __future__ import annotations

import enum
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
from onnx import TensorProto

from fakegpu.signatures import RECORDED, checked

LAYERS = {"TensorScatter": "KV_CACHE_UPDATE", "Attention": "ATTENTION_INPUT", "DequantizeLinear": "DEQUANTIZE"}
DTYPES = {
    TensorProto.INT64: "INT64",
    TensorProto.INT32: "INT32",
    TensorProto.BOOL: "BOOL",
    TensorProto.FLOAT: "FLOAT",
    TensorProto.FLOAT16: "HALF",
    TensorProto.BFLOAT16: "BF16",
}
STALE = b"of another version"


def make_builder(label: str) -> ModuleType:
    """The module, with the signatures of the bindings recorded under ``label``."""
    recorded = RECORDED[label]
    module: Any = ModuleType(label.split()[0])
    module.__version__ = label.split()[1]
    for name, members in recorded["enums"].items():
        setattr(module, name, enum.IntEnum(name, {member: i for i, member in enumerate(members)}))

    class Dims(tuple[int, ...]):
        """A shape, which the real bindings also take as a tuple."""

    class ILogger:
        Severity = enum.Enum("Severity", recorded["severities"])

        def __init__(self) -> None: ...

        def log(self, severity: Any, msg: str) -> None: ...

    class IPluginRegistry:
        def __init__(self) -> None:
            self._loaded = False

        def load_library(self, plugin_path: str) -> object | None:
            self._loaded = True
            return object()

        def get_creator(self, type: str, version: str, plugin_namespace: str = "") -> object | None:
            return object() if self._loaded else None

    class ITensor:
        def __init__(self, value: Any) -> None:
            self._value = value

        @property
        def name(self) -> str:
            return str(self._value if isinstance(self._value, str) else self._value.name)

        @property
        def dtype(self) -> Any:
            return getattr(module.DataType, DTYPES[self._value.type.tensor_type.elem_type])

        @property
        def shape(self) -> Any:
            return Dims(dim.dim_value or -1 for dim in self._value.type.tensor_type.shape.dim)

    class IAttention:
        decomposable = False

    class ILayer:
        def __init__(self, node: Any) -> None:
            self._node, self._attention = node, IAttention()

        @property
        def type(self) -> Any:
            ours = "PLUGIN_V3" if self._node.domain == "dflow" and registry._loaded else "ELEMENTWISE"
            return getattr(module.LayerType, LAYERS.get(self._node.op_type, ours))

        @property
        def num_inputs(self) -> int:
            return len(self._node.input)

        def get_input(self, index: int) -> Any:
            return ITensor(self._node.input[index]) if self._node.input[index] else None

        def get_output(self, index: int) -> Any:
            return ITensor(self._node.output[index])

    class IAttentionInputLayer(ILayer):
        @property
        def attention(self) -> Any:
            return self._attention

    class INetworkDefinition:
        def __init__(self, flags: int) -> None:
            self._flags, self._graph, self._layers = flags, onnx.GraphProto(), list[Any]()

        @property
        def num_layers(self) -> int:
            return len(self._layers)

        def get_layer(self, index: int) -> Any:
            return self._layers[index]

        @property
        def num_inputs(self) -> int:
            return len(self._graph.input)

        def get_input(self, index: int) -> Any:
            return ITensor(self._graph.input[index])

        @property
        def num_outputs(self) -> int:
            return len(self._graph.output)

        def get_output(self, index: int) -> Any:
            return ITensor(self._graph.output[index])

    class ParserError:
        def desc(self) -> str:
            return "no such operator"

        def node_name(self) -> str:
            return "odd"

    class OnnxParser:
        def __init__(self, network: Any, logger: Any) -> None:
            self._network = network

        def parse_from_file(self, model: str) -> bool:
            graph = onnx.load(model, load_external_data=False).graph
            self._network._graph, self._network._layers = graph, [ILayer(node) for node in graph.node]
            return all(node.op_type != "Odd" for node in graph.node)

        @property
        def num_errors(self) -> int:
            return 1

        def get_error(self, index: int) -> Any:
            return ParserError()

    class IOptimizationProfile:
        def __init__(self) -> None:
            self._shapes: dict[str, Any] = {}

        def set_shape(self, input: str, min: Any, opt: Any, max: Any) -> None:
            self._shapes[input] = (min, opt, max)

    class IHostMemory(bytes):
        """Real host memory gives itself as a buffer; bytes do so too."""

    class ITimingCache:
        def __init__(self, content: bytes) -> None:
            self._content = content

        def serialize(self) -> Any:
            return IHostMemory(self._content + b"+")

    class IBuilderConfig:
        hardware_compatibility_level: Any = None

        def __init__(self) -> None:
            self._said: dict[str, Any] = {"flags": ["TF32"], "profiles": []}
            self._cache: Any = None

        def add_optimization_profile(self, profile: Any) -> int:
            ordered = all(a <= b <= c for shapes in profile._shapes.values() for a, b, c in zip(*shapes, strict=True))
            self._said["profiles"].append(profile._shapes)
            return len(self._said["profiles"]) - 1 if ordered else -1

        def set_flag(self, flag: Any) -> None:
            self._said["flags"].append(flag.name)

        def clear_flag(self, flag: Any) -> None:
            self._said["flags"].remove(flag.name)

        def create_timing_cache(self, serialized_timing_cache: bytes) -> Any:
            return ITimingCache(serialized_timing_cache)

        def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
            self._cache = cache
            return bool(cache._content != STALE)

        def get_timing_cache(self) -> Any:
            return self._cache

    class Builder:
        def __init__(self, logger: Any) -> None: ...

        def create_network(self, flags: int = 0) -> Any:
            return INetworkDefinition(flags)

        def create_builder_config(self) -> Any:
            return IBuilderConfig()

        def create_optimization_profile(self) -> Any:
            return IOptimizationProfile()

        def build_serialized_network(self, network: Any, config: Any) -> Any:
            level = config.hardware_compatibility_level
            attention = [layer._attention.decomposable for layer in network._layers if hasattr(layer, "attention")]
            said = {"typed": network._flags, "hardware": level and level.name, "decomposed": sum(attention)}
            return IHostMemory(json.dumps({**config._said, **said}).encode())

    reading = (ILogger, IPluginRegistry, ITensor, IAttention, ILayer, IAttentionInputLayer, INetworkDefinition)
    for cls in (*reading, ParserError, OnnxParser, IOptimizationProfile, ITimingCache, IBuilderConfig, Builder):
        setattr(module, cls.__name__, checked(cls, recorded["classes"][cls.__name__]))
    registry = IPluginRegistry()
    module.get_plugin_registry = lambda: registry
    return module


def told(engine: Path) -> dict[str, Any]:
    """What the builder of a fake engine was told."""
    found: dict[str, Any] = json.loads(engine.read_bytes())
    return found
