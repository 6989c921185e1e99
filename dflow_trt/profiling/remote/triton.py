"""The ``dflow`` model of a Triton server over gRPC: a response a round, with every count in it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncGenerator, Sequence

import numpy as np
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from dflow_trt.errors import UserError
from dflow_trt.profiling.measure import Asked
from dflow_trt.profiling.record import Point
from dflow_trt.profiling.remote.base import Facts, Piece, RequestFailed
from dflow_trt.profiling.session import Lost
from dflow_trt.request import RequestStats
from dflow_trt.serving import tensors as t
from dflow_trt.serving.openai.backend import Backend
from dflow_trt.serving.openai.errors import ApiError
from dflow_trt.serving.openai.translate import Job, Update

SECONDS = 600.0  # that a request may take


class TritonChannel:
    """address: HOST:PORT of its gRPC. strategies: what may be asked for, as nothing there tells them."""

    def __init__(self, address: str, strategies: Sequence[str]) -> None:
        self.address, self._strategies = address, strategies
        self._client = InferenceServerClient(address)
        self._backend = Backend(self._client, SECONDS)
        self._ids = itertools.count()

    async def facts(self) -> Facts:
        """UserError unless server and model are ready."""
        if not await self._backend.ready():
            todo = "start it, or correct the address"
            raise UserError(f"--url: {self.address}: no Triton with a ready model {t.DFLOW.name} answers; {todo}")
        return Facts(t.DFLOW.name, "Triton", dict.fromkeys(self._strategies))

    async def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, by the server's own tokenizer."""
        given = InferInput(t.TEXT_INPUT.name, [1, 1], "BYTES")
        given.set_data_from_numpy(np.array([[text.encode()]], np.object_))
        try:
            result = await self._client.infer(t.PREPROCESSING.name, [given])
        except InferenceServerException as error:
            raise UserError(f"--url: {self.address}: {error.message()}") from None
        ids: list[int] = result.as_numpy(t.INPUT_IDS.name).reshape(-1).tolist()
        return tuple(ids)

    async def ask(self, point: Point, asked: Asked) -> AsyncGenerator[Piece, None]:
        """See :class:`~dflow_trt.profiling.remote.base.Channel`."""
        assert asked.prompt_ids is not None
        task = asked.item.task
        job = Job(asked.prompt_ids, asked.params, point.strategy, point.draft_tokens, stream=True, task=task)
        before = RequestStats()
        try:
            async with contextlib.aclosing(self._backend.run(f"profile-{next(self._ids)}", job)) as updates:
                async for update in updates:
                    yield _piece(update, before)
                    before = update.stats
        except ApiError as error:
            raise _failure(self.address, asked, error) from None

    async def close(self) -> None:
        """Nothing is asked any more."""
        await self._client.close()


def _piece(update: Update, before: RequestStats) -> Piece:
    stats = update.stats
    return Piece(
        [pick.token for pick in update.picks],
        update.num_accepted,
        stats.drafted - before.drafted,
        stats.rounds > before.rounds,
        update.finish_reason,
    )


def _failure(address: str, asked: Asked, error: ApiError) -> Exception:
    if error.status == 503:
        return Lost(f"{address}: the server went away ({error.message})")
    if error.status == 400:
        return UserError(f"{asked.item.where}: the server refuses it: {error.message}")
    return RequestFailed(error.message)
