"""Safetensors files, one or sharded, read by byte offset.

A file is never mapped: a mapping's pages count as resident memory, and a build must not hold a whole shard.
The header is validated here in full, so that a damaged file is one clear line and never a wrong number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dflow_trt.checkpoint.reader import read_config, refuse, show
from dflow_trt.checkpoint.weights import Array, Weights

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000
"""The format's own limit on the header, in bytes."""

DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
PACKED: dict[str, np.dtype[Any]] = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}
"""What only a quantised layer may be stored in."""
MAPS: dict[str, np.dtype[Any]] = {"I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "BOOL": np.dtype(np.bool_)}
"""What only a map between vocabularies may be stored in."""
KNOWN = DTYPES | PACKED | MAPS
_AGAIN = "fetch the file again"


@dataclass(frozen=True)
class Entry:
    """One tensor: its file, the format's dtype name, shape, and its bytes' place in the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


EXPONENTS = {"float32": (np.uint32, 0x7F800000), "float16": (np.uint16, 0x7C00), "bfloat16": (np.uint16, 0x7F80)}
FINITE_BLOCK = 1 << 20  # values looked at together: no second copy of a tensor


def _is_finite(values: Array) -> bool:
    """Whether all values are numbers: the bits of the exponent are all set in NaN and infinity alone."""
    integer, exponent = EXPONENTS[values.dtype.name]
    flat = values.reshape(-1).view(integer)
    blocks = (flat[start : start + FINITE_BLOCK] for start in range(0, flat.size, FINITE_BLOCK))
    return all(not ((block & exponent) == exponent).any() for block in blocks)


class SafetensorsWeights:
    """Named tensors over one or many files: a ``Weights``. Nothing stays open or in memory."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = dict(entries)

    def names(self) -> Iterator[str]:
        return iter(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """float32, float16 or bfloat16; any other dtype is a UserError."""
        entry = self._entries[name]
        if entry.dtype not in DTYPES:
            todo = "convert the checkpoint to a float dtype"
            raise refuse(entry.path, name, f"of dtype {entry.dtype}", " or ".join(DTYPES), todo)
        return DTYPES[entry.dtype]

    def has(self, name: str) -> bool:
        return name in self._entries

    def entry(self, name: str) -> Entry:
        """Where and how a tensor is stored, whatever its dtype."""
        return self._entries[name]

    def quantised(self, name: str) -> None:
        """No tensor is: what a quantised layer needs lies in others beside it."""

    def read(self, name: str, rows: slice | None = None) -> Array:
        """A copy of the tensor, or of a step-1 range of its first axis.

        UserError if the file has shrunk, and for values that are no finite numbers: nothing that they reach is.
        """
        values = self._read(name, self.dtype(name), rows)
        if not _is_finite(values):
            raise refuse(self._entries[name].path, name, "not finite", "no NaN and no infinity", _AGAIN)
        return values

    def read_packed(self, name: str, rows: slice | None = None) -> Array:
        """The same of a tensor in one of the dtypes PACKED."""
        return self._read(name, PACKED[self._entries[name].dtype], rows)

    def read_map(self, name: str, kinds: Sequence[str]) -> Array:
        """A whole map between vocabularies; UserError where it is in none of these ``kinds`` of MAPS."""
        entry = self._entries[name]
        if entry.dtype not in kinds:
            raise refuse(entry.path, name, f"of dtype {entry.dtype}", " or ".join(kinds), "export the drafter again")
        return self._read(name, MAPS[entry.dtype], None)

    def _read(self, name: str, dtype: np.dtype[Any], rows: slice | None) -> Array:
        entry = self._entries[name]
        shape, offset = entry.shape, entry.offset
        if rows is not None:
            first, last, step = rows.indices(shape[0])
            assert step == 1, "rows must be contiguous"
            offset += first * prod(shape[1:]) * dtype.itemsize
            shape = (max(0, last - first), *shape[1:])
        size = prod(shape) * dtype.itemsize
        try:
            data = np.fromfile(entry.path, np.uint8, size, offset=offset)
        except OSError:  # gone since it was opened
            data = np.empty(0, np.uint8)
        if data.size != size:
            raise refuse(entry.path, name, "cut short", f"{entry.size} bytes from {entry.offset}", _AGAIN)
        return data.view(dtype).reshape(shape)

    def files(self) -> tuple[Path, ...]:
        """The files that hold the tensors, sorted."""
        return tuple(sorted({entry.path for entry in self._entries.values()}))

    def without(self, name: str) -> SafetensorsWeights:
        """The same tensors but one."""
        return SafetensorsWeights({key: entry for key, entry in self._entries.items() if key != name})


def open_weights(folder: Path, rename: Callable[[str], str] | None = None) -> SafetensorsWeights:
    """The tensors of a checkpoint folder: ``model.safetensors``, else the shards of its index.

    rename: stored name -> canonical name. UserError, naming file and tensor: no safetensors files, a shard
    absent, a tensor that the index places elsewhere or twice, a damaged header, a truncated file.
    """
    index = None if (folder / SINGLE).is_file() else _read_index(folder)
    entries: dict[str, Entry] = {}
    for file in sorted(set(index.values())) if index is not None else [SINGLE]:
        for stored, entry in _read_header(folder / file).items():
            name = rename(stored) if rename else stored
            if name in entries:
                found = f"twice, also in {entries[name].path.name}"
                raise refuse(entry.path, name, found, "one tensor a name", _AGAIN)
            if index is not None and index.get(stored) != file:
                found = f"in this file, but {show(index.get(stored))} in {INDEX}"
                raise refuse(entry.path, stored, found, "the file that the index names", _AGAIN)
            entries[name] = entry
    _check_index(folder, index or {}, entries, rename or str)
    return SafetensorsWeights(entries)


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor -> file name, from the index; every file must be a plain name in the folder, and exist."""
    if not (folder / INDEX).is_file():
        other = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt*"))
        found = f"missing (the folder has {other[0]})" if other else "missing"
        todo = "convert the weights to safetensors" if other else "complete the folder"
        raise refuse(folder, SINGLE, found, f"{SINGLE} or {INDEX}", todo)
    config = read_config(folder / INDEX)
    section = config.section("weight_map")
    if section is None or not section.data:
        raise config.error("weight_map", "a JSON object of tensor names and files")
    for name, file in section.data.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise section.error(name, "a *.safetensors file name in the same folder")
        if not (folder / file).is_file():
            raise refuse(folder / file, "the shard", "missing", f"every file listed in {INDEX}", _AGAIN)
    return dict(section.data)


def _check_index(folder: Path, index: Mapping[str, str], entries: Mapping[str, Entry], rename: Any) -> None:
    for name, file in index.items():
        if rename(name) not in entries:
            raise refuse(folder / file, name, "missing", f"every tensor listed in {INDEX}", _AGAIN)


def _read_header(path: Path) -> dict[str, Entry]:
    """The validated entries of one file: bounds, sizes, and coverage without gap or overlap."""
    try:
        raw, size = _header_bytes(path)
    except OSError as error:
        reason = error.strerror or "unreadable"
        raise refuse(path, "the file", reason, "a readable safetensors file", _AGAIN) from None
    base = 8 + len(raw)
    entries = {name: _entry(path, name, data, base) for name, data in _parse(path, raw).items()}
    end = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].size)):
        if entry.offset != end:
            found = f"at byte {entry.offset - base}"
            raise refuse(path, f"{name}.data_offsets", found, f"byte {end - base}, without gap or overlap", _AGAIN)
        end = entry.offset + entry.size
    if end != size:
        raise refuse(path, "the file size", f"{size} bytes", f"{end} bytes, as its header says", _AGAIN)
    return entries


def _header_bytes(path: Path) -> tuple[bytes, int]:
    """The header's JSON bytes, and the size of the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            allowed = f"at most {max(0, min(size - 8, MAX_HEADER))}, in a file of {size} bytes"
            raise refuse(path, "the header length", str(length), allowed, _AGAIN)
        return file.read(length), size


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    """The header as name -> description, without its metadata."""
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
        metadata = header.pop("__metadata__", None)
        if not all(isinstance(value, str) for value in (metadata or {}).values()):
            raise ValueError("__metadata__ with values that are not text")
        "".join(header).encode("utf-8")
        return dict(header)
    except (ValueError, RecursionError, AttributeError, TypeError) as error:
        raise refuse(path, "the header", str(error)[:200], "a JSON object of tensors", _AGAIN) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; two equal keys are a ValueError."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name given twice")
    return result


def _entry(path: Path, name: str, data: Any, base: int) -> Entry:
    """One tensor's description, checked against itself; ``base`` is where the data section starts."""
    try:
        dtype, shape, offsets = data["dtype"], _naturals(data["shape"]), _naturals(data["data_offsets"])
        begin, end = offsets
        if not isinstance(dtype, str) or begin > end or len(data) != 3:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        allowed = "an object of dtype, shape and data_offsets"
        raise refuse(path, name, show(data), allowed, _AGAIN) from None
    if dtype in KNOWN and prod(shape) * KNOWN[dtype].itemsize != end - begin:
        found = f"{end - begin} bytes long"
        wanted = f"{prod(shape) * KNOWN[dtype].itemsize}, for {dtype} of shape {list(shape)}"
        raise refuse(path, name, found, wanted, _AGAIN)
    return Entry(path, dtype, shape, base + begin, end - begin)


def _naturals(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(item) is not int or item < 0 for item in value):
        raise ValueError("not a list of non-negative integers")
    return tuple(value)


def same_bytes(weights: Weights, first: str, second: str, block_rows: int = 4096) -> bool:
    """Whether two tensors are equal bit for bit, read in blocks of rows."""
    if weights.shape(first) != weights.shape(second) or weights.dtype(first) != weights.dtype(second):
        return False
    starts = range(0, weights.shape(first)[0], block_rows)
    blocks = (slice(start, start + block_rows) for start in starts)
    return all(weights.read(first, rows).tobytes() == weights.read(second, rows).tobytes() for rows in blocks)
