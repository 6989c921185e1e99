"""The C++ tests: the kernels' arithmetic and launchers on a CPU, and the plugins behind TensorRT's interface."""

from __future__ import annotations

import plugin_toolchain as toolchain
from plugin_toolchain import TESTS, run


def test_the_kernels_are_right_on_a_cpu() -> None:
    sources = [TESTS / f"{name}.cpp" for name in ("main", "test_numbers", "test_rows", "test_kernels")]
    result = run([toolchain.host_program("test_kernels", sources)])
    assert result.returncode == 0, result.stdout
    assert result.stdout.splitlines()[-1].endswith("passed, 0 failed")


def test_the_program_that_checks_a_gpu_passes_on_a_pretended_one() -> None:
    result = run([toolchain.host_program("check_kernels_on_cpu", [TESTS / "check_kernels.cu"])])
    assert result.returncode == 0, result.stdout
    assert "RelayInject: 0 of" in result.stdout, "host functions and kernels give the same bits"


def test_the_plugins_keep_to_their_contract() -> None:
    program = toolchain.cuda_program("test_plugins", [TESTS / "test_plugins.cpp"], "-ldl", "-lpthread")
    result = run([program, toolchain.plugin_library()])
    assert result.returncode == 0, result.stdout
