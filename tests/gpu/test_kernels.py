"""The plugins' kernels on a real GPU: against float64 and the CPU, and against a plain copy; with card and date."""

from __future__ import annotations

import json
from pathlib import Path

import plugin_toolchain as toolchain
import pytest
from plugin_toolchain import KERNELS, NO_GPU, TESTS, run

pytestmark = pytest.mark.gpu


def output_of(program: Path) -> tuple[int, str]:
    result = run([program])
    print(result.stdout)
    if result.returncode == NO_GPU:
        pytest.skip(result.stdout.strip())
    return result.returncode, result.stdout


def test_the_kernels_match_float64_and_the_cpu() -> None:
    program = toolchain.cuda_program("check_kernels", [TESTS / "check_kernels.cu", *KERNELS])
    status, output = output_of(program)
    assert status == 0, output


def test_large_calls_reach_85_percent_of_a_copy() -> None:
    program = toolchain.cuda_program("bench_kernels", [TESTS / "bench_kernels.cu", *KERNELS])
    status, output = output_of(program)
    result = json.loads(output.splitlines()[-1])
    assert (status == 0) == (result["worst_large_fraction"] >= result["goal"])
    assert status == 0, output
