"""One graph file into one engine file, by TensorRT or TensorRT-RTX: parse, check, configure, build.

``python -m dflow_trt.compile.engine JOB RESULT`` does it in a process of its own: what the builder takes is measured
and given back, a crash in it is an error message, and the libraries that it looks for by name can be put on its path.
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflow_trt.compile.profiles import Profile
from dflow_trt.errors import UserError
from dflow_trt.runtime.trt.engine import TYPES
from dflow_trt.runtime.trt.library import import_tensorrt, make_logger, register_plugins
from dflow_trt.spec import Hardware

DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True)
class EngineJob:
    """What to build, as plain data.

    label: as people know the engine, e.g. "dflow.relay". inputs, outputs: their dtypes by name. caches: (input, output)
    of each cache. profiles: see :mod:`dflow_trt.compile.profiles`. plugins: nodes that must become C++ plugins of the
    library ``plugin``. widened: DequantizeLinear nodes. full_float32: no TF32, attention in float32.
    compute_capabilities: of TensorRT-RTX, e.g. "8.9".
    """

    backend: str
    label: str
    graph: str
    engine: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    caches: tuple[tuple[str, str], ...]
    profiles: tuple[Profile, ...]
    plugins: tuple[str, ...]
    plugin: str | None
    widened: int
    full_float32: bool
    compute_capabilities: tuple[str, ...]
    hardware_compatibility: Hardware
    version_compatible: bool
    timing_cache: str | None


@dataclass(frozen=True)
class EngineResult:
    """What came of it: error is "" where the engine was written. notes: lines for the user."""

    error: str
    seconds: float = 0.0
    memory: int = 0
    notes: tuple[str, ...] = ()


def build_engine(job: EngineJob) -> tuple[str, ...]:
    """Write the engine; what the user should know. Raises UserError where TensorRT refuses or the graph is not ours."""
    trt = import_tensorrt(job.backend)
    logger, log = make_logger(trt)
    if job.plugins and job.plugin:
        register_plugins(trt, Path(job.plugin), job.plugins)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)  # owns the network's weights
    if not parser.parse_from_file(job.graph):
        raise _refused(job, f"refuses it: {_parser_error(parser)}", log)
    check_network(trt, network, job)
    return _build(trt, builder, network, job, log)


def _build(trt: Any, builder: Any, network: Any, job: EngineJob, log: Sequence[str]) -> tuple[str, ...]:
    config = _configure(trt, builder, network, job)
    for number, profile in enumerate(job.profiles, 1):
        if config.add_optimization_profile(_profile(builder, profile, job)) < 0:
            raise _refused(job, f"refuses profile {number}", log)
    notes = _read_timings(config, job)
    content = builder.build_serialized_network(network, config)
    if content is None:
        raise _refused(job, "refuses it: it cannot be built", log)
    Path(job.engine).write_bytes(memoryview(content))
    _write_timings(config, job)
    return notes


def _parser_error(parser: Any) -> str:
    errors = [parser.get_error(i) for i in range(parser.num_errors)]
    return "; ".join(f"{error.node_name() or 'the graph'}: {error.desc()}" for error in errors[:1]) or "it has no graph"


def _refused(job: EngineJob, reason: str, log: Sequence[str]) -> UserError:
    said = f" ({log[-1]})" if log else ""
    found = " ".join(f"{reason}{said}".split())[:400]
    return UserError(f"engine {job.label}: {job.backend} {found}; please report this with config.json")


# -- is it what was meant ----------------------------------------------------------------------------------------------


def check_network(trt: Any, network: Any, job: EngineJob) -> None:
    """UserError where the parsed network is another than its contract: the parser itself says nothing of that.

    It drops what it does not know, takes ONNX bodies for plugins that are not registered, and lets a cache be copied.
    """
    _check_tensors(trt, network, job)
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    plugins = sum(layer.type == trt.LayerType.PLUGIN_V3 for layer in layers)
    wanted = len(job.plugins) if job.plugin else 0
    if plugins != wanted:
        raise _misfit(job, f"has {plugins} C++ plugins, not {wanted} ({', '.join(job.plugins) or 'none'})")
    widened = sum(layer.type == trt.LayerType.DEQUANTIZE for layer in layers)
    if widened != job.widened:
        raise _misfit(job, f"has {widened} dequantising layers, not {job.widened}")
    updates = [layer for layer in layers if layer.type == trt.LayerType.KV_CACHE_UPDATE]
    caches = {(layer.get_input(0).name, layer.get_output(0).name) for layer in updates}
    if caches != set(job.caches) or len(updates) != len(job.caches):
        raise _misfit(job, f"updates the caches {sorted(caches)} in place, not {sorted(job.caches)}")
    reads = [tensor.name for layer in layers for tensor in _inputs(layer)]
    for past, _ in job.caches:
        if reads.count(past) != 1:
            raise _misfit(job, f"reads {past} {reads.count(past)} times, not once: it would be copied")


def _inputs(layer: Any) -> Iterator[Any]:
    """The tensors that a layer reads; optional ones may be missing."""
    found = (layer.get_input(i) for i in range(layer.num_inputs))
    return (tensor for tensor in found if tensor is not None)


def _check_tensors(trt: Any, network: Any, job: EngineJob) -> None:
    inputs = {tensor.name: tensor for tensor in map(network.get_input, range(network.num_inputs))}
    outputs = {tensor.name: tensor for tensor in map(network.get_output, range(network.num_outputs))}
    for found, wanted in ((inputs, job.inputs), (outputs, job.outputs)):
        if found.keys() != wanted.keys():
            raise _misfit(job, f"has the tensors {sorted(found)}, not {sorted(wanted)}")
        for name, kind in wanted.items():
            if found[name].dtype != getattr(trt.DataType, TYPES[kind]):
                raise _misfit(job, f"has {name} as {found[name].dtype}, not {kind}")
    for past, _ in job.caches:
        if inputs[past].shape[2] < 1:
            raise _misfit(job, f"has {past} with rows of no fixed number")


def _misfit(job: EngineJob, found: str) -> UserError:
    return UserError(f"engine {job.label}: its network {found}; please report this with config.json")


# -- how it is built ---------------------------------------------------------------------------------------------------


def _configure(trt: Any, builder: Any, network: Any, job: EngineJob) -> Any:
    config = builder.create_builder_config()
    if job.full_float32:
        config.clear_flag(trt.BuilderFlag.TF32)  # on by default, with 10 bits of mantissa
        _decompose_attention(trt, network)
    if job.version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    if job.hardware_compatibility != "none":
        level = job.hardware_compatibility.upper()
        config.hardware_compatibility_level = getattr(trt.HardwareCompatibilityLevel, level)
    if job.compute_capabilities:
        _set_compute_capabilities(trt, config, job.compute_capabilities)
    return config


def _profile(builder: Any, profile: Profile, job: EngineJob) -> Any:
    made = builder.create_optimization_profile()
    for name, shapes in profile.items():
        try:
            made.set_shape(name, *map(tuple, shapes))
        except (ValueError, RuntimeError) as error:  # pybind's own words for a shape that the builder does not take
            raise UserError(f"engine {job.label}: {name} cannot have the shapes {shapes} ({error})") from None
    return made


def _decompose_attention(trt: Any, network: Any) -> None:
    """There is no fused attention in float32; an attribute in the graph that says so would break ONNX Runtime."""
    for layer in map(network.get_layer, range(network.num_layers)):
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer  # get_layer gives the base class
            layer.attention.decomposable = True


def _set_compute_capabilities(trt: Any, config: Any, wanted: tuple[str, ...]) -> None:
    config.num_compute_capabilities = len(wanted)
    for i, capability in enumerate(wanted):
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{capability.replace('.', '')}"), i)


def _read_timings(config: Any, job: EngineJob) -> tuple[str, ...]:
    """Start from the timings of earlier builds, where there are any that fit."""
    if job.timing_cache is None:
        return ()
    path = Path(job.timing_cache)
    content = _sealed(path.read_bytes()) if path.is_file() else b""
    for start in (content, b""):
        cache = None if start is None else config.create_timing_cache(start)
        if cache is not None and config.set_timing_cache(cache, False):
            break
    return (f"timing cache: {path} is damaged or of another version, ignored",) if start != content else ()


def _sealed(content: bytes) -> bytes | None:
    """What lies behind its own hash, or None: TensorRT takes what it cannot read for an empty cache."""
    digest, rest = content[:DIGEST], content[DIGEST:]
    return rest if hashlib.sha256(rest).digest() == digest else None


def _write_timings(config: Any, job: EngineJob) -> None:
    cache = config.get_timing_cache() if job.timing_cache is not None else None
    if cache is not None:
        path, content = Path(str(job.timing_cache)), bytes(memoryview(cache.serialize()))
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_bytes(hashlib.sha256(content).digest() + content)
        partial.replace(path)


# -- in a process of its own -------------------------------------------------------------------------------------------


def _run(job: EngineJob) -> EngineResult:
    start = time.perf_counter()
    try:
        notes = build_engine(job)
    except UserError as error:
        return EngineResult(str(error))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # Linux counts kilobytes
    return EngineResult("", time.perf_counter() - start, memory, notes)


def read_job(text: str) -> EngineJob:
    data = json.loads(text)
    return EngineJob(**{**data, "caches": tuple(map(tuple, data["caches"]))})


def main() -> None:
    job, result = map(Path, sys.argv[1:])
    result.write_text(json.dumps(asdict(_run(read_job(job.read_text(encoding="utf-8"))))), encoding="utf-8")


if __name__ == "__main__":
    main()
