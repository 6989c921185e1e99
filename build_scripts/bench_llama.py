"""llama.cpp's plain decoding and prompt lookup through its Python bindings, as :mod:`bench_worker` runs it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from bench_worker import Steps, serve, versions
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from safetensors.numpy import load_file

MODELS: dict[str, Model] = {}


class Enough(Exception):
    """So many rounds were asked for."""


class Model(llama_cpp.Llama):
    """A model that tells when it runs the next batch: a round goes from one to the next."""

    steps = Steps()
    rounds: int | None = None
    stop_ids: tuple[int, ...] = ()

    def eval(self, tokens: Any) -> None:
        if self.rounds is not None and self.steps.count > self.rounds:
            raise Enough
        self.steps.begin()
        super().eval(tokens)


def export(source: str, output: str) -> dict[str, Any]:
    """Write ``source``, a Qwen3 folder, as a float32 GGUF file without a tokenizer."""
    config = json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
    rope = config.get("rope_parameters") or config
    writer = gguf.GGUFWriter(output, "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for file in sorted(Path(source).glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            writer.add_tensor(names.get_name(name, (".weight",)), np.ascontiguousarray(tensor, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {}


def open_model(
    name: str, threads: int, path: str, context: int, stop_ids: list[int], lookup: dict[str, int] | None
) -> dict[str, Any]:
    """A model with float32 caches of ``context`` rows. lookup: settings of prompt lookup, None to decode plainly."""
    MODELS[name] = Model(
        path,
        n_ctx=context,
        n_threads=threads,
        n_threads_batch=threads,
        type_k=gguf.GGMLQuantizationType.F32,
        type_v=gguf.GGMLQuantizationType.F32,
        draft_model=LlamaPromptLookupDecoding(**lookup) if lookup else None,
        verbose=False,
    )
    MODELS[name].stop_ids = tuple(stop_ids)
    return versions("llama-cpp-python", "gguf")


def generate(name: str, prompt: list[int], max_tokens: int, rounds: int | None) -> dict[str, Any]:
    """A request, greedy, until so many rounds or tokens, or one that stops it."""
    model = MODELS[name]
    model.reset()
    model.steps, model.rounds = Steps(), rounds
    try:
        for token in itertools.islice(model.generate(prompt, temp=0.0), max_tokens):
            model.steps.add(token)
            if token in model.stop_ids:
                break
    except Enough:
        pass
    return model.steps.answer()


if __name__ == "__main__":
    serve({"export": export, "open": open_model, "generate": generate})
