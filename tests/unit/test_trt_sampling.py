"""Drawing on the device: the kernel's arithmetic, compiled for the CPU, against the CPU's own sampler, draw by draw."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import fakegpu
import ml_dtypes
import numpy as np
import plugin_toolchain as toolchain
import pytest
from fakegpu.bundles import tiny_bundle
from fakegpu.drawing import draw_on_device

from dflow_trt.decode import Decoder
from dflow_trt.method.sampling import Pick, Sampler, SamplingParams, uniform
from dflow_trt.request import Request
from dflow_trt.runtime.draw import Draw, drawable
from dflow_trt.runtime.ort import OrtRuntime
from dflow_trt.runtime.trt import TrtRuntime
from dflow_trt.runtime.trt import runtime as trt_runtime
from dflow_trt.runtime.trt.sampler import ARGUMENTS, ENTRY, RECORD, load_entry, record

Array = np.ndarray[Any, np.dtype[Any]]
Run = Callable[[Array, int, Array], Array]

VOCABULARIES = [(1, 1), (3, 2), (128, 128), (640, 515), (4096, 4000)]
OPTIONS = {
    "temperature": [1e-4, 0.1, 0.7, 1.0, 2.5, 50.0],
    "top_k": [0, 0, 1, 5, 50, 10**6],
    "top_p": [1.0, 1.0, 1e-6, 0.5, 0.9, 0.999],
    "min_p": [0.0, 0.0, 0.02, 0.5, 1.0],
}
KINDS = ("smooth", "ties", "equal", "peaked", "wide", "minus infinity")


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    sources = [toolchain.TESTS / "test_sampling.cpp"]
    return ctypes.CDLL(str(toolchain.host_program("libtest_sampling.so", sources, "-shared", "-fPIC")))


@pytest.fixture(scope="module")
def alone(library: ctypes.CDLL) -> Run:
    """The arithmetic with a single thread."""

    def run(logits: Array, live: int, records: Array) -> Array:
        ids = np.zeros(len(records), np.int64)
        sizes = ctypes.c_int64(logits.shape[1]), ctypes.c_int32(live)
        library.dflow_sample_alone(
            address(logits), *sizes, address(records), ctypes.c_int64(len(records)), address(ids)
        )
        return ids

    return run


def address(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def kernel(library: ctypes.CDLL, logits: Array, dtype: int, live: int, records: Array) -> Array:
    """The kernel itself, the threads of its blocks as fibers."""
    entry = getattr(library, ENTRY)
    entry.argtypes, entry.restype = ARGUMENTS, ctypes.c_int32
    ids = np.full(len(records), -7)
    where = (address(logits), dtype, logits.shape[1], live, address(records), len(records), address(ids), None)
    assert entry(*where) == 0
    return ids


def rows_of(kind: str, rng: np.random.Generator, rows: int, columns: int) -> Array:
    logits = rng.standard_normal((rows, columns)).astype(np.float32)
    if kind == "ties":
        return np.round(4 * logits) / 4 * np.float32(1) - np.float32(0)
    if kind == "equal":
        return np.full_like(logits, -3.25)
    if kind == "peaked":
        return 12 * logits
    if kind == "wide":
        return 3e4 * logits
    if kind == "minus infinity":
        return np.where(rng.integers(4, size=logits.shape) > 0, logits, -np.inf).astype(np.float32)
    return logits


def draws_of(rng: np.random.Generator, count: int, rows: int) -> list[Draw]:
    params = [
        SamplingParams(**{name: rng.choice(values).item() for name, values in OPTIONS.items()}) for _ in range(count)
    ]
    keys = zip(rng.integers(0, 2**64, count, np.uint64).tolist(), rng.integers(0, 128, count).tolist(), strict=True)
    positions, chosen = rng.integers(0, 40000, count).tolist(), rng.integers(0, rows, count).tolist()
    return [
        Draw(0, row, each, seed, index, position)
        for row, each, (seed, index), position in zip(chosen, params, keys, positions, strict=True)
    ]


def records_of(draws: list[Draw]) -> Array:
    return np.array([record(draw, draw.row) for draw in draws], RECORD)


def picked(logits: Array, live: int, draw: Draw) -> int:
    sampler = Sampler(draw.params, [0], live, [], draw.seed, draw.sample_index)
    return sampler.pick(logits[draw.row], draw.position).token


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("columns", "live"), VOCABULARIES)
def test_every_draw_is_that_of_the_cpus_sampler(alone: Run, kind: str, columns: int, live: int) -> None:
    """Temperatures, top-k, top-p and min-p in all combinations; garbage in the columns that are no token."""
    rng = np.random.default_rng(columns)
    logits = rows_of(kind, rng, 32, columns)
    logits[:, 0] = np.where(np.isinf(logits[:, 0]), 0, logits[:, 0])
    logits[:, live:] = 1e30
    draws = draws_of(rng, 300, 32)
    found, wanted = alone(logits, live, records_of(draws)), [picked(logits, live, draw) for draw in draws]
    assert found.tolist() == wanted


def test_the_random_numbers_are_those_of_the_cpu(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(0)
    draws = draws_of(rng, 2000, 1)
    bits = np.zeros(len(draws), np.uint64)
    records = records_of(draws)
    library.dflow_random_bits(address(records), ctypes.c_int64(len(draws)), address(bits))
    keys = [np.array([draw.seed, draw.sample_index], np.uint64) for draw in draws]
    wanted = [uniform(key, draw.position) for key, draw in zip(keys, draws, strict=True)]
    assert (bits.astype(np.float64) * 2.0**-53).tolist() == wanted


@pytest.mark.parametrize("kind", ["smooth", "ties"])
@pytest.mark.parametrize(("columns", "live"), [(3, 2), (640, 515), (4096, 4000)])
def test_the_kernel_gives_with_512_threads_what_one_thread_gives(
    library: ctypes.CDLL, alone: Run, kind: str, columns: int, live: int
) -> None:
    """More draws than blocks, fewer ids than threads and more; bit for bit, as all sums are of integers."""
    rng = np.random.default_rng(1)
    logits, draws = rows_of(kind, rng, 4, columns), records_of(draws_of(rng, 7, 4))
    assert (kernel(library, logits, 0, live, draws) == alone(logits, live, draws)).all()


@pytest.mark.parametrize(("dtype", "code"), [("float16", 1), ("bfloat16", 2)])
def test_sixteen_bit_logits_are_drawn_from_by_their_own_values(
    library: ctypes.CDLL, alone: Run, dtype: str, code: int
) -> None:
    rng = np.random.default_rng(2)
    narrow = rows_of("smooth", rng, 4, 640).astype(getattr(ml_dtypes, dtype, np.float16))
    draws = records_of(draws_of(rng, 5, 4))
    assert (kernel(library, narrow, code, 600, draws) == alone(narrow.astype(np.float32), 600, draws)).all()


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
def test_a_row_whose_peak_is_no_number_gives_no_token(library: ctypes.CDLL, alone: Run, value: float) -> None:
    logits = np.zeros((3, 128), np.float32)
    logits[0, 77], logits[1] = value, -np.inf
    draws = records_of([Draw(0, row, SamplingParams(temperature=1.0), 5, 0, 9) for row in range(3)])
    found = alone(logits, 100, draws)
    assert found[:2].tolist() == [-1, -1]
    assert found[2] >= 0
    assert (kernel(library, logits, 0, 100, draws) == found).all()
    assert alone(logits, 77, draws)[0] >= 0, "beyond the live ids it is not looked at"


def test_many_draws_follow_the_distribution(alone: Run) -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], np.float32))
    draws = records_of([Draw(0, 0, SamplingParams(temperature=1.0), seed, 0, 3) for seed in range(20000)])
    shares = np.bincount(alone(logits, 4, draws), minlength=4) / len(draws)
    assert np.abs(shares - [0.5, 0.25, 0.125, 0.125]).max() < 0.01


def test_the_check_that_tests_make_on_a_real_gpu_passes_on_the_fake_one(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = fakegpu.Gpu()
    fakegpu.install(monkeypatch, gpu)
    found, wanted, _ = draw_on_device(on_device(gpu, library), "float32", 2048, 2000, 24)
    assert found == wanted
    assert gpu.leaks == {}


def test_an_unknown_dtype_is_refused(library: ctypes.CDLL) -> None:
    draws = np.zeros(1, RECORD)
    assert getattr(library, ENTRY)(None, 9, 1, 1, address(draws), 1, None, None) == 1


def test_the_records_are_those_of_the_header() -> None:
    header = (toolchain.PLUGINS / "kernels" / "sampling.h").read_text()
    body = header[header.index("struct DflowDraw {") : header.index("};")]
    fields = [line.split(";")[0].split()[-2:] for line in body.splitlines() if ";" in line]
    kinds = {"uint64_t": "uint64", "int64_t": "int64", "double": "float64"}
    assert [(name, kinds[kind]) for kind, name in fields] == [
        (name, str(RECORD.fields[name][0])) for name in RECORD.names or ()
    ]


def test_the_plugin_library_has_the_entry_point_and_others_have_not(tmp_path: Path) -> None:
    """Loaded without a GPU and without TensorRT; nothing to draw needs neither."""
    entry = load_entry(toolchain.plugin_library())
    assert entry is not None
    assert entry(0, 0, 128, 100, 0, 0, 0, 0) == 0
    assert load_entry(tmp_path / "nothing.so") is None


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({"temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3, "n": 2}, True),
        ({"temperature": 1.0, "stop_token_ids": [4], "ignore_eos": True}, True),
        ({}, False),
        ({"temperature": 1.0, "logprobs": 0}, False),
        ({"temperature": 1.0, "repetition_penalty": 1.1}, False),
        ({"temperature": 1.0, "presence_penalty": 0.1}, False),
        ({"temperature": 1.0, "frequency_penalty": -0.1}, False),
        ({"temperature": 1.0, "logit_bias": {3: 1.0}}, False),
        ({"temperature": 1.0, "bad_words_ids": [[3]]}, False),
        ({"temperature": 1.0, "min_tokens": 2}, False),
    ],
)
def test_a_request_is_drawn_on_the_device_where_logits_alone_decide(options: dict[str, Any], plain: bool) -> None:
    assert drawable(SamplingParams(**options)) == plain


# -- in the runtime ----------------------------------------------------------------------------------------------------


class Drawing(Decoder):
    """The decoder as it is to be: requests whose logits alone decide are drawn where the logits are.

    What it changes in a decoder is written here, so that the runtime's part is shown to be enough.
    """

    def _target(self, slots: range, *arguments: Any, **options: Any) -> Any:
        passed = super()._target(slots, *arguments, **options)
        self._ids: dict[tuple[int, int], int] = {}
        draws = [self._draw_of(slot, i, passed) for i, slot in enumerate(self._slots[slots.start : slots.stop])]
        asked = [draw for of_slot in draws for draw in of_slot]
        if asked:
            ids = self._runtime.draw(asked).tolist()  # type: ignore[attr-defined]
            self._ids = {(each.slot - slots.start, each.row): token for each, token in zip(asked, ids, strict=True)}
        return passed

    def _draw_of(self, slot: Any, i: int, passed: Any) -> list[Draw]:
        request, feeds = slot.request, passed.feeds
        if not drawable(request.params):
            return []
        rows = feeds["logit_rows"][i]
        return [
            Draw(passed.slots[i], r, request.params, request.seed, request.sample_index, slot.kv_len + int(row) + 1)
            for r, row in enumerate(rows)
        ]

    def _run(
        self, engine: str, drafter: str | None, slots: range, feeds: Any, fetch: Any = (), stage: Any = None
    ) -> Any:
        waiting = [slot for slot in self._slots[slots.start : slots.stop] if slot.sampler.needs_logits]
        if engine == "target" and all(drawable(slot.request.params) for slot in waiting):
            fetch = ("next_ids",)
        return super()._run(engine, drafter, slots, feeds, fetch, stage)

    def _choose(self, slot: Any, passed: Any, row: int, i: int, picks: list[Pick]) -> int:
        if not drawable(slot.request.params):
            return super()._choose(slot, passed, row, i, picks)
        pick = Pick(self._ids[row, i])
        slot.sampler.commit(pick.token)
        slot.tokens.append(pick.token)
        picks.append(pick)
        return pick.token


@pytest.mark.parametrize("strategy", ["ar", "dflash", "dflow"])
def test_tokens_drawn_on_the_device_are_those_drawn_from_fetched_logits(
    library: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """A batch with requests of all kinds: only where another needs them do logits cross to the host."""
    gpu, bundle = fakegpu.Gpu(), tiny_bundle(tmp_path)
    fakegpu.install(monkeypatch, gpu)
    monkeypatch.setattr(trt_runtime, "load_entry", lambda path: on_device(gpu, library))
    samplings: list[dict[str, Any]] = [{"temperature": 0.9}, {"temperature": 1.5, "top_k": 9, "top_p": 0.9}, {}]
    with closing(OrtRuntime(bundle, 1)) as on_cpu, closing(TrtRuntime(fakegpu.offer(gpu, bundle))) as on_gpu:
        assert on_gpu.draws
        for extra, crossed in (([], False), ([{"temperature": 1.0, "logprobs": 1}], True)):
            params = [
                SamplingParams(max_tokens=20, ignore_eos=True, **each)
                for each in [*samplings, *extra]
                for _ in range(2)
            ]
            gpu.copied_out.clear()
            wanted = run_all(Decoder(bundle, on_cpu), bundle.strategy(strategy), params)
            assert run_all(Drawing(bundle, on_gpu), bundle.strategy(strategy), params) == wanted
            assert (on_gpu.buffers["logits"].address in gpu.copied_out) == crossed
    assert gpu.leaks == {}


def run_all(decoder: Decoder, strategy: Any, params: list[SamplingParams]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in params]
    for i, each in enumerate(params):
        decoder.submit(Request(str(i), [2 + i, 3, 4], each, strategy, seed=i))
    while not decoder.idle:
        for emission in decoder.step().emissions:
            found[int(emission.request_id)] += emission.tokens
    return found


def on_device(gpu: fakegpu.Gpu, library: ctypes.CDLL) -> Callable[..., int]:
    """The entry point of the fake GPU: the arithmetic with one thread, when the stream comes to it."""

    def entry(logits: int, dtype: int, columns: int, live: int, draws: int, count: int, ids: int, stream: int) -> int:
        def work() -> None:
            records = gpu.array(draws, (count,), RECORD)
            rows = gpu.array(logits, (int(records["row"].max()) + 1, columns), np.float32)
            where = (address(rows), ctypes.c_int64(columns), ctypes.c_int32(live), address(records))
            library.dflow_sample_alone(*where, ctypes.c_int64(count), address(gpu.array(ids, (count,), np.int64)))

        assert dtype == 0
        gpu.streams[stream].give(work)
        return 0

    return entry
