"""Which configuration fields TensorRT-LLM has, version by version. Its models forbid every other key.

Sources:

- 1.4: the LLM API reference, https://nvidia.github.io/TensorRT-LLM/1.4.0rc1/llm-api/reference/DFlashDecodingConfig.html
  and .../1.4.0rc4/llm-api/reference/TorchLlmArgs.html; model.yaml and what reads it:
  triton_backend/all_models/llmapi/tensorrt_llm/1/ of the repository.
- 1.2.1 (tagged 2026-04) has no DFlash: ``DFlashDecodingConfig`` came to the main branch with pull request 12794, merged
  after 2026-04-27, and with it into 1.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dflow_trt.errors import UserError

Section = Literal["llm_args", "dflash", "triton"]


@dataclass(frozen=True)
class Version:
    """Field names by section: the arguments of ``LLM``, ``DFlashDecodingConfig``, and ``triton_config`` of model.yaml.

    An empty ``dflash`` means that this version has no such class.
    """

    name: str
    llm_args: frozenset[str]
    dflash: frozenset[str]
    triton: frozenset[str]

    def checked(self, section: Section, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values as they are; UserError for a key that this version does not take."""
        allowed: frozenset[str] = getattr(self, section)
        for key in values:
            if key not in allowed:
                raise UserError(f"--trtllm-version: {self.name} has no {key!r}; allowed: {', '.join(sorted(allowed))}")
        return dict(values)


# Of TorchLlmArgs only those that an export may write: the class has some eighty.
_LLM_ARGS = frozenset(
    (
        "model",
        "backend",
        "dtype",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "max_batch_size",
        "max_input_len",
        "max_seq_len",
        "max_num_tokens",
        "speculative_config",
    )
)
_TRITON = frozenset(("max_batch_size", "decoupled", "cancellation_check_period_ms"))
_DECODING_BASE = (
    "max_draft_len",
    "max_total_draft_tokens",
    "speculative_model",
    "moe_backend",
    "max_concurrency",
    "draft_len_schedule",
    "load_format",
    "acceptance_rate_window_size",
    "acceptance_rate_threshold",
    "use_rejection_sampling",
    "allow_advanced_sampling",
    "advanced_sampling_mode",
    "enable_penalty",
    "spec_dec_variant",
)
_DFLASH = (
    "mask_token_id",
    "target_layer_ids",
    "context_recompute_tail",
    "decoding_type",
    "attention_backend",
    "skip_ctx_buffer_budget_check",
)
VERSIONS = {
    version.name: version
    for version in (
        Version("1.2.1", _LLM_ARGS, frozenset(), _TRITON),
        Version("1.4", _LLM_ARGS, frozenset(_DECODING_BASE + _DFLASH), _TRITON),
    )
}
DEFAULT_VERSION = "1.4"


def find_version(name: str) -> Version:
    """The version of that name, 1.4.0rc4 being a 1.4; UserError where it is unknown or has no DFlash."""
    found = next((version for key, version in VERSIONS.items() if name == key or name.startswith(f"{key}.")), None)
    allowed = ", ".join(version.name for version in VERSIONS.values() if version.dflash)
    if found is None:
        raise UserError(f"--trtllm-version: {name!r} is not known; allowed: {allowed}")
    if not found.dflash:
        raise UserError(f"--trtllm-version: {found.name} has no DFlash, it came with 1.3; allowed: {allowed}")
    return found
