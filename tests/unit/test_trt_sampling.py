"""Drawing on the device: the kernel's arithmetic, compiled for the CPU, against the CPU's own sampler, draw by draw."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
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
from dflow_trt.method.sampling import Sampler, SamplingParams, uniform
from dflow_trt.request import Request
from dflow_trt.runtime.cuda import CudaError, Stream
from dflow_trt.runtime.draw import Draw, drawable
from dflow_trt.runtime.ort import OrtRuntime
from dflow_trt.runtime.trt import TrtRuntime
from dflow_trt.runtime.trt import runtime as trt_runtime
from dflow_trt.runtime.trt.sampler import ARGUMENTS, ENTRY, RECORD, DeviceSampler, load_entry, record

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


FLOAT = np.finfo(np.float32)
# logits of the live ids, and what is asked of them.
EDGES: dict[str, tuple[list[float], dict[str, Any]]] = {
    "all but one banned": ([-np.inf, -np.inf, -3.0, -np.inf], {}),
    "top-k among the banned": ([-np.inf, 1.0, -np.inf, 2.0], {"top_k": 3}),
    "top-k of all": ([1.0, 2.0, 3.0], {"top_k": 3}),
    "top-k of all but one": ([2.0, 1.0, 3.0, 1.0], {"top_k": 3}),
    "top-k of more than there are": ([1.0, 2.0, 3.0], {"top_k": 4}),
    "the lowest of many peaks": ([1.0, 5.0, 5.0, 5.0], {"top_k": 1}),
    "ties at the last place of top-k": ([1.0, 5.0, 1.0, 1.0], {"top_k": 2, "top_p": 0.9999}),
    "both zeros are one score": ([-0.0, 0.0, -1.0, 0.0], {"top_k": 2}),
    "the least temperature": ([1.0, 2.0, 2.0, float(np.nextafter(np.float32(2), 0))], {"temperature": 5e-324}),
    "the largest temperature": ([-60.0, 0.0, 60.0], {"temperature": 1.7e308}),
    "the least top-p": ([1.0, 2.0, 2.0], {"top_p": 5e-324}),
    "the largest top-p below 1": ([1.0, 2.0, 2.0], {"top_p": 1 - 2**-53}),
    "only peaks by min-p": ([2.0, 1.9999, 2.0], {"min_p": 1.0}),
    "the range of float32": ([float(FLOAT.max), float(FLOAT.min), 0.0], {"temperature": 1e38}),
    "no normal number": ([1e-45, 3e-45, -1e-45, 0.0], {"temperature": 1e-45}),
    "one id": ([-7.0], {"top_p": 0.5, "top_k": 5}),
}


@pytest.mark.parametrize("edge", EDGES)
def test_at_the_edges_too_a_draw_is_that_of_the_cpus_sampler(library: ctypes.CDLL, alone: Run, edge: str) -> None:
    """The columns behind the live ids hold what is never to be read."""
    live, options = EDGES[edge]
    logits = np.array([[*live, np.nan, np.inf]], np.float32)
    params = SamplingParams(**{"temperature": 1.0, **options})
    draws = [Draw(0, 0, params, seed, 0, 7) for seed in range(200)]
    found = alone(logits, len(live), records_of(draws))
    assert found.tolist() == [picked(logits, len(live), draw) for draw in draws]
    assert (kernel(library, logits, 0, len(live), records_of(draws[:3])) == found[:3]).all()


# multiprocessors, threads of each, whether threads take turns backwards; the blocks for 9 draws
DEVICES = {(3, 1024, False): 6, (3, 1024, True): 6, (1, 256, True): 1, (132, 2048, False): 9}


@pytest.fixture
def pretend(library: ctypes.CDLL) -> Iterator[Callable[..., int]]:
    """Sets the device that kernels are launched on; gives the blocks of the launch before."""
    yield library.dflow_pretend
    library.dflow_pretend(3, 1024, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("columns", "live"), [(3, 2), (640, 515), (4096, 4000)])
def test_the_kernel_gives_with_512_threads_what_one_thread_gives(
    library: ctypes.CDLL, alone: Run, pretend: Callable[..., int], kind: str, columns: int, live: int
) -> None:
    """More draws than blocks and fewer, fewer ids than threads and more, in whatever order threads come to a barrier.

    Bit for bit, as all sums are of integers.
    """
    rng = np.random.default_rng(1)
    logits, draws = rows_of(kind, rng, 4, columns), records_of(draws_of(rng, 9, 4))
    wanted = alone(logits, live, draws)
    for device, blocks in DEVICES.items():
        pretend(*device)
        assert (kernel(library, logits, 0, live, draws) == wanted).all(), device
        assert pretend(*device) == blocks


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


def test_a_launch_that_fails_is_a_cuda_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = fakegpu.Gpu()
    fakegpu.install(monkeypatch, gpu)
    with closing(Stream()) as stream, pytest.raises(CudaError, match="dflow_sample: cudaErrorInvalidValue"):
        DeviceSampler(lambda *_: 1, "float32", 128, 100).enqueue(0, 0, 1, 0, stream)


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
        assert on_gpu.drawer is not None
        for extra, crossed in (([], False), ([{"temperature": 1.0, "logprobs": 1}], True)):
            params = [
                SamplingParams(max_tokens=20, ignore_eos=True, **each)
                for each in [*samplings, *extra]
                for _ in range(2)
            ]
            gpu.copied_out.clear()
            wanted = run_all(Decoder(bundle, on_cpu), bundle.strategy(strategy), params)
            assert run_all(Decoder(bundle, on_gpu), bundle.strategy(strategy), params) == wanted
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
