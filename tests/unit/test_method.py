"""The method's small functions: every case of a small block, and properties of any."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflow_trt.feeds import positions
from dflow_trt.method.draft import block_ids, draft_length
from dflow_trt.method.relay import RelayState, relay_rows, relay_state
from dflow_trt.method.verify import Accepted, accept
from dflow_trt.spec import RELAY_STARTS, RelayStart


def run_accept(
    drafts: Sequence[int], target: Sequence[int], ends: Sequence[int] = (), room: int = 99
) -> tuple[Accepted, list[int], list[int]]:
    """Accept against a target whose token at row i is target[i]: the result, the rows asked for, the tokens shown."""
    asked: list[int] = []
    shown: list[int] = []

    def choose(row: int) -> int:
        asked.append(row)
        return target[row]

    def finished(token: int) -> str | None:
        shown.append(token)
        if token in ends:
            return "stop"
        return "length" if len(shown) >= room else None

    return accept(drafts, choose, finished), asked, shown


# -- accept ------------------------------------------------------------------------------------------------------------


def test_every_agreement_of_a_block_accepts_the_longest_matching_prefix() -> None:
    cases = 0
    for k in range(6):
        target = list(range(10, 11 + k))
        for agree in itertools.product((True, False), repeat=k):
            drafts = [target[i] if same else 90 + i for i, same in enumerate(agree)]
            found, asked, shown = run_accept(drafts, target)
            a = next((i for i, same in enumerate(agree) if not same), k)
            assert found == Accepted(tuple(target[: a + 1]), a, None)
            assert asked == list(range(a + 1)), "rows behind the first difference are never sampled"
            assert shown == target[: a + 1]
            cases += 1
    assert cases == 63


@pytest.mark.parametrize("k", range(5))
def test_a_stop_at_every_row_ends_the_round_there(k: int) -> None:
    target = list(range(10, 11 + k))
    for agreeing in range(k + 1):
        drafts = [*target[:agreeing], *[90] * (k - agreeing)]
        for stop in range(k + 1):
            found, asked, _ = run_accept(drafts, target, ends=[target[stop]])
            last = min(stop, agreeing)
            assert found.tokens == tuple(target[: last + 1])
            assert found.finish_reason == ("stop" if stop <= agreeing else None)
            # A stop that was itself drafted is an accepted draft; no bonus follows it.
            assert found.num_accepted == min(agreeing, last + 1)
            assert len(asked) == last + 1


@given(st.lists(st.integers(0, 2), max_size=7), st.lists(st.integers(0, 2), min_size=8, max_size=8), st.data())
def test_emitted_is_accepted_plus_one_unless_cut(drafts: list[int], target: list[int], data: st.DataObject) -> None:
    room = data.draw(st.integers(1, 9))
    ends = data.draw(st.sets(st.integers(0, 2), max_size=1))
    found, _, _ = run_accept(drafts, target, tuple(ends), room)
    assert list(found.tokens) == target[: len(found.tokens)], "every emitted token is the target's own"
    assert found.num_accepted == sum(d == t for d, t in zip(drafts, found.tokens, strict=False)), "counts what it emits"
    assert 1 <= len(found.tokens) <= min(room, len(drafts) + 1)
    if found.finish_reason is None or found.num_accepted < len(found.tokens):
        assert len(found.tokens) == found.num_accepted + 1
    else:
        assert len(found.tokens) == found.num_accepted, "cut on an accepted draft: no bonus"


def test_a_bonus_that_ends_the_request_is_not_an_accepted_draft() -> None:
    assert run_accept([5, 6], [5, 7, 8], ends=[7])[0] == Accepted((5, 7), 1, "stop")
    assert run_accept([5, 6], [5, 6, 8], ends=[8])[0] == Accepted((5, 6, 8), 2, "stop")
    assert run_accept([5, 6], [5, 6, 8], room=2)[0] == Accepted((5, 6), 2, "length")


# -- relay -------------------------------------------------------------------------------------------------------------


def pairs(state: RelayState, start: RelayStart, block_size: int) -> dict[int, int]:
    """Relayed slot -> source row."""
    source, on = relay_rows(state, start, block_size)
    return {j: int(source[j]) for j in range(block_size) if on[j]}


@pytest.mark.parametrize(
    ("a", "anchor", "expected", "first"),
    [
        (0, 101, {2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7}, 1),
        (3, 104, {2: 5, 3: 6, 4: 7}, 4),
    ],
)
def test_the_worked_example(a: int, anchor: int, expected: dict[int, int], first: int) -> None:
    """B = 8, A = 100, seven drafts verified: at_rejection adds slot 1, fed from row a + 1."""
    assert 100 + a + 1 == anchor
    state = RelayState(a, 7, bonus_id=1, reject_id=2)
    assert pairs(state, "after_rejection", 8) == expected
    assert pairs(state, "at_rejection", 8) == {1: first, **expected}


def test_the_worked_example_when_everything_was_accepted() -> None:
    assert relay_state((1, 2, 3, 4, 5, 6, 7), (1, 2, 3, 4, 5, 6, 7, 8), 7) is None
    for start in RELAY_STARTS:
        assert pairs(RelayState(7, 7, 0, 0), start, 8) == {}


@pytest.mark.parametrize("block_size", [2, 3, 8, 16])
@pytest.mark.parametrize("start", RELAY_STARTS)
def test_a_slot_receives_the_state_of_the_position_before_it(start: RelayStart, block_size: int) -> None:
    """Every a and every draft length, by absolute positions: row i of the verify pass stands at A + i."""
    anchor, cases = 100, 0
    for drafted in range(1, block_size):
        for a in range(drafted + 1):
            new_anchor = anchor + a + 1
            alive = range(anchor, anchor + drafted + 1)
            lowest = {"after_rejection": 2, "at_rejection": 1}[start]
            wanted = {j: new_anchor + j - 1 - anchor for j in range(lowest, block_size) if new_anchor + j - 1 in alive}
            state = RelayState(a, drafted, 3, 4)
            source, on = relay_rows(state, start, block_size)
            assert pairs(state, start, block_size) == wanted
            assert source.shape == on.shape == (block_size,)
            assert not on[0], "the anchor is never relayed"
            assert ((source >= 0) & (source <= drafted)).all(), "every source row is one that was kept"
            assert len(wanted) == max(0, drafted - a - (lowest - 1))
            cases += 1
    assert cases == (block_size - 1) * (block_size + 2) // 2


@given(st.integers(0, 7).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k))), st.data())
def test_relay_state_keeps_the_boundary_tokens(lengths: tuple[int, int], data: st.DataObject) -> None:
    drafted, a = lengths
    drafts = tuple(data.draw(st.lists(st.integers(0, 50), min_size=drafted, max_size=drafted)))
    tokens = (*drafts[:a], 77)
    state = relay_state(drafts, tokens, a)
    if a == drafted:
        assert state is None
    else:
        assert state == RelayState(a, drafted, bonus_id=77, reject_id=drafts[a])


# -- draft -------------------------------------------------------------------------------------------------------------


def test_draft_length_leaves_room_for_the_bonus() -> None:
    for k, remaining, limit in itertools.product(range(9), range(-1, 12), [None, *range(10)]):
        found = draft_length(k, remaining, limit)
        assert found >= 0
        assert found <= k
        if limit is not None:
            assert found <= limit
        if remaining >= 1:
            assert found + 1 <= remaining
        bounds = {k, max(0, remaining - 1), k if limit is None else limit}
        assert found == min(bounds), "and no shorter than it must be"


def test_positions_count_up_from_each_request() -> None:
    found = positions(np.array([5, 0, 100]), 3)
    assert found.tolist() == [[5, 6, 7], [0, 1, 2], [100, 101, 102]]
    assert found.dtype == np.int64


@given(st.lists(st.integers(0, 50), min_size=1, max_size=5), st.integers(1, 16))
def test_a_block_is_its_anchor_and_masks_whatever_is_verified_of_it(anchors: list[int], size: int) -> None:
    ids = block_ids(anchors, 63, size)
    assert ids.shape == (len(anchors), size)
    assert ids[:, 0].tolist() == anchors
    assert (ids[:, 1:] == 63).all()
