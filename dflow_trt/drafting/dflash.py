"""The DFlash family: one pass completes a block of masks (DFlash, arXiv 2602.06036).

What the last verify pass left of its rejected suffix is added to the masks (DFlow, arXiv 2609.06498).

Shape suffixes: B requests of one call, J block slots, K drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflow_trt import contract as c
from dflow_trt.drafting import base
from dflow_trt.drafting.base import Passed, lengths
from dflow_trt.feeds import kv_index, positions
from dflow_trt.method.draft import block_ids
from dflow_trt.method.relay import relay_rows, relay_state
from dflow_trt.request import Slot
from dflow_trt.runtime.base import Array
from dflow_trt.spec import DFlashSpec, SelectorSpec


class Drafting(base.Drafting[DFlashSpec]):
    """relay -> drafter before a pass, context after it."""

    def propose(self, slots: range, rows: Sequence[Slot], wanted: Sequence[int]) -> list[list[int]]:
        """See :class:`dflow_trt.drafting.base.Drafting`."""
        size, context_B, anchors = self.spec.block_size, lengths(rows), [slot.tokens[-1] for slot in rows]
        feeds: dict[str, Array] = {c.BLOCK_IDS.name: block_ids(anchors, self.spec.mask_token_id, size)}
        if self.spec.relay:
            feeds |= self._relay_feeds(rows, wanted)
        self.run(c.RELAY, slots, feeds)
        block = {
            c.BLOCK_POSITION_IDS.name: positions(context_B, size),
            c.BLOCK_WRITE_INDEX.name: context_B,
            c.KV_INDEX.name: kv_index(int(context_B.max()) + size),
        }
        if isinstance(self.spec.head, SelectorSpec):
            block[c.ANCHOR_ID.name] = np.array(anchors, np.int64)
        ids_BK = self.run(c.DRAFTER, slots, block, (c.DRAFT_IDS.name,))[0]
        return [ids[:count].tolist() for ids, count in zip(ids_BK, wanted, strict=True)]

    def _relay_feeds(self, rows: Sequence[Slot], wanted: Sequence[int]) -> dict[str, Array]:
        assert self.spec.relay is not None
        source_BJ = np.zeros((len(rows), self.spec.block_size), np.int64)
        on_BJ = np.zeros((len(rows), self.spec.block_size), np.bool_)
        pair_B2 = np.zeros((len(rows), 2), np.int64)
        for i, slot in enumerate(rows):
            if wanted[i] and slot.relay is not None:
                source_BJ[i], on_BJ[i] = relay_rows(slot.relay, self.spec.relay.start, self.spec.block_size)
                pair_B2[i] = slot.relay.bonus_id, slot.relay.reject_id
                slot.stats.relayed_slots += int(on_BJ[i].sum())
        return {
            c.RELAY_SRC.name: source_BJ,
            c.RELAY_ON.name: on_BJ,
            c.BONUS_ID.name: pair_B2[:, 0],
            c.REJECT_ID.name: pair_B2[:, 1],
        }

    def observe(self, passed: Passed) -> None:
        """The pass becomes context; the rows behind a rejection stay for the next relay."""
        feeds = {c.POSITION_IDS.name: passed.position_ids_BS, c.WRITE_INDEX.name: passed.start_B}
        self.run(c.CONTEXT, passed.slots, feeds)
        keep = {}
        for i, slot in self.mine(passed):
            slot.context_len, accepted, slot.relay = slot.kv_len, passed.accepted[i], None
            if accepted is not None and slot.request.strategy.relay:
                slot.relay = relay_state(passed.drafts[i], accepted.tokens, accepted.num_accepted)
            if slot.relay is not None:
                keep[passed.slots[i]] = slot.relay.drafted + 1
        if keep:
            self.runtime.keep_pending(self.spec.name, keep, passed.slots)
