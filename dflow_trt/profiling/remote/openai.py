"""The OpenAI endpoint of ``dflow-trt serve``: server-sent events, a chunk a round."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx

from dflow_trt.errors import UserError
from dflow_trt.method.draft import draft_length
from dflow_trt.profiling.measure import Asked
from dflow_trt.profiling.record import Point
from dflow_trt.profiling.remote.base import Facts, Piece, RequestFailed
from dflow_trt.profiling.session import Lost
from dflow_trt.serving.openai.protocol import TASK

SECONDS = 600.0  # of silence, after which a request has failed
PREFIX = "data: "


class OpenAiChannel:
    """url: of the server, without /v1."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=SECONDS, limits=limits)
        self._drafts: dict[str, int | None] = {}

    async def facts(self) -> Facts:
        """What /v1/models says; UserError where it is no server of this project."""
        try:
            response = await self._http.get("/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UserError(
                f"--url: {self.url}: no server answers ({_reason(error)}); start it, or correct it"
            ) from None
        if response.status_code != httpx.codes.OK:
            raise UserError(f"--url: {self.url}: {_message(response.status_code, response.content)}")
        try:
            [model] = response.json()["data"]
            offered = model["dflow"]
            self._drafts = {each["name"]: each["max_draft_tokens"] for each in offered["strategies"]}
            return Facts(model["id"], offered["backend"], self._drafts)
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"--url: {self.url}: its /v1/models names no strategies; profile a server started by dflow-trt serve"
            ) from None

    async def ask(self, point: Point, asked: Asked) -> AsyncGenerator[Piece, None]:
        """See :class:`~dflow_trt.profiling.remote.base.Channel`."""
        kind, path = asked.item.kind, "/v1/completions"
        body = _body(point, asked)
        if kind == "messages":
            path, body["messages"] = "/v1/chat/completions", asked.item.prompt[kind]
        else:
            body["prompt"] = asked.item.prompt[kind]
        lengths = _Lengths(point, asked, self._drafts.get(point.strategy))
        try:
            async with self._http.stream("POST", path, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    _refuse(asked, response.status_code, await response.aread())
                async for event in _events(response):
                    yield lengths.piece(event)
        except httpx.TimeoutException as error:
            raise RequestFailed(_reason(error)) from None
        except httpx.TransportError as error:
            raise Lost(f"{self.url}: the server went away ({_reason(error)})") from None

    async def close(self) -> None:
        """Nothing is asked any more."""
        await self._http.aclose()


def _body(point: Point, asked: Asked) -> dict[str, Any]:
    params, task = asked.params, asked.item.task
    body: dict[str, Any] = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "seed": params.seed,
        "stream": True,
        "stream_options": {"include_usage": True, "include_drafts": True},
        "return_token_ids": True,
        "strategy": point.strategy,
    }
    body |= {"draft_tokens": point.draft_tokens} if point.draft_tokens is not None else {}
    body |= {"ignore_eos": True} if params.ignore_eos else {}
    return body | ({"metadata": {"task": task}} if TASK.fullmatch(task) else {})


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The stream's objects. RequestFailed for an error among them."""
    async for line in response.aiter_lines():
        if not line.startswith(PREFIX) or line == f"{PREFIX}[DONE]":
            continue
        event: dict[str, Any] = json.loads(line.removeprefix(PREFIX))
        if "error" in event:
            raise RequestFailed(event["error"]["message"])
        yield event


class _Lengths:
    """Chunks as pieces. They do not say how many drafts their round verified; where every round verifies all that may
    count, which the usage at the end confirms or not, it follows from what is left of max_tokens."""

    def __init__(self, point: Point, asked: Asked, num_drafts: int | None) -> None:
        self._num_drafts, self._draft_tokens = num_drafts, point.draft_tokens
        self._left, self._first = asked.params.max_tokens, True

    def piece(self, event: dict[str, Any]) -> Piece:
        if not event["choices"]:
            details = event["usage"]["completion_tokens_details"]
            total = details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
            return Piece(is_round=False, total_drafted=total)
        [choice] = event["choices"]
        ids, drafts = choice["token_ids"], event["dflow"]
        drafted = 0 if self._first else self._drafted()
        self._left -= len(ids)
        self._first, is_round = False, not self._first
        return Piece(ids, drafts["num_accepted"], drafted, is_round, choice["finish_reason"])

    def _drafted(self) -> int | None:
        if self._num_drafts is None:
            return None
        return draft_length(self._num_drafts, self._left, self._draft_tokens) if self._num_drafts else 0


def _refuse(asked: Asked, status: int, content: bytes) -> None:
    message = _message(status, content)
    if status in (429, 500, 504):
        raise RequestFailed(message)
    if status == 503:
        raise Lost(f"the server takes no requests any more: {message}")
    raise UserError(f"{asked.item.where}: the server refuses it: {message}")


def _message(status: int, content: bytes) -> str:
    try:
        return f"{status}, {json.loads(content)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"status {status}"


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
