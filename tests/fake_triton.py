"""A scripted ``dflow`` model behind tritonclient's interface: requests in and responses out are its real messages.

The script says which tokens a sample gets and how many drafts each round accepts; everything around them (text that
holds back stop strings, one response a round or one in all, log-probabilities) is as the real model does it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import InferResult, service_pb2
from tritonclient.utils import (
    InferenceServerException,
    deserialize_bytes_tensor,
    serialize_byte_tensor,
    triton_to_np_dtype,
)

from dflow_trt.serving import tensors as t
from dflow_trt.text import TextStream, Tokenizer

Outputs = dict[str, list[Any]]
TENSORS = {tensor.name: tensor for tensor in t.DFLOW.outputs}


@dataclass(frozen=True)
class Asked:
    """A request as the model gets it: inputs by name, flat."""

    id: str
    inputs: dict[str, list[Any]]
    outputs: frozenset[str]
    parameters: dict[str, str]

    def value(self, name: str, default: Any = None) -> Any:
        return self.inputs[name][0] if name in self.inputs else default


@dataclass(frozen=True)
class Sample:
    """What one sample gives. rounds: the accepted drafts of each; the first token comes before them. drafted: the
    drafts of each, 7 unless said otherwise."""

    ids: Sequence[int]
    rounds: Sequence[int] = ()
    reason: str = "length"
    drafted: Sequence[int] | None = None


class Failure(Exception):
    """A request fails: in the model, with one of its codes; else in Triton, by ``lost`` with its whole stream."""

    def __init__(self, code: str, message: str, lost: grpc.StatusCode | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.lost = code, message, lost


Script = Callable[[Asked], Sequence[Sample]]


@dataclass
class FakeTriton:
    """The client. gate: each response but a failure takes one. asked, stopped: what it was asked, and what it ended."""

    tokenizer: Tokenizer
    script: Script
    ready: bool = True
    gate: asyncio.Semaphore | None = None
    asked: list[Asked] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    stops: dict[str, asyncio.Event] = field(default_factory=dict)

    async def is_server_ready(self, client_timeout: float | None = None) -> bool:
        return self.ready

    async def is_model_ready(self, name: str, client_timeout: float | None = None) -> bool:
        assert name == t.DFLOW.name
        return self.ready

    def stream_infer(self, requests: AsyncIterator[dict[str, Any]], timeout: float) -> FakeCall:
        assert timeout > 0
        return FakeCall(self, requests)


class FakeCall:
    """One stream: a request, then its responses."""

    def __init__(self, client: FakeTriton, requests: AsyncIterator[dict[str, Any]]) -> None:
        self._client, self._requests = client, requests

    async def __aiter__(self) -> AsyncIterator[tuple[InferResult | None, InferenceServerException | None]]:
        async for request in self._requests:
            asked = _asked(request)
            if asked.value("stop", False):
                self._client.stops[asked.parameters["handle"]].set()
                return
            self._client.asked.append(asked)
            stop = self._client.stops.setdefault(asked.parameters["handle"], asyncio.Event())
            try:
                for outputs in self._responses(asked):
                    if outputs["finish_reason"] != ["error"] and await self._ended(stop):
                        self._client.stopped.append(asked.id)
                        return
                    yield InferResult(_message({n: v for n, v in outputs.items() if n in asked.outputs})), None
            except Failure as failure:
                if failure.lost is None:
                    yield None, InferenceServerException(failure.message)
                    return
                nothing = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(failure.lost, nothing, nothing, failure.message) from None

    def _responses(self, asked: Asked) -> Iterator[Outputs]:
        try:
            yield from _responses(asked, self._client.script(asked), self._client.tokenizer)
        except Failure as failure:
            if not failure.code:
                raise
            yield _failed(failure)

    async def _ended(self, stop: asyncio.Event) -> bool:
        """Waits for the gate; True where the request was stopped meanwhile, or before."""
        if self._client.gate is None:
            return stop.is_set()
        waits = [asyncio.create_task(self._client.gate.acquire()), asyncio.create_task(stop.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()
        return stop.is_set()


def _asked(request: dict[str, Any]) -> Asked:
    assert request["model_name"] == t.DFLOW.name
    declared = {tensor.name: tensor for tensor in t.DFLOW.inputs}
    inputs = {}
    for each in request["inputs"]:
        tensor, shape = declared[each.name()], each.shape()
        assert each.datatype() == ("BYTES" if tensor.type == "STRING" else tensor.type)
        assert shape[0] == 1, "max_batch_size is 1"
        assert len(shape) == 2
        inputs[each.name()] = _values(each.datatype(), each._get_content())
    outputs = frozenset(each.name() for each in request["outputs"])
    assert outputs <= TENSORS.keys()
    return Asked(request.get("request_id", ""), inputs, outputs, request["parameters"] or {})


def _values(kind: str, content: bytes) -> list[Any]:
    if kind == "BYTES":
        return [item.decode() for item in deserialize_bytes_tensor(content)]
    return np.frombuffer(content, triton_to_np_dtype(kind)).tolist()


def _message(outputs: Outputs) -> Any:
    response = service_pb2.ModelInferResponse(model_name=t.DFLOW.name)
    for name, values in outputs.items():
        kind = "BYTES" if TENSORS[name].type == "STRING" else TENSORS[name].type
        response.outputs.add(name=name, datatype=kind, shape=[1, len(values)])
        response.raw_output_contents.append(_raw(kind, values))
    return response


def _raw(kind: str, values: list[Any]) -> bytes:
    if kind == "BYTES":
        packed = serialize_byte_tensor(np.array([value.encode() for value in values], np.object_))
        return packed.item() if packed.size else b""
    return np.array(values, triton_to_np_dtype(kind)).tobytes()


def _responses(asked: Asked, samples: Sequence[Sample], tokenizer: Tokenizer) -> Iterator[Outputs]:
    rounds = [list(_rounds(asked, i, sample, tokenizer)) for i, sample in enumerate(samples)]
    if asked.value("stream", False):
        for number in range(max(map(len, rounds), default=0)):  # samples take turns
            yield from (each[number] for each in rounds if number < len(each))
    elif rounds:
        yield _joined(rounds)


def _rounds(asked: Asked, index: int, sample: Sample, tokenizer: Tokenizer) -> Iterator[Outputs]:
    """A response a round of one sample."""
    text = TextStream(tokenizer, asked.inputs.get("stop_words", ()))
    start, accepted, drafted, stopped = 0, 0, 0, False
    lengths = sample.drafted if sample.drafted is not None else [7] * len(sample.rounds)
    for number, (kept, length) in enumerate(zip((0, *sample.rounds), (0, *lengths), strict=True)):
        ids = []
        for token in sample.ids[start : start + kept + 1]:
            ids.append(token)
            stopped = text.push(token)
            if stopped:
                break
        kept = min(kept, len(ids))
        start, accepted, drafted = start + len(ids), accepted + kept, drafted + length
        last = number == len(sample.rounds) or stopped
        yield {
            "text_output": [text.finish() if last else text.take()],
            "output_ids": ids,
            "sequence_index": [index],
            "finish_reason": [("stop" if stopped else sample.reason) if last else ""],
            "num_accepted": [kept],
            "num_input_tokens": [len(asked.inputs["input_ids"])],
            "num_output_tokens": [start],
            "num_rounds": [number],
            "total_draft_tokens": [drafted],
            "total_accepted_draft_tokens": [accepted],
            "acceptance_rate": [accepted / drafted if drafted else 0.0],
            "seed_used": [asked.value("seed", 77)],
            "cum_log_probs": [0.0],
            **_logprobs(ids, asked.value("logprobs")),
        }
        if stopped:
            return


def _failed(failure: Failure) -> Outputs:
    """How the model tells whoever gave a handle."""
    figures: Outputs = {name: [0] for name in TENSORS} | {"output_ids": [], **_logprobs((), None)}
    return figures | {"text_output": [f"{failure.code}: {failure.message}"], "finish_reason": ["error"]}


def _logprobs(ids: Sequence[int], count: int | None) -> Outputs:
    """Made up: the token itself at -0.5, alternatives at -0.5, -1.5, ..."""
    if count is None:
        return {"output_log_probs": [], "top_ids": [], "top_log_probs": []}
    return {
        "output_log_probs": [-0.5] * len(ids),
        "top_ids": [token + k for token in ids for k in range(count)],
        "top_log_probs": [-0.5 - k for _ in ids for k in range(count)],
    }


def _joined(rounds: Sequence[Sequence[Outputs]]) -> Outputs:
    """Everything in one response: texts and figures a sample, tokens one sample after another."""
    flat = ("output_ids", "output_log_probs", "top_ids", "top_log_probs")
    joined: Outputs = {name: [value for each in rounds for part in each for value in part[name]] for name in flat}
    joined |= {name: [each[-1][name][0] for each in rounds] for name in TENSORS if name not in flat}
    joined["text_output"] = ["".join(part["text_output"][0] for part in each) for each in rounds]
    joined["num_accepted"] = [sum(part["num_accepted"][0] for part in each) for each in rounds]
    return joined
