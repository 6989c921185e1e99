"""plugins/kernel_report.py as a module, and what docs/tensorrt.md shows of it."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from plugin_toolchain import PLUGINS, ROOT


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_report", PLUGINS / "kernel_report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


kernel_report = _load()


def shown(name: str) -> str:
    """The block of docs/tensorrt.md behind the comment of that name."""
    text = (ROOT / "docs" / "tensorrt.md").read_text(encoding="utf-8")
    return text.partition(f"<!-- {name} -->\n```\n")[2].partition("```\n")[0]
