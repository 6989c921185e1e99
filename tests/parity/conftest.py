"""Import paths of the parity tests (the package, ``tests/tiny.py``, the helpers beside this file), and a summary.

``pytest tests/parity -v`` ends with the worst error of every comparison.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
for folder in (HERE.parents[1], HERE.parent, HERE):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

Measure = Callable[[str, float], None]
MEASURED = pytest.StashKey[list[tuple[str, str, float]]]()


@pytest.fixture
def measure(request: pytest.FixtureRequest) -> Measure:
    """Record a measured number under a label, for the summary."""
    found = request.config.stash.setdefault(MEASURED, [])
    return lambda label, value: found.append((request.node.name, label, value))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    measured = config.stash.get(MEASURED, [])
    if measured and config.get_verbosity() > 0:
        terminalreporter.section("measured")
        for test, label, value in measured:
            terminalreporter.write_line(f"{value:10.3g}  {label:24} {test}")
