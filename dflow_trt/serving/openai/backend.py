"""Triton's ``dflow`` model over gRPC: a job goes in, updates come out. Leaving early cancels the job there."""

from __future__ import annotations

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
from dflow_trt.serving.openai.protocol import invalid
from dflow_trt.serving.openai.translate import Array, Job, Update, feeds, fetches, updates

READY_SECONDS = 5.0
GRACE_SECONDS = 5.0  # behind the model's own deadline: so long a model that is gone is waited for
# How the model begins to say what Triton has no code of its own for.
FULL, LATE, LONG = "the queue is full", "timed out in the queue", "the prompt has "
TIMED_OUT = "the request took longer than this server allows"


class Backend:
    """One server's ``dflow`` model, shared by all requests of one event loop.

    timeout: seconds that the model gives a request.
    """

    def __init__(self, client: InferenceServerClient, timeout: float) -> None:
        self._client, self._timeout = client, timeout

    async def run(self, request_id: str, job: Job) -> AsyncGenerator[Update, None]:
        """The updates of a job. ApiError says why there is no more of them."""
        call = self._client.stream_infer(_once(_request(request_id, job)), self._timeout + GRACE_SECONDS)
        refused: ApiError | None = None
        try:
            async for result, error in call:  # to its end behind an error, too
                if error is not None:
                    refused = _refusal(error.message())
                    continue
                for update in updates(_arrays(result.get_response())):
                    yield _checked(update)
        except grpc.aio.AioRpcError as error:
            late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            raise ApiError(504, TIMED_OUT) if late else ApiError(503, error.details() or "") from None
        finally:
            call.cancel()
        if refused is not None:
            raise refused

    async def ready(self) -> bool:
        """Whether server and model take requests, and the model answers."""
        try:
            server = await self._client.is_server_ready(client_timeout=READY_SECONDS)
            return bool(server and await self._client.is_model_ready(t.DFLOW.name, client_timeout=READY_SECONDS))
        except InferenceServerException:
            return False


def _request(request_id: str, job: Job) -> dict[str, Any]:
    """As a model of the repository would ask: a handle has errors come with their code in front.

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
    if update.finish_reason == "timeout":
        raise ApiError(504, TIMED_OUT)
    if update.finish_reason in ("cancelled", "error"):
        raise ApiError(
            503 if update.finish_reason == "cancelled" else 500, f"the model ended it: {update.finish_reason}"
        )
    return update


def _refusal(error: str) -> ApiError:
    """What the model refused, from "CODE: message"; what comes without a code is Triton's own trouble."""
    code, _, message = error.partition(": ")
    if code == "INVALID_ARG":
        refused = invalid(UserError(message))
        refused.code = "context_length_exceeded" if message.startswith(LONG) else refused.code
        return refused
    if code == "UNAVAILABLE":
        if message.startswith(LATE):
            return ApiError(504, TIMED_OUT)
        return ApiError(429 if message.startswith(FULL) else 503, message)
    return ApiError(500, message if code == "INTERNAL" else error)
