"""What a profile needs of a server: what it offers, and the pieces of an answer as they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dflow_trt.profiling.measure import Asked
from dflow_trt.profiling.record import Point


class RequestFailed(Exception):
    """One request got an error instead of the rest of its answer; the server goes on."""


@dataclass(frozen=True)
class Facts:
    """What a server says of itself. strategies: with the most drafts of a round, None where it does not say."""

    name: str
    backend: str
    strategies: Mapping[str, int | None]


@dataclass(frozen=True)
class Piece:
    """What one response adds. drafted: drafts of the round that gave it, None where the server does not say; is_round:
    there was one."""

    token_ids: Sequence[int] = ()
    accepted: int = 0
    drafted: int | None = 0
    is_round: bool = True
    finish_reason: str | None = None


class Channel(Protocol):
    """A connection to one server. It belongs to one event loop.

    Raises :class:`~dflow_trt.profiling.session.Lost` where the server is gone, UserError for what it refuses, and
    :class:`RequestFailed`.
    """

    async def facts(self) -> Facts:
        """What the server says of itself."""
        ...

    def ask(self, point: Point, asked: Asked) -> AsyncGenerator[Piece, None]:
        """The pieces of one answer as they come; leaving early cancels it."""
        ...

    async def close(self) -> None:
        """Nothing is asked any more."""
        ...
