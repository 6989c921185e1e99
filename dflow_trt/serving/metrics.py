"""What the server counts: events of the loop in, series out.

An event costs some microseconds: it moves numbers in memory, which a thread of :mod:`dflow_trt.serving.series`
publishes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from dflow_trt import contract as c
from dflow_trt.bundle import Bundle
from dflow_trt.request import Emission, Request, RequestStats, RoundResult
from dflow_trt.serving import families as t
from dflow_trt.serving.series import Family, Histogram, Number, Registry, Repeater, Sink

FLUSH_SECONDS = 1.0
_STAGES = {c.DRAFTER: "draft"}  # the others are called as the decoder calls them


@dataclass(frozen=True)
class Capacity:
    """What the server has, for gauges that never change. Caches and relay_state are bytes, of all slots together."""

    slots: int
    max_queue: int
    cache_rows: int
    target_cache: int
    drafter_cache: int
    relay_state: int

    @classmethod
    def of(cls, bundle: Bundle, slots: int, max_queue: int) -> Self:
        """Of a bundle run with so many slots."""
        from dflow_trt.memory import plan_memory

        plan = plan_memory(bundle, slots)
        return cls(slots, max_queue, plan.cache_rows, plan.target_cache, plan.drafter_cache, plan.relay_state)


class _Group:
    """The cells of one strategy and task, all made at once: every series starts at zero, so that a rate sees the first.

    They are looked up once, since the loop moves them in every round.
    """

    def __init__(self, registry: Registry, num_drafts: int, strategy: str, task: str) -> None:
        labels, lengths = (strategy, task), tuple(range(num_drafts + 1))

        def number(family: Family) -> Number:
            return registry.number(family, labels)

        def histogram(family: Family) -> Histogram:
            return registry.histogram(family, labels, family.buckets or lengths)

        self.requests = {outcome: registry.number(t.REQUESTS, (*labels, outcome)) for outcome in t.OUTCOMES}
        self.prompt_tokens, self.reused_tokens = number(t.PROMPT_TOKENS), number(t.REUSED_TOKENS)
        self.output_tokens, self.emitted = number(t.OUTPUT_TOKENS), number(t.EMITTED)
        self.rounds, self.drafted, self.accepted = number(t.ROUNDS), number(t.DRAFTED), number(t.ACCEPTED)
        self.relayed = number(t.RELAYED)
        self.draft_length, self.accepted_length = histogram(t.DRAFT_LENGTH), histogram(t.ACCEPTED_LENGTH)
        self.queue_time, self.first_token = histogram(t.QUEUE_TIME), histogram(t.FIRST_TOKEN)
        self.token_latency, self.request_time = histogram(t.TOKEN_LATENCY), histogram(t.REQUEST_TIME)


@dataclass(slots=True)
class _Sequence:
    """One sequence from submitted to finished, and how much of its stats has been counted."""

    group: _Group
    arrival: float
    last: float = 0.0
    rounds: int = 0
    relayed: int = 0
    stats: RequestStats | None = None

    @property
    def rows(self) -> int:
        """Committed cache rows: every token but the anchor. None are counted before the prefill is done."""
        return 0 if self.stats is None else self.stats.prompt_tokens + self.stats.output_tokens - 1


class ServingMetrics:
    """Counts for one server.

    A request for n samples is n sequences, that is n decoder requests, each submitted and finished. ``submitted`` and
    ``refused`` may come from any thread, the other events from the loop's. num_drafts: the most drafts that a round
    verifies (``bundle.verify_rows - 1``). clock: the one of Request.arrival.

    ``start`` publishes from a thread, ``close`` ends it; without them ``flush`` does, when called.
    """

    def __init__(self, sink: Sink, num_drafts: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry, self._num_drafts, self._clock = Registry(sink), num_drafts, clock
        self._sequences: dict[str, _Sequence] = {}
        self._groups: dict[tuple[str, str], _Group] = {}
        self._tasks = {t.NONE, t.OTHER}
        self._row_bytes: dict[str, int] = {}
        self._repeater: Repeater | None = None
        single = self._registry.number
        self._steps, self._slot_steps = single(t.STEPS), single(t.SLOT_STEPS)
        self._slots_in_use, self._queue_length = single(t.SLOTS_IN_USE), single(t.QUEUE_LENGTH)
        self._heartbeat = single(t.HEARTBEAT)
        self.beat()  # whatever is published before the loop turns tells of this moment, not of 1970

    # -- publishing --------------------------------------------------------------------------------------------------

    def start(self, seconds: float = FLUSH_SECONDS) -> None:
        """Publish every so many seconds from now on."""
        self.beat()
        self._repeater = Repeater(self.flush, seconds)

    def close(self) -> None:
        """Publish a last time."""
        if self._repeater is not None:
            self._repeater.close()
            self._repeater = None

    def flush(self) -> None:
        """Publish now."""
        with self._registry.lock:
            rows = sum(sequence.rows for sequence in self._sequences.values())
            for cache, row_bytes in self._row_bytes.items():
                self._registry.number(t.CACHE_USED, (cache,)).value = rows * row_bytes
            for gauge in (self._slots_in_use, self._queue_length):  # a round that failed told nothing
                gauge.value = min(gauge.value, len(self._sequences))
        self._registry.flush()

    # -- events ------------------------------------------------------------------------------------------------------

    def capacity(self, capacity: Capacity) -> None:
        """Once, when the engines are there."""
        number = self._registry.number
        with self._registry.lock:
            number(t.SLOTS).value, number(t.QUEUE_LIMIT).value = capacity.slots, capacity.max_queue
            number(t.RELAY_BYTES).value = capacity.relay_state
            for cache, size in (("target", capacity.target_cache), ("drafters", capacity.drafter_cache)):
                number(t.CACHE_BYTES, (cache,)).value = size
                self._row_bytes[cache] = size // (capacity.slots * capacity.cache_rows)

    def submitted(self, request: Request, task: str = "") -> None:
        """A sequence is about to be queued: call it before the loop can run it."""
        with self._registry.lock:
            group = self._group(request.strategy.name, task)
            self._sequences[request.id] = _Sequence(group, request.arrival)

    def refused(self, outcome: str, strategy: str = t.NONE, task: str = "") -> None:
        """A request was not queued. strategy: one of the bundle's; without it where none was named, or a wrong one."""
        with self._registry.lock:
            self._group(strategy, task).requests[outcome].value += 1

    def started(self, request_id: str) -> None:
        """A sequence got a slot."""
        now = self._clock()
        with self._registry.lock:
            sequence = self._sequences[request_id]
            sequence.group.queue_time.observe(now - sequence.arrival)

    def round(self, result: RoundResult, queued: int, active: int) -> None:
        """The decoder made a step: right after it, before the next. Counts the step and all that it emitted.

        queued, active: how many sequences wait and are in flight now.
        """
        now = self._clock()
        with self._registry.lock:
            self._steps.value += 1
            self._slot_steps.value += active
            self._slots_in_use.value, self._queue_length.value = active, queued
            self._heartbeat.value = time.time()
            for stage, milliseconds in result.milliseconds.items():
                self._registry.number(t.STAGE_SECONDS, (_STAGES.get(stage, stage),)).value += milliseconds / 1e3
            for emission in result.emissions:
                sequence = self._sequences[emission.request_id]
                if emission.picks:
                    _count_tokens(sequence, emission.stats, len(emission.picks), now)
                _count_round(sequence, emission)

    def finished(self, request_id: str, outcome: str) -> None:
        """A sequence ended, after the ``round`` with its last emission if it had one. outcome: of families.OUTCOMES."""
        now = self._clock()
        with self._registry.lock:
            sequence = self._sequences.pop(request_id)
            sequence.group.requests[outcome].value += 1
            sequence.group.request_time.observe(now - sequence.arrival)

    def beat(self) -> None:
        """The loop is alive: on every turn of it, with or without work, and at least every few seconds."""
        self._heartbeat.value = time.time()

    # -- labels ------------------------------------------------------------------------------------------------------

    def _group(self, strategy: str, task: str) -> _Group:
        labels = strategy, self._task(task)
        if labels not in self._groups:
            self._groups[labels] = _Group(self._registry, self._num_drafts, *labels)
        return self._groups[labels]

    def _task(self, task: str) -> str:
        label = task or t.NONE
        if label not in self._tasks and (len(self._tasks) >= t.MAX_TASKS or len(label) > t.MAX_TASK_LENGTH):
            return t.OTHER
        self._tasks.add(label)
        return label


def _count_tokens(sequence: _Sequence, stats: RequestStats, count: int, now: float) -> None:
    group = sequence.group
    group.output_tokens.value += count
    if sequence.stats is None:
        sequence.stats = stats
        group.prompt_tokens.value += stats.prompt_tokens
        group.reused_tokens.value += stats.reused_tokens
        group.first_token.observe(now - sequence.arrival)
    else:
        group.token_latency.observe((now - sequence.last) / count, count)
    sequence.last = now


def _count_round(sequence: _Sequence, emission: Emission) -> None:
    """What the verify round behind an emission did; a first token, and a cancellation, have none."""
    stats, group = emission.stats, sequence.group
    if stats.rounds > sequence.rounds:
        sequence.rounds = stats.rounds
        group.rounds.value += 1
        group.drafted.value += emission.num_drafted
        group.accepted.value += emission.num_accepted
        group.emitted.value += len(emission.picks)
        group.draft_length.observe(emission.num_drafted)
        group.accepted_length.observe(emission.num_accepted)
    if stats.relayed_slots > sequence.relayed:
        group.relayed.value += stats.relayed_slots - sequence.relayed
        sequence.relayed = stats.relayed_slots
