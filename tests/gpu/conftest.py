"""Tests marked ``gpu`` are skipped, with the reason, where there is no GPU."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache

import pytest


@cache
def _missing() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return "no GPU: nvidia-smi is not here"
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return None if found.returncode == 0 and found.stdout.strip() else "no GPU: nvidia-smi lists none"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := _missing()):
        pytest.skip(reason)
