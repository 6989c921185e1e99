"""A smaller model drafts one token after another (arXiv 2211.17192); its cache is rolled back by length alone.

It reads prompts when the target does. What a round added it reads with its first step: of a round whose drafts were all
accepted, the last draft and the bonus token.

Shape suffixes: B requests of one call, S token rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflow_trt import contract as c
from dflow_trt.bundle import Bundle
from dflow_trt.drafting import base
from dflow_trt.drafting.base import Passed, Run
from dflow_trt.feeds import Ids, kv_index, padded, positions
from dflow_trt.request import Slot
from dflow_trt.runtime.base import Runtime
from dflow_trt.spec import DraftModelSpec


class Drafting(base.Drafting[DraftModelSpec]):
    """``Slot.context_len``: rows of the model's cache that hold the request's tokens, or its drafts right behind."""

    def __init__(self, spec: DraftModelSpec, bundle: Bundle, runtime: Runtime, run: Run) -> None:
        super().__init__(spec, bundle, runtime, run)
        self._min_rows = 2 if spec.model.stack.heads_per_group == 1 else 1
        self._chunk = bundle.build.prefill_chunk

    def propose(self, slots: range, rows: Sequence[Slot], wanted: Sequence[int]) -> list[list[int]]:
        """See :class:`dflow_trt.drafting.base.Drafting`."""
        drafts: list[list[int]] = [[] for _ in rows]
        unread = [slot.tokens[slot.context_len :] if count else [] for slot, count in zip(rows, wanted, strict=True)]
        for step in range(max(wanted)):
            found = self._read(slots, rows, unread)
            for draft, token in zip(drafts, found.tolist(), strict=True):
                draft.append(token)
            unread = [[draft[-1]] if step + 1 < count else [] for draft, count in zip(drafts, wanted, strict=True)]
        return [draft[:count] for draft, count in zip(drafts, wanted, strict=True)]

    def _read(self, slots: range, rows: Sequence[Slot], tokens: Sequence[Sequence[int]]) -> Ids:
        """Read tokens behind each request's cache, in as many calls as they take: the next token of each, [B]."""
        first = [part[: self._chunk] for part in tokens]
        found = self._call(slots, rows, first)
        for slot, part in zip(rows, first, strict=True):
            slot.context_len += len(part)
        rest = [part[self._chunk :] for part in tokens]
        if any(rest):
            later = self._read(slots, rows, rest)
            found = np.where([bool(part) for part in rest], later, found)
        return found

    def _call(self, slots: range, rows: Sequence[Slot], tokens: Sequence[Sequence[int]]) -> Ids:
        start_B = np.array([slot.context_len for slot in rows], np.int64)
        width = max(self._min_rows, *map(len, tokens))
        feeds = {
            c.INPUT_IDS.name: padded(tokens, width),
            c.POSITION_IDS.name: positions(start_B, width),
            c.LOGIT_ROWS.name: np.array([[max(0, len(part) - 1)] for part in tokens], np.int64),
            c.WRITE_INDEX.name: start_B,
            c.KV_INDEX.name: kv_index(int(start_B.max()) + width),
        }
        found: Ids = self.run(c.DRAFTER, slots, feeds, (c.NEXT_IDS.name,))[0][:, 0].copy()
        return found

    def observe(self, passed: Passed) -> None:
        """A prompt's rows are read here too; of drafts, those that were accepted stay."""
        prompts: list[list[int]] = [[] for _ in passed.rows]
        for i, slot in self.mine(passed):
            if passed.accepted[i] is None:
                prompts[i] = slot.tokens[slot.context_len : slot.kv_len]
            slot.context_len = min(slot.context_len, slot.kv_len)
        if any(prompts):
            self._read(passed.slots, passed.rows, prompts)
