"""TensorRT-RTX parses and compiles quantised targets, without a GPU: a real parser and a real builder.

Skipped where the package is missing (pip install tensorrt-rtx-cu13), unless DFLOW_REQUIRE_RTX=1.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from modelopt_copies import ALGOS, FOLDERS

from dflow_trt.build import BuildOptions, build_bundle
from dflow_trt.bundle import Bundle, open_bundle
from dflow_trt.compile import tensorrt_rtx
from dflow_trt.compile.base import EngineOptions
from dflow_trt.errors import UserError

if importlib.util.find_spec("tensorrt_rtx") is None:
    if os.environ.get("DFLOW_REQUIRE_RTX", "0") not in ("", "0"):
        raise ModuleNotFoundError("tensorrt_rtx: DFLOW_REQUIRE_RTX=1 asks for it; pip install tensorrt-rtx-cu13")
    pytest.skip("tensorrt_rtx is missing; pip install tensorrt-rtx-cu13", allow_module_level=True)


def build(name: str, output: Path, capabilities: tuple[str, ...], **given: Any) -> Bundle:
    options: dict[str, Any] = {"max_batch_size": 2, "max_input_len": 40, "max_seq_len": 96, **given}
    engine = EngineOptions(compute_capabilities=capabilities)
    return build_bundle(FOLDERS / name, [], output, BuildOptions("tensorrt-rtx", engine=engine, **options))


AMPERE_TO_BLACKWELL = ("8.0", "8.9", "12.0")
CASES = [(name, AMPERE_TO_BLACKWELL if name != "fp8" else AMPERE_TO_BLACKWELL[1:]) for name in ALGOS]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("name", "capabilities"), CASES, ids=list(ALGOS))
def test_quantised_targets_are_compiled(tmp_path: Path, name: str, capabilities: tuple[str, ...], dtype: str) -> None:
    """That no dequantising layer got lost between graph and network is part of every build."""
    bundle = open_bundle(build(name, tmp_path / "bundle", capabilities, dtype=dtype).path)
    assert bundle.build.target_weights == ALGOS[name]
    assert bundle.built_with["compute_capability"] == ", ".join(capabilities)
    assert bundle.files["target.engine"].size > 100_000
    assert max(bundle.self_check["errors"].values()) < 4e-2


@pytest.mark.parametrize("capabilities", [("8.0",), ("8.9", "8.6")])
def test_fp8_is_refused_for_gpus_that_do_not_compute_it(tmp_path: Path, capabilities: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as raised:
        build("fp8", tmp_path / "bundle", capabilities)
    line = f"--compute-capability: {capabilities[-1]} in bfloat16 with FP8 weights; allowed: 8.9, 12.0"
    assert str(raised.value).startswith(line)
    assert list(tmp_path.iterdir()) == []


def test_the_builder_itself_refuses_fp8_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why :data:`dflow_trt.compile.tensorrt.LEAST_CAPABILITY` says so."""
    monkeypatch.setattr(tensorrt_rtx, "computes", lambda build, capability: True)
    with pytest.raises(UserError, match=r"engine target: tensorrt-rtx refuses it: .*HW-specific datatypes: fp8_e4m3"):
        build("fp8", tmp_path / "bundle", ("8.0",))


def test_without_a_choice_fp8_is_compiled_for_all_that_compute_it(tmp_path: Path) -> None:
    bundle = build("fp8", tmp_path / "bundle", ())
    assert bundle.built_with["compute_capability"].startswith("8.9, 12.0")
