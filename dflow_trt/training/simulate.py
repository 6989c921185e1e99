"""Tokens a round, counted by playing decoding on stored trajectories.

Speculative decoding emits the target's own text whatever the drafts are: its greedy text, or the text that it samples
(accepting a draft exactly while it equals the target's own sample). With that text at hand, whole batches are played
without decoding anything: only the number of tokens each round emits is left to find out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dflow_trt.training.data import Batch, Trajectory, collate
from dflow_trt.training.model import Drafter, RelayInputs
from dflow_trt.training.rollout import accepted_length, anchors_after, play_round, relay_inputs, trajectory_after
from dflow_trt.training.target import BatchReader, FrozenTarget, ReadBatch


@dataclass(frozen=True)
class Tally:
    """Counts of one request: rounds, tokens they emitted (bonus tokens included), drafts they accepted.

    The token that the prefill yields is in neither count. Drafts cut off by the end of the text are not
    accepted.
    """

    rounds: int
    emitted: int
    accepted: int


def tau_emitted(tallies: Sequence[Tally]) -> float:
    """Mean emitted tokens a round over all rounds of all requests."""
    return sum(tally.emitted for tally in tallies) / sum(tally.rounds for tally in tallies)


def tau_accepted(tallies: Sequence[Tally]) -> float:
    """Mean accepted drafts a round over all rounds of all requests."""
    return sum(tally.accepted for tally in tallies) / sum(tally.rounds for tally in tallies)


Play = Callable[[torch.Tensor], torch.Tensor]
"""Anchors [N, 1] of a round -> how many of its drafts are accepted [N, 1]; asked for every round in turn."""


@torch.no_grad()
def play(
    reader: BatchReader,
    start: Callable[[ReadBatch], Play],
    trajectories: Sequence[Trajectory],
    pad_id: int,
    batch_size: int = 32,
) -> list[Tally]:
    """Play every trajectory to its end; one tally each, in their order. `start` begins a batch."""
    tallies: list[Tally] = []
    for at in range(0, len(trajectories), batch_size):
        read = reader.read(collate(trajectories[at : at + batch_size], pad_id).to(reader.device))
        tallies += _play_batch(read.batch, start(read))
    return tallies


def _play_batch(batch: Batch, accepted_from: Play) -> list[Tally]:
    rounds, emitted, accepted = (torch.zeros_like(batch.end_N) for _ in range(3))
    anchors_N1 = batch.start_N[:, None]
    while (left_N := batch.end_N - 1 - anchors_N1[:, 0]).any():
        accepted_N1 = accepted_from(anchors_N1)
        rounds += left_N > 0
        accepted += accepted_N1[:, 0]
        # No bonus token follows an end-of-sequence token that was itself a draft.
        emitted += torch.minimum(accepted_N1[:, 0] + 1, left_N)
        anchors_N1 = anchors_after(batch, anchors_N1, accepted_N1)
    counts = zip(rounds.tolist(), emitted.tolist(), accepted.tolist(), strict=True)
    return [Tally(*count) for count in counts]


def simulate(
    drafter: Drafter,
    target: FrozenTarget,
    trajectories: Sequence[Trajectory],
    pad_id: int,
    relay: bool,
    batch_size: int = 32,
) -> list[Tally]:
    """:func:`play` with a block drafter. `relay` False leaves its relay off."""
    return play(target, lambda read: block_rounds(drafter, target, read, relay), trajectories, pad_id, batch_size)


def block_rounds(drafter: Drafter, target: FrozenTarget, read: ReadBatch, relay: bool) -> Play:
    """The rounds of a block drafter, each relayed to by the one before."""
    context_NSE = drafter.context(read.features_NSC)
    relayed: RelayInputs | None = None

    def accepted_from(anchors_N1: torch.Tensor) -> torch.Tensor:
        nonlocal relayed
        played = play_round(drafter, target, read, context_NSE, anchors_N1, relayed)
        relayed = relay_inputs(drafter, target, read, played) if relay else None
        return played.accepted_NM

    return accepted_from


def serial_rounds(batch: Batch, draft: Callable[[torch.Tensor], torch.Tensor]) -> Play:
    """The rounds of a drafter that makes its drafts [N, 1, K] from the anchors and the text alone."""

    def accepted_from(anchors_N1: torch.Tensor) -> torch.Tensor:
        drafts_N1K = draft(anchors_N1)
        return accepted_length(drafts_N1K, *trajectory_after(batch, anchors_N1, drafts_N1K.shape[-1]))

    return accepted_from
