"""The OpenAI endpoint of ``dflow-trt serve``: server-sent events, a chunk a round."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx

from dflow_trt.errors import UserError
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
            drafts = {each["name"]: each["max_draft_tokens"] for each in offered["strategies"]}
            return Facts(model["id"], offered["backend"], drafts)
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
        is_round = False  # what comes first is of the prefill
        try:
            async with self._http.stream("POST", path, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    _refuse(asked, response.status_code, await response.aread())
                async for event in _events(response):
                    yield _piece(event, is_round)
                    is_round = True
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
        "stream_options": {"include_drafts": True},
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


def _piece(event: dict[str, Any], is_round: bool) -> Piece:
    """A chunk as a piece."""
    [choice], drafts = event["choices"], event["dflow"]
    return Piece(
        choice["token_ids"], drafts["num_accepted"], drafts.get("num_drafted"), is_round, choice["finish_reason"]
    )


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
