"""build_plugins.sh: what is in the library, what is not, and what it says when it cannot build."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import plugin_toolchain as toolchain
import pytest
from plugin_report import kernel_report, shown
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


def test_the_docs_show_what_nvcc_reports() -> None:
    log = toolchain.library_build_log()
    if "V13.0.88" not in log:
        pytest.skip("docs/tensorrt.md shows what nvcc 13.0.88 reports, and this is another")
    assert shown("ptxas") in log, "docs/tensorrt.md is stale: copy what build_plugins.sh prints"


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


NEEDED = ("bash", "cat", "cut", "dirname", "du", "env", "grep", "mkdir", "mktemp", "mv", "realpath", "rm")
HOST_COMPILER = ("g++", "gcc", "as", "ld", "sh")


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A PATH with what the script itself needs, and no CUDA."""
    folder = tmp_path / "bin"
    folder.mkdir()
    link(folder, *NEEDED)
    program(folder / "python3", f'exec "{sys.executable}" "$@"')
    return folder


def program(path: Path, command: str) -> None:
    path.write_text(f"#!/bin/bash\n{command}\n")
    path.chmod(0o755)


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


def test_an_nvcc_that_is_too_old_is_said_with_what_to_do(bare_path: Path) -> None:
    program(bare_path / "nvcc", "echo compute_80 compute_90")
    result = run(["bash", SCRIPT], PATH=str(bare_path), CUDA_HOME="/nowhere")
    assert result.returncode == 1
    reason = "does not know compute capability 12.0; install CUDA 12.8 or later, or give --fetch-toolchain DIR"
    assert result.stdout == f"build_plugins: {bare_path}/nvcc {reason}\n"


def test_a_build_that_fails_leaves_the_library_that_was_there(bare_path: Path, tmp_path: Path) -> None:
    """nvcc leaves something behind and fails; headers and cuobjdump are there."""
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "NvInfer.h").touch()
    link(bare_path, "ls")
    program(bare_path / "nvcc", "echo compute_120; echo half > '" + str(tmp_path / "library.so.partial") + "'; exit 2")
    program(bare_path / "cuobjdump", "true")
    (tmp_path / "library.so").write_text("the one before")
    command = ["bash", SCRIPT, "--output", tmp_path / "library.so"]
    result = run(command, PATH=str(bare_path), TENSORRT_ROOT=str(tmp_path))
    assert result.returncode == 1
    assert result.stdout.endswith("build_plugins: nvcc failed, see above\n")
    assert (tmp_path / "library.so").read_text() == "the one before"
    assert not (tmp_path / "library.so.partial").exists()


def test_missing_headers_are_said_with_what_to_do(bare_path: Path) -> None:
    program(bare_path / "nvcc", "echo compute_90 compute_120")
    program(bare_path / "cuobjdump", "true")
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
    wheel = toolchain.wheels("clang-format")
    sources = [path for path in PLUGINS.rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    formatter = [wheel / "bin" / "clang-format", "--style=file", "--dry-run", "--Werror"]
    result = run([*formatter, *sources], PYTHONPATH=str(wheel))
    assert result.returncode == 0, result.stdout
