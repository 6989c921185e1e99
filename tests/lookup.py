"""Prompt lookup by its definition: what its tests hold it against."""

from __future__ import annotations

from collections.abc import Sequence


def by_definition(tokens: Sequence[int], least: int, most: int, count: int) -> list[int]:
    """The longest run of last tokens that stood before, its latest place, and token by token what followed there."""
    for size in range(most, least - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if list(tokens[start : start + size]) == list(tokens[len(tokens) - size :]):
                text, distance = list(tokens), len(tokens) - (start + size)
                for _ in range(count):
                    text.append(text[-distance])
                return text[len(tokens) :]
    return []
