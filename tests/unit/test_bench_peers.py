"""The benchmark's peers: a worker process over the real protocol, its answers as turns, one that does not install."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from profile_cases import asked

from dflow_trt.profiling import metrics
from dflow_trt.profiling.record import Point

BUILD_SCRIPTS = Path(__file__).parents[2] / "build_scripts"
sys.path.insert(0, str(BUILD_SCRIPTS))

import bench_peers  # noqa: E402
from bench_common import Contenders  # noqa: E402
from bench_peers import Package, Peer, PeerError, Worker, make_environment, open_worker  # noqa: E402

# A model that says 10, 11, ..: two tokens a round. It prints where its answers go, and burns processor time.
SCRIPT = f"""
    import sys
    sys.path.insert(0, {str(BUILD_SCRIPTS)!r})
    from bench_worker import Steps, serve, versions

    def generate(name, prompt, max_tokens, rounds):
        print("a library's own words")
        steps = Steps()
        for number in range(rounds + 1):
            steps.begin()
            sum(range(100_000))
            steps.add(*range(len(prompt) + 2 * number, len(prompt) + 2 * number + (2 if number else 1)))
        return steps.answer()

    def fail():
        raise ValueError("no such model")

    serve({{"open": lambda name, threads: versions("numpy"), "generate": generate, "fail": fail}})
"""
POINT = Point(strategy="peer", concurrency=1)


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """This Python as the peers' own."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    return tmp_path


@pytest.fixture
def package(tmp_path: Path) -> Package:
    (tmp_path / "worker.py").write_text(textwrap.dedent(SCRIPT))
    return Package("Peer", "json", ("/none/peer-1.0-py3-none-any.whl",), tmp_path / "worker.py")


@pytest.fixture
def worker(package: Package, environment: Path, tmp_path: Path) -> Iterator[Worker]:
    with Worker(package, environment, 1, tmp_path / "log") as running:
        yield running


def test_a_peers_answers_are_turns(worker: Worker) -> None:
    worker.open("plain")
    assert set(worker.versions) == {"numpy"}
    run = Contenders({"peer": Peer(worker, "plain", rounds=3)}).run(POINT, [asked(0), asked(1)])
    assert [trace.token_ids for trace in run.traces] == [[2, 4, 5, 6, 7, 8, 9]] * 2
    assert [[tick.tokens for tick in trace.rounds] for trace in run.traces] == [[2, 2, 2]] * 2
    assert [step.decodes_alone for step in run.steps] == [False, True, True, True] * 2
    assert all(0 < step.cpu < 10 * (step.end - step.start) for step in run.steps)
    assert run.cpu == pytest.approx(sum(step.cpu for step in run.steps))
    assert metrics.total(list(run.traces)).tau_emitted == 2
    full = metrics.full_steps(run)
    assert len(full) == 6
    assert metrics.decode_rate([run]) == pytest.approx(12 / sum(step.end - step.start for step in full))
    assert run.start <= run.traces[0].arrival < run.traces[1].arrival < run.end


def test_a_peer_that_fails_says_so(worker: Worker, tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"fail: ValueError: no such model \(log: .*log\)"):
        worker.ask("fail")
    with pytest.raises(PeerError, match="generate: TypeError"):
        worker.ask("generate")


def test_a_peer_that_does_not_install_is_a_line(
    package: Package, environment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = replace(package, imports="no_such_peer")
    monkeypatch.setattr(bench_peers, "PACKAGES", (missing, package))
    make_environment(environment)
    [line] = capsys.readouterr().out.strip().split("\n")
    assert line.startswith("Peer does not install: ")
    assert "peer-1.0-py3-none-any.whl" in line


def test_a_peer_that_is_not_installed_is_none(package: Package, environment: Path, tmp_path: Path) -> None:
    with ExitStack() as owned:
        assert open_worker(replace(package, imports="no_such_peer"), environment, 1, tmp_path, owned) is None
        assert open_worker(package, None, 1, tmp_path, owned) is None
        assert open_worker(package, environment, 1, tmp_path, owned) is not None
