"""Targets that NVIDIA ModelOpt quantised: what their folder says, and their linear layers.

The layout is that of ModelOpt's unified Hugging Face export, as its source has it (0.47, modelopt/torch/export:
``process_layer_quant_config``, ``to_quantized_weight`` and ``pack_int4_in_uint8`` in quant_utils.py,
``convert_hf_quant_config_format`` in convert_hf_config.py): a layer X has ``X.weight`` in 8 bits, or with two 4-bit
outputs in a byte, ``X.weight_scale``, and where its inputs are treated ``X.input_scale`` and ``X.pre_quant_scale``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from dflow_trt.checkpoint.reader import Config, read_config, refuse, show
from dflow_trt.checkpoint.safetensors import DTYPES, PACKED, SafetensorsWeights
from dflow_trt.checkpoint.weights import Array
from dflow_trt.spec import QUANT_ALGOS, QuantAlgo, QuantSpec

QUANT_CONFIG = "hf_quant_config.json"
_STORED: dict[QuantAlgo, str] = {"FP8": "F8_E4M3", "W8A8_SQ_PER_CHANNEL": "I8", "W8A16": "I8", "W4A16_AWQ": "U8"}
_SMOOTHED: tuple[QuantAlgo, ...] = ("W8A8_SQ_PER_CHANNEL", "W4A16_AWQ")  # their inputs may have a pre_quant_scale
_EXPORT = "export it again with ModelOpt as one of these, or use an unquantised checkpoint"


@dataclass(frozen=True)
class Description:
    """What a folder says of its quantisation. excluded: patterns of module names. group_size: None where not said."""

    algo: QuantAlgo
    group_size: int | None
    excluded: tuple[str, ...]

    def excludes(self, module: str) -> bool:
        return any(fnmatchcase(module, pattern) for pattern in self.excluded)


# -- what the folder says ----------------------------------------------------------------------------------------------


def read_description(folder: Path, config: Config) -> Description | None:
    """From ``hf_quant_config.json``, else from ``quantization_config`` in config.json; None where there is neither.

    UserError for what is not covered: other tools and algorithms, mixed ones, and a quantised KV cache.
    """
    inside, beside = config.section("quantization_config"), _beside(folder)
    if inside is not None and inside.get("quant_method") != "modelopt":
        raise inside.error("quant_method", "'modelopt'", "use a checkpoint of NVIDIA ModelOpt, or an unquantised one")
    if inside is not None and beside is not None and inside.get("quant_algo") != beside.get("quant_algo"):
        raise inside.error(
            "quant_algo", f"{show(beside.get('quant_algo'))}, as in {QUANT_CONFIG}", "keep the right one"
        )
    if beside is not None:
        return _describe(beside, "kv_cache_quant_algo", "exclude_modules")
    return None if inside is None else _describe(inside, "kv_cache_scheme", "ignore")


def _beside(folder: Path) -> Config | None:
    path = folder / QUANT_CONFIG
    if not path.is_file():
        return None
    config = read_config(path)
    section = config.section("quantization")
    if section is None:
        raise config.error("quantization", "a JSON object", "export the checkpoint again")
    return section


def _describe(config: Config, cache_key: str, excluded_key: str) -> Description:
    if config.get(cache_key) is not None:
        raise config.error(
            cache_key, "absent: the KV cache stays float", "export it again without KV cache quantisation"
        )
    if config.get("quant_algo") not in QUANT_ALGOS:
        raise config.error("quant_algo", " or ".join(map(repr, QUANT_ALGOS)), _EXPORT)
    if config.boolean("has_zero_point", False):
        raise config.error("has_zero_point", "false", _EXPORT)
    algo = next(name for name in QUANT_ALGOS if name == config.get("quant_algo"))
    group_size = config.optional_integer("group_size") if algo == "W4A16_AWQ" else None
    return Description(algo, group_size, _patterns(config, excluded_key))


def _patterns(config: Config, key: str) -> tuple[str, ...]:
    value = config.get(key)
    if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        raise config.error(key, "a list of module names, which may end in *")
    return tuple(value or ())


# -- its layers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """One quantised linear layer: a ``QuantisedLinear``. ``module`` is its name without ".weight"."""

    stored: SafetensorsWeights
    module: str
    spec: QuantSpec
    shape: tuple[int, int]

    @property
    def weight(self) -> str:
        return f"{self.module}.weight"

    def levels(self, rows: slice | None = None) -> Array:
        """See :meth:`dflow_trt.checkpoint.weights.QuantisedLinear.levels`."""
        return self.stored.read_packed(self.weight, rows)

    def values(self, rows: slice | None = None) -> Array:
        """The weights themselves, or some outputs of them: float32."""
        first, last, _ = (rows or slice(None)).indices(self.shape[0])
        levels = self._numbers(first, last).astype(np.float32)
        scale = self.scale()
        if scale.ndim == 0:
            return levels * scale
        columns = np.arange(self.shape[1]) // (self.spec.group_size or self.shape[1])
        return levels * scale.reshape(self.shape[0], -1)[first:last, columns]

    def _numbers(self, first: int, last: int) -> Array:
        """Levels of the outputs first..last-1, one an element."""
        if self.spec.bits == 8:
            return self.levels(slice(first, last))
        pairs = self.levels(slice(first // 2, -(-last // 2)))
        halves = np.stack([pairs << 4, pairs & 0xF0], axis=1).view(np.int8) >> 4  # the sign bit comes along
        return halves.reshape(-1, self.shape[1])[first % 2 :][: last - first]

    def scale(self) -> Array:
        """See :meth:`dflow_trt.checkpoint.weights.QuantisedLinear.scale`."""
        found = self._positive("weight_scale")
        return found.reshape(()) if found.size == 1 and self.spec.algo == "FP8" else found

    def input_scale(self) -> Array | None:
        """See :meth:`dflow_trt.checkpoint.weights.QuantisedLinear.input_scale`."""
        return self._positive("input_scale").reshape(()) if self.spec.rounds_inputs else None

    def pre_quant_scale(self) -> Array | None:
        """See :meth:`dflow_trt.checkpoint.weights.QuantisedLinear.pre_quant_scale`."""
        return self._positive("pre_quant_scale") if f"{self.module}.pre_quant_scale" in self.scales else None

    @property
    def scales(self) -> Sequence[str]:
        """The tensors beside the weight."""
        kinds = ["weight_scale", *(["input_scale"] if self.spec.rounds_inputs else [])]
        names = [f"{self.module}.{kind}" for kind in kinds]
        smoothing = f"{self.module}.pre_quant_scale"
        return [*names, smoothing] if self.spec.algo in _SMOOTHED and self.stored.has(smoothing) else names

    def _positive(self, kind: str) -> Array:
        """A scale in float32; UserError where one of its values is no scale."""
        name = f"{self.module}.{kind}"
        found = self.stored.read(name).astype(np.float32)
        wrong = found[~(np.isfinite(found) & (found > 0))]
        if wrong.size:
            where, value = self.stored.entry(name).path, str(wrong.reshape(-1)[0])
            raise refuse(where, name, value, "finite numbers above 0", "export the checkpoint again")
        return found

    # -- is it whole ---------------------------------------------------------------------------------------------------

    def check(self, where: Path) -> None:
        """UserError where a tensor of the layer is missing or is not of the dtype and shape that its algorithm has."""
        outputs, inputs = self.shape
        algo, kind = self.spec.algo, _STORED[self.spec.algo]
        if self.spec.bits == 4:
            self._check_groups(where)
            outputs //= 2
        self._expect(self.weight, (kind,), [(outputs, inputs)], where, f"as quant_algo {algo} says")
        for name in self.scales:
            self._expect(name, tuple(DTYPES), self._scale_shapes(name), where, f"beside {self.weight}")

    def _check_groups(self, where: Path) -> None:
        (outputs, inputs), size = self.shape, self.spec.group_size
        assert size is not None
        if outputs % 2:
            raise refuse(where, self.module, f"of {outputs} outputs", "an even number, as two share a byte", _EXPORT)
        if inputs % size:
            allowed = f"a divisor of the {inputs} input features of {self.module}"
            raise refuse(where, "group_size", str(size), allowed, _EXPORT)

    def _scale_shapes(self, name: str) -> list[tuple[int, ...]]:
        """Those that a scale may have; the first is the usual one."""
        outputs, inputs = self.shape
        if name.endswith("input_scale"):
            return [(), (1,)]
        if name.endswith("pre_quant_scale"):
            return [(inputs,)]
        if self.spec.group_size is not None:
            return [(outputs, inputs // self.spec.group_size)]
        return [(), (1,), (outputs,)] if self.spec.algo == "FP8" else [(outputs,)]

    def _expect(self, name: str, dtypes: tuple[str, ...], shapes: list[tuple[int, ...]], where: Path, why: str) -> None:
        todo = "list the layer in exclude_modules where it is float, or export the checkpoint again"
        if not self.stored.has(name):
            raise refuse(where, name, "missing", f"a tensor of shape {list(shapes[0])}, {why}", "complete the folder")
        entry = self.stored.entry(name)
        if entry.dtype not in dtypes:
            raise refuse(entry.path, name, f"of dtype {entry.dtype}", f"{' or '.join(dtypes)}, {why}", todo)
        if entry.shape not in shapes:
            raise refuse(entry.path, name, f"of shape {list(entry.shape)}", f"{list(shapes[0])}, {why}", todo)


class QuantisedWeights:
    """The tensors of a quantised checkpoint: a ``Weights``. Its quantised layers read as float32 values."""

    def __init__(self, stored: SafetensorsWeights, layers: Mapping[str, Layer]) -> None:
        self._stored, self._layers = stored, dict(layers)
        self._hidden = {name for layer in self._layers.values() for name in layer.scales}

    def names(self) -> Iterator[str]:
        return (name for name in self._stored.names() if name not in self._hidden)

    def shape(self, name: str) -> tuple[int, ...]:
        layer = self._layers.get(name)
        return self._stored.shape(name) if layer is None else layer.shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """See :meth:`dflow_trt.checkpoint.weights.Weights.dtype`."""
        return self._stored.dtype(name) if name not in self._layers else np.dtype(np.float32)

    def read(self, name: str, rows: slice | None = None) -> Array:
        """See :meth:`dflow_trt.checkpoint.weights.Weights.read`."""
        layer = self._layers.get(name)
        return self._stored.read(name, rows) if layer is None else layer.values(rows)

    def quantised(self, name: str) -> Layer | None:
        """See :meth:`dflow_trt.checkpoint.weights.Weights.quantised`."""
        return self._layers.get(name)


def open_quantised(
    stored: SafetensorsWeights, said: Description, linears: Mapping[str, tuple[int, int]], where: Path
) -> tuple[QuantisedWeights, QuantSpec]:
    """The weights of a quantised folder, its layers checked. linears: names and shapes of what may be quantised."""
    kept = tuple(module for module in linears if said.excludes(module))
    quantised = [module for module in linears if module not in kept]
    group_size = said.group_size
    if said.algo == "W4A16_AWQ" and group_size is None:
        group_size = _group_size(stored, quantised, linears, where)
    spec = QuantSpec(said.algo, group_size, kept)
    layers = {f"{module}.weight": Layer(stored, module, spec, linears[module]) for module in quantised}
    _reject_others(stored, layers, where)
    for layer in layers.values():
        layer.check(where)
    return QuantisedWeights(stored, layers), spec


def _group_size(
    stored: SafetensorsWeights, modules: Sequence[str], linears: Mapping[str, tuple[int, int]], where: Path
) -> int | None:
    """From the first scale, where the folder does not say it (config.json alone does not); None without any layer."""
    for module in modules[:1]:
        name, inputs = f"{module}.weight_scale", linears[module][1]
        shape = stored.shape(name) if stored.has(name) else ()
        if len(shape) != 2 or not shape[1] or inputs % shape[1]:
            found = f"of shape {list(shape)}" if shape else "missing"
            allowed = f"[{linears[module][0]}, groups], where groups divides {inputs}"
            raise refuse(where, name, found, allowed, "complete the folder, or write group_size")
        return inputs // shape[1]
    return None


def _reject_others(stored: SafetensorsWeights, layers: Mapping[str, Layer], where: Path) -> None:
    """Refuse scales of anything but the quantised layers: the head, the embedding, what the folder calls float."""
    for name in stored.names():
        module, _, kind = name.rpartition(".")
        if kind == "weight_scale" and f"{module}.weight" not in layers:
            allowed = "scales of the decoder's linear layers alone, without those that are excluded"
            raise refuse(where, name, "in the checkpoint", allowed, f"export it again with {module} excluded")
        packed = stored.entry(name).dtype in PACKED
        if packed and kind == "weight" and name not in layers:
            allowed = f"{' or '.join(DTYPES)}, as it is excluded or no linear layer of the decoder"
            raise refuse(where, name, f"of dtype {stored.entry(name).dtype}", allowed, "export the checkpoint again")
