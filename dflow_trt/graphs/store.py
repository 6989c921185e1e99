"""Weights on their way from a checkpoint into an external-data file, a few rows at a time.

Peak memory is one transposed tensor plus one chunk of rows, however large the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx_ir as ir

from dflow_trt.checkpoint.weights import Array, QuantisedLinear, Weights

CHUNK_BYTES = 16 << 20
ALIGNMENT = 4096  # page aligned, so that a runtime can map a tensor

Progress = Callable[[int], None]


def row_chunks(weights: Weights, name: str) -> Iterator[tuple[int, Array]]:
    """(first row, rows) of a tensor in its checkpoint dtype, CHUNK_BYTES at a time."""
    rows, *rest = weights.shape(name)
    row_bytes = max(1, int(np.prod(rest)) * weights.dtype(name).itemsize)
    step = max(1, CHUNK_BYTES // row_bytes)
    for start in range(0, rows, step):
        yield start, weights.read(name, slice(start, min(rows, start + step)))


def transposed(
    weights: Weights,
    names: Sequence[str],
    dtype: np.dtype[Any],
    columns: slice = slice(None),
    padded: int | None = None,
) -> Array:
    """Linear weights [out_i, in], stacked over ``names`` and transposed: [in, sum of out_i].

    ``columns`` picks a range of the input features; ``padded`` appends zero channels up to that many.
    """
    total = sum(weights.shape(name)[0] for name in names)
    out = np.zeros((_width(weights, names, columns), padded or total), dtype)
    offset = 0
    for name in names:
        for start, rows in row_chunks(weights, name):
            out[:, offset + start : offset + start + len(rows)] = rows[:, columns].T
        offset += weights.shape(name)[0]
    return out


def _width(weights: Weights, names: Sequence[str], columns: slice) -> int:
    return len(range(*columns.indices(weights.shape(names[0])[1])))


def quantised(
    weights: Weights, names: Sequence[str], columns: slice = slice(None), padded: int | None = None
) -> tuple[Array, Array]:
    """Per-output-channel int8 of stacked linear weights: (int8 [in, out], float32 scale [out]).

    weight ~ q * scale with scale = max |row| / 127. ``columns`` and ``padded`` as in :func:`transposed`.
    """
    total = sum(weights.shape(name)[0] for name in names)
    out = np.zeros((_width(weights, names, columns), padded or total), np.int8)
    scale = np.ones(padded or total, np.float32)
    offset = 0
    for name in names:
        for start, rows in row_chunks(weights, name):
            values = rows[:, columns].astype(np.float32)
            peak = np.maximum(values.max(axis=1), -values.min(axis=1))
            channels = slice(offset + start, offset + start + len(rows))
            scale[channels] = np.where(peak > 0, peak, np.float32(1)) / np.float32(127)
            values /= scale[channels, None]
            out[:, channels] = np.rint(values, out=values).astype(np.int8).T  # narrow first: the transpose is the cost
        offset += weights.shape(name)[0]
    return out, scale


def packed(layers: Sequence[QuantisedLinear]) -> Array:
    """Quantised weights as they are stored, stacked and transposed: int8 or float8_e4m3fn [in, sum of out_i].

    4-bit ones are uint8 [in, sum of out_i / 2], two neighbouring outputs in a byte, the first in its low half: what
    ONNX calls int4 [in, sum of out_i].
    """
    first = layers[0].levels(slice(0, 1))
    parts = [layer.shape[0] * layer.spec.bits // 8 for layer in layers]
    out = np.empty((first.shape[1], sum(parts)), first.dtype)
    offset = 0
    for layer, rows in zip(layers, parts, strict=True):
        step = max(1, CHUNK_BYTES // first.shape[1])
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            out[:, offset + start : offset + stop] = layer.levels(slice(start, stop)).T
        offset += rows
    return out


@dataclass
class WeightFile:
    """One external-data file while it is written, hashed on the way."""

    path: Path
    progress: Progress

    def __post_init__(self) -> None:
        self._file: IO[bytes] = self.path.open("wb")
        self._hash = hashlib.sha256()
        self._offset = 0
        self._written: dict[str, ir.ExternalTensor] = {}
        self._reused: dict[str, ir.ExternalTensor] = {}

    def reuse(self, other: WeightFile) -> None:
        """What lies in another file of the folder already is not written again under the same name."""
        self._reused |= other._written

    def close(self) -> None:
        self._file.close()

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    @property
    def size(self) -> int:
        return self._offset

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._offset += len(data)
        self.progress(len(data))

    def add(self, name: str, array: Array) -> ir.ExternalTensor:
        """Write one array; the returned tensor refers to its place in this file."""
        return self.add_chunks(name, array.shape, array.dtype, iter([array]))

    def add_int4(self, name: str, array: Array) -> ir.ExternalTensor:
        """Write pairs of 4-bit values in uint8 [rows, columns / 2] as one int4 tensor [rows, columns]."""
        raw = self.add(name, array)
        assert raw.offset is not None, raw
        assert raw.length is not None, raw
        shape = (array.shape[0], 2 * array.shape[1])
        return external(self.path, name, raw.offset, raw.length, shape, ir.DataType.INT4)

    def add_chunks(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], chunks: Iterator[Array]
    ) -> ir.ExternalTensor:
        """Write a tensor that arrives in pieces along its first axis; cast on the way."""
        if name in self._reused:
            return self._reused[name]
        self._write(b"\0" * (-self._offset % ALIGNMENT))
        start = self._offset
        for chunk in chunks:
            self._write(np.ascontiguousarray(chunk, dtype).reshape(-1).view(np.uint8).data)
        kind = ir.DataType.from_numpy(dtype)
        self._written[name] = external(self.path, name, start, self._offset - start, shape, kind)
        return self._written[name]


def table(
    data: WeightFile, weights: Weights, name: str, label: str, rows: int, dtype: np.dtype[Any]
) -> ir.ExternalTensor:
    """A vocabulary table [rows,E], zero rows behind the checkpoint's; streamed."""
    given, width = weights.shape(name)

    def chunks() -> Iterator[Array]:
        for _, chunk in row_chunks(weights, name):
            yield chunk
        yield np.zeros((rows - given, width), dtype)

    return data.add_chunks(label, (rows, width), dtype, chunks())


def int8_table(
    data: WeightFile, weights: Weights, name: str, label: str, rows: int
) -> tuple[ir.ExternalTensor, ir.ExternalTensor]:
    """A head as int8 [E,rows] with a float32 scale [rows]."""
    array, scale = quantised(weights, [name], padded=rows)
    return data.add(label, array), data.add(f"{label}_scale", scale)


def external(
    path: Path, name: str, offset: int, length: int, shape: tuple[int, ...], kind: ir.DataType
) -> ir.ExternalTensor:
    """A tensor that lies in a data file beside its graph."""
    return ir.ExternalTensor(path.name, offset, length, kind, shape=ir.Shape(shape), name=name, base_dir=path.parent)
