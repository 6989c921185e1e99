"""Prompt lookup (:mod:`dflow_trt.method.ngram`): drafts from the request's own tokens."""

from __future__ import annotations

from collections.abc import Sequence

from dflow_trt.drafting import base
from dflow_trt.drafting.base import Passed
from dflow_trt.method.ngram import NgramIndex
from dflow_trt.request import Slot
from dflow_trt.spec import NgramSpec


class Drafting(base.Drafting[NgramSpec]):
    """No caches, no engines; ``Slot.memory`` is the request's :class:`NgramIndex`."""

    keeps_context = False

    def propose(self, slots: range, rows: Sequence[Slot], wanted: Sequence[int]) -> list[list[int]]:
        """See :class:`dflow_trt.drafting.base.Drafting`."""
        return [self._continuation(slot, count) if count else [] for slot, count in zip(rows, wanted, strict=True)]

    def observe(self, passed: Passed) -> None:
        """What the target has read is read here too: a long prompt in pieces, not in one round of the batch."""
        for _, slot in self.mine(passed):
            self._index(slot).read(slot.tokens, slot.kv_len)

    def _continuation(self, slot: Slot, count: int) -> list[int]:
        index = self._index(slot)
        index.read(slot.tokens)
        return index.continuation(slot.tokens, count)

    def _index(self, slot: Slot) -> NgramIndex:
        if slot.memory is None:
            slot.memory = NgramIndex(self.spec.min_match, self.spec.max_match)
        index: NgramIndex = slot.memory
        return index
