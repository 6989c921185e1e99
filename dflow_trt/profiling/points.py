"""Which settings are measured, on which requests, and in which order they take turns.

Points of one load (and temperature, and prompt length) are a family: they run the same requests. A family's requests
are cut into turns; every point runs a turn before any runs the next, in one order and then in the other. What else the
machine does then falls on all alike, and the same turns make pairs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dflow_trt.errors import UserError
from dflow_trt.method.policy import check_policy
from dflow_trt.method.sampling import SamplingParams
from dflow_trt.profiling.measure import Asked
from dflow_trt.profiling.record import Point
from dflow_trt.profiling.workload import Item
from dflow_trt.spec import AUTOREGRESSIVE

REQUESTS = 24  # of a point in a repetition, at least
WAVES = 8  # times the concurrency: so many requests, if that is more
TURN_WAVES = 4  # times the concurrency: the requests of a turn

Element = TypeVar("Element")
Prompt = tuple[Item, tuple[int, ...] | None]  # its ids, where it is encoded here


@dataclass(frozen=True)
class Options:
    """What is swept, how often, and on how many requests. Lists multiply.

    strategies: none means all that there are; ar is always among them, as everything is held against it. concurrency:
    closed loops; rates: open loops, requests a second. requests: of a point in a repetition, None for enough.
    """

    strategies: tuple[str, ...] = ()
    concurrency: tuple[int, ...] = (1,)
    rates: tuple[float, ...] = ()
    draft_tokens: tuple[int | None, ...] = (None,)
    policies: tuple[str, ...] = ("fixed",)
    temperatures: tuple[float, ...] = (0.0,)
    max_tokens: int = 128
    ignore_eos: bool = False
    seed: int = 0
    requests: int | None = None
    repetitions: int = 3
    warmup: int = 1
    ttft_bound: float | None = None
    tpot_bound: float | None = None

    def __post_init__(self) -> None:
        _at_least("--max-tokens", (self.max_tokens,), 1)
        _at_least("--concurrency", self.concurrency, 1)
        _at_least("--draft-tokens", [each for each in self.draft_tokens if each is not None], 1)
        _at_least("--requests", [] if self.requests is None else [self.requests], 1)
        _at_least("--repetitions", (self.repetitions,), 1)
        _at_least("--warmup", (self.warmup,), 0)
        _at_least("--temperature", self.temperatures, 0)
        _above("--rate", self.rates)
        _above("--ttft-bound", [] if self.ttft_bound is None else [self.ttft_bound])
        _above("--tpot-bound", [] if self.tpot_bound is None else [self.tpot_bound])
        for name in self.policies:
            check_policy(name)


def _at_least(flag: str, values: Sequence[float], low: int) -> None:
    for value in values:
        if not value >= low:
            raise UserError(f"{flag}: {value:g}; allowed: {low} or more")


def _above(flag: str, values: Sequence[float]) -> None:
    for value in values:
        if not 0 < value < float("inf"):
            raise UserError(f"{flag}: {value:g}; allowed: more than 0")


@dataclass(frozen=True)
class Family:
    """Points that run the same requests, ar first. turns: these requests, cut."""

    points: tuple[Point, ...]
    turns: tuple[tuple[Asked, ...], ...]

    @property
    def baseline(self) -> Point:
        return self.points[0]

    @property
    def requests(self) -> int:
        return sum(map(len, self.turns))


@dataclass(frozen=True)
class PlannedTurn:
    """A turn of one point. seed: of its arrivals, the same for every point of the family."""

    point: Point
    asked: tuple[Asked, ...]
    repetition: int
    number: int
    seed: tuple[int, ...]


def families(
    options: Options,
    strategies: Mapping[str, int | None],
    prompts: Mapping[int | None, Sequence[Prompt]],
) -> list[Family]:
    """All that is measured. strategies: with the most drafts of a round, None where nobody says. prompts: by
    input_len."""
    loads: list[tuple[int | None, float | None]] = [(each, None) for each in dict.fromkeys(options.concurrency)]
    loads += [(None, rate) for rate in dict.fromkeys(options.rates)]
    found = []
    for input_len, temperature, (concurrency, rate) in itertools.product(
        prompts, dict.fromkeys(options.temperatures), loads
    ):
        plain = Point(
            strategy=AUTOREGRESSIVE, concurrency=concurrency, rate=rate, temperature=temperature, input_len=input_len
        )
        points = [plain, *_speculative(options, strategies, plain)]
        asked = _asked(options, prompts[input_len], temperature, concurrency)
        size = len(asked) if concurrency is None else TURN_WAVES * concurrency
        turns = (tuple(asked[start : start + size]) for start in range(0, len(asked), size))
        found.append(Family(tuple(points), tuple(turns)))
    return found


def requests_for(concurrency: int | None) -> int:
    """So many that a closed loop is full most of the time, and that there are a few to an open one."""
    return max(REQUESTS, WAVES * (concurrency or 1))


def most_requests(options: Options) -> int:
    """Of all loads."""
    return options.requests or max(map(requests_for, options.concurrency), default=REQUESTS)


def _speculative(options: Options, strategies: Mapping[str, int | None], plain: Point) -> list[Point]:
    chosen = [name for name in dict.fromkeys(options.strategies or strategies) if name != AUTOREGRESSIVE]
    return [
        plain.model_copy(update={"strategy": name, "draft_tokens": drafts, "draft_policy": policy})
        for name in chosen
        for drafts in _lengths(options, strategies[name])
        for policy in dict.fromkeys(options.policies)
    ]


def _lengths(options: Options, most: int | None) -> list[int | None]:
    """As many as a drafter makes, or more, are all of them: None."""
    return list(
        dict.fromkeys(None if most and drafts and drafts >= most else drafts for drafts in options.draft_tokens)
    )


def _asked(options: Options, prompts: Sequence[Prompt], temperature: float, concurrency: int | None) -> list[Asked]:
    """The requests of a repetition: the prompts, over again where there are not enough."""
    count = options.requests or requests_for(concurrency)
    params = SamplingParams(
        max_tokens=options.max_tokens, temperature=temperature, ignore_eos=options.ignore_eos, seed=options.seed
    )
    places = itertools.islice(itertools.cycle(enumerate(prompts)), count)
    return [Asked(i, item, ids, dataclasses.replace(params, seed=options.seed + i)) for i, (item, ids) in places]


def warmup_turns(families: Sequence[Family], options: Options) -> Iterator[PlannedTurn]:
    """The first turn of every point, so often."""
    for family, again in itertools.product(families, range(options.warmup)):
        for point in family.points:
            yield PlannedTurn(point, family.turns[0], -1, again, (options.seed, 0))


def measured_turns(families: Sequence[Family], options: Options) -> Iterator[PlannedTurn]:
    """All turns in their order."""
    for repetition in range(options.repetitions):
        for family in alternating(families, repetition):
            for number, asked in enumerate(family.turns):
                for point in alternating(family.points, repetition + number):
                    yield PlannedTurn(point, asked, repetition, number, (options.seed, 1 + repetition, number))


def alternating(elements: Sequence[Element], turn: int) -> Sequence[Element]:
    """Forward, and the next time backward: nobody always comes first."""
    return elements if turn % 2 == 0 else elements[::-1]
