"""Builds the C++ parts of the plugins for the tests: on demand, once, under ``build/``.

Where a compiler or a TensorRT library is missing, a test is skipped with the reason. With DFLOW_REQUIRE_TOOLCHAIN=1
(test.sh --toolchain sets it) what is missing is fetched from PyPI instead, as build_scripts/toolchain pins it, and the
test fails if that is not possible.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[1]
PLUGINS = ROOT / "plugins"
TESTS = PLUGINS / "tests"
BUILD = ROOT / "build" / "plugins"
TOOLCHAIN = ROOT / "build" / "toolchain"
SCRIPT = ROOT / "build_scripts" / "build_plugins.sh"
PINNED = ROOT / "build_scripts" / "toolchain"
REQUIRED = os.environ.get("DFLOW_REQUIRE_TOOLCHAIN", "0") not in ("", "0")

KERNELS = sorted((PLUGINS / "kernels").glob("*.cu"))
ON_CPU = [TESTS / "cuda_on_cpu" / "cuda_on_cpu.cpp"]
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-missing-field-initializers"]
SOURCE_SUFFIXES = (".h", ".cpp", ".cu", ".cuh", ".map", ".py", ".sh")
NO_GPU = 77  # what the programs for a GPU exit with where there is none

Command = Sequence[str | Path]


def unavailable(reason: str) -> NoReturn:
    """Skip the test, or fail it where nothing may be missing."""
    if REQUIRED:
        pytest.fail(reason)
    pytest.skip(f"{reason} (build_scripts/test.sh --toolchain fetches what is missing)")


def run(command: Command, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command; its standard error is part of its output."""
    merged = os.environ | environment
    return subprocess.run(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=merged, check=False
    )


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """One process at a time: several workers may want the same thing."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fingerprint(command: Command, sources: Iterable[Path]) -> str:
    digest = hashlib.sha256("\0".join(map(str, command)).encode())
    for source in sorted(path for path in [SCRIPT, *sources] if path.suffix in SOURCE_SUFFIXES):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _build(output: Path, command: Command, sources: Iterable[Path]) -> str:
    """Run a command that makes ``output``, unless that was done from the same sources; gives what it printed."""
    log, stamp = output.with_name(f"{output.name}.log"), output.with_name(f"{output.name}.stamp")
    with _locked(output.name):
        wanted = _fingerprint(command, sources)
        if not (output.exists() and stamp.exists() and stamp.read_text() == wanted):
            result = run(command)
            if result.returncode != 0:
                pytest.fail(f"{' '.join(map(str, command))}\n{result.stdout}", pytrace=False)
            log.write_text(result.stdout)
            stamp.write_text(wanted)
        return log.read_text()


def _fetch() -> list[str]:
    return ["--fetch-toolchain", str(TOOLCHAIN)] if REQUIRED or TOOLCHAIN.exists() else []


@cache
def tools() -> tuple[Path, Path, Path]:
    """nvcc, TensorRT's headers and cuobjdump."""
    with _locked("toolchain"):
        result = run(["bash", SCRIPT, "--tools", *_fetch()])
    lines = result.stdout.splitlines()
    if result.returncode != 0:
        unavailable(lines[-1])
    nvcc, headers, cuobjdump = map(Path, lines[-3:])
    return nvcc, headers, cuobjdump


def plugin_library() -> Path:
    """The plugin library for all architectures, as build_plugins.sh makes it."""
    tools()
    output = BUILD / "libdflow_plugins.so"
    _build(output, ["bash", SCRIPT, "--output", output, *_fetch()], set(PLUGINS.rglob("*")) - set(TESTS.rglob("*")))
    return output


def library_build_log() -> str:
    """What build_plugins.sh printed when it made :func:`plugin_library`."""
    return plugin_library().with_name("libdflow_plugins.so.log").read_text()


def host_program(name: str, sources: Sequence[Path], *options: str) -> Path:
    """A program (or, with -shared, a library) in which the kernels run on the CPU; needs g++ alone."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        unavailable(f"{compiler} was not found; install it (Debian: apt-get install g++)")
    output = BUILD / name
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", *WARNINGS, "-I", TESTS / "cuda_on_cpu", *options]
    _build(output, [compiler, *flags, "-o", output, "-x", "c++", *sources, *ON_CPU, *KERNELS], PLUGINS.rglob("*"))
    return output


def cuda_program(name: str, sources: Sequence[Path], *options: str) -> Path:
    """A program that nvcc compiles, for the GPU at hand or, without one, for the oldest that the plugins know."""
    nvcc, headers, _ = tools()
    output = BUILD / name
    flags = ["-std=c++17", "-O2", "-cudart", "static", "-Xcompiler", ",".join(WARNINGS), "-isystem", headers]
    flags += [f"-arch={'native' if shutil.which('nvidia-smi') else 'sm_80'}"]
    flags += ["-L", nvcc.resolve().parents[1] / "lib", *options]
    _build(output, [nvcc, *flags, "-o", output, *sources], PLUGINS.rglob("*"))
    return output


def wheels(name: str) -> Path:
    """A folder with the wheels that build_scripts/toolchain/NAME.txt pins; kept between runs."""
    folder = TOOLCHAIN / name
    with _locked(name):
        if folder.exists():
            return folder
        if not REQUIRED:
            unavailable(f"the wheels of {name} are not there")
        partial = folder.with_name(f"{name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-qq",
            "--disable-pip-version-check",
            "--no-deps",
            "--no-compile",
        ]
        result = run([*pip, "--target", partial, "--require-hashes", "--requirement", PINNED / f"{name}.txt"])
        if result.returncode != 0:
            unavailable(f"the wheels of {name} could not be installed: {result.stdout}")
        partial.rename(folder)
    return folder
