"""How many drafts are worth verifying: the length that gives most tokens a millisecond, by what was measured.

A round that verifies k drafts of a request emits 1 + s_1 + .. + s_k tokens on average, s_i being the share of rounds
whose first i drafts are accepted, and takes longer the more rows the target runs. At batch 1 the target's weights are
read once whatever the length, so long blocks are almost free; in a large batch every row costs, and the best length
falls, down to 0 (plain decoding). The choice cannot change the output, only the time (see :mod:`.verify`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflow_trt.errors import UserError
from dflow_trt.spec import DRAFT_POLICIES, DraftPolicy

Rates = np.ndarray[Any, np.dtype[Any]]

HOPE = 0.8  # the acceptance of a draft that nothing is known of: high, so that drafting is tried
MEMORY = 0.97  # what a round leaves of a request's earlier counts; some thirty rounds, then drafting is tried again
DRAFTER_MEMORY = 0.998  # the same for the counts of all requests of a drafter
PRIOR_ROUNDS = 4.0  # the weight of what is known of others against a request's own counts
MARGIN = 1.08  # another length must promise this much more than the present one: no flapping
WORTH = 0.02  # a draft that is reached and accepted more rarely is not verified
KNEE = 24.0  # rows that cost as much as the pass itself, until two widths were timed
PRIOR_SPREAD = 50.0  # squared rows: how far apart timed widths must lie before they outweigh the knee
TIMES_MEMORY = 0.98
OUTLIER = 3.0  # times the expected time; what takes longer was held up by something else, and counts as no more
PROBE = 64  # rounds after which one is run without drafts, or with one where there are none: beliefs are tested


@dataclass
class Acceptance:
    """Counts of drafts by position, older rounds weighing less. tried[i]: rounds in which draft i+1 could be accepted,
    all before it being right; kept[i]: those in which it was. memory: what a round leaves of the rounds before."""

    memory: float = MEMORY
    tried: Rates = field(default_factory=lambda: np.zeros(0))
    kept: Rates = field(default_factory=lambda: np.zeros(0))

    def record(self, drafted: int, accepted: int, drafts: int) -> None:
        """One round of a request: ``accepted`` of ``drafted`` drafts, of the ``drafts`` that its drafter makes."""
        if len(self.tried) < drafts:
            grown = drafts - len(self.tried)
            self.tried, self.kept = np.pad(self.tried, (0, grown)), np.pad(self.kept, (0, grown))
        self.tried *= self.memory
        self.kept *= self.memory
        self.tried[: min(accepted + 1, drafted)] += 1
        self.kept[:accepted] += 1

    def rates(self, prior_K: Rates) -> Rates:
        """[K]: the share of drafts kept where those before are, counts blended with a prior [K]."""
        tried, kept = np.zeros_like(prior_K), np.zeros_like(prior_K)
        count = min(len(prior_K), len(self.tried))
        tried[:count], kept[:count] = self.tried[:count], self.kept[:count]
        return (kept + PRIOR_ROUNDS * prior_K) / (tried + PRIOR_ROUNDS)


@dataclass
class LineCost:
    """Milliseconds of a call by its rows: a line through what was timed, newer calls weighing more.

    Until calls of different sizes were seen, its slope is that of ``KNEE``.
    """

    weight: float = 0.0
    rows: float = 0.0
    milliseconds: float = 0.0
    spread: float = 0.0
    product: float = 0.0

    def record(self, rows: float, milliseconds: float) -> None:
        """One timed call: the decayed means and moments, in one pass (Welford's update)."""
        if self.weight:
            milliseconds = min(milliseconds, OUTLIER * self.at(rows))
        self.weight = self.weight * TIMES_MEMORY + 1
        step = rows - self.rows
        self.rows += step / self.weight
        self.spread = TIMES_MEMORY * self.spread + step * (rows - self.rows)
        self.product = TIMES_MEMORY * self.product + (rows - self.rows) * (milliseconds - self.milliseconds)
        self.milliseconds += (milliseconds - self.milliseconds) / self.weight

    def at(self, rows: float) -> float:
        """The time of a call of so many rows; never below a tenth of the mean."""
        guess = self.milliseconds / (self.rows + KNEE)
        slope = max(0.0, (self.product + PRIOR_SPREAD * guess) / (self.spread + PRIOR_SPREAD))
        return max(self.milliseconds + slope * (rows - self.rows), 0.1 * self.milliseconds)


@dataclass(frozen=True)
class Candidate:
    """A request that could be drafted for: by which drafter, at most how many drafts, what was accepted so far.

    serial: the drafts are made one after another. free: no engine makes them.
    """

    drafter: str
    limit: int
    acceptance: Acceptance
    serial: bool = False
    free: bool = False


def draft_load(requests: Sequence[Candidate | None], lengths: Sequence[int]) -> float:
    """The size of drafting so many for each request: 0 for none, else rows, where a step of its own counts ``KNEE``
    rows more. Drafts made at once are one step; those made one after another, a step each."""
    pairs = zip(requests, lengths, strict=True)
    drafted = [(request, length) for request, length in pairs if request and length and not request.free]
    if not drafted:
        return 0.0
    steps = max(length if request.serial else 1 for request, length in drafted)
    return steps * (KNEE + len(drafted)) - KNEE


class FixedLength:
    """Every draft that a request may use is verified."""

    def lengths(self, requests: Sequence[Candidate | None]) -> list[int]:
        """The drafts to verify for each request of a round; None: one that is not drafted for."""
        return [request.limit if request else 0 for request in requests]

    def accepted(self, request: Candidate, drafted: int, accepted: int) -> None:
        """What a round accepted of a request's drafts."""

    def timed(self, rows: int, verify: float, load: float, draft: float) -> None:
        """What a round took: milliseconds of drafting (see :func:`draft_load`), and of all else with ``rows`` rows."""


class AdaptiveLength(FixedLength):
    """The length that promises most tokens a millisecond, the same for all requests of a round as the target's pass is
    as wide as its longest; then cut for each request to the drafts that may count for it."""

    def __init__(self) -> None:
        self._drafters: dict[str, Acceptance] = {}
        self._target, self._draft = LineCost(), LineCost()
        self._width: int | None = None
        self._rounds = 0

    def lengths(self, requests: Sequence[Candidate | None]) -> list[int]:
        """See :meth:`FixedLength.lengths`."""
        limit = max((request.limit for request in requests if request), default=0)
        if not limit:
            return [0] * len(requests)
        survival = [self._survival(request) for request in requests]
        self._width = self._best_width(requests, survival, limit)
        self._rounds += 1
        if self._rounds % PROBE == 0:
            return [0 if self._width else min(1, len(each)) for each in survival]
        return [min(self._width, int((each >= WORTH).sum())) for each in survival]

    def _survival(self, request: Candidate | None) -> Rates:
        """[limit]: the chance that draft i and all before it are accepted."""
        if request is None:
            return np.zeros(0)
        prior_K = self._of(request.drafter).rates(np.full(request.limit, HOPE))
        return np.cumprod(request.acceptance.rates(prior_K))

    def _of(self, drafter: str) -> Acceptance:
        return self._drafters.setdefault(drafter, Acceptance(DRAFTER_MEMORY))

    def _best_width(self, requests: Sequence[Candidate | None], survival: Sequence[Rates], limit: int) -> int:
        gains = np.zeros(limit + 1)
        gains[0] = len(survival)
        for each in survival:
            gains[1 : len(each) + 1] += each
        rates = np.cumsum(gains) / self._milliseconds(requests, limit)
        best = int(rates.argmax())
        present = limit if self._width is None else min(self._width, limit)
        return best if rates[best] > MARGIN * rates[present] else present

    def _milliseconds(self, requests: Sequence[Candidate | None], limit: int) -> Rates:
        """[limit + 1]: a round's time by its drafts."""
        if not self._target.weight:
            return np.ones(limit + 1)
        times = np.array([self._target.at(len(requests) * (width + 1)) for width in range(limit + 1)])
        if self._draft.weight:
            times[1:] += [self._draft.at(self._load(requests, width)) for width in range(1, limit + 1)]
        return times

    def _load(self, requests: Sequence[Candidate | None], width: int) -> float:
        return draft_load(requests, [min(width, request.limit) if request else 0 for request in requests])

    def accepted(self, request: Candidate, drafted: int, accepted: int) -> None:
        """See :meth:`FixedLength.accepted`. Rounds without drafts count: what was learnt fades, and hope returns."""
        request.acceptance.record(drafted, accepted, request.limit)
        self._of(request.drafter).record(drafted, accepted, request.limit)

    def timed(self, rows: int, verify: float, load: float, draft: float) -> None:
        """See :meth:`FixedLength.timed`."""
        self._target.record(rows, verify)
        if load:
            self._draft.record(load, draft)


def check_policy(name: str) -> None:
    """UserError unless there is a policy of that name."""
    if name not in DRAFT_POLICIES:
        raise UserError(f"draft_policy: {name!r}; allowed: {', '.join(DRAFT_POLICIES)}")


def make_policy(name: DraftPolicy) -> FixedLength:
    """The policy of that name."""
    return AdaptiveLength() if name == "adaptive" else FixedLength()
