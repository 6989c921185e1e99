"""The serving loop on the scripted runtime: admission, ends of every kind, engines that fail."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from fake import FakeRuntime, Script, Toy, draft_model_spec, drafter_spec, make_bundle

from dflow_trt.decode import QueueFull
from dflow_trt.errors import UserError
from dflow_trt.method.sampling import SamplingParams
from dflow_trt.request import Request
from dflow_trt.serving.loop import GATHER_SECONDS, Burst, EngineFailure, Job, Piece, ServingLoop, Unavailable
from dflow_trt.serving.metrics import ServingMetrics
from dflow_trt.serving.series import MemorySink
from dflow_trt.spec import NgramSpec

TOY = Toy()
FLOW = drafter_spec("flow", 8, "after_rejection")
LOOKUP = NgramSpec("lookup", None, 1, 3, 5)
BUNDLE = make_bundle([FLOW, draft_model_spec("small", 4), LOOKUP], max_batch_size=2)
SCRIPTS = {"flow": Script("mixed", 75, 1), "small": Script("mixed", 75, 2)}
PATIENCE = 20.0
THREE_ROUNDS = (
    12  # calls: a prompt's target and context, then relay, drafter, target and context a round; not all three
)
TWO: list[dict[str, Any]] = [{"prompt": [1], "max_tokens": 60}, {"prompt": [2], "max_tokens": 60}]


class HeldRuntime(FakeRuntime):
    """Engines that can be held at their next call, and broken."""

    def __init__(self) -> None:
        super().__init__(BUNDLE, TOY, SCRIPTS)
        self._turn = threading.Condition()
        self._passes: float = math.inf
        self.waits = False
        self.broken: Exception | None = None
        self.failures = 0

    def run(self, *arguments: Any, **more: Any) -> Any:
        with self._turn:
            self.waits = True
            self._turn.notify_all()
            assert self._turn.wait_for(lambda: self._passes > 0, PATIENCE)
            self.waits = False
            self._passes -= 1
        if self.broken is not None and self.failures:
            self.failures -= 1
            raise self.broken
        return super().run(*arguments, **more)

    def let(self, calls: float) -> None:
        """So many more calls may pass."""
        with self._turn:
            self._passes = calls
            self._turn.notify_all()

    def hold(self, calls: int = 0) -> None:
        """Let so many more calls pass; return when the next one is being held."""
        self.let(calls)
        with self._turn:
            assert self._turn.wait_for(lambda: self.waits and not self._passes, PATIENCE)

    def release(self) -> None:
        self.let(math.inf)


@dataclass
class Heard:
    """A listener that keeps what it gets."""

    pieces: list[Piece] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)
    wanted: int = 1
    over: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)

    def receive(self, piece: Piece) -> None:
        assert not self.errors, "nothing comes behind a failure"
        assert piece.index not in self.reasons, "nothing comes behind the last piece"
        self.pieces.append(piece)
        self.begun.set()
        if piece.finish_reason is not None:
            self.reasons[piece.index] = piece.finish_reason
        if len(self.reasons) == self.wanted:
            self.over.set()

    def fail(self, error: Exception) -> None:
        self.errors.append(error)
        self.over.set()

    def tokens(self, index: int = 0) -> list[int]:
        return [pick.token for piece in self.pieces if piece.index == index for pick in piece.picks]


@dataclass
class Bench:
    runtime: HeldRuntime
    sink: MemorySink
    metrics: ServingMetrics
    loop: ServingLoop
    dead: list[str]
    log: list[str]
    ids: Iterator[int] = field(default_factory=itertools.count)

    def job(
        self, prompt: list[int], *, n: int = 1, timeout: float | None = None, strategy: str = "flow", **params: Any
    ) -> tuple[Job, Heard]:
        number, heard = next(self.ids), Heard(wanted=n)
        chosen = SamplingParams(n=n, **{"max_tokens": 8, **params})
        requests = [Request(f"{number}-{k}", prompt, chosen, BUNDLE.strategy(strategy), 0, k) for k in range(n)]
        deadline = None if timeout is None else time.monotonic() + timeout
        return Job(str(number), requests, [None] * n, heard, deadline, "task"), heard

    def start(self, prompt: list[int], **more: Any) -> tuple[Job, Heard]:
        job, heard = self.job(prompt, **more)
        self.loop.submit(job)
        return job, heard

    def running(self, *jobs: dict[str, Any]) -> list[tuple[Job, Heard]]:
        """Start jobs, and hold the engines in the middle of the third round: every job has got something, none all."""
        self.runtime.let(0)
        started = [self.start(**job) for job in jobs]
        self.runtime.hold(THREE_ROUNDS)
        return started

    def outcomes(self) -> dict[str, float]:
        self.metrics.flush()
        names = ("stop", "length", "cancelled", "timeout", "error", "unavailable")
        sums = {name: self.sink.sum("dflow_requests_total", outcome=name) for name in names}
        return {name: count for name, count in sums.items() if count}

    def ended(self) -> bool:
        return until(lambda: self.loop.num_waiting == self.loop.num_running == 0)


def until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = make_bench(max_queue=3)
    yield made
    made.runtime.release()
    made.loop.close()


def make_bench(max_queue: int) -> Bench:
    runtime, sink, dead, log = HeldRuntime(), MemorySink(), [], []
    metrics = ServingMetrics(sink, BUNDLE.verify_rows - 1)
    loop = ServingLoop(BUNDLE, runtime, metrics, max_queue=max_queue, on_dead=dead.append, log=log.append)
    return Bench(runtime, sink, metrics, loop, dead, log)


def test_a_job_gets_the_tokens_of_the_target(bench: Bench) -> None:
    _, heard = bench.start([3, 4, 5], max_tokens=20)
    assert heard.over.wait(PATIENCE)
    assert heard.tokens() == TOY.continuation([3, 4, 5], 20)
    assert heard.reasons == {0: "length"}
    assert heard.pieces[-1].stats.output_tokens == 20
    assert len({id(piece.stats) for piece in heard.pieces}) == len(heard.pieces), "figures of its own round"
    assert [piece.stats.output_tokens for piece in heard.pieces] == list(
        itertools.accumulate(len(piece.picks) for piece in heard.pieces)
    )
    assert bench.ended()
    assert bench.outcomes() == {"length": 1}


@pytest.mark.parametrize(("strategy", "shown"), [("small", "draft"), ("lookup", "verify")])
def test_draft_models_and_lookup_are_served_and_counted_by_their_names(bench: Bench, strategy: str, shown: str) -> None:
    jobs = [bench.start([3, 4, 3, 4, i], max_tokens=40, strategy=name) for i, name in enumerate([strategy, "flow"])]
    for i, (_, heard) in enumerate(jobs):
        assert heard.over.wait(PATIENCE)
        assert heard.tokens() == TOY.continuation([3, 4, 3, 4, i], 40)
    assert bench.ended()
    bench.metrics.flush()
    stats = jobs[0][1].pieces[-1].stats
    assert stats.drafted > 0
    counts = {"rounds": stats.rounds, "drafted_tokens": stats.drafted, "accepted_tokens": stats.accepted}
    for family, count in counts.items():
        assert bench.sink.sum(f"dflow_{family}_total", strategy=strategy) == count
    assert bench.sink.sum("dflow_requests_total", strategy=strategy, outcome="length") == 1
    assert bench.sink.sum("dflow_stage_seconds_total", stage=shown) > 0


def test_samples_of_one_job_end_one_by_one(bench: Bench) -> None:
    _, heard = bench.start([3, 4], n=4, max_tokens=6, temperature=1.0)
    assert heard.over.wait(PATIENCE)
    assert heard.reasons == dict.fromkeys(range(4), "length")
    assert bench.ended()
    assert bench.outcomes() == {"length": 4}


def test_the_queue_is_bounded_and_takes_a_job_whole_or_not_at_all(bench: Bench) -> None:
    bench.running(*TWO)
    assert bench.loop.num_running == 2
    bench.start([3], n=2)
    with pytest.raises(QueueFull, match="the queue is full, at most 3 sequences wait"):
        bench.start([4], n=2)
    bench.start([5])
    with pytest.raises(QueueFull):
        bench.start([6])
    bench.runtime.release()
    assert bench.ended()
    assert bench.outcomes() == {"length": 5}


def test_free_slots_count_beside_the_queue() -> None:
    bench = make_bench(max_queue=0)
    _, heard = bench.start([1], n=2)
    assert heard.over.wait(PATIENCE)
    with pytest.raises(QueueFull):
        bench.start([1], n=3)
    bench.loop.close()


def test_a_bad_request_is_refused_without_its_internal_id(bench: Bench) -> None:
    with pytest.raises(UserError, match=r"^the prompt is empty"):
        bench.start([])
    job, _ = bench.job([1])
    job.requests = [*job.requests, Request("x", [10**6], SamplingParams(), BUNDLE.strategy("ar"), 0)]
    with pytest.raises(UserError, match=r"^prompt token 1000000"):
        bench.loop.submit(job)
    assert bench.loop.num_waiting == 0


def test_cancelling_one_that_runs_frees_its_slot_and_leaves_the_others(bench: Bench) -> None:
    (job, heard), (_, other) = bench.running(*TWO)
    bench.loop.cancel(job.handle)
    bench.runtime.release()
    assert heard.over.wait(PATIENCE)
    assert heard.reasons == {0: "cancelled"}
    assert other.over.wait(PATIENCE)
    assert other.tokens() == TOY.continuation([2], 60)
    assert bench.ended()
    assert bench.outcomes() == {"cancelled": 1, "length": 1}


def test_cancelling_one_that_waits(bench: Bench) -> None:
    bench.running(*TWO)
    assert bench.loop.num_running == 2
    job, heard = bench.start([3], n=2)
    bench.loop.cancel(job.handle)
    bench.loop.cancel("nobody")
    bench.runtime.release()
    assert heard.over.wait(PATIENCE)
    assert heard.reasons == {0: "cancelled", 1: "cancelled"}
    assert heard.tokens() == []
    assert heard.pieces[0].stats.prompt_tokens == 1
    assert bench.ended()
    assert bench.outcomes() == {"cancelled": 2, "length": 2}


def test_a_deadline_in_the_queue_and_one_while_running(bench: Bench) -> None:
    (_, running), _ = bench.running({**TWO[0], "timeout": 0.3}, TWO[1])
    _, waiting = bench.start([3], timeout=0.01)
    time.sleep(0.35)
    bench.runtime.release()
    assert waiting.over.wait(PATIENCE)
    assert running.over.wait(PATIENCE)
    [error] = waiting.errors
    assert isinstance(error, Unavailable)
    assert "queue" in str(error)
    assert running.reasons == {0: "timeout"}
    assert running.tokens() == TOY.continuation([1], len(running.tokens()))
    assert bench.ended()
    assert bench.outcomes() == {"timeout": 2, "length": 1}


def test_an_error_of_one_sample_fails_its_job_alone(bench: Bench) -> None:
    everything = dict.fromkeys(range(BUNDLE.target.live_vocab), float("-inf"))
    _, banned = bench.start([1], n=2, logit_bias=everything)
    _, fine = bench.start([2])
    assert banned.over.wait(PATIENCE)
    assert fine.over.wait(PATIENCE)
    assert bench.ended()
    [error] = banned.errors
    assert isinstance(error, UserError)
    assert "ban every token" in str(error)
    assert fine.tokens() == TOY.continuation([2], 8)


def test_a_failing_round_fails_its_requests_and_the_next_ones_run(bench: Bench) -> None:
    (_, first), (_, second) = bench.running(*TWO)
    _, waiting = bench.start([3])
    bench.runtime.broken, bench.runtime.failures = RuntimeError("device-side assert"), 1
    bench.runtime.release()
    for heard in (first, second):
        assert heard.over.wait(PATIENCE)
        [error] = heard.errors
        assert isinstance(error, EngineFailure)
        assert "device-side assert" in str(error)
    assert waiting.over.wait(PATIENCE)
    assert waiting.tokens() == TOY.continuation([3], 8)
    assert bench.loop.healthy
    assert not bench.dead
    assert "Traceback" in bench.log[0]
    assert bench.ended()
    assert bench.outcomes() == {"error": 2, "length": 1}


def test_engines_that_stay_broken_are_given_up(bench: Bench) -> None:
    (_, running), _ = bench.running(*TWO)
    _, waiting = bench.start([3])
    bench.runtime.broken, bench.runtime.failures = RuntimeError("CUDA error 700"), 10**6
    bench.runtime.release()
    assert waiting.over.wait(PATIENCE)
    assert until(lambda: bench.dead == ["CUDA error 700"])
    assert not bench.loop.healthy
    assert isinstance(running.errors[0], EngineFailure)
    assert isinstance(waiting.errors[0], Unavailable)
    with pytest.raises(Unavailable):
        bench.start([4])
    assert bench.outcomes() == {"error": 2, "unavailable": 1}
    assert bench.loop.drain(PATIENCE)


def test_draining_takes_nothing_new_and_loses_nothing(bench: Bench) -> None:
    heard = [bench.start([number], max_tokens=30)[1] for number in range(1, 6)]
    assert bench.loop.drain(PATIENCE)
    for number, each in enumerate(heard, 1):
        assert each.tokens() == TOY.continuation([number], 30)
    with pytest.raises(Unavailable):
        bench.start([9])


def test_closing_ends_what_runs(bench: Bench) -> None:
    (_, heard), _ = bench.running(*TWO)
    _, waiting = bench.start([2], n=2, max_tokens=120)
    closing = threading.Thread(target=bench.loop.close)
    closing.start()
    assert until(lambda: bench.loop._closing)
    bench.runtime.release()
    closing.join(PATIENCE)
    assert heard.reasons == {0: "cancelled"}
    assert waiting.reasons == {0: "cancelled", 1: "cancelled"}


def test_a_handle_belongs_to_one_job(bench: Bench) -> None:
    job, _ = bench.start([1], max_tokens=100)
    again, _ = bench.job([2])
    again.handle = job.handle
    with pytest.raises(UserError, match="handle '0' is in use"):
        bench.loop.submit(again)


# -- sequences that come at once ---------------------------------------------------------------------------------------


def test_as_many_as_came_at_once_are_waited_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflow_trt.serving.loop.GATHER_SECONDS", PATIENCE)
    _, first = bench.start([3, 1, 4])
    assert first.over.wait(PATIENCE), "nobody is expected yet"
    for _ in range(2):
        bench.runtime.let(0)
        pair = [bench.start(prompt)[1] for prompt in ([3, 1, 4], [1, 5, 9])]
        bench.runtime.release()
        assert all(heard.over.wait(PATIENCE) for heard in pair)
        assert bench.ended()
    bench.runtime.let(0)
    bench.start([3, 1, 4])
    time.sleep(0.05)
    assert not bench.runtime.waits, "the other one may come yet"
    bench.runtime.release()
    _, last = bench.start([1, 5, 9])
    assert last.over.wait(PATIENCE)


def test_a_cancel_and_the_end_are_not_kept_waiting(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflow_trt.serving.loop.GATHER_SECONDS", 10 * PATIENCE)
    bench.start([3], n=2)
    assert bench.ended()
    job, heard = bench.start([3])
    bench.loop.cancel(job.handle)
    assert heard.over.wait(PATIENCE)
    assert heard.reasons == {0: "cancelled"}


def test_who_comes_alone_does_not_wait_and_nobody_waits_long() -> None:
    now = [100.0]
    burst = Burst(lambda: now[0])

    def come(after: float, count: int = 1, idle: bool = False, slots: int = 8) -> float:
        now[0] += after
        burst.arrived(count, idle)
        return burst.patience(slots)

    soon, late = GATHER_SECONDS / 4, 3 * GATHER_SECONDS
    assert come(0, idle=True) == 0.0
    assert come(late) == 0.0, "while another runs"
    assert come(late, idle=True) == 0.0, "it was alone last time"
    assert come(soon, 2) == 0.0
    assert come(late, idle=True) == pytest.approx(GATHER_SECONDS), "three came at once"
    assert come(soon) == pytest.approx(GATHER_SECONDS - soon)
    assert come(soon) == 0.0
    assert come(late, 2, idle=True, slots=2) == 0.0, "no more can start"
    assert come(late, idle=True) > 0.0
    now[0] += GATHER_SECONDS
    assert burst.patience(8) == 0.0
