"""The endpoint's routes over a scripted model: answers, streams, errors, keys, limits, clients that leave."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from importlib.resources import files
from typing import Any

import fake
import grpc
import httpx
import pytest
from fake_triton import Asked, Failure, FakeTriton, Sample

from dflow_trt.serving.families import HEARTBEAT
from dflow_trt.serving.openai.app import Endpoint, Settings, build_app
from dflow_trt.serving.openai.backend import Backend
from dflow_trt.text import Tokenizer

TOKENIZER = Tokenizer.from_folder(str(files("dflow_trt") / "example_data" / "target"))
REPLY = TOKENIZER.encode("a) 13 + 17 = 30\nb) 2 + 17 = 19\nc) 19 + 9 = 28\n漢")
SAMPLE = Sample(REPLY, (3, 0, 6, 2, *[0] * (len(REPLY) - 16)))
MESSAGES = [{"role": "user", "content": "13 + 17"}]


def one(asked: Asked) -> Sequence[Sample]:
    """As many equal samples as were asked for."""
    return [SAMPLE] * asked.value("num_return_sequences", 1)


@dataclasses.dataclass
class Served:
    """The application, its model, and a client."""

    app: Any
    triton: FakeTriton
    http: httpx.AsyncClient

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(f"/v1/{path}", json=body)

    async def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        response = await self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        events = response.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def _metrics_page(url: str, age: float | None) -> httpx.Response:
    """Triton's metrics: the loop's heartbeat is ``age`` seconds old, or is missing."""
    if age is None:
        return httpx.Response(200, text="nv_up 1\n")
    beat = f"{HEARTBEAT.name} {time.time() - age}\n"
    return httpx.Response(200, text=f"# {url}\n{beat}", headers={"content-type": "text/plain; version=0.0.4"})


def served(
    test: Callable[[Served], Awaitable[None]], script: Any = one, beat: float | None = 0.0, **settings: Any
) -> FakeTriton:
    """Run a test against a server of its own; the model that it had."""

    async def run() -> FakeTriton:
        bundle = fake.make_bundle([fake.drafter_spec("dflow", 8, "after_rejection")])
        bundle = dataclasses.replace(bundle, target=dataclasses.replace(bundle.target, vocab_size=TOKENIZER.size))
        triton = FakeTriton(TOKENIZER, script)
        metrics = httpx.MockTransport(lambda request: _metrics_page(str(request.url), beat))
        chosen = Settings("demo", "127.0.0.1:1", **({"max_request_bytes": 10_000} | settings))
        async with httpx.AsyncClient(transport=metrics) as http:
            app = build_app(Endpoint(bundle, TOKENIZER, Backend(triton, timeout=60), http, chosen))
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                await test(Served(app, triton, client))
        return triton

    return asyncio.run(run())


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


# -- answers -----------------------------------------------------------------------------------------------------------


def test_a_completion() -> None:
    async def test(server: Served) -> None:
        response = await server.post("completions", model="demo", prompt="13", temperature=0, seed=5)
        answer = response.json()
        assert answer["choices"] == [
            {"index": 0, "text": TOKENIZER.decode(REPLY), "logprobs": None, "finish_reason": "length"}
        ]
        assert (answer["object"], answer["model"]) == ("text_completion", "demo")
        assert answer["id"].startswith("cmpl-")
        assert response.headers["x-request-id"] == answer["id"]
        assert answer["usage"]["completion_tokens"] == len(REPLY)
        assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 11
        assert answer["usage"]["dflow"]["seeds"] == [5]

    triton = served(test)
    assert triton.asked[0].value("stream") is False
    assert triton.stopped == []


def test_a_chat_with_samples() -> None:
    async def test(server: Served) -> None:
        answer = (await server.post("chat/completions", messages=MESSAGES, n=2)).json()
        assert answer["object"] == "chat.completion"
        for i, choice in enumerate(answer["choices"]):
            message = {"role": "assistant", "content": TOKENIZER.decode(REPLY), "refusal": None}
            assert choice == {"index": i, "message": message, "logprobs": None, "finish_reason": "length"}
        assert answer["usage"]["prompt_tokens"] == len(TOKENIZER.encode_chat(MESSAGES))

    served(test)


def test_prompts_are_asked_at_once_and_answered_in_order() -> None:
    def script(asked: Asked) -> Sequence[Sample]:
        return [Sample(asked.inputs["input_ids"])] * 2

    async def test(server: Served) -> None:
        prompts = [[20, 21], [22], [23, 24, 25]]
        answer = (await server.post("completions", prompt=prompts, n=2, return_token_ids=True)).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        assert [choice["token_ids"] for choice in answer["choices"]] == [ids[:1] for ids in prompts for _ in range(2)]
        assert answer["usage"]["prompt_tokens"] == 6

    triton = served(test, script)
    assert len({asked.id for asked in triton.asked}) == 3, "a request has an id of its own"


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_stream_says_the_same_as_one_answer(path: str) -> None:
    prompt: dict[str, Any] = {"prompt": "13"} if path == "completions" else {"messages": MESSAGES}
    options: dict[str, Any] = {**prompt, "n": 2, "stop": ["= 19"], "return_token_ids": True}
    options |= {"logprobs": 2} if path == "completions" else {"logprobs": True, "top_logprobs": 2}

    async def test(server: Served) -> None:
        whole = (await server.post(path, **options)).json()
        chunks = await server.stream(path, **options, stream_options={"include_usage": True})
        usage = chunks.pop()
        assert usage["choices"] == []
        assert usage["usage"] == whole["usage"]
        assert all(chunk["usage"] is None for chunk in chunks)
        assert {chunk["id"] for chunk in chunks} == {usage["id"]}
        for expected in whole["choices"]:
            parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == expected["index"]]
            assert _text(parts) == _text([expected])
            assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]
            assert [token for part in parts for token in part["token_ids"]] == expected["token_ids"]
            for name, values in expected["logprobs"].items():
                if values is not None:
                    assert [value for part in parts for value in part["logprobs"][name]] == values

    served(test)


def _text(choices: Sequence[dict[str, Any]]) -> str:
    said = [c["text"] if "text" in c else (c.get("delta") or c["message"])["content"] for c in choices]
    return "".join(said)


def test_a_stream_tells_what_was_drafted() -> None:
    async def test(server: Served) -> None:
        options = {"include_drafts": True}
        chunks = await server.stream("chat/completions", messages=MESSAGES, stream_options=options)
        drafts = [chunk["dflow"] for chunk in chunks]
        assert [d["num_accepted"] for d in drafts[:5]] == [0, 3, 0, 6, 2]
        assert [d["num_drafted"] for d in drafts[:5]] == [0, 7, 7, 7, 7], "the first is of the prefill"
        assert sum(d["num_tokens"] for d in drafts) == len(REPLY)
        said = "".join(piece["text"] for d in drafts for piece in d["pieces"])
        assert said == TOKENIZER.decode(REPLY)
        assert [piece["drafted"] for piece in drafts[1]["pieces"]] == [True, False]
        plain = await server.stream("chat/completions", messages=MESSAGES)
        assert not any("dflow" in chunk or "usage" in chunk for chunk in plain)

    served(test)


def test_a_stream_tells_the_usage_so_far_where_it_is_asked_for() -> None:
    async def test(server: Served) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        *chunks, last = await server.stream("chat/completions", messages=MESSAGES, n=2, stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts[:6] == [1, 2, 6, 10, 11, 12], "two samples in turns: a token, a round of four, one of one"
        assert (counts[-1], chunks[-1]["usage"]) == (2 * len(REPLY), last["usage"])
        alone = await server.stream("completions", prompt="13", stream_options={"continuous_usage_stats": True})
        assert alone[-1]["usage"]["completion_tokens"] == len(REPLY)
        assert alone[-1]["choices"] != [], "no chunk of its own"

    served(test)


def test_the_task_label_goes_along() -> None:
    async def test(server: Served) -> None:
        await server.post("completions", prompt="1", metadata={"task": "sums", "other": "x"}, user="u")
        await server.post("completions", prompt="1")

    triton = served(test)
    assert [asked.parameters.get("task") for asked in triton.asked] == ["sums", None]


# -- errors ------------------------------------------------------------------------------------------------------------


def failing(*failure: Any) -> Any:
    def script(asked: Asked) -> Sequence[Sample]:
        raise Failure(*failure)

    return script


LOST = grpc.StatusCode
FAILURES = {
    "refused": (("INVALID_ARG", "temperature is 9; allowed: less"), 400, "temperature"),
    "too long": (("INVALID_ARG", "the prompt has 900 tokens, this bundle takes 512"), 400, None),
    "full": (("UNAVAILABLE", "the queue is full: 64 wait, at most 64 do; try later"), 429, None),
    "late in the queue": (("UNAVAILABLE", "timed out in the queue; try later, or allow more time"), 504, None),
    "stopping": (("UNAVAILABLE", "the server is stopping; send the request to another"), 503, None),
    "broken": (("INTERNAL", "the engine failed (x); the request may be sent again"), 500, None),
    "the model is gone": (("", "Stub process 'dflow_0_0' is not healthy."), 503, None),
    "gone": (("", "failed to connect to all addresses", LOST.UNAVAILABLE), 503, None),
    "late": (("", "Deadline Exceeded", LOST.DEADLINE_EXCEEDED), 504, None),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", FAILURES)
def test_what_the_model_says_becomes_a_status(case: str, stream: bool) -> None:
    failure, status, param = FAILURES[case]

    async def test(server: Served) -> None:
        error = error_of(await server.post("completions", prompt="1", stream=stream), status)
        assert error["param"] == param
        assert status == 504 or error["message"].endswith(failure[1])
        assert (error["code"] == "context_length_exceeded") == (case == "too long")

    triton = served(test, failing(*failure))
    assert triton.stopped == [], "what has ended is not ended again"


@pytest.mark.parametrize(("reason", "status"), [("timeout", 504), ("cancelled", 503)])
def test_a_sample_that_did_not_end_by_itself_is_no_answer(reason: str, status: int) -> None:
    async def test(server: Served) -> None:
        error_of(await server.post("completions", prompt="1"), status)
        begun = await server.stream("completions", prompt="1")
        assert set(begun[-1]["error"]) == {"message", "type", "param", "code"}
        assert begun[0]["choices"][0]["finish_reason"] is None, "it had begun"

    served(test, lambda asked: [dataclasses.replace(SAMPLE, reason=reason)])


@pytest.mark.parametrize("stream", [False, True])
def test_a_sample_that_never_ended_is_no_answer(stream: bool) -> None:
    """How a stream ends whose model's process was killed: as if all had been said."""

    async def test(server: Served) -> None:
        if stream:
            begun = await server.stream("completions", prompt="1", n=2)
            assert "the model was lost" in begun[-1]["error"]["message"]
        else:
            assert "the model was lost" in error_of(await server.post("completions", prompt="1"), 503)["message"]

    def script(asked: Asked) -> Sequence[Sample]:
        return [SAMPLE, dataclasses.replace(SAMPLE, reason="")][-asked.value("num_return_sequences", 1) :]

    served(test, script)


def test_one_failing_prompt_ends_the_others() -> None:
    def script(asked: Asked) -> Sequence[Sample]:
        if asked.inputs["input_ids"] == [21]:
            raise Failure("INVALID_ARG", "n is 3; allowed: less")
        return [Sample([20] * 1000, [0] * 999)]

    async def test(server: Served) -> None:
        server.triton.gate = asyncio.Semaphore(0)
        error_of(await server.post("completions", prompt=[[20], [21], [22]]), 400)
        await _settled(lambda: len(server.triton.stopped) == 2)  # the others

    served(test, script)


def test_the_clients_are_told_what_to_do() -> None:
    async def test(server: Served) -> None:
        full = await server.post("completions", prompt="1")
        assert error_of(full, 429)["code"] == "rate_limit_exceeded"
        assert full.headers["retry-after"] == "1"

    served(test, failing("UNAVAILABLE", "the queue is full: 64 wait, at most 64 do; try later"))

    async def late(server: Served) -> None:
        response = await server.post("completions", prompt="1")
        assert response.headers["x-should-retry"] == "false"

    served(late, failing("", "x", LOST.DEADLINE_EXCEEDED))


def test_a_fault_of_ours_is_a_500_that_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def script(asked: Asked) -> Sequence[Sample]:
        raise RuntimeError("secret prompt text")

    async def test(server: Served) -> None:
        assert "secret" not in error_of(await server.post("completions", prompt="1"), 500)["message"]

    with caplog.at_level(logging.ERROR):
        served(test, script)
    assert "RuntimeError" in caplog.text


def test_paths_methods_and_models_that_do_not_exist() -> None:
    async def test(server: Served) -> None:
        assert error_of(await server.http.get("/v1/nothing"), 404)["code"] == "not_found"
        assert error_of(await server.http.get("/v1/completions"), 405)["code"] == "method_not_allowed"
        missing = error_of(await server.post("completions", model="gpt-4", prompt="1"), 404)
        assert (missing["code"], missing["param"]) == ("model_not_found", "model")
        assert "'demo'" in missing["message"]
        assert error_of(await server.http.get("/v1/models/gpt-4"), 404)["code"] == "model_not_found"

    assert served(test).asked == []


# -- limits and keys ---------------------------------------------------------------------------------------------------


async def _chunks(size: int) -> AsyncIterator[bytes]:
    for _ in range(size // 100):
        yield b"x" * 100


def test_a_body_has_a_limit_announced_or_not() -> None:
    async def test(server: Served) -> None:
        kind = {"content-type": "application/json"}
        for body in (b"x" * 1001, _chunks(2000)):
            error = error_of(await server.http.post("/v1/completions", content=body, headers=kind), 413)
            assert "1000 bytes" in error["message"]
        fits = json.dumps({"prompt": "1"}).encode().ljust(1000)
        assert (await server.http.post("/v1/completions", content=fits, headers=kind)).status_code == 200

    served(test, max_request_bytes=1000)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/json, text/plain", "json; a=b"]
)
def test_only_json_is_read(kind: str) -> None:
    """What a page of another site can send without being asked is none of it."""

    async def test(server: Served) -> None:
        headers = {"content-type": kind} if kind else {}
        response = await server.http.post("/v1/completions", content=b'{"prompt": "1"}', headers=headers)
        error_of(response, 415)

    assert served(test).asked == []


BODY = '{"prompt": "é"}'


@pytest.mark.parametrize(
    ("kind", "coding", "content"),
    [
        ("application/json", "gzip", gzip.compress(BODY.encode(), mtime=0)),
        ("application/json; charset=utf-8", "br", BODY.encode()),
        ("application/json; charset=utf-16", "identity", BODY.encode("utf-16")),
        ("application/json; charset=latin-1", "", BODY.encode("latin-1")),
    ],
    ids=["gzip", "br", "utf-16", "latin-1"],
)
def test_a_body_that_is_compressed_or_in_another_charset_is_refused(kind: str, coding: str, content: bytes) -> None:
    async def test(server: Served) -> None:
        headers = {"content-type": kind, "content-encoding": coding}
        response = await server.http.post("/v1/completions", content=content, headers=headers)
        named = coding if coding in ("gzip", "br") else kind.rpartition("=")[2]
        assert named in error_of(response, 415)["message"]

    assert served(test).asked == []


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", 'Application/JSON; charset="UTF-8"; a=b'])
def test_what_says_that_it_is_utf_8_is_read(kind: str) -> None:
    async def test(server: Served) -> None:
        headers = {"content-type": kind, "content-encoding": "identity"}
        response = await server.http.post("/v1/completions", content=BODY.encode(), headers=headers)
        assert response.status_code == 200

    assert served(test).asked[0].inputs["input_ids"] == TOKENIZER.encode("é")


def test_the_key_opens_what_it_should() -> None:
    async def test(server: Served) -> None:
        guarded = ["/v1/models", "/v1/models/demo", "/metrics"]
        for given in (None, "Bearer wrong", "Bearer ", "Basic s3cret", "s3cret", "Bearer s3cret2", "Bearer schlüssel"):
            headers = {"authorization": given.encode()} if given is not None else {}
            for path in guarded:
                response = await server.http.get(path, headers=headers)
                assert error_of(response, 401)["code"] == "invalid_api_key"
            response = await server.http.post("/v1/completions", json={"prompt": "1"}, headers=headers)
            error_of(response, 401)
        for path in guarded:
            assert (await server.http.get(path, headers={"authorization": "bearer s3cret"})).status_code == 200
        for path in ("/health", "/", "/page.js"):
            assert (await server.http.get(path)).status_code == 200

    assert served(test, api_key="s3cret").asked == []


def test_a_name_that_was_made_to_point_here_is_refused() -> None:
    async def test(server: Served) -> None:
        for host, status in {"localhost:8000": 200, "[::1]:8000": 200, "127.0.0.1": 200, "evil.example": 403}.items():
            response = await server.http.get("/v1/models", headers={"host": host})
            assert response.status_code == status, host
        assert error_of(response, 403)["code"] == "host_not_allowed"

    served(test, hosts=("localhost", "127.0.0.1", "::1"))

    async def keyed(server: Served) -> None:
        headers = {"host": "proxy.example", "authorization": "Bearer k"}
        assert (await server.http.get("/v1/models", headers=headers)).status_code == 200

    served(keyed, hosts=("localhost",), api_key="k")


# -- the other routes --------------------------------------------------------------------------------------------------


def test_models_say_what_can_be_chosen() -> None:
    async def test(server: Served) -> None:
        listed = (await server.http.get("/v1/models")).json()
        [model] = listed["data"]
        assert (listed["object"], model["id"], model["object"]) == ("list", "demo", "model")
        assert model["dflow"]["default_strategy"] == "dflow"
        assert model["dflow"]["strategies"] == [
            {"name": "ar", "relay": False, "max_draft_tokens": 0},
            {"name": "dflow", "relay": True, "max_draft_tokens": 7},
            {"name": "dflow-norelay", "relay": False, "max_draft_tokens": 7},
        ]
        assert (await server.http.get("/v1/models/demo")).json() == model

    served(test)


@pytest.mark.parametrize(("beat", "says"), [(31.0, "stands still for 31 s"), (None, "not loaded")])
def test_health_needs_the_loops_heartbeat(beat: float | None, says: str) -> None:
    """A process that died leaves Triton's own readiness as it was."""

    async def test(server: Served) -> None:
        assert says in error_of(await server.http.get("/health"), 503)["message"]

    served(test, beat=beat)


def test_health_is_the_models() -> None:
    async def test(server: Served) -> None:
        assert (await server.http.get("/health")).status_code == 200
        server.triton.ready = False
        error_of(await server.http.get("/health"), 503)

    served(test)


def test_metrics_are_tritons() -> None:
    async def test(server: Served) -> None:
        response = await server.http.get("/metrics")
        assert response.text.startswith("# http://127.0.0.1:1/metrics\n")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")

    served(test)


def test_the_page_comes_whole_and_loads_nothing_from_elsewhere() -> None:
    async def test(server: Served) -> None:
        page = await server.http.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        for path in ("/page.css", "/page.js"):
            part = await server.http.get(path)
            assert path.removeprefix("/") in page.text
            assert part.status_code == 200
            assert "http://" not in part.text.replace("http://www.w3.org", "")
            assert "https://" not in part.text

    served(test)


# -- clients that leave ------------------------------------------------------------------------------------------------


async def _settled(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not reached():
            await asyncio.sleep(0.005)


async def _leave(server: Served, body: dict[str, Any], leave: asyncio.Event) -> list[dict[str, Any]]:
    """A raw ASGI request whose client goes when ``leave`` is set; what it was sent until then."""
    sent: list[dict[str, Any]] = []
    given = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if given:
            return given.pop()
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    await server.app(scope | {"asgi": {"spec_version": "2.3"}, "server": ("here", 80)}, receive, send)
    return sent


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token_frees_the_model(stream: bool) -> None:
    async def test(server: Served) -> None:
        server.triton.gate, leave = asyncio.Semaphore(0), asyncio.Event()
        asking = asyncio.create_task(_leave(server, {"prompt": ["1", "2"], "stream": stream}, leave))
        await _settled(lambda: len(server.triton.asked) == 2)
        leave.set()
        sent = await asking
        assert sent[0]["status"] == 499
        await _settled(lambda: len(server.triton.stopped) == 2)

    served(test)


def test_a_client_that_leaves_a_stream_frees_the_model() -> None:
    async def test(server: Served) -> None:
        server.triton.gate, leave = asyncio.Semaphore(3), asyncio.Event()
        asking = asyncio.create_task(_leave(server, {"prompt": "1", "stream": True}, leave))
        gate = server.triton.gate
        await _settled(lambda: bool(server.triton.asked) and gate.locked())
        leave.set()
        sent = await asking
        assert sent[0]["status"] == 200
        assert sum(b"data: {" in message.get("body", b"") for message in sent) <= 3
        await _settled(lambda: len(server.triton.stopped) == 1)

    served(test, lambda asked: [Sample([20] * 10_000, [0] * 9_999)])
