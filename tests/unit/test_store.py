"""Weights on their way into data files: layout, quantisation, alignment, hashes, and how much memory it takes."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from dflow_trt.checkpoint.weights import Array
from dflow_trt.graphs import store

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Memory:
    """Weights that lie in a dict; counts the rows of the largest read."""

    def __init__(self, tensors: dict[str, Array]) -> None:
        self.tensors, self.largest = tensors, 0

    def names(self) -> Iterator[str]:
        return iter(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def dtype(self, name: str) -> np.dtype:
        return self.tensors[name].dtype

    def read(self, name: str, rows: slice | None = None) -> Array:
        part = self.tensors[name][slice(None) if rows is None else rows].copy()
        self.largest = max(self.largest, part.nbytes)
        return part


def weights(dtype: np.dtype = BFLOAT16, **shapes: tuple[int, ...]) -> Memory:
    rng = np.random.default_rng(0)
    return Memory({name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()})


@pytest.fixture(params=[1, 100, 1 << 20], ids=["a row a chunk", "odd chunks", "one chunk"])
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(store, "CHUNK_BYTES", request.param)
    return request.param


def test_row_chunks_cover_every_row_once(chunk_bytes: int) -> None:
    source = weights(a=(23, 5))
    chunks = list(store.row_chunks(source, "a"))
    assert [start for start, _ in chunks] == list(np.cumsum([0] + [len(rows) for _, rows in chunks[:-1]]))
    np.testing.assert_array_equal(np.concatenate([rows for _, rows in chunks]), source.tensors["a"])
    assert source.largest <= max(chunk_bytes, 10)  # a chunk never holds more than it may, but one row at least


def test_transposed_stacks_outputs_in_the_given_order(chunk_bytes: int) -> None:
    source = weights(q=(8, 6), k=(4, 6), v=(5, 6))
    found = store.transposed(source, ["q", "k", "v"], np.dtype(np.float32))
    wanted = np.concatenate([source.tensors[name].astype(np.float32) for name in "qkv"]).T
    assert found.shape == (6, 17)
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found, wanted)


def test_transposed_picks_input_columns(chunk_bytes: int) -> None:
    source = weights(w=(7, 9))
    found = store.transposed(source, ["w"], np.dtype(np.float32), slice(3, 8))
    np.testing.assert_array_equal(found, source.tensors["w"][:, 3:8].astype(np.float32).T)


def test_transposed_appends_zero_channels(chunk_bytes: int) -> None:
    source = weights(w=(7, 9))
    found = store.transposed(source, ["w"], np.dtype(np.float32), padded=10)
    np.testing.assert_array_equal(found[:, :7], source.tensors["w"].astype(np.float32).T)
    np.testing.assert_array_equal(found[:, 7:], np.zeros((9, 3)))


def test_quantised_picks_input_columns_and_scales_by_them_alone(chunk_bytes: int) -> None:
    source = weights(w=(7, 9))
    part = Memory({"w": source.tensors["w"][:, 3:8]})
    for found, wanted in zip(store.quantised(source, ["w"], slice(3, 8)), store.quantised(part, ["w"]), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_quantised_weights_are_within_half_a_level(chunk_bytes: int) -> None:
    source = weights(a=(12, 40), b=(9, 40))
    levels, scale = store.quantised(source, ["a", "b"])
    wanted = np.concatenate([source.tensors["a"], source.tensors["b"]]).astype(np.float32)
    assert levels.dtype == np.int8
    assert levels.shape == (40, 21)
    assert np.abs(levels.T * scale[:, None] - wanted).max() <= (scale.max() / 2) * 1.0001
    np.testing.assert_array_equal(np.abs(levels.astype(int)).max(axis=0), 127)  # every channel uses its whole range
    np.testing.assert_allclose(scale, np.abs(wanted).max(axis=1) / 127, rtol=1e-6)


def test_quantised_channels_whose_peak_is_negative_keep_their_sign() -> None:
    source = Memory({"w": np.array([[-4.0, 1.0], [0.5, 2.0]], np.float32)})
    levels, scale = store.quantised(source, ["w"])
    np.testing.assert_array_equal(levels.T, [[-127, 32], [32, 127]])
    np.testing.assert_allclose(scale, [4 / 127, 2 / 127], rtol=1e-6)


def test_quantised_zero_and_padding_channels_are_zero_and_finite() -> None:
    source = Memory({"w": np.zeros((3, 4), np.float32)})
    levels, scale = store.quantised(source, ["w"], padded=8)
    assert levels.shape == (4, 8)
    assert not levels.any()
    assert np.isfinite(scale).all()
    assert (scale > 0).all()


def test_data_file_tensors_are_aligned_hashed_and_found_again(tmp_path: Path, chunk_bytes: int) -> None:
    source, seen = weights(a=(33, 7)), []
    data = store.WeightFile(tmp_path / "x.data", seen.append)
    first = data.add("first", np.arange(5, dtype=np.int8))
    chunks = (rows for _, rows in store.row_chunks(source, "a"))
    second = data.add_chunks("second", (33, 7), np.dtype(np.float32), chunks)
    third = data.add("third", np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)))
    data.close()
    content = (tmp_path / "x.data").read_bytes()
    assert [tensor.offset % store.ALIGNMENT for tensor in (first, second, third)] == [0, 0, 0]
    assert data.sha256 == hashlib.sha256(content).hexdigest()
    assert data.size == len(content) == sum(seen)
    np.testing.assert_array_equal(first.numpy(), np.arange(5))
    np.testing.assert_array_equal(second.numpy(), source.tensors["a"].astype(np.float32))
    np.testing.assert_array_equal(third.numpy(), [[0, 1, 2], [3, 4, 5]])
    assert (tmp_path / "x.data") == Path(third.path)


@pytest.mark.parametrize("form", ["stream", "transposed", "quantised"])
def test_memory_is_one_tensor_and_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setattr(store, "CHUNK_BYTES", 1 << 20)
    source, size = weights(w=(16384, 512)), 16384 * 512
    data = store.WeightFile(tmp_path / "x.data", lambda count: None)
    tracemalloc.start()
    if form == "stream":
        chunks = (rows for _, rows in store.row_chunks(source, "w"))
        data.add_chunks("w", (16384, 512), np.dtype(np.float32), chunks)
        whole = 0
    elif form == "transposed":
        data.add("w", store.transposed(source, ["w"], np.dtype(np.float32)))
        whole = 4 * size
    else:
        data.add("w", store.quantised(source, ["w"])[0])
        whole = size
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    data.close()
    assert peak <= whole + (10 << 20)  # bfloat16 chunks of 1 MiB are worked on in float32


def test_what_lies_in_another_file_is_not_written_again(tmp_path: Path) -> None:
    first, second = (store.WeightFile(tmp_path / name, lambda count: None) for name in ("first", "second"))
    kept = first.add("x", np.arange(6, dtype=np.float32))
    second.reuse(first)
    again, other = second.add("x", np.arange(6, dtype=np.float32)), second.add("y", np.zeros(3, np.int64))
    first.close()
    second.close()
    assert again is kept
    assert (again.location, other.location) == ("first", "second")
    assert (first.size, second.size) == (24, 24)


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16])
def test_vocabulary_tables_end_in_zero_rows(tmp_path: Path, dtype: np.dtype, chunk_bytes: int) -> None:
    source, data = weights(head=(9, 4)), store.WeightFile(tmp_path / "data", lambda count: None)
    table = store.table(data, source, "head", "table", 12, dtype)
    levels, scale = store.int8_table(data, source, "head", "levels", 12)
    data.close()
    wanted = np.concatenate([source.read("head"), np.zeros((3, 4), BFLOAT16)]).astype(dtype)
    np.testing.assert_array_equal(table.numpy(), wanted)
    assert (tuple(levels.shape), tuple(scale.shape)) == ((4, 12), (12,))
    found = levels.numpy().T * scale.numpy()[:, None]
    np.testing.assert_allclose(found, wanted.astype(np.float32), atol=np.abs(wanted.astype(np.float32)).max() / 127)
