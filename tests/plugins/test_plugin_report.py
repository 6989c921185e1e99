"""kernel_report.py: reading what ptxas says, failing on spills, and the byte-and-flop model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from plugin_report import kernel_report, shown
from plugin_toolchain import PLUGINS, run

REPORT = PLUGINS / "kernel_report.py"
LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN5dflow1x13inject_kernelILNS_6AccessE1ENS_4HalfEEEvNS_15RelayInjectArgsE' \
for 'sm_90'
ptxas info    : Function properties for _ZN5dflow1x13inject_kernelILNS_6AccessE1ENS_4HalfEEEvNS_15RelayInjectArgsE
    {stack} bytes stack frame, {spill} bytes spill stores, {spill} bytes spill loads
ptxas info    : Used 77 registers, used 1 barriers, 192 bytes smem, 600 bytes cmem[0]
"""


def test_what_ptxas_says_is_read() -> None:
    [usage] = kernel_report.parse(LOG.format(stack=0, spill=0))
    assert usage == kernel_report.Usage("inject", "scalar", "float16", "90", registers=77, spilled=0, shared=192)
    assert usage.threads_per_sm == 800
    assert usage.kib_in_flight == 50


@pytest.mark.parametrize(("spill", "status"), [(0, 0), (8, 1)])
def test_spills_fail_the_build(tmp_path: Path, spill: int, status: int) -> None:
    log = tmp_path / "ptxas.txt"
    log.write_text(LOG.format(stack=spill, spill=spill))
    result = run([sys.executable, REPORT, log])
    assert result.returncode == status
    assert ("registers are spilled to memory by inject (float16, scalar) on sm_90" in result.stdout) == bool(spill)


def test_a_log_without_kernels_fails(tmp_path: Path) -> None:
    (tmp_path / "ptxas.txt").write_text("nothing\n")
    assert run([sys.executable, REPORT, tmp_path / "ptxas.txt"]).returncode == 1


def test_a_kernel_is_one_line_with_the_worst_of_its_architectures(tmp_path: Path) -> None:
    log = tmp_path / "ptxas.txt"
    other = LOG.format(stack=0, spill=0).replace("sm_90", "sm_120").replace("77 registers", "126 registers")
    log.write_text(LOG.format(stack=0, spill=0) + other)
    lines = [" ".join(line.split()) for line in run([sys.executable, REPORT, log]).stdout.splitlines()]
    assert lines[1] == "kernel access values 90 120 spilled shared threads/SM KiB in flight/SM"
    assert lines[2] == "inject scalar float16 77 126 0 192 512 32"


def test_the_model_counts_every_byte_once() -> None:
    extract = kernel_report.extract_work("Qwen3-4B", batch=2)
    rows = 2 * 16
    assert extract.written == rows * 5 * 2560 * 2
    assert extract.read == extract.written + 2 * 8
    inject = kernel_report.inject_work("Qwen3-4B", batch=2)
    relayed = 2 * 15
    assert inject.written == rows * 2560 * 4
    assert kernel_report.sample_work("Qwen3", batch=2).read == rows * (151_936 * 2 + 64)
    assert inject.read == rows * 2560 * 4 + relayed * 3 * 2560 * 4 + 2 * 2560 * 4 + rows * 8


def test_the_model_is_printed_without_a_log() -> None:
    result = run([sys.executable, REPORT, "--model"])
    assert result.returncode == 0
    assert [line.split()[:3] for line in result.stdout.splitlines()].count(["inject", "Qwen3-8B", "64"]) == 1
    assert result.stdout == shown("model"), "docs/tensorrt.md is stale: python plugins/kernel_report.py --model"
