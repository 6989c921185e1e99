"""OpenVINO GenAI's DFlash, one command a line: runs inside the peers' own environment, never imports dflow_trt.

Reads JSON lines from stdin and answers each with one JSON line on stdout: ``export`` (a Hugging Face folder to
OpenVINO's form, by optimum-intel, int8 by NNCF), ``open`` (a pipeline), ``start`` (a request; runs its prefill),
``step`` (so many rounds, timed one by one).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

PIPELINES: dict[str, Any] = {}
HANDLES: dict[str, Any] = {}
MODEL = "openvino_model.xml"


def export(source: str, output: str, int8_output: str) -> dict[str, Any]:
    """Write ``source`` (a Qwen3 target or a DFlash drafter) in float32, and once more with int8 weights."""
    from optimum.exporters.openvino import export_from_model
    from optimum.exporters.openvino.model_patcher import Qwen3DFlashForCausalLM
    from transformers import AutoConfig, AutoModelForCausalLM

    class Drafter(Qwen3DFlashForCausalLM):  # defined here, because optimum unwraps classes of its own modules
        pass

    config = AutoConfig.from_pretrained(source)
    is_drafter = config.architectures == ["DFlashDraftModel"]
    if is_drafter:
        config.tie_word_embeddings = False  # it has neither table: both are the target's
    loader = Drafter if is_drafter else AutoModelForCausalLM
    model = loader.from_pretrained(source, config=config, dtype="float32").eval()
    export_from_model(model, output, task="text-generation-with-past", stateful=True)
    _compress(Path(output), Path(int8_output))
    return {}


def _compress(source: Path, output: Path) -> None:
    """int8 weights, one scale a channel: what ``optimum-cli export openvino --weight-format int8`` does."""
    import nncf
    import openvino

    model = openvino.Core().read_model(source / MODEL)
    model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
    output.mkdir(parents=True, exist_ok=True)
    openvino.save_model(model, output / MODEL, compress_to_fp16=False)
    for name in ("config.json", "generation_config.json"):
        shutil.copyfile(source / name, output / name)


def open_pipeline(name: str, target: str, drafter: str | None, threads: int) -> dict[str, Any]:
    """A pipeline with float32 KV cache and arithmetic (int8 weights are quantised as the runtime sees fit)."""
    import openvino_genai as genai

    options: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": threads,
        "KV_CACHE_PRECISION": "f32",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = 4096
    drafting = {"draft_model": genai.draft_model(drafter, "CPU", **options)} if drafter else {}
    PIPELINES[name] = genai.ContinuousBatchingPipeline(target, scheduler, "CPU", {**options, **drafting})
    return {"versions": {package: version(package) for package in ("openvino", "openvino-genai", "optimum-intel")}}


def start(name: str, prompt: list[int], max_tokens: int, num_drafts: int) -> dict[str, Any]:
    """Submit a request and run its prefill."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    config = genai.GenerationConfig()
    config.max_new_tokens = max_tokens
    config.ignore_eos = True
    if num_drafts:
        config.num_assistant_tokens = num_drafts
    ids = openvino.Tensor(np.array([prompt], np.int64))
    HANDLES[name] = PIPELINES[name].add_request(0, ids, config)
    return step(name, 1)


def step(name: str, count: int) -> dict[str, Any]:
    """So many rounds: seconds of each, and the tokens that they gave."""
    pipeline, handle = PIPELINES[name], HANDLES[name]
    wall, cpu, tokens = [], [], []
    for _ in range(count):
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        pipeline.step()
        wall.append(time.perf_counter() - wall_start)
        cpu.append(time.process_time() - cpu_start)
        while handle.can_read():
            tokens += [token for output in handle.read().values() for token in output.generated_ids]
    return {"wall": wall, "cpu": cpu, "tokens": tokens}


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    "export": export,
    "open": open_pipeline,
    "start": start,
    "step": step,
}


def main() -> None:
    """Answer until stdin ends. What libraries print goes to stderr: stdout is the protocol's."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = COMMANDS[asked.pop("op")](**asked)
        except Exception as error:  # the other side decides what a failure means
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
