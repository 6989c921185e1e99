"""Tokens a round, counted by playing decoding on stored trajectories.

Speculative decoding emits the target's own text whatever the drafts are: its greedy text, or the text that it samples
(accepting a draft exactly while it equals the target's own sample). With that text at hand, whole batches are played
without decoding anything: only the number of tokens each round emits is left to find out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflow_trt.training.data import Trajectory, collate
from dflow_trt.training.model import Drafter
from dflow_trt.training.rollout import next_anchors, play_round, relay_inputs
from dflow_trt.training.target import FrozenTarget


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


@torch.no_grad()
def simulate(
    drafter: Drafter,
    target: FrozenTarget,
    trajectories: Sequence[Trajectory],
    pad_id: int,
    relay: bool,
    batch_size: int = 32,
) -> list[Tally]:
    """Play every trajectory to its end; one tally each, in their order. `relay` False leaves the relay off."""
    tallies: list[Tally] = []
    for at in range(0, len(trajectories), batch_size):
        tallies += _simulate_batch(drafter, target, trajectories[at : at + batch_size], pad_id, relay)
    return tallies


def _simulate_batch(
    drafter: Drafter, target: FrozenTarget, trajectories: Sequence[Trajectory], pad_id: int, relay: bool
) -> list[Tally]:
    read = target.read(collate(trajectories, pad_id).to(target.device))
    context_NSE = drafter.context(read.features_NSC)
    rounds, emitted, accepted = (torch.zeros_like(read.batch.end_N) for _ in range(3))
    anchors_N1 = read.batch.start_N[:, None]
    relayed = None
    while (left_N := read.batch.end_N - 1 - anchors_N1[:, 0]).any():
        played = play_round(drafter, target, read, context_NSE, anchors_N1, relayed)
        rounds += left_N > 0
        accepted += played.accepted_NM[:, 0]
        # No bonus token follows an end-of-sequence token that was itself a draft.
        emitted += torch.minimum(played.accepted_NM[:, 0] + 1, left_N)
        relayed = relay_inputs(drafter, target, read, played) if relay else None
        anchors_N1 = next_anchors(read.batch, played)
    counts = zip(rounds.tolist(), emitted.tolist(), accepted.tolist(), strict=True)
    return [Tally(*count) for count in counts]
