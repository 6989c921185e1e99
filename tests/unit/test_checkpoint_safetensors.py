"""Safetensors files are read by offset, and damaged ones are refused in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save, save_file
from tiny import make_target

from dflow_trt.checkpoint.safetensors import open_weights, same_bytes
from dflow_trt.errors import UserError

TENSORS: dict[str, Any] = {
    "a": np.arange(12, dtype=np.float32).reshape(4, 3),
    "b": np.arange(6).reshape(3, 2).astype(ml_dtypes.bfloat16),
    "c": np.arange(5, dtype=np.float16),
}


def _write(folder: Path, header: Any, body: bytes = b"") -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + body)


def _entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_tensors_and_row_ranges_are_copies_in_the_dtype_of_the_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    weights = open_weights(tmp_path)
    assert sorted(weights.names()) == ["a", "b", "c"]
    for name, value in TENSORS.items():
        assert (weights.shape(name), weights.dtype(name)) == (value.shape, value.dtype)
        np.testing.assert_array_equal(weights.read(name), value)
        for rows in (slice(1, 3), slice(2, None), slice(0, 0), slice(3, 99), slice(None)):
            np.testing.assert_array_equal(weights.read(name, rows), value[rows])
    assert weights.read("a").flags.writeable


def test_a_sharded_checkpoint_reads_like_one_file(tmp_path: Path) -> None:
    make_target(tmp_path / "one", dtype="bfloat16")
    make_target(tmp_path / "three", dtype="bfloat16", shards=3)
    one, three = open_weights(tmp_path / "one"), open_weights(tmp_path / "three")
    assert len(three.files()) == 3
    assert sorted(one.names()) == sorted(three.names())
    for name in one.names():
        assert one.read(name).tobytes() == three.read(name).tobytes()


def test_names_are_changed_by_rename(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    weights = open_weights(tmp_path, rename=lambda name: f"model.{name}")
    np.testing.assert_array_equal(weights.read("model.a"), TENSORS["a"])


def test_equal_bytes_are_found_in_blocks(tmp_path: Path) -> None:
    table = np.arange(20, dtype=np.float32).reshape(10, 2)
    other = table.copy()
    other[9, 1] = 0
    negative = table.copy()
    negative[0, 0] = -0.0  # an equal number of other bits
    save_file({"x": table, "y": table.copy(), "z": other, "n": negative}, tmp_path / "model.safetensors")
    weights = open_weights(tmp_path)
    assert same_bytes(weights, "x", "y", block_rows=3)
    assert not same_bytes(weights, "x", "n", block_rows=3)
    assert not same_bytes(weights, "x", "z", block_rows=3)


HEADERS: dict[str, tuple[Any, bytes, tuple[str, ...]]] = {
    "length beyond the file": (b"", b"", ("the header length is 99999", "at most 0")),
    "not JSON": (b"{nope", b"", ("the header is", "a JSON object of tensors")),
    "not UTF-8": (b'{"\xff": 1}', b"", ("the header is", "a JSON object of tensors")),
    "not an object": ([1], b"", ("the header is", "a JSON object of tensors")),
    "no dtype": (
        {"x": {"shape": [1], "data_offsets": [0, 4]}},
        bytes(4),
        ("x is", "dtype, shape and data_offsets"),
    ),
    "negative shape": ({"x": _entry(0, 4, [-1])}, bytes(4), ("x is", "dtype, shape and data_offsets")),
    "bool shape": ({"x": {**_entry(0, 4, [1]), "shape": [True]}}, bytes(4), ("x is", "dtype, shape")),
    "shape contradicts size": (
        {"x": _entry(0, 4, [3])},
        bytes(4),
        ("x is 4 bytes long", "12, for F32 of shape [3]"),
    ),
    "overlap": (
        {"x": _entry(0, 8, [2]), "y": _entry(4, 12, [2])},
        bytes(12),
        ("y.data_offsets is at byte 4", "byte 8, without gap or overlap"),
    ),
    "gap": (
        {"x": _entry(0, 4, [1]), "y": _entry(8, 12, [1])},
        bytes(12),
        ("y.data_offsets is at byte 8", "byte 4, without gap or overlap"),
    ),
    "truncated": ({"x": _entry(0, 8, [2])}, bytes(4), ("the file size is", "as its header says")),
    "bytes behind the end": ({"x": _entry(0, 4, [1])}, bytes(5), ("the file size is", "as its header says")),
    "a name twice": (
        b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"x":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        bytes(8),
        ("the header is a name given twice", "a JSON object of tensors"),
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_damaged_headers_are_refused(tmp_path: Path, name: str) -> None:
    header, body, words = HEADERS[name]
    _write(tmp_path, header, body)
    if name == "length beyond the file":
        (tmp_path / "model.safetensors").write_bytes((99999).to_bytes(8, "little"))
    _refused(tmp_path, "model.safetensors", *words)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    _refused(tmp_path, "the header length is 0", "in a file of 0 bytes")


@pytest.mark.parametrize(("dtype", "size"), [("F8_E4M3", 8), ("I8", 8), ("U8", 8), ("I64", 1), ("F64", 1), ("BOOL", 8)])
def test_other_dtypes_are_refused_when_asked_for(tmp_path: Path, dtype: str, size: int) -> None:
    _write(tmp_path, {"x": _entry(0, 8, [size], dtype)}, bytes(8))
    weights = open_weights(tmp_path)
    for use in (weights.dtype, weights.read):
        with pytest.raises(UserError, match=f"x is of dtype {dtype}; allowed: F32 or F16 or BF16"):
            use("x")


@pytest.mark.parametrize(("dtype", "kind"), [("F8_E4M3", "float8_e4m3fn"), ("I8", "int8"), ("U8", "uint8")])
def test_packed_dtypes_are_read_by_those_who_expect_them(tmp_path: Path, dtype: str, kind: str) -> None:
    _write(tmp_path, {"x": _entry(0, 8, [4, 2], dtype)}, bytes(range(8)))
    found = open_weights(tmp_path).read_packed("x", slice(1, 3))
    assert found.dtype.name == kind
    assert found.view(np.uint8).tolist() == [[2, 3], [4, 5]]


def test_vocabulary_maps_are_read_by_those_who_expect_them(tmp_path: Path) -> None:
    body = np.array([3, -4], np.int64).tobytes() + np.array([5, -6], np.int32).tobytes() + bytes([1, 0])
    entries = {"a": _entry(0, 16, [2], "I64"), "b": _entry(16, 24, [2], "I32"), "c": _entry(24, 26, [2], "BOOL")}
    _write(tmp_path, entries, body)
    weights = open_weights(tmp_path)
    assert weights.read_map("a", ("I64", "I32")).tolist() == [3, -4]
    assert weights.read_map("b", ("I64", "I32")).tolist() == [5, -6]
    assert weights.read_map("c", ("BOOL",)).tolist() == [True, False]
    with pytest.raises(UserError, match="b is of dtype I32; allowed: BOOL"):
        weights.read_map("b", ("BOOL",))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8", "U8"])
def test_packed_tensors_of_another_size_are_refused(tmp_path: Path, dtype: str) -> None:
    _write(tmp_path, {"x": _entry(0, 8, [7], dtype)}, bytes(8))
    _refused(tmp_path, "x is 8 bytes long", f"7, for {dtype} of shape [7]")


def test_a_file_that_shrinks_after_opening_is_refused(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    weights = open_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="a is cut short"):
        weights.read("a")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="a is cut short"):
        weights.read("a")


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    _refused(tmp_path, "model.safetensors is missing; allowed: model.safetensors or model.safetensors.index.json")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    _refused(tmp_path, "model.safetensors is missing (the folder has pytorch_model.bin)", "convert the weights")


SHARD = "model-00002-of-00002.safetensors"


def _absent(folder: Path) -> None:
    (folder / SHARD).unlink()


def _truncated(folder: Path) -> None:
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-4])


def _twice(folder: Path) -> None:
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / SHARD)


def _index(change: Any) -> Any:
    def apply(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        data = json.loads(path.read_text())
        change(data["weight_map"])
        path.write_text(json.dumps(data))

    return apply


SHARDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "absent": (
        _absent,
        (f"{SHARD}: the shard is missing", "every file listed in model.safetensors.index.json"),
    ),
    "truncated": (_truncated, (f"{SHARD}: the file size is", "as its header says")),
    "duplicate names": (_twice, (f"{SHARD}: a is twice, also in model-00001-of-00002", "one tensor a name")),
    "listed but not there": (
        _index(lambda m: m.update(z=SHARD)),
        (f"{SHARD}: z is missing", "every tensor listed"),
    ),
    "listed elsewhere": (
        _index(lambda m: m.update(a=SHARD)),
        (
            f"a is in this file, but '{SHARD}' in model.safetensors.index.json",
            "the file that the index names",
        ),
    ),
    "not listed": (
        _index(lambda m: m.pop("a")),
        ("a is in this file, but missing in model.safetensors.index.json",),
    ),
    "path": (
        _index(lambda m: m.update(a="../x.safetensors")),
        ("weight_map.a is '../x.safetensors'", "in the same"),
    ),
    "not text": (_index(lambda m: m.update(a=1)), ("weight_map.a is 1", "a *.safetensors file name")),
    "empty": (_index(lambda m: m.clear()), ("weight_map is {}", "a JSON object of tensor names and files")),
}


@pytest.mark.parametrize("name", SHARDS)
def test_damaged_shards_are_refused(tmp_path: Path, name: str) -> None:
    damage, words = SHARDS[name]
    files = ["model-00001-of-00002.safetensors", SHARD]
    save_file({"a": TENSORS["a"], "b": TENSORS["b"]}, tmp_path / files[0])
    save_file({"c": TENSORS["c"]}, tmp_path / files[1])
    weight_map = {"a": files[0], "b": files[0], "c": files[1]}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    open_weights(tmp_path)
    damage(tmp_path)
    _refused(tmp_path, *words)


WHOLE = save(TENSORS, metadata={"format": "pt"})
HEADER_END = 8 + int.from_bytes(WHOLE[:8], "little")


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flips=st.lists(st.tuples(st.integers(0, HEADER_END - 1), st.integers(1, 255)), max_size=4),
    length=st.integers(0, len(WHOLE)) | st.just(len(WHOLE)),
)
def test_damage_gives_a_user_error_or_what_the_safetensors_library_reads(
    tmp_path: Path, flips: list[tuple[int, int]], length: int
) -> None:
    data = bytearray(WHOLE[:length])
    for place, bits in flips:
        if place < len(data):
            data[place] ^= bits
    (tmp_path / "model.safetensors").write_bytes(data)
    try:
        weights = open_weights(tmp_path)
        ours = {name: weights.read(name) for name in weights.names()}
    except UserError as refusal:
        _one_line(str(refusal))
        return
    try:
        theirs = {name: bytes(entry["data"]) for name, entry in deserialize(bytes(data))}  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        pytest.fail(f"read what the library refuses: {error}")
    assert {name: value.tobytes() for name, value in ours.items()} == theirs


def _refused(folder: Path, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        open_weights(folder)
    message = str(caught.value)
    _one_line(message)
    assert [word for word in words if word not in message] == [], message


def _one_line(message: str) -> None:
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers_are_refused_by_name(tmp_path: Path, name: str, value: float) -> None:
    damaged = {**TENSORS, name: TENSORS[name].copy()}
    damaged[name].flat[-1] = value
    save_file(damaged, tmp_path / "model.safetensors")
    weights = open_weights(tmp_path)
    with pytest.raises(UserError, match=f"model.safetensors: {name} is not finite; allowed: no NaN and no infinity"):
        weights.read(name)
    assert np.isfinite(weights.read(name, slice(0, 1)).astype(np.float32)).all() or len(damaged[name]) == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_largest_and_smallest_numbers_are_numbers(tmp_path: Path, dtype: Any) -> None:
    info = ml_dtypes.finfo(dtype)
    values = np.array([info.max, info.min, info.tiny, info.smallest_subnormal, 0], dtype)
    save_file({"a": values}, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(open_weights(tmp_path).read("a"), values)
