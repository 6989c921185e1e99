"""llama.cpp through its Python bindings, as :mod:`peer_worker` runs it: plain decoding, and its prompt lookup.

Runs inside the peers' own environment, never imports dflow_trt. A Hugging Face folder becomes a float32 GGUF file without
a tokenizer; key/value caches are float32 too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from peer_worker import Clock, answer, tensors_of

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
"""Tensors of a Qwen3 layer, theirs and GGUF's."""
