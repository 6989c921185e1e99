"""The relay: which verified rows serve which slots of the next block (DFlow, arXiv 2609.06498).

The target predicts the next token, a mask slot its own: so slot j of the new block (position A' + j) receives the state
of position A' + j - 1, which is row a + j of the last verify pass. It exists while a + j <= k_r.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from dflow_trt.spec import RelayStart

Rows = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]
FIRST_SLOT: dict[RelayStart, int] = {"after_rejection": 2, "at_rejection": 1}


@dataclass(frozen=True)
class RelayState:
    """What a verify pass with a rejection leaves to the next draft. Used once; rows lie in the request's ``pending_h``.

    num_accepted: a. drafted: k_r, so that rows 0..k_r are live. bonus_id replaced reject_id at draft a + 1.
    """

    num_accepted: int
    drafted: int
    bonus_id: int
    reject_id: int


def relay_rows(state: RelayState, start: RelayStart, block_size: int) -> tuple[Rows, Flags]:
    """(source row [J], whether relayed [J]) of each block slot; the source of a slot without relay is a valid row."""
    return _rows(state.num_accepted, state.drafted, FIRST_SLOT[start], block_size)


@lru_cache(maxsize=4096)
def _rows(num_accepted: int, drafted: int, first: int, block_size: int) -> tuple[Rows, Flags]:
    """The answer depends on few small numbers, so it is worked out once for each; read-only."""
    slots_J = np.arange(block_size)
    rows_J = num_accepted + slots_J
    on_J = (slots_J >= first) & (rows_J <= drafted)
    source_J = np.where(on_J, rows_J, 0)
    for array in (source_J, on_J):
        array.setflags(write=False)
    return source_J, on_J


def relay_state(drafts: tuple[int, ...], tokens: tuple[int, ...], num_accepted: int) -> RelayState | None:
    """The state that a finished round leaves, or None where every draft was accepted (or none was made)."""
    if num_accepted == len(drafts):
        return None
    return RelayState(num_accepted, len(drafts), bonus_id=tokens[-1], reject_id=drafts[num_accepted])
