"""Triton's ``dflow`` model over gRPC: a job goes in, updates come out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import InferInput, InferRequestedOutput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException, deserialize_bytes_tensor, triton_to_np_dtype

from dflow_trt.errors import UserError
from dflow_trt.serving import tensors as t
from dflow_trt.serving.openai.errors import ApiError
from dflow_trt.serving.openai.protocol import refused
from dflow_trt.serving.openai.translate import Array, Job, Update, feeds, fetches, updates

READY_SECONDS = 5.0
FIRST_PAUSE, LAST_PAUSE = 0.02, 1.0  # seconds between two stops of one job
GRACE_SECONDS = 5.0  # behind the model's own deadline: so long a model that is gone is waited for
# How the model begins to say what Triton has no code of its own for.
FULL, LATE = "the queue is full", "timed out in the queue"
TIMED_OUT = "the request took longer than this server allows"


class Backend:
    """One server's ``dflow`` model, shared by all requests of one event loop.

    timeout: seconds that the model gives a request.
    """

    def __init__(self, client: InferenceServerClient, timeout: float) -> None:
        self._client, self._deadline = client, timeout + GRACE_SECONDS
        self._ending: set[asyncio.Task[None]] = set()

    async def run(self, request_id: str, job: Job) -> AsyncGenerator[Update, None]:
        """The updates of a job. ApiError says why there is no more of them. Read it to its end; see :meth:`end`."""
        try:
            async for result, error in self._client.stream_infer(_once(_request(request_id, job)), self._deadline):
                if error is not None:
                    raise ApiError(503, error.message())  # of Triton itself: the model is gone, for example
                for update in updates(_arrays(result.get_response())):
                    yield _checked(update)
        except grpc.aio.AioRpcError as error:
            late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            raise ApiError(504, TIMED_OUT) if late else ApiError(503, error.details() or "") from None

    def end(self, request_id: str, running: asyncio.Task[None]) -> None:
        """Have the model end a job that ``running`` still reads, which then gets to the end of it.

        tritonserver (2.51) loses count of requests whose stream is cancelled, and waits for them when it stops.
        """
        ending = asyncio.create_task(self._end(request_id, running))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _end(self, request_id: str, running: asyncio.Task[None]) -> None:
        """Again and again: the job itself may still be on its way."""
        pause = FIRST_PAUSE
        while not running.done():
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in self._client.stream_infer(_once(_stop(request_id)), READY_SECONDS):
                    pass
            await asyncio.wait({running}, timeout=pause)
            pause = min(2 * pause, LAST_PAUSE)

    async def settle(self) -> None:
        """Wait, not for long, until jobs that were to end have ended."""
        if self._ending:
            await asyncio.wait(set(self._ending), timeout=GRACE_SECONDS)

    async def ready(self) -> bool:
        """Whether server and model take requests, and the model answers."""
        try:
            server = await self._client.is_server_ready(client_timeout=READY_SECONDS)
            return bool(server and await self._client.is_model_ready(t.DFLOW.name, client_timeout=READY_SECONDS))
        except InferenceServerException:
            return False


def _request(request_id: str, job: Job) -> dict[str, Any]:
    """As dflow_bls would ask: with a handle, by which the job can be ended, and which has errors come with their code.

    Triton's streams give no code, but for the header triton_grpc_error, whose way of ending them crashes it (2.51).
    """
    task = {t.TASK_PARAMETER: job.task} if job.task else {}
    return {
        "model_name": t.DFLOW.name,
        "inputs": [_input(tensor, array) for tensor, array in feeds(job)],
        "outputs": [InferRequestedOutput(name) for name in fetches(job)],
        "request_id": request_id,
        "parameters": {t.HANDLE_PARAMETER: request_id, **task},
    }


def _stop(request_id: str) -> dict[str, Any]:
    """Ends the job of that handle; the other inputs do not matter, but must be there."""
    required = [(tensor, np.zeros((1, 1), np.int32)) for tensor in (t.INPUT_IDS, t.MAX_TOKENS)]
    return {
        "model_name": t.DFLOW.name,
        "inputs": [_input(tensor, array) for tensor, array in [*required, (t.STOP, np.ones((1, 1), np.bool_))]],
        "outputs": [InferRequestedOutput(t.FINISH_REASON.name)],
        "parameters": {t.HANDLE_PARAMETER: request_id},
    }


async def _once(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield request


def _input(tensor: t.Tensor, array: Array) -> InferInput:
    kind = "BYTES" if tensor.type == "STRING" else tensor.type
    return InferInput(tensor.name, list(array.shape), kind).set_data_from_numpy(array)


def _arrays(response: Any) -> dict[str, Array]:
    """Every output by name."""
    raw = zip(response.outputs, response.raw_output_contents, strict=True)
    return {output.name: _array(output.datatype, content) for output, content in raw}


def _array(kind: str, content: bytes) -> Array:
    if kind == "BYTES":
        return np.asarray(deserialize_bytes_tensor(content))
    return np.frombuffer(content, triton_to_np_dtype(kind))


def _checked(update: Update) -> Update:
    """Only a sample that goes on, or ended by itself, is an answer."""
    if update.finish_reason == "error":
        raise _refusal(update.text)
    if update.finish_reason == "timeout":
        raise ApiError(504, TIMED_OUT)
    if update.finish_reason == "cancelled":
        raise ApiError(503, "the server ended the request; send it again")
    return update


def _refusal(error: str) -> ApiError:
    """What the model refused, from "CODE: message"."""
    code, _, message = error.partition(": ")
    if code == "INVALID_ARG":
        return refused(UserError(message))
    if code == "UNAVAILABLE":
        if message.startswith(LATE):
            return ApiError(504, TIMED_OUT)
        return ApiError(429 if message.startswith(FULL) else 503, message)
    return ApiError(500, message)
