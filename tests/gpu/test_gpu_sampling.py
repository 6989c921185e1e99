"""Drawing on a real GPU: the kernel gives the tokens that the CPU's sampler gives, and how long it takes for them."""

from __future__ import annotations

from typing import Any

import plugin_toolchain as toolchain
import pytest
from fakegpu.drawing import draw_on_device

from dflow_trt.runtime.trt.sampler import load_entry

pytestmark = pytest.mark.gpu
COLUMNS, LIVE, ROWS = 151_936, 151_669, 128  # Qwen3's vocabulary; a batch of 8 with 16 rows each


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tokens_are_those_of_the_cpu(dtype: Any) -> None:
    pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed")
    entry = load_entry(toolchain.plugin_library())
    assert entry is not None
    found, wanted, milliseconds = draw_on_device(entry, dtype, COLUMNS, LIVE, ROWS)
    print(f"{dtype}: {ROWS} draws of {COLUMNS} logits in {milliseconds:.3f} ms")
    assert found == wanted
