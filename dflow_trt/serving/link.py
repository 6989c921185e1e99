"""A local socket between two models of one server: requests one way, many answers each the other way.

Triton lets a model ask another, but not for streams that can be trusted: in tritonserver 2.51 the responses behind the
first touch Python without its lock, an error among them is lost, and a server that is stopping refuses what its own
models ask. The socket lies in a folder of this user alone; what it carries is pickled.
"""

from __future__ import annotations

import itertools
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from dflow_trt.errors import UserError

_ENDED = (EOFError, OSError)
_NUMBERS = itertools.count()
CONNECT_SECONDS = 0.5  # between two looks for somebody who listens


@dataclass(frozen=True)
class Question:
    """A request. handle: of this one alone. values: its input tensors; None ends the request of that handle."""

    handle: str
    request_id: str = ""
    values: Mapping[str, Any] | None = None
    parameters: Mapping[str, Any] | None = None
    names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Answer:
    """One of the answers to a request: output tensors, or an error's code and message, which is the last."""

    handle: str
    tensors: Mapping[str, Any] | None
    final: bool
    code: str = ""
    message: str = ""


@dataclass(frozen=True)
class Hello:
    """The answering end is there, and will not go without a goodbye unless its process dies."""


@dataclass(frozen=True)
class Goodbye:
    """The answering end takes nothing new, and answers what it has; who asks looks for another."""


def meeting_place() -> Path:
    """The folder where models meet. It is made, and must be of this user alone: UserError where it is not."""
    folder = Path(tempfile.gettempdir()) / f"dflow-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o077:
        raise UserError(f"{folder}: others may write there; remove it, or name another folder with TMPDIR")
    return folder


def _sweep(folder: Path) -> None:
    """Remove the sockets of servers that are gone; one that was killed leaves its own."""
    for path in folder.glob("*.sock"):
        if not Path("/proc", path.name.partition("-")[0]).exists():
            path.unlink(missing_ok=True)


class _Line:
    """A connection that several threads write to. open: handles whose last answer is still to come."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self.open: set[str] = set()

    def send(self, message: Question | Answer | Hello | Goodbye) -> None:
        with self._lock:
            self._connection.send(message)

    def read(self) -> Any:
        return self._connection.recv()

    def close(self) -> None:
        """Whoever reads at either end comes to the end of it."""
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)


class LinkServer:
    """The end that answers. on_question(question, answer) is called by one thread a connection.

    server: the process id of the server. A model that is loaded again may be there before the old one has ended, so
    each has a socket of its own.
    """

    def __init__(self, server: int, on_question: Callable[[Question, Callable[[Answer], None]], None]) -> None:
        _sweep(meeting_place())
        path = meeting_place() / f"{server}-{os.getpid()}-{next(_NUMBERS)}.sock"
        path.unlink(missing_ok=True)
        self._on_question = on_question
        self._lines: set[_Line] = set()
        self._lock, self._closing = threading.Lock(), False
        self._listener = Listener(str(path), "AF_UNIX")
        threading.Thread(target=self._accept, name="link", daemon=True).start()

    def _accept(self) -> None:
        with suppress(*_ENDED):
            while True:
                line = _Line(self._listener.accept())
                threading.Thread(target=self._serve, args=(line,), name="link", daemon=True).start()

    def _serve(self, line: _Line) -> None:
        """Until the other end is gone; what it had asked for is ended."""
        with self._lock, suppress(*_ENDED):
            self._lines.add(line)
            line.send(Goodbye() if self._closing else Hello())

        def answer(given: Answer) -> None:
            if given.final:
                line.open.discard(given.handle)
            with suppress(*_ENDED):  # nobody is there to read it
                line.send(given)

        with suppress(*_ENDED):
            while True:
                question = line.read()
                if question.values is not None:
                    line.open.add(question.handle)
                self._on_question(question, answer)
        self._lines.discard(line)
        for handle in list(line.open):
            self._on_question(Question(handle), answer)

    def close(self) -> None:
        """Take nothing new."""
        self._listener.close()
        with self._lock:
            self._closing = True
            for line in list(self._lines):
                with suppress(*_ENDED):
                    line.send(Goodbye())

    def hang_up(self) -> None:
        """End the connections that are open."""
        for line in list(self._lines):
            line.close()


def _connected(server: int) -> Connection:
    """To the newest of the sockets that somebody listens at; OSError where there is none."""
    found = sorted(meeting_place().glob(f"{server}-*.sock"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in found:
        with suppress(OSError):
            return Client(str(path), "AF_UNIX")
    raise ConnectionRefusedError


class LinkClient:
    """The end that asks. on_answer is called by a thread; where the connection is lost, with an error for each.

    It connects by itself as soon as somebody listens. on_death: called when the process of the other end has died.
    """

    def __init__(
        self, server: int, on_answer: Callable[[Answer], None], on_death: Callable[[], None] = lambda: None
    ) -> None:
        self._server, self._on_answer, self._on_death = server, on_answer, on_death
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._line: _Line | None = None
        threading.Thread(target=self._stay, name="link", daemon=True).start()

    def _stay(self) -> None:
        while not self._closed.wait(CONNECT_SECONDS):
            with self._lock, suppress(OSError, UserError):
                self._connect()

    def _connect(self) -> _Line:
        """With the lock. Raises OSError where nobody listens."""
        if self._line is None:
            self._line = _Line(_connected(self._server))
            threading.Thread(target=self._read, args=(self._line,), name="link", daemon=True).start()
        return self._line

    def ask(self, question: Question) -> None:
        """Send a question. Raises OSError where nobody listens."""
        with self._lock:
            line = self._connect()
            if question.values is not None:
                line.open.add(question.handle)
        try:
            line.send(question)
        except OSError:
            self._lose(line)

    def _read(self, line: _Line) -> None:
        here = False
        with suppress(*_ENDED):
            while True:
                message = line.read()
                if isinstance(message, Hello | Goodbye):
                    here = isinstance(message, Hello)
                    if not here:
                        self._leave(line)
                    continue
                if message.final:
                    line.open.discard(message.handle)
                self._on_answer(message)
        self._lose(line)
        if here and not self._closed.is_set():
            self._on_death()

    def _leave(self, line: _Line) -> None:
        """The next question goes elsewhere."""
        with self._lock:
            if self._line is line:
                self._line = None

    def _lose(self, line: _Line) -> None:
        """The other end is gone, and with it what was asked there."""
        self._leave(line)
        with self._lock:
            handles, line.open = line.open, set()
        for handle in handles:
            self._on_answer(Answer(handle, None, True, "UNAVAILABLE", "the model was unloaded; try again later"))

    def close(self) -> None:
        """End the connection."""
        self._closed.set()
        with self._lock:
            if self._line is not None:
                self._line.close()
