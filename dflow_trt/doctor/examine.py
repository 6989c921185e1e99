"""What there is: Python, driver, CUDA, TensorRT, the plugin, Triton, the extras.

What may crash is asked in a process of its own: TensorRT without a GPU takes its process along.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

from dflow_trt import contract as c

State = Literal["ok", "missing", "untested", "broken"]
SECONDS = 120.0
OLDEST_GLIBC = (2, 28)  # of the wheels of TensorRT and CUDA
ABSENT = "not installed"
TENSORRT = {
    "tensorrt": ("TensorRT", "tensorrt"),
    "tensorrt_rtx": ("TensorRT-RTX", "tensorrt-rtx"),
    "tensorrt_lean_bindings": ("TensorRT lean", ""),  # runs engines and builds none; nothing here needs it
}
"""Module -> (name, the extra that installs it)."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for.

    serves: what it is needed for; "everything" decides whether the CPU path works. found: what there is. fix: the
    command that puts it right, "" where nothing has to be.
    """

    name: str
    serves: str
    state: State
    found: str
    fix: str = ""


def examine() -> list[Finding]:
    """Everything that is looked for, in the order in which things depend on each other."""
    loaded = {module: _import(module) for module in TENSORRT}
    modules = [module for module, (works, _) in loaded.items() if works]
    return [
        _python(),
        _requirements(),
        _glibc(),
        _driver(),
        _cuda(),
        *(_tensorrt(module, *answer) for module, answer in loaded.items()),
        _plugin(modules),
        _triton_server(),
        _triton_stub(),
        *_extras(),
    ]


def backends(findings: Sequence[Finding]) -> list[str]:
    """The GPU backends that can be tried: those whose TensorRT loads, if there is a GPU."""
    fine = {finding.name for finding in findings if finding.state == "ok"}
    return [extra for name, extra in TENSORRT.values() if extra and {name, "CUDA"} <= fine]


# -- the CPU path ------------------------------------------------------------------------------------------------------


def _python() -> Finding:
    found = f"{platform.python_version()}, {sys.executable}"
    if (3, 11) <= sys.version_info < (3, 14):
        return Finding("Python", "everything", "ok", found)
    return Finding("Python", "everything", "broken", found, "install Python 3.11, 3.12 or 3.13 and make a new venv")


IMPORT_QUESTION = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        print(f"{name}: {error}".splitlines()[0])
"""


def _requirements() -> Finding:
    """The packages that dflow-trt cannot do without: all of them imported, since a wheel may be there and not load."""
    packages = _required("")
    modules = [*(name.replace("-", "_") for name in packages), "dflow_trt.api", "dflow_trt.build"]
    works, found = _python_says(IMPORT_QUESTION, *modules)
    if found or not works:
        fix = "pip install --force-reinstall . in the checkout"
        return Finding("Python packages", "everything", "broken", "; ".join(found.splitlines()), fix)
    versions = ", ".join(f"{name} {_version(name)}" for name in packages)
    return Finding("Python packages", "everything", "ok", versions or "all that dflow-trt imports")


def _glibc() -> Finding:
    """Wheels are built for a glibc; musl has none at all."""
    text = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None
    number = re.search(r"(\d+)\.(\d+)", text or "")
    if text and number and tuple(map(int, number.groups())) >= OLDEST_GLIBC:
        return Finding("glibc", "GPU, serving", "ok", text)
    wanted = "use a system with glibc 2.28 or newer (Debian 10, Ubuntu 20.04, RHEL 8)"
    return Finding("glibc", "GPU, serving", "missing", text or "another C library", wanted)


# -- the GPU -----------------------------------------------------------------------------------------------------------


def _driver() -> Finding:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    works, found = _run(query) if shutil.which("nvidia-smi") else (False, "no nvidia-smi")
    if works:
        return Finding("NVIDIA driver", "GPU", "ok", "; ".join(found.splitlines()))
    fix = "install NVIDIA's driver (Ubuntu: sudo ubuntu-drivers install) and restart"
    return Finding("NVIDIA driver", "GPU", "missing", found, fix)


CUDA_QUESTION = """
from dflow_trt.errors import UserError
from dflow_trt.runtime.cuda import current_device, versions
try:
    device, (driver, bindings) = current_device(), versions()
except UserError as error:
    raise SystemExit(str(error))
print(f"{device.name}, compute capability {device.compute_capability}, {device.free / 1e9:.1f} GB free;",
      f"CUDA {driver} of the driver, {bindings} of cuda-bindings")
"""


def _cuda() -> Finding:
    """The GPU as the runtime sees it, through cuda-bindings."""
    works, found = _python_says(CUDA_QUESTION)
    if works:
        return Finding("CUDA", "GPU", "ok", found)
    fix = _install("tensorrt") if "cuda-bindings is missing" in found else "see the driver above"
    return Finding("CUDA", "GPU", "missing", found.partition("; ")[0], fix)


def _tensorrt(module: str, works: bool, found: str) -> Finding:
    name, extra = TENSORRT[module]
    serves = "GPU" if extra else "-"
    if works:
        return Finding(name, serves, "ok", found)
    state: State = "missing" if found == ABSENT else "broken"
    return Finding(name, serves, state, found, _install(extra) if extra else "")


PLUGIN_QUESTION = """
import importlib, sys
module, path, version, domain, *names = sys.argv[1:]
registry = importlib.import_module(module).get_plugin_registry()
registry.load_library(path)
print(*(name for name in names if registry.get_creator(name, version, domain) is not None))
"""


def _plugin(modules: Sequence[str]) -> Finding:
    """Built, loaded into the registry of the first TensorRT there is, and whether it gives its plugins there."""
    name, build = "dflow:: plugin", "bash build_scripts/build_plugins.sh --fetch-toolchain build/toolchain"
    path = _python_says("from dflow_trt.compile.tensorrt import plugin_library; print(plugin_library())")[1]
    if not Path(path).is_file():
        return Finding(name, "GPU", "missing", f"no {path}", build)
    if not modules:
        return Finding(name, "GPU", "untested", f"{path}, no TensorRT to load it into", _install("tensorrt"))
    plugins = [plugin.name for plugin in c.PLUGINS]
    works, found = _python_says(PLUGIN_QUESTION, modules[0], path, c.PLUGIN_VERSION, c.PLUGIN_DOMAIN, *plugins)
    if works and found.split() == plugins:
        return Finding(name, "GPU", "ok", f"{path}: {', '.join(plugins)} in {modules[0]}")
    return Finding(name, "GPU", "broken", f"{path}: {found or 'no plugins'} in {modules[0]}", build)


# -- serving and the rest ----------------------------------------------------------------------------------------------


def pytriton_server() -> Path | None:
    """The folder of the Triton server that comes with nvidia-pytriton."""
    spec = importlib.util.find_spec("pytriton")
    places = (spec.submodule_search_locations if spec else None) or []
    servers = [Path(place) / "tritonserver" for place in places]
    return next((server for server in servers if (server / "bin" / "tritonserver").is_file()), None)


def _triton_server() -> Finding:
    packaged = pytriton_server()
    found = shutil.which("tritonserver") or (packaged and str(packaged / "bin" / "tritonserver"))
    if found:
        return Finding("Triton server", "serving", "ok", found)
    return Finding("Triton server", "serving", "missing", "no tritonserver on PATH, no pytriton", _install("triton"))


def _triton_stub() -> Finding:
    """The process in which Triton runs Python models: one for each version of Python."""
    name, packaged = "triton_python_backend_stub", pytriton_server()
    number = f"{sys.version_info.major}.{sys.version_info.minor}"
    places = [Path("/opt/tritonserver/backends/python")]
    if packaged:
        places += [packaged / "backends" / "python", packaged / "python_backend_stubs" / number]
    found = next((place / name for place in places if (place / name).is_file()), None)
    if found:
        return Finding("Triton Python backend", "serving", "ok", str(found))
    return Finding("Triton Python backend", "serving", "missing", f"no stub for Python {number}", _install("triton"))


EXTRAS = {"train": "training", "serve": "serving", "profile": "profiling", "trtllm": "TensorRT-LLM"}


def _extras() -> Iterator[Finding]:
    for extra, serves in EXTRAS.items():
        packages = _required(extra)
        missing = [name for name in packages if _version(name) is None]
        if missing:
            yield Finding(f"extra {extra}", serves, "missing", f"no {', '.join(missing)}", _install(extra))
        else:
            found = ", ".join(f"{name} {_version(name)}" for name in packages)
            yield Finding(f"extra {extra}", serves, "ok", found)


# -- asking ------------------------------------------------------------------------------------------------------------


def _install(extra: str) -> str:
    return f"pip install '.[{extra}]' in the checkout"


def _required(extra: str) -> list[str]:
    """The packages that dflow-trt requires: its own, or those of an extra."""
    try:
        lines = requires("dflow-trt") or []
    except PackageNotFoundError:  # run from a source tree that was never installed
        return []
    marked = [(line, re.search(r"extra == ['\"]([\w-]+)['\"]", line)) for line in lines]
    return [re.split(r"[^\w.-]", line)[0] for line, mark in marked if (mark.group(1) if mark else "") == extra]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _import(module: str) -> tuple[bool, str]:
    """(whether a module can be imported, its version or why not)."""
    if importlib.util.find_spec(module) is None:
        return False, ABSENT
    return _python_says(f"import {module}; print(getattr({module}, '__version__', 'installed'))")


def _python_says(code: str, *arguments: str) -> tuple[bool, str]:
    return _run([sys.executable, "-P", "-c", code, *arguments])


def _run(command: Sequence[str]) -> tuple[bool, str]:
    """(whether a command ended well, what it printed; the last line of what it complained of if it did not)."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error).splitlines()[0]
    if done.returncode == 0:
        return True, done.stdout.strip()
    if done.returncode < 0:
        return False, f"crashed ({signal.Signals(-done.returncode).name})"
    complaint = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
    return False, complaint[-1][:200]
