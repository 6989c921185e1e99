"""What ships for deployment, checked by the real tools: helm, Kubernetes' schemas, Docker Compose, hadolint, nginx."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import deploy_tools
import pytest
import yaml

from dflow_trt import __version__
from dflow_trt.cli.group import cli
from dflow_trt.serving.server import DRAIN_SECONDS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "triton_repo" / "deploy"
CHART = FOLDER / "helm" / "dflow-trt"
COMPOSE = FOLDER / "compose"
MONITORING = ROOT / "triton_repo" / "monitoring"

VOLUME = "bundle.volume.persistentVolumeClaim.claimName=bundle"
ALL = (
    f"--set={VOLUME},gpus=1,apiKey.secretName=key,autoscaling.enabled=true,podMonitor.enabled=true,service.port=8080",
    "--set-json",
    'args=["--model-name","x"]',
    "--set-json",
    'tolerations=[{"key":"nvidia.com/gpu","operator":"Exists"}]',
    f"--set-file=alerts={MONITORING / 'alerts.yaml'}",
    f"--set-file=dashboard={MONITORING / 'dashboard.json'}",
)
CASES = {"least": (f"--set={VOLUME}",), "all": ALL}
KUBERNETES = "v1.33.0-local-strict"
OPERATOR = {"PodMonitor", "PrometheusRule"}  # kinds of the Prometheus operator: Kubernetes has no schema of them


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)


@cache
def rendered(*options: str) -> str:
    result = run(deploy_tools.helm(), "template", "release", CHART, *options)
    assert result.returncode == 0, result.stderr
    return result.stdout


def objects(*options: str) -> dict[str, dict[str, Any]]:
    """What the chart makes, by kind."""
    found = [item for item in yaml.safe_load_all(rendered(*options)) if item]
    assert len({item["kind"] for item in found}) == len(found)
    return {item["kind"]: item for item in found}


# -- the chart -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_helm_lints_the_chart(case: str) -> None:
    result = run(deploy_tools.helm(), "lint", "--strict", CHART, *CASES[case])
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("replicas=1", "/bundle/volume"),
        (f"{VOLUME},replica=3", "additional properties 'replica' not allowed"),
        (f"{VOLUME},service.type=Ingress", "/service/type"),
    ],
)
def test_wrong_values_are_refused(setting: str, message: str) -> None:
    result = run(deploy_tools.helm(), "template", "release", CHART, f"--set={setting}")
    assert result.returncode != 0
    assert message in result.stderr


def schema_errors(item: dict[str, Any]) -> list[str]:
    """What Kubernetes' strict schema has against an object; fields that it does not know too."""
    with deploy_tools.importable():
        from jsonschema import Draft202012Validator, RefResolver

        schemas = deploy_tools.folder() / "kubernetes_validate" / "kubernetes-json-schema" / KUBERNETES
        group = [part.split(".")[0] for part in item["apiVersion"].split("/")]
        schema = json.loads((schemas / f"{'-'.join([item['kind'].lower(), *group])}.json").read_text())
        definitions = json.loads((schemas / "_definitions.json").read_text())
        resolver = RefResolver.from_schema(schema, store={definitions["$id"]: definitions})
        return [error.message for error in Draft202012Validator(schema, resolver=resolver).iter_errors(item)]


@pytest.mark.parametrize("case", CASES)
def test_objects_follow_kubernetes_schemas_to_the_letter(case: str) -> None:
    made = {kind: item for kind, item in objects(*CASES[case]).items() if kind not in OPERATOR}
    assert len(made) == {"least": 3, "all": 5}[case]
    assert {kind: schema_errors(item) for kind, item in made.items()} == {kind: [] for kind in made}


def test_a_misspelt_field_would_be_found() -> None:
    deployment = objects(*CASES["least"])["Deployment"]
    server = deployment["spec"]["template"]["spec"]["containers"][0]
    server["livenesProbe"] = server.pop("livenessProbe")
    assert "livenesProbe" in schema_errors(deployment)[0]


def container(*options: str) -> tuple[dict[str, Any], dict[str, Any]]:
    pod = objects(*options)["Deployment"]["spec"]["template"]["spec"]
    [only] = pod["containers"]
    return pod, only


def test_the_least_needs_nothing_that_a_cluster_may_lack() -> None:
    assert set(objects(*CASES["least"])) == {"Deployment", "Service", "PodDisruptionBudget"}
    _, server = container(*CASES["least"])
    assert "env" not in server
    assert "nvidia.com/gpu" not in server["resources"]["limits"]


def test_probes_ask_what_notices_a_dead_model() -> None:
    _, server = container(*ALL)
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[name]["httpGet"] == {"path": "/health", "port": "http"}
    seconds = {
        n: server[n]["periodSeconds"] * server[n]["failureThreshold"] for n in ("readinessProbe", "livenessProbe")
    }
    assert seconds["readinessProbe"] < seconds["livenessProbe"], "traffic is taken away before anything is killed"


def test_a_pod_that_ends_has_time_to_finish() -> None:
    """First out of the service, then the endpoint drains, then Triton, which is killed 5 s after."""
    pod, server = container(*CASES["least"])
    command, seconds = server["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    assert pod["terminationGracePeriodSeconds"] >= int(seconds) + 2 * DRAIN_SECONDS + 5
    strategy = objects(*CASES["least"])["Deployment"]["spec"]["strategy"]["rollingUpdate"]
    assert strategy == {"maxSurge": 1, "maxUnavailable": 0}


def test_the_container_may_do_little() -> None:
    pod, server = container(*ALL)
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert server["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in server["volumeMounts"]}
    assert mounts == {"/bundle": True, "/tmp": False, "/dev/shm": False}
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in server["volumeMounts"]}


def test_options_reach_the_container() -> None:
    pod, server = container(*ALL)
    assert server["args"][-2:] == ["--model-name", "x"]
    assert server["resources"]["limits"] == {"memory": "8Gi", "nvidia.com/gpu": 1}
    [key] = server["env"]
    assert key["valueFrom"]["secretKeyRef"] == {"name": "key", "key": "api-key"}
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]


def test_the_pod_monitor_asks_as_clients_do() -> None:
    made = objects(*ALL)
    [endpoint] = made["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert endpoint["path"] == "/metrics"
    assert endpoint["authorization"]["credentials"] == {"name": "key", "key": "api-key"}
    selector = made["PodMonitor"]["spec"]["selector"]["matchLabels"]
    assert selector.items() <= made["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    assert made["Service"]["spec"]["selector"] == selector


def test_alerts_and_dashboard_arrive_unchanged() -> None:
    made = objects(*ALL)
    assert made["PrometheusRule"]["spec"] == yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    assert made["ConfigMap"]["data"]["dflow-trt.json"] == (MONITORING / "dashboard.json").read_text()


def test_the_autoscaler_reads_what_the_adapter_gives_from_recorded_rules() -> None:
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    recorded = {rule["record"] for group in rules["groups"] for rule in group["rules"] if "record" in rule}
    adapter = yaml.safe_load((FOLDER / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    assert {re.match(r"[a-z0-9_:]+", rule["seriesQuery"]).group() for rule in adapter} == recorded  # type: ignore[union-attr]
    scaler = objects(*ALL)["HorizontalPodAutoscaler"]["spec"]
    assert {metric["pods"]["metric"]["name"] for metric in scaler["metrics"]} == {
        rule["name"]["as"] for rule in adapter
    }
    assert "replicas" not in objects(*ALL)["Deployment"]["spec"], "two would decide"


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__


# -- image and compose -------------------------------------------------------------------------------------------------


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    result = run(deploy_tools.hadolint(), FOLDER / "Dockerfile")
    assert (result.returncode, result.stdout) == (0, "")


def test_the_image_gets_what_it_copies_and_nothing_else() -> None:
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (FOLDER / "Dockerfile").read_text(), re.M)
    sources = " ".join(copied).split()
    assert ignored[0] == "*"
    assert {line[1:] for line in ignored if line.startswith("!")} == set(sources)
    for source in sources:
        assert (ROOT / source).exists()


def composed(*files: str) -> dict[str, Any]:
    environment = {"BUNDLE": "/tmp/bundle", "DFLOW_API_KEY": "k", "GRAFANA_PASSWORD": "p", "HOME": "/tmp", "PATH": ""}
    options = [part for name in files for part in ("-f", name)]
    command = (deploy_tools.compose(), *options, "config", "--format", "json")
    result = run(*command, cwd=COMPOSE, env=environment)
    assert result.returncode == 0, result.stderr
    return dict(json.loads(result.stdout))


def test_compose_takes_the_files_and_what_they_mount_is_there() -> None:
    services = composed("compose.yaml")["services"]
    assert set(services) == {"dflow", "gateway", "prometheus", "grafana"}
    for service in services.values():
        for volume in service.get("volumes", []):
            if volume["type"] == "bind" and volume["target"] != "/bundle":
                assert Path(volume["source"]).exists(), volume["source"]
    build = services["dflow"]["build"]
    assert (Path(build["context"]) / build["dockerfile"]).samefile(FOLDER / "Dockerfile")


def test_compose_publishes_on_loopback_alone() -> None:
    ports = [port for service in composed("compose.yaml")["services"].values() for port in service.get("ports", [])]
    assert {port["host_ip"] for port in ports} == {"127.0.0.1"}
    assert sorted(int(port["published"]) for port in ports) == [3000, 8000, 9090]


def test_compose_gives_a_server_time_to_finish() -> None:
    grace = composed("compose.yaml")["services"]["dflow"]["stop_grace_period"]
    found = re.fullmatch(r"(?:(\d+)m)?(\d+)s", grace)
    assert found is not None
    assert 60 * int(found[1] or 0) + int(found[2]) >= 2 * DRAIN_SECONDS + 5


def test_compose_with_a_gpu_adds_the_device() -> None:
    service = composed("compose.yaml", "compose.gpu.yaml")["services"]["dflow"]
    [device] = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert service["build"]["args"]["EXTRAS"] == "serve,tensorrt"


def test_every_way_to_start_it_uses_options_that_serve_has() -> None:
    image = (FOLDER / "Dockerfile").read_text().splitlines()[-1]
    commands = [
        json.loads(image.removeprefix("CMD ")),
        container(*CASES["least"])[1]["args"],
        composed("compose.yaml")["services"]["dflow"]["command"],
    ]
    for command in commands:
        assert command[:2] == ["serve", "/bundle"]
        parsed = cli.commands["serve"].make_context("serve", ["/", *command[2:]]).params
        assert (parsed["host"], parsed["port"]) == ("0.0.0.0", 8000)


def test_compose_without_a_key_says_so() -> None:
    environment = {"BUNDLE": "/tmp/bundle", "GRAFANA_PASSWORD": "p", "HOME": "/tmp", "PATH": ""}
    result = run(deploy_tools.compose(), "-f", "compose.yaml", "config", cwd=COMPOSE, env=environment)
    assert result.returncode != 0
    assert "set DFLOW_API_KEY" in result.stderr


def test_promtool_takes_prometheus_configuration(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool was not found (Debian: apt-get install prometheus)")
    (tmp_path / "key").write_text("k")
    text = (COMPOSE / "prometheus.yaml").read_text()
    (tmp_path / "prometheus.yaml").write_text(text.replace("/run/secrets/api-key", str(tmp_path / "key")))
    shutil.copy(MONITORING / "alerts.yaml", tmp_path)
    result = run("promtool", "check", "config", tmp_path / "prometheus.yaml")
    assert result.returncode == 0, result.stdout + result.stderr


# -- sessions ----------------------------------------------------------------------------------------------------------


class Backend:
    """A server that says who it is and streams in two pieces, the second one when told to."""

    def __init__(self, name: str) -> None:
        self.go, self.connections = threading.Event(), list[socket.socket]()
        backend = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                backend.connections.append(self.connection)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self.send_response(200)
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                self.piece(name)
                if self.path == "/slow":
                    assert backend.go.wait(30)
                self.piece("end")
                self.wfile.write(b"0\r\n\r\n")

            def piece(self, text: str) -> None:
                self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())
                self.wfile.flush()

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server.server_port)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        for connection in self.connections:
            with contextlib.suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def gateway(folder: Path, backends: list[Backend]) -> Iterator[int]:
    """The shipped nginx.conf, in front of servers on loopback; its port."""
    nginx = shutil.which("nginx", path="/usr/sbin:/usr/bin:/sbin:/bin")
    if nginx is None:
        pytest.skip("nginx was not found (Debian: apt-get install nginx-light)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    servers = "\n".join(f"server 127.0.0.1:{b.port} max_fails=2 fail_timeout=5s;" for b in backends)
    text = (COMPOSE / "nginx.conf").read_text()
    for old, new in {
        "server dflow:8000 max_fails=2 fail_timeout=5s;": servers,
        "listen 8080;": f"listen 127.0.0.1:{port};",
        "/tmp/": f"{folder}/",
        "/dev/stdout": str(folder / "access.log"),
        "worker_processes auto;": "worker_processes 1;\ndaemon off;",
    }.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "nginx.conf").write_text(text)
    process = subprocess.Popen([nginx, "-c", folder / "nginx.conf"], stderr=subprocess.DEVNULL)
    try:
        wait_for(port, process)
        yield port
    finally:
        process.terminate()
        process.wait(10)


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise AssertionError("nginx did not start")


def ask(port: int, session: str | None, path: str = "/v1/chat/completions") -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"content-type": "application/json"} | ({"X-Session-Id": session} if session else {})
    connection.request("POST", path, b"{}", headers)
    text = connection.getresponse().read().decode()
    connection.close()
    return text.removesuffix("end")


def test_the_gateway_keeps_sessions_and_spreads_the_rest(tmp_path: Path) -> None:
    backends = [Backend(f"server{i}") for i in range(3)]
    tmp_path.chmod(0o777)
    sessions = [f"session-{i}" for i in range(60)]
    try:
        with gateway(tmp_path, backends) as port:
            homes = {session: ask(port, session) for session in sessions}
            assert {session: ask(port, session) for session in sessions} == homes
            counts = Counter(homes.values())
            assert set(counts) == {"server0", "server1", "server2"}
            assert len({ask(port, None) for _ in range(30)}) == 3
            backends[1].close()
            later = {session: ask(port, session) for session in sessions}
            moved = {session for session in sessions if later[session] != homes[session]}
            assert moved == {session for session in sessions if homes[session] == "server1"}
    finally:
        for backend in (backends[0], backends[2]):
            backend.close()


def test_the_gateway_passes_tokens_on_as_they_come(tmp_path: Path) -> None:
    backend = Backend("first")
    tmp_path.chmod(0o777)
    try:
        with gateway(tmp_path, [backend]) as port:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("POST", "/slow", b"{}", {"content-type": "application/json"})
            response = connection.getresponse()
            assert response.read(5) == b"first", "before the server has said the rest"
            backend.go.set()
            assert response.read() == b"end"
            connection.close()
    finally:
        backend.close()


def test_metrics_are_not_for_clients_of_the_gateway(tmp_path: Path) -> None:
    backend = Backend("x")
    tmp_path.chmod(0o777)
    try:
        with gateway(tmp_path, [backend]) as port:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("GET", "/metrics")
            assert connection.getresponse().status == 404
            connection.close()
    finally:
        backend.close()
