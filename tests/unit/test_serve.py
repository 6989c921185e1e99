"""What ``dflow-trt serve`` prints and refuses before anything is started."""

from __future__ import annotations

import dataclasses
import shlex
import socket
from pathlib import Path
from typing import Any, cast

import fake
import pytest

from dflow_trt.errors import UserError
from dflow_trt.serving.package import PackageOptions
from dflow_trt.serving.serve import ServeOptions, _lines, _listening, serve
from dflow_trt.serving.server import Ports, TritonServer

OPTIONS = ServeOptions("127.0.0.1", 8000, 1000, 60.0, PackageOptions(), Ports())


class _Triton:
    http_address, grpc_address, metrics_address = "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"


def lines(**changed: Any) -> dict[str, str]:
    bundle = fake.make_bundle([fake.drafter_spec("dflow", 8, "after_rejection")])
    options = dataclasses.replace(OPTIONS, **changed)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = list(_lines(bundle, "demo", cast(TritonServer, _Triton()), listener, options))
    return dict(line.split(maxsplit=1) for line in made)


def test_a_line_for_everything() -> None:
    said = lines()
    assert said["model"] == "demo: ar, dflow, dflow-norelay"
    url = said["endpoint"].removesuffix("/v1")
    assert url.startswith("http://127.0.0.1:")
    assert said["page"] == f"{url}/"
    assert said["metrics"] == f"{url}/metrics"
    assert said["triton"] == "http 127.0.0.1:1, grpc 127.0.0.1:2, metrics 127.0.0.1:3"
    command = shlex.split(said["try"])
    assert command[:2] == ["curl", f"{url}/v1/chat/completions"]
    assert "Authorization" not in said["try"]
    assert "warning" not in said


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "server.example"])
def test_an_open_door_is_pointed_out(host: str) -> None:
    assert f"--host {host} without --api-key" in lines(host=host)["warning"]
    guarded = lines(host=host, api_key="s3cret")
    assert "warning" not in guarded
    assert "s3cret" not in "".join(guarded.values())
    assert "$DFLOW_API_KEY" in guarded["try"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_is_no_open_door(host: str) -> None:
    assert "warning" not in lines(host=host)


def test_addresses_of_version_6_are_in_brackets() -> None:
    assert lines(host="::1")["page"].startswith("http://[::1]:")


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(UserError, match=f"^--port: 127.0.0.1:{port} .*; choose another$"),
            _listening("127.0.0.1", port),
        ):
            pass


def test_answers_do_not_wait_for_acknowledgements() -> None:
    with _listening("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_a_host_that_is_none_is_named() -> None:
    with pytest.raises(UserError, match=r"^--host: no\.such\.host\.invalid: "), _listening("no.such.host.invalid", 0):
        pass


def test_an_empty_key_is_no_key() -> None:
    with pytest.raises(UserError, match=r"^--api-key: empty"):
        serve(Path("nowhere"), dataclasses.replace(OPTIONS, api_key=""), print)


def test_a_bundle_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        serve(tmp_path / "nothing", OPTIONS, print)
