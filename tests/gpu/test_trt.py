"""TensorRT on a real GPU: the example pair built for it, and every strategy held against ONNX Runtime on the CPU."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflow_trt.doctor import selftest
from dflow_trt.example import write_example
from dflow_trt.runtime.ort import OrtRuntime

pytestmark = pytest.mark.gpu
BACKENDS = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "example"
    write_example(folder)
    return folder


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_strategy_gives_the_cpus_tokens_up_to_near_ties(
    example: Path, backend: str, dtype: Any, record_property: Any
) -> None:
    pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed")
    pytest.importorskip(BACKENDS[backend], reason=f"{backend} is not installed", exc_type=ImportError)
    from dflow_trt.runtime.trt import TrtRuntime

    on_cpu = selftest.build_example(example, selftest.OPTIONS)
    options = replace(selftest.OPTIONS, backend=backend, dtype=dtype)
    on_gpu = selftest.build_example(example, options)
    prompts = selftest.example_prompts(example, on_cpu)
    with closing(OrtRuntime(on_cpu)) as reference, closing(TrtRuntime(on_gpu)) as runtime:
        for strategy in on_gpu.strategies:
            parity = selftest.compare((on_cpu, reference), (on_gpu, runtime), prompts, strategy)
            record_property(strategy, str(parity))
            assert parity.ok, f"{strategy}: {parity}"
        assert runtime.num_graphs > 0, "decoding is run by CUDA graphs"
