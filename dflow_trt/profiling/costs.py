"""What a round costs by its drafts: the same requests, rounds of all lengths in turn, apart from the workload.

Times of a round do not depend on what is accepted, so any prompts will do, and any drafts where a drafter has fewer
than it was asked for; they depend on the batch, on the rows that are verified, and on the live context.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dflow_trt.bundle import Bundle
from dflow_trt.profiling.measure import PREFILL, Asked, LocalDriver, TimedDecoder
from dflow_trt.profiling.metrics import median_stages
from dflow_trt.profiling.record import Point, RoundCost
from dflow_trt.request import Request, Slot
from dflow_trt.spec import DrafterSpec

PASSES = 4  # over all strategies, every second one in the other direction
LEAST_ROUNDS, MOST_ROUNDS = 2, 6  # of a length in a pass
LANE_SECONDS = 1.0  # of a strategy in a pass; the least rounds are made whatever they take


@dataclass(frozen=True)
class _Sample:
    drafts: int
    context: float
    milliseconds: dict[str, float]


def lengths(num_drafts: int, wanted: Iterable[int] = ()) -> list[int]:
    """Draft lengths to time: one less than powers of two, all that there are, and those that were asked for."""
    powers = itertools.takewhile(lambda k: k < num_drafts, (2**i - 1 for i in itertools.count(1)))
    return sorted({*powers, num_drafts, *(k for k in wanted if 0 < k < num_drafts)})


def measure_costs(
    driver: LocalDriver, bundle: Bundle, points: Sequence[Point], asked: Sequence[Asked], wanted: Iterable[int] = ()
) -> list[RoundCost]:
    """The cost of rounds at one load. points: one a strategy, of a closed loop. asked: prompts to run on."""
    wanted = list(wanted)
    samples: dict[Point, list[_Sample]] = defaultdict(list)
    for turn in range(PASSES):
        for point in points if turn % 2 == 0 else reversed(points):
            spec, lane = _spec(bundle, point), _Lane(driver.decoder(point, _FullRounds), bundle, point, asked)
            samples[point] += lane.measure(lengths(spec.num_drafts, wanted) if spec else [0])
    return [cost for point in points for cost in _costs(point, _spec(bundle, point), samples[point])]


def _spec(bundle: Bundle, point: Point) -> DrafterSpec | None:
    drafter = bundle.strategy(point.strategy).drafter
    return bundle.drafters[drafter].spec if drafter is not None else None


def _costs(point: Point, spec: DrafterSpec | None, samples: Sequence[_Sample]) -> list[RoundCost]:
    by_length: dict[int, list[_Sample]] = defaultdict(list)
    for sample in samples:
        by_length[sample.drafts].append(sample)
    assert point.concurrency is not None
    return [
        RoundCost(
            strategy=point.strategy,
            kind=spec.kind if spec else None,
            batch=point.concurrency,
            temperature=point.temperature,
            input_len=point.input_len,
            drafts=drafts,
            rounds=len(found),
            context=statistics.mean(sample.context for sample in found),
            milliseconds=median_stages([sample.milliseconds for sample in found]),
        )
        for drafts, found in sorted(by_length.items())
    ]


class _FullRounds(TimedDecoder):
    """Every round has the drafts that were asked for: where a drafter has fewer, any token stands for the others."""

    def _draft(self, decoding: Sequence[Slot], wanted: Sequence[int]) -> list[tuple[int, ...]]:
        made = super()._draft(decoding, wanted)
        return [draft + (0,) * (count - len(draft)) for draft, count in zip(made, wanted, strict=True)]


class _Lane:
    """A full batch of one strategy in flight; the length of its rounds is set from round to round."""

    def __init__(self, decoder: TimedDecoder, bundle: Bundle, point: Point, asked: Sequence[Asked]) -> None:
        self._decoder = decoder
        strategy = bundle.strategy(point.strategy)
        self._requests = [
            _request(f"cost {i}", each, bundle, strategy.name)
            for i, each in enumerate(itertools.islice(itertools.cycle(asked), point.concurrency))
        ]

    def measure(self, drafts: Sequence[int]) -> list[_Sample]:
        """Samples of rounds with so many drafts, until a request comes to the end of its context."""
        for request in self._requests:
            self._decoder.submit(request)
        samples: list[_Sample] = []
        start = time.perf_counter()
        for turn in range(MOST_ROUNDS + 1):
            found = self._rounds(drafts[:: -1 if turn % 2 else 1])
            samples += found if turn else []  # the first binds and allocates
            if len(found) < len(drafts) or (turn >= LEAST_ROUNDS and time.perf_counter() - start > LANE_SECONDS):
                break
        self._end()
        return samples

    def _rounds(self, drafts: Sequence[int]) -> list[_Sample]:
        """A round of each length, as far as the requests' contexts last."""
        found: list[_Sample] = []
        for length in drafts:
            sample = self._round(length)
            if sample is None:
                break
            found.append(sample)
        return found

    def _round(self, drafts: int) -> _Sample | None:
        """One round of everything, prefills before it; None where a request was too near its end for it."""
        for request in self._requests:
            request.draft_tokens = drafts
        while True:
            result = self._decoder.timed_step()
            if any(each.finish_reason is not None for each in result.emissions):
                return None
            if len(result.emissions) == len(self._requests) and PREFILL not in result.milliseconds:
                break
        if any(each.num_drafted != drafts for each in result.emissions):
            return None
        tokens = [each.stats.prompt_tokens + each.stats.output_tokens for each in result.emissions]
        return _Sample(drafts, statistics.mean(tokens), result.milliseconds)

    def _end(self) -> None:
        for request in self._requests:
            self._decoder.cancel(request.id)
        self._decoder.step()
        assert self._decoder.idle


def _request(name: str, asked: Asked, bundle: Bundle, strategy: str) -> Request:
    """A request that goes on as long as its context lets it."""
    params = dataclasses.replace(asked.params, max_tokens=bundle.build.max_seq_len, ignore_eos=True, stop_token_ids=())
    assert asked.prompt_ids is not None
    assert params.seed is not None
    return Request(name, asked.prompt_ids, params, bundle.strategy(strategy), params.seed)
