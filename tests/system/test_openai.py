"""``dflow-trt serve`` as its users meet it: the command, a real tritonserver, OpenAI's own client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import fakegpu
import httpx
import openai
import psutil
import pytest
from pairs import Pair

from dflow_trt.api import LLM, CompletionOutput
from dflow_trt.bundle import open_bundle, write_manifest
from dflow_trt.method.sampling import SamplingParams
from dflow_trt.serving import families

PATIENCE = 120.0
SOME_TEXT = "a) 13 + 17 ="
EXTRAS = ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "bad_words")


@dataclass
class Serve:
    """A running ``dflow-trt serve``; what it prints is read as it comes."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    _readers: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        for pipe, kept in ((self.process.stdout, self.lines), (self.process.stderr, self.errors)):
            assert pipe is not None
            reader = threading.Thread(target=_read, args=(pipe, kept), daemon=True)
            reader.start()
            self._readers.append(reader)

    def line(self, name: str) -> str:
        """The rest of the line that begins with ``name``; waits for it."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for line in list(self.lines):
                if line.startswith(f"{name} "):
                    return line.removeprefix(name).strip()
            assert self.process.poll() is None, "\n".join([*self.lines, *self.errors])
            time.sleep(0.05)
        raise AssertionError("\n".join([*self.lines, *self.errors]))

    @property
    def url(self) -> str:
        return self.line("endpoint").removesuffix("/v1")

    def end(self, number: signal.Signals | None = signal.SIGTERM) -> int:
        """Its exit code, after this signal or by itself."""
        if number is not None:
            self.process.send_signal(number)
        code = self.process.wait(PATIENCE)
        for reader in self._readers:
            reader.join(PATIENCE)
        return code


def _read(pipe: TextIO, kept: list[str]) -> None:
    for line in pipe:
        kept.append(line.rstrip("\n"))


@contextlib.contextmanager
def serving(python: Path, bundle: Path, *arguments: str, **environment: str) -> Iterator[Serve]:
    command = [str(python), "-m", "dflow_trt", "serve", str(bundle), "--port", "0", "--threads", "1", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env={**os.environ, **environment}, **pipes)  # type: ignore[call-overload]
    try:
        yield Serve(process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE) == 0, "Ctrl-C ends it well"


@pytest.fixture(scope="module")
def served(serve_python: Path, example: Pair) -> Iterator[Serve]:
    with serving(serve_python, example.bundle.path, "--model-name", "example") as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Serve) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as made:
        yield made


@pytest.fixture(scope="module")
def llm(example: Pair) -> Iterator[LLM]:
    with LLM(example.bundle, threads=1) as opened:
        yield opened


def offline(llm: LLM, prompt: Any, strategy: str | None = None, **options: Any) -> list[CompletionOutput]:
    """The same request to the Python API."""
    [output] = llm.generate([prompt], SamplingParams(**options), strategy=strategy)
    return list(output.outputs)


def asked(prompt: Any, strategy: str | None = None, **options: Any) -> dict[str, Any]:
    """SamplingParams' fields, or a chat's, as arguments of the official client."""
    extra: dict[str, Any] = {name: options.pop(name) for name in EXTRAS if name in options}
    extra |= {"strategy": strategy, "return_token_ids": True}
    where = {"messages": prompt["messages"]} if isinstance(prompt, dict) else {"prompt": prompt}
    return {"model": "example", **where, "temperature": 0, **options, "extra_body": extra}


def create(client: openai.OpenAI, request: Mapping[str, Any]) -> Any:
    made = client.chat.completions if "messages" in request else client.completions
    return made.create(**request)


def text_of(choice: Any) -> str:
    return str(choice.message.content if hasattr(choice, "message") else choice.text)


def same(choices: Sequence[Any], outputs: Sequence[CompletionOutput]) -> None:
    """Token by token, and the text, and why it ended."""
    assert [choice.token_ids for choice in choices] == [list(output.token_ids) for output in outputs]
    assert [text_of(choice) for choice in choices] == [output.text for output in outputs]
    assert [choice.finish_reason for choice in choices] == [output.finish_reason for output in outputs]


# -- the same as offline -----------------------------------------------------------------------------------------------

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 60},
    "plain": {"max_tokens": 60, "strategy": "ar"},
    "sampled": {"max_tokens": 60, "temperature": 0.75, "top_p": 0.875, "top_k": 50, "min_p": 0.015625, "seed": 7},
    "samples": {"max_tokens": 40, "temperature": 1.0, "seed": 2**64 - 1, "n": 3},
    "penalties": {
        "max_tokens": 60,
        "repetition_penalty": 1.25,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    },
    "stop strings": {"max_tokens": 90, "stop": ["c)", "never"]},
    "stop within a token": {"max_tokens": 90, "stop": "\nb"},
    "stop ids": {"max_tokens": 90, "stop_token_ids": [345, 203]},
    "bias": {"max_tokens": 40, "logit_bias": {276: -100.0, 300: 4.5}},
    "bad words": {"max_tokens": 40, "bad_words": [" ="]},
    "no end": {"max_tokens": 150, "ignore_eos": True},
    "least": {"max_tokens": 100, "min_tokens": 90},
    "one token": {"max_tokens": 1},
}


@pytest.mark.parametrize("case", REQUESTS)
def test_an_answer_is_the_offline_one(
    case: str, client: openai.OpenAI, llm: LLM, example_prompts: list[dict[str, Any]]
) -> None:
    for prompt in (SOME_TEXT, example_prompts[0]):
        answer = create(client, asked(prompt, **REQUESTS[case]))
        outputs = offline(llm, prompt, **REQUESTS[case])
        same(answer.choices, outputs)
        stats = [output.stats for output in outputs]
        assert answer.usage.prompt_tokens == stats[0].prompt_tokens
        assert answer.usage.completion_tokens == sum(s.output_tokens for s in stats)
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert answer.usage.dflow["seeds"] == [outputs[0].seed] or "seed" not in REQUESTS[case]


def test_usage_tells_the_drafts(client: openai.OpenAI, llm: LLM, example_prompts: list[dict[str, Any]]) -> None:
    for strategy in ("dflow", "dflash", "ar"):
        answer = create(client, asked(example_prompts[1], strategy, max_tokens=80))
        [output] = offline(llm, example_prompts[1], strategy, max_tokens=80)
        details = answer.usage.completion_tokens_details
        stats = output.stats
        assert details.accepted_prediction_tokens == stats.accepted
        assert details.rejected_prediction_tokens == stats.drafted - stats.accepted
        assert answer.usage.dflow["rounds"] == stats.rounds
        assert answer.usage.dflow["tau_emitted"] == pytest.approx(stats.tau_emitted, abs=1e-3)
        assert answer.usage.dflow["strategy"] == strategy


def test_draft_tokens_limit_the_drafts_and_change_nothing(client: openai.OpenAI) -> None:
    whole, none = (
        client.completions.create(
            model="example",
            prompt=SOME_TEXT,
            temperature=0,
            max_tokens=60,
            extra_body={"draft_tokens": count, "return_token_ids": True},
        )
        for count in (7, 0)
    )
    assert whole.choices[0].token_ids == none.choices[0].token_ids  # type: ignore[attr-defined]
    assert none.usage is not None
    assert none.usage.completion_tokens_details is not None
    assert none.usage.completion_tokens_details.accepted_prediction_tokens == 0


def test_prompts_in_every_form(client: openai.OpenAI, llm: LLM) -> None:
    assert llm.tokenizer is not None
    texts = [SOME_TEXT, "b) 2 + 17 =", "漢 😀"]
    ids = [llm.tokenizer.encode(text) for text in texts]
    for prompt in (texts, ids):
        answer = client.completions.create(model="example", prompt=prompt, temperature=0, max_tokens=12, n=2)  # type: ignore[arg-type]
        expected = [output.text for text in texts for output in offline(llm, text, max_tokens=12, n=2)]
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, ids))


def test_log_probabilities_are_the_offline_ones(client: openai.OpenAI, llm: LLM) -> None:
    [output] = offline(llm, SOME_TEXT, max_tokens=30, logprobs=3)
    assert output.logprobs is not None
    expected = [pick.logprob for pick in output.logprobs]
    answer = client.completions.create(model="example", prompt=SOME_TEXT, temperature=0, max_tokens=30, logprobs=3)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs == pytest.approx(expected, abs=1e-5)
    assert found.text_offset is not None
    assert "".join(found.tokens or []).startswith(answer.choices[0].text)
    assert [len(top) for top in found.top_logprobs or []] == [3] * len(expected)
    assert all(max(top, key=lambda name: top[name]) == name for top, name in zip(found.top_logprobs, found.tokens))  # type: ignore[arg-type,index]  # noqa: B905
    chat = client.chat.completions.create(
        model="example",
        messages=[{"role": "user", "content": "13 + 17"}],
        temperature=0,
        max_tokens=20,
        logprobs=True,
        top_logprobs=2,
        stream=True,
    )
    parts = [choice.logprobs for chunk in chat for choice in chunk.choices]
    entries = [entry for part in parts if part is not None for entry in part.content or []]
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in entries), "greedy"
    assert all(entry.bytes is not None for entry in entries)


# -- streams -----------------------------------------------------------------------------------------------------------


@dataclass
class Streamed:
    """The choices of one stream, put together."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    usage: Any = None
    chunks: int = 0

    def add(self, chunk: Any) -> None:
        self.chunks += 1
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            i, text = choice.index, choice.text if hasattr(choice, "text") else choice.delta.content
            assert i not in self.reasons, "nothing comes after the end"
            self.ids[i] = self.ids.get(i, []) + choice.token_ids
            self.texts[i] = self.texts.get(i, "") + (text or "")
            if choice.finish_reason:
                self.reasons[i] = choice.finish_reason


async def streamed(client: openai.AsyncOpenAI, request: dict[str, Any]) -> Streamed:
    made: Any = client.chat.completions if "messages" in request else client.completions
    found = Streamed()
    async for chunk in await made.create(**request, stream=True, stream_options={"include_usage": True}):
        found.add(chunk)
    return found


def test_32_concurrent_streams_equal_offline(served: Serve, llm: LLM, example_prompts: list[dict[str, Any]]) -> None:
    """Ragged lengths, all strategies, greedy and sampled, more than there are slots: token by token."""
    strategies = ["dflow", "dflash", "ar", "dflow-norelay"]
    options = [
        {"max_tokens": 20 + 7 * (i % 13), "temperature": (0.0, 0.75)[i % 3 == 0], "seed": i, "n": 1 + (i % 8 == 0)}
        for i in range(32)
    ]
    prompts, named = example_prompts[:32], [strategies[i % 4] for i in range(32)]

    async def run() -> list[Streamed]:
        limits = httpx.Limits(max_connections=64)
        http = httpx.AsyncClient(limits=limits, timeout=PATIENCE)
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", http_client=http) as client:
            requests = [asked(p, s, **o) for p, s, o in zip(prompts, named, options, strict=True)]
            return list(await asyncio.gather(*(streamed(client, request) for request in requests)))

    found = asyncio.run(run())
    for i, stream in enumerate(found):
        outputs = offline(llm, prompts[i], named[i], **options[i])
        for k, output in enumerate(outputs):
            assert stream.ids[k] == list(output.token_ids), (i, k)
            assert (stream.texts[k], stream.reasons[k]) == (output.text, output.finish_reason)
        assert stream.usage.completion_tokens == sum(map(len, stream.ids.values()))
        if named[i] != "ar" and len(outputs) == 1:
            assert stream.chunks < len(outputs[0].token_ids), "a chunk a round, not a token"


def test_a_seed_repeats_a_text_and_none_gives_another(client: openai.OpenAI) -> None:
    def text(**options: Any) -> tuple[list[int], int]:
        answer: Any = create(client, asked(SOME_TEXT, max_tokens=40, **options) | {"temperature": 1.5})
        return answer.choices[0].token_ids, answer.usage.dflow["seeds"][0]

    assert text(seed=11) == text(seed=11)
    assert text(seed=11)[0] == text(seed=11, strategy="ar")[0]
    drawn = [text() for _ in range(3)]
    assert len({seed for _, seed in drawn}) == 3
    again, seed = text(seed=drawn[0][1])
    assert (again, seed) == drawn[0], "a drawn seed is reported, and repeats its text"


def test_events_on_the_wire(served: Serve, example_prompts: list[dict[str, Any]]) -> None:
    body = {**example_prompts[0], "temperature": 0, "stream": True}
    body["stream_options"] = {"include_drafts": True, "include_usage": True}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=PATIENCE)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    said = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    assert "".join(piece["text"] for chunk in chunks for piece in chunk["dflow"]["pieces"]) == said
    accepted = sum(chunk["dflow"]["num_accepted"] for chunk in chunks)
    assert accepted == last["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    assert last["usage"]["dflow"]["rounds"] == len(chunks) - 1


# -- clients that leave ------------------------------------------------------------------------------------------------


def gauge(served: Serve, name: str) -> float:
    page = httpx.get(f"{served.url}/metrics", timeout=PATIENCE).text
    found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
    assert found, f"{name} is not among the metrics"
    return sum(map(float, found))


def until(reached: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < end, what
        time.sleep(0.1)


def test_clients_that_leave_free_their_slots(served: Serve, client: openai.OpenAI) -> None:
    """Streams and single answers, queued and running, with samples: all of them are ended, and nobody else."""
    long = {"ignore_eos": True, "max_tokens": 600, "strategy": "ar"}
    begun = [client.completions.create(**asked(SOME_TEXT, n=2, **long), stream=True) for _ in range(3)]
    for stream in begun:
        next(iter(stream))
    waiting = [socket.create_connection(served.url.removeprefix("http://").split(":")) for _ in range(8)]  # type: ignore[arg-type]
    body = json.dumps({"prompt": SOME_TEXT, "ignore_eos": True, "max_tokens": 600, "strategy": "ar"})
    for each in waiting:
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        each.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    until(lambda: gauge(served, families.SLOTS_IN_USE.name) == 8, "all slots are taken")
    for stream in begun:
        stream.response.close()
    for each in waiting:
        each.close()
    until(lambda: gauge(served, families.SLOTS_IN_USE.name) == 0, "slots are not freed")
    assert gauge(served, families.QUEUE_LENGTH.name) == 0
    assert create(client, asked(SOME_TEXT, max_tokens=5)).usage.completion_tokens == 5


# -- errors and the other paths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e-50}, "temperature"),
        ({"extra_body": {"strategy": "magic"}}, "strategy"),
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
        ({"extra_body": {"best_of": 2}}, "best_of"),
        ({"prompt": [1, 10**6]}, "prompt"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"prompt": SOME_TEXT * 200}, None),
        ({"prompt": ""}, None),
    ],
)
def test_bad_requests_name_the_field(client: openai.OpenAI, change: dict[str, Any], param: str | None) -> None:
    request: dict[str, Any] = {"model": "example", "prompt": SOME_TEXT, **change}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**request, stream=stream)
        assert caught.value.type == "invalid_request_error"
        assert caught.value.param == param
        assert "\n" not in caught.value.message


def test_a_prompt_that_is_too_long_has_openais_code(client: openai.OpenAI) -> None:
    """Agents look for it, to shorten their prompt."""
    with pytest.raises(openai.BadRequestError, match="this bundle takes 512") as caught:
        client.completions.create(model="example", prompt=SOME_TEXT * 200)
    assert caught.value.code == "context_length_exceeded"


def test_what_does_not_exist(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-4", prompt="x")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="example", input="x")


def test_models_and_health(served: Serve, client: openai.OpenAI, llm: LLM) -> None:
    [model] = client.models.list().data
    described: Any = model
    assert model.id == "example"
    assert [each["name"] for each in described.dflow["strategies"]] == list(llm.bundle.strategies)
    assert described.max_model_len == llm.bundle.build.max_seq_len
    assert client.models.retrieve("example") == model
    until(lambda: httpx.get(f"{served.url}/health").status_code == 200, "the loop's first heartbeat")
    assert httpx.get(f"{served.url}/").text.startswith("<!doctype html>")


def test_the_task_is_a_label(served: Serve, client: openai.OpenAI) -> None:
    client.completions.create(model="example", prompt=SOME_TEXT, max_tokens=2, extra_body={"metadata": {"task": "t-1"}})
    page = f"{served.url}/metrics"
    until(lambda: 'task="t-1"' in httpx.get(page).text, "the task is not among the metrics")


def test_no_text_of_prompts_is_printed(served: Serve, client: openai.OpenAI) -> None:
    client.completions.create(model="example", prompt="unmistakable prompt text", max_tokens=2)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="example", prompt="unmistakable prompt text", temperature=9e9, n=0)
    said = "\n".join([*served.lines, *served.errors])
    assert "unmistakable" not in said
    assert "POST /v1/completions" in said


# -- limits, keys, and the end -----------------------------------------------------------------------------------------


def test_limits_keys_and_the_end(serve_python: Path, example: Pair) -> None:
    """A small server: a queue of two, a key, short bodies, little time. Then SIGTERM, with a stream in flight."""
    small = ("--max-queue", "2", "--max-request-bytes", "2000", "--timeout", "20")
    with serving(serve_python, example.bundle.path, *small, DFLOW_API_KEY="s3cret") as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="s3cret", max_retries=0, timeout=PATIENCE) as client:
            _check_limits(server, client)
            code = _end_in_a_stream(server, client)
        assert code == 0, "\n".join(server.errors)
        assert "s3cret" not in "\n".join([*server.lines, *server.errors])
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url)


def _check_limits(server: Serve, client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == "bundle", "by default the folder's name"
    with pytest.raises(openai.AuthenticationError) as refused:
        client.with_options(api_key="wrong").models.list()
    assert refused.value.code == "invalid_api_key"
    assert httpx.get(f"{server.url}/metrics").status_code == 401
    with pytest.raises(openai.APIStatusError) as large:
        client.completions.create(model="bundle", prompt="x" * 2000)
    assert large.value.status_code == 413
    with pytest.raises(openai.RateLimitError) as full:
        client.completions.create(
            model="bundle", prompt=SOME_TEXT, n=40, max_tokens=500, extra_body={"ignore_eos": True}
        )
    assert full.value.response.headers["retry-after"] == "1"
    assert client.completions.create(model="bundle", prompt=SOME_TEXT, max_tokens=3).usage is not None


def _end_in_a_stream(server: Serve, client: openai.OpenAI) -> int:
    stream = client.completions.create(
        model="bundle", prompt=SOME_TEXT, max_tokens=500, stream=True, extra_body={"ignore_eos": True, "strategy": "ar"}
    )
    chunks = iter(stream)
    next(chunks)
    server.process.send_signal(signal.SIGTERM)
    assert server.line("draining").startswith("1 sequence, for up to 30 s")
    rest = list(chunks)
    assert rest[-1].choices[0].finish_reason == "length", "it was finished"
    assert len(rest) == 499
    return server.end()


def test_ctrl_c_twice_ends_at_once_and_says_so(serve_python: Path, example: Pair) -> None:
    """A stream and a request that waits for its whole answer, each told by an error; nothing else is printed."""
    body = {"prompt": SOME_TEXT, "max_tokens": 600, "ignore_eos": True, "strategy": "ar", "n": 8}
    with serving(serve_python, example.bundle.path) as server, httpx.Client(timeout=PATIENCE) as client:
        url, whole = f"{server.url}/v1/completions", []
        asking = threading.Thread(target=lambda: whole.append(httpx.post(url, json=body, timeout=PATIENCE)))
        with client.stream("POST", url, json=body | {"stream": True}) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            asking.start()
            until(lambda: gauge(server, families.QUEUE_LENGTH.name) == 8, "the second request waits")
            server.process.send_signal(signal.SIGINT)
            assert server.line("draining") == "16 sequences, for up to 30 s; Ctrl-C again ends them now"
            server.process.send_signal(signal.SIGINT)
            *_, error, done = [line for line in lines if line]
        asking.join()
        assert server.end(None) == 0, "as after one"
    assert (json.loads(error.removeprefix("data: "))["error"]["code"], done) == ("service_unavailable", "data: [DONE]")
    assert (whole[0].status_code, whole[0].json()["error"]["type"]) == (503, "server_error")
    assert [line for line in server.errors if "HTTP/1.1" not in line] == ["Signal (15) received."], "tritonserver's own"


def test_sigterm_while_it_starts_leaves_nothing(serve_python: Path, example: Pair) -> None:
    with serving(serve_python, example.bundle.path) as server:
        started: list[psutil.Process] = []

        def tritonserver() -> bool:
            started[:] = psutil.Process(server.process.pid).children(recursive=True)
            return any("tritonserver" in child.name() for child in started)

        until(tritonserver, "tritonserver is not started")
        assert server.lines == []
        assert server.end() == 130
        assert "interrupted" in server.errors
        assert psutil.wait_procs(started, PATIENCE)[1] == []


def test_a_tritonserver_that_dies_ends_the_endpoint_and_leaves_nothing(serve_python: Path, example: Pair) -> None:
    """Whoever started it starts it again."""
    with serving(serve_python, example.bundle.path) as server:
        assert server.url
        started = psutil.Process(server.process.pid).children(recursive=True)
        [triton] = [child for child in started if "tritonserver" in child.name()]
        assert len(started) > 1
        triton.kill()
        assert server.end(None) == 1
        assert psutil.wait_procs(started, PATIENCE)[1] == []
    assert "error: tritonserver ended by itself with code -9; its output above says why" in server.errors


def test_an_endpoint_that_is_killed_leaves_nothing(serve_python: Path, example: Pair) -> None:
    with serving(serve_python, example.bundle.path) as server:
        assert server.url
        started = psutil.Process(server.process.pid).children(recursive=True)
        assert len(started) > 1
        server.process.kill()
        assert psutil.wait_procs(started, PATIENCE)[1] == []


def command(python: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    whole = [str(python), "-m", "dflow_trt", "serve", *arguments]
    return subprocess.run(whole, env={**os.environ, **environment}, capture_output=True, text=True, timeout=PATIENCE)


def one_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_what_cannot_start_says_why_in_one_line(serve_python: Path, example: Pair, tmp_path: Path) -> None:
    bundle = str(example.bundle.path)
    assert "no such folder" in one_line(command(serve_python, str(tmp_path / "nothing")))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"--port: 127.0.0.1:{port} " in one_line(command(serve_python, bundle, "--port", port))
    line = one_line(command(serve_python, bundle, "--port", "0", "--triton-home", str(tmp_path)))
    assert str(tmp_path) in line
    assert "no tritonserver" in line
    assert "--host" in one_line(command(serve_python, bundle, "--host", "no.such.host.invalid"))
    assert "--api-key" in one_line(command(serve_python, bundle, "--api-key", ""))


def test_a_bundle_for_a_gpu_that_is_not_here_says_so_in_one_line(
    serve_python: Path, example: Pair, tmp_path: Path
) -> None:
    """The model's own words: nothing of what tritonserver makes of them."""
    shutil.copytree(example.bundle.path, tmp_path / "gpu")
    bundle = fakegpu.offer(fakegpu.Gpu("A GPU that is not here", "8.9"), open_bundle(tmp_path / "gpu"))
    write_manifest(bundle)
    line = one_line(command(serve_python, str(bundle.path), "--port", "0"))
    assert line.startswith("error: tritonserver ended with code 1: failed to load 'dflow': tensorrt")
    assert "Internal" not in line
    assert "\\n" not in line


@pytest.mark.skipif(find_spec("pytriton") is not None, reason="this Python has a tritonserver")
def test_without_a_tritonserver_it_says_how_to_get_one(example: Pair) -> None:
    line = one_line(command(Path(sys.executable), str(example.bundle.path), "--port", "0", PATH="/usr/bin:/bin"))
    assert "no tritonserver" in line
    assert "pip install '.[triton,serve]'" in line
