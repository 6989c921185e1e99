"""The endpoint as an ASGI application: routes, streams, errors, and who may ask."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from email.message import Message
from importlib.resources import files
from typing import Any, TypeVar

import httpx
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dflow_trt.bundle import Bundle
from dflow_trt.errors import UserError
from dflow_trt.serving.openai.answers import Answer, ChatForm, CompletionForm, Form, JsonObject, Wanted
from dflow_trt.serving.openai.backend import Backend
from dflow_trt.serving.openai.errors import CLIENT_GONE, ApiError
from dflow_trt.serving.openai.protocol import AnyRequest, ChatRequest, CompletionRequest, parse, refused
from dflow_trt.serving.openai.translate import Job, Update, jobs
from dflow_trt.serving.options import StrategyChooser
from dflow_trt.serving.probe import heartbeat_age
from dflow_trt.text import Tokenizer

Handler = Callable[[Request], Awaitable[Response]]
Result = TypeVar("Result")

METRICS_SECONDS = 10.0
HEARTBEAT_SECONDS = 30.0  # older than that, the model's loop hangs or is gone; it beats every second, idle or not
ENDING = "the server is ending; send the request to another, or again later"
INTERNAL = "something went wrong here; the server's log says what"
_log = logging.getLogger(__name__)
_PAGE = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
# The page loads nothing from elsewhere, and what models write is never markup.
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(frozen=True)
class Settings:
    """How the endpoint presents itself.

    metrics_address: of Triton's. api_key: what clients must send, or None. hosts: the names by which it may be asked
    without a key, or None for any. strategy: of requests that name none, by default the bundle's best. shares: of those
    requests, the share that another strategy gets.
    """

    model_name: str
    metrics_address: str
    max_request_bytes: int
    api_key: str | None = None
    hosts: Collection[str] | None = None
    strategy: str | None = None
    shares: Mapping[str, float] = field(default_factory=dict)


class Generation:
    """The jobs of one request, all at once, their updates merged as they come. :meth:`cancel` it if nobody reads on.

    It is among ``running`` until then. open: its sequences that have not ended.
    """

    def __init__(self, backend: Backend, request_id: str, jobs: Sequence[Job], running: set[Generation]) -> None:
        self._backend, self._running = backend, running
        self.open = sum(job.params.n for job in jobs)
        running.add(self)
        self._merged: asyncio.Queue[tuple[int, Update] | ApiError | None] = asyncio.Queue()
        self._tasks = {
            f"{request_id}-{i}": asyncio.create_task(self._pump(f"{request_id}-{i}", i, job))
            for i, job in enumerate(jobs)
        }

    async def _pump(self, request_id: str, index: int, job: Job) -> None:
        end: ApiError | None = None
        ended = 0
        try:
            async for update in self._backend.run(request_id, job):
                ended += update.finish_reason is not None
                self.open -= update.finish_reason is not None
                self._merged.put_nowait((index, update))
            if ended < job.params.n:  # how a stream ends whose model's process was lost
                end = ApiError(503, "the model was lost while it answered; send the request again")
        except ApiError as error:
            end = error
        except Exception:
            _log.exception("request %s", request_id)
            end = ApiError(500, INTERNAL)
        self._merged.put_nowait(end)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Update]]:
        """(index of the job, update) until all have ended; the first error ends all."""
        running = len(self._tasks)
        while running:
            item = await self._merged.get()
            if isinstance(item, ApiError):
                raise item
            if item is None:
                running -= 1
            else:
                yield item

    def abort(self) -> None:
        """End it, with an error for who reads it."""
        self._merged.put_nowait(ApiError(503, ENDING))
        self.cancel()

    def cancel(self) -> None:
        """End what still runs; the model hears of it at once."""
        self._running.discard(self)
        for request_id, task in self._tasks.items():
            if not task.done():
                self._backend.end(request_id, task)


class EventStream(StreamingResponse):
    """Server-sent events; when the client is gone, or all is said, the generation ends."""

    def __init__(self, events: AsyncIterator[str], generation: Generation, headers: dict[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={**_STREAM_HEADERS, **headers})
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.cancel()


class Endpoint:
    """The routes' handlers, over one bundle and its model."""

    def __init__(
        self, bundle: Bundle, tokenizer: Tokenizer | None, backend: Backend, http: httpx.AsyncClient, settings: Settings
    ) -> None:
        self._bundle, self._tokenizer, self._backend = bundle, tokenizer, backend
        self._http, self._settings = http, settings
        self._chooser = StrategyChooser(bundle, settings.strategy, settings.shares)
        self._created = int(time.time())
        self._running: set[Generation] = set()
        self._ending = False

    @property
    def open_sequences(self) -> int:
        """How many sequences run or wait for requests of this endpoint."""
        return sum(generation.open for generation in self._running)

    def abort(self) -> None:
        """End all that runs with an error, and whatever comes yet."""
        self._ending = True
        for generation in list(self._running):
            generation.abort()

    def guarded(self, handler: Handler) -> Handler:
        """The handler, for those who may ask."""

        async def checked(request: Request) -> Response:
            self._check_key(request)
            return await handler(request)

        return checked

    def _check_key(self, request: Request) -> None:
        """The key; without one, that no other site's name was made to point here, whose page then could ask."""
        key, hosts = self._settings.api_key, self._settings.hosts
        if key is not None:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not _same(given.strip(), key):
                raise ApiError(401, "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'")
        elif hosts is not None and request.url.hostname not in hosts:
            raise ApiError(403, f"host {request.url.hostname!r}: allowed without --api-key: {', '.join(sorted(hosts))}")

    # -- generating --------------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest, CompletionForm())

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest, ChatForm())

    async def _generate(self, request: Request, kind: type[AnyRequest], form: Form) -> Response:
        asked = parse(kind, await _body(request, self._settings.max_request_bytes))
        self._check_model(asked.model)
        todo = await self._jobs(asked)
        answer = Answer(form, self._settings.model_name, self._fingerprint, todo, self._tokenizer, _wanted(asked))
        if self._ending:
            raise ApiError(503, ENDING)
        generation = Generation(self._backend, answer.id, todo, self._running)
        if asked.streams is None:
            return await _whole(request, answer, generation)
        return await _stream(request, answer, generation, asked.streams.include_usage)

    async def _jobs(self, asked: CompletionRequest | ChatRequest) -> list[Job]:
        """In a thread: a long text takes its time to encode, and others are waiting."""
        try:
            return await asyncio.to_thread(jobs, asked, self._bundle, self._tokenizer, self._chooser)
        except UserError as error:
            raise refused(error) from None

    @property
    def _fingerprint(self) -> str:
        return f"dflow-{self._bundle.target_fingerprint[:12]}"

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._settings.model_name):
            message = f"model {name!r} does not exist here; this server has {self._settings.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    # -- everything else ---------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return _json(self._model())

    def _model(self) -> JsonObject:
        """OpenAI's fields, vLLM's max_model_len, and in ``dflow`` what a client may choose."""
        bundle = self._bundle
        return {
            "id": self._settings.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "dflow-trt",
            "max_model_len": bundle.build.max_seq_len,
            "dflow": {
                "strategies": [self._strategy(name) for name in bundle.strategies],
                "default_strategy": bundle.strategy(self._settings.strategy).name,
                "max_input_len": bundle.build.max_input_len,
                "backend": bundle.build.backend,
            },
        }

    def _strategy(self, name: str) -> JsonObject:
        strategy = self._bundle.strategies[name]
        spec = self._bundle.drafters[strategy.drafter].spec if strategy.drafter is not None else None
        return {"name": name, "relay": strategy.relay, "max_draft_tokens": spec.num_drafts if spec else 0}

    async def health(self, request: Request) -> Response:
        """A model whose process died stays ready to Triton: its loop's heartbeat tells."""
        if not await self._backend.ready():
            raise ApiError(503, "not ready: tritonserver or its model does not take requests")
        try:
            age = await self.heartbeat_age()
        except UserError as error:
            raise ApiError(503, f"not ready: {error}") from None
        if age > HEARTBEAT_SECONDS:
            raise ApiError(503, f"not ready: the model's loop stands still for {age:.0f} s")
        return _json({"status": "ready"})

    async def heartbeat_age(self) -> float:
        """Seconds since the model's loop last showed that it turns. ApiError or UserError where nothing tells."""
        return heartbeat_age((await self._metrics()).text, time.time())

    async def metrics(self, request: Request) -> Response:
        """Triton's own page, as it is."""
        page = await self._metrics()
        return Response(page.content, page.status_code, media_type=page.headers.get("content-type"))

    async def _metrics(self) -> httpx.Response:
        try:
            return await self._http.get(f"http://{self._settings.metrics_address}/metrics", timeout=METRICS_SECONDS)
        except httpx.HTTPError as error:
            raise ApiError(503, f"Triton gives no metrics: {error}") from None


def build_app(endpoint: Endpoint) -> Starlette:
    """The application that uvicorn runs."""
    guarded = endpoint.guarded
    return Starlette(
        routes=[
            Route("/v1/completions", guarded(endpoint.completions), methods=["POST"]),
            Route("/v1/chat/completions", guarded(endpoint.chat), methods=["POST"]),
            Route("/v1/models", guarded(endpoint.models)),
            Route("/v1/models/{name:path}", guarded(endpoint.model)),
            Route("/metrics", guarded(endpoint.metrics)),
            Route("/health", endpoint.health),
            *(Route(path, _page(*page)) for path, page in _PAGE.items()),
        ],
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: _client_gone,
            Exception: _internal_error,
        },
    )


# -- answers -------------------------------------------------------------------------------------------------------


def _wanted(asked: CompletionRequest | ChatRequest) -> Wanted:
    streams = asked.streams
    return Wanted(
        logprobs=asked.num_logprobs() is not None,
        ids=bool(asked.return_token_ids),
        drafts=streams is not None and streams.include_drafts,
        usage=streams is not None and streams.include_usage,
        running_usage=streams is not None and streams.continuous_usage_stats,
    )


async def _whole(request: Request, answer: Answer, generation: Generation) -> Response:
    async def collect() -> None:
        async for job, update in generation:
            answer.add(job, update)

    try:
        await _while_connected(request, collect())
    finally:
        generation.cancel()
    return _json(answer.body(), headers=_named(answer))


async def _stream(request: Request, answer: Answer, generation: Generation, usage: bool) -> Response:
    """Begins with the first update: what is refused before it has a status of its own."""
    updates = aiter(generation)

    async def first() -> tuple[int, Update]:
        return await anext(updates)

    try:
        begun = await _while_connected(request, first())
    except BaseException:
        generation.cancel()
        raise
    return EventStream(_events(answer, begun, updates, usage), generation, _named(answer))


async def _events(
    answer: Answer, first: tuple[int, Update], rest: AsyncIterator[tuple[int, Update]], usage: bool
) -> AsyncIterator[str]:
    try:
        yield _event(answer.add(*first))
        async for job, update in rest:
            yield _event(answer.add(job, update))
        if usage:
            yield _event(answer.usage_chunk())
    except ApiError as error:
        yield _event(error.body)
    yield "data: [DONE]\n\n"


def _event(data: JsonObject) -> str:
    return f"data: {_dumped(data)}\n\n"


def _dumped(data: JsonObject) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def _json(data: JsonObject, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_dumped(data), status, headers, "application/json")


def _named(answer: Answer) -> dict[str, str]:
    return {"x-request-id": answer.id}


async def _while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result, unless the client leaves first."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request, limit: int) -> bytes:
    """The body, read no further than the limit; JSON alone, which no page of another site can send unasked."""
    _check_form(request.headers)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise _too_large(limit)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
    return b"".join(parts)


def _check_form(headers: Headers) -> None:
    """ApiError for a body that is no JSON in UTF-8, or compressed: the limit is of what is sent."""
    content = Message()
    content["content-type"] = headers.get("content-type", "")
    kind, charset = content.get_content_type() if content["content-type"] else "missing", content.get_content_charset()
    if kind != "application/json":
        raise ApiError(415, f"content-type is {kind}; send application/json")
    if charset not in (None, "utf-8", "utf8"):
        raise ApiError(415, f"charset is {charset}; send UTF-8")
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise ApiError(415, f"content-encoding is {coding}; send the body as it is")


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request is larger than {limit} bytes; send less, or raise --max-request-bytes")


def _same(given: str, key: str) -> bool:
    """In a time that tells nothing about the key, nor about its length."""
    return hmac.compare_digest(*(hashlib.sha256(text.encode()).digest() for text in (given, key)))


def _page(name: str, kind: str) -> Handler:
    content = (files("dflow_trt.serving") / "page" / name).read_bytes()

    async def page(request: Request) -> Response:
        return Response(content, media_type=kind, headers=_PAGE_HEADERS)

    return page


# -- errors --------------------------------------------------------------------------------------------------------


def _refused(error: ApiError) -> Response:
    return _json(error.body, error.status, error.headers)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _refused(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = "no such path" if error.status_code == 404 else error.detail
    return _refused(ApiError(error.status_code, f"{request.method} {request.url.path}: {what}"))


async def _client_gone(request: Request, error: Exception) -> Response:
    return _refused(ApiError(CLIENT_GONE, "the client left"))


async def _internal_error(request: Request, error: Exception) -> Response:
    return _refused(ApiError(500, INTERNAL))
