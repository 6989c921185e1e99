"""Verification: the target's own token at every row decides. Lossless for greedy decoding and for sampling alike.

Row i of a verify pass ``[anchor, d_1 .. d_k]`` gives the target's token after the first i drafts. Drafts are kept while
they equal it; the first token that differs (or the one after the last draft) is the bonus token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Accepted:
    """What a round emits: the accepted drafts and, unless a stop cut them short, the bonus token."""

    tokens: tuple[int, ...]
    num_accepted: int
    finish_reason: str | None


def accept(drafts: Sequence[int], choose: Callable[[int], int], finished: Callable[[int], str | None]) -> Accepted:
    """Walk the rows of one request's verify pass.

    choose(i): the target's own token at row i, given that rows before it were emitted. finished(token): why the request
    ends with this token, or None. Drafts behind the end are not accepted: counts equal what is emitted.
    """
    tokens: list[int] = []
    num_accepted = 0
    for row in range(len(drafts) + 1):
        token = choose(row)
        tokens.append(token)
        matched = row < len(drafts) and token == drafts[row]
        num_accepted += matched
        reason = finished(token)
        if reason or not matched:
            break
    return Accepted(tuple(tokens), num_accepted, reason)
