"""One thread around a :class:`~dflow_trt.decode.Decoder`: requests from any thread, what they get to listeners.

A turn of the loop: end what is over -> admit into free slots -> one round -> deliver. Requests wait here, not in the
decoder, so that a queue is bounded, a deadline holds while waiting, and a sequence is known to start when it does.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dflow_trt.bundle import Bundle
from dflow_trt.decode import Decoder, QueueFull
from dflow_trt.errors import UserError
from dflow_trt.method.sampling import Pick, SamplingParams
from dflow_trt.request import Emission, Request, RequestStats
from dflow_trt.runtime.base import Runtime
from dflow_trt.serving.metrics import ServingMetrics
from dflow_trt.spec import DraftPolicy
from dflow_trt.text import TextStream

BEAT_SECONDS = 2.0
GATHER_SECONDS = 0.005  # in which sequences count as coming at once
_PROBE_TOKENS = 4
_PROBE_STEPS = 32


class Unavailable(UserError):
    """The server takes nothing now, or did not come to it in time; try again later, or elsewhere."""


class EngineFailure(RuntimeError):
    """The engines failed in the round of this request; it is no fault of the request."""


@dataclass(frozen=True)
class Piece:
    """What one round gave one sample. The first num_accepted of the picks were drafts.

    finish_reason: None while it goes on; the decoder's, or "timeout". stats and cum_logprob are those so far.
    """

    index: int
    text: str
    picks: tuple[Pick, ...]
    num_accepted: int
    finish_reason: str | None
    stats: RequestStats
    seed: int
    cum_logprob: float = 0.0


class Listener(Protocol):
    """Who waits for a job. Called by the loop's thread, which goes on when the call returns.

    It gets pieces, the last of each sequence with a finish_reason; or, once and then nothing more, the failure of all.
    """

    def receive(self, piece: Piece) -> None: ...

    def fail(self, error: Exception) -> None: ...


@dataclass
class Sample:
    """One sequence of a job, while the loop has it. ending: why it is cancelled, should it be."""

    request: Request
    text: TextStream | None
    job: Job
    ending: str = "cancelled"
    cum_logprob: float = 0.0

    def piece(self, emission: Emission) -> Piece:
        """What the loop makes of an emission."""
        reason = emission.finish_reason
        delta = ""
        if self.text is not None:
            delta = self.text.finish() if reason else self.text.take()
        self.cum_logprob += sum(pick.logprob for pick in emission.picks if pick.logprob is not None)
        return Piece(
            self.request.sample_index,
            delta,
            emission.picks,
            emission.num_accepted,
            self.ending if reason == "cancelled" else reason,
            dataclasses.replace(emission.stats),
            self.request.seed,
            self.cum_logprob,
        )

    def unstarted(self) -> Piece:
        """The end of a sequence that never ran."""
        stats = RequestStats(prompt_tokens=len(self.request.prompt_ids))
        return Piece(self.request.sample_index, "", (), 0, self.ending, stats, self.request.seed)


@dataclass
class Job:
    """The sequences of one client's request, which start, end and fail together where they must.

    handle: unique. deadline: on the clock of time.monotonic, or None. on_end: called when all of it is over.
    """

    handle: str
    requests: Sequence[Request]
    texts: Sequence[TextStream | None]
    listener: Listener
    deadline: float | None = None
    task: str = ""
    on_end: Callable[[], None] = lambda: None
    open: list[Sample] = field(default_factory=list)
    started: bool = False
    over: bool = False

    def __post_init__(self) -> None:
        pairs = zip(self.requests, self.texts, strict=True)
        self.open = [Sample(request, text, self) for request, text in pairs]

    def fail(self, error: Exception) -> None:
        """Tell the listener, once."""
        if not self.over:
            self.over = True
            self.listener.fail(error)


class Burst:
    """How many sequences come at once where none was in flight: as many as last time are waited for, if not for long.

    A first one that starts alone costs the others a round at the end. Whoever comes alone does not wait.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start, self._expected, self._count = clock() - GATHER_SECONDS, 0, 0

    def arrived(self, count: int, idle: bool) -> None:
        """So many sequences came. idle: nothing was in flight."""
        now = self._clock()
        if idle:
            self._start, self._expected, self._count = now, self._count, 0
        if now < self._start + GATHER_SECONDS:
            self._count += count

    def patience(self, most: int) -> float:
        """Seconds to wait for more. most: that can start at once."""
        if self._count >= min(self._expected, most):
            return 0.0
        return max(0.0, self._start + GATHER_SECONDS - self._clock())


class ServingLoop:
    """Runs jobs. Any thread may submit and cancel.

    max_queue: sequences that may wait for a slot. on_dead: called once, with the reason, when the engines are lost.
    log: takes a line for the operator. Opening it runs every strategy once, so that the first request finds all warm.
    """

    def __init__(
        self,
        bundle: Bundle,
        runtime: Runtime,
        metrics: ServingMetrics,
        *,
        max_queue: int = 128,
        draft_policy: DraftPolicy = "fixed",
        on_dead: Callable[[str], None] = lambda reason: None,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._bundle, self._runtime, self._metrics = bundle, runtime, metrics
        self._max_queue, self._policy = max_queue, draft_policy
        self._on_dead, self._log = on_dead, log
        self._slots = bundle.build.max_batch_size
        self._lock = threading.Condition()
        self._jobs: dict[str, Job] = {}
        self._waiting: deque[Sample] = deque()
        self._running: dict[str, Sample] = {}
        self._cancels: deque[str] = deque()
        self._burst = Burst()
        self._closing = False
        self.healthy = True
        self._decoder = self._fresh_decoder()
        self._thread = threading.Thread(target=self._run, name="serving-loop", daemon=True)
        self._thread.start()

    # -- any thread ----------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Queue all sequences of a job, or none.

        Raises UserError for what is wrong with a request, QueueFull, or Unavailable while the server stops.
        """
        for request in job.requests:
            self._check(request)
        with self._lock:
            if self._closing or not self.healthy:
                raise Unavailable("the server is stopping; send the request to another")
            if job.handle in self._jobs:
                raise UserError(f"handle {job.handle!r} is in use; allowed: one that no other request has")
            room = self._max_queue + self._slots - len(self._running) - len(self._waiting)
            if len(job.open) > room:
                raise QueueFull(f"the queue is full, at most {self._max_queue} sequences wait; try later")
            for sample in job.open:
                self._metrics.submitted(sample.request, job.task)
            self._burst.arrived(len(job.open), idle=not self._jobs)
            self._jobs[job.handle] = job
            self._waiting.extend(job.open)
            self._lock.notify_all()

    def _check(self, request: Request) -> None:
        """The decoder's own check; its message without the internal id."""
        try:
            self._decoder.check(request)
        except UserError as error:
            raise UserError(str(error).removeprefix(f"request {request.id}: ")) from None

    def cancel(self, handle: str) -> None:
        """End a job at the next turn; nothing happens where it is over."""
        with self._lock:
            self._cancels.append(handle)
            self._lock.notify_all()

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences in a slot."""
        return len(self._running)

    def drain(self, seconds: float) -> bool:
        """Take nothing new, and finish what is here. False where that takes longer."""
        with self._lock:
            self._closing = True
            return self._lock.wait_for(lambda: not self._jobs, seconds)

    def close(self) -> None:
        """End now; what is unfinished is cancelled."""
        with self._lock:
            self._closing = True
            self._cancels.extend(self._jobs)
            self._lock.notify_all()
        self._thread.join()

    # -- the loop's thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self.healthy and self._has_work():
            self._end_what_is_over()
            self._admit()
            if not self._decoder.idle:
                self._round()

    def _has_work(self) -> bool:
        """Waits for some; False when the loop shall end."""
        with self._lock:
            while not (self._jobs or self._cancels or self._closing):
                self._metrics.beat()
                self._lock.wait(BEAT_SECONDS)
            while not (self._running or self._cancels or self._closing) and (left := self._burst.patience(self._slots)):
                self._lock.wait(left)
            self._lock.notify_all()  # whoever drains
        return bool(self._jobs) or not self._closing

    def _end_what_is_over(self) -> None:
        now = time.monotonic()
        with self._lock:
            handles = [self._cancels.popleft() for _ in range(len(self._cancels))]
            late = [job for job in self._jobs.values() if job.deadline is not None and job.deadline <= now]
            cancelled = [self._jobs[handle] for handle in handles if handle in self._jobs]
        for job in late:
            job.deadline = None
            if not job.started:
                job.fail(Unavailable("timed out in the queue; try later, or allow more time"))
            self._end(job, "timeout")
        for job in cancelled:
            self._end(job, "cancelled")

    def _end(self, job: Job, why: str) -> None:
        """Sequences that wait end here, those that run at the next round."""
        for sample in list(job.open):
            sample.ending = why
            if sample.request.id in self._running:
                self._decoder.cancel(sample.request.id)
            else:
                self._unqueue(sample)
                if not job.over:
                    job.listener.receive(sample.unstarted())
                self._close_sequence(sample, why)

    def _unqueue(self, sample: Sample) -> None:
        with self._lock:
            self._waiting.remove(sample)

    def _admit(self) -> None:
        free = self._slots - self._decoder.num_active - self._decoder.num_queued
        with self._lock:
            admitted = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
            self._running |= {sample.request.id: sample for sample in admitted}
        for sample in admitted:
            sample.job.started = True
            self._decoder.submit(sample.request)
            self._metrics.started(sample.request.id)

    def _round(self) -> None:
        try:
            result = self._decoder.step()
        except Exception as error:  # whatever an engine raises
            self._recover(error)
            return
        self._metrics.round(result, len(self._waiting), self._decoder.num_active)
        for emission in result.emissions:
            self._deliver(self._running[emission.request_id], emission)

    def _deliver(self, sample: Sample, emission: Emission) -> None:
        job, piece = sample.job, sample.piece(emission)
        if emission.error is not None:
            job.fail(UserError(emission.error))
            self.cancel(job.handle)  # its other sequences
        elif not job.over:
            job.listener.receive(piece)
        if piece.finish_reason is not None:
            self._close_sequence(sample, piece.finish_reason)

    def _close_sequence(self, sample: Sample, outcome: str) -> None:
        self._metrics.finished(sample.request.id, outcome)
        with self._lock:
            self._running.pop(sample.request.id, None)
            sample.job.open.remove(sample)
            ended = not sample.job.open
            if ended:
                del self._jobs[sample.job.handle]
                self._lock.notify_all()
        if ended:
            sample.job.on_end()

    # -- engines -------------------------------------------------------------------------------------------------------

    def _fresh_decoder(self) -> Decoder:
        """A decoder whose engines have just worked, for every strategy."""
        decoder = Decoder(self._bundle, self._runtime, slots=self._slots, draft_policy=self._policy)
        params = SamplingParams(max_tokens=_PROBE_TOKENS, ignore_eos=True)
        for strategy in self._bundle.strategies.values():
            decoder.submit(Request(f"probe-{strategy.name}", [0], params, strategy, seed=0))
        for _ in range(_PROBE_STEPS * len(self._bundle.strategies)):
            for emission in decoder.step().emissions:
                if emission.error is not None:
                    raise EngineFailure(emission.error)
            if decoder.idle:
                return decoder
        raise EngineFailure("a probe of four tokens did not end")

    def _recover(self, error: Exception) -> None:
        """A round failed: its requests fail with it, and the others go on if the engines still work."""
        self._log(f"a round failed:\n{''.join(traceback.format_exception(error))}")
        for job in {id(sample.job): sample.job for sample in self._running.values()}.values():
            self._drop(
                job, EngineFailure(f"the engine failed ({_line(error)}); the request may be sent again"), "error"
            )
        try:
            self._decoder = self._fresh_decoder()
        except Exception as failure:
            self._die(_line(failure))

    def _drop(self, job: Job, error: Exception, outcome: str) -> None:
        job.fail(error)
        for sample in list(job.open):
            if sample.request.id not in self._running:
                self._unqueue(sample)
            self._close_sequence(sample, outcome)

    def _die(self, reason: str) -> None:
        """The engines are lost: refuse all, and say so."""
        with self._lock:
            self.healthy = False
            jobs = list(self._jobs.values())
        for job in jobs:
            self._drop(
                job, Unavailable(f"the engine is lost ({reason}); send the request to another server"), "unavailable"
            )
        self._log(f"the engine is lost: {reason}")
        self._on_dead(reason)


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:200]
