"""Figures from timelines: plain arithmetic, nothing measured here.

Nothing divides by zero: a figure without a denominator is None. A percentile without enough samples is None too.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dflow_trt.profiling.measure import Run, Step, Trace
from dflow_trt.profiling.record import (
    ALL_TASKS,
    Acceptance,
    Distribution,
    Goodput,
    Interval,
    Latency,
    Speedup,
    Stages,
    Throughput,
    Turn,
)

Array = np.ndarray[Any, np.dtype[np.float64]]

CONFIDENCE = 0.95
CURVE_POINTS = 65  # of a distribution's curve: enough for a plot, few enough for a file
RESAMPLES = 4000
SEED = 0  # of the bootstrap: the same runs give the same interval
MILLISECONDS = 1e3
STAGE_NAMES = {"drafter": "draft"}  # others are called as the decoder calls them


# -- samples -----------------------------------------------------------------------------------------------------------


def needed(percent: float) -> int:
    """Samples from which a percentile can be told with 95 % confidence: enough that it lies between the least and the
    greatest of them that often (Wilks). 6 for the median, 29, 59 and 299 for p90, p95 and p99."""
    share, count = percent / 100, 1
    while share**count + (1 - share) ** count > 1 - CONFIDENCE:
        count += 1
    return count


def distribution(samples: Iterable[float]) -> Distribution:
    """Of samples in any order; percentiles by linear interpolation, as numpy's default."""
    values = np.sort(np.fromiter(samples, np.float64))
    shown: dict[str, float | None] = {f"p{percent}": _percentile(values, percent) for percent in (50, 90, 95, 99)}
    curve = np.quantile(values, np.linspace(0, 1, CURVE_POINTS)).tolist() if len(values) else []
    mean = float(values.mean()) if len(values) else None
    return Distribution.model_validate({"n": len(values), "mean": mean, "curve": curve, **shown})


def _percentile(values: Array, percent: int) -> float | None:
    return float(np.percentile(values, percent)) if len(values) >= needed(percent) else None


def ratio(top: float, bottom: float) -> float | None:
    """A quotient, None where there is nothing to divide by."""
    return top / bottom if bottom else None


# -- latency -----------------------------------------------------------------------------------------------------------


def ttft(trace: Trace) -> float | None:
    """Seconds from arrival to the first token."""
    return trace.ticks[0].time - trace.arrival if trace.ticks else None


def tpot(trace: Trace) -> float | None:
    """Seconds a token after those of the first tick, which came together; None where there are none."""
    if len(trace.ticks) < 2:
        return None
    return (trace.ticks[-1].time - trace.ticks[0].time) / (trace.tokens - trace.ticks[0].tokens)


def gaps(trace: Trace) -> list[tuple[float, int]]:
    """(seconds since the tick before, tokens) of every tick after the first."""
    return [(later.time - tick.time, later.tokens) for tick, later in itertools.pairwise(trace.ticks)]


def token_gaps(trace: Trace) -> list[float]:
    """Seconds a token, one entry a token: those that came together share the gap before them."""
    return [gap / tokens for gap, tokens in gaps(trace) for _ in range(tokens)]


def latency(traces: Sequence[Trace]) -> Latency:
    """All five distributions, in milliseconds."""

    def of(samples: Iterable[float | None]) -> Distribution:
        return distribution(sample * MILLISECONDS for sample in samples if sample is not None)

    return Latency(
        ttft=of(map(ttft, traces)),
        tpot=of(map(tpot, traces)),
        itl=of(gap for trace in traces for gap in token_gaps(trace)),
        round_gap=of(gap for trace in traces for gap, _ in gaps(trace)),
        request=of(trace.ticks[-1].time - trace.arrival for trace in traces if trace.ticks),
    )


# -- acceptance --------------------------------------------------------------------------------------------------------


def acceptance(task: str, traces: Sequence[Trace]) -> Acceptance:
    """Counts of the rounds of these requests."""
    rounds = [tick for trace in traces for tick in trace.rounds]
    accepted, emitted = sum(tick.accepted for tick in rounds), sum(tick.tokens for tick in rounds)
    lengths = [tick.drafted for tick in rounds if tick.drafted is not None]
    drafted = sum(lengths) if len(lengths) == len(rounds) else None
    by_position = [(tick.drafted, tick.accepted) for tick in rounds if tick.drafted is not None] if drafted else []
    return Acceptance(
        task=task,
        requests=len(traces),
        rounds=len(rounds),
        drafted=drafted,
        accepted=accepted,
        emitted=emitted,
        drafted_at=_reaching(length for length, _ in by_position),
        accepted_at=_reaching(kept for _, kept in by_position),
        reached_at=_reaching(min(length, kept + 1) for length, kept in by_position),
        tau_accepted=ratio(accepted, len(rounds)),
        tau_emitted=ratio(emitted, len(rounds)),
        wasted=ratio(drafted - accepted, drafted) if drafted is not None else None,
    )


def _reaching(lengths: Iterable[int]) -> list[int]:
    """Entry i: how many of these lengths are above i."""
    counts = np.bincount(np.fromiter(lengths, np.int64), minlength=1)
    reached: list[int] = counts[::-1].cumsum()[::-1][1:].tolist()
    return reached


def by_task(traces: Sequence[Trace]) -> list[Acceptance]:
    """One entry a task, by name."""
    groups: dict[str, list[Trace]] = defaultdict(list)
    for trace in traces:
        groups[trace.asked.item.task].append(trace)
    return [acceptance(task, groups[task]) for task in sorted(groups)]


def survival(counts: Acceptance) -> list[float]:
    """Entry i: the share of rounds that accepted draft i + 1 and all before it. Their sum is tau_accepted."""
    accepted = [*counts.accepted_at, *[0] * (len(counts.drafted_at) - len(counts.accepted_at))]
    return [count / counts.rounds for count in accepted]


# -- speed -------------------------------------------------------------------------------------------------------------


def throughput(runs: Sequence[Run]) -> Throughput:
    """Of the turns of one point."""
    seconds, tokens = sum(run.seconds for run in runs), sum(run.tokens for run in runs)
    requests = sum(len(run.traces) for run in runs)
    cpu = sum_or_none(run.cpu for run in runs)
    batches = [step.rounds for run in runs for step in run.steps if step.rounds]
    return Throughput(
        seconds=seconds,
        cpu_seconds=cpu,
        output_tokens=tokens,
        tokens_per_second=ratio(tokens, seconds),
        tokens_per_cpu_second=ratio(tokens, cpu) if cpu is not None else None,
        requests_per_second=ratio(requests, seconds),
        decode_tokens_per_second=decode_rate(runs),
        mean_batch=ratio(sum(batches), len(batches)),
    )


def sum_or_none(values: Iterable[float | None]) -> float | None:
    """The sum, None where a value is."""
    listed = list(values)
    known = [value for value in listed if value is not None]
    return sum(known) if len(known) == len(listed) else None


def decode_rate(runs: Sequence[Run]) -> float | None:
    """Tokens a second of steps in which all places of a closed loop decode and none prefills."""
    steps = [step for run in runs for step in full_steps(run)]
    return ratio(sum(step.tokens for step in steps), sum(step.end - step.start for step in steps))


def full_steps(run: Run) -> list[Step]:
    """Those in which all places of a closed loop decode and none prefills."""
    return [step for step in run.steps if step.decodes_alone and step.rounds == run.point.concurrency]


def goodput(runs: Sequence[Run], ttft_bound: float | None, tpot_bound: float | None) -> Goodput | None:
    """Of requests within both bounds (milliseconds; None bounds nothing); None without any bound."""
    if ttft_bound is None and tpot_bound is None:
        return None
    traces = [trace for run in runs for trace in run.traces]
    good = [trace for trace in traces if _within(ttft(trace), ttft_bound) and _within_or_none(trace, tpot_bound)]
    seconds = sum(run.seconds for run in runs)
    return Goodput(
        requests=len(good),
        share=ratio(len(good), len(traces)),
        requests_per_second=ratio(len(good), seconds),
        tokens_per_second=ratio(sum(trace.tokens for trace in good), seconds),
    )


def _within(seconds: float | None, bound: float | None) -> bool:
    return seconds is not None and (bound is None or seconds * MILLISECONDS <= bound)


def _within_or_none(trace: Trace, bound: float | None) -> bool:
    """A request of one token has no time a token to be late with."""
    seconds = tpot(trace)
    return seconds is None or _within(seconds, bound)


def stages(runs: Sequence[Run]) -> Stages | None:
    """Where a step's time goes; None where no step decodes alone."""
    steps = [step for run in runs for step in run.steps if step.decodes_alone]
    return Stages(rounds=len(steps), milliseconds=mean_stages([step.milliseconds for step in steps])) if steps else None


def mean_stages(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Milliseconds by stage, a step's mean."""
    total: dict[str, float] = defaultdict(float)
    for step in steps:
        for name, value in step.items():
            total[STAGE_NAMES.get(name, name)] += value
    return {name: value / len(steps) for name, value in total.items()}


def median_stages(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The same, each stage's median."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {STAGE_NAMES.get(name, name): statistics.median(step.get(name, 0.0) for step in steps) for name in names}


def turns(runs: Sequence[Run]) -> list[Turn]:
    """The runs as the record keeps them."""
    return [
        Turn(
            repetition=run.repetition,
            number=run.number,
            requests=len(run.traces),
            tokens=run.tokens,
            seconds=run.seconds,
            cpu_seconds=run.cpu,
        )
        for run in runs
    ]


# -- comparisons -------------------------------------------------------------------------------------------------------


def speedup(baseline: Sequence[Turn], turns: Sequence[Turn]) -> tuple[Interval, Interval | None] | None:
    """How many times faster than the baseline, by wall and by processor time, from the turns that both have."""
    base = {(turn.repetition, turn.number): turn for turn in baseline}
    pairs = [(base[key], turn) for turn in turns if (key := (turn.repetition, turn.number)) in base]
    pairs = [(a, b) for a, b in pairs if all((a.tokens, a.seconds, b.tokens, b.seconds))]
    if not pairs:
        return None
    ours = np.array([(b.tokens, b.seconds, b.cpu_seconds or 0.0) for _, b in pairs])
    theirs = np.array([(a.tokens, a.seconds, a.cpu_seconds or 0.0) for a, _ in pairs])
    wall = paired_interval(ours[:, 0], ours[:, 1], theirs[:, 0], theirs[:, 1])
    if not (ours[:, 2] > 0).all() or not (theirs[:, 2] > 0).all():
        return wall, None
    return wall, paired_interval(ours[:, 0], ours[:, 2], theirs[:, 0], theirs[:, 2])


def paired_interval(tokens: Array, seconds: Array, base_tokens: Array, base_seconds: Array) -> Interval:
    """The ratio of two rates, and its interval: pairs are drawn again with replacement, both sides of a pair together,
    so that what slowed both down cancels out."""
    pick = np.random.default_rng(SEED).integers(0, len(tokens), (RESAMPLES, len(tokens)))
    rate = tokens[pick].sum(1) / seconds[pick].sum(1)
    base = base_tokens[pick].sum(1) / base_seconds[pick].sum(1)
    value = tokens.sum() / seconds.sum() / (base_tokens.sum() / base_seconds.sum())
    return _interval(float(value), rate / base, len(tokens))


def unpaired_interval(tokens: Array, seconds: Array, base_tokens: Array, base_seconds: Array) -> Interval:
    """The same of runs at different times: each side is drawn by itself."""
    rng = np.random.default_rng(SEED)

    def rates(count: Array, time: Array) -> Array:
        pick = rng.integers(0, len(count), (RESAMPLES, len(count)))
        drawn: Array = count[pick].sum(1) / time[pick].sum(1)
        return drawn

    value = tokens.sum() / seconds.sum() / (base_tokens.sum() / base_seconds.sum())
    drawn = rates(tokens, seconds) / rates(base_tokens, base_seconds)
    return _interval(float(value), drawn, min(len(tokens), len(base_tokens)))


def _interval(value: float, drawn: Array, pairs: int) -> Interval:
    """The middle 95 % of what was drawn, where there are enough pairs to say anything: as many as for a median."""
    if pairs < needed(50):
        return Interval(value=value, low=None, high=None, pairs=pairs)
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).tolist()
    return Interval(value=value, low=low, high=high, pairs=pairs)


def speedups(baseline: Sequence[Run], runs: Sequence[Run]) -> Speedup | None:
    """Of one point over ar."""
    found = speedup(turns(baseline), turns(runs))
    if found is None:
        return None
    ours, theirs = decode_rate(runs), decode_rate(baseline)
    decode = ours / theirs if ours is not None and theirs else None
    return Speedup(wall=found[0], cpu=found[1], decode=decode)


def total(traces: Sequence[Trace]) -> Acceptance:
    """Of all tasks together."""
    return acceptance(ALL_TASKS, traces)
