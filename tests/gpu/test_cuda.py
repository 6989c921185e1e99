"""The thin layer over CUDA on a real GPU: what tests/unit/test_trt_cuda.py checks on the fake one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fakegpu.behaviour import CHECKS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_on_this_gpu(check: Callable[[], None]) -> None:
    pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed")
    check()
