"""What the model.py files of the repository run: the only module that needs Triton's Python backend.

A Python model works its requests off one at a time, and here many are in flight: execute() returns at once. Threads of
``dflow``: Triton's own, which only queues; the loop; one that sends, since a response waits for the server to take it;
one that asks whether clients are still there, which costs a message each.

``dflow_bls`` asks ``dflow`` over a socket (:mod:`dflow_trt.serving.link`).
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import os
import queue
import signal
import threading
import time
import traceback
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import triton_python_backend_utils as pb_utils

from dflow_trt.api import text_stream, with_word_ids
from dflow_trt.bundle import Strategy, open_bundle
from dflow_trt.contract import TOKENIZER_DIR
from dflow_trt.decode import QueueFull
from dflow_trt.errors import UserError
from dflow_trt.method.sampling import fresh_seed
from dflow_trt.request import Request, RequestStats
from dflow_trt.runtime.choose import open_runtime
from dflow_trt.serving import tensors as t
from dflow_trt.serving.link import Answer, LinkClient, LinkServer, Question
from dflow_trt.serving.loop import EngineFailure, Job, Piece, ServingLoop, Unavailable
from dflow_trt.serving.metrics import Capacity, ServingMetrics
from dflow_trt.serving.options import Ask, StrategyChooser, Values, check_length, one, read_ask
from dflow_trt.serving.package import BUNDLE_DIR, MAX_INPUT_LEN, PackageOptions
from dflow_trt.serving.responses import arrays, joined
from dflow_trt.serving.series import TritonSink
from dflow_trt.text import Tokenizer

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
DRAIN_SECONDS = 30.0  # for what dflow_bls has asked for, when the model is unloaded
SERVER_SECONDS = 1.0
LAST_WORDS_SECONDS = 2.0  # that a server which cannot go on gets to answer what it still can
WATCH_SECONDS = 0.01  # between two looks at all clients; or, where that is more:
ASK_SECONDS = 0.004  # a client. To ask takes 0.07 ms of processor time, here and in the server


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


NOTHING = Piece(0, "", (), 0, "cancelled", RequestStats(), 0)  # what a stop itself gets


def _end_with_server() -> None:
    """From now on this process ends when its server is gone: one that was killed leaves its models behind."""

    def watch(server: int) -> None:
        while os.getppid() == server:
            time.sleep(SERVER_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, args=(os.getppid(),), name="server", daemon=True).start()


def _unloads_models(server: int) -> bool:
    """By its command line: to ask a server (2.51) that does not for it kills whoever asks."""
    words = Path("/proc", str(server), "cmdline").read_text().replace("=", "\0").split("\0")
    return ("--model-control-mode", "explicit") in itertools.pairwise(words)


def _version_folder(args: Mapping[str, str]) -> Path:
    return Path(args["model_repository"]) / args["model_version"]


class Channel:
    """The way back to one client of a decoupled model.

    Asking whether the client is gone after the final response was sent crashes tritonserver (2.51), hence the lock.
    coded: an error is a last response, with the finish_reason error, and the code and the message for its text. Streams
    of Triton give errors without their code.
    """

    def __init__(self, request: Any, coded: bool = False) -> None:
        self._coded = coded
        self.names = frozenset(request.requested_output_names())
        self._sender: Any = request.get_response_sender()
        self._lock = threading.Lock()

    def send(self, response: Any, final: bool) -> None:
        """Send a response. Nothing is sent behind the final one."""
        with self._lock:
            if self._sender is not None:
                sender, self._sender = self._sender, None if final else self._sender
                sender.send(response, flags=FINAL if final else 0)

    def reply(self, pieces: Sequence[Piece], final: bool) -> None:
        """Send pieces as one response."""
        self.send(_response(arrays(pieces, self.names)), final)

    def fail(self, error: Exception) -> None:
        """End it with an error."""
        code, message = _code(error), _message(error)
        if self._coded:
            self.reply([dataclasses.replace(NOTHING, text=f"{code}: {message}", finish_reason="error")], final=True)
        else:
            self.send(_error_response(code, message), final=True)

    def is_gone(self) -> bool:
        """Whether the client cancelled or went away."""
        with self._lock:
            return self._sender is not None and bool(self._sender.is_cancelled())


class Way(Protocol):
    """Where the pieces of a job go."""

    def reply(self, pieces: Sequence[Piece], final: bool) -> None: ...

    def fail(self, error: Exception) -> None: ...


@dataclass(frozen=True)
class LinkWay:
    """The way back to dflow_bls."""

    question: Question
    answer: Callable[[Answer], None]

    def reply(self, pieces: Sequence[Piece], final: bool) -> None:
        """See :meth:`Channel.reply`."""
        self.answer(Answer(self.question.handle, arrays(pieces, self.question.names), final))

    def fail(self, error: Exception) -> None:
        """See :meth:`Channel.fail`."""
        self.answer(Answer(self.question.handle, None, True, _code(error), _message(error)))


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
        """UserError for a handle that is watched: its request must not lose its own watch."""
        if handle in self._watched:
            raise UserError(f"handle {handle!r} is in use; allowed: one that no other request has")
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
            self._wake.clear()
            for handle, channel in list(self._watched.items()):
                if channel.is_gone():
                    self._on_gone(handle)
            if self._watched and not self._closing:
                time.sleep(max(WATCH_SECONDS, ASK_SECONDS * len(self._watched)))
                self._wake.set()


# -- preprocessing ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Encoder:
    """Text to the inputs of dflow. max_input_len: tokens of the longest prompt."""

    tokenizer: Tokenizer
    max_input_len: int

    @classmethod
    def of(cls, args: Mapping[str, str]) -> Self:
        """That of the model which Triton starts with these arguments."""
        parameters = json.loads(args["model_config"])["parameters"]
        tokenizer = Tokenizer.from_folder(_version_folder(args) / TOKENIZER_DIR)
        return cls(tokenizer, int(parameters[MAX_INPUT_LEN]["string_value"]))

    def inputs(self, values: Values) -> dict[str, Any]:
        """The inputs that are made of a client's text. UserError, without encoding it, where it cannot but be too long;
        an empty prompt and one that is just too long are for dflow to refuse."""
        text = one(values, t.TEXT_INPUT)
        check_length(self.tokenizer, text, self.max_input_len)
        prefix = text if one(values, t.EXCLUDE_INPUT) is False else ""
        return {
            t.INPUT_IDS.name: np.array([self.tokenizer.encode(text)], np.int32),
            t.PREFIX.name: np.array([[prefix.encode()]], np.object_),
        }


class PreprocessingModel:
    """Text in; token ids out, and what is to come before the answer."""

    def initialize(self, args: Mapping[str, str]) -> None:
        _end_with_server()
        self._encoder = Encoder.of(args)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        try:
            return _response(self._encoder.inputs(_values(request)))
        except Exception as error:
            return _error_response(_code(error), _message(error))


# -- dflow -------------------------------------------------------------------------------------------------------------


class Reply:
    """Who listens to one job: pieces go back as they come, or all in one."""

    def __init__(self, way: Way, ask: Ask, outbox: Callable[[Callable[[], None]], None]) -> None:
        self._way, self._stream, self._outbox = way, ask.stream, outbox
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
        self._outbox(lambda: self._way.reply(pieces, final))

    def fail(self, error: Exception) -> None:
        self._outbox(lambda: self._way.fail(error))


class DflowModel:
    """The decoupled model around the loop."""

    def initialize(self, args: Mapping[str, str]) -> None:
        _end_with_server()
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
        self._link = LinkServer(os.getppid(), self._take_linked)

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
            channel = Channel(request, coded=t.HANDLE_PARAMETER in parameters)
            try:
                self._take(request, parameters, channel)
            except Exception as error:
                channel.fail(error)

    def _take(self, request: Any, parameters: Mapping[str, Any], channel: Channel) -> None:
        values = _values(request)
        given = parameters.get(t.HANDLE_PARAMETER)
        if one(values, t.STOP):
            self._stop(request.request_id(), given)
            channel.reply([NOTHING], final=True)
            return
        handle = given or uuid.uuid4().hex
        self._watcher.add(handle, channel)  # before the loop can end it
        self._enter(handle, request.request_id(), values, parameters, channel)

    def _take_linked(self, question: Question, answer: Callable[[Answer], None]) -> None:
        """A request of dflow_bls."""
        way = LinkWay(question, answer)
        try:
            if question.values is None:
                self._loop.cancel(question.handle)
            elif one(question.values, t.STOP):
                self._stop(question.request_id, None)
                way.reply([NOTHING], final=True)
            else:
                parameters = question.parameters or {}
                self._enter(question.handle, question.request_id, question.values, parameters, way)
        except Exception as error:
            way.fail(error)

    def _enter(self, handle: str, client_id: str, values: Values, parameters: Mapping[str, Any], way: Way) -> None:
        strategy = None
        try:
            ask = read_ask(values, parameters, self._tokenizer)
            strategy = self._strategies.choose(ask.strategy)
            job = self._job(ask, strategy, handle, way)
            job.on_end = lambda: self._forget(client_id, handle)
            with self._handles_lock:
                self._handles[client_id].add(handle)
            self._loop.submit(job)
        except UserError as error:
            self._forget(client_id, handle)
            names = {} if strategy is None else {"strategy": strategy.name, "task": ask.task}
            self._metrics.refused(_refusal(error), **names)
            raise

    def _job(self, ask: Ask, strategy: Strategy, handle: str, way: Way) -> Job:
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
        return Job(handle, requests, texts, Reply(way, ask, self._put), deadline, ask.task)

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
        self._link.close()
        if _unloads_models(os.getppid()):
            pb_utils.unload_model(self._name)
        else:
            pb_utils.Logger.log_error(f"{reason}; this server does not unload models, so it ends")
            os.kill(os.getppid(), signal.SIGTERM)

    def finalize(self) -> None:
        """Triton calls it when all requests were answered that it knows of; those of dflow_bls are not among them."""
        self._link.close()
        self._loop.drain(DRAIN_SECONDS)
        self._loop.close()
        self._watcher.close()
        self._outbox.put(None)
        self._sender.join()
        self._link.hang_up()
        self._metrics.close()
        self._runtime.close()
        del self._metrics, self._loop, self._watcher
        gc.collect()  # metrics that outlive Triton's side of this process crash it


def _refusal(error: UserError) -> str:
    """The outcome that metrics count."""
    kinds = {QueueFull: "queue_full", Unavailable: "unavailable"}
    return kinds.get(type(error), "invalid")


# -- dflow_bls ---------------------------------------------------------------------------------------------------------


class DflowBlsModel:
    """The ensemble's interface in one model. It passes on that a client is gone, which an ensemble does not."""

    def initialize(self, args: Mapping[str, str]) -> None:
        _end_with_server()
        self._encoder = Encoder.of(args)
        self._channels: dict[str, Channel] = {}
        self._ending = threading.Lock()
        self._link = LinkClient(os.getppid(), self._answer, self._end_server)
        self._watcher = Watcher(lambda handle: self._ask(Question(handle)))

    def _end_server(self) -> None:
        """The process of dflow is gone: tritonserver (2.51) does not notice, stays ready, and lets its streams hang.

        SIGTERM alone would wait for those streams, even beyond its own time, and for that process.
        """
        pb_utils.Logger.log_error(f"the process of {t.DFLOW.name} died, so this server ends")
        server = os.getppid()
        with self._ending:
            os.kill(server, signal.SIGTERM)
            time.sleep(LAST_WORDS_SECONDS)
            if os.getppid() == server:
                os.kill(server, signal.SIGKILL)

    def execute(self, requests: Sequence[Any]) -> None:
        """Only passes on."""
        for request in requests:
            channel = Channel(request)
            try:
                self._take(request, channel)
            except Exception as error:
                channel.fail(error)

    def _take(self, request: Any, channel: Channel) -> None:
        values, parameters, handle = _values(request), _parameters(request), uuid.uuid4().hex
        if not one(values, t.STOP):
            values = {**values, **self._encoder.inputs(values)}
        inputs = {tensor.name for tensor in t.DFLOW.inputs}
        kept = {name: array.copy() for name, array in values.items() if name in inputs}
        self._channels[handle] = channel
        self._watcher.add(handle, channel)
        self._ask(Question(handle, request.request_id(), kept, parameters, channel.names))

    def _ask(self, question: Question) -> None:
        try:
            self._link.ask(question)
        except OSError:
            message = f"{t.DFLOW.name} is not loaded; try later"
            self._answer(Answer(question.handle, None, True, "UNAVAILABLE", message))

    def _answer(self, answer: Answer) -> None:
        """An answer of dflow, by a thread of its own."""
        channel = self._channels.get(answer.handle)
        if channel is None:
            return
        if answer.final:
            del self._channels[answer.handle]
            self._watcher.remove(answer.handle)
        if answer.tensors is None:
            channel.send(_error_response(answer.code, answer.message), final=True)
        else:
            channel.send(_response(answer.tensors), answer.final)

    def finalize(self) -> None:
        """Triton calls it when all requests were answered."""
        self._watcher.close()
        self._link.close()
        self._ending.acquire()  # this process must be there to end the server
