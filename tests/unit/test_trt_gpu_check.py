"""build_scripts/gpu_check.sh: what it says without a GPU, and its report of passed and failed steps."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "build_scripts" / "gpu_check.sh"
DOCTOR = {
    "cpu_path": True,
    "findings": [
        {"name": "Python", "state": "ok", "found": "3.11"},
        {"name": "self-test: CPU", "state": "ok", "found": "36 of 36"},
        {"name": "self-test: tensorrt", "state": "ok", "found": "6 of 6"},
    ],
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout in which every command is a stub that says its name: the script itself is the real one."""
    scripts, commands = tmp_path / "build_scripts", tmp_path / "bin"
    for folder in (scripts, commands, tmp_path / "build" / "plugins"):
        folder.mkdir(parents=True)
    shutil.copy(SCRIPT, scripts)
    (scripts / "setup.sh").write_text(f'root={tmp_path}\nsetup_environment() {{ echo "setup $*"; }}\n')
    (scripts / "build_plugins.sh").write_text("echo built for sm 80\n")
    stub(commands / "nvidia-smi", "echo 'GPU 0: Fake RTX (UUID: x)'")
    stub(commands / "python", "echo \"$*\"; echo '12 passed'")
    stub(commands / "dflow-trt", f"case $* in *json*) echo '{json.dumps(DOCTOR)}' ;; *) echo table ;; esac")
    stub(tmp_path / "build" / "plugins" / "bench_kernels", "echo table; echo '{\"worst_large_fraction\": 0.9}'")
    return tmp_path


def stub(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def check(checkout: Path) -> tuple[int, str, str]:
    """(exit status, what was said, the report)."""
    path = f"{checkout / 'bin'}:{os.environ['PATH']}"
    command = ["bash", checkout / "build_scripts" / "gpu_check.sh", checkout / "report.md"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": path})
    report = checkout / "report.md"
    return done.returncode, done.stderr, report.read_text() if report.exists() else ""


def data_of(report: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(report.rpartition("```json\n")[2].rpartition("```")[0])
    return found


def test_without_a_gpu_it_says_so_in_one_line_and_fails(checkout: Path) -> None:
    stub(checkout / "bin" / "nvidia-smi", "exit 9")
    status, said, report = check(checkout)
    assert status == 1
    assert said.startswith("gpu_check: no GPU here (nvidia-smi finds none); run this on a machine with")
    assert said.count("\n") == 1
    assert report == ""


def test_the_report_has_every_step_its_log_and_json(checkout: Path) -> None:
    status, said, report = check(checkout)
    assert status == 0, said
    assert said.splitlines()[-1] == f"gpu_check: {checkout / 'report.md'}; please send it"
    steps = ["setup", "doctor", "plugins", "tests", "self-test", "timing"]
    assert re.findall(r"^\| ([a-z-]+) \| passed \| \d+ \|$", report, re.MULTILINE) == steps
    assert re.findall(r"^## (.+)$", report, re.MULTILINE) == [*steps, "JSON"]
    for line in ("setup test tensorrt tensorrt-rtx", "built for sm 80", "12 passed", "self-test: tensorrt: ok: 6 of 6"):
        assert line in report
    assert "-m pytest -q -rA -m gpu tests/gpu" in report
    data = data_of(report)
    assert data["gpus"] == ["GPU 0: Fake RTX (UUID: x)"]
    assert data["doctor"] == DOCTOR
    assert data["timing"] == {"worst_large_fraction": 0.9}
    assert {name: step["status"] for name, step in data["steps"].items()} == dict.fromkeys(steps, 0)


def test_a_step_that_fails_fails_the_check_and_the_others_still_run(checkout: Path) -> None:
    stub(checkout / "bin" / "python", "echo '1 failed'; exit 1")
    (checkout / "build" / "plugins" / "bench_kernels").unlink()
    status, said, report = check(checkout)
    assert status == 1
    assert "gpu_check: tests failed, see the report" in said
    assert "| tests | **failed (1)** |" in report
    assert "| self-test | passed |" in report
    assert "build/plugins/bench_kernels was not built: see the tests" in report
    assert data_of(report)["timing"] is None


def test_a_self_test_without_the_gpus_part_fails(checkout: Path) -> None:
    """On a machine with a GPU it is the point of the check that TensorRT was tried."""
    findings = {**DOCTOR, "findings": DOCTOR["findings"][:2]}  # type: ignore[index]
    stub(checkout / "bin" / "dflow-trt", f"echo '{json.dumps(findings)}'")
    status, _, report = check(checkout)
    assert status == 1
    assert "| self-test | **failed (1)** |" in report
