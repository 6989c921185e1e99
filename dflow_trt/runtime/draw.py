"""Drawing tokens where the logits are: what a runtime that can is asked, and which requests need no more than that.

A runtime may have a drawer, ``draw(draws) -> ids [n]``, to be called right after a target pass: each id is the one that
:class:`~dflow_trt.method.sampling.Sampler` picks from the logits of that row, or -1 where their peak is not finite.
"""

from __future__ import annotations

from typing import NamedTuple

from dflow_trt.errors import UserError
from dflow_trt.method.sampling import Pick, SamplingParams


class Draw(NamedTuple):
    """One token to draw: from the logits of the pass at ``row`` (of the R that it gave) of ``slot``.

    position: the absolute position of the token. seed, sample_index: as the Sampler has them.
    """

    slot: int
    row: int
    params: SamplingParams
    seed: int
    sample_index: int
    position: int


def drawable(params: SamplingParams) -> bool:
    """Whether every token of a request is one draw from logits as they are: no processors, no log-probabilities.

    A property of the request and not of the moment: all its tokens then come the same way, with any strategy.
    """
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
    masks = params.logit_bias or params.bad_words or params.bad_words_ids or params.min_tokens
    return not (params.greedy or penalties or masks or params.logprobs is not None)


def drawn_pick(token: int, position: int) -> Pick:
    """What a draw at an absolute position gave. Raises UserError, which concerns its request alone, where it is -1."""
    if token < 0:
        raise UserError(f"position {position}: no logit is finite; a dtype that overflows (float16) gives such values")
    return Pick(token)
