"""OpenVINO GenAI's plain decoding and DFlash, as :mod:`bench_worker` runs it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from bench_worker import Steps, serve, versions

PIPELINES: dict[str, tuple[Any, int]] = {}
MODEL = "openvino_model.xml"


def export(source: str, output: str) -> dict[str, Any]:
    """Write ``source``, a target or a DFlash drafter, in float32 and with int8 weights: ``output``-fp32, -int8."""
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
    export_from_model(model, f"{output}-fp32", task="text-generation-with-past", stateful=True)
    _compress(Path(f"{output}-fp32"), Path(f"{output}-int8"))
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


def open_pipeline(name: str, threads: int, target: str, drafter: str | None, drafts: int) -> dict[str, Any]:
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
    PIPELINES[name] = genai.ContinuousBatchingPipeline(target, scheduler, "CPU", {**options, **drafting}), drafts
    return versions("openvino", "openvino-genai", "optimum-intel")


def generate(name: str, prompt: list[int], max_tokens: int, rounds: int) -> dict[str, Any]:
    """The prefill and so many rounds of a request; then it is left."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    (pipeline, drafts), steps, config = PIPELINES[name], Steps(), genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos = max_tokens, True
    if drafts:
        config.num_assistant_tokens = drafts
    handle = pipeline.add_request(0, openvino.Tensor(np.array([prompt], np.int64)), config)
    for _ in range(rounds + 1):
        steps.begin()
        pipeline.step()
        while handle.can_read():
            steps.add(*(token for output in handle.read().values() for token in output.generated_ids))
    found = steps.answer()
    handle.cancel()
    while pipeline.has_non_finished_requests():
        pipeline.step()
    return found


if __name__ == "__main__":
    serve({"export": export, "open": open_pipeline, "generate": generate})
