"""build_plugins.sh: what is in the library, what is not, and what it says when it cannot build."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import plugin_toolchain as toolchain
import pytest
from plugin_report import kernel_report
from plugin_toolchain import PLUGINS, SCRIPT, run

ARCHITECTURES = ("80", "86", "89", "90", "100", "120")


def test_no_kernel_spills_and_nothing_is_warned_about() -> None:
    usages = kernel_report.parse(toolchain.plugin_library().with_name("libdflow_plugins.so.ptxas.txt").read_text())
    kernels = {(usage.kernel, usage.dtype, usage.access) for usage in usages}
    ours = {kernel for kernel in kernels if kernel[0] in ("extract", "inject")}
    assert len(ours) == 10, "two widths and three types, each with vector and scalar access"
    assert {usage.sm for usage in usages} == set(ARCHITECTURES)
    assert len(usages) == len(kernels) * len(ARCHITECTURES)
    assert max(usage.spilled for usage in usages) == 0
    assert "warning" not in toolchain.library_build_log().lower()


def test_all_architectures_and_ptx_are_inside() -> None:
    library, cuobjdump = toolchain.plugin_library(), toolchain.tools()[2]
    inside = run([cuobjdump, "--list-elf", "--list-ptx", library]).stdout
    assert set(re.findall(r"sm_(\d+)\.cubin", inside)) == set(ARCHITECTURES)
    assert "sm_80.ptx" in inside


def test_rows_are_moved_sixteen_bytes_at_a_time() -> None:
    library, cuobjdump = toolchain.plugin_library(), toolchain.tools()[2]
    ptx = run([cuobjdump, "--dump-ptx", library]).stdout
    kernels = re.findall(r"\.entry (\w*_kernelILNS_6AccessE([01])\w*)\((.*?)\n\}", ptx, re.DOTALL)
    assert len(kernels) == 10
    for name, access, body in kernels:
        stores = re.findall(r"st\.global\S*", body)
        wide = {".v4" in store for store in stores}
        assert wide == {access == "0"}, f"{name}: {stores}"
        assert (len(re.findall(r"ld\.global\S*\.v4", body)) >= 4) == (access == "0"), name


def test_only_what_is_looked_for_is_exported() -> None:
    library = toolchain.plugin_library()
    symbols = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    exported = {line.split()[-1] for line in symbols.splitlines()}
    assert {name for name in exported if not name.startswith("dflow_")} == {"getCreators", "setLoggerFinder"}


def test_neither_tensorrt_nor_the_cuda_runtime_is_linked() -> None:
    needed = run(["readelf", "-d", toolchain.plugin_library()]).stdout
    assert "NEEDED" in needed
    assert not re.search(r"nvinfer|tensorrt|cudart|libcuda", needed)


NEEDED = ("bash", "cat", "cut", "dirname", "du", "env", "grep", "mkdir", "mktemp", "realpath", "rm")
HOST_COMPILER = ("g++", "gcc", "as", "ld", "sh")


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A PATH with what the script itself needs, and no CUDA."""
    folder = tmp_path / "bin"
    folder.mkdir()
    link(folder, *NEEDED)
    (folder / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / "python3").chmod(0o755)
    return folder


def link(folder: Path, *names: str) -> None:
    for name in names:
        found = shutil.which(name)
        assert found is not None, name
        (folder / name).symlink_to(found)


def test_a_missing_nvcc_is_said_with_what_to_do(bare_path: Path) -> None:
    result = run(["bash", SCRIPT], PATH=str(bare_path), CUDA_HOME="/nowhere")
    assert result.returncode == 1
    reason = "nvcc was not found; put it on PATH, set CUDA_HOME, or give --fetch-toolchain DIR"
    assert result.stdout == f"build_plugins: {reason}\n"


def test_missing_headers_are_said_with_what_to_do(bare_path: Path) -> None:
    for name in ("nvcc", "cuobjdump"):
        (bare_path / name).symlink_to("/bin/true")
    result = run(["bash", SCRIPT], PATH=str(bare_path), TENSORRT_ROOT="/nowhere")
    assert result.returncode == 1
    reason = "TensorRT's headers (NvInfer.h) were not found; set TENSORRT_ROOT, or give --fetch-toolchain DIR"
    assert result.stdout == f"build_plugins: {reason}\n"


@pytest.mark.slow
def test_a_machine_without_cuda_builds_with_the_fetched_toolchain(bare_path: Path, tmp_path: Path) -> None:
    if not toolchain.REQUIRED:
        toolchain.unavailable("120 MB would be fetched")
    link(bare_path, *HOST_COMPILER)
    output = tmp_path / "library.so"
    command = ["bash", SCRIPT, "--output", output, "--fetch-toolchain", tmp_path / "toolchain"]
    result = run(command, PATH=str(bare_path), CUDA_HOME="/nowhere")
    assert result.returncode == 0, result.stdout
    assert output.exists()


def test_unknown_arguments_are_refused() -> None:
    result = run(["bash", SCRIPT, "--fast"])
    assert result.returncode == 1
    assert "unknown argument '--fast'; known are --output" in result.stdout


def test_the_code_is_formatted() -> None:
    wheel = toolchain.wheels("clang-format", "clang-format==23.1.5")
    sources = [path for path in PLUGINS.rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    formatter = [wheel / "bin" / "clang-format", "--style=file", "--dry-run", "--Werror"]
    result = run([*formatter, *sources], PYTHONPATH=str(wheel))
    assert result.returncode == 0, result.stdout
