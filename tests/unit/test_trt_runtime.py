"""The TensorRT runtime on a fake GPU whose engines are the bundle's own graphs: token for token what the CPU gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import fakegpu
import numpy as np
import pytest
from draft_sources import CHAIN, LOOKUP, MODEL
from fakegpu.bundles import DRAFTERS, VOCAB, make_jobs, run_jobs, tiny_bundle, tokens

from dflow_trt import contract as c
from dflow_trt.bundle import Bundle
from dflow_trt.decode import Decoder
from dflow_trt.feeds import positions
from dflow_trt.memory import plan_memory
from dflow_trt.method.policy import Candidate, FixedLength
from dflow_trt.method.sampling import SamplingParams
from dflow_trt.request import Request
from dflow_trt.runtime.base import Array
from dflow_trt.runtime.ort import OrtRuntime
from dflow_trt.runtime.trt import TrtRuntime, runtime
from dflow_trt.runtime.trt.buffers import CacheBlock

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "heads are kv heads": {"num_key_value_heads": 4},
    "sliding window": {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    "int8 target": {"int8": True},
    "no drafters": {"drafters": {}},
    "draft models": {
        "drafters": {"dflow": DRAFTERS["dflow"]},
        "models": {"self": None, "model": {**MODEL, "num_key_value_heads": 1}},
        "lookup": LOOKUP,
    },
    "chains": {"drafters": {"dflow": DRAFTERS["dflow"]}, "chains": {"eagle3": CHAIN}},
    "dflash2": {
        "drafters": {
            "dflash2": {"block_size": 6, "seed": 5, "dflash2": {}},
            "dflash2-dflow": {"block_size": 8, "relay": True, "dflash2": {"conv_kernel_size": 2}},
        }
    },
    "domino": {
        "drafters": {
            "shifted": {"block_size": 7, "seed": 4, "domino": {"shift_label": True, "pure_draft_prefix_len": 1}},
            "domino-dflow": {"block_size": 8, "relay": True, "domino": {"pure_draft_prefix_len": 2}},
        }
    },
}
GARBAGE = [-3e4, 1e4, 2e4]
Build = Callable[[str], Bundle]
Start = Callable[..., TrtRuntime]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Bundles by variant, each built once."""
    built: dict[str, Bundle] = {}

    def get(name: str) -> Bundle:
        if name not in built:
            built[name] = tiny_bundle(tmp_path_factory.mktemp("trt"), **VARIANTS[name])
        return built[name]

    return get


@pytest.fixture
def gpu() -> fakegpu.Gpu:
    return fakegpu.Gpu()


@pytest.fixture
def start(gpu: fakegpu.Gpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """A runtime on the fake GPU; at the end everything that it allocated has to be free again."""
    running: list[TrtRuntime] = []

    def run(bundle: Bundle, version: str = "11.4", dtype: str = "float32", slots: int | None = None) -> TrtRuntime:
        fakegpu.install(monkeypatch, gpu, version)
        running.append(TrtRuntime(fakegpu.offer(gpu, bundle, version, dtype), slots))
        return running[-1]

    yield run
    for each in running:
        each.close()
    assert gpu.leaks == {}


def reference(bundle: Bundle, jobs: Sequence[Any]) -> dict[str, list[Any]]:
    on_cpu = OrtRuntime(bundle, threads=1)
    found = run_jobs(bundle, on_cpu, jobs)
    on_cpu.close()
    return found


class Poisoned:
    """A runtime whose memory holds garbage wherever nothing live lies: finite in the caches, NaNs elsewhere.

    Before every call: cache rows from the write index on, of slots outside it those behind their last pass, outputs.
    """

    def __init__(self, inner: TrtRuntime, gpu: fakegpu.Gpu) -> None:
        self.inner, self.gpu, self._rng = inner, gpu, np.random.default_rng(0)
        self._live = dict.fromkeys(range(inner.slots), 0)
        self.drawer = inner.drawer

    def run(
        self, engine: str, drafter: str | None, slots: range, feeds: Mapping[str, Array], fetch: Sequence[str] = ()
    ) -> list[Array]:
        self.inner._stream.synchronize()
        if c.WRITE_INDEX.name in feeds:
            block = cache_array(self.inner, self.gpu, f"{drafter or c.TARGET}.cache")
            starts = dict(zip(slots, feeds[c.WRITE_INDEX.name].tolist(), strict=True))
            for slot in range(self.inner.slots):
                row = starts.get(slot, self._live[slot])
                block[:, slot, :, row:] = self._rng.choice(GARBAGE, block[:, slot, :, row:].shape)
        if engine == c.TARGET:
            ends = feeds[c.WRITE_INDEX.name] + feeds[c.ROW_COUNT.name]
            self._live |= dict(zip(slots, ends.tolist(), strict=True))
        for name in [c.NEXT_IDS.name, c.LOGITS.name]:
            memory = self.inner.buffers[name]
            self.gpu.bytes(memory.address, memory.size).fill(0xFF)
        return self.inner.run(engine, drafter, slots, feeds, fetch)

    def keep_pending(self, drafter: str, rows: Mapping[int, int], slots: range) -> None:
        self.inner.keep_pending(drafter, rows, slots)

    def swap(self, a: int, b: int, rows: int) -> None:
        self._live[a], self._live[b] = self._live[b], self._live[a]
        self.inner.swap(a, b, rows)

    def close(self) -> None:
        self.inner.close()


def cache_array(inner: TrtRuntime, gpu: fakegpu.Gpu, name: str) -> Array:
    """[tensors,slots,N,L,D] float32, as it lies on the device."""
    block: CacheBlock = inner.buffers.caches[name]
    shape = (block.tensors, block.slots, block.heads, block.rows, block.row_bytes // 4)
    return gpu.array(inner.buffers[name].address, shape, np.float32)


# -- the same tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "version"),
    [("plain", "11.4"), ("plain", "10.16"), ("plain", "rtx"), *((name, "11.4") for name in list(VARIANTS)[1:])],
)
def test_requests_that_join_wait_and_leave_get_what_onnxruntime_gives(
    build: Build, start: Start, variant: str, version: str
) -> None:
    """Tokens, counts and log-probabilities to the bit: every strategy, prefill chunks, relays, swaps and cancels."""
    bundle = build(variant)
    jobs = make_jobs(bundle, 18)
    assert run_jobs(bundle, start(bundle, version), jobs) == reference(bundle, jobs)


@pytest.mark.parametrize("variant", ["plain", "heads are kv heads", "sliding window", "draft models"])
def test_garbage_wherever_nothing_live_lies_changes_nothing(
    build: Build, start: Start, gpu: fakegpu.Gpu, variant: str
) -> None:
    bundle = build(variant)
    jobs = make_jobs(bundle, 12, seed=5)
    assert run_jobs(bundle, Poisoned(start(bundle), gpu), jobs) == reference(bundle, jobs)


@pytest.mark.parametrize("slots", [1, 3, 5])
def test_fewer_slots_than_the_bundle_was_built_for(build: Build, start: Start, slots: int) -> None:
    """Neither a window nor a bucket reaches beyond the slots that there are."""
    bundle = build("plain")
    small = replace(bundle, build=replace(bundle.build, max_batch_size=slots))
    jobs = make_jobs(bundle, 12, seed=2)
    assert run_jobs(small, start(bundle, slots=slots), jobs) == reference(small, jobs)


class Rest(FixedLength):
    """No drafts for sixty rounds, then all."""

    def __init__(self) -> None:
        self._left = 60

    def lengths(self, requests: Sequence[Candidate | None]) -> list[int]:
        self._left -= 1
        return super().lengths([request if self._left < 0 else None for request in requests])


def test_what_draft_models_have_not_read_for_long_is_read_in_calls_that_have_room(build: Build, start: Start) -> None:
    """Sixty tokens of each of eight requests: far more rows than a call may have."""
    bundle, found = build("draft models"), []
    params, rng = SamplingParams(max_tokens=80, ignore_eos=True), np.random.default_rng(0)
    prompts = rng.integers(2, VOCAB, (8, 9)).tolist()
    for each in (start(bundle), OrtRuntime(bundle, threads=1)):
        decoder = Decoder(bundle, each)
        decoder._policy = Rest()
        for i, ids in enumerate(prompts):
            decoder.submit(Request(str(i), ids, params, bundle.strategy(["self", "model"][i % 2]), seed=i))
        rounds = []
        while not decoder.idle:
            rounds.append([(e.request_id, e.tokens, e.num_accepted) for e in decoder.step().emissions])
        found.append(rounds)
    assert found[0] == found[1]
    assert sum(accepted for each in found[0] for id, _, accepted in each if int(id) % 2 == 0) > 20


def test_an_engine_that_cannot_be_captured_is_run_step_by_step(build: Build, start: Start, gpu: fakegpu.Gpu) -> None:
    bundle = build("plain")
    jobs = make_jobs(bundle, 12, seed=3)
    gpu.uncapturable = {"target", "dflow.drafter"}
    on_gpu = start(bundle)
    assert run_jobs(bundle, on_gpu, jobs) == reference(bundle, jobs)
    assert on_gpu.num_graphs > 0, "the others are"
    assert {key for key, *_ in on_gpu._calls} > on_gpu._uncaptured == {("target", None), ("drafter", "dflow")}


def test_graphs_that_are_dropped_for_others_are_captured_again(
    build: Build, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = build("plain")
    jobs = make_jobs(bundle, 12, seed=4)
    monkeypatch.setattr(runtime, "MAX_CALLS", 5)
    on_gpu = start(bundle)
    assert run_jobs(bundle, on_gpu, jobs) == reference(bundle, jobs)
    assert len(on_gpu._calls) == 5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_engines_in_sixteen_bits_give_the_logits_of_float32_nearly(build: Build, start: Start, dtype: str) -> None:
    """Caches, hidden and logits are then half as large, on the device and on their way to the host."""
    bundle, prompt = build("plain"), np.arange(2, 16)[None]
    on_gpu, on_cpu = start(bundle, dtype=dtype), OrtRuntime(bundle, threads=1)
    feeds = prefill_feeds(prompt)
    wide = [each.run(c.TARGET, None, range(2, 3), feeds, (c.LOGITS.name,))[0] for each in (on_gpu, on_cpu)]
    assert wide[0].dtype == np.float32
    assert 0 < np.abs(wide[0] - wide[1])[..., :VOCAB].max() < 0.1
    jobs = make_jobs(bundle, 10)
    pairs = zip(run_jobs(bundle, on_gpu, jobs).values(), run_jobs(bundle, on_cpu, jobs).values(), strict=True)
    firsts = [tokens(found)[0] == tokens(wanted)[0] for found, wanted in pairs if tokens(wanted)]
    assert np.mean(firsts) > 0.7


def prefill_feeds(ids_BS: Array, start: int = 0, logit_rows: int = 1) -> dict[str, Array]:
    batch, rows = ids_BS.shape
    start_B = np.full(batch, start)
    return {
        c.INPUT_IDS.name: ids_BS,
        c.POSITION_IDS.name: positions(start_B, rows),
        c.ROW_COUNT.name: np.full(batch, rows),
        c.LOGIT_ROWS.name: np.tile(np.arange(rows)[-logit_rows:], (batch, 1)),
        c.WRITE_INDEX.name: start_B,
        c.KV_INDEX.name: np.arange(-(-(start + rows) // 64) * 64),
    }


# -- what crosses, what is written, what recurs ------------------------------------------------------------------------


def test_a_padded_call_writes_its_own_rows_and_the_end_of_other_caches(
    build: Build, start: Start, gpu: fakegpu.Gpu
) -> None:
    """Three slots in the middle of eight, of which a window of four is bound."""
    bundle = build("plain")
    on_gpu = start(bundle)
    cache = cache_array(on_gpu, gpu, "target.cache")
    on_gpu._stream.synchronize()
    cache[...] = np.random.default_rng(0).standard_normal(cache.shape)
    before = cache.copy()
    on_gpu.run(c.TARGET, None, range(2, 5), prefill_feeds(np.full((3, 5), 7), start=10), (c.NEXT_IDS.name,))
    changed = (cache != before).any(axis=(0, 2, 4))  # [slots,L]
    rows = bundle.cache_rows
    written = {slot: np.flatnonzero(changed[slot]).tolist() for slot in range(8)}
    padding = list(range(rows - 8, rows))
    live = {slot: list(range(10, 18)) for slot in (2, 3, 4)}
    assert written == {0: [], 1: [], **live, 5: padding, 6: [], 7: []}
    assert rows - 8 >= bundle.build.max_seq_len


def test_only_ids_cross_to_the_host_and_logits_where_they_are_asked_for(
    build: Build, start: Start, gpu: fakegpu.Gpu
) -> None:
    bundle = build("plain")
    on_gpu = start(bundle)
    blocks = {on_gpu.buffers[name].address: name for name in on_gpu.buffers.names}
    ids = {"next_ids", "dflash.draft_ids", "dflow.draft_ids"}
    for sampling, crossing in (({}, ids), ({"temperature": 1.0}, ids | {"logits"})):
        params = SamplingParams(max_tokens=12, ignore_eos=True, **sampling)
        jobs = make_jobs(bundle, 8)
        gpu.copied_out.clear()
        on_gpu._drop_calls()  # a graph's copies are seen when it is captured
        run_jobs(bundle, on_gpu, [replace(job, request=replace(job.request, params=params)) for job in jobs])
        assert {blocks[address] for address in gpu.copied_out} == crossing


def test_a_round_whose_shapes_were_seen_before_is_graph_launches_and_nothing_else(
    build: Build, start: Start, gpu: fakegpu.Gpu
) -> None:
    """No allocation, no shape, no address: one launch an engine, and the copies that keep ``pending_h``."""
    bundle = build("plain")
    on_gpu = start(bundle)
    feeds = prefill_feeds(np.full((2, 8), 5), logit_rows=8)

    def rounds() -> None:
        for row in (0, 8, 16):
            ids = feeds | {c.WRITE_INDEX.name: np.full(2, row), c.POSITION_IDS.name: positions(np.full(2, row), 8)}
            on_gpu.run(c.TARGET, None, range(2), ids, (c.NEXT_IDS.name,))
            context = {name: ids[name] for name in (c.POSITION_IDS.name, c.WRITE_INDEX.name)}
            on_gpu.run(c.CONTEXT, "dflow", range(2), context)
            on_gpu.keep_pending("dflow", {0: 8, 1: 8}, range(2))

    rounds()
    graphs = on_gpu.num_graphs
    gpu.calls.clear()
    rounds()
    assert on_gpu.num_graphs == graphs == 2
    assert gpu.calls == {
        "cudaGraphLaunch": 6,
        "cudaEventSynchronize": 9,
        "cudaEventRecord": 6,
        "cudaMemcpy3DAsync": 3,
    }


def test_a_decoding_run_makes_few_graphs(build: Build, start: Start, gpu: fakegpu.Gpu) -> None:
    bundle = build("plain")
    on_gpu = start(bundle)
    run_jobs(bundle, on_gpu, make_jobs(bundle, 16, seed=9))
    assert gpu.calls["cudaGraphLaunch"] > 3 * on_gpu.num_graphs


# -- slots -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("a", "b", "rows"), [(0, 7, 100), (3, 2, 1), (6, 1, 256), (4, 5, 0)])
def test_a_swap_exchanges_rows_of_every_cache_and_all_of_pending_h(
    build: Build, start: Start, gpu: fakegpu.Gpu, a: int, b: int, rows: int
) -> None:
    on_gpu, rng = start(build("plain")), np.random.default_rng(0)
    on_gpu._stream.synchronize()
    wanted = {}
    for name in on_gpu.buffers.caches:
        cache = cache_array(on_gpu, gpu, name)
        cache[...] = rng.standard_normal(cache.shape)
        wanted[name] = cache.copy()
        wanted[name][:, [a, b], :, :rows] = cache[:, [b, a], :, :rows]
    pending = pending_array(on_gpu, gpu)
    pending[...] = rng.standard_normal(pending.shape)
    moved = pending.copy()
    moved[[a, b]] = pending[[b, a]]
    on_gpu.swap(a, b, rows)
    on_gpu._stream.synchronize()
    for name, cache in wanted.items():
        assert (cache_array(on_gpu, gpu, name) == cache).all()
    assert (pending == moved).all()


def pending_array(on_gpu: TrtRuntime, gpu: fakegpu.Gpu) -> Array:
    size = DRAFTERS["dflow"]["block_size"]
    return gpu.array(on_gpu.buffers["dflow.pending_h"].address, (on_gpu.slots, size, 64), np.float32)


def test_kept_rows_are_those_of_their_slots_alone(build: Build, start: Start, gpu: fakegpu.Gpu) -> None:
    """Slots 1, 2 and 4 of a call on 1..4, whose rows and slots are both padded."""
    on_gpu = start(build("plain"))
    feeds = prefill_feeds(np.arange(2, 22).reshape(4, 5))
    on_gpu.run(c.TARGET, None, range(1, 5), feeds)
    on_gpu.run(
        c.CONTEXT, "dflow", range(1, 5), {name: feeds[name] for name in (c.POSITION_IDS.name, c.WRITE_INDEX.name)}
    )
    on_gpu._stream.synchronize()
    h = gpu.array(on_gpu.buffers["dflow.h"].address, (4, 8, 64), np.float32).copy()
    pending = pending_array(on_gpu, gpu)
    pending[...] = -1
    on_gpu.keep_pending("dflow", {1: 5, 2: 3, 4: 2}, range(1, 5))
    on_gpu._stream.synchronize()
    for slot, count in {1: 5, 2: 3, 4: 2}.items():
        assert (pending[slot, :count] == h[slot - 1, :count]).all()
        assert (pending[slot, 5:] == -1).all()
    assert (pending[[0, 3, 5, 6, 7]] == -1).all()


# -- memory ------------------------------------------------------------------------------------------------------------


def test_the_caches_are_as_large_as_the_memory_plan_says(build: Build, start: Start) -> None:
    bundle = build("plain")
    buffers, plan = start(bundle).buffers, plan_memory(bundle)
    assert buffers["target.cache"].size == plan.target_cache
    assert sum(buffers[f"{name}.cache"].size for name in DRAFTERS) == plan.drafter_cache
    assert buffers["dflow.pending_h"].size == plan.relay_state


def test_no_memory_is_allocated_after_the_start_but_for_logits(build: Build, start: Start, gpu: fakegpu.Gpu) -> None:
    bundle = build("plain")
    on_gpu = start(bundle)
    gpu.calls.clear()
    run_jobs(bundle, on_gpu, make_jobs(bundle, 20))
    assert gpu.calls["cudaMalloc"] == 0
    assert gpu.calls["cudaHostAlloc"] == 1
