"""What the model.py files of the repository run: the only module that needs Triton's Python backend.

Every model answers through ``Reply`` or returns at once: a Python model works its requests off one at a time, and here
many are in flight. Threads of ``dflow``: Triton's own, which only queues; the loop; one that sends, since a response
waits for the server to take it; one that asks whether clients are still there, which costs a message each.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import signal
import threading
import time
import traceback
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from dflow_trt.api import text_stream, with_word_ids
from dflow_trt.bundle import open_bundle
from dflow_trt.contract import TOKENIZER_DIR
from dflow_trt.decode import QueueFull
from dflow_trt.errors import UserError
from dflow_trt.method.sampling import fresh_seed
from dflow_trt.request import Request, RequestStats
from dflow_trt.runtime.choose import open_runtime
from dflow_trt.serving import tensors as t
from dflow_trt.serving.loop import EngineFailure, Job, Piece, ServingLoop, Unavailable
from dflow_trt.serving.metrics import Capacity, ServingMetrics
from dflow_trt.serving.options import Ask, StrategyChooser, Values, one, read_ask, read_task
from dflow_trt.serving.package import BUNDLE_DIR, PackageOptions
from dflow_trt.serving.responses import arrays, joined
from dflow_trt.serving.series import TritonSink
from dflow_trt.text import Tokenizer

ERROR = "error"  # the finish_reason of a request that failed
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
WATCH_SECONDS = 0.01
WATCH_SHARE = 10  # of the time a look at all clients takes: so long until the next, where that is more


def _code(error: Exception) -> str:
    """Triton's name for what went wrong."""
    if isinstance(error, QueueFull | Unavailable):
        return "UNAVAILABLE"
    return "INVALID_ARG" if isinstance(error, UserError) else "INTERNAL"


def _message(error: Exception) -> str:
    """A UserError in its own words; anything else is the server's fault, and its details are for the log."""
    if isinstance(error, UserError | EngineFailure):
        return str(error)
    pb_utils.Logger.log_error("".join(traceback.format_exception(error)))
    return f"internal error ({type(error).__name__}); the server's log says more"


def _error_response(code: str, message: str) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, getattr(pb_utils.TritonError, code)))


def _response(tensors: Mapping[str, Any]) -> Any:
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in tensors.items()])


def _values(request: Any) -> Values:
    """The inputs of a request by name; those that were not sent are left out."""
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def _parameters(request: Any) -> dict[str, Any]:
    return dict(json.loads(request.parameters() or "{}"))


_NOTHING = Piece(0, "", (), 0, "cancelled", RequestStats(), 0)  # what a stop itself gets


def _version_folder(args: Mapping[str, str]) -> Path:
    return Path(args["model_repository"]) / args["model_version"]


class Channel:
    """The way back to one client of a decoupled model.

    Asking whether the client is gone after the final response was sent crashes tritonserver (2.51), hence the lock.
    inner: the client is dflow_bls. An error that follows other responses never reaches a model, and one that does loses
    its code; so it gets a last response whose finish_reason is error, and whose text is the code and the message.
    """

    def __init__(self, request: Any, inner: bool = False) -> None:
        self._inner = inner
        self.names = frozenset(request.requested_output_names())
        self._sender: Any = request.get_response_sender()
        self._lock = threading.Lock()

    def send(self, response: Any, final: bool) -> None:
        """Send a response, or the final flag alone. Nothing is sent behind the final one."""
        with self._lock:
            if self._sender is None:
                return
            sender, self._sender = self._sender, None if final else self._sender
            if response is None:
                sender.send(flags=FINAL)
            else:
                sender.send(response, flags=FINAL if final else 0)

    def fail(self, error: Exception) -> None:
        """End it with an error."""
        code, message = _code(error), _message(error)
        if self._inner:
            piece = dataclasses.replace(_NOTHING, text=f"{code}: {message}", finish_reason=ERROR)
            self.send(_response(arrays([piece], self.names)), final=True)
        else:
            self.send(_error_response(code, message), final=True)

    def is_gone(self) -> bool:
        """Whether the client cancelled or went away."""
        with self._lock:
            return self._sender is not None and bool(self._sender.is_cancelled())


class Watcher:
    """Calls ``on_gone(handle)`` for channels whose clients are gone, again and again until they are removed.

    Once would not do: the request may be on its way to where it is ended.
    """

    def __init__(self, on_gone: Callable[[str], None]) -> None:
        self._watched: dict[str, Channel] = {}
        self._on_gone, self._closing = on_gone, False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._thread.start()

    def add(self, handle: str, channel: Channel) -> None:
        self._watched[handle] = channel
        self._wake.set()

    def remove(self, handle: str) -> None:
        self._watched.pop(handle, None)

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait()
            start = time.monotonic()
            self._wake.clear()
            for handle, channel in list(self._watched.items()):
                if channel.is_gone():
                    self._on_gone(handle)
            if self._watched and not self._closing:
                time.sleep(max(WATCH_SECONDS, WATCH_SHARE * (time.monotonic() - start)))
                self._wake.set()


# -- preprocessing ----------------------------------------------------------------------------------------------------


class PreprocessingModel:
    """Text in; token ids out, and what is to come before the answer."""

    def initialize(self, args: Mapping[str, str]) -> None:
        self._tokenizer = Tokenizer.from_folder(_version_folder(args) / TOKENIZER_DIR)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        try:
            return _response(encoded(self._tokenizer, _values(request)))
        except Exception as error:
            return _error_response(_code(error), _message(error))


def encoded(tokenizer: Tokenizer, values: Values) -> dict[str, Any]:
    """The inputs of dflow that are made of a client's text. An empty prompt is for dflow to refuse."""
    text = one(values, t.TEXT_INPUT)
    prefix = text if one(values, t.EXCLUDE_INPUT) is False else ""
    return {
        t.INPUT_IDS.name: np.array([tokenizer.encode(text)], np.int32),
        t.PREFIX.name: np.array([[prefix.encode()]], np.object_),
    }


# -- dflow -------------------------------------------------------------------------------------------------------------


class Reply:
    """Who listens to one job: pieces become responses, as they come or all in one."""

    def __init__(self, channel: Channel, ask: Ask, outbox: Callable[[Callable[[], None]], None]) -> None:
        self.channel, self._stream, self._outbox = channel, ask.stream, outbox
        self._pieces: list[list[Piece]] = [[] for _ in range(ask.params.n)]
        self._prefixes, self._open = [ask.prefix] * ask.params.n, ask.params.n

    def receive(self, piece: Piece) -> None:
        self._open -= piece.finish_reason is not None
        if prefix := self._prefixes[piece.index]:
            piece, self._prefixes[piece.index] = dataclasses.replace(piece, text=prefix + piece.text), ""
        if self._stream:
            self._send([piece], final=self._open == 0)
            return
        self._pieces[piece.index].append(piece)
        if self._open == 0:
            self._send([joined(pieces) for pieces in self._pieces], final=True)

    def _send(self, pieces: list[Piece], final: bool) -> None:
        names = self.channel.names
        self._outbox(lambda: self.channel.send(_response(arrays(pieces, names)), final))

    def fail(self, error: Exception) -> None:
        self._outbox(lambda: self.channel.fail(error))


class DflowModel:
    """The decoupled model around the loop."""

    def initialize(self, args: Mapping[str, str]) -> None:
        try:
            self._open(args)
        except UserError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def _open(self, args: Mapping[str, str]) -> None:
        self._name = args["model_name"]
        given = json.loads(args["model_config"])["parameters"]
        options = PackageOptions.from_parameters({name: value["string_value"] for name, value in given.items()})
        self._bundle = open_bundle(_version_folder(args) / BUNDLE_DIR)
        folder = self._bundle.tokenizer_path
        self._tokenizer = Tokenizer.from_folder(folder) if folder else None
        self._strategies = StrategyChooser(self._bundle, options.strategy, options.shares)
        self._timeout = options.timeout
        self._handles: defaultdict[str, set[str]] = defaultdict(set)  # by the client's id
        self._handles_lock = threading.Lock()
        self._runtime = open_runtime(self._bundle, options.threads, self._bundle.build.max_batch_size)
        self._metrics = self._open_metrics(options)
        self._loop = ServingLoop(
            self._bundle,
            self._runtime,
            self._metrics,
            max_queue=options.max_queue,
            draft_policy=options.draft_policy,
            on_dead=self._die,
            log=pb_utils.Logger.log_error,
        )
        self._outbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="sender", daemon=True)
        self._sender.start()
        self._watcher = Watcher(self._loop.cancel)

    def _open_metrics(self, options: PackageOptions) -> ServingMetrics:
        metrics = ServingMetrics(TritonSink(pb_utils), self._bundle.verify_rows - 1)
        metrics.capacity(Capacity.of(self._bundle, self._bundle.build.max_batch_size, options.max_queue))
        metrics.flush()  # so that no reader finds none
        metrics.start()
        return metrics

    def execute(self, requests: Sequence[Any]) -> None:
        """Only queues; see :class:`Reply` for what comes back."""
        for request in requests:
            parameters = _parameters(request)
            channel = Channel(request, inner=t.HANDLE_PARAMETER in parameters)
            try:
                self._take(request, parameters, channel)
            except Exception as error:
                channel.fail(error)

    def _take(self, request: Any, parameters: Mapping[str, Any], channel: Channel) -> None:
        values = _values(request)
        if one(values, t.STOP):
            self._stop(request.request_id(), parameters.get(t.HANDLE_PARAMETER))
            channel.send(_response(arrays([_NOTHING], channel.names)), final=True)
            return
        strategy = None
        try:
            ask = read_ask(values, parameters, self._tokenizer)
            strategy = self._strategies.choose(ask.strategy)
            job = self._job(ask, strategy, parameters.get(t.HANDLE_PARAMETER) or uuid.uuid4().hex, channel)
            self._enter(request.request_id(), job, channel)
        except UserError as error:
            names = {} if strategy is None else {"strategy": strategy.name, "task": ask.task}
            self._metrics.refused(_refusal(error), **names)
            raise

    def _job(self, ask: Ask, strategy: Any, handle: str, channel: Channel) -> Job:
        params = with_word_ids(self._tokenizer, ask.params)
        seed = fresh_seed() if params.seed is None else params.seed
        texts = [text_stream(self._tokenizer, params) for _ in range(params.n)]
        requests = [
            Request(
                f"{handle}-{k}",
                ask.prompt_ids,
                params,
                strategy,
                seed,
                k,
                ask.draft_tokens,
                None if text is None else text.push,
            )
            for k, text in enumerate(texts)
        ]
        limits = [seconds for seconds in (ask.timeout, self._timeout) if seconds is not None]
        deadline = time.monotonic() + min(limits) if limits else None
        return Job(handle, requests, texts, Reply(channel, ask, self._put), deadline, ask.task)

    def _enter(self, client_id: str, job: Job, channel: Channel) -> None:
        """Known by the client's id and watched before the loop can end it."""
        if client_id:
            with self._handles_lock:
                self._handles[client_id].add(job.handle)
        job.on_end = lambda: self._forget(client_id, job.handle)
        self._watcher.add(job.handle, channel)
        try:
            self._loop.submit(job)
        except UserError:
            self._forget(client_id, job.handle)
            raise

    def _forget(self, client_id: str, handle: str) -> None:
        self._watcher.remove(handle)
        with self._handles_lock:
            self._handles[client_id].discard(handle)
            if not self._handles[client_id]:
                del self._handles[client_id]

    def _stop(self, client_id: str, handle: str | None) -> None:
        if not client_id and not handle:
            raise UserError(f"{t.STOP.name}: the request has no id; give the id of the requests to end")
        with self._handles_lock:
            handles = [handle] if handle else list(self._handles.get(client_id, ()))
        for each in handles:
            self._loop.cancel(each)

    def _put(self, action: Callable[[], None]) -> None:
        self._outbox.put(action)

    def _send_all(self) -> None:
        while (action := self._outbox.get()) is not None:
            try:
                action()
            except Exception as error:  # the server refuses a response: this request is over, the others are not
                pb_utils.Logger.log_error("".join(traceback.format_exception(error)))

    def _die(self, reason: str) -> None:
        """Make readiness false: leave the server, or where it does not unload models, end it."""
        try:
            pb_utils.unload_model(self._name)
        except pb_utils.TritonModelException:
            pb_utils.Logger.log_error(f"{reason}; this server does not unload models, so it ends")
            os.kill(os.getppid(), signal.SIGTERM)

    def finalize(self) -> None:
        """Triton calls it when all requests were answered."""
        self._loop.close()
        self._watcher.close()
        self._outbox.put(None)
        self._sender.join()
        self._metrics.close()
        self._runtime.close()


def _refusal(error: UserError) -> str:
    """The outcome that metrics count."""
    kinds = {QueueFull: "queue_full", Unavailable: "unavailable"}
    return kinds.get(type(error), "invalid")


# -- dflow_bls ---------------------------------------------------------------------------------------------------------


class DflowBlsModel:
    """The ensemble's interface in one model. It passes on that a client is gone, which an ensemble does not."""

    def initialize(self, args: Mapping[str, str]) -> None:
        self._tokenizer = Tokenizer.from_folder(_version_folder(args) / TOKENIZER_DIR)
        self._watcher = Watcher(self._stop)

    def execute(self, requests: Sequence[Any]) -> None:
        """A thread a request: each waits for the responses of dflow, whose queue bounds how many there are."""
        for request in requests:
            threading.Thread(target=self._serve, args=(request, Channel(request)), daemon=True).start()

    def _serve(self, request: Any, channel: Channel) -> None:
        handle = uuid.uuid4().hex
        try:
            values = _values(request)
            if not one(values, t.STOP):
                self._watcher.add(handle, channel)
            self._pass_on(request, values, handle, channel)
        except Exception as error:
            channel.fail(error)
        finally:
            self._watcher.remove(handle)
            channel.send(None, final=True)

    def _pass_on(self, request: Any, values: Values, handle: str, channel: Channel) -> None:
        stop = bool(one(values, t.STOP))
        parameters = {t.TASK_PARAMETER: read_task(_parameters(request))} | (
            {} if stop else {t.HANDLE_PARAMETER: handle}
        )
        own = {tensor.name for tensor in t.PREPROCESSING.inputs}
        inputs = {name: array for name, array in values.items() if name not in own} | encoded(self._tokenizer, values)
        left = 1 if stop else one(values, t.NUM_SEQUENCES) or 1
        names = channel.names | {t.FINISH_REASON.name, t.TEXT_OUTPUT.name}
        for response in _ask_dflow(inputs, names, request.request_id(), parameters):
            if response.has_error():
                raise Unavailable(f"{t.DFLOW.name}: {response.error().message()}")
            given = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
            if not given:
                continue
            reasons = given[t.FINISH_REASON.name].reshape(-1)
            if ERROR.encode() in reasons:
                code, _, message = given[t.TEXT_OUTPUT.name][0].decode().partition(": ")
                channel.send(_error_response(code, message), final=True)
            left -= sum(map(bool, reasons))
            channel.send(_response({name: given[name] for name in channel.names}), final=left <= 0)

    def _stop(self, handle: str) -> None:
        """The client of this request is gone."""
        inputs = {t.STOP.name: np.ones((1, 1), np.bool_)}
        inputs |= {tensor.name: np.zeros((1, 1), np.int32) for tensor in (t.INPUT_IDS, t.MAX_TOKENS)}
        for _ in _ask_dflow(inputs, {t.FINISH_REASON.name}, "", {t.HANDLE_PARAMETER: handle}):
            pass

    def finalize(self) -> None:
        self._watcher.close()


def _ask_dflow(
    inputs: Mapping[str, Any], names: Iterable[str], request_id: str, parameters: Mapping[str, Any]
) -> Iterable[Any]:
    """The responses of dflow to a request."""
    request = pb_utils.InferenceRequest(
        model_name=t.DFLOW.name,
        requested_output_names=sorted(names),
        inputs=[pb_utils.Tensor(name, array) for name, array in inputs.items()],
        request_id=request_id,
        parameters=dict(parameters),
    )
    return request.exec(decoupled=True)  # type: ignore[no-any-return]
