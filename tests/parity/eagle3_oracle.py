"""An EAGLE-3 drafter in torch and float64, from its folder alone: every draft recomputes all rows, without a cache.

Modules named as in the public layout (SafeAILab/EAGLE, arXiv 2503.01840), so that loading checks names and shapes;
transformers' rotary embedding; attention written out. The options of EAGLE 3.1 (arXiv 2605.09992) are vLLM's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

Array = np.ndarray[Any, np.dtype[Any]]


class Norm(nn.Module):
    """x / rms(x), scaled."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Attention(nn.Module):
    """Causal, over all rows at once; heads are normed where the tensors have norms."""

    def __init__(self, keys: dict[str, Any], names: set[str]) -> None:
        super().__init__()
        hidden, bias = keys["hidden_size"], keys["attention_bias"]
        self.heads, self.groups, self.size = keys["num_attention_heads"], keys["num_key_value_heads"], keys["head_dim"]
        self.q_proj = nn.Linear(2 * hidden, self.heads * self.size, bias=bias)
        self.k_proj = nn.Linear(2 * hidden, self.groups * self.size, bias=bias)
        self.v_proj = nn.Linear(2 * hidden, self.groups * self.size, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.size, hidden, bias=bias)
        if any("q_norm" in name for name in names):
            self.q_norm, self.k_norm = (Norm(self.size, keys["rms_norm_eps"]) for _ in "qk")

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, self.size)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (_rotated(part, cos, sin) for part in (q, k))
        out = torch.empty_like(q)
        for head in range(self.heads):
            group = head // (self.heads // self.groups)
            scores = q[:, head] @ k[:, group].T / self.size**0.5
            scores.masked_fill_(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            out[:, head] = scores.softmax(-1) @ v[:, group]
        return self.o_proj(out.flatten(1))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-right, left], dim=-1) * sin[:, None]


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, keys: dict[str, Any], names: set[str], norm_before_residual: bool) -> None:
        super().__init__()
        hidden, eps = keys["hidden_size"], keys["rms_norm_eps"]
        self.self_attn, self.mlp = Attention(keys, names), Mlp(hidden, keys["intermediate_size"])
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = (Norm(hidden, eps) for _ in range(3))
        self.norm_before_residual = norm_before_residual

    def forward(self, embeds: torch.Tensor, features: torch.Tensor, cos: Any, sin: Any) -> torch.Tensor:
        normed = self.hidden_norm(features)
        residual = normed if self.norm_before_residual else features
        x = residual + self.self_attn(torch.cat([self.input_layernorm(embeds), normed], dim=-1), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Oracle(nn.Module):
    """``embedding``: the target's table, for drafters without one of their own."""

    def __init__(self, folder: Path, target_width: int, embedding: Array) -> None:
        super().__init__()
        top = json.loads((folder / "config.json").read_text())
        keys = top.get("transformer_layer_config", top)
        stored = {name.replace("midlayer.", "layers.0."): value for name, value in _tensors(folder).items()}
        hidden, eps, width = keys["hidden_size"], keys["rms_norm_eps"], stored["fc.weight"].shape[1]
        self.layers = nn.ModuleList([Layer(keys, set(stored), top.get("norm_before_residual", False))])
        self.fc = nn.Linear(width, hidden, bias=False)
        self.norm, self.norm_output = Norm(hidden, eps), top.get("norm_output", False)
        self.lm_head = nn.Linear(hidden, top["draft_vocab_size"], bias=False)
        self.input_norm = Norm(width, eps) if top.get("norm_before_fc") else None
        each = range(width // target_width) if top.get("fc_norm") else range(0)
        self.fc_norm = nn.ModuleList([Norm(target_width, eps) for _ in each])
        self.rotary = LlamaRotaryEmbedding(LlamaConfig(**keys))
        offsets = stored.pop("d2t", torch.zeros(top["draft_vocab_size"], dtype=torch.int64))
        self.target_ids = np.arange(len(offsets)) + offsets.numpy()
        stored.pop("t2d", None)
        self.table = stored.pop("embed_tokens.weight", torch.tensor(embedding)).double()
        missing, left = self.double().load_state_dict(stored, strict=False)
        assert not left, left
        assert not [name for name in missing if not name.startswith("rotary.")], missing

    def features(self, taps: Array) -> torch.Tensor:
        """[N,E] of the target's tapped layers [N,X]."""
        x = torch.tensor(taps).double()
        if self.input_norm is not None:
            x = self.input_norm(x)
        if len(self.fc_norm):
            parts = x.chunk(len(self.fc_norm), dim=-1)
            x = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(x)

    @torch.inference_mode()
    def drafts(self, taps: Array, next_ids: Sequence[int], chain: Sequence[int]) -> tuple[Array, Array]:
        """(features that rows pass on [K,E], logits [K,draft vocabulary]) of the rows that draft.

        The target has been at N rows, and their next tokens are ``next_ids``; ``chain`` are the drafts that rows behind
        them read, K = 1 + its length.
        """
        features, tokens, passed, logits = self.features(taps), list(next_ids), [], []
        for draft in [*chain, None]:
            h = self.rows(features, tokens)[-1]
            logits.append(self.lm_head(self.norm(h)).numpy())
            passed.append(self.norm(h) if self.norm_output else h)
            features, tokens = torch.cat([features, passed[-1][None]]), [*tokens, draft]
        return torch.stack(passed).numpy(), np.stack(logits)

    def rows(self, features: torch.Tensor, tokens: Sequence[Any]) -> torch.Tensor:
        """The layer's output [N,E], before the final norm."""
        cos, sin = self.rotary(torch.zeros(1), torch.arange(len(tokens))[None])
        return self.layers[0](self.table[torch.tensor(tokens)], features, cos[0].double(), sin[0].double())


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found
