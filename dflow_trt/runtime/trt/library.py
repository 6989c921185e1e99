"""TensorRT itself: its Python module, its log, our plugin in its registry, and whether it is what a bundle needs."""

from __future__ import annotations

import hashlib
import importlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflow_trt import contract as c
from dflow_trt.bundle import Bundle, file_sha256
from dflow_trt.errors import UserError
from dflow_trt.runtime import cuda

MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
"""Backend -> the module that builds and runs its engines; also the name of its version in the manifest."""

# What `compile/` notes in the manifest's built_with, besides the version of the backend.
GPU, COMPUTE_CAPABILITY, HARDWARE = "gpu", "compute_capability", "hardware_compatibility"
LATER_VERSIONS = "later_versions"  # "yes" where engines also run on those of the same major number

LOG_LINES = 8


@dataclass(frozen=True)
class Machine:
    """What an engine depends on. gpu: a name, or "" where an engine was built for no particular one."""

    gpu: str
    compute_capability: str
    version: str

    def __str__(self) -> str:
        return f"{self.gpu or 'GPUs'} of compute capability {self.compute_capability} with version {self.version}"


class Library:
    """TensorRT, loaded for one bundle: the right version on the right GPU, with the bundle's plugin registered."""

    def __init__(self, bundle: Bundle) -> None:
        self.trt = import_tensorrt(bundle.build.backend)
        device = cuda.current_device()
        check_machine(bundle, Machine(device.name, device.compute_capability, str(self.trt.__version__)))
        self._logger, self._log = make_logger(self.trt)
        load_plugin(self.trt, bundle)
        self._runtime = self.trt.Runtime(self._logger)
        # Such engines bring TensorRT's own code of their version along; they are loaded by their hashes alone.
        self._runtime.engine_host_code_allowed = _later_versions(bundle)

    def deserialize(self, path: Path, sha256: str) -> Any:
        """The engine in a file whose content has that hash; UserError where it has not, or cannot be loaded."""
        content = path.read_bytes()
        _check_hash(path, hashlib.sha256(content).hexdigest(), sha256)
        engine = self._runtime.deserialize_cuda_engine(content)
        if engine is None:
            full = any("memory" in line.lower() for line in self._log)
            todo = (
                "free memory on the GPU, or see `dflow-trt plan` and build anew" if full else "build the bundle again"
            )
            raise UserError(f"{path}: TensorRT cannot load it ({self.last_words()}); {todo}")
        return engine

    def last_words(self) -> str:
        """The newest error that TensorRT logged, as one line."""
        return self._log[-1] if self._log else "it gave no reason"


def import_tensorrt(backend: str) -> Any:
    """The module of a backend; UserError where it is not installed, or cannot find its libraries."""
    try:
        return importlib.import_module(MODULES[backend])
    except (ImportError, OSError) as error:  # OSError: the package is there, a library that it loads is not
        raise UserError(
            f"{backend}: cannot be imported ({error}); in the checkout: pip install '.[{backend}]'"
        ) from None


def check_machine(bundle: Bundle, found: Machine) -> None:
    """UserError where the engines of a bundle do not run on this GPU and version; it names those on which they do."""
    note, backend = bundle.built_with, bundle.build.backend
    try:
        built = Machine(note.get(GPU, ""), note[COMPUTE_CAPABILITY], note[MODULES[backend]])
    except KeyError as error:
        raise UserError(f"{bundle.path / c.MANIFEST}: built_with has no {error}; build the bundle again") from None
    same = found.version == built.version or (_later_versions(bundle) and _is_later(found.version, built.version))
    if not same or not _fits(built, found, note.get(HARDWARE, "none")):
        raise UserError(
            f"{bundle.path / c.MANIFEST}: these {backend} engines run on {built}, and this is {found}; rebuild here: "
            f"dflow-trt build --backend {backend} --target TARGET --drafter DRAFTER --output {bundle.path} --force"
        )


def _later_versions(bundle: Bundle) -> bool:
    return bundle.built_with.get(LATER_VERSIONS) == "yes"


def _is_later(found: str, built: str) -> bool:
    """Of two versions with the same major number."""
    one, other = ([int(part) for part in version.split(".") if part.isdigit()] for version in (found, built))
    return one[0] == other[0] and one > other


def _fits(built: Machine, found: Machine, hardware: str) -> bool:
    """By TensorRT's levels of hardware compatibility; the names are its own, in lower case."""
    if hardware == "ampere_plus":
        return int(found.compute_capability.split(".")[0]) >= 8
    same = found.compute_capability in built.compute_capability.split(", ")
    return same and (hardware == "same_compute_capability" or built.gpu in ("", found.gpu))


def _check_hash(path: Path, found: str, wanted: str) -> None:
    if found != wanted:
        raise UserError(
            f"{path}: sha256 {found[:12]}, {c.MANIFEST} says {wanted[:12]}; copy the bundle again or build it again"
        )


def plugin_path(bundle: Bundle) -> Path | None:
    """The bundle's plugin library, if it has one, checked by its hash: its code is about to be run."""
    for name, entry in bundle.files.items():
        if name.endswith(c.PLUGIN_SUFFIX):
            _check_hash(bundle.path / name, file_sha256(bundle.path / name), entry.sha256)
            return bundle.path / name
    return None


def load_plugin(trt: Any, bundle: Bundle) -> None:
    """Register the dflow:: plugins: before any engine that has them inside. UserError where they cannot be."""
    needed = needed_plugins(bundle)
    if not needed:
        return
    path = plugin_path(bundle)
    if path is None:
        raise UserError(f"{bundle.path / c.MANIFEST}: lists no plugin library; build the bundle again")
    register_plugins(trt, path, needed)


def register_plugins(trt: Any, path: Path, names: Sequence[str]) -> None:
    """Load a library of plugins into TensorRT's registry; UserError where it does not give all of these."""
    registry = trt.get_plugin_registry()
    # A name without a folder would be looked for on the library path. None where this process has loaded it before.
    registry.load_library(str(path.resolve()))
    for name in names:
        if registry.get_creator(name, c.PLUGIN_VERSION, c.PLUGIN_DOMAIN) is None:
            raise UserError(
                f"{path}: does not give the plugin {c.PLUGIN_DOMAIN}::{name} version {c.PLUGIN_VERSION}; "
                "make it with build_scripts/build_plugins.sh and build the bundle again"
            )


def needed_plugins(bundle: Bundle) -> list[str]:
    """The plugins inside the engines of a bundle: none where they were compiled from the nodes' ONNX bodies."""
    return sorted({name for entry in bundle.engines.values() for name in entry.plugins})


def make_logger(trt: Any) -> tuple[Any, deque[str]]:
    """TensorRT's logger, and the lines that it keeps: errors alone, each the reason of an exception to come."""
    lines: deque[str] = deque(maxlen=LOG_LINES)
    serious = (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR)

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in serious:
                lines.append(" ".join(message.split())[:200])

    return Logger(), lines
