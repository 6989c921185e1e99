"""Write signatures.json: what the real bindings of TensorRT and CUDA offer, as the fake of the tests must offer it too.

python tests/fakegpu/record_signatures.py            # needs pip with an index, a C compiler and no GPU
python tests/fakegpu/record_signatures.py --check    # fail where the file is stale

The bindings are those of the pinned wheels, each looked at in a process of its own. NVIDIA's libraries behind the full
bindings are not on PyPI: the bindings are imported on top of empty ones, which is enough to ask them for signatures.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PLACE = Path(__file__).with_name("signatures.json")
WHEELS = {
    "tensorrt 11.4.0.106": ("tensorrt-cu13-bindings==11.4.0.106",),
    "tensorrt 10.16.1.11": ("tensorrt-cu13-bindings==10.16.1.11",),
    "tensorrt_lean 11.4.0.106": ("tensorrt-lean-cu13-bindings==11.4.0.106", "tensorrt-lean-cu13-libs==11.4.0.106"),
    "tensorrt_lean 10.16.1.11": ("tensorrt-lean-cu13-bindings==10.16.1.11", "tensorrt-lean-cu13-libs==10.16.1.11"),
    "tensorrt_rtx 1.7.1.116": ("tensorrt-rtx-cu13-bindings==1.7.1.116", "tensorrt-rtx-cu13-libs==1.7.1.116"),
    "cuda-bindings 13.5.0": ("cuda-bindings==13.5.0", "cuda-pathfinder==1.9.1"),
}
"""What is recorded, and the wheels that it takes."""

RUNNING = ("Runtime", "ICudaEngine", "IExecutionContext", "IPluginRegistry", "ILogger", "Dims")
BUILDING = (
    "Builder", "INetworkDefinition", "OnnxParser", "ParserError", "IBuilderConfig", "IOptimizationProfile",
    "ITimingCache", "IHostMemory", "ILayer", "ITensor", "IAttentionInputLayer", "IAttention",
)  # fmt: skip
CLASSES = (*RUNNING, *BUILDING)
ENUMS = (
    "BuilderFlag",
    "ComputeCapability",
    "DataType",
    "ExecutionContextAllocationStrategy",
    "HardwareCompatibilityLevel",
    "LayerType",
    "NetworkDefinitionCreationFlag",
    "TensorIOMode",
    "TensorLocation",
)
CUDA_ENUMS = {
    "cudaError_t": (
        "cudaSuccess", "cudaErrorInvalidValue", "cudaErrorMemoryAllocation", "cudaErrorInsufficientDriver",
        "cudaErrorNoDevice", "cudaErrorInvalidResourceHandle", "cudaErrorIllegalAddress", "cudaErrorLaunchFailure",
        "cudaErrorStreamCaptureUnsupported", "cudaErrorStreamCaptureInvalidated",
    ),
    "cudaMemcpyKind": ("cudaMemcpyHostToDevice", "cudaMemcpyDeviceToHost", "cudaMemcpyDeviceToDevice"),
    "cudaStreamCaptureMode": ("cudaStreamCaptureModeThreadLocal",),
}  # fmt: skip
CUDA_NUMBERS = ("cudaEventDefault", "cudaEventDisableTiming", "cudaStreamNonBlocking")
CUDA_CALLS = (
    "cudaDriverGetVersion", "cudaEventCreateWithFlags", "cudaEventDestroy", "cudaEventElapsedTime", "cudaEventRecord",
    "cudaEventSynchronize", "cudaFree", "cudaFreeHost", "cudaGetDevice", "cudaGetDeviceProperties", "cudaGetErrorName",
    "cudaGetErrorString", "cudaGetLastError", "cudaGraphDestroy", "cudaGraphExecDestroy", "cudaGraphInstantiate",
    "cudaGraphLaunch", "cudaHostAlloc", "cudaMalloc", "cudaMemGetInfo", "cudaMemcpy3DAsync", "cudaMemcpyAsync",
    "cudaMemsetAsync", "cudaRuntimeGetVersion", "cudaStreamBeginCapture", "cudaStreamCreateWithFlags",
    "cudaStreamDestroy", "cudaStreamEndCapture", "cudaStreamSynchronize", "make_cudaExtent", "make_cudaPitchedPtr",
)  # fmt: skip
EMPTY_LIBRARIES = ("nvinfer", "nvinfer_plugin", "nvonnxparser")
EMPTY_SOURCE = """
void *createInferBuilder_INTERNAL() { return 0; }
void *createInferRefitter_INTERNAL() { return 0; }
void *createInferRuntime_INTERNAL() { return 0; }
void *createNvOnnxParserRefitter_INTERNAL() { return 0; }
void *createNvOnnxParser_INTERNAL() { return 0; }
void *getBuilderPluginRegistry() { return 0; }
void *getPluginRegistry() { return 0; }
int getNvOnnxParserVersion() { return 0; }
int initLibNvInferPlugins() { return 0; }
"""


# -- inside the process that has the bindings --------------------------------------------------------------------------


def look(name: str, folder: Path) -> dict[str, Any]:
    """What a package of the folder offers; imports it."""
    if name == "cuda-bindings":
        return _look_at_cuda()
    module = _load(folder / f"{name}_bindings" / f"{name}.so", name)
    found = {cls: _members(getattr(module, cls)) for cls in CLASSES if hasattr(module, cls)}
    return {
        "classes": found,
        "enums": {enum: list(getattr(module, enum).__members__) for enum in ENUMS if hasattr(module, enum)},
        "severities": list(module.ILogger.Severity.__members__),
        "names": sorted(item for item in dir(module) if isinstance(getattr(module, item), type)),
    }


def _load(path: Path, name: str) -> Any:
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _members(cls: Any) -> dict[str, str]:
    """Member -> its signatures with " | " between, or "property"."""
    names = [name for name in dir(cls) if not name.startswith("_") or name == "__init__"]
    return {name: _signatures(name, getattr(cls, name)) for name in names}


def _signatures(name: str, member: Any) -> str:
    if isinstance(member, property):
        return "property"
    lines = [line.strip() for line in (member.__doc__ or "").splitlines()]
    typed = [line.partition(f"{name}(self: ")[2] for line in lines if f"{name}(self: " in line]
    return " | ".join(map(_short, typed)) or "untyped"


def _short(line: str) -> str:
    """Of "pkg.mod.Class, name: str) -> pkg.mod.Other": "(name: str) -> Other"."""
    line = re.sub(r"(\w+(\.|::))+(\w+)", r"\3", line)
    return "(" + (line.partition(", ")[2] if "," in line.partition(")")[0] else line[line.index(")") :])


def _look_at_cuda() -> dict[str, Any]:
    from cuda.bindings import runtime

    return {
        "calls": {
            name: (getattr(runtime, name).__doc__ or "").splitlines()[0].removeprefix(name) for name in CUDA_CALLS
        },
        "enums": {enum: _values(getattr(runtime, enum), names) for enum, names in CUDA_ENUMS.items()},
        "numbers": {name: int(getattr(runtime, name)) for name in CUDA_NUMBERS},
        "parameters": sorted(name for name in dir(runtime.cudaMemcpy3DParms()) if not name.startswith("_")),
        "properties": sorted(set(dir(runtime.cudaDeviceProp())) & {"name", "major", "minor", "totalGlobalMem"}),
    }


def _values(enum: Any, names: tuple[str, ...]) -> dict[str, int]:
    return {name: int(getattr(enum, name)) for name in names}


# -- outside -----------------------------------------------------------------------------------------------------------


def record(work: Path) -> dict[str, Any]:
    found = {}
    for label, wheels in WHEELS.items():
        folder = work / label.replace(" ", "-")
        _fetch(folder, wheels)
        # -P: beside this file lie a cuda.py and a tensorrt.py that are not the real ones.
        command = [sys.executable, "-P", __file__, "--look", label.split()[0], str(folder)]
        paths = [folder, *folder.glob("*_libs"), _empty_libraries(folder, label)]
        environment = {"PYTHONPATH": str(folder), "LD_LIBRARY_PATH": ":".join(map(str, paths))}
        found[label] = json.loads(subprocess.check_output(command, env=environment))
    return {label: _stored(found, label) for label in found}


def _fetch(folder: Path, wheels: tuple[str, ...]) -> None:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), *wheels]
    subprocess.run(pip, check=True)
    for wheel in folder.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(folder)


def _empty_libraries(folder: Path, label: str) -> Path:
    """Libraries with the entry points that the full bindings want, doing nothing."""
    place, major = folder / "empty", label.split()[1].split(".")[0]
    place.mkdir()
    (place / "empty.c").write_text(EMPTY_SOURCE)
    for name in EMPTY_LIBRARIES:
        target = f"lib{name}.so.{major}"
        flags = ["-shared", "-fPIC", "-w", f"-Wl,-soname,{target}", "-o", str(place / target)]
        subprocess.run(["cc", *flags, str(place / "empty.c")], check=True)
    return place


def _stored(found: dict[str, Any], label: str) -> dict[str, Any]:
    """Of the lean bindings, only where they differ from the full ones of the same version."""
    data = {part: value for part, value in found[label].items() if part != "names"}
    if not label.startswith("tensorrt_lean"):
        return data
    full = found[label.replace("tensorrt_lean", "tensorrt")]
    missing = sorted(set(full["names"]) - set(found[label]["names"]))
    other = {f"{cls}.{name}": text for cls, name, text in _flat(data) if full["classes"][cls].get(name) != text}
    return {"other_signatures": other, "missing_classes": missing}


def _flat(data: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for cls, members in data["classes"].items():
        for name, text in members.items():
            yield cls, name, text


def main() -> None:
    parser = argparse.ArgumentParser(description="Write tests/fakegpu/signatures.json from the real bindings.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the file is stale")
    parser.add_argument("--look", nargs=2, metavar=("PACKAGE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.look:
        print(json.dumps(look(options.look[0], Path(options.look[1]))))
        return
    with tempfile.TemporaryDirectory() as work:
        text = json.dumps(record(Path(work)), indent=1) + "\n"
    if not options.check:
        PLACE.write_text(text, encoding="utf-8")
    elif PLACE.read_text(encoding="utf-8") != text:
        sys.exit("tests/fakegpu/signatures.json is stale: run python tests/fakegpu/record_signatures.py")


if __name__ == "__main__":
    main()
