"""``dflow-trt profile --url`` against a real server: both ways in, its counters, and a server that is killed."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pairs import Pair
from test_openai import PATIENCE, Serve, serving
from test_profile import Run, dflow, refused

from dflow_trt.profiling.record import read_record
from dflow_trt.profiling.remote.run import RemoteDriver

__all__ = ["dflow"]
QUICK = ("--requests", "4", "--repetitions", "2", "--max-tokens", "24", "--strategy", "dflow")


@pytest.fixture(scope="module")
def served(serve_python: Path, block_example: Pair) -> Iterator[Serve]:
    with serving(serve_python, block_example.bundle.path, "--model-name", "example") as running:
        yield running


def test_the_openai_endpoint(dflow: Run, served: Serve, block_example: Pair) -> None:
    here = dflow("profile", block_example.bundle.path, *QUICK, "--threads", "1", "--no-roofline", "--json").record
    there = dflow("profile", "--url", served.url, *QUICK, "--concurrency", "2", "--json").record
    for ours, theirs in zip(here.results, there.results, strict=True):
        assert theirs.total.model_dump(exclude={"drafted_at"}) == ours.total.model_dump(exclude={"drafted_at"})
        assert theirs.total.drafted_at == ours.total.drafted_at, "as its chunks say"
        assert (theirs.compared, theirs.same) == (8, 8)
        assert theirs.throughput.output_tokens == ours.throughput.output_tokens
        assert theirs.latency.itl.n == ours.latency.itl.n
    assert there.server is not None
    assert len(there.server.counters) == 12
    assert all(each.agree for each in there.server.counters)
    assert {name: each.drafts for name, each in there.subject.drafters.items()} == {
        "dflash": 7,
        "dflow": 7,
        "dflow-norelay": 7,
    }


def test_triton_over_grpc(dflow: Run, served: Serve, block_example: Pair) -> None:
    grpc, metrics = (re.search(rf"{name} ([\w.:]+)", served.line("triton")) for name in ("grpc", "metrics"))
    assert grpc is not None
    assert metrics is not None
    url = ("--url", f"triton+grpc://{grpc[1]}", "--metrics-url", f"http://{metrics[1]}/metrics")
    with_bundle = dflow("profile", block_example.bundle.path, *url, *QUICK, "--rate", "50", "--json").record
    assert with_bundle.results[1].total.tau_emitted == pytest.approx(4, abs=1)
    assert with_bundle.server is not None
    assert all(each.agree for each in with_bundle.server.counters)
    assert with_bundle.subject.target == block_example.bundle.target_fingerprint[:12]
    alone = dflow("profile", *url, *QUICK, "--no-chat", "--json").record
    assert alone.results[1].same == alone.results[1].compared == 8
    refused(dflow("profile", *url, *QUICK, "--chat"), "lays out no conversations; give the BUNDLE")


def test_a_server_that_is_killed(
    dflow: Run, serve_python: Path, block_example: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endpoint is; its tritonserver is asked to leave, so that it clears up."""
    with serving(serve_python, block_example.bundle.path, TMPDIR=str(tmp_path)) as running:
        url, children = running.url, psutil.Process(running.process.pid).children()
        turns, original = itertools.count(), RemoteDriver.run

        def until_it_is_killed(*arguments: Any) -> Any:
            if next(turns) == 5:  # two turns to warm up, then three that count
                threading.Timer(0.01, running.process.kill).start()
            return original(*arguments)

        monkeypatch.setattr(RemoteDriver, "run", until_it_is_killed)
        flags = ("--max-tokens", "96", "--strategy", "dflow", "--repetitions", "1000", "--output", tmp_path / "out")
        result = dflow("profile", "--url", url, *flags)
        running.process.wait()
        for child in children:
            child.terminate()
        assert psutil.wait_procs(children, PATIENCE)[1] == []
    refused(result, f"{url}: the server went away", "; 3 of 12000 turns were done, and are what is shown")
    record = read_record(tmp_path / "out")
    assert record.error is not None
    assert sum(each.requests for each in record.results) > 0
    assert (tmp_path / "out" / "report.html").read_text(encoding="utf-8").count("the server went away") == 2
