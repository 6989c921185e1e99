"""The profile of a server: turns over a channel, then its counters beside the client's."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from dflow_trt.bundle import Bundle, open_bundle
from dflow_trt.errors import UserError
from dflow_trt.profiling.measure import Asked, Run, Tick, Trace
from dflow_trt.profiling.points import Options, Prompt, families, most_requests
from dflow_trt.profiling.prices import Prices
from dflow_trt.profiling.record import DrafterInfo, Point, ServerCheck, Subject
from dflow_trt.profiling.remote import counters
from dflow_trt.profiling.remote.base import Channel, Facts, Piece, RequestFailed
from dflow_trt.profiling.remote.openai import OpenAiChannel
from dflow_trt.profiling.remote.triton import TritonChannel
from dflow_trt.profiling.run import (
    Result,
    assemble,
    check_strategies,
    encode,
    subject_of,
    tokenizer_of,
    vocabulary_of,
)
from dflow_trt.profiling.session import Report, Session
from dflow_trt.profiling.workload import Choice, Workload, takes_chats
from dflow_trt.spec import AUTOREGRESSIVE

HTTP, GRPC = ("http", "https"), ("triton+grpc", "grpc")
METRICS_PORT = 8002
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Address:
    """Where the server is, and how it is asked. metrics: of its counters."""

    url: str
    metrics: str
    api_key: str | None

    @classmethod
    def of(cls, url: str, metrics_url: str | None, api_key: str | None) -> Address:
        """UserError for an address of no known kind."""
        parts = urlsplit(url)
        if parts.scheme not in (*HTTP, *GRPC) or not parts.netloc:
            allowed = "http(s)://HOST:PORT of an OpenAI endpoint, or triton+grpc://HOST:PORT"
            raise UserError(f"--url: {url!r}; allowed: {allowed}")
        base = url.rstrip("/").removesuffix("/v1")
        usual = f"{base}/metrics" if parts.scheme in HTTP else f"http://{parts.hostname}:{METRICS_PORT}/metrics"
        return cls(base, metrics_url or usual, api_key)

    @property
    def is_triton(self) -> bool:
        return urlsplit(self.url).scheme in GRPC

    async def channel(self, strategies: Sequence[str]) -> Channel:
        """strategies: those to ask a Triton server for."""
        if self.is_triton:
            return TritonChannel(urlsplit(self.url).netloc, strategies)
        return OpenAiChannel(self.url, self.api_key)


def profile_server(
    url: str,
    bundle: Path | None,
    choice: Choice,
    options: Options,
    report: Report,
    *,
    prices: Prices | None = None,
    metrics_url: str | None = None,
    api_key: str | None = None,
) -> Result:
    """Profile a server. bundle: what it serves, where that is at hand: its tokenizer, vocabulary and strategies.

    A server that is lost leaves a record of the turns before.
    """
    if options.policies != ("fixed",):
        raise UserError("--draft-policy: is the server's own setting; leave it out beside --url")
    address = Address.of(url, metrics_url, api_key)
    opened = open_bundle(bundle, verify=False) if bundle is not None else None
    known = tuple(opened.strategies) if opened is not None else (AUTOREGRESSIVE, *options.strategies)
    with asyncio.Runner() as runner:
        channel = runner.run(address.channel(known))
        try:
            facts = runner.run(channel.facts())
            workloads = _workloads(choice, options, opened, not address.is_triton)
            prompts = {
                length: runner.run(_prompts(channel, each, opened, address)) for length, each in workloads.items()
            }
            check_strategies(options.strategies, facts.strategies)
            before = _counters(address)
            driver = RemoteDriver(channel, runner)
            session = Session(driver, families(options, facts.strategies, prompts), options, report)
            session.measure()
            checked = _checked(address, before, session)
        finally:
            runner.run(channel.close())
    return assemble(session, workloads, _subject(address, facts, opened), None, prices or Prices(), server=checked)


def _workloads(choice: Choice, options: Options, bundle: Bundle | None, chats: bool) -> dict[int | None, Workload]:
    """chats: the server lays out conversations itself."""
    vocabulary = vocabulary_of(bundle) if bundle is not None else None
    laid_out = chats or (bundle is not None and takes_chats(tokenizer_of(bundle)))
    return choice.workloads(vocabulary, laid_out, most_requests(options), options.seed)


async def _prompts(channel: Channel, workload: Workload, bundle: Bundle | None, address: Address) -> list[Prompt]:
    """Encoded by the bundle's tokenizer where that is at hand, else by the server: Triton wants ids."""
    if bundle is not None:
        return encode(workload, tokenizer_of(bundle))
    if not isinstance(channel, TritonChannel):
        return [(item, None) for item in workload.items]
    prompts: list[Prompt] = []
    for item in workload.items:
        if item.kind == "messages":
            raise UserError(f"{item.where}: {address.url} lays out no conversations; give the BUNDLE, or --no-chat")
        value = item.prompt[item.kind]
        prompts.append((item, await channel.encode(value) if item.kind == "prompt" else tuple(value)))
    return prompts


def _subject(address: Address, facts: Facts, bundle: Bundle | None) -> Subject:
    """What the record says of a server: as much as is known."""
    if bundle is not None:
        return subject_of(bundle).model_copy(update={"kind": "server", "name": address.url})
    drafters = {name: DrafterInfo(kind=None, drafts=drafts) for name, drafts in facts.strategies.items() if drafts}
    return Subject(
        kind="server",
        name=address.url,
        backend=facts.backend,
        dtype=UNKNOWN,
        target=UNKNOWN,
        target_weights=UNKNOWN,
        draft_weights=UNKNOWN,
        max_batch_size=None,
        max_seq_len=None,
        drafters=drafters,
    )


# -- counters ----------------------------------------------------------------------------------------------------------


def _counters(address: Address) -> counters.Counts | str:
    """Before anything was asked; in words, why there are none."""
    try:
        return counters.read(counters.scrape(address.metrics, address.api_key))
    except UserError as error:
        return str(error)


def _checked(address: Address, before: counters.Counts | str, session: Session) -> ServerCheck:
    if isinstance(before, str):
        return ServerCheck(metrics_url=address.metrics, counters=[], notes=[f"not compared: {before}"])
    runs = [*session.warm, *(run for runs in session.runs.values() for run in runs)]
    if session.error is not None:
        return ServerCheck(metrics_url=address.metrics, counters=[], notes=["not compared: the server went away"])
    try:
        return counters.check(address.metrics, address.api_key, before, runs)
    except UserError as error:
        return ServerCheck(metrics_url=address.metrics, counters=[], notes=[f"not compared: {error}"])


# -- turns -------------------------------------------------------------------------------------------------------------


class RemoteDriver:
    """:class:`dflow_trt.profiling.session.Driver` over a channel."""

    def __init__(self, channel: Channel, runner: asyncio.Runner) -> None:
        self._channel, self._runner = channel, runner

    def run(self, point: Point, asked: Sequence[Asked], offsets: Sequence[float] | None = None) -> Run:
        """One turn: an open loop with arrivals at these seconds, else a closed one."""
        return self._runner.run(self._run(point, asked, offsets))

    async def _run(self, point: Point, asked: Sequence[Asked], offsets: Sequence[float] | None) -> Run:
        start = time.perf_counter()
        traces = [Trace(each, start) for each in asked]
        try:
            async with asyncio.TaskGroup() as group:
                if offsets is None:
                    assert point.concurrency is not None
                    waiting = deque(traces)
                    for _ in range(point.concurrency):
                        group.create_task(self._place(point, waiting))
                else:
                    for trace, offset in zip(traces, offsets, strict=True):
                        trace.arrival = start + offset
                        group.create_task(self._arrive(point, trace))
        except BaseExceptionGroup as errors:  # the others were cancelled; what ended it says why
            raise errors.exceptions[0] from None
        return Run(point, start, time.perf_counter(), None, tuple(traces))

    async def _place(self, point: Point, waiting: deque[Trace]) -> None:
        """One place of a closed loop: the next request when the one before ends."""
        while waiting:
            trace = waiting.popleft()
            trace.arrival = time.perf_counter()
            await self._ask(point, trace)

    async def _arrive(self, point: Point, trace: Trace) -> None:
        await asyncio.sleep(max(0.0, trace.arrival - time.perf_counter()))
        await self._ask(point, trace)

    async def _ask(self, point: Point, trace: Trace) -> None:
        try:
            async with contextlib.aclosing(self._channel.ask(point, trace.asked)) as pieces:
                async for piece in pieces:
                    _record(trace, piece, time.perf_counter())
        except RequestFailed as error:
            trace.error = str(error)


def _record(trace: Trace, piece: Piece, now: float) -> None:
    if piece.token_ids:
        trace.ticks.append(Tick(now, len(piece.token_ids), piece.drafted, piece.accepted, piece.is_round))
        trace.token_ids += piece.token_ids
    trace.finish_reason = piece.finish_reason or trace.finish_reason
