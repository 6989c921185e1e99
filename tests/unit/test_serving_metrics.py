"""ServingMetrics against what a client of the decoder counts by itself, and against the method's own arithmetic."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from fake import FakeRuntime, Round, Script, Toy, draft_model_spec, drafter_spec, expect, make_bundle

from dflow_trt.decode import Decoder
from dflow_trt.method.sampling import SamplingParams
from dflow_trt.request import Emission, Request
from dflow_trt.serving import families as m
from dflow_trt.serving.metrics import Capacity, ServingMetrics
from dflow_trt.serving.series import Family, MemorySink, Registry, Series, TritonSink
from dflow_trt.spec import NgramSpec

TOY = Toy()
SCRIPTS = {"flow": Script("mixed", 75, 1), "flash": Script("mixed", 60, 2), "small": Script("mixed", 70, 3)}
LOOKUP = NgramSpec("lookup", None, 1, 3, 6)
DRAFTERS = [drafter_spec("flow", 8, "after_rejection"), drafter_spec("flash", 5, None), draft_model_spec("small", 4)]
BUNDLE = make_bundle([*DRAFTERS, LOOKUP])
NUM_DRAFTS = BUNDLE.verify_rows - 1
STRATEGIES, TASKS = ("ar", "flow", "flow-norelay", "flash", "small", "lookup"), ("", "code", "sums")


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Server:
    """The smallest loop: a decoder and its metrics. Queues are seen from outside, as a server's are."""

    def __init__(self, max_queue: int = 1024) -> None:
        self.sink, self.clock = MemorySink(), Clock()
        self.metrics = ServingMetrics(self.sink, NUM_DRAFTS, self.clock)
        self.runtime = FakeRuntime(BUNDLE, TOY, SCRIPTS)
        self.decoder = Decoder(BUNDLE, self.runtime, max_queue)
        self.waiting: list[str] = []
        self.emissions: list[Emission] = []

    def submit(
        self,
        id: str,
        length: int = 3,
        strategy: str = "flow",
        task: str = "",
        draft_tokens: int | None = None,
        **params: Any,
    ) -> Request:
        draw = random.Random(id)
        prompt = [*range(length // 2), *(draw.randrange(50) for _ in range(length - length // 2))]
        chosen, settings = BUNDLE.strategy(strategy), SamplingParams(**params)
        request = Request(id, prompt, settings, chosen, 0, draft_tokens=draft_tokens, arrival=self.clock())
        self.metrics.submitted(request, task)
        self.decoder.submit(request)
        self.waiting.append(id)
        return request

    def step(self, seconds: float = 0.01) -> None:
        admitted = self.waiting[: BUNDLE.build.max_batch_size - self.decoder.num_active]
        for id in admitted:
            self.metrics.started(id)
        del self.waiting[: len(admitted)]
        self.clock.now += seconds
        result = self.decoder.step()
        self.metrics.round(result, self.decoder.num_queued, self.decoder.num_active)
        for emission in result.emissions:
            self.emissions.append(emission)
            if emission.finish_reason:
                self.metrics.finished(emission.request_id, emission.finish_reason)

    def drain(self) -> None:
        while not self.decoder.idle:
            self.step()
        self.metrics.flush()

    def sum(self, family: Family, suffix: str = "", **labels: str) -> float:
        return self.sink.sum(family.name + suffix, **labels)


def mixed_traffic(server: Server) -> dict[str, tuple[Request, str]]:
    """Ninety ragged requests of every strategy and task, joining while others run."""
    choose, asked = random.Random(5), {}
    for i in range(90):
        strategy, task = choose.choice(STRATEGIES), choose.choice(TASKS)
        request = server.submit(
            f"r{i}",
            choose.randrange(1, 60),
            strategy,
            task,
            draft_tokens=choose.choice((None, None, 0, 2)),
            max_tokens=choose.randrange(1, 30),
        )
        asked[request.id] = request, task or m.NONE
        for _ in range(choose.randrange(3)):
            server.step()
    server.drain()
    return asked


@pytest.fixture(scope="module")
def served() -> tuple[Server, dict[str, tuple[Request, str]]]:
    server = Server()
    return server, mixed_traffic(server)


def labels_of(request: Request, task: str) -> dict[str, str]:
    return {"strategy": request.strategy.name, "task": task}


def test_sums_equal_what_the_method_gives_for_each_strategy_and_task(served: Any) -> None:
    server, asked = served
    wanted: dict[Family, Counter[tuple[str, str]]] = {}

    def count(family: Family, group: Mapping[str, str], amount: int) -> None:
        wanted.setdefault(family, Counter())[group["strategy"], group["task"]] += amount

    for request, task in asked.values():
        expected, group = expect(BUNDLE, TOY, SCRIPTS, request), labels_of(request, task)
        rounds = expected.rounds
        count(m.PROMPT_TOKENS, group, len(request.prompt_ids))
        count(m.OUTPUT_TOKENS, group, len(expected.tokens))
        count(m.EMITTED, group, len(expected.tokens) - 1)
        count(m.ROUNDS, group, len(rounds))
        count(m.DRAFTED, group, sum(len(each.block) - 1 for each in rounds))
        count(m.ACCEPTED, group, sum(each.accepted for each in rounds))
        count(m.RELAYED, group, sum(each.relayed for each in rounds))
        count(m.REQUESTS, group, 1)
    assert len(wanted[m.REQUESTS]) == len(STRATEGIES) * len(TASKS), "the traffic has every pair"
    assert wanted[m.RELAYED].total() > 0
    for strategy in STRATEGIES[1:]:
        assert sum(count for (name, _), count in wanted[m.ACCEPTED].items() if name == strategy) > 0
    for family, counts in wanted.items():
        for (strategy, task), amount in counts.items():
            assert server.sum(family, strategy=strategy, task=task) == amount, (family.name, strategy, task)
        assert server.sum(family) == counts.total()


def rounds_of(asked: Mapping[str, tuple[Request, str]], strategy: str) -> list[Round]:
    requests = [request for request, _ in asked.values() if request.strategy.name == strategy]
    return [each for request in requests for each in expect(BUNDLE, TOY, SCRIPTS, request).rounds]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lengths_and_positions_are_those_of_the_rounds(served: Any, strategy: str) -> None:
    server, asked = served
    rounds = rounds_of(asked, strategy)
    lengths = {
        m.DRAFT_LENGTH: [len(each.block) - 1 for each in rounds],
        m.ACCEPTED_LENGTH: [each.accepted for each in rounds],
    }
    for family, found in lengths.items():
        for bound in range(NUM_DRAFTS + 1):
            below = sum(length <= bound for length in found)
            assert server.sum(family, "_bucket", le=str(bound), strategy=strategy) == below
        for position in range(1, NUM_DRAFTS + 1):
            assert family.reached is not None
            reached = sum(length >= position for length in found)
            assert server.sum(family.reached, position=str(position), strategy=strategy) == reached
        assert server.sum(family, "_bucket", le="+Inf", strategy=strategy) == len(found)
        assert server.sum(family, "_count", strategy=strategy) == len(found)
        assert server.sum(family, "_sum", strategy=strategy) == sum(found)


def test_what_a_client_reads_is_what_was_counted(served: Any) -> None:
    server, asked = served
    tokens = sum(len(emission.tokens) for emission in server.emissions)
    last = {emission.request_id: emission for emission in server.emissions if emission.finish_reason}
    assert server.sum(m.OUTPUT_TOKENS) == tokens
    assert server.sum(m.REUSED_TOKENS) == sum(emission.stats.reused_tokens for emission in last.values()) > 0
    for reason, count in Counter(emission.finish_reason for emission in last.values()).items():
        assert server.sum(m.REQUESTS, outcome=str(reason)) == count
    assert server.sum(m.TOKEN_LATENCY, "_count") == tokens - len(asked)
    for family in (m.FIRST_TOKEN, m.QUEUE_TIME, m.REQUEST_TIME):
        assert server.sum(family, "_count") == len(asked)
    assert server.sum(m.SLOTS_IN_USE) == server.sum(m.QUEUE_LENGTH) == 0
    assert server.sum(m.SLOT_STEPS) <= BUNDLE.build.max_batch_size * server.sum(m.STEPS)


def test_stage_seconds_are_the_decoders_milliseconds_under_the_names_of_the_method() -> None:
    server, spent = Server(), Counter[str]()
    server.submit("a", max_tokens=12)
    step = server.decoder.step

    def recording() -> Any:
        result = step()
        spent.update(result.milliseconds)  # type: ignore[arg-type]
        return result

    server.decoder.step = recording  # type: ignore[method-assign, assignment]
    server.drain()
    spent["draft"] = spent.pop("drafter")
    assert set(spent) == {"relay", "draft", "verify", "prefill", "context", "host"}
    for stage, milliseconds in spent.items():
        assert server.sum(m.STAGE_SECONDS, stage=stage) == pytest.approx(milliseconds / 1e3)


def test_times_are_from_arrival_and_a_token_of_a_round_has_its_share_of_the_gap() -> None:
    server = Server()
    server.submit("a", length=2, strategy="ar", max_tokens=3)
    server.clock.now += 7.0
    server.step(2.0)  # prefill: the first token, 9 s after arrival
    server.step(0.5)
    server.step(0.25)
    server.metrics.flush()
    assert server.sum(m.QUEUE_TIME, "_sum") == 7.0
    assert server.sum(m.FIRST_TOKEN, "_sum") == 9.0
    assert server.sum(m.TOKEN_LATENCY, "_sum") == 0.75
    assert server.sum(m.TOKEN_LATENCY, "_count") == 2
    assert server.sum(m.REQUEST_TIME, "_sum") == 9.75
    assert server.sum(m.FIRST_TOKEN, "_bucket", le="5") == 0
    assert server.sum(m.FIRST_TOKEN, "_bucket", le="10") == 1


def test_tokens_of_one_round_share_its_gap() -> None:
    server = Server()
    server.runtime.scripts["flow"] = Script("self")
    server.submit("a", max_tokens=9)
    server.step(1.0)
    server.step(0.8)  # eight tokens: seven drafts and the bonus token
    server.metrics.flush()
    assert server.sum(m.TOKEN_LATENCY, "_count") == 8
    assert server.sum(m.TOKEN_LATENCY, "_sum") == pytest.approx(0.8)
    assert server.sum(m.TOKEN_LATENCY, "_bucket", le="0.1") == 8
    assert server.sum(m.TOKEN_LATENCY, "_bucket", le="0.05") == 0


def test_a_request_cancelled_in_the_queue_has_an_outcome_and_nothing_else() -> None:
    server = Server()
    server.submit("a", max_tokens=5)
    server.decoder.cancel("a")
    server.waiting.clear()
    server.drain()
    assert server.sum(m.REQUESTS, outcome="cancelled") == server.sum(m.REQUESTS) == 1
    for family in (m.PROMPT_TOKENS, m.OUTPUT_TOKENS, m.ROUNDS):
        assert server.sum(family) == 0
    for family in (m.FIRST_TOKEN, m.QUEUE_TIME):
        assert server.sum(family, "_count") == 0


def test_a_failing_request_is_an_error_and_its_rounds_count() -> None:
    server = Server()
    server.submit("bad", max_tokens=20, temperature=1.0)
    server.step()
    server.step()
    server.runtime.fail_logits = lambda name, position: True
    server.drain()
    assert server.sum(m.REQUESTS, outcome="error") == 1
    stats = server.emissions[-1].stats
    counted = [server.sum(family) for family in (m.ROUNDS, m.DRAFTED, m.ACCEPTED, m.EMITTED, m.RELAYED)]
    assert counted == [stats.rounds, stats.drafted, stats.accepted, stats.emitted, stats.relayed_slots]
    assert stats.rounds >= 2


def test_refused_requests_are_outcomes_too() -> None:
    server = Server()
    server.metrics.refused("invalid")
    server.metrics.refused("queue_full", "flow", "code")
    server.metrics.flush()
    assert server.sum(m.REQUESTS, outcome="invalid", strategy=m.NONE, task=m.NONE) == 1
    assert server.sum(m.REQUESTS, outcome="queue_full", strategy="flow", task="code") == 1


def test_outcomes_of_a_new_pair_start_at_zero() -> None:
    server = Server()
    server.submit("a", task="code")
    server.metrics.flush()
    found = {s.labels["outcome"]: v for s, v in server.sink.values.items() if s.name == m.REQUESTS.name}
    assert found == dict.fromkeys(m.OUTCOMES, 0)


def test_task_labels_are_bounded() -> None:
    server = Server()
    names = [f"task-{i}" for i in range(200)] + ["x" * (m.MAX_TASK_LENGTH + 1)]
    for name in names:
        server.metrics.refused("invalid", task=name)
    server.metrics.refused("invalid", task="task-0")
    server.metrics.flush()
    tasks = {s.labels["task"] for s in server.sink.values if "task" in s.labels}
    assert len(tasks) == m.MAX_TASKS - 1  # nothing was sent without a task
    assert server.sum(m.REQUESTS, task="task-0") == 2
    assert server.sum(m.REQUESTS, task=m.OTHER) == len(names) - (m.MAX_TASKS - 2)
    assert server.sum(m.REQUESTS) == len(names) + 1


def test_cache_bytes_follow_the_committed_rows() -> None:
    server = Server()
    server.metrics.capacity(Capacity.of(BUNDLE, slots=4, max_queue=9))
    server.submit("a", length=5, max_tokens=20)
    server.step()
    server.metrics.flush()
    size, used = server.sum(m.CACHE_BYTES, cache="target"), server.sum(m.CACHE_USED, cache="target")
    assert used == 5 * size / (4 * BUNDLE.cache_rows), "the prompt's rows; the anchor is in no cache"
    assert server.sum(m.CACHE_USED, cache="drafters") == 5 * server.sum(m.CACHE_BYTES, cache="drafters") / (
        4 * BUNDLE.cache_rows
    )
    assert server.sum(m.RELAY_BYTES) > 0
    assert (server.sum(m.SLOTS), server.sum(m.QUEUE_LIMIT)) == (4, 9)
    server.drain()
    assert server.sum(m.CACHE_USED) == 0


def test_nothing_is_in_use_when_the_last_sequence_ended_in_a_round_that_failed() -> None:
    server = Server()
    server.submit("a", max_tokens=20)
    server.step()
    server.metrics.flush()
    assert server.sum(m.SLOTS_IN_USE) == 1
    server.metrics.finished("a", "error")  # the step raised: there is no result
    server.metrics.flush()
    assert server.sum(m.SLOTS_IN_USE) == 0


def test_submissions_from_many_threads_are_all_counted() -> None:
    server = Server()
    request = server.submit("a")

    def refuse() -> None:
        for _ in range(2000):
            server.metrics.refused("queue_full", request.strategy.name)

    threads = [threading.Thread(target=refuse) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        server.metrics.flush()
    for thread in threads:
        thread.join()
    server.drain()
    assert server.sum(m.REQUESTS, outcome="queue_full") == 8000


def test_close_publishes_what_the_last_interval_counted() -> None:
    server = Server()
    server.metrics.start(seconds=3600)
    server.metrics.refused("invalid")
    assert server.sum(m.REQUESTS) == 0
    server.metrics.close()
    assert server.sum(m.REQUESTS) == 1
    assert server.sum(m.HEARTBEAT) > 0


# -- publishing --------------------------------------------------------------------------------------------------------


class Recorder:
    """A sink that keeps every write."""

    def __init__(self) -> None:
        self.writes: list[tuple[Series, float]] = []

    def write(self, series: Series, value: float) -> None:
        self.writes.append((series, value))


def test_only_what_changed_is_published() -> None:
    sink = Recorder()
    registry = Registry(sink)
    family = Family("x_seconds", "histogram", "", ("a",))
    histogram = registry.histogram(family, ("b",), (1.0, 2.0))
    histogram.observe(1.5)
    registry.flush()
    assert len(sink.writes) == 5, "a new series is published whatever it is"
    registry.flush()
    assert len(sink.writes) == 5
    histogram.observe(9.0)
    registry.flush()
    changed = {(s.name, s.labels.get("le")): value for s, value in sink.writes[5:]}
    assert changed == {("x_seconds_bucket", "+Inf"): 2, ("x_seconds_sum", None): 10.5, ("x_seconds_count", None): 2}


def test_a_bound_is_in_its_bucket() -> None:
    sink = MemorySink()
    registry = Registry(sink)
    family = Family("x_seconds", "histogram", "", ("a",))
    registry.histogram(family, ("b",), (0.0005, 1.0, 2.5)).observe(1.0, 3)
    registry.flush()
    buckets = [(s.labels["le"], value) for s, value in sink.values.items() if s.name == "x_seconds_bucket"]
    assert buckets == [("0.0005", 0), ("1", 3), ("2.5", 3), ("+Inf", 3)]


class Endpoint:
    """Stands in for ``triton_python_backend_utils``: its rules of use, as the real server has them."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self.kinds: dict[str, str] = {}

    @property
    def utils(self) -> Any:
        endpoint = self

        class Family:
            COUNTER, GAUGE = "counter", "gauge"

            def __init__(self, name: str, description: str, kind: str) -> None:
                assert name not in endpoint.kinds, "the same family twice"
                endpoint.kinds[name] = kind
                self.name = name

            def Metric(self, labels: dict[str, str]) -> Any:
                assert all(isinstance(value, str) for value in labels.values())
                key = self.name, tuple(labels.items())
                endpoint.values.setdefault(key, 0.0)

                def increment(value: float) -> None:
                    assert endpoint.kinds[self.name] == "counter"
                    assert value >= 0
                    endpoint.values[key] += value

                def set(value: float) -> None:
                    assert endpoint.kinds[self.name] == "gauge"
                    endpoint.values[key] = value

                return SimpleNamespace(increment=increment, set=set)

        return SimpleNamespace(MetricFamily=Family)


def test_the_triton_sink_ends_at_the_totals() -> None:
    server, endpoint = Server(), Endpoint()
    registry = server.metrics._registry
    memory, triton = server.sink, TritonSink(endpoint.utils)

    class Both:
        def write(self, series: Series, value: float) -> None:
            memory.write(series, value)
            triton.write(series, value)

    registry._sink = Both()
    for i in range(10):
        server.submit(f"r{i}", task=("", "code")[i % 2], max_tokens=12)
        server.step()
        server.metrics.flush()
    server.drain()
    found = {(s.name, tuple(s.labels.items())): value for s, value in memory.values.items()}
    assert endpoint.values == pytest.approx(found)


# -- the table ---------------------------------------------------------------------------------------------------------


def test_names_follow_prometheus_conventions() -> None:
    names = [family.name for family in m.FAMILIES]
    assert len(set(names)) == len(names) > 20
    for family in m.FAMILIES:
        assert family.name.startswith("dflow_")
        assert family.name.endswith("_total") == (family.kind == "counter"), family.name
        assert family.help.endswith(".")
        if family.kind == "histogram":
            assert family.name.endswith(("_seconds", "_tokens")), family.name


def test_every_published_series_is_in_the_table(served: Any) -> None:
    server, _ = served
    server.metrics.capacity(Capacity.of(BUNDLE, 4, 9))
    server.metrics.flush()
    table = {name: set(family.series_labels) for family in m.FAMILIES for name in family.series_names}
    for series in server.sink.values:
        assert set(series.labels) <= table[series.name], series.name
        assert set(series.labels) >= table[series.name] - {"le"}, series.name
    assert {series.name for series in server.sink.values} == set(table), "and the table has no other"
