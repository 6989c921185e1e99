"""TensorRT-RTX: engines ahead of time, on any machine, for the GPUs that are named."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

from dflow_trt.compile.engine import EngineJob, EngineResult
from dflow_trt.compile.tensorrt import LEAST_CAPABILITY, TensorRT, computes, run_job
from dflow_trt.errors import UserError
from dflow_trt.runtime.trt.library import COMPUTE_CAPABILITY, GPU, MODULES
from dflow_trt.spec import BackendName, BuildSpec

LIBRARIES = "tensorrt_rtx_libs"
NO_BFLOAT16 = ("7.5",)  # Turing: only by name, and only where checkpoint and engines are float16


class TensorRTRTX(TensorRT):
    """See :class:`dflow_trt.compile.base.Backend`."""

    name: BackendName = "tensorrt-rtx"
    group_sizes = ()  # 16 to 256 were compiled: any

    def _check_options(self, build: BuildSpec) -> None:
        options = self._options
        if options.hardware_compatibility != "none" or options.version_compatible:
            raise UserError(
                "--hardware-compatibility, --version-compatible: tensorrt-rtx has neither; name the GPUs with "
                "--compute-capability, and build for each version"
            )
        if options.timing_cache is not None:
            raise UserError("--timing-cache: tensorrt-rtx times nothing when it compiles ahead of time; leave it out")

    def _compute_capabilities(self, build: BuildSpec) -> tuple[str, ...]:
        offered = [name for name in _offered(self._trt) if build.dtype != "bfloat16" or name not in NO_BFLOAT16]
        offered = [name for name in offered if computes(build, name)]
        chosen = self._options.compute_capabilities or tuple(name for name in offered if name not in NO_BFLOAT16)
        for name in chosen:
            if name not in offered:
                found = f"{name} in {build.dtype}"
                if build.target_weights in LEAST_CAPABILITY:
                    found += f" with {build.target_weights} weights"
                raise UserError(
                    f"--compute-capability: {found}; allowed: {', '.join(offered)}; for other GPUs build on "
                    "their own machine with --backend tensorrt"
                )
        return tuple(dict.fromkeys(chosen))

    def _machine(self, build: BuildSpec) -> dict[str, str]:
        """No GPU in particular: any of these compute capabilities."""
        version, capabilities = str(self._trt.__version__), self._compute_capabilities(build)
        return {MODULES[self.name]: version, GPU: "", COMPUTE_CAPABILITY: ", ".join(capabilities)}

    def _run(self, job: EngineJob) -> EngineResult:
        """The parser looks for its own library, to register plugins in, under a name that the wheel does not have."""
        with tempfile.TemporaryDirectory() as place:
            for library in _libraries():
                (Path(place) / library.name.partition(".so")[0]).with_suffix(".so").symlink_to(library)
            paths = [place, os.environ.get("LD_LIBRARY_PATH", "")]
            return run_job(job, {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths))})


def _offered(trt: Any) -> list[str]:
    """Of SM75, .., SM120: "7.5", .., "12.0"."""
    names = [name[2:] for name in trt.ComputeCapability.__members__ if name.startswith("SM")]
    return [f"{name[:-1]}.{name[-1]}" for name in names]


def _libraries() -> list[Path]:
    """The wheel's own; none where TensorRT-RTX was installed in another way."""
    spec = importlib.util.find_spec(LIBRARIES)
    places = list(spec.submodule_search_locations or []) if spec else []
    return [path for place in places for path in sorted(Path(place).glob("*.so.*"))]
