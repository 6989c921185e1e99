"""Drafting: the block that a drafter completes (DFlash, arXiv 2602.06036).

Shape suffixes: B requests, J block slots (slot 0 is the anchor).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Ids = np.ndarray[Any, np.dtype[np.int64]]


def block_ids(anchors_B: Sequence[int], mask_id: int, block_size: int) -> Ids:
    """[B,J]: each request's anchor, then masks. The block always has the size that the drafter was trained with."""
    ids_BJ = np.full((len(anchors_B), block_size), mask_id, np.int64)
    ids_BJ[:, 0] = anchors_B
    return ids_BJ


def draft_length(num_drafts: int, remaining: int, limit: int | None) -> int:
    """k_r, the drafts worth verifying: a round emits up to k_r + 1 tokens, and ``remaining`` may still be emitted."""
    return max(0, min(num_drafts, remaining - 1, num_drafts if limit is None else limit))
