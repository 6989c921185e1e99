"""What output tokens cost on a machine that is paid by the hour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflow_trt.errors import UserError
from dflow_trt.profiling.metrics import ratio
from dflow_trt.profiling.record import Cost, CostRow, PointResult

MILLION, HOUR = 1e6, 3600.0


@dataclass(frozen=True)
class Prices:
    """per_hour: of the machine; hosted: of a million output tokens elsewhere."""

    per_hour: float | None = None
    hosted: float | None = None

    def __post_init__(self) -> None:
        for flag, value in (("--price-per-hour", self.per_hour), ("--hosted-price", self.hosted)):
            if value is not None and not 0 < value < float("inf"):
                raise UserError(f"{flag}: {value:g}; allowed: more than 0")
        if self.hosted is not None and self.per_hour is None:
            raise UserError("--hosted-price: needs something to compare with; add --price-per-hour")


def cost(results: Sequence[PointResult], price_per_hour: float, hosted_price: float | None) -> Cost:
    """Of every point. hosted_price: of a million output tokens elsewhere, or None."""
    rows = [_row(result, price_per_hour, hosted_price) for result in results]
    return Cost(price_per_hour=price_per_hour, hosted_price=hosted_price, rows=rows)


def _row(result: PointResult, price_per_hour: float, hosted_price: float | None) -> CostRow:
    rate = result.throughput.tokens_per_second
    per_million = ratio(price_per_hour * MILLION, rate * HOUR) if rate is not None else None
    share = per_million / hosted_price if per_million is not None and hosted_price is not None else None
    return CostRow(point=result.point, per_million=per_million, busy_share=share)
