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
from dflow_trt.serving.server import Output, Ports, TritonServer, _free_ports, reason

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


@pytest.mark.parametrize(("host", "here"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]")])
def test_where_all_addresses_are_listened_at_one_is_given_that_can_be_opened(host: str, here: str) -> None:
    said = lines(host=host)
    for name in ("endpoint", "page", "metrics"):
        assert said[name].startswith(f"http://{here}:")
    assert f"http://{here}:" in said["try"]
    assert host not in said.get("network", "")


def test_where_others_reach_this_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflow_trt.serving.serve._address", lambda family: "192.0.2.7")
    said = lines(host="0.0.0.0")
    assert said["network"] == said["endpoint"].replace("127.0.0.1", "192.0.2.7")
    assert "network" not in lines()


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


@pytest.mark.parametrize("name", ["http", "grpc", "metrics"])
def test_a_taken_port_of_tritons_is_named(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"^{name} port {port} cannot be had .*; choose another$"):
            _free_ports("127.0.0.1", Ports(**{name: port}))


FAILED = """\
E1130 20:07:24.576858 1 backend_model.cc:692] "ERROR: Failed to create instance: TritonModelException: {why}\\n\\n"
E1130 20:07:24.577021 1 model_lifecycle.cc:642] "failed to load 'dflow' version 1: Internal: {kind}{why}{at}"
error: creating server: Internal - failed to load all models
"""


@pytest.mark.parametrize("kind", ["", "TritonModelException: "])
@pytest.mark.parametrize("at", ["", "\\n\\nAt:\\n  x.py(1): initialize\\n"])
def test_a_server_that_does_not_start_is_explained_by_its_model(kind: str, at: str) -> None:
    why = "tensorrt: cannot be imported (No module named 'tensorrt'); in the checkout: pip install"
    lines = FAILED.format(kind=kind, why=why, at=at).splitlines()
    assert reason(lines) == f"failed to load 'dflow': {why}"


def test_a_server_that_does_not_start_is_explained_by_its_first_error_or_its_last_line() -> None:
    lines = ["W1130 a warning", 'E1130 main.cc:257] "failed to start HTTP service"', "E1130 another", "the end"]
    assert reason(lines) == lines[1]
    assert reason(["Segmentation fault", ""]) == "Segmentation fault"
    assert reason([]) == "no output"


def test_output_is_held_until_it_is_released(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    output = Output(hold=True)
    output.follow([b"one\n", b"CudaDriverHelper has not been initialized\n"])
    assert output.held() == ["one\n"]
    assert capfdbinary.readouterr().err == b""
    output.release()
    output.follow([b"two\n"])
    assert output.held() == []
    assert capfdbinary.readouterr().err == b"one\ntwo\n"


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
