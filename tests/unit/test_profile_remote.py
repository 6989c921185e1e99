"""Profiles of a server: the real OpenAI endpoint over a scripted model, and the scripted model itself as Triton."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import fake
import grpc
import httpx
import pytest
import uvicorn
from fake_triton import Asked, Failure, FakeTriton, Sample
from profile_cases import DRAFTED, PLAIN, asked, run, trace

from dflow_trt.errors import UserError
from dflow_trt.profiling.points import Options
from dflow_trt.profiling.record import Point, Profile
from dflow_trt.profiling.remote import counters
from dflow_trt.profiling.remote.base import Piece, RequestFailed
from dflow_trt.profiling.remote.run import Address, RemoteDriver, profile_server
from dflow_trt.profiling.remote.triton import TritonChannel
from dflow_trt.profiling.run import Result
from dflow_trt.profiling.session import Lost, Silent
from dflow_trt.profiling.workload import Choice
from dflow_trt.serving.openai.answers import Answer
from dflow_trt.serving.openai.app import Endpoint, Settings, build_app
from dflow_trt.serving.openai.backend import Backend
from dflow_trt.text import Tokenizer

PATIENCE = 60.0
TOKENIZER = Tokenizer.from_folder(str(files("dflow_trt") / "example_data" / "target"))
IDS = TOKENIZER.encode("a) 13 + 17 = 30\nb) 2 + 17 = 19\nc) 19 + 9 = 28\n")[:15]
ROUNDS = (3, 0, 6, 1)  # of them 1 + 4 + 1 + 7 + 2
DRAFTED_AT = (7, 2, 7, 3)  # drafts of each
DRAFTING = Sample(IDS, ROUNDS, "stop", DRAFTED_AT)
ALONE = Sample(IDS, [0] * (len(IDS) - 1), "stop", [0] * (len(IDS) - 1))


def script(asked: Asked) -> Sequence[Sample]:
    return [ALONE if asked.value("strategy") == "ar" else DRAFTING]


def page(triton: FakeTriton) -> str:
    """The metrics that a server would have by now."""
    lines = ["# HELP dflow_rounds_total Verify rounds.", "nv_inference_count 3"]
    for strategy, sample in (("ar", ALONE), ("dflow", DRAFTING)):
        count = sum(each.value("strategy") == strategy for each in triton.asked)
        labels = f'strategy="{strategy}",task="none"'
        figures = {"output": len(IDS), "accepted": sum(sample.rounds), "emitted": len(IDS) - 1}
        figures["drafted"] = sum(sample.drafted or ())
        lines += [f"dflow_{name}_tokens_total{{{labels}}} {count * value}" for name, value in figures.items()]
        lines.append(f"dflow_rounds_total{{{labels}}} {count * len(sample.rounds)}")
        for outcome, value in (("stop", count), ("error", 5)):
            lines.append(f'dflow_requests_total{{{labels},outcome="{outcome}"}} {value}')
    return "\n".join(lines) + "\n"


class Server:
    """The endpoint on a port of its own, in a thread."""

    def __init__(self, script: Callable[[Asked], Sequence[Sample]] = script, api_key: str | None = None) -> None:
        self.triton = FakeTriton(TOKENIZER, script)
        self.metrics: Callable[[FakeTriton], str] = page
        self._api_key = api_key
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def _run(self) -> None:
        bundle = fake.make_bundle([fake.drafter_spec("dflow", 8, "after_rejection")])
        bundle = dataclasses.replace(
            bundle,
            target=dataclasses.replace(bundle.target, vocab_size=TOKENIZER.size),
            build=dataclasses.replace(bundle.build, max_seq_len=704),
        )
        answers = httpx.MockTransport(lambda request: httpx.Response(200, text=self.metrics(self.triton)))
        async with httpx.AsyncClient(transport=answers) as http:
            settings = Settings("demo", "127.0.0.1:1", 100_000, api_key=self._api_key)
            app = build_app(Endpoint(bundle, TOKENIZER, Backend(self.triton, PATIENCE), http, settings))
            self.server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
            self._ready.set()
            await self.server.serve([self._socket])

    def vanish(self) -> None:
        """Connections are cut, and nobody listens any more."""
        self.server.force_exit = self.server.should_exit = True

    def __enter__(self) -> Server:
        self._thread.start()
        self._ready.wait(PATIENCE)
        return self

    def __exit__(self, *error: object) -> None:
        self.server.should_exit = True
        self._thread.join(PATIENCE)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i} + 1?", "answer": "#"}) + "\n" for i in range(4)))
    return path


def profiled(url: str, prompts: Path, **given: Any) -> Result:
    options = Options(**({"requests": 4, "repetitions": 2, "warmup": 1, "max_tokens": 64} | given.pop("options", {})))
    return profile_server(url, None, Choice(file=prompts), options, Silent(), **given)


# -- OpenAI ------------------------------------------------------------------------------------------------------------


def test_an_endpoint_is_profiled_as_a_bundle_is(prompts: Path) -> None:
    with Server() as server:
        record = profiled(server.url, prompts, options={"strategies": ("dflow",)}).profile
    drafted = record.results[1]
    assert [result.point for result in record.results] == [PLAIN, DRAFTED]
    assert (drafted.requests, drafted.compared, drafted.same) == (8, 8, 8)
    total = drafted.total
    assert (total.rounds, total.accepted, total.emitted, total.drafted) == (32, 80, 112, 8 * 19)
    assert (total.tau_accepted, total.tau_emitted) == (2.5, 3.5)
    assert total.accepted_at == [24, 16, 16, 8, 8, 8]
    assert total.drafted_at == [32, 32, 24, 16, 16, 16, 16], "as the server says, chunk by chunk"
    assert drafted.latency.itl.n == 8 * (len(IDS) - 1)
    assert drafted.latency.round_gap.n == 8 * len(ROUNDS)
    assert (drafted.throughput.cpu_seconds, drafted.stages) == (None, None)
    assert drafted.speedup is not None
    assert record.subject.model_dump(include={"kind", "name", "backend", "drafters"}) == {
        "kind": "server",
        "name": server.url,
        "backend": "onnxruntime",
        "drafters": {name: {"kind": None, "drafts": 7} for name in ("dflow", "dflow-norelay")},
    }
    assert {each.task for each in drafted.by_task} == {"gsm8k"}
    assert {asked.parameters.get("task") for asked in server.triton.asked} == {"gsm8k"}
    assert Profile.model_validate_json(record.model_dump_json()) == record


def test_its_counters_are_joined(prompts: Path) -> None:
    with Server() as server:
        server.triton.asked.append(Asked("before", {"strategy": ["dflow"]}, frozenset(), {}))
        found = profiled(f"{server.url}/v1", prompts, options={"strategies": ("dflow",)}).profile.server
    assert found is not None
    assert (found.metrics_url, found.notes) == (f"{server.url}/metrics", [])
    assert all(each.agree for each in found.counters), found.counters
    by_name = {(each.counter, each.strategy): each.client for each in found.counters}
    assert by_name["dflow_output_tokens_total", "dflow"] == 12 * len(IDS), "the warm-up too"
    assert by_name["dflow_requests_total", "ar"] == 12
    assert by_name["dflow_drafted_tokens_total", "dflow"] == 12 * 19


def test_a_server_that_counts_otherwise_is_reported(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "PATIENCE", 0.0)
    with Server() as server:
        server.metrics = lambda triton: page(triton).replace("dflow_rounds_total{", "dflow_rounds_totals{")
        found = profiled(server.url, prompts, options={"strategies": ("dflow",)}).profile.server
    assert found is not None
    wrong = [each for each in found.counters if not each.agree]
    assert {each.counter for each in wrong} == {"dflow_rounds_total"}
    assert {(each.client, each.server) for each in wrong if each.strategy == "dflow"} == {(48.0, 0.0)}


def test_drafts_that_a_server_does_not_tell_are_not_guessed(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Answer._drafts

    def untold(self: Answer, *arguments: Any) -> dict[str, Any]:
        return {name: value for name, value in told(self, *arguments).items() if name != "num_drafted"}

    monkeypatch.setattr(Answer, "_drafts", untold)
    with Server() as server:
        record = profiled(server.url, prompts, options={"strategies": ("dflow",)}).profile
    total = record.results[1].total
    assert (total.drafted, total.wasted, total.drafted_at) == (None, None, [])
    assert total.tau_accepted == 2.5
    assert record.server is not None
    assert "dflow_drafted_tokens_total" not in {c.counter for c in record.server.counters if c.strategy == "dflow"}


def test_what_is_asked(prompts: Path) -> None:
    with Server() as server:
        given = {"strategies": ("dflow",), "draft_tokens": (3,), "temperatures": (0.5,), "ignore_eos": True, "seed": 7}
        profiled(server.url, prompts, options=given)
    drafted = [each for each in server.triton.asked if each.value("strategy") == "dflow"]
    expected = {"draft_tokens": 3, "temperature": 0.5, "ignore_eos": True, "max_tokens": 64, "stream": True}
    assert {name: drafted[0].value(name) for name in expected} == expected
    assert {each.value("seed") for each in drafted} == {7, 8, 9, 10}
    text = [{"role": "user", "content": "0 + 1?"}]
    assert drafted[0].inputs["input_ids"] == TOKENIZER.encode_chat(text)
    assert all(each.value("draft_tokens") is None for each in server.triton.asked if each.value("strategy") == "ar")


@pytest.mark.parametrize("cut", ["connection", "model"])
def test_a_server_that_vanishes_leaves_the_finished_part(prompts: Path, cut: str) -> None:
    """Two warm-up turns and two others of 4 requests each, then it is gone."""

    def scripted(asked: Asked) -> Sequence[Sample]:
        if len(server.triton.asked) == 18:
            if cut == "connection":
                server.vanish()
            raise Failure("UNAVAILABLE", "Socket closed", grpc.StatusCode.UNAVAILABLE)
        return script(asked)

    with Server(scripted) as server:
        record = profiled(server.url, prompts, options={"strategies": ("dflow",)}).profile
    assert record.error is not None
    assert "; 2 of 4 turns were done, and are what is shown" in record.error
    assert [each.requests for each in record.results] == [4, 4]
    assert record.server is not None
    assert record.server.notes == ["not compared: the server went away"]


def test_requests_that_fail_alone_are_counted(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "PATIENCE", 0.0)  # the scripted server counts what it refused

    def scripted(asked: Asked) -> Sequence[Sample]:
        if len(server.triton.asked) == 10:
            raise Failure("UNAVAILABLE", "the queue is full: 8 requests are queued")
        return script(asked)

    with Server(scripted) as server:
        record = profiled(server.url, prompts, options={"strategies": ("dflow",)}).profile
    assert sum(result.failed for result in record.results) == 1
    assert record.lossless.compared == 15
    assert record.notes[0].startswith("1 requests failed")


def test_a_prompt_that_the_server_refuses_is_named(prompts: Path) -> None:
    def scripted(asked: Asked) -> Sequence[Sample]:
        raise Failure("INVALID_ARG", "the prompt has 900 tokens, this bundle takes 512")

    with Server(scripted) as server, pytest.raises(UserError) as error:
        profiled(server.url, prompts)
    refusal = "p.jsonl line 1: the server refuses it: 400, the prompt has 900 tokens, this bundle takes 512"
    assert str(error.value).endswith(refusal)


def test_the_key_goes_along(prompts: Path) -> None:
    with Server(api_key="s3cret") as server:
        with pytest.raises(UserError, match="401, the API key is missing or wrong"):
            profiled(server.url, prompts)
        record = profiled(server.url, prompts, api_key="s3cret", options={"strategies": ("dflow",)}).profile
    assert record.server is not None
    assert record.server.counters, "the metrics wanted it too"


def test_metrics_that_are_not_there_are_said(prompts: Path) -> None:
    with Server() as server:
        given = {"strategies": ("dflow",), "repetitions": 1, "warmup": 0}
        record = profiled(server.url, prompts, metrics_url=f"{server.url}/nothing", options=given).profile
    assert record.server is not None
    assert record.server.counters == []
    assert record.server.notes[0].startswith(f"not compared: {server.url}/nothing: no metrics")


def test_no_server_at_all(prompts: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(UserError, match="no server answers"):
        profiled(f"http://127.0.0.1:{port}", prompts)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "x"])
def test_addresses_of_no_kind(url: str) -> None:
    with pytest.raises(UserError, match="--url: "):
        Address.of(url, None, None)


def test_addresses() -> None:
    assert Address.of("http://h:1/v1/", None, None) == Address("http://h:1", "http://h:1/metrics", None)
    assert Address.of("triton+grpc://h:1", None, None).metrics == "http://h:8002/metrics"
    assert Address.of("triton+grpc://h:1", "http://m", "k") == Address("triton+grpc://h:1", "http://m", "k")


def test_strategies_that_a_server_lacks(prompts: Path) -> None:
    with Server() as server, pytest.raises(UserError, match="'domino'"):
        profiled(server.url, prompts, options={"strategies": ("domino",)})


# -- Triton ------------------------------------------------------------------------------------------------------------


def channel(script: Callable[[Asked], Sequence[Sample]]) -> tuple[TritonChannel, FakeTriton]:
    made, triton = TritonChannel("127.0.0.1:1", ("ar", "dflow")), FakeTriton(TOKENIZER, script)
    made._backend = Backend(triton, PATIENCE)
    return made, triton


def pieces(script: Callable[[Asked], Sequence[Sample]], point: Point = DRAFTED) -> list[Piece]:
    async def collect() -> list[Piece]:
        made, _ = channel(script)
        try:
            return [piece async for piece in made.ask(point, asked())]
        finally:
            await made.close()

    return asyncio.run(collect())


def test_triton_says_every_count() -> None:
    found = pieces(script)
    rounds = [(kept, made, True) for kept, made in zip(ROUNDS, DRAFTED_AT, strict=True)]
    assert [(each.accepted, each.drafted, each.is_round) for each in found] == [(0, 0, False), *rounds]
    assert [token for each in found for token in each.token_ids] == IDS
    assert [each.finish_reason for each in found] == [None] * 4 + ["stop"]


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (Failure("INVALID_ARG", "the prompt has 900 tokens"), UserError),
        (Failure("UNAVAILABLE", "the queue is full"), RequestFailed),
        (Failure("INTERNAL", "something"), RequestFailed),
        (Failure("", "Socket closed", grpc.StatusCode.UNAVAILABLE), Lost),
    ],
)
def test_how_triton_fails(failure: Failure, kind: type[Exception]) -> None:
    def failing(asked: Asked) -> Sequence[Sample]:
        raise failure

    with pytest.raises(kind):
        pieces(failing)


def test_a_triton_that_is_not_ready() -> None:
    async def facts() -> None:
        made, triton = channel(script)
        triton.ready = False
        try:
            await made.facts()
        finally:
            await made.close()

    with pytest.raises(UserError, match="no Triton with a ready model dflow answers"):
        asyncio.run(facts())


# -- the driver --------------------------------------------------------------------------------------------------------


class Slow:
    """A channel whose answers are two tokens, a moment apart; it knows how many are asked at once."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def ask(self, point: Point, asked: Any) -> AsyncGenerator[Piece, None]:
        self.now += 1
        self.most = max(self.most, self.now)
        yield Piece([1], is_round=False)
        await asyncio.sleep(0.01)
        self.now -= 1
        yield Piece([2], 0, 7, True, "length")


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


def test_a_closed_loop_over_a_channel(runner: asyncio.Runner) -> None:
    slow = Slow()
    point = DRAFTED.model_copy(update={"concurrency": 3})
    found = RemoteDriver(slow, runner).run(point, [asked(i) for i in range(8)])  # type: ignore[arg-type]
    assert slow.most == 3
    assert [each.token_ids for each in found.traces] == [[1, 2]] * 8
    assert len({each.arrival for each in found.traces}) == 8, "each begins when its place is free"


def test_an_open_loop_over_a_channel(runner: asyncio.Runner) -> None:
    slow = Slow()
    found = RemoteDriver(slow, runner).run(DRAFTED, [asked(i) for i in range(3)], [0.0, 0.0, 0.05])  # type: ignore[arg-type]
    assert [round(each.arrival - found.start, 6) for each in found.traces] == [0.0, 0.0, 0.05]
    assert slow.most == 2


# -- counters ----------------------------------------------------------------------------------------------------------


def test_a_page_of_metrics_is_read() -> None:
    text = """# TYPE dflow_rounds_total counter
dflow_rounds_total{strategy="dflow",task="a"} 3
dflow_rounds_total{task="b \\"x\\", {y}",strategy="dflow"} 4.0 1700000000
dflow_rounds_total_extra{strategy="dflow"} 9
dflow_requests_total{strategy="ar",task="a",outcome="stop"} 1
dflow_requests_total{strategy="ar",task="a",outcome="length"} 2
dflow_requests_total{strategy="ar",task="a",outcome="cancelled"} 4
not a metric
"""
    found = counters.read(text)
    assert found["dflow_rounds_total"] == {"dflow": 7.0}
    assert found["dflow_requests_total"] == {"ar": 3.0}
    assert found["dflow_accepted_tokens_total"] == {}


def test_what_the_client_counted() -> None:
    runs = [run(DRAFTED, [trace([0, 1, 2], [(7, 3), (7, 0)]), trace([0], [])], 1.0), run(PLAIN, [trace([], [])], 1.0)]
    found = counters.seen(runs)
    assert found["dflow_output_tokens_total"]["dflow"] == 7
    assert found["dflow_rounds_total"]["dflow"] == 2
    assert found["dflow_drafted_tokens_total"]["dflow"] == 14
    assert found["dflow_requests_total"] == {"dflow": 2, "ar": 1}
    unknown = counters.seen([run(DRAFTED, [trace([0, 1], [(None, 3)])], 1.0)])
    assert math.isnan(unknown["dflow_drafted_tokens_total"]["dflow"])
    empty = counters.read("")
    assert "dflow_drafted_tokens_total" not in {each.counter for each in counters.compare(unknown, empty, empty)}
