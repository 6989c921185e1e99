"""The slot table: what a free slot holds is what the table says, whatever came and went."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow_trt.bundle import Strategy
from dflow_trt.method.sampling import Sampler, SamplingParams
from dflow_trt.request import Phase, Request, Slot
from dflow_trt.slots import MIN_REUSE, NOTHING, SlotTable, common_prefix


class Rows:
    """Cache rows as lists of tokens; rows that a move does not name are lost."""

    def __init__(self, slots: int) -> None:
        self.held: list[list[int]] = [[] for _ in range(slots)]
        self.moves = 0

    def swap(self, a: int, b: int, rows: int) -> None:
        self.moves += 1
        self.held[a], self.held[b] = self.held[b][:rows], self.held[a][:rows]


def slot_of(prompt: list[int], drafter: str | None = None) -> Slot:
    strategy = Strategy(drafter or "ar", drafter, False)
    request = Request("r", prompt, SamplingParams(), strategy, 0)
    return Slot(request, Sampler(SamplingParams(), prompt, 100, [], 0, 0), list(prompt), 16)


def finish(table: SlotTable, rows: Rows, index: int, reason: str = "stop") -> None:
    """Run a request's prompt and end it."""
    slot = table.active[index]
    rows.held[index][slot.kv_len :] = slot.tokens[slot.kv_len :]
    slot.kv_len, slot.finish_reason = len(slot.tokens), reason
    table.retire()


@pytest.mark.parametrize(("a", "b", "length"), [("", "", 0), ("ab", "", 0), ("abc", "abd", 2), ("ab", "abc", 2)])
def test_common_prefix(a: str, b: str, length: int) -> None:
    ids = [np.array([ord(letter) for letter in text], np.int64) for text in (a, b)]
    assert common_prefix(ids[0], ids[1]) == length


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 2), st.integers(1, 50), st.booleans()), max_size=25))
def test_every_reused_row_holds_the_prompts_token(slots: int, events: list[tuple[int, int, bool]]) -> None:
    rows = Rows(slots)
    table = SlotTable(slots, rows.swap)
    for text, length, sound in events:
        if table.full:
            finish(table, rows, length % len(table.active), "stop" if sound else "error")
        prompt = [text, *range(length)]
        table.admit(slot_of(prompt, ("a", None)[length % 2]))
        slot = table.active[-1]
        assert slot.kv_len == slot.stats.reused_tokens
        assert slot.kv_len == 0 or MIN_REUSE <= slot.kv_len < len(prompt)
        assert rows.held[len(table.active) - 1][: slot.kv_len] == prompt[: slot.kv_len]
        del rows.held[len(table.active) - 1][slot.kv_len :]
        slot.phase = Phase.DECODE if length % 3 else Phase.PREFILL
        table.promote(0)


def test_the_longest_beginning_is_taken_and_else_the_oldest_makes_room() -> None:
    rows = Rows(3)
    table = SlotTable(3, rows.swap)
    for first in (1, 2, 3):
        table.admit(slot_of([first, *range(30)]))
    for _ in range(3):
        finish(table, rows, 0)
    table.admit(slot_of([2, *range(20), 99]))
    assert table.active[0].kv_len == 21
    table.admit(slot_of([9, *range(30)]))
    assert table.active[1].kv_len == 0
    finish(table, rows, 1)
    table.admit(slot_of([3, *range(30)]))
    assert table.active[1].kv_len == 30, "the first of the three was the oldest, and the one that made room"


def test_a_table_that_does_not_reuse_moves_nothing() -> None:
    rows = Rows(2)
    table = SlotTable(2, rows.swap, reuse=False)
    for _ in range(3):
        table.admit(slot_of(list(range(40))))
        assert table.active[0].kv_len == 0
        finish(table, rows, 0)
    assert rows.moves == 0
    assert len(NOTHING.tokens) == 0
