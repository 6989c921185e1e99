"""Stage times by a device's clock, on the fake GPU: there, an event's time is how much work its stream was given."""

from __future__ import annotations

from collections.abc import Iterator

import fakegpu
import pytest
from fakegpu.bundles import tiny_bundle

from dflow_trt.bundle import Bundle
from dflow_trt.method.sampling import SamplingParams
from dflow_trt.profiling.device import on_device
from dflow_trt.profiling.measure import Asked, LocalDriver
from dflow_trt.profiling.record import Point
from dflow_trt.profiling.run import device_clock
from dflow_trt.profiling.workload import Item
from dflow_trt.runtime.ort import OrtRuntime
from dflow_trt.runtime.trt import TrtRuntime

ENGINES = {"relay", "drafter", "verify", "prefill", "context"}


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return tiny_bundle(tmp_path_factory.mktemp("device"))


@pytest.fixture
def gpu() -> fakegpu.Gpu:
    return fakegpu.Gpu()


@pytest.fixture
def runtime(on_cpu: Bundle, gpu: fakegpu.Gpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Bundle, TrtRuntime]]:
    fakegpu.install(monkeypatch, gpu)
    offered = fakegpu.offer(gpu, on_cpu)
    made = TrtRuntime(offered)
    yield offered, made
    made.close()
    assert gpu.leaks == {}, "every event was given back"


def asked(index: int) -> Asked:
    ids = tuple(2 + (11 * index + 3 * i) % 20 for i in range(20))
    item = Item(f"line {index}", "t", {"prompt_token_ids": list(ids)})
    return Asked(index, item, ids, SamplingParams(max_tokens=12, seed=index))


def test_stages_are_by_the_devices_clock(on_cpu: Bundle, runtime: tuple[Bundle, TrtRuntime]) -> None:
    bundle, made = runtime
    strategy = next(name for name, each in bundle.strategies.items() if each.relay)
    point = Point(strategy=strategy, concurrency=2)
    clock = device_clock(bundle, made)
    assert clock is not None
    requests = [asked(i) for i in range(3)]
    driver = LocalDriver(bundle, made, 2, device=clock)
    driver.run(point, requests)  # graphs are recorded
    run = driver.run(point, requests)
    seen: dict[str, set[float]] = {}
    for step in run.steps:
        for stage, value in step.milliseconds.items():
            seen.setdefault(stage, set()).add(value)
    assert set(seen) == ENGINES | {"sampling", "host"}
    for stage in ENGINES:
        assert all(value == int(value) > 0 for value in seen[stage]), "pieces of work, not seconds"
    assert min(seen["host"]) >= 0
    clock.close()
    plain = LocalDriver(on_cpu, OrtRuntime(on_cpu, threads=1), 2).run(point, requests)
    assert [each.token_ids for each in run.traces] == [each.token_ids for each in plain.traces]


def test_events_are_used_again(runtime: tuple[Bundle, TrtRuntime], gpu: fakegpu.Gpu) -> None:
    bundle, made = runtime
    clock = device_clock(bundle, made)
    assert clock is not None
    alive = gpu.alive["event"]
    for _ in range(5):
        with clock.around("relay"), clock.around("draft"):
            pass
        assert clock.milliseconds(clock.take()) == {"relay": 0.0, "draft": 0.0}
    assert gpu.alive["event"] == alive + 4
    with clock.around("relay"):
        pass
    clock.close()
    assert gpu.alive["event"] == alive


def test_a_cpu_needs_no_such_clock(on_cpu: Bundle) -> None:
    assert device_clock(on_cpu, OrtRuntime(on_cpu, threads=1)) is None


def test_what_is_left_is_the_hosts() -> None:
    by_host = {"verify": 1.0, "sampling": 0.5, "host": 8.5}
    assert on_device(by_host, {"verify": 7.0}) == {"verify": 7.0, "sampling": 0.5, "host": 2.5}
    assert on_device(by_host, {"verify": 20.0})["host"] == 0.0
