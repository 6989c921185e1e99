"""A client of the Triton models for tests: options by name in, what every response said out."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import numpy as np
from tritonclient.grpc import InferInput, InferRequestedOutput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from dflow_trt.serving import tensors as t
from dflow_trt.serving.responses import DTYPES
from dflow_trt.serving.server import TritonServer

MODELS = {model.name: model for model in t.MODELS}
SECONDS = 60.0


@dataclass
class Answer:
    """One request's responses. finals: how many carried the final flag. code, message: of an error."""

    responses: list[dict[str, list[Any]]] = field(default_factory=list)
    shapes: list[dict[str, list[int]]] = field(default_factory=list)
    finals: int = 0
    code: str | None = None
    message: str | None = None

    def texts(self) -> dict[int, str]:
        """By sequence."""
        found: dict[int, bytes] = defaultdict(bytes)
        for response in self.responses:
            for index, text in zip(response["sequence_index"], response["text_output"], strict=True):
                found[index] += text
        return {index: text.decode() for index, text in found.items()}

    def ids(self) -> dict[int, list[int]]:
        """By sequence; a response with several has those of each in turn."""
        found: dict[int, list[int]] = defaultdict(list)
        for response in self.responses:
            indices, ids = response["sequence_index"], list(response["output_ids"])
            counts = response["num_output_tokens"] if len(indices) > 1 else [len(ids)]
            for index, count in zip(indices, counts, strict=True):
                found[index] += ids[:count]
                del ids[:count]
        return dict(found)

    @property
    def text(self) -> str:
        return self.texts()[0]

    def last(self, name: str) -> Any:
        return self.responses[-1][name][0]


def infer_input(model: str, name: str, value: Any) -> InferInput:
    """A value, or a list of them, as [1, ...]."""
    tensor = next(tensor for tensor in MODELS[model].inputs if tensor.name == name)
    items = list(value) if isinstance(value, list | tuple | np.ndarray) else [value]
    if tensor.type == "STRING":
        items = [item.encode() if isinstance(item, str) else item for item in items]
    array = np.array([items], DTYPES[tensor.type])
    kind = "BYTES" if tensor.type == "STRING" else tensor.type
    return InferInput(name, list(array.shape), kind).set_data_from_numpy(array)


def infer_inputs(model: str, options: Mapping[str, Any]) -> list[InferInput]:
    return [infer_input(model, name, value) for name, value in options.items()]


async def ask(
    client: InferenceServerClient,
    model: str,
    options: Mapping[str, Any],
    *,
    request_id: str = "",
    parameters: Mapping[str, Any] | None = None,
    outputs: list[str] | None = None,
    on_response: Callable[[Answer], Awaitable[bool]] | None = None,
    codes: bool = False,
    seconds: float = SECONDS,
) -> Answer:
    """All responses of one request. on_response: called after each; False leaves, which cancels.

    codes: have an error come with its code; it then ends the stream.
    """
    answer = Answer()

    async def once() -> AsyncIterator[dict[str, Any]]:
        yield {
            "model_name": model,
            "inputs": infer_inputs(model, options),
            "outputs": [InferRequestedOutput(name) for name in outputs] if outputs else None,
            "request_id": request_id,
            "parameters": dict(parameters or {}),
            "enable_empty_final_response": True,
        }

    call = client.stream_infer(once(), seconds, {"triton_grpc_error": "true"} if codes else None)
    try:
        async for result, error in call:
            if error is not None:
                answer.message = error.message()
                return answer
            _record(answer, result)
            if on_response is not None and not await on_response(answer):
                return answer
    except grpc.aio.AioRpcError as error:
        answer.code, answer.message = error.code().name, error.details()
    except InferenceServerException as error:
        answer.code, answer.message = str(error.status()), error.message()
    except asyncio.CancelledError:
        answer.message = "cancelled here"
    finally:
        call.cancel()
    return answer


def _record(answer: Answer, result: Any) -> None:
    response = result.get_response()
    answer.finals += response.parameters["triton_final_response"].bool_param
    names = [output.name for output in response.outputs]
    if names:
        answer.responses.append({name: result.as_numpy(name).reshape(-1).tolist() for name in names})
        answer.shapes.append({output.name: list(output.shape) for output in response.outputs})


# -- a server ----------------------------------------------------------------------------------------------------------


def run(server: TritonServer, work: Callable[[InferenceServerClient], Awaitable[Any]]) -> Any:
    async def connected() -> Any:
        async with InferenceServerClient(server.grpc_address) as client:
            return await work(client)

    return asyncio.run(connected())


def one(server: TritonServer, model: str, options: dict[str, Any], **more: Any) -> Answer:
    answer: Answer = run(server, lambda client: ask(client, model, options, **more))
    return answer


def metrics(server: TritonServer) -> dict[str, float]:
    lines = httpx.get(f"http://{server.metrics_address}/metrics").text.splitlines()
    pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def until(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
