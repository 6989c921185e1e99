"""Token sequences for training: prompt and response pairs, padded into batches.

Shape suffixes used throughout this package: N sequences, S positions of a sequence, M anchors (blocks) of a
sequence, B slots of a block (one anchor and K = B - 1 drafts), E hidden size, C tapped width (taps * E), V
vocabulary. `ids_NS` is a tensor `ids` of shape [N, S].
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Trajectory:
    """A prompt and its response as token ids; a response ends with its end-of-sequence token if it has one."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences: `ids_NS`, and where each response starts (`start_N`) and ends (`end_N`, exclusive)."""

    ids_NS: torch.Tensor
    start_N: torch.Tensor
    end_N: torch.Tensor


def collate(trajectories: Sequence[Trajectory], pad_id: int) -> Batch:
    """Pad trajectories on the right to the longest of them."""
    longest = max(len(trajectory) for trajectory in trajectories)
    ids_NS = torch.full((len(trajectories), longest), pad_id, dtype=torch.long)
    for row, trajectory in enumerate(trajectories):
        ids_NS[row, : len(trajectory)] = torch.tensor(trajectory.prompt_ids + trajectory.response_ids)
    starts = [len(trajectory.prompt_ids) for trajectory in trajectories]
    return Batch(ids_NS, torch.tensor(starts), torch.tensor([len(trajectory) for trajectory in trajectories]))


def length_bucketed(
    trajectories: Iterator[Trajectory], batch_size: int, pad_id: int, rng: random.Random, pool: int = 32
) -> Iterator[Batch]:
    """Batches of similar lengths: `pool` batches are drawn, sorted by length, and given out in random order."""
    while True:
        drawn = sorted((next(trajectories) for _ in range(pool * batch_size)), key=len)
        batches = [drawn[at : at + batch_size] for at in range(0, len(drawn), batch_size)]
        rng.shuffle(batches)
        for batch in batches:
            yield collate(batch, pad_id)
