"""Trajectories: what the target itself answers. Drafters train on these and are measured on these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dflow_trt.training.data import Trajectory


@torch.no_grad()
def generate_trajectories(
    model: Any,
    prompts: Sequence[Sequence[int]],
    end_ids: Sequence[int],
    pad_id: int,
    max_new_tokens: int,
    batch_size: int = 128,
    on_batch: Callable[[int], None] | None = None,
    temperature: float = 0.0,
) -> list[Trajectory]:
    """Responses to tokenised prompts, in their order, each up to and including its end token.

    Prompts of similar lengths share a batch, padded on the left. `on_batch` is told the number of prompts
    done. `temperature` 0 is greedy; above it, tokens are drawn from torch's global generator.
    """
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    responses: dict[int, tuple[int, ...]] = {}
    for at in range(0, len(by_length), batch_size):
        chosen = by_length[at : at + batch_size]
        longest = len(prompts[chosen[-1]])
        ids = torch.tensor([[pad_id] * (longest - len(prompts[index])) + list(prompts[index]) for index in chosen])
        real = torch.tensor([[0] * (longest - len(prompts[index])) + [1] * len(prompts[index]) for index in chosen])
        generated = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=real.to(model.device),
            **(drawn if temperature else {"do_sample": False}),
            max_new_tokens=max_new_tokens,
            eos_token_id=list(end_ids) or None,
            pad_token_id=pad_id,
        )
        for index, row in zip(chosen, generated[:, longest:].tolist(), strict=True):
            responses[index] = _up_to_end(row, end_ids)
        if on_batch is not None:
            on_batch(len(chosen))
    return [Trajectory(tuple(prompt), responses[index]) for index, prompt in enumerate(prompts)]


def _up_to_end(ids: list[int], end_ids: Sequence[int]) -> tuple[int, ...]:
    for position, token in enumerate(ids):
        if token in end_ids:
            return tuple(ids[: position + 1])
    return tuple(ids)
