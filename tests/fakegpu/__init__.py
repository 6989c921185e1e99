"""A GPU with TensorRT on it, for machines that have neither: what runtime/trt needs of both, and nothing else.

signatures.py  what the real bindings accept, recorded from them (signatures.json); every call here is held against it
gpu.py         memory (an address is an index into numpy arrays), streams whose work waits until somebody waits for it
cuda.py        ``cuda.bindings.runtime`` on that GPU
tensorrt.py    ``tensorrt`` on it; an engine is the bundle's own graph, executed by ONNX Runtime
"""

from __future__ import annotations

import dataclasses
import sys
from functools import cache
from types import ModuleType
from typing import Any

from dflow_trt import contract as c
from dflow_trt.bundle import Bundle, EngineEntry, FileEntry, file_sha256
from dflow_trt.compile.profiles import phases
from dflow_trt.runtime import cuda as ours
from fakegpu.cuda import make_cuda
from fakegpu.gpu import Gpu
from fakegpu.tensorrt import make_tensorrt

PLUGIN = "libdflow_plugins.so"
VERSIONS = {"11.4": "tensorrt 11.4.0.106", "10.16": "tensorrt 10.16.1.11", "rtx": "tensorrt_rtx 1.7.1.116"}
"""The bindings whose signatures the fake can have."""


def install(monkeypatch: Any, gpu: Gpu, version: str = "11.4") -> None:
    """Put the fakes where imports find them, for the length of a test."""
    bindings = ModuleType("cuda.bindings")
    bindings.runtime = make_cuda(gpu)  # type: ignore[attr-defined]
    name, number = VERSIONS[version].split()
    modules = {"cuda": ModuleType("cuda"), "cuda.bindings": bindings, "cuda.bindings.runtime": bindings.runtime}
    modules[name] = make_tensorrt(gpu, VERSIONS[version], number)
    for module, fake in modules.items():
        monkeypatch.setitem(sys.modules, module, fake)
    # Found once and kept: with a cache of its own for the test, neither the fake nor the real one outlives its time.
    monkeypatch.setattr(ours, "_api", cache(ours._api.__wrapped__))


def offer(gpu: Gpu, bundle: Bundle, version: str = "11.4", dtype: str = "float32") -> Bundle:
    """A CPU bundle as if it had been built by TensorRT for this GPU; its graphs become the engines of the fake."""
    for name, contract in bundle.contracts():
        path = bundle.engine_path(contract.engine, name)
        gpu.graphs[path.read_bytes()] = path
    gpu.profiles, gpu.dtype = profiles(bundle), dtype
    plugin = bundle.path / PLUGIN
    plugin.write_bytes(b"a library")
    gpu.creators[str(plugin)] = {f"{c.PLUGIN_DOMAIN}::{each.name}/{c.PLUGIN_VERSION}" for each in c.PLUGINS}
    backend, number = VERSIONS[version].split()
    notes = {backend: number, "gpu": gpu.name, "compute_capability": gpu.compute_capability}
    build: Any = {"backend": backend.replace("_", "-"), "dtype": dtype}
    offered = dataclasses.replace(
        bundle,
        build=dataclasses.replace(bundle.build, **build),
        built_with={**bundle.built_with, **notes},
        files={**bundle.files, PLUGIN: FileEntry(file_sha256(plugin), 9)},
    )
    plugins = {offered.engine_path(each.engine, name).name: each.plugins for name, each in bundle.contracts()}
    engines = {name: EngineEntry(1.0, 1, each) for name, each in plugins.items()}
    return dataclasses.replace(offered, files={**offered.files, **_as_engines(offered)}, engines=engines)


def _as_engines(bundle: Bundle) -> dict[str, FileEntry]:
    """Every graph once more, under the name of its engine."""
    found = {}
    for name, contract in bundle.contracts():
        graph, engine = (path(contract.engine, name) for path in (bundle.graph_path, bundle.engine_path))
        engine.write_bytes(graph.read_bytes())
        found[engine.name] = bundle.files[graph.name]
    return found


def profiles(bundle: Bundle) -> dict[str, list[dict[str, tuple[int, int]]]]:
    """What the compiler builds for each engine, the profiles in either order; one alone where no S is."""
    ranges = phases(bundle).values()
    decode, prefill = ({dim: (each.least, each.most) for dim, each in phase.items()} for phase in ranges)
    found = {}
    for name, contract in bundle.contracts():
        both = [prefill, decode] if contract.engine == c.CONTEXT else [decode, prefill]
        takes_passes = any("S" in spec.dims for spec in contract.inputs)
        found[bundle.graph_path(contract.engine, name).stem] = both if takes_passes else [decode]
    return found


__all__ = ["VERSIONS", "Gpu", "install", "offer"]
