"""Drafting rounds on stored trajectories: draft, accept, verify, relay (DFlow, arXiv 2609.06498).

A trajectory is the target's own greedy text, so the accepted length and the bonus token are read off it; the
frozen target runs only to give the states of drafts that were really made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflow_trt.training.data import Batch
from dflow_trt.training.model import Drafter, RelayInputs
from dflow_trt.training.target import FrozenTarget, ReadBatch


@dataclass(frozen=True)
class Round:
    """One drafting round of M anchors a sequence.

    `logits_NMKV` and `drafts_NMK` are of slots 1..K; `truth_NMK` is the trajectory there and `valid_NMK` says
    where it still goes on; `accepted_NM` is a, the length of the longest right prefix of the drafts. With a causal
    head `logits_NMKV` are those after the true tokens, and `base_NMKV` those of the block pass alone; else they are
    the same.
    """

    anchors_NM: torch.Tensor
    base_NMKV: torch.Tensor
    logits_NMKV: torch.Tensor
    drafts_NMK: torch.Tensor
    truth_NMK: torch.Tensor
    valid_NMK: torch.Tensor
    accepted_NM: torch.Tensor


def play_round(
    drafter: Drafter,
    target: FrozenTarget,
    read: ReadBatch,
    context_NSE: torch.Tensor,
    anchors_NM: torch.Tensor,
    relay: RelayInputs | None = None,
    roll_out: bool = True,
) -> Round:
    """Draft one block at every anchor and compare it with the trajectory.

    `roll_out` False lets a causal head read the true tokens instead of its own drafts: no decoding drafts so.
    """
    anchor_ids_NM = read.batch.ids_NS.gather(1, anchors_NM)
    block_NMBE = drafter.block_embeds(target.embedding_VE, anchor_ids_NM, relay)
    hidden_NMKE = drafter(block_NMBE, context_NSE, anchors_NM)[:, :, 1:]
    logits_NMKV = base_NMKV = target.logits(hidden_NMKE)
    truth_NMK, valid_NMK = trajectory_after(read.batch, anchors_NM, drafter.block_size - 1)
    drafts_NMK = None
    if drafter.head is not None:
        head = drafter.causal_head(target.embedding_VE)
        logits_NMKV = head.logits(base_NMKV, hidden_NMKE, anchor_ids_NM, truth_NMK)
        drafts_NMK = head.roll_out(base_NMKV, hidden_NMKE, anchor_ids_NM) if roll_out else None
    drafts_NMK = logits_NMKV.argmax(-1) if drafts_NMK is None else drafts_NMK
    accepted_NM = accepted_length(drafts_NMK, truth_NMK, valid_NMK)
    return Round(anchors_NM, base_NMKV, logits_NMKV, drafts_NMK, truth_NMK, valid_NMK, accepted_NM)


def trajectory_after(batch: Batch, anchors_NM: torch.Tensor, drafted: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `drafted` tokens that follow each anchor [N, M, K], and which of them exist."""
    positions_NMK = anchors_NM[:, :, None] + torch.arange(1, drafted + 1, device=anchors_NM.device)
    valid_NMK = positions_NMK < batch.end_N[:, None, None]
    inside_NQ = positions_NMK.clamp(max=batch.ids_NS.shape[1] - 1).flatten(1)
    return batch.ids_NS.gather(1, inside_NQ).view_as(positions_NMK), valid_NMK


def accepted_length(drafts: torch.Tensor, truth: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Length of the longest prefix of [..., K] drafts that agrees with the trajectory: [...]."""
    return ((drafts == truth) & valid).long().cumprod(-1).sum(-1)


def anchors_after(batch: Batch, anchors_NM: torch.Tensor, accepted_NM: torch.Tensor) -> torch.Tensor:
    """Where the following round starts: after the accepted drafts and the bonus token, or at the last token."""
    return torch.minimum(anchors_NM + accepted_NM + 1, batch.end_N[:, None] - 1)


def next_anchors(batch: Batch, played: Round) -> torch.Tensor:
    """:func:`anchors_after` a round."""
    return anchors_after(batch, played.anchors_NM, played.accepted_NM)


def relay_sources(
    accepted: torch.Tensor, first_slot: int, block_size: int, drafted: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which verify row each slot of the next block receives, and whether it receives one: two [..., B].

    New slot j stands at position A' + j and receives the state of position A' + j - 1, that is verify row a +
    j of the previous round: the target predicts the next token, a masked slot its own. The row exists while a
    + j <= `drafted`, the previous round's draft length. `first_slot` is 2 (after_rejection) or 1
    (at_rejection).
    """
    slots = torch.arange(block_size, device=accepted.device)
    source = accepted[..., None] + slots
    return source, (slots >= first_slot) & (source <= drafted)


def relay_inputs(drafter: Drafter, target: FrozenTarget, read: ReadBatch, played: Round) -> RelayInputs:
    """Run the drafts that were made through the target and line up their states with the next round's slots."""
    drafted = drafter.block_size - 1
    states_NMKE = drafter.context(target.verify(read, played.anchors_NM, played.drafts_NMK))
    source_NMB, on_NMB = relay_sources(played.accepted_NM, drafter.first_relay_slot, drafter.block_size, drafted)
    # Row i of the verify pass is index i - 1 here, as the anchor's row 0 is never relayed.
    index_NMB = (source_NMB - 1).clamp(0, drafted - 1)
    states_NMBE = states_NMKE.gather(2, index_NMB[..., None].expand(-1, -1, -1, states_NMKE.shape[-1]))
    bonus_NM = read.batch.ids_NS.gather(1, next_anchors(read.batch, played))
    rejected_NM1 = played.accepted_NM[..., None].clamp(max=drafted - 1)
    return RelayInputs(states_NMBE, on_NMB, bonus_NM, played.drafts_NMK.gather(-1, rejected_NM1)[..., 0])


def spread_anchors(batch: Batch, anchors: int, generator: torch.Generator) -> torch.Tensor:
    """`anchors` positions in every response, one at random in each of as many equal parts of it: [N, M].

    An anchor is a response token that has a token after it.
    """
    device = generator.device
    drawn_NM = torch.rand(len(batch.ids_NS), anchors, generator=generator, device=device)
    drawn_NM += torch.arange(anchors, device=device)
    share_NM = (drawn_NM / anchors).to(batch.ids_NS.device)
    candidates_N1 = (batch.end_N - 1 - batch.start_N)[:, None]
    return batch.start_N[:, None] + (share_NM * candidates_N1).long()
