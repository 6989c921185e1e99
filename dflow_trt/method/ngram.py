"""Prompt lookup: the last tokens stood here before, so what followed them then is drafted now. No model drafts.

Known from LLMA (arXiv 2304.04487) and prompt-lookup decoding; what wins on edits, summaries and quotations.
"""

from __future__ import annotations

from collections.abc import Sequence


class NgramIndex:
    """Where each run of ``least`` to ``most`` tokens of a growing sequence was last followed by another token."""

    def __init__(self, least: int, most: int) -> None:
        self._sizes = range(most, least - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}
        self._read = 0

    def read(self, tokens: Sequence[int], count: int | None = None) -> None:
        """Take up what was appended since the last call; of the first ``count`` tokens alone, where that is given."""
        length = len(tokens) if count is None else count
        for end in range(max(1, self._read), length):  # tokens[end] is what follows
            for size in self._sizes:
                if size <= end:
                    self._ends[tuple(tokens[end - size : end])] = end
        self._read = max(self._read, length)

    def continuation(self, tokens: Sequence[int], count: int) -> list[int]:
        """What followed the longest run of last tokens that stood here before, where it did so last; else nothing.

        A run that reaches the end of the sequence goes on in its own continuation, as in a text that repeats itself.
        """
        for size in self._sizes:
            start = self._ends.get(tuple(tokens[-size:])) if size < len(tokens) else None
            if start is not None:
                period = len(tokens) - start
                known = list(tokens[start : start + count])
                return [known[i % period] for i in range(count)]
        return []
