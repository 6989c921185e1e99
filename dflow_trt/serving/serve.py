"""What ``dflow-trt serve`` runs: tritonserver over a packaged bundle, and the OpenAI endpoint in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import httpx
import uvicorn
from tritonclient.grpc.aio import InferenceServerClient

from dflow_trt.bundle import Bundle, open_bundle
from dflow_trt.errors import UserError
from dflow_trt.serving.openai.app import Endpoint, Settings, build_app
from dflow_trt.serving.openai.backend import Backend
from dflow_trt.serving.openai.errors import ApiError
from dflow_trt.serving.package import PackageOptions, package_bundle
from dflow_trt.serving.server import DRAIN_SECONDS, Ports, TritonServer
from dflow_trt.text import Tokenizer

BACKLOG = 2048  # connections that wait: while the server starts, and under load
LOOPBACK = ("localhost", "127.0.0.1", "::1")
HERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where all addresses of a machine are listened at: one that can be opened
FAR: dict[int, str] = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}  # of documentation alone (RFC 5737)
POLL_SECONDS = 0.1
GRACE_SECONDS = 1.0  # for the last words of what was ended
WATCH_SECONDS = 1.0
STUCK_SECONDS = 120.0  # without a round: far longer than any takes
QUIET = ("--log-info=false", "--pinned-memory-pool-byte-size=0")  # the pool is for GPUs; without one it is a warning
QUESTION = '{"messages": [{"role": "user", "content": "Hello"}]}'


@dataclass(frozen=True)
class ServeOptions:
    """How to serve. timeout: seconds a request may take, queue included. verbose: show what tritonserver does."""

    host: str
    port: int
    max_request_bytes: int
    timeout: float
    package: PackageOptions
    ports: Ports
    model_name: str | None = None
    api_key: str | None = None
    triton_home: Path | None = None
    verbose: bool = False


def serve(path: Path, options: ServeOptions, say: Callable[[str], None]) -> None:
    """Serve a bundle until SIGTERM or Ctrl-C; then finish what runs. ``say`` gets a line for each thing to know.

    Raises UserError, before anything is started, for what cannot be served, and where tritonserver ends by itself.
    """
    if options.api_key == "":
        raise UserError("--api-key: empty; give a key, or leave it out")
    bundle = open_bundle(path, verify=False)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listening(options.host, options.port))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dflow-serve-")))
        repository = folder / "repository"
        logs = () if options.verbose else QUIET
        triton = TritonServer(
            repository, home=options.triton_home, ports=options.ports, options=logs, hold=not options.verbose
        )
        package_bundle(path, repository, options.package, symlinks=True)
        stack.enter_context(triton)
        asyncio.run(_endpoint(bundle, triton, listener, options, say))


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens from now on: a port that is taken is found before anything starts, and clients wait."""
    try:
        [family, *_], *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(f"--host: {host}: {error.strerror}; give an address of this machine") from None
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise UserError(f"--port: {host}:{port} cannot be had ({error.strerror}); choose another") from None
    with listener:
        # Connections inherit it. asyncio sets it on sockets of its own making alone; 40 ms an answer without it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield listener


async def _endpoint(
    bundle: Bundle, triton: TritonServer, listener: socket.socket, options: ServeOptions, say: Callable[[str], None]
) -> None:
    name = options.model_name or bundle.path.resolve().name
    settings = Settings(
        model_name=name,
        metrics_address=triton.metrics_address,
        max_request_bytes=options.max_request_bytes,
        api_key=options.api_key,
        hosts={*LOOPBACK, options.host} if _is_loopback(options.host) else None,
        strategy=options.package.strategy,
        shares=options.package.shares,
    )
    tokenizer = Tokenizer.from_folder(bundle.tokenizer_path) if bundle.tokenizer_path is not None else None
    async with InferenceServerClient(triton.grpc_address) as client, httpx.AsyncClient() as http:
        backend = Backend(client, options.timeout)
        endpoint = Endpoint(bundle, tokenizer, backend, http, settings)
        server = _web_server(endpoint, say)
        watching = asyncio.create_task(_watch(triton, endpoint, server))
        for line in _lines(bundle, name, triton, listener, options):
            say(line)
        _ignore_signals()
        await server.serve([listener])
        await backend.settle()
        watching.cancel()
    if watching.done() and not watching.cancelled() and triton.exit_code is None:
        raise UserError("the model's process is lost or hangs; its output above says why")
    if triton.exit_code is not None:
        raise UserError(f"tritonserver ended by itself with code {triton.exit_code}; its output above says why")


class WebServer(uvicorn.Server):
    """On SIGTERM and SIGINT it takes nothing new, and finishes what runs: in DRAIN_SECONDS, or until a SIGINT follows.

    What is unfinished then is ended with an error; uvicorn by itself would cut it off, with a traceback for each.
    """

    def __init__(self, config: uvicorn.Config, endpoint: Endpoint, say: Callable[[str], None]) -> None:
        super().__init__(config)
        self._endpoint, self._say = endpoint, say
        self._asked = self._hurry = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._hurry |= self._asked and sig == signal.SIGINT
        self._asked = self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._asked:
            count = self._endpoint.open_sequences
            what = f"{count} sequence{'' if count == 1 else 's'}"
            self._say(f"draining  {what}, for up to {DRAIN_SECONDS} s; Ctrl-C again ends them now")
        ending = asyncio.create_task(self._end_the_rest())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_the_rest(self) -> None:
        end = time.monotonic() + DRAIN_SECONDS
        while not self._hurry and time.monotonic() < end:
            await asyncio.sleep(POLL_SECONDS)
        self._endpoint.abort()
        await asyncio.sleep(GRACE_SECONDS)
        for connection in list(self.server_state.connections):  # clients that neither send nor read on
            connection.transport.abort()


def _web_server(endpoint: Endpoint, say: Callable[[str], None]) -> WebServer:
    """It logs requests by path, never their text."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    config = uvicorn.Config(build_app(endpoint), log_config=None, lifespan="off", ws="none", server_header=False)
    return WebServer(config, endpoint, say)


def _ignore_signals() -> None:
    """From now on the web server handles them; behind it, tritonserver is ending already."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: None)


async def _watch(triton: TritonServer, endpoint: Endpoint, server: WebServer) -> None:
    """End the endpoint when tritonserver or its model is gone: whoever started this process starts it again."""
    while triton.exit_code is None and not await _is_stuck(endpoint):
        await asyncio.sleep(WATCH_SECONDS)
    server.should_exit = True


async def _is_stuck(endpoint: Endpoint) -> bool:
    """tritonserver (2.51) does not notice that a model's process died: its heartbeat tells."""
    try:
        return await endpoint.heartbeat_age() > STUCK_SECONDS
    except (ApiError, UserError):  # no metrics for the moment is no proof
        return False


def _lines(
    bundle: Bundle, name: str, triton: TritonServer, listener: socket.socket, options: ServeOptions
) -> Iterator[str]:
    """Where everything is, and a command to try it."""
    port = listener.getsockname()[1]
    url = _url(HERE.get(options.host, options.host), port)
    if options.api_key is None and not _is_loopback(options.host):
        yield f"warning   --host {options.host} without --api-key: whoever reaches this port can use the model"
    key = '-H "Authorization: Bearer $DFLOW_API_KEY" ' if options.api_key else ""
    yield f"model     {name}: {', '.join(bundle.strategies)}"
    yield f"endpoint  {url}/v1"
    if options.host in HERE and (address := _address(listener.family)) is not None:
        yield f"network   {_url(address, port)}/v1"
    yield f"page      {url}/"
    yield f"metrics   {url}/metrics"
    yield f"triton    http {triton.http_address}, grpc {triton.grpc_address}, metrics {triton.metrics_address}"
    yield f"try       curl {url}/v1/chat/completions {key}-H 'Content-Type: application/json' -d '{QUESTION}'"


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _address(family: int) -> str | None:
    """The address of this machine by which others reach it, or None. Nothing is sent to find it."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((FAR[family], 9))
        return str(probe.getsockname()[0])
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == LOOPBACK[0]
