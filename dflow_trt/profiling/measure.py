"""Requests driven through a decoder round by round, and the timelines that come of it.

A closed loop keeps a number of requests in flight: the next is asked when one ends. In an open loop they arrive when
they arrive, whatever the decoder does; a request's time begins at its arrival, not when the loop got round to it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from dflow_trt.bundle import Bundle, Strategy
from dflow_trt.decode import Decoder
from dflow_trt.method.policy import check_policy
from dflow_trt.method.sampling import SamplingParams
from dflow_trt.profiling.device import DeviceClock, Mark, on_device
from dflow_trt.profiling.record import Point
from dflow_trt.profiling.workload import Item
from dflow_trt.request import Emission, Request, RoundResult
from dflow_trt.runtime.base import Array, Runtime
from dflow_trt.spec import DRAFT_POLICIES

SAMPLING = "sampling"
PREFILL = "prefill"
ENDLESS = 1 << 30  # requests that may wait: an open loop refuses none


class Clock(Protocol):
    """Seconds on the wall and on the processor (all threads of this process)."""

    def now(self) -> float:
        """On the wall."""
        ...

    def cpu(self) -> float:
        """On the processor."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let so many pass."""
        ...


class SystemClock:
    """The real one."""

    def now(self) -> float:
        return time.perf_counter()

    def cpu(self) -> float:
        return time.process_time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


# -- timelines ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """One sequence to generate. index: of the workload's item, the same whenever that is asked again. prompt_ids: None
    where a server encodes the prompt."""

    index: int
    item: Item
    prompt_ids: tuple[int, ...] | None
    params: SamplingParams


@dataclass(frozen=True)
class Tick:
    """Tokens that came together. drafted, accepted: of the verify round that gave them, the first None where a server
    does not say; is_round: there was one, which is so of every tick but that of the prefill's token."""

    time: float
    tokens: int
    drafted: int | None = 0
    accepted: int = 0
    is_round: bool = True


@dataclass
class Trace:
    """One request's life, in seconds of its clock."""

    asked: Asked
    arrival: float
    ticks: list[Tick] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None

    @property
    def tokens(self) -> int:
        return sum(tick.tokens for tick in self.ticks)

    @property
    def rounds(self) -> list[Tick]:
        return [tick for tick in self.ticks if tick.is_round]


@dataclass(frozen=True)
class Step:
    """One step of the decoder. rounds: requests that had a verify round in it; milliseconds: by stage; cpu: seconds of
    the processor."""

    start: float
    end: float
    rounds: int
    tokens: int
    milliseconds: dict[str, float]
    cpu: float = 0.0

    @property
    def decodes_alone(self) -> bool:
        """Rounds and no prefill."""
        return self.rounds > 0 and PREFILL not in self.milliseconds


@dataclass(frozen=True)
class Run:
    """One turn of a point. cpu: seconds of the processor, None where that is another machine's; steps: none then."""

    point: Point
    start: float
    end: float
    cpu: float | None
    traces: tuple[Trace, ...]
    steps: tuple[Step, ...] = ()
    repetition: int = 0
    number: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def tokens(self) -> int:
        return sum(trace.tokens for trace in self.traces)


def arrivals(count: int, rate: float, seed: Sequence[int]) -> list[float]:
    """Seconds until each of ``count`` requests arrives: a Poisson process, the same for a seed."""
    gaps: list[float] = np.random.default_rng(list(seed)).exponential(1 / rate, count).cumsum().tolist()
    return gaps


# -- here --------------------------------------------------------------------------------------------------------------


class TimedDecoder(Decoder):
    """A decoder that tells the choice of tokens from the rest of the host's work, and engines by the device's clock
    where there is one."""

    device: DeviceClock | None = None

    def _choose(self, *arguments: Any) -> int:
        with super()._timed(SAMPLING):
            return super()._choose(*arguments)

    def _drawn(self, *arguments: Any) -> Array:
        with super()._timed(SAMPLING):
            return super()._drawn(*arguments)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        with self.device.around(stage) if self.device is not None else nullcontext(), super()._timed(stage):
            yield

    def timed_step(self) -> RoundResult:
        """A step with the device's times; waits for it."""
        result = self.step()
        if self.device is None:
            return result
        found = self.device.milliseconds(self.device.take())
        return replace(result, milliseconds=on_device(result.milliseconds, found))


class LocalDriver:
    """Runs turns on one runtime. A point keeps its decoder, and with it what an adaptive policy has learnt.

    rounds: after so many a request is left, so that all of them are full ones; None runs it to its end.
    """

    def __init__(
        self,
        bundle: Bundle,
        runtime: Runtime,
        slots: int,
        clock: Clock | None = None,
        device: DeviceClock | None = None,
        rounds: int | None = None,
    ) -> None:
        self._bundle, self._runtime, self._slots, self._device = bundle, runtime, slots, device
        self._rounds = rounds
        self._clock = clock or SystemClock()
        self._decoders: dict[Point, TimedDecoder] = {}

    def decoder(self, point: Point, kind: type[TimedDecoder] = TimedDecoder) -> TimedDecoder:
        """A decoder for one point. Only one of a runtime's decoders may have requests in flight."""
        check_policy(point.draft_policy)
        policy = next(name for name in DRAFT_POLICIES if name == point.draft_policy)
        slots = min(point.concurrency or self._slots, self._slots)
        options = {"draft_policy": policy, "prefix_reuse": False}
        made = kind(self._bundle, self._runtime, ENDLESS, slots, **options)  # type: ignore[arg-type]
        made.device = self._device
        return made

    def check(self, point: Point, asked: Sequence[Asked]) -> None:
        """UserError naming the first prompt that the bundle does not take."""
        decoder = self.decoder(point)
        for each in asked:
            request = _request("0", each, self._bundle.strategy(point.strategy), point.draft_tokens)
            try:
                decoder.check(request)
            except ValueError as error:
                raise type(error)(str(error).replace("request 0", each.item.where, 1)) from None

    def run(self, point: Point, asked: Sequence[Asked], offsets: Sequence[float] | None = None) -> Run:
        """One turn: an open loop with arrivals at these seconds, else a closed one."""
        if point not in self._decoders:
            self._decoders[point] = self.decoder(point)
        strategy = self._bundle.strategy(point.strategy)
        loop = _Loop(self._decoders[point], self._clock, strategy, point.draft_tokens, self._rounds)
        start, cpu = self._clock.now(), self._clock.cpu()
        if offsets is None:
            assert point.concurrency is not None
            loop.closed(asked, point.concurrency)
        else:
            loop.open(asked, offsets)
        end, spent = self._clock.now(), self._clock.cpu() - cpu
        return Run(point, start, end, spent, tuple(loop.traces.values()), loop.timed_steps())


def _request(name: str, asked: Asked, strategy: Strategy, draft_tokens: int | None) -> Request:
    assert asked.prompt_ids is not None
    assert asked.params.seed is not None, "a profile repeats itself"
    return Request(name, asked.prompt_ids, asked.params, strategy, asked.params.seed, draft_tokens=draft_tokens)


class _Loop:
    """The requests of one turn."""

    def __init__(
        self, decoder: TimedDecoder, clock: Clock, strategy: Strategy, draft_tokens: int | None, rounds: int | None
    ) -> None:
        self._decoder, self._clock = decoder, clock
        self._strategy, self._draft_tokens, self._rounds = strategy, draft_tokens, rounds
        self.traces: dict[str, Trace] = {}
        self._steps: list[Step] = []
        self._marks: list[list[Mark]] = []

    def closed(self, asked: Sequence[Asked], concurrency: int) -> None:
        waiting = deque(asked)
        while waiting or not self._decoder.idle:
            while waiting and self._decoder.num_active + self._decoder.num_queued < concurrency:
                self._submit(waiting.popleft(), self._clock.now())
            self._step()

    def open(self, asked: Sequence[Asked], offsets: Sequence[float]) -> None:
        start = self._clock.now()
        waiting = deque((start + offset, each) for offset, each in zip(offsets, asked, strict=True))
        while waiting or not self._decoder.idle:
            while waiting and waiting[0][0] <= self._clock.now():
                arrival, each = waiting.popleft()
                self._submit(each, arrival)
            if self._decoder.idle:
                self._clock.sleep(max(0.0, waiting[0][0] - self._clock.now()))
            else:
                self._step()

    def _submit(self, asked: Asked, arrival: float) -> None:
        name = str(len(self.traces))
        self.traces[name] = Trace(asked, arrival)
        self._decoder.submit(_request(name, asked, self._strategy, self._draft_tokens))

    def _step(self) -> None:
        start, cpu = self._clock.now(), self._clock.cpu()
        result = self._decoder.step()
        end, spent = self._clock.now(), self._clock.cpu() - cpu
        rounds = sum(self._record(emission, end) for emission in result.emissions)
        tokens = sum(len(emission.picks) for emission in result.emissions)
        self._steps.append(Step(start, end, rounds, tokens, result.milliseconds, spent))
        if self._decoder.device is not None:
            self._marks.append(self._decoder.device.take())

    def timed_steps(self) -> tuple[Step, ...]:
        """The steps, by the device's clock where there is one: read now, as waiting in between would slow it down."""
        device = self._decoder.device
        if device is None:
            return tuple(self._steps)
        return tuple(
            replace(step, milliseconds=on_device(step.milliseconds, device.milliseconds(marks)))
            for step, marks in zip(self._steps, self._marks, strict=True)
        )

    def _record(self, emission: Emission, now: float) -> bool:
        """Keep what a step gave one request; whether that was a verify round."""
        trace = self.traces[emission.request_id]
        is_round = emission.stats.rounds > len(trace.rounds)
        if emission.picks:
            drafted, accepted = emission.num_drafted, emission.num_accepted
            trace.ticks.append(Tick(now, len(emission.picks), drafted, accepted, is_round))
            trace.token_ids += emission.tokens
        trace.finish_reason, trace.error = emission.finish_reason, emission.error
        if self._rounds is not None and len(trace.rounds) >= self._rounds:
            self._decoder.cancel(emission.request_id)
        return is_round
