"""Metrics of a real tritonserver: its sums are what clients counted, and a dead model shows."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from pairs import Pair
from triton_client import Answer, ask
from tritonclient.grpc.aio import InferenceServerClient

from dflow_trt.serving import families as f
from dflow_trt.serving.package import PackageOptions, package_bundle
from dflow_trt.serving.probe import main as probe
from dflow_trt.serving.series import Family
from dflow_trt.serving.server import TritonServer
from dflow_trt.text import Tokenizer

SLOTS, QUEUE = 8, 4  # of the example bundle, and of this server
STRATEGIES, TASKS = ("ar", "dflash", "dflow", "dflow-norelay"), ("", "sums", "code")
LONG = 160
PATIENCE = 30.0
LINE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")


@pytest.fixture(scope="module")
def server(serve_python: Path, example: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("triton-metrics")
    package_bundle(example.bundle.path, folder / "repository", PackageOptions(threads=1, max_queue=QUEUE))
    with TritonServer(folder / "repository", python=serve_python, log=folder / "log") as running:
        yield running


@pytest.fixture(scope="module")
def texts(example: Pair, example_prompts: list[dict[str, Any]]) -> list[str]:
    assert example.bundle.tokenizer_path is not None
    tokenizer = Tokenizer.from_folder(example.bundle.tokenizer_path)
    return [tokenizer.render_chat(prompt["messages"]) for prompt in example_prompts]


@dataclass
class Page:
    """The metrics endpoint at one moment."""

    series: dict[tuple[str, frozenset[tuple[str, str]]], float] = field(default_factory=dict)

    @classmethod
    def of(cls, server: TritonServer) -> Page:
        page = cls()
        for line in httpx.get(f"http://{server.metrics_address}/metrics").text.splitlines():
            if line.startswith("dflow_"):
                found = LINE.fullmatch(line)
                assert found is not None, line
                name, labels, value = found.groups()
                page.series[name, frozenset(re.findall(r'(\w+)="([^"]*)"', labels or ""))] = float(value)
        return page

    def sum(self, family: Family, suffix: str = "", **labels: str) -> float:
        name, wanted = family.name + suffix, set(labels.items())
        return sum(value for (each, found), value in self.series.items() if each == name and wanted <= found)


class Since:
    """What the endpoint counted since this was made; published a second later, so :meth:`until` waits for it."""

    def __init__(self, server: TritonServer) -> None:
        self._server, self._before = server, Page.of(server)

    def sum(self, family: Family, suffix: str = "", **labels: str) -> float:
        return Page.of(self._server).sum(family, suffix, **labels) - self._before.sum(family, suffix, **labels)

    def until(self, wanted: float, family: Family, suffix: str = "", **labels: str) -> None:
        end, found = time.monotonic() + PATIENCE, float("nan")
        while found != wanted and time.monotonic() < end:
            time.sleep(0.05)
            found = self.sum(family, suffix, **labels)
        assert found == wanted, (family.name, labels)


def run(server: TritonServer, work: Callable[[InferenceServerClient], Awaitable[Any]]) -> Any:
    async def connected() -> Any:
        async with InferenceServerClient(server.grpc_address) as client:
            return await work(client)

    return asyncio.run(connected())


def all_at_once(
    server: TritonServer, options: list[dict[str, Any]], tasks: list[str], width: int = SLOTS + QUEUE
) -> list[Answer]:
    """Every request, at most ``width`` of them in flight."""

    async def work(client: InferenceServerClient) -> list[Answer]:
        free = asyncio.Semaphore(width)

        async def one(number: int) -> Answer:
            async with free:
                parameters = {"task": tasks[number]} if tasks[number] else None
                return await ask(client, "ensemble", options[number], parameters=parameters)

        return await asyncio.gather(*map(one, range(len(options))))

    answers: list[Answer] = run(server, work)
    return answers


def ended(answer: Answer) -> list[dict[str, Any]]:
    """The last response of each sequence of one answer."""
    rows = [
        {name: values[i] for name, values in response.items() if len(values) == len(response["sequence_index"])}
        for response in answer.responses
        for i in range(len(response["sequence_index"]))
    ]
    return [row for row in rows if row["finish_reason"]]


def test_sums_equal_what_clients_counted(server: TritonServer, texts: list[str]) -> None:
    options, tasks = [], []
    for i in range(48):
        asked = {"text_input": texts[i], "max_tokens": 4 + i, "strategy": STRATEGIES[i % 4], "stream": i % 3 > 0}
        options.append(asked | ({"num_return_sequences": 2, "temperature": 1.0} if i % 12 == 5 else {}))
        tasks.append(TASKS[i // 4 % 3])
    since = Since(server)
    answers = all_at_once(server, options, tasks, width=SLOTS)
    counted: dict[tuple[Family, str, str, str], int] = Counter()
    for asked, task, answer in zip(options, tasks, answers, strict=True):
        assert (answer.code, answer.message, answer.finals) == (None, None, 1)
        for row in ended(answer):
            figures = {
                f.PROMPT_TOKENS: row["num_input_tokens"],
                f.OUTPUT_TOKENS: row["num_output_tokens"],
                f.EMITTED: row["num_output_tokens"] - 1,
                f.ROUNDS: row["num_rounds"],
                f.DRAFTED: row["total_draft_tokens"],
                f.ACCEPTED: row["total_accepted_draft_tokens"],
            }
            for family, amount in figures.items():
                counted[family, str(asked["strategy"]), task or f.NONE, ""] += amount
            counted[f.REQUESTS, str(asked["strategy"]), task or f.NONE, row["finish_reason"].decode()] += 1
    total = Counter[Family]()
    for (family, _, _, _), amount in counted.items():
        total[family] += amount
    assert total[f.REQUESTS] == 52
    since.until(52, f.REQUESTS)
    for (family, strategy, task, outcome), amount in counted.items():
        labels = {"strategy": strategy, "task": task} | ({"outcome": outcome} if outcome else {})
        assert since.sum(family, **labels) == amount, (family.name, labels)
    for family, amount in total.items():
        assert since.sum(family) == amount, family.name
    check_histograms(since, total)


def check_histograms(since: Since, total: Mapping[Family, int]) -> None:
    """Counts and sums of histograms are the counters'."""
    for lengths, at, family in (
        (f.DRAFT_LENGTH, f.DRAFTED_AT, f.DRAFTED),
        (f.ACCEPTED_LENGTH, f.ACCEPTED_AT, f.ACCEPTED),
    ):
        assert since.sum(lengths, "_count") == since.sum(lengths, "_bucket", le="+Inf") == total[f.ROUNDS]
        assert since.sum(lengths, "_sum") == since.sum(at) == total[family]
    for family in (f.FIRST_TOKEN, f.QUEUE_TIME, f.REQUEST_TIME):
        assert since.sum(family, "_count") == total[f.REQUESTS]
    assert since.sum(f.TOKEN_LATENCY, "_count") == total[f.OUTPUT_TOKENS] - total[f.REQUESTS]
    times = [since.sum(family, "_sum") for family in (f.QUEUE_TIME, f.FIRST_TOKEN, f.REQUEST_TIME)]
    assert times == sorted(times)
    assert times[2] == pytest.approx(times[1] + since.sum(f.TOKEN_LATENCY, "_sum"), rel=0.1)
    assert since.sum(f.RELAYED, strategy="dflow") > 0
    assert since.sum(f.RELAYED) == since.sum(f.RELAYED, strategy="dflow")


def test_what_is_refused_is_counted_where_clients_see_it(server: TritonServer, texts: list[str]) -> None:
    since = Since(server)
    [answer] = all_at_once(server, [{"text_input": texts[0], "max_tokens": 5, "top_p": 7.0}], ["code"])
    assert answer.message is not None
    since.until(1, f.REQUESTS, outcome="invalid")
    [answer] = all_at_once(server, [{"text_input": texts[0], "max_tokens": 5, "strategy": "none such"}], [""])
    assert answer.message is not None
    since.until(2, f.REQUESTS, outcome="invalid")
    assert since.sum(f.REQUESTS, outcome="invalid", strategy="none such") == 0
    assert since.sum(f.REQUESTS) == 2


def test_refusals_of_a_full_queue_are_counted_one_by_one(server: TritonServer, texts: list[str]) -> None:
    since = Since(server)
    options = [{"text_input": texts[i], "max_tokens": LONG, "ignore_eos": True} for i in range(3 * (SLOTS + QUEUE))]
    answers = all_at_once(server, options, [""] * len(options), width=len(options))
    refused = sum(answer.message is not None for answer in answers)
    assert 0 < refused < len(options)
    since.until(len(options), f.REQUESTS)
    assert since.sum(f.REQUESTS, outcome="queue_full") == refused
    assert since.sum(f.OUTPUT_TOKENS) == LONG * (len(options) - refused)
    assert Page.of(server).sum(f.QUEUE_LIMIT) == QUEUE


def test_a_client_that_leaves_and_one_that_runs_out_of_time(server: TritonServer, texts: list[str]) -> None:
    since = Since(server)
    options = {"text_input": texts[0], "max_tokens": 3 * LONG, "ignore_eos": True, "strategy": "ar", "stream": True}

    async def leave(client: InferenceServerClient) -> None:
        async def first(answer: Answer) -> bool:
            return False

        await ask(client, "dflow_bls", options, on_response=first)

    run(server, leave)
    since.until(1, f.REQUESTS, outcome="cancelled")
    [answer] = all_at_once(server, [{**options, "timeout_ms": 150}], [""])
    assert answer.last("finish_reason") == b"timeout"
    since.until(1, f.REQUESTS, outcome="timeout")
    assert since.sum(f.REQUESTS) == 2


def test_reused_prompt_tokens_are_counted(server: TritonServer, texts: list[str]) -> None:
    since = Since(server)
    prompt = max(texts, key=len)
    for _ in range(2):
        [answer] = all_at_once(server, [{"text_input": prompt, "max_tokens": 3}], [""])
    since.until(2, f.REQUESTS)
    length = answer.last("num_input_tokens")
    assert since.sum(f.PROMPT_TOKENS) == 2 * length
    assert length // 2 < since.sum(f.REUSED_TOKENS) < 2 * length


def test_gauges_of_what_there_is(server: TritonServer) -> None:
    page = Page.of(server)
    assert page.sum(f.SLOTS) == SLOTS
    assert page.sum(f.SLOTS_IN_USE) == page.sum(f.QUEUE_LENGTH) == page.sum(f.CACHE_USED) == 0
    assert page.sum(f.CACHE_BYTES, cache="target") > page.sum(f.CACHE_BYTES, cache="drafters") > 0
    assert page.sum(f.STEPS) > 0
    assert {dict(labels)["stage"] for name, labels in page.series if name == f.STAGE_SECONDS.name} == {
        "relay",
        "draft",
        "verify",
        "prefill",
        "context",
        "host",
    }


def test_a_model_that_hangs_shows_in_the_heartbeat(server: TritonServer) -> None:
    """The last test of this file: afterwards the server has no model, and ends."""
    url = f"http://{server.metrics_address}/metrics"
    arguments = ["--metrics-url", url, "--max-age", "6"]
    time.sleep(7)  # idle for longer than a heartbeat may be old
    assert probe(arguments) == 0
    [stub] = [
        process
        for process in psutil.Process(server.pid).children(recursive=True)
        if any("/dflow/" in part for part in process.cmdline())
    ]
    os.kill(stub.pid, signal.SIGSTOP)
    end = time.monotonic() + PATIENCE
    while probe(arguments) == 0:
        assert time.monotonic() < end
        time.sleep(0.2)
    assert server.is_ready("dflow"), "so Triton says"
    stub.kill()
    assert psutil.wait_procs([psutil.Process(server.pid)], PATIENCE)[1] == []
