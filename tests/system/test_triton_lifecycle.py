"""A server's life: a full queue, shares of traffic, engines that fail, reloading, and an end that loses nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from pairs import Pair
from triton_client import Answer, ask, metrics, one, run, until
from tritonclient.grpc.aio import InferenceServerClient

from dflow_trt.api import LLM
from dflow_trt.errors import UserError
from dflow_trt.method.sampling import SamplingParams
from dflow_trt.serving.options import StrategyChooser
from dflow_trt.serving.package import PackageOptions, package_bundle
from dflow_trt.serving.server import TritonServer

OPTIONS = PackageOptions(
    max_queue=4, timeout=60.0, threads=1, strategy="dflash", shares={"ar": 0.5}, draft_policy="adaptive"
)
FAULTY_MODEL = '''
"""The model of the repository, with engines that fail while a file says so."""

from pathlib import Path

from dflow_trt.serving.triton import DflowModel

FILE = Path(__file__).with_name("fail")


class TritonPythonModel(DflowModel):
    def initialize(self, args):
        super().initialize(args)
        self._inner = self._runtime.run
        self._runtime.run = self._run

    def _run(self, *arguments, **more):
        text = FILE.read_text() if FILE.exists() else ""
        if text:
            if text == "once":
                FILE.unlink()
            raise RuntimeError("an injected fault")
        return self._inner(*arguments, **more)
'''


@dataclass
class Served:
    server: TritonServer
    repository: Path

    def fail(self, how: str) -> None:
        """once, or always."""
        (self.repository / "dflow" / "1" / "fail").write_text(how)


def serving(python: Path, bundle: Path, folder: Path, kind: type[TritonServer] = TritonServer) -> Iterator[Served]:
    package_bundle(bundle, folder / "repository", OPTIONS)
    (folder / "repository" / "dflow" / "1" / "model.py").write_text(FAULTY_MODEL)
    with kind(folder / "repository", python=python, log=folder / "log", drain=20) as running:
        yield Served(running, folder / "repository")


@pytest.fixture(scope="module")
def served(serve_python: Path, example: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serving(serve_python, example.bundle.path, tmp_path_factory.mktemp("triton"))


@pytest.fixture
def own(serve_python: Path, example: Pair, tmp_path: Path) -> Iterator[Served]:
    """A server that no other test sees."""
    yield from serving(serve_python, example.bundle.path, tmp_path)


@pytest.fixture(scope="module")
def llm(example: Pair) -> Iterator[LLM]:
    with LLM(example.bundle, threads=1) as opened:
        yield opened


async def begun_or_over(running: asyncio.Event, task: asyncio.Task[Answer]) -> None:
    """When a stream has begun; fails where it ended before."""
    begin = asyncio.create_task(running.wait())
    await asyncio.wait({begin, task}, return_when=asyncio.FIRST_COMPLETED)
    assert begin.done(), task.result()


PROMPT = "Work out these sums.\na) 13 + 17\nb) 2 + 17"


def long(**more: Any) -> dict[str, Any]:
    return {"text_input": PROMPT, "max_tokens": 120, "ignore_eos": True, "strategy": "ar", **more}


def short(**more: Any) -> dict[str, Any]:
    return {"text_input": PROMPT, "max_tokens": 8, "ignore_eos": True, **more}


def test_a_full_queue_refuses_and_the_rest_are_served(served: Served) -> None:
    async def work(client: InferenceServerClient) -> list[Answer]:
        return await asyncio.gather(*(ask(client, "dflow_bls", long(), codes=True) for _ in range(40)))

    answers = run(served.server, work)
    refused = [answer for answer in answers if answer.message]
    assert refused
    for answer in refused:
        assert answer.code == "UNAVAILABLE"
        assert "the queue is full, at most 4 sequences wait" in (answer.message or "")
    fine = [answer for answer in answers if not answer.message]
    assert len(fine) >= 12
    assert {answer.last("num_output_tokens") for answer in fine} == {120}
    name = 'dflow_requests_total{outcome="queue_full",strategy="ar",task="none"}'
    assert until(lambda: metrics(served.server).get(name) == len(refused))


def test_time_runs_out_in_the_queue(served: Served) -> None:
    async def work(client: InferenceServerClient) -> Answer:
        busy = [asyncio.create_task(ask(client, "dflow_bls", long())) for _ in range(10)]
        await asyncio.sleep(0.05)
        late = await ask(client, "dflow_bls", long(timeout_ms=1), codes=True)
        await asyncio.gather(*busy)
        return late

    late = run(served.server, work)
    assert (late.code, late.responses) == ("UNAVAILABLE", [])
    assert "timed out in the queue" in (late.message or "")


def test_shares_of_traffic_go_where_they_should(served: Served, example: Pair) -> None:
    def counts() -> dict[str, float]:
        names = [name for name in metrics(served.server) if name.startswith("dflow_requests_total")]
        return {
            strategy: sum(
                metrics(served.server)[name] for name in names if f'strategy="{strategy}"' in name and "share" in name
            )
            for strategy in ("ar", "dflash")
        }

    for _ in range(30):
        one(served.server, "ensemble", short(), parameters={"task": "share"})
    assert until(lambda: sum(counts().values()) == 30)
    chooser = StrategyChooser(example.bundle, "dflash", {"ar": 0.5})
    names = [chooser.choose(None).name for _ in range(30)]
    assert counts() == {name: names.count(name) for name in ("ar", "dflash")}


def test_a_failing_round_fails_its_requests_and_the_server_goes_on(served: Served, llm: LLM) -> None:
    async def work(client: InferenceServerClient) -> Answer:
        running = asyncio.Event()

        async def begun(answer: Answer) -> bool:
            running.set()
            return True

        much = long(stream=True, max_tokens=300, num_return_sequences=6)  # so that it runs yet when the fault comes
        task = asyncio.create_task(ask(client, "dflow_bls", much, on_response=begun, codes=True))
        await begun_or_over(running, task)
        served.fail("once")
        return await task

    failed = run(served.server, work)
    assert failed.code == "INTERNAL"
    assert "an injected fault" in (failed.message or "")
    [expected] = llm.generate(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True))
    for model in ("ensemble", "dflow_bls"):
        assert one(served.server, model, short()).ids() == {0: list(expected.token_ids)}
    assert served.server.is_ready()


def test_engines_that_are_lost_make_readiness_false_and_a_reload_brings_them_back(own: Served) -> None:
    own.fail("always")
    answer = one(own.server, "dflow_bls", short(), codes=True)
    assert answer.code == "INTERNAL"
    assert until(lambda: not own.server.is_ready())
    assert not own.server.is_ready("dflow")
    assert httpx.get(f"http://{own.server.http_address}/v2/health/live").status_code == 200
    assert one(own.server, "dflow_bls", short()).message
    (own.repository / "dflow" / "1" / "fail").unlink()
    assert until(lambda: is_unloaded(own))
    load(own, "load")
    assert own.server.is_ready()
    for model in ("ensemble", "dflow_bls"):
        assert one(own.server, model, short()).message is None


class WithoutUnload(TritonServer):
    """As a tritonserver is started by default: its models cannot be unloaded."""

    def _arguments(self) -> list[str]:
        given = ("--model-control-mode=", "--load-model=")
        return [argument for argument in super()._arguments() if not argument.startswith(given)]


def test_engines_that_are_lost_end_a_server_that_does_not_unload_models(
    serve_python: Path, example: Pair, tmp_path: Path
) -> None:
    for served in serving(serve_python, example.bundle.path, tmp_path, WithoutUnload):
        served.fail("always")
        answer = one(served.server, "ensemble", short(), codes=True)
        assert "an injected fault" in (answer.message or "")
        assert psutil.Process(served.server.pid).wait(30) == 0, "as after SIGTERM"
        log = (tmp_path / "log").read_text(errors="replace")
        assert "this server does not unload models, so it ends" in log


def test_kill_9_of_the_model_ends_the_server_and_every_stream(own: Served) -> None:
    """tritonserver itself would stay ready, and let the streams hang."""

    async def work(client: InferenceServerClient) -> list[Answer]:
        begun = asyncio.Semaphore(0)

        async def tell(answer: Answer) -> bool:
            if len(answer.responses) == 1:
                begun.release()
            return True

        much = long(stream=True, max_tokens=500)
        ids = {**much, "input_ids": [1, 2, 3]}
        ids.pop("text_input")
        asked = {"dflow": ids, "ensemble": much, "dflow_bls": much}
        calls = [asyncio.create_task(ask(client, *each, on_response=tell)) for each in asked.items()]
        for _ in calls:
            await begun.acquire()
        models = psutil.Process(own.server.pid).children(recursive=True)
        [model] = [each for each in models if any("/dflow/" in part for part in each.cmdline())]
        model.kill()
        answers = await asyncio.gather(*calls)
        assert psutil.wait_procs(models, 10)[1] == [], "nothing is left of it"
        return answers

    answers = run(own.server, work)
    assert [answer.finals for answer in answers] == [0, 0, 0]
    assert all(answer.message for answer in answers)
    assert own.server.exit_code is not None


def load(served: Served, what: str) -> None:
    url = f"http://{served.server.http_address}/v2/repository/models/dflow/{what}"
    answer = httpx.post(url, json={}, timeout=120)
    assert answer.status_code == 200, answer.text


def is_unloaded(served: Served) -> bool:
    """Whether nothing of dflow is left: a load that races what still finishes may end tritonserver 2.51."""
    index = httpx.post(f"http://{served.server.http_address}/v2/repository/index", json={}).json()
    return [entry.get("reason") for entry in index if entry["name"] == "dflow"] == ["unloaded"]


def test_unloading_finishes_what_runs_and_reloading_serves_again(own: Served) -> None:
    async def work(client: InferenceServerClient) -> Answer:
        running = asyncio.Event()

        async def begun(answer: Answer) -> bool:
            running.set()
            return True

        task = asyncio.create_task(ask(client, "dflow_bls", long(stream=True), on_response=begun))
        await begun_or_over(running, task)
        await asyncio.to_thread(load, own, "unload")
        return await task

    answer = run(own.server, work)
    assert answer.last("num_output_tokens") == 120
    assert until(lambda: is_unloaded(own))
    load(own, "load")
    assert one(own.server, "ensemble", short()).message is None


def test_sigterm_finishes_what_runs(served: Served) -> None:
    """Last: it ends the server. Eight are in a slot when it comes, four wait for one."""
    server = served.server

    async def work(client: InferenceServerClient) -> list[Answer]:
        begun = asyncio.Semaphore(0)

        async def tell(answer: Answer) -> bool:
            if len(answer.responses) == 1:
                begun.release()
            return True

        models = [("dflow_bls", "ensemble")[i % 2] for i in range(12)]
        calls = [asyncio.create_task(ask(client, model, long(stream=True), on_response=tell)) for model in models]
        for _ in range(8):
            await begun.acquire()
        os.kill(server.pid, signal.SIGTERM)
        return await asyncio.gather(*calls)

    answers = run(server, work)
    for answer in answers:
        assert answer.message is None
        assert (answer.finals, answer.last("num_output_tokens")) == (1, 120)
    assert until(lambda: server.exit_code is not None)
    assert server.exit_code == 0


def test_a_server_that_cannot_start_says_why(serve_python: Path, example: Pair, tmp_path: Path) -> None:
    package_bundle(example.bundle.path, tmp_path / "repository")
    manifest = tmp_path / "repository" / "dflow" / "1" / "bundle" / "dflow.json"
    text = manifest.read_text()
    manifest.unlink()  # a hard link: the bundle itself must not change
    manifest.write_text(text.replace('"max_batch_size": 8', '"max_batch_size": 9'))
    with pytest.raises(UserError, match=r"failed to load 'dflow'.*dflow\.json.*build the bundle again"):
        TritonServer(tmp_path / "repository", python=serve_python, log=tmp_path / "log", drain=3).start()
