"""Prompt lookup against its definition: the longest run that stood before, its latest place, what followed it there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lookup import by_definition

from dflow_trt.method.ngram import NgramIndex

WORDS = st.lists(st.integers(0, 3), max_size=60)  # few words, so that runs come again
SIZES = st.tuples(st.integers(1, 6), st.integers(1, 6)).map(sorted)


def found(index: NgramIndex, tokens: Sequence[int], count: int) -> list[int]:
    index.read(tokens)
    return index.continuation(tokens, count)


@given(WORDS, SIZES, st.integers(0, 20))
def test_lookup_finds_what_its_definition_says(tokens: list[int], sizes: list[int], count: int) -> None:
    assert found(NgramIndex(*sizes), tokens, count) == by_definition(tokens, *sizes, count)


@given(WORDS, SIZES, st.lists(st.integers(1, 9), min_size=1), st.integers(1, 12))
def test_a_sequence_read_piece_by_piece_is_the_sequence_read_at_once(
    tokens: list[int], sizes: list[int], pieces: list[int], count: int
) -> None:
    """Looked up at every pause, as a decoder does: each time what the sequence so far gives."""
    index, end, lengths = NgramIndex(*sizes), 0, itertools.cycle(pieces)
    while end < len(tokens):
        end += next(lengths)
        assert found(index, tokens[:end], count) == by_definition(tokens[:end], *sizes, count)
        assert found(index, tokens[:end], count) == by_definition(tokens[:end], *sizes, count), "nothing new is read"


@pytest.mark.parametrize(
    ("tokens", "least", "most", "drafts"),
    [
        ([7, 8, 9, 1, 7, 8], 1, 4, [9, 1, 7, 8, 9, 1]),  # on into itself
        ([7, 8, 1, 7, 8, 2, 7, 8], 2, 4, [2, 7, 8, 2, 7, 8]),  # the latest place
        ([5, 7, 8, 1, 6, 7, 8, 2, 5, 7, 8], 2, 4, [1, 6, 7, 8, 2, 5]),  # but the longest run before the latest
        ([3, 3], 1, 4, [3, 3, 3, 3, 3, 3]),
        ([3], 1, 4, []),
        ([], 1, 4, []),
        ([1, 2, 3, 2], 2, 4, []),  # one token alone is too short a run
        ([1, 2, 3, 1, 2], 2, 2, [3, 1, 2, 3, 1, 2]),
    ],
)
def test_cases_by_hand(tokens: list[int], least: int, most: int, drafts: list[int]) -> None:
    assert found(NgramIndex(least, most), tokens, 6) == drafts


def test_a_prompt_may_be_any_sequence_of_ids() -> None:
    assert found(NgramIndex(1, 3), (4, 5, 4), 2) == [5, 4]
