"""What the decoder asks of a drafter: drafts before a target pass, and a look at what the pass left.

Shape suffixes: B requests of one call, S token rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from dflow_trt.bundle import Bundle
from dflow_trt.method.verify import Accepted
from dflow_trt.request import Slot
from dflow_trt.runtime.base import Array, Runtime
from dflow_trt.spec import DrafterSpec

Run = Callable[[str, str, range, dict[str, Array], Sequence[str]], list[Array]]
Spec = TypeVar("Spec", bound=DrafterSpec)


@dataclass(frozen=True)
class Passed:
    """A target pass over adjacent slots, once its tokens are chosen.

    rows: the requests in these slots. start_B: the position of each one's first row. kept: how many of its rows became
    part of its sequence, 0 where it had none in this pass. drafts, accepted: of a verify pass, what was verified and
    what came of it; () and None elsewhere.
    """

    slots: range
    rows: Sequence[Slot]
    position_ids_BS: Array
    start_B: Array
    kept: Sequence[int]
    drafts: Sequence[tuple[int, ...]]
    accepted: Sequence[Accepted | None]


class Drafting(Generic[Spec]):
    """One drafter of one decoder. What it keeps of a request lies in its :class:`Slot`; caches are the runtime's.

    keeps_context: whether it has caches of its own, which then must hold the same rows as the target's. lookahead: how
    many tokens behind a row that row's cache depends on.
    """

    keeps_context: ClassVar[bool] = True
    lookahead: ClassVar[int] = 0

    def __init__(self, spec: Spec, bundle: Bundle, runtime: Runtime, run: Run) -> None:
        self.spec, self.bundle, self.runtime, self._run = spec, bundle, runtime, run

    def propose(self, slots: range, rows: Sequence[Slot], wanted: Sequence[int]) -> Sequence[Sequence[int]]:
        """At most wanted[i] drafts for each request in these slots; those that want none are another's, or wait."""
        raise NotImplementedError

    def observe(self, passed: Passed) -> None:
        """Right after every target pass in which one of its requests had rows."""

    def run(self, engine: str, slots: range, feeds: dict[str, Array], fetch: Sequence[str] = ()) -> list[Array]:
        """One call of one of its engines."""
        return self._run(engine, self.spec.name, slots, feeds, fetch)

    def mine(self, passed: Passed) -> Iterator[tuple[int, Slot]]:
        """(index in the pass, request) of those requests that this drafter drafts for and that had rows."""
        for i, slot in enumerate(passed.rows):
            if passed.kept[i] and slot.request.strategy.drafter == self.spec.name:
                yield i, slot


def lengths(rows: Sequence[Slot]) -> Any:
    """[B] int64: the rows of each request's caches, which is the position of its anchor."""
    return np.array([slot.kv_len for slot in rows], np.int64)
