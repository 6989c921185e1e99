"""A real ``tritonserver`` as a child process: found, started on loopback, waited for, stopped with drain.

Three places are looked at: ``home`` or ``DFLOW_TRITON_HOME``, the package ``nvidia-pytriton`` of the Python that will
run the models, and PATH. PyTriton's package keeps the Python backend's stubs apart from its backends; a private folder
of links joins them, so that nothing is written into site-packages.
"""

from __future__ import annotations

import ctypes
import dataclasses
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from dflow_trt.errors import UserError

HOME_VARIABLE = "DFLOW_TRITON_HOME"
STUB = "triton_python_backend_stub"
DRAIN_SECONDS = 30
START_SECONDS = 600.0
KILL_SECONDS = 3.0  # that it may take to end after its own time is over
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_LIBC = ctypes.CDLL(None)
HARMLESS = (b"CudaDriverHelper has not been initialized", b"unable to create stream for ensemble: CUDA driver version")
_POLL_SECONDS = 0.05
_HELD_LINES = 1000  # of a server that does not start; the last of them say why
_MODEL_ERROR = re.compile(
    r"failed to load '(.+?)' version \d+: [A-Z][a-z ]+: (?:TritonModelException: )?(.+?)(?:\\n|\"?$)"
)
_START_TRIES = 3  # a port that was free may be taken before the server binds it
_PROBE = """
import importlib.util, json, sys, sysconfig
spec = importlib.util.find_spec("pytriton")
print(json.dumps({
    "package": list(spec.submodule_search_locations)[0] if spec else None,
    "version": "%d.%d" % sys.version_info[:2],
    "libraries": sysconfig.get_config_var("LIBDIR"),
}))
"""


@dataclass(frozen=True)
class Interpreter:
    """The Python that runs the models, and what the server must know of it."""

    executable: Path
    package: Path | None
    version: str
    libraries: str


@dataclass(frozen=True)
class Installation:
    """A tritonserver and its backends. stub: of the Python backend, where it does not lie beside it."""

    executable: Path
    backends: Path
    stub: Path | None = None


@dataclass(frozen=True)
class Ports:
    """Where the server listens; 0 takes a free one."""

    http: int = 0
    grpc: int = 0
    metrics: int = 0


def find_interpreter(python: str | Path | None = None) -> Interpreter:
    """What a Python has for the server; by default the running one. UserError where it does not run."""
    executable = Path(python or sys.executable)
    try:
        found = subprocess.run([executable, "-c", _PROBE], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"{executable}: does not run as a Python ({error}); name another") from None
    data = json.loads(found.stdout)
    package = Path(data["package"]) if data["package"] else None
    return Interpreter(executable, package, data["version"], data["libraries"])


def find_server(interpreter: Interpreter, home: str | Path | None = None) -> Installation:
    """The tritonserver to start: of ``home``, of PyTriton's package, or on PATH. UserError where there is none."""
    named = home or os.environ.get(HOME_VARIABLE)
    if named:
        return _installation(Path(named), interpreter)
    if interpreter.package is not None:
        return _installation(interpreter.package / "tritonserver", interpreter)
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return _installation(Path(on_path).resolve().parent.parent, interpreter)
    raise UserError(
        f"no tritonserver: neither nvidia-pytriton beside {interpreter.executable} nor tritonserver on PATH; "
        f"pip install '.[triton,serve]' in the checkout, or name its folder with --triton-home or {HOME_VARIABLE}"
    )


def _installation(home: Path, interpreter: Interpreter) -> Installation:
    executable, backends = home / "bin" / "tritonserver", home / "backends"
    for needed in (executable, backends / "python" / "libtriton_python.so"):
        if not needed.is_file():
            raise UserError(f"{home}: no tritonserver with a Python backend, {needed} is missing; name another folder")
    if (backends / "python" / STUB).is_file():
        return Installation(executable, backends)
    stub = home / "python_backend_stubs" / interpreter.version / STUB
    if not stub.is_file():
        raise UserError(f"{home}: its Python backend has no stub for Python {interpreter.version}; use another Python")
    return Installation(executable, backends, stub)


class TritonServer:
    """One server over a model repository. Use it as a context manager, or :meth:`start` and :meth:`stop` it.

    repository: the folder. python: what runs the models, by default this Python. home: see :func:`find_server`.
    host, ports: where it listens. log: a file that takes its output, else it goes where this process's goes. hold: not
    before the server is ready; a start that fails says why in one line.
    drain: seconds that requests in flight get when it is stopped. options: more arguments of tritonserver.
    environment: added to this process's.
    """

    def __init__(
        self,
        repository: str | Path,
        *,
        python: str | Path | None = None,
        home: str | Path | None = None,
        host: str = "127.0.0.1",
        ports: Ports | None = None,
        log: Path | None = None,
        hold: bool = False,
        drain: int = DRAIN_SECONDS,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.repository, self.host, self.log = Path(repository).resolve(), host, log
        self._interpreter = find_interpreter(python)
        self._installation = find_server(self._interpreter, home)
        self._wanted, self._options = ports or Ports(), tuple(options)
        self._environment, self._drain, self._hold = dict(environment or {}), drain, hold
        self._process: subprocess.Popen[bytes] | None = None
        self._output = Output(hold)
        self._stack = ExitStack()
        self.ports = self._wanted

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def http_address(self) -> str:
        return f"{self.host}:{self.ports.http}"

    @property
    def grpc_address(self) -> str:
        return f"{self.host}:{self.ports.grpc}"

    @property
    def metrics_address(self) -> str:
        return f"{self.host}:{self.ports.metrics}"

    @property
    def pid(self) -> int:
        """Of the running server."""
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._process is None else self._process.poll()

    def start(self, timeout: float = START_SECONDS) -> Self:
        """Start and wait until every model is ready. UserError where it ends instead, or takes longer."""
        for attempt in range(_START_TRIES):
            self._launch()
            try:
                self.wait_ready(timeout)
                self._output.release()
                return self
            except UserError as error:
                self.stop()
                if attempt + 1 == _START_TRIES or "already in use" not in str(error):
                    raise
            except BaseException:
                self.stop()
                raise
        raise AssertionError

    def _launch(self) -> None:
        self.ports = _free_ports(self.host, self._wanted)
        output = self._stack.enter_context(self.log.open("wb")) if self.log else None
        # Its own session: a Ctrl-C at the terminal is for this process, which then stops the server with drain.
        self._process = subprocess.Popen(
            self._arguments(),
            env=self._server_environment(),
            cwd=self.repository,  # where no package lies that a model could import in place of the installed one
            stdin=subprocess.DEVNULL,
            stdout=output or subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        if self._process.stdout is not None:
            self._output = Output(self._hold)
            self._output.follow(self._process.stdout)

    def _arguments(self) -> list[str]:
        addresses = {"http": self.ports.http, "grpc": self.ports.grpc, "metrics": self.ports.metrics}
        listen = [f"--{name}-address={self.host}" for name in addresses]
        return [
            str(self._installation.executable),
            f"--model-repository={self.repository}",
            f"--backend-directory={self._backends()}",
            *listen,
            *(f"--{name}-port={port}" for name, port in addresses.items()),
            "--model-control-mode=explicit",  # so that a model whose engines are lost can leave
            "--load-model=*",
            "--disable-auto-complete-config",  # nothing is missing; saves starting each model twice
            "--allow-gpu-metrics=false",
            f"--exit-timeout-secs={self._drain}",
            *self._options,
        ]

    def _backends(self) -> Path:
        """The installation's backends, joined with the stub where that lies elsewhere."""
        if self._installation.stub is None:
            return self._installation.backends
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="dflow-backends-")))
        for backend in self._installation.backends.iterdir():
            (folder / backend.name).mkdir()
            for file in backend.iterdir():
                (folder / backend.name / file.name).symlink_to(file.resolve())
        (folder / "python" / STUB).symlink_to(self._installation.stub.resolve())
        return folder

    def _server_environment(self) -> dict[str, str]:
        """The stub embeds Python: it finds the environment by PATH, and libpython by the loader's path."""
        given = {**os.environ, **self._environment}
        front = {"PATH": str(self._interpreter.executable.parent), "LD_LIBRARY_PATH": self._interpreter.libraries}
        paths = {name: os.pathsep.join(filter(None, (value, given.get(name)))) for name, value in front.items()}
        return {**given, **paths, "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}

    def wait_ready(self, timeout: float) -> None:
        """Until every model is ready. UserError where the server ends instead, or takes longer."""
        end = time.monotonic() + timeout
        while not self.is_ready():
            if self.exit_code is not None:
                raise UserError(f"tritonserver ended with code {self.exit_code}: {self._last_error()}")
            if time.monotonic() > end:
                raise UserError(f"tritonserver was not ready after {timeout:g} s: {self._last_error()}")
            time.sleep(_POLL_SECONDS)

    def is_ready(self, model: str | None = None) -> bool:
        """Whether the server, or one model of it, takes requests."""
        path = "/v2/health/ready" if model is None else f"/v2/models/{model}/ready"
        connection = http.client.HTTPConnection(self.host, self.ports.http, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _last_error(self) -> str:
        """What its output says why, for a message."""
        if self.log is not None:
            text = self.log.read_text(encoding="utf-8", errors="replace")
            return f"{reason(text.splitlines())} (see {self.log})"
        return reason(self._output.held()) if self._hold else "see its output above"

    def stop(self) -> int | None:
        """Take nothing new, finish what runs, end. Gives the exit code, negative where it had to be killed.

        tritonserver 2.51 loses count of some requests whose gRPC stream was cancelled. It then has nothing left to do,
        and waits for them until ``drain`` is over.
        """
        process, code = self._process, None
        if process is not None:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                code = process.wait(self._drain + KILL_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            with suppress(ProcessLookupError):  # a server that crashed leaves its models' processes, with all they hold
                os.killpg(process.pid, signal.SIGKILL)
        self._stack.close()
        return code


def _end_with_parent() -> None:
    """In the server, before it starts: a parent that is killed cannot stop it, so the kernel sends SIGTERM then."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def reason(lines: Sequence[str]) -> str:
    """The line of a server's output that says why it did not start: of a model in its own words."""
    models = [f"failed to load '{found[1]}': {found[2]}" for found in map(_MODEL_ERROR.search, lines) if found]
    errors = [line for line in lines if line.startswith("E") and "Cuda" not in line]
    said = [line.strip() for line in reversed(lines) if line.strip()]
    return [*models, *errors, *said, "no output"][0].strip()


class Output:
    """The server's lines on their way to this process's stderr, but for those that only say that there is no GPU.

    hold: keep them until they are released.
    """

    def __init__(self, hold: bool) -> None:
        self._held: deque[bytes] | None = deque(maxlen=_HELD_LINES) if hold else None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def follow(self, pipe: Iterable[bytes]) -> None:
        """Read it to its end, in a thread."""
        self._thread = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._thread.start()

    def _read(self, pipe: Iterable[bytes]) -> None:
        for line in pipe:
            if not any(harmless in line for harmless in HARMLESS):
                with self._lock:
                    self._write(line)

    def _write(self, line: bytes) -> None:
        if self._held is not None:
            self._held.append(line)
            return
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()

    def release(self) -> None:
        """Hold nothing back from now on."""
        with self._lock:
            held, self._held = self._held or (), None
            for line in held:
                self._write(line)

    def held(self) -> list[str]:
        """The lines of a server that has ended."""
        if self._thread is not None:
            self._thread.join(KILL_SECONDS)
        with self._lock:
            return [line.decode(errors="replace") for line in self._held or ()]


def _free_ports(host: str, wanted: Ports) -> Ports:
    """Free ports in place of zeros; all sockets are open at once, so that they differ. UserError for one that is taken.

    tritonserver itself says that it is ready before it finds its metrics port taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as stack:
        found = []
        for name, port in dataclasses.asdict(wanted).items():
            holder = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            if port:  # connections of a server that was there before do not matter
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                holder.bind((host, port))
            except OSError as error:
                raise UserError(f"{name} port {port} cannot be had ({error.strerror}); choose another") from None
            found.append(holder.getsockname()[1])
    return Ports(*found)
