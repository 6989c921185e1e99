"""EAGLE-3 drafts a chain (arXiv 2503.01840): each row takes the feature of the row before and the token behind it.

Row p of the drafter's cache holds (feature of p, t_{p+1}): so a target pass is read once its tokens are chosen, and its
last row gives the first draft of the next round. The rows of further drafts are overwritten by that reading.

Shape suffixes: B requests of one call, S token rows, J = 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dflow_trt import contract as c
from dflow_trt.drafting import base
from dflow_trt.drafting.base import Passed, lengths
from dflow_trt.feeds import Ids, kv_index, padded
from dflow_trt.request import Slot
from dflow_trt.spec import Eagle3Spec


class Drafting(base.Drafting[Eagle3Spec]):
    """context after a pass, the drafter once for every draft but the first; ``Slot.memory`` is that first draft."""

    lookahead = 1

    def propose(self, slots: range, rows: Sequence[Slot], wanted: Sequence[int]) -> list[list[int]]:
        """See :class:`dflow_trt.drafting.base.Drafting`."""
        drafts: list[list[int]] = [[slot.memory if count else 0] for slot, count in zip(rows, wanted, strict=True)]
        for made in range(1, max(wanted)):
            found = self._step(slots, lengths(rows) + made - 1, [draft[-1] for draft in drafts])
            for draft, token in zip(drafts, found.tolist(), strict=True):
                draft.append(token)
            self._keep_features(slots, [i for i, count in enumerate(wanted) if count > made + 1])
        return [draft[:count] for draft, count in zip(drafts, wanted, strict=True)]

    def _step(self, slots: range, row_B: Ids, tokens: Sequence[int]) -> Ids:
        """One more row of each request: its feature is pending, its token the draft just made; the next draft, [B]."""
        feeds = {
            c.STEP_IDS.name: np.array(tokens, np.int64)[:, None],
            c.BLOCK_POSITION_IDS.name: row_B[:, None],
            c.BLOCK_WRITE_INDEX.name: row_B,
            c.KV_INDEX.name: kv_index(int(row_B.max()) + 1),
        }
        found: Ids = self.run(c.DRAFTER, slots, feeds, (c.DRAFT_IDS.name,))[0][:, 0]
        return found

    def observe(self, passed: Passed) -> None:
        """Every row that became part of a sequence is read, with the token that follows it."""
        width = passed.position_ids_BS.shape[1]
        following: list[list[int]] = [[] for _ in passed.rows]
        mine = dict(self.mine(passed))
        for i, slot in mine.items():
            start = int(passed.start_B[i])
            following[i] = slot.tokens[start + 1 : start + passed.kept[i] + 1]
        feeds = {
            c.NEXT_INPUT_IDS.name: padded(following, width),
            c.POSITION_IDS.name: passed.position_ids_BS,
            c.LOGIT_ROWS.name: np.array([[max(0, len(tokens) - 1)] for tokens in following], np.int64),
            c.WRITE_INDEX.name: passed.start_B,
            c.KV_INDEX.name: kv_index(int(passed.start_B.max()) + width),
        }
        ids_B = self.run(c.CONTEXT, passed.slots, feeds, (c.DRAFT_IDS.name,))[0][:, 0].tolist()
        for i, slot in mine.items():
            slot.memory, slot.context_len = ids_B[i], slot.kv_len
        self._keep_features(passed.slots, mine)

    def _keep_features(self, slots: range, rows: Iterable[int]) -> None:
        """What the last call left for the next row of these requests."""
        keep = {slots[i]: 1 for i in rows}
        if keep:
            self.runtime.keep_pending(self.spec.name, keep, slots)
