"""Which draft length pays, by what was measured: tokens a round by length over milliseconds a round by length.

What is accepted of the first k drafts does not depend on how many follow them: a block is always filled whole, and one
draft after another knows only those before it. So one run at full length tells the tokens of every shorter one. Times
come from :mod:`.costs`; a round in which nothing is proposed is a step of plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from dflow_trt.profiling.metrics import survival
from dflow_trt.profiling.record import Acceptance, Advice, Forecast, Point, PointResult, RoundCost
from dflow_trt.spec import AUTOREGRESSIVE

HALVINGS = 60


def tokens_by_length(counts: Acceptance, drafts: int) -> list[float]:
    """Entry k: tokens a round that verifies at most k drafts, the bonus token included."""
    shares = _padded(survival(counts), drafts)
    return [1.0, *(1.0 + total for total in accumulate(shares))]


def times_by_length(counts: Acceptance, batch: int, costs: Sequence[float]) -> list[float]:
    """Entry k: milliseconds a round that verifies at most k drafts. costs: where every request has so many.

    A pass is as wide as the request with most drafts: where drafts are few in some rounds, a batch hides that.
    """
    alone = _padded([count / counts.rounds for count in counts.drafted_at], len(costs) - 1)
    shares = [1 - (1 - share) ** batch for share in alone]
    return list(accumulate((s * (b - a) for s, a, b in zip(shares, costs, costs[1:], strict=False)), initial=costs[0]))


def _padded(values: Sequence[float], count: int) -> list[float]:
    """The first so many, nothing behind them."""
    return [*values[:count], *[0.0] * (count - len(values))]


def geometric_tokens(rate: float, drafts: int) -> float:
    """Tokens a round where each draft is accepted with this chance, given those before it."""
    return sum(rate**i for i in range(drafts + 1))


def break_even_rate(tokens: float, drafts: int) -> float | None:
    """The chance of each draft that gives so many tokens a round; None where even certain drafts do not."""
    if tokens > drafts + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if geometric_tokens(middle, drafts) < tokens else (low, middle)
    return high


def advise(costs: Sequence[RoundCost], results: Sequence[PointResult]) -> list[Advice]:
    """One entry for each strategy and load whose costs were measured; plain decoding is what they are held against."""
    groups: dict[tuple[str, int, float, int | None], list[RoundCost]] = {}
    for cost in costs:
        groups.setdefault((cost.strategy, cost.batch, cost.temperature, cost.input_len), []).append(cost)
    found = []
    for (strategy, *load), mine in groups.items():
        plain = next(iter(groups.get((AUTOREGRESSIVE, *load), [])), None)  # type: ignore[arg-type]
        points = [each for each in results if _is_of(each, mine[0])]
        if strategy != AUTOREGRESSIVE and plain is not None and points and any(each.total.rounds for each in points):
            found.append(_advice(mine, plain, points))
    return found


def _is_of(result: PointResult, cost: RoundCost) -> bool:
    point = result.point
    found = point.strategy, point.concurrency, point.temperature, point.input_len, point.draft_policy
    return found == (cost.strategy, cost.batch, cost.temperature, cost.input_len, "fixed")


def _advice(costs: Sequence[RoundCost], plain: RoundCost, results: Sequence[PointResult]) -> Advice:
    full = costs[-1]
    longest = max(results, key=lambda each: _length(each.point, full.drafts))
    drafts, counts = _length(longest.point, full.drafts), longest.total
    timed = [0, *(cost.drafts for cost in costs)], [plain.total, *(cost.total for cost in costs)]
    tokens = tokens_by_length(counts, drafts)
    times = times_by_length(counts, full.batch, np.interp(range(drafts + 1), *timed).tolist())
    forecasts = [
        Forecast(
            drafts=k,
            tau_emitted=tokens[k],
            milliseconds=times[k],
            predicted=tokens[k] * plain.total / times[k],
            measured=_measured(results, k, full.drafts),
        )
        for k in range(1, drafts + 1)
    ]
    best = max(forecasts, key=lambda each: each.predicted)
    return Advice(
        strategy=full.strategy,
        kind=full.kind,
        drafts=full.drafts,
        batch=full.batch,
        temperature=full.temperature,
        input_len=full.input_len,
        plain=plain.total,
        break_even=full.total / plain.total,
        break_even_rate=break_even_rate(full.total / plain.total, full.drafts),
        best_drafts=best.drafts if best.predicted > 1 else 0,
        forecasts=forecasts,
    )


def _length(point: Point, most: int) -> int:
    """The most drafts of its rounds."""
    return most if point.draft_tokens is None else min(point.draft_tokens, most)


def _measured(results: Sequence[PointResult], drafts: int, most: int) -> float | None:
    """The decode speed-up of the point that verifies so many."""
    for result in results:
        if _length(result.point, most) == drafts and result.speedup is not None:
            return result.speedup.decode
    return None
