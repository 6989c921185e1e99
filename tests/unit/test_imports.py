"""The direction of imports: compile side and serve side meet at the bundle, and the CPU path loads no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import dflow_trt
from dflow_trt.cli import cli

ROOT = Path(dflow_trt.__file__).resolve().parent

# Each unit (a module, or a folder of them) imports from layers below its own, and from those listed beside it.
LAYERS: list[dict[str, set[str]]] = [
    {"errors": set(), "spec": set()},
    {"contract": set(), "files": set(), "progress": set(), "feeds": set()},
    {
        "kinds": set(),
        "checkpoint": set(),
        "graphs": {"checkpoint", "kinds", "rope"},
        "method": set(),
        "bundle": {"kinds"},
        "rope": set(),
        "text": set(),
    },
    {
        "compile": {"runtime"},  # how TensorRT is loaded, and what its engines look like
        "runtime": set(),
        "request": set(),
        "slots": {"request"},
        "drafting": {"request", "runtime"},
        "decode": {"drafting", "request", "runtime", "slots"},
        "memory": set(),
        "reference": set(),
        "selfcheck": {"memory", "reference", "runtime"},
    },
    {
        "build": set(),
        "api": set(),
        "serving": {"api", "prompts"},
        "profiling": {"example", "serving"},
        "prompts": set(),
        "example": set(),
        "plan": {"build"},
        "trtllm": set(),
    },
    {"cli": {"console", "doctor"}, "console": set(), "doctor": set()},
    {"__main__": set()},
]
RANK = {unit: rank for rank, layer in enumerate(LAYERS) for unit in layer}
BESIDE = {unit: beside for layer in LAYERS for unit, beside in layer.items()}

# Units that know no more than this of the package, and these packages besides the standard library.
NARROW: dict[str, tuple[set[str], set[str]]] = {
    "errors": (set(), set()),
    "spec": (set(), set()),
    "contract": ({"spec"}, set()),
    "method": ({"spec", "errors"}, {"numpy"}),
    "rope": ({"spec"}, {"numpy"}),
    "progress": (set(), {"rich"}),
    "request": ({"bundle", "method"}, set()),
    "training": (
        {"errors", "files", "progress", "spec"},
        {"numpy", "safetensors", "torch", "transformers", "accelerate", "rich", "tokenizers"},
    ),
}
# Packages that only these files (or folders) import, at any depth.
PRIVATE: dict[str, tuple[str, ...]] = {
    "torch": ("training/",),
    "transformers": ("training/",),
    "accelerate": ("training/",),
    "tensorrt": ("compile/tensorrt", "runtime/trt"),
    "tensorrt_rtx": ("compile/tensorrt", "runtime/trt"),
    "tensorrt_llm": (),
    "triton_python_backend_utils": ("serving/triton",),
    "tritonclient": ("serving/openai/backend", "serving/serve", "profiling/remote/triton"),
    "grpc": ("serving/openai/backend",),
    "pydantic": ("serving/openai/protocol", "profiling/", "cli/profile"),
    "starlette": ("serving/openai/app", "serving/serve"),
    "uvicorn": ("serving/serve",),
    "httpx": ("serving/openai/app", "serving/serve", "profiling/remote/openai"),
    "matplotlib": ("profiling/charts", "cli/profile"),
    "onnxruntime": ("compile/onnxruntime", "runtime/ort", "selfcheck/engine", "profiling/probes"),
}
# What generating from a bundle never needs, directly or through others.
SERVE_SIDE = "api"
COMPILE_SIDE = {"checkpoint", "graphs", "compile", "build", "selfcheck", "reference", "training", "onnx", "onnx_ir"}


def imported(tree: ast.AST, package: list[str]) -> Iterator[str]:
    """Full names of everything that a module imports, at any depth; ``package`` is where it lies."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            if base == ["dflow_trt"]:
                yield from (f"dflow_trt.{alias.name}" for alias in node.names)
            else:
                yield ".".join(base)


def unit_of(name: str) -> str | None:
    """The unit of ``dflow_trt.<unit>[.<more>]``; None for the package's own names, such as its version."""
    parts = name.split(".")
    found = len(parts) > 1 and ((ROOT / parts[1]).is_dir() or (ROOT / f"{parts[1]}.py").is_file())
    return parts[1] if found else None


def breaches(path: str, source: str) -> list[str]:
    """What is wrong with the imports of one module; ``path`` is relative to the package."""
    parts = Path(path).with_suffix("").parts
    unit, found = parts[0], []
    if unit == "__init__":
        return []
    if unit not in RANK and unit not in NARROW:
        return [f"{path}: the unit {unit!r} has no layer in tests/unit/test_imports.py"]
    for name in imported(ast.parse(source), ["dflow_trt", *parts[:-1]]):
        top = name.split(".")[0]
        if top != "dflow_trt":
            found += _third_party(path, unit, top)
            continue
        other = unit_of(name)
        if other is None or other == unit:
            continue
        if unit in NARROW and other not in NARROW[unit][0]:
            found.append(f"{path}: {unit} imports {other}")
        elif unit in RANK and not (RANK.get(other, 99) < RANK[unit] or other in BESIDE[unit]):
            allowed_train = unit == "cli" and other == "training"
            found += [] if allowed_train else [f"{path}: {unit} imports {other}, which is not below it"]
    return found


def _third_party(path: str, unit: str, package: str) -> list[str]:
    if package in sys.stdlib_module_names:
        return []
    if package in PRIVATE and not path.startswith(PRIVATE[package]):
        return [f"{path}: imports {package}, which belongs to {', '.join(PRIVATE[package])}"]
    if unit in NARROW and package not in NARROW[unit][1]:
        return [f"{path}: {unit} imports {package}"]
    return []


def modules() -> dict[str, str]:
    return {str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in sorted(ROOT.rglob("*.py"))}


def reachable(start: str, sources: dict[str, str]) -> set[str]:
    """Units and packages that a unit imports, directly or through others."""
    edges: dict[str, set[str]] = {}
    for path, source in sources.items():
        parts = Path(path).with_suffix("").parts
        for name in imported(ast.parse(source), ["dflow_trt", *parts[:-1]]):
            other = unit_of(name) if name.startswith("dflow_trt") else name.split(".")[0]
            edges.setdefault(parts[0], set()).update({other} if other else set())
    seen, todo = set(), [start]
    while todo:
        for other in edges.get(todo.pop(), set()) - seen:
            seen.add(other)
            todo.append(other)
    return seen


def test_imports_point_downwards() -> None:
    sources = modules()
    assert len(sources) > 40
    found = [breach for path, source in sources.items() for breach in breaches(path, source)]
    assert found == []


def test_generating_from_a_bundle_needs_nothing_of_the_compile_side() -> None:
    needed = reachable(SERVE_SIDE, modules())
    assert {"decode", "method", "runtime", "bundle", "numpy", "onnxruntime"} <= needed, "the walk sees the imports"
    assert needed & (COMPILE_SIDE | {"torch", "transformers", "tensorrt"}) == set()


SYNTHETIC = {
    "method looks up": ("method/verify.py", "from dflow_trt.request import Slot"),
    "method looks at the contract": ("method/verify.py", "from dflow_trt import contract as c"),
    "method takes a package": ("method/sampling.py", "import scipy"),
    "contract looks up": ("contract.py", "from dflow_trt.bundle import Bundle"),
    "spec takes numpy": ("spec.py", "import numpy as np"),
    "bundle reads a checkpoint": ("bundle.py", "from dflow_trt.checkpoint.target import read_target"),
    "decode builds": ("decode.py", "def f():\n    import dflow_trt.build"),
    "runtime decodes": ("runtime/ort.py", "from dflow_trt.decode import Decoder"),
    "runtime decodes, relatively": ("runtime/ort.py", "from ..decode import Decoder"),
    "the package by name": ("runtime/ort.py", "from dflow_trt import decode"),
    "api builds": ("api.py", "from dflow_trt.build import build_bundle"),
    "build prints": ("build.py", "from dflow_trt import console"),
    "torch outside training": ("api.py", "def f():\n    from torch import nn"),
    "transformers outside training": ("text.py", "import transformers"),
    "training looks up": ("training/data.py", "from dflow_trt.build import build_bundle"),
    "tensorrt outside its places": ("runtime/ort.py", "import tensorrt as trt"),
    "tensorrt in the wrong unit": ("build.py", "import tensorrt"),
    "TensorRT-LLM anywhere": ("trtllm/export.py", "import tensorrt_llm"),
    "onnxruntime in the loop": ("decode.py", "import onnxruntime"),
    "a unit without a layer": ("newcomer.py", ""),
    "types count as well": ("spec.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import dflow_trt.api"),
}


@pytest.mark.parametrize("case", SYNTHETIC)
def test_a_breach_is_found(case: str) -> None:
    path, source = SYNTHETIC[case]
    assert len(breaches(path, source)) == 1


def test_what_is_allowed_is_no_breach() -> None:
    for path, source in {
        "method/relay.py": "import numpy as np\nfrom dflow_trt.spec import RelayStart",
        "compile/tensorrt_rtx.py": "import tensorrt_rtx",
        "runtime/trt.py": "import tensorrt",
        "training/model.py": "import torch\nfrom .data import collate",
        "cli/train.py": "from dflow_trt import __version__, console\nfrom dflow_trt.training import recipe",
        "graphs/target.py": "from dflow_trt.graphs import store\nfrom dflow_trt.checkpoint.weights import Weights",
    }.items():
        assert breaches(path, source) == []


def loaded_by(code: str) -> set[str]:
    """Top-level packages that a fresh interpreter has loaded after ``code``."""
    code += "\nimport sys; print('loaded', *sorted({name.split('.')[0] for name in sys.modules}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    return set(result.stdout.splitlines()[-1].split())


def test_the_api_loads_neither_torch_nor_transformers() -> None:
    loaded = loaded_by("import dflow_trt.api")
    assert "onnxruntime" in loaded
    assert loaded & {"torch", "transformers", "tensorrt", "onnx", "onnx_ir", "click", "rich"} == set()


def test_help_loads_no_numerics() -> None:
    for arguments in (["--help"], *([name, "--help"] for name in cli.commands)):
        run = f"from dflow_trt.cli import cli\ncli.main({arguments}, prog_name='dflow-trt', standalone_mode=False)"
        loaded = loaded_by(run)
        assert "click" in loaded
        assert loaded & {"torch", "transformers", "tensorrt", "onnxruntime", "onnx", "onnx_ir", "numpy"} == set()


def test_the_entry_point_loads_nothing_before_it_listens_to_ctrl_c() -> None:
    assert loaded_by("import dflow_trt.cli") - loaded_by("") <= {"dflow_trt", *sys.stdlib_module_names}


def test_importing_the_package_loads_nothing() -> None:
    assert loaded_by("import dflow_trt") & {"numpy", "onnxruntime", "click", "torch", "jinja2"} == set()


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest imports them by their bare names: two of one name cannot be collected in one run."""
    paths = sorted((ROOT.parent / "tests").rglob("*.py"))
    names = Counter(path.name for path in paths if path.name not in ("__init__.py", "conftest.py"))
    assert {name: count for name, count in names.items() if count > 1} == {}
