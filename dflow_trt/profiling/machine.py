"""The machine that a profile runs on, and what this process holds of its memory."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

from dflow_trt.profiling.record import Machine
from dflow_trt.runtime.ort import usable_cores

PACKAGES = ("dflow-trt", "onnxruntime", "tensorrt", "tensorrt-rtx-cu13", "numpy")
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "amx_bf16")


def machine() -> Machine:
    """Processor, cores, memory, load, versions."""
    model, features = _processor()
    found = {name: version for name in PACKAGES if (version := package_version(name)) is not None}
    return Machine(
        cpu=model,
        cpu_features=features,
        cores=usable_cores(),
        memory=_kilobytes("/proc/meminfo", "MemTotal"),
        platform=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        load_average=[round(load, 2) for load in os.getloadavg()],
        versions=found,
    )


def package_version(name: str) -> str | None:
    """What is installed, None if it is not."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> tuple[str, list[str]]:
    fields = _lines("/proc/cpuinfo")
    flags = fields.get("flags", "").split()
    return fields.get("model name") or platform.processor() or "unknown", [name for name in FEATURES if name in flags]


def _lines(path: str) -> dict[str, str]:
    """``name: value`` lines of a file of /proc, the first of a name; none where the system has no such file."""
    file, found = Path(path), dict[str, str]()
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    return found


def _kilobytes(path: str, name: str) -> int | None:
    value = _lines(path).get(name)
    return int(value.split()[0]) * 1024 if value else None


def used_memory(on_gpu: bool) -> tuple[int | None, int | None]:
    """(bytes in use, bytes that there are): of this process and machine, or of the GPU, whoever uses it. None where the
    system does not say."""
    if on_gpu:
        from dflow_trt.runtime.cuda import current_device

        device = current_device()
        return device.memory - device.free, device.memory
    return _kilobytes("/proc/self/status", "VmRSS"), _kilobytes("/proc/meminfo", "MemTotal")


def anonymous() -> int | None:
    """Of them those that no file backs."""
    return _kilobytes("/proc/self/status", "RssAnon")


def peak() -> int | None:
    """The most that was resident so far."""
    return _kilobytes("/proc/self/status", "VmHWM")
