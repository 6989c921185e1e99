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
        found_B, rest = np.zeros(len(rows), np.int64), list(tokens)
        while any(rest):
            users = [i for i, part in enumerate(rest) if part]
            near = slice(users[0], users[-1] + 1)
            chunk = self._chunk(near.stop - near.start)
            next_B = self._call(slots[near], rows[near], [part[:chunk] for part in rest[near]])
            found_B[users] = next_B[np.array(users) - near.start]
            rest = [part[chunk:] for part in rest]
        return found_B

    def _chunk(self, batch: int) -> int:
        """The most rows of a request in one call: like those of target passes, all of them are bounded together."""
        build = self.bundle.build
        return min(build.prefill_chunk, build.max_num_tokens // batch)

    def _call(self, slots: range, rows: Sequence[Slot], tokens: Sequence[Sequence[int]]) -> Ids:
        """One call; its tokens are in the caches then. The next token of each request, [B]."""
        start_B = np.array([slot.context_len for slot in rows], np.int64)
        width = max(self._min_rows, *map(len, tokens))
        last_id = self.spec.model.vocab_size - 1  # a prompt may have ids of the target's padding, where there is more
        feeds = {
            c.INPUT_IDS.name: np.minimum(padded(tokens, width), last_id),
            c.POSITION_IDS.name: positions(start_B, width),
            c.LOGIT_ROWS.name: np.array([[max(0, len(part) - 1)] for part in tokens], np.int64),
            c.WRITE_INDEX.name: start_B,
            c.KV_INDEX.name: kv_index(int(start_B.max()) + width),
        }
        next_BR = self.run(c.DRAFTER, slots, feeds, (c.NEXT_IDS.name,))[0]
        for slot, part in zip(rows, tokens, strict=True):
            slot.context_len += len(part)
        next_B: Ids = next_BR[:, 0]
        return next_B

    def observe(self, passed: Passed) -> None:
        """A prompt's rows are read here too; of drafts, those that were accepted stay."""
        prompts: list[list[int]] = [[] for _ in passed.rows]
        for i, slot in self.mine(passed):
            if passed.accepted[i] is None:
                prompts[i] = slot.tokens[slot.context_len : slot.kv_len]
            slot.context_len = min(slot.context_len, slot.kv_len)
        if any(prompts):
            self._read(passed.slots, passed.rows, prompts)
