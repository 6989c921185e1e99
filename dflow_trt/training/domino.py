"""Domino's causal head over the drafts of a block (Domino, arXiv 2605.29707), in torch.

A GRU reads the tokens chosen so far; what it remembers corrects the logits of the next slot. Shape suffixes are those
of `data.py`, and G is the GRU's state size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class CausalHead:
    """logits_i = base_i + projection([z_i ; s_i]), where s_i has read the anchor and the i - 1 drafts before.

    The first `prefix_length` drafts keep their base logits. `embedding_VE` is the target's.
    """

    gru: nn.GRU
    projection: nn.Sequential
    prefix_length: int
    embedding_VE: torch.Tensor

    def logits(
        self,
        base_NMKV: torch.Tensor,
        hidden_NMKE: torch.Tensor,
        anchor_ids_NM: torch.Tensor,
        before_NMK: torch.Tensor,
    ) -> torch.Tensor:
        """Corrected logits [N, M, K, V] of every slot, given `before_NMK`: the tokens that stand in slots 1..K."""
        read_NMK = torch.cat([anchor_ids_NM[..., None], before_NMK[..., :-1]], dim=-1)
        states, _ = self.gru(self.embedding_VE[read_NMK.flatten(0, 1)].float())
        states_NMKG, first = states.view(*read_NMK.shape, -1), self.prefix_length
        correction = self.projection(torch.cat([hidden_NMKE, states_NMKG], dim=-1)[:, :, first:])
        return torch.cat([base_NMKV[:, :, :first], base_NMKV[:, :, first:] + correction], dim=2)

    @torch.no_grad()
    def roll_out(self, base_NMKV: torch.Tensor, hidden_NMKE: torch.Tensor, anchor_ids_NM: torch.Tensor) -> torch.Tensor:
        """Greedy drafts [N, M, K], each chosen after the ones before it: what decoding drafts."""
        base_QKV, hidden_QKE = base_NMKV.flatten(0, 1), hidden_NMKE.flatten(0, 1)
        token_Q, state, drafts = anchor_ids_NM.flatten(), None, list[torch.Tensor]()
        for slot in range(base_QKV.shape[1]):
            _, state = self.gru(self.embedding_VE[token_Q][:, None].float(), state)
            logits_QV = base_QKV[:, slot]
            if slot >= self.prefix_length:
                logits_QV = logits_QV + self.projection(torch.cat([hidden_QKE[:, slot], state[0]], dim=-1))
            token_Q = logits_QV.argmax(-1)
            drafts.append(token_Q)
        return torch.stack(drafts, dim=-1).view(base_NMKV.shape[:3])
