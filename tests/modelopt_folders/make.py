"""Makes the folders beside this file: tiny random Qwen3 models as NVIDIA ModelOpt quantises and exports them.

    pip install torch transformers nvidia-modelopt   # 0.47.0 made the ones that are here
    python tests/modelopt_folders/make.py

``expected.npz`` has the logits of a few token ids by ModelOpt's own simulation of the exported model, in float32.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import numpy as np
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers
from transformers import Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.3,
    "architectures": ["Qwen3ForCausalLM"],
}
FOLDERS = {
    "fp8": mtq.FP8_DEFAULT_CFG,
    "int8": mtq.INT8_SMOOTHQUANT_CFG,
    "int8_weights": mtq.INT8_WEIGHT_ONLY_CFG,
    "int4_awq": mtq.INT4_AWQ_CFG,
}
KEPT = "*layers.1.mlp.down_proj*"  # one layer that stays float, so that exclude_modules has something to say


def settings(name: str) -> dict[str, Any]:
    config = copy.deepcopy(FOLDERS[name])
    for entry in config["quant_cfg"]:
        sizes = (entry.get("cfg") or {}).get("block_sizes")
        if sizes:
            sizes[-1] = 16  # 128 are more input features than there are
    config["quant_cfg"].append({"quantizer_name": KEPT, "enable": False})
    return config


def calibrate(model: Any, ids: torch.Tensor) -> None:
    model(ids)


def main() -> None:
    for name in FOLDERS:
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES)).float().eval()
        ids = torch.randint(0, SIZES["vocab_size"], (4, 48))
        with torch.no_grad():
            mtq.quantize(model, settings(name), partial(calibrate, ids=ids))
            requantize_resmooth_fused_llm_layers(model)  # what the export does first
            logits = model(ids[:1, :12]).logits[0]
        export_hf_checkpoint(model, export_dir=HERE / name)
        np.savez(HERE / name / "expected.npz", ids=ids[0, :12].numpy(), logits=logits.float().numpy())


if __name__ == "__main__":
    main()
