"""The DFlash drafter (arXiv 2602.06036), DFlow's relay (arXiv 2609.06498) and Domino's head (2605.29707), in torch.

Parameter names are those of released checkpoints, so `state_dict()` is what `model.safetensors` holds.
Embedding and output head are the target's and never part of the drafter. Shape suffixes are those of
`data.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflow_trt.spec import DominoSpec
from dflow_trt.training.domino import CausalHead

RELAY_STARTS = {"after_rejection": 2, "at_rejection": 1}


@dataclass(frozen=True)
class RelayInputs:
    """What the previous round hands to the next one (DFlow, arXiv 2609.06498).

    `states_NMBE`: context features h of the verified draft row that each slot receives; `on_NMB`: which slots
    receive one; `bonus_NM` and `reject_NM`: the token that the target put at the first rejected place, and
    the draft rejected there. Where nothing is relayed the other three hold arbitrary valid values.
    """

    states_NMBE: torch.Tensor
    on_NMB: torch.Tensor
    bonus_NM: torch.Tensor
    reject_NM: torch.Tensor


class DrafterAttention(nn.Module):
    """Block slots attend to the context rows before their anchor and to every slot of their own block."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        query_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        block_NQE: torch.Tensor,
        context_NSE: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        mask_N1QL: torch.Tensor,
    ) -> torch.Tensor:
        """Attend from Q = M * B block slots to L = S + Q rows: the context, then all blocks of the sequence."""
        queries = rotate(self.q_norm(self._heads(self.q_proj(block_NQE))), rotary, block_NQE.shape[1])
        source_NLE = torch.cat([context_NSE, block_NQE], dim=1)
        keys = rotate(self.k_norm(self._heads(self.k_proj(source_NLE))), rotary, source_NLE.shape[1])
        values = self._heads(self.v_proj(source_NLE))
        attended = F.scaled_dot_product_attention(
            queries,
            keys.repeat_interleave(self.groups, dim=1),
            values.repeat_interleave(self.groups, dim=1),
            attn_mask=mask_N1QL,
        )
        output_NQE: torch.Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output_NQE

    def _heads(self, projected_NLX: torch.Tensor) -> torch.Tensor:
        batch, length, _ = projected_NLX.shape
        return projected_NLX.view(batch, length, -1, self.head_dim).transpose(1, 2)


class DrafterMLP(nn.Module):
    """SwiGLU, as in Qwen3."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_NQE: torch.Tensor) -> torch.Tensor:
        output_NQE: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x_NQE)) * self.up_proj(x_NQE))
        return output_NQE


class DrafterLayer(nn.Module):
    """A pre-norm layer; only the block passes through its norms, the context enters attention as it is."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = DrafterAttention(config)
        self.mlp = DrafterMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        block_NQE: torch.Tensor,
        context_NSE: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        mask_N1QL: torch.Tensor,
    ) -> torch.Tensor:
        block_NQE = block_NQE + self.self_attn(self.input_layernorm(block_NQE), context_NSE, rotary, mask_N1QL)
        output_NQE: torch.Tensor = block_NQE + self.mlp(self.post_attention_layernorm(block_NQE))
        return output_NQE


class Drafter(nn.Module):
    """A DFlash drafter; with `dflow_config` it also has the relay, with `projector_type` "domino" the causal head."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        _refuse_variants(config)
        self.config = config
        self.block_size: int = config.block_size
        self.mask_token_id: int = config.dflash_config["mask_token_id"]
        self.target_layer_ids: list[int] = list(config.dflash_config["target_layer_ids"])
        width = config.hidden_size
        self.fc = nn.Linear(len(self.target_layer_ids) * width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([DrafterLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self._rotary = Qwen3RotaryEmbedding(config)
        self.has_relay = getattr(config, "dflow_config", None) is not None
        if self.has_relay:
            self.relay_norm = nn.LayerNorm(width, eps=config.rms_norm_eps)
            self.relay_mlp = nn.Sequential(nn.Linear(3 * width, 2 * width), nn.SiLU(), nn.Linear(2 * width, 2 * width))
        self.head = head_of(config)
        if self.head is not None:
            self.prefix_gru = nn.GRU(width, self.head.state_size, bias=False, batch_first=True)
            inner = nn.Linear(width + self.head.state_size, self.head.rank, bias=False)
            self.embed_proj = nn.Sequential(inner, nn.SiLU(), nn.Linear(self.head.rank, config.vocab_size, bias=False))
        self._initialise()

    @property
    def first_relay_slot(self) -> int:
        """The first slot that can receive a state: 2 under `after_rejection`, 1 under `at_rejection`."""
        return RELAY_STARTS[self.config.dflow_config["relay_start"]]

    def causal_head(self, embedding_VE: torch.Tensor) -> CausalHead:
        """The causal head of a drafter that has one."""
        assert self.head is not None
        return CausalHead(self.prefix_gru, self.embed_proj, self.head.prefix_length, embedding_VE)

    def context(self, features: torch.Tensor) -> torch.Tensor:
        """Tapped hidden states [..., C] to context features h = RMSNorm(W_c . taps) [..., E]."""
        h: torch.Tensor = self.hidden_norm(self.fc(features))
        return h

    def block_embeds(
        self, embedding_VE: torch.Tensor, anchor_ids_NM: torch.Tensor, relay: RelayInputs | None = None
    ) -> torch.Tensor:
        """Block inputs [N, M, B, E]: E(anchor), then E(mask) plus the relay term where a state is relayed.

        The term is beta * LN(h) + gamma with [beta ; gamma] = MLP([E(bonus) ; E(rejected) ; h]).
        """
        masked_E = embedding_VE[self.mask_token_id].float()
        block_NMBE = masked_E.expand(*anchor_ids_NM.shape, self.block_size, -1).clone()
        block_NMBE[:, :, 0] = embedding_VE[anchor_ids_NM].float()
        if relay is None:
            return block_NMBE
        if not self.has_relay:
            raise ValueError("relay inputs were given to a drafter without a relay (no dflow_config)")
        term_NMBE = self._relay_term(embedding_VE, relay)
        return torch.where(relay.on_NMB[..., None], block_NMBE + term_NMBE, block_NMBE)

    def _relay_term(self, embedding_VE: torch.Tensor, relay: RelayInputs) -> torch.Tensor:
        boundary_NME = torch.cat([embedding_VE[relay.bonus_NM], embedding_VE[relay.reject_NM]], dim=-1).float()
        boundary_NMBE = boundary_NME[:, :, None].expand(-1, -1, self.block_size, -1)
        beta, gamma = self.relay_mlp(torch.cat([boundary_NMBE, relay.states_NMBE], dim=-1)).chunk(2, dim=-1)
        term_NMBE: torch.Tensor = beta * self.relay_norm(relay.states_NMBE) + gamma
        return term_NMBE

    def forward(self, block_NMBE: torch.Tensor, context_NSE: torch.Tensor, anchors_NM: torch.Tensor) -> torch.Tensor:
        """Final hidden states [N, M, B, E] of M independent blocks a sequence, at absolute anchors.

        A block sees the context rows before its anchor, and its own slots; slot j stands at position anchor +
        j.
        """
        batch, blocks, slots, _ = block_NMBE.shape
        device = anchors_NM.device
        positions_NQ = (anchors_NM[:, :, None] + torch.arange(slots, device=device)).flatten(1)
        context_positions_NS = torch.arange(context_NSE.shape[1], device=device).expand(batch, -1)
        rotary = self._rotary(block_NMBE, torch.cat([context_positions_NS, positions_NQ], dim=1))
        mask_N1QL = block_mask(anchors_NM, slots, context_NSE.shape[1])
        x_NQE = block_NMBE.flatten(1, 2)
        for layer in self.layers:
            x_NQE = layer(x_NQE, context_NSE, rotary, mask_N1QL)
        normed_NQE: torch.Tensor = self.norm(x_NQE)
        return normed_NQE.view(batch, blocks, slots, -1)

    def save(self, folder: Path) -> None:
        """Write `config.json` and `model.safetensors` in the layout of released DFlash drafters."""
        folder.mkdir(parents=True, exist_ok=True)
        self.config.architectures = ["DFlashDraftModel"]
        self.config.save_pretrained(folder)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    @classmethod
    def load(cls, folder: Path) -> Drafter:
        """Read what `save` wrote."""
        drafter = cls(Qwen3Config.from_pretrained(folder))
        drafter.load_state_dict(load_file(folder / "model.safetensors"))
        return drafter

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=self.config.initializer_range)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        # An untrained relay or head then adds exactly nothing, so training starts from DFlash itself.
        if self.has_relay:
            nn.init.zeros_(self.relay_mlp.get_parameter("2.weight"))
        if self.head is not None:
            nn.init.zeros_(self.embed_proj.get_parameter("2.weight"))


def block_mask(anchors_NM: torch.Tensor, slots: int, context_length: int) -> torch.Tensor:
    """Who sees whom, bool [N, 1, M * B, S + M * B]: context rows before the own anchor, slots of the own block."""
    blocks, device = anchors_NM.shape[1], anchors_NM.device
    sees_context_NMS = torch.arange(context_length, device=device) < anchors_NM[:, :, None]
    sees_context_NQS = sees_context_NMS.repeat_interleave(slots, dim=1)
    block_of_Q = torch.arange(blocks, device=device).repeat_interleave(slots)
    same_block_QQ = block_of_Q[:, None] == block_of_Q
    return torch.cat([sees_context_NQS, same_block_QQ.expand(len(anchors_NM), -1, -1)], dim=-1)[:, None]


def extended(drafter: Drafter, relay_start: str | None = None, head: DominoSpec | None = None) -> Drafter:
    """A copy with an untrained relay, an untrained causal head or both: it drafts exactly what the original drafts."""
    fields = drafter.config.to_dict()
    if relay_start is not None:
        if relay_start not in RELAY_STARTS:
            raise ValueError(f"relay_start is {relay_start!r}; choose one of {sorted(RELAY_STARTS)}")
        fields["dflow_config"] = {"relay_start": relay_start}
    if head is not None:
        fields["dflash_config"] = fields["dflash_config"] | head_fields(head)
    copy = Drafter(Qwen3Config.from_dict(fields))
    copy.load_state_dict(drafter.state_dict(), strict=False)
    return copy


def head_fields(head: DominoSpec) -> dict[str, Any]:
    """A causal head as `dflash_config` tells it, in the layout of released Domino drafters."""
    return {
        "projector_type": "domino",
        "pure_draft_prefix_len": head.prefix_length,
        "emb_dim": head.rank,
        "gru_hidden_dim": head.state_size,
        "shift_label": head.shifted,
    }


def head_of(config: Any) -> DominoSpec | None:
    """The inverse of :func:`head_fields`; None where there is no causal head."""
    fields = config.dflash_config
    if fields.get("projector_type") != "domino":
        return None
    return DominoSpec(fields["pure_draft_prefix_len"], fields["gru_hidden_dim"], fields["emb_dim"], False)


def rotate(heads_NHLD: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], length: int) -> torch.Tensor:
    """Rotary embedding of heads [N, H, L, D] with the last `length` of the given cos and sin [N, L', D]."""
    cos_N1LD, sin_N1LD = (angles[:, None, -length:] for angles in rotary)
    first, second = heads_NHLD.chunk(2, dim=-1)
    return heads_NHLD * cos_N1LD + torch.cat([-second, first], dim=-1) * sin_N1LD


def _refuse_variants(config: Any) -> None:
    """Training knows the plain drafter only; anything else would train a model that the checkpoint misdescribes."""
    layer_types = getattr(config, "layer_types", None) or []
    last_layer = config.num_target_layers - 1
    for refused, what in (
        (any(kind != "full_attention" for kind in layer_types), "layer_types other than full_attention"),
        (config.attention_bias, "attention_bias"),
        (config.dflash_config.get("shift_label", False), "shift_label"),
        (
            last_layer in config.dflash_config["target_layer_ids"],
            f"target layer {last_layer}, the last one, as a tap",
        ),
    ):
        if refused:
            raise ValueError(f"training does not support {what}; change the drafter's config.json")
