"""The relay: which verified rows serve which slots of the next block (DFlow, arXiv 2609.06498).

The target predicts the next token, a mask slot its own: so slot j of the new block (position A' + j) receives the state
of position A' + j - 1, which is row a + j of the last verify pass. It exists while a + j <= k_r.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dflow_trt.spec import RelayStart

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


def relay_rows(
    state: RelayState, start: RelayStart, block_size: int
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.bool_]]]:
    """(source row [J], whether relayed [J]) of each block slot; the source of a slot without relay is a valid row."""
    slots_J = np.arange(block_size)
    rows_J = state.num_accepted + slots_J
    on_J = (slots_J >= FIRST_SLOT[start]) & (rows_J <= state.drafted)
    return np.where(on_J, rows_J, 0), on_J


def relay_state(drafts: tuple[int, ...], tokens: tuple[int, ...], num_accepted: int) -> RelayState | None:
    """The state that a finished round leaves, or None where every draft was accepted (or none was made)."""
    if num_accepted == len(drafts):
        return None
    return RelayState(num_accepted, len(drafts), bonus_id=tokens[-1], reject_id=drafts[num_accepted])
