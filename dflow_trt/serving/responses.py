"""Pieces of a request's sequences as the output tensors of one response."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np

from dflow_trt.method.sampling import Pick
from dflow_trt.serving import tensors as t
from dflow_trt.serving.loop import Piece

Array = np.ndarray[Any, np.dtype[Any]]

DTYPES = {"BOOL": np.bool_, "INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "STRING": np.object_}

# One value a sequence.
_VALUES: dict[t.Tensor, Callable[[Piece], Any]] = {
    t.TEXT_OUTPUT: lambda piece: piece.text.encode(),
    t.SEQUENCE_INDEX: lambda piece: piece.index,
    t.FINISH_REASON: lambda piece: (piece.finish_reason or "").encode(),
    t.NUM_ACCEPTED: lambda piece: piece.num_accepted,
    t.NUM_INPUT_TOKENS: lambda piece: piece.stats.prompt_tokens,
    t.NUM_OUTPUT_TOKENS: lambda piece: piece.stats.output_tokens,
    t.NUM_ROUNDS: lambda piece: piece.stats.rounds,
    t.TOTAL_DRAFT_TOKENS: lambda piece: piece.stats.drafted,
    t.TOTAL_ACCEPTED: lambda piece: piece.stats.accepted,
    t.ACCEPTANCE_RATE: lambda piece: piece.stats.accepted / piece.stats.drafted if piece.stats.drafted else 0.0,
    t.SEED_USED: lambda piece: piece.seed,
    t.CUM_LOG_PROBS: lambda piece: piece.cum_logprob,
}
# Values of each new token; those of one sequence after those of another.
_TOKEN_VALUES: dict[t.Tensor, Callable[[Pick], Iterable[Any]]] = {
    t.OUTPUT_IDS: lambda pick: (pick.token,),
    t.OUTPUT_LOG_PROBS: lambda pick: () if pick.logprob is None else (pick.logprob,),
    t.TOP_IDS: lambda pick: (token for token, _ in pick.top_logprobs or ()),
    t.TOP_LOG_PROBS: lambda pick: (logprob for _, logprob in pick.top_logprobs or ()),
}


def arrays(pieces: Sequence[Piece], names: Collection[str]) -> dict[str, Array]:
    """The tensors of these names: [n] texts, [1, ...] of all else."""
    found: dict[str, Array] = {}
    for tensor in t.DFLOW.outputs:
        if tensor.name in names:
            items: Array = np.array(_items(tensor, pieces), DTYPES[tensor.type])
            found[tensor.name] = items if tensor is t.TEXT_OUTPUT else items[None]
    return found


def _items(tensor: t.Tensor, pieces: Sequence[Piece]) -> list[Any]:
    if tensor in _VALUES:
        return [_VALUES[tensor](piece) for piece in pieces]
    return [item for piece in pieces for pick in piece.picks for item in _TOKEN_VALUES[tensor](pick)]


def joined(pieces: Sequence[Piece]) -> Piece:
    """All pieces of one sequence as one."""
    return dataclasses.replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        picks=tuple(pick for piece in pieces for pick in piece.picks),
        num_accepted=sum(piece.num_accepted for piece in pieces),
    )
