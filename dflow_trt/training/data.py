"""Token sequences for training: prompt and response pairs, padded into batches.

Shape suffixes used throughout this package: N sequences, S positions of a sequence, M anchors (blocks) of a
sequence, B slots of a block (one anchor and K = B - 1 drafts), Q = M * B (or M * K) block rows of a sequence,
L = S + Q rows to attend to, H heads, D head size, E hidden size, C tapped width (taps * E), V vocabulary.
`ids_NS` is a tensor `ids` of shape [N, S].
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Trajectory:
    """A prompt and its response as token ids; a response ends with its end-of-sequence token if it has one.

    `weights` of the response tokens are for language-model training; without them every token counts 1.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    weights: tuple[float, ...] | None = None

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences, and where each response starts (`start_N`) and ends (`end_N`, exclusive).

    `weight_NS` holds the weights of response tokens, and 0 for prompts and padding.
    """

    ids_NS: torch.Tensor
    weight_NS: torch.Tensor
    start_N: torch.Tensor
    end_N: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """The batch on another device."""
        tensors = (self.ids_NS, self.weight_NS, self.start_N, self.end_N)
        return Batch(*(tensor.to(device) for tensor in tensors))


def collate(trajectories: Sequence[Trajectory], pad_id: int) -> Batch:
    """Pad trajectories on the right to the longest of them."""
    longest = max(len(trajectory) for trajectory in trajectories)
    ids_NS = torch.full((len(trajectories), longest), pad_id, dtype=torch.long)
    weight_NS = torch.zeros(ids_NS.shape)
    starts = [len(trajectory.prompt_ids) for trajectory in trajectories]
    ends = [len(trajectory) for trajectory in trajectories]
    for row, (trajectory, start, end) in enumerate(zip(trajectories, starts, ends, strict=True)):
        ids_NS[row, :end] = torch.tensor(trajectory.prompt_ids + trajectory.response_ids)
        weight_NS[row, start:end] = 1.0 if trajectory.weights is None else torch.tensor(trajectory.weights)
    return Batch(ids_NS, weight_NS, torch.tensor(starts), torch.tensor(ends))


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
