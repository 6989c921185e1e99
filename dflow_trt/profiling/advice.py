"""Which draft length pays, by what was measured: tokens a round by length over milliseconds a round by length.

The drafter always fills its whole block, so what is accepted of the first k drafts hardly depends on how many are
verified: one run at full length tells the tokens of every shorter one. Its time comes from :mod:`.costs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from dflow_trt.profiling.metrics import survival
from dflow_trt.profiling.record import Acceptance, Advice, Forecast, PointResult, RoundCost
from dflow_trt.spec import AUTOREGRESSIVE

HALVINGS = 60


def tokens_by_length(counts: Acceptance) -> list[float]:
    """Entry k: tokens a round that verifies k drafts, the bonus token included."""
    return [1.0, *(1.0 + total for total in accumulate(survival(counts)))]


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
    longest = max(results, key=lambda each: len(each.total.drafted_at))
    tokens = tokens_by_length(longest.total)
    times = np.interp(range(len(tokens)), [cost.drafts for cost in costs], [cost.total for cost in costs]).tolist()
    full = costs[-1]
    forecasts = [
        Forecast(
            drafts=k,
            tau_emitted=tokens[k],
            milliseconds=times[k],
            predicted=tokens[k] * plain.total / times[k],
            measured=_measured(results, k, full.drafts),
        )
        for k in range(1, len(tokens))
    ]
    best = max(forecasts, key=lambda each: each.predicted, default=None)
    return Advice(
        strategy=full.strategy,
        batch=full.batch,
        temperature=full.temperature,
        input_len=full.input_len,
        plain=plain.total,
        break_even=full.total / plain.total,
        break_even_rate=break_even_rate(full.total / plain.total, full.drafts),
        best_drafts=best.drafts if best is not None and best.predicted > 1 else 0,
        forecasts=forecasts,
    )


def _measured(results: Sequence[PointResult], drafts: int, longest: int) -> float | None:
    """The decode speed-up of the point that verifies so many."""
    for result in results:
        wanted = longest if result.point.draft_tokens is None else min(result.point.draft_tokens, longest)
        if wanted == drafts and result.speedup is not None:
            return result.speedup.decode
    return None
