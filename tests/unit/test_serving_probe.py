"""The probe: silent and 0 while the loop's heart beats; 1 and one line saying why when it does not."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from dflow_trt.errors import UserError
from dflow_trt.serving.families import HEARTBEAT
from dflow_trt.serving.probe import heartbeat_age, main


@pytest.fixture
def endpoint() -> Iterator[tuple[str, dict[str, str]]]:
    """A metrics endpoint and what it answers."""
    answer = {"text": ""}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer["text"].encode())

        def log_message(self, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/metrics", answer
    server.shutdown()
    thread.join()
    server.server_close()


def published(age: float) -> str:
    name = HEARTBEAT.name
    return f"# HELP {name} x\n# TYPE {name} gauge\n{name}_of_another 1\n{name} {time.time() - age}\nnv_gpu 0\n"


def test_a_beating_loop_passes(endpoint: tuple[str, dict[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    url, answer = endpoint
    answer["text"] = published(5)
    assert main(["--metrics-url", url, "--max-age", "30"]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_loop_that_stopped_fails(endpoint: tuple[str, dict[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    url, answer = endpoint
    answer["text"] = published(45)
    assert main(["--metrics-url", url, "--max-age", "30"]) == 1
    assert capsys.readouterr().err == f"{url}: the loop's last heartbeat is 45 s old, allowed: 30 s\n"


def test_a_model_that_is_not_loaded_fails(endpoint: tuple[str, dict[str, str]]) -> None:
    url, answer = endpoint
    answer["text"] = "nv_inference_count 0\n"
    assert main(["--metrics-url", url]) == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/metrics", "nonsense"])
def test_no_endpoint_fails_in_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--metrics-url", url]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_labels_on_the_heartbeat_do_not_matter() -> None:
    assert heartbeat_age(f'{HEARTBEAT.name}{{model="dflow"}} 100', 107.0) == 7
    with pytest.raises(UserError, match="not loaded"):
        heartbeat_age("", 0.0)


def test_it_loads_neither_numerics_nor_a_server() -> None:
    """It runs every few seconds."""
    code = "import sys, dflow_trt.serving.probe; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"numpy", "click", "tritonclient", "starlette"} & set(loaded) == set()
