"""Which request sits in which slot: decoding requests first, then those in prefill, then free slots.

A request's index here is its row in every cache. A free slot keeps what the request before left in it, so that a prompt
with the same beginning can go on from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflow_trt.request import Phase, Slot

Ids = np.ndarray[Any, np.dtype[np.int64]]

MIN_REUSE = 16  # rows; fewer are computed again in one short pass, for less than it may cost to move them


@dataclass(frozen=True)
class Leftover:
    """What a free slot holds: the tokens of its cache rows, and the drafter that read the first ``context`` of them.

    age: when its request ended, counted in requests; 0 where there was none.
    """

    tokens: Ids
    drafter: str | None = None
    context: int = 0
    age: int = 0

    def reusable(self, slot: Slot, prompt: Ids) -> int:
        """Rows that a request need not compute: those of a common beginning. The prompt's last row gives its logits."""
        rows = common_prefix(prompt[:-1], self.tokens)
        if slot.lookahead is not None:  # a drafter's row is good where it read the same tokens behind it too
            same = slot.request.strategy.drafter == self.drafter
            rows = min(rows - slot.lookahead, self.context) if same else 0
        return rows if rows >= MIN_REUSE else 0


NOTHING = Leftover(np.zeros(0, np.int64))


def common_prefix(a: Ids, b: Ids) -> int:
    """How many tokens two sequences have in common at their beginning."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


class SlotTable:
    """The slots of one decoder. swap(a, b, rows): exchanges two slots' state, the first ``rows`` rows of each cache.

    reuse: whether finished sequences serve as beginnings of new ones.
    """

    def __init__(self, capacity: int, swap: Callable[[int, int, int], None], reuse: bool = True) -> None:
        self.active: list[Slot] = []
        self._free = [NOTHING] * capacity  # the slots behind the active ones, in their order
        self._swap_rows, self._reuse = swap, reuse
        self._retired = 0

    @property
    def full(self) -> bool:
        return not self._free

    def admit(self, slot: Slot) -> None:
        """Give a request the first free slot, and in it the longest beginning of its prompt that a free slot holds.

        Where none holds any, the oldest leftover makes room.
        """
        prompt = np.asarray(slot.request.prompt_ids, np.int64)
        rows = [left.reusable(slot, prompt) for left in self._free]
        best = max(range(len(rows)), key=lambda i: (rows[i], -self._free[i].age))
        if best:  # what the first free slot holds moves to where the chosen one was
            first = len(self.active)
            self._swap_rows(first, first + best, max(len(self._free[0].tokens), rows[best]))
            self._free[best] = self._free[0]
        del self._free[0]
        slot.kv_len = slot.context_len = slot.stats.reused_tokens = rows[best]
        self.active.append(slot)

    def promote(self, start: int) -> None:
        """Keep decoding requests in front: a prompt that finished first changes places with one still waiting."""
        front = start
        for i in range(start, len(self.active)):
            if self.active[i].phase is Phase.DECODE:
                self._swap(front, i)
                front += 1

    def retire(self) -> None:
        """Free the slots of finished requests; the others close up, decoding ones first."""
        for i in reversed(range(len(self.active))):
            if not self.active[i].finished:
                continue
            decoding = sum(slot.phase is Phase.DECODE for slot in self.active)
            hole = i
            if i < decoding:
                self._swap(i, decoding - 1)
                hole = decoding - 1
            self._swap(hole, len(self.active) - 1)
            self._free.insert(0, self._leftover(self.active.pop()))

    def _leftover(self, slot: Slot) -> Leftover:
        self._retired += 1
        if not self._reuse or not slot.sound:
            return NOTHING
        tokens = np.array(slot.tokens[: slot.kv_len], np.int64)
        return Leftover(tokens, slot.request.strategy.drafter, slot.context_len, self._retired)

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        self._swap_rows(a, b, max(self.active[a].kv_len, self.active[b].kv_len))
        self.active[a], self.active[b] = self.active[b], self.active[a]
