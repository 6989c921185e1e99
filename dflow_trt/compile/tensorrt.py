"""TensorRT: strongly typed graphs become engines for the GPU of this machine, each built in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx

import dflow_trt
from dflow_trt import contract as c
from dflow_trt.bundle import Bundle, EngineEntry, FileEntry, file_sha256, planned
from dflow_trt.compile.base import EngineOptions, Note
from dflow_trt.compile.engine import EngineJob, EngineResult
from dflow_trt.compile.profiles import profiles
from dflow_trt.errors import UserError
from dflow_trt.graphs.builder import Lowering
from dflow_trt.runtime import cuda
from dflow_trt.runtime.trt.buffers import pending_bytes
from dflow_trt.runtime.trt.engine import cache_tensors, tensor_types
from dflow_trt.runtime.trt.library import COMPUTE_CAPABILITY, GPU, HARDWARE, LATER_VERSIONS, MODULES, import_tensorrt
from dflow_trt.spec import BackendName, BuildSpec, DrafterSpec, DType, StackSpec, TargetSpec, TargetWeights, WeightForm

HEAD_DIMS = range(16, 257, 8)
"""Head sizes of the fused attention, in float16 and bfloat16 (TensorRT-RTX 1.7); in float32 it is decomposed."""

LEAST_CAPABILITY: dict[TargetWeights, str] = {"FP8": "8.9", "W4A16_AWQ": "8.0"}
"""GPUs before these have no arithmetic of that type (TensorRT-RTX 1.7)."""

PLUGIN_LIBRARY = "libdflow_plugins.so"
PLUGIN_VARIABLE = "DFLOW_TRT_PLUGIN"
PLUGIN = "plugin"  # in the manifest's built_with: the plugin's version, or that there is none


class TensorRT:
    """See :class:`dflow_trt.compile.base.Backend`."""

    name: BackendName = "tensorrt"
    dtype: DType = "bfloat16"
    draft_weights: WeightForm = "float"
    group_sizes: tuple[int, ...] = (64, 128)
    """Of int4 weights: what TensorRT's documentation promises."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options

    @cached_property
    def _trt(self) -> Any:
        return import_tensorrt(self.name)

    # -- before anything is written ----------------------------------------------------------------------------------

    def check(self, build: BuildSpec, target: TargetSpec, drafters: Sequence[DrafterSpec]) -> None:
        """UserError for what TensorRT does not offer."""
        for flag, form in (("--target-weights", build.target_form), ("--draft-weights", build.draft_weights)):
            if form != "float":
                raise UserError(f"{flag}: {form} is ONNX Runtime's own form; allowed on {self.name}: float")
        stacks = {"target": target.stack} | {f"drafter {spec.name!r}": spec.decoder for spec in drafters}
        for label, stack in stacks.items():
            if stack is not None:
                _check_heads(label, stack, build.dtype)
        contracts = planned(target, drafters, build).contracts()
        for contract in [each for _, each in contracts if c.PENDING_H in each.inputs]:
            pending_bytes(contract)  # refuses sizes whose addresses TensorRT would not take
        self._check_groups(target)
        self._check_options(build)

    def _check_groups(self, target: TargetSpec) -> None:
        size = target.quantisation.group_size if target.quantisation else None
        if size is not None and self.group_sizes and size not in self.group_sizes:
            allowed = " or ".join(map(str, self.group_sizes))
            raise UserError(
                f"target: its int4 weights share scales in groups of {size}; allowed on {self.name}: {allowed}; "
                "export it again in such groups"
            )

    def check_machine(self, build: BuildSpec, drafters: Sequence[DrafterSpec]) -> None:
        """UserError where TensorRT, a GPU or the plugin is missing."""
        self._machine(build)
        if any(spec.taps for spec in drafters):
            self._plugin_library()

    def _check_options(self, build: BuildSpec) -> None:
        options = self._options
        if options.compute_capabilities:
            raise UserError(f"--compute-capability: {self.name} compiles for the GPU that it runs on; leave it out")
        if options.hardware_compatibility == "ampere_plus" and not computes(build, "8.0"):
            raise UserError(
                f"--hardware-compatibility: ampere_plus, but {build.target_weights} needs compute capability "
                f"{LEAST_CAPABILITY[build.target_weights]}; allowed with this target: none, same_compute_capability"
            )

    def _plugin_library(self) -> Path | None:
        """The library of the dflow:: plugins; None where the nodes' ONNX bodies are to be compiled instead."""
        if self._options.no_plugin:
            return None
        path = self._options.plugin or plugin_library()
        if not path.is_file():
            raise UserError(
                f"--plugin: {path}: no such file; make it with build_scripts/build_plugins.sh, or give --no-plugin to "
                "compile the ONNX bodies of its nodes instead"
            )
        return path

    def _machine(self, build: BuildSpec) -> dict[str, str]:
        """What the engines depend on, for the manifest: the version of TensorRT and the GPU."""
        version, device = str(self._trt.__version__), cuda.current_device()
        if not computes(build, device.compute_capability):
            raise UserError(
                f"target: its weights are {build.target_weights}, which {device.name} of compute capability "
                f"{device.compute_capability} does not compute; needed: {LEAST_CAPABILITY[build.target_weights]} or "
                "later; take a target in another form"
            )
        found = {GPU: device.name, COMPUTE_CAPABILITY: device.compute_capability}
        later = {LATER_VERSIONS: "yes"} if self._options.version_compatible else {}
        return {MODULES[self.name]: version, **found, HARDWARE: self._options.hardware_compatibility, **later}

    # -- lowering ----------------------------------------------------------------------------------------------------

    def target_lowering(self, build: BuildSpec) -> Lowering:
        return Lowering(build.dtype, build.target_form, "op", packed=True)

    def draft_lowering(self, build: BuildSpec) -> Lowering:
        return Lowering(build.dtype, build.draft_weights, "op")

    # -- engines -----------------------------------------------------------------------------------------------------

    def compile(self, bundle: Bundle, note: Note) -> Bundle:
        """See :meth:`dflow_trt.compile.base.Backend.compile`."""
        machine, plugin = self._machine(bundle.build), self._plugin_library() if bundle.taps else None
        jobs = [self._job(bundle, name, contract, machine, plugin) for name, contract in bundle.contracts()]
        engines = {Path(job.engine).name: self._entry(job, note) for job in jobs}
        files = dict(bundle.files) if self._options.keep_onnx else _without_graphs(bundle)
        if plugin is not None:
            shutil.copyfile(plugin, bundle.path / PLUGIN_LIBRARY)
        for name in [*engines, *([PLUGIN_LIBRARY] if plugin else [])]:
            path = bundle.path / name
            files[name] = FileEntry(file_sha256(path), path.stat().st_size)
        noted = {**bundle.built_with, **machine, PLUGIN: c.PLUGIN_VERSION if plugin else "none"}
        return dataclasses.replace(bundle, files=files, engines=engines, built_with=noted)

    def _entry(self, job: EngineJob, note: Note) -> EngineEntry:
        """Build one engine and say what that took."""
        _check_graph(job)
        result = self._run(job)
        for line in result.notes:
            note(line)
        return EngineEntry(round(result.seconds, 2), result.memory, job.plugins if job.plugin else ())

    def _job(
        self,
        bundle: Bundle,
        drafter: str | None,
        contract: c.EngineContract,
        machine: Mapping[str, str],
        plugin: Path | None,
    ) -> EngineJob:
        build, options, name = bundle.build, self._options, contract.engine
        inputs, outputs = tensor_types(contract, build.dtype)
        graph = str(bundle.graph_path(name, drafter))
        wide = build.dtype == "float32" or name in (c.CONTEXT, c.RELAY)  # where weights are float32 in every build
        return EngineJob(
            backend=self.name,
            label=f"{drafter}.{name}" if drafter else name,
            graph=graph,
            engine=str(bundle.engine_path(name, drafter)),
            inputs=inputs,
            outputs=outputs,
            caches=tuple(cache_tensors(contract)),
            profiles=tuple(profiles(bundle, contract)),
            plugins=contract.plugins,
            plugin=str(plugin) if plugin else None,
            widened=_count(graph, "DequantizeLinear"),
            full_float32=wide,
            compute_capabilities=self._compute_capabilities(build),
            hardware_compatibility=options.hardware_compatibility,
            version_compatible=options.version_compatible,
            timing_cache=self._timing_cache(machine),
        )

    def _compute_capabilities(self, build: BuildSpec) -> tuple[str, ...]:
        """Those to compile for ahead of time: none, TensorRT looks at the GPU."""
        return ()

    def _timing_cache(self, machine: Mapping[str, str]) -> str | None:
        """A file for each version and GPU: timings of another mean nothing."""
        if self._options.timing_cache is None:
            return None
        key = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(machine.values()))
        return str(self._options.timing_cache / f"{key}.timings")

    def _run(self, job: EngineJob) -> EngineResult:
        return run_job(job, {})


def _check_graph(job: EngineJob) -> None:
    """By ONNX itself, types and shapes included: TensorRT forgives what another tool would not."""
    try:
        onnx.checker.check_model(job.graph, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        found = " ".join(str(error).split())[:300]
        raise UserError(f"engine {job.label}: its graph is no valid ONNX ({found}); please report this") from None


def _count(graph: str, operator: str) -> int:
    """Nodes of that operator in a graph file."""
    return sum(node.op_type == operator for node in onnx.load(graph, load_external_data=False).graph.node)


def _check_heads(label: str, stack: StackSpec, dtype: DType) -> None:
    if dtype != "float32" and stack.head_dim not in HEAD_DIMS:
        raise UserError(
            f"{label}: head_dim is {stack.head_dim}; allowed in {dtype}: {HEAD_DIMS.start} to {HEAD_DIMS[-1]} in steps "
            f"of {HEAD_DIMS.step}; build with --dtype float32, or use another model"
        )


def computes(build: BuildSpec, capability: str) -> bool:
    """Whether GPUs of this compute capability, e.g. "8.9", know the type of the target's weights."""
    least = LEAST_CAPABILITY.get(build.target_weights, "0.0")
    return tuple(map(int, capability.split("."))) >= tuple(map(int, least.split(".")))


def plugin_library() -> Path:
    """The usual place of the plugin library: what DFLOW_TRT_PLUGIN names, else where a checkout builds it.

    That is the checkout that this package lies in, or where it was installed from one, the current folder.
    """
    named = os.environ.get(PLUGIN_VARIABLE)
    if named:
        return Path(named)
    checkout = Path(dflow_trt.__file__).resolve().parents[1]
    built = [folder / "build" / "plugins" / PLUGIN_LIBRARY for folder in (checkout, Path.cwd())]
    return built[0] if built[0].is_file() else built[1]


def _without_graphs(bundle: Bundle) -> dict[str, FileEntry]:
    """The files that stay when graphs and their weights have become engines; the others are removed."""
    graphs = [name for name in bundle.files if name.endswith((".onnx", ".data"))]
    for name in graphs:
        (bundle.path / name).unlink()
    return {name: entry for name, entry in bundle.files.items() if name not in graphs}


def run_job(job: EngineJob, environment: Mapping[str, str]) -> EngineResult:
    """Build one engine in a process with these variables besides our own; UserError where that fails or crashes."""
    with tempfile.TemporaryDirectory() as place:
        source, target = Path(place) / "job.json", Path(place) / "result.json"
        source.write_text(json.dumps(dataclasses.asdict(job)), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "dflow_trt.compile.engine", str(source), str(target)]
        ended = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
        if ended.returncode or not target.is_file():
            last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(
                f"engine {job.label}: the builder of {job.backend} ended with code {ended.returncode} ({last[:200]}); "
                "see that there is enough memory, or report this"
            )
        data = json.loads(target.read_text(encoding="utf-8"))
    result = EngineResult(**{**data, "notes": tuple(data["notes"])})
    if result.error:
        raise UserError(result.error)
    return result
