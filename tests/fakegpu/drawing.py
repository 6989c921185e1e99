"""Draws on a device against the CPU's sampler: on the fake GPU by tests/unit, on a real one by tests/gpu."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import ml_dtypes
import numpy as np

from dflow_trt.method.sampling import Sampler, SamplingParams
from dflow_trt.runtime.cuda import DeviceMemory, Event, PinnedMemory, Stream
from dflow_trt.runtime.draw import Draw
from dflow_trt.runtime.trt.sampler import RECORD, DeviceSampler, Entry, record
from dflow_trt.spec import DType

DTYPES: dict[DType, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 200, "top_p": 0.95, "min_p": 0.01},
)


def draw_on_device(
    entry: Entry, dtype: DType, columns: int, live: int, rows: int
) -> tuple[list[int], list[int], float]:
    """(tokens of the device, those of the CPU, milliseconds) of one draw a row, on logits as a model gives them."""
    rng = np.random.default_rng(columns)
    logits = (2.5 * rng.standard_normal((rows, columns))).astype(DTYPES[dtype])
    logits[:, :8] += np.array(6, DTYPES[dtype])  # a few likely tokens
    params = [SamplingParams(**SAMPLINGS[row % len(SAMPLINGS)]) for row in range(rows)]
    draws = [Draw(0, row, each, seed=row, sample_index=1, position=100 + row) for row, each in enumerate(params)]
    wide = logits.astype(np.float32)
    samplers = [Sampler(draw.params, [0], live, [], draw.seed, draw.sample_index) for draw in draws]
    wanted = [each.pick(wide[draw.row], draw.position).token for each, draw in zip(samplers, draws, strict=True)]
    found, milliseconds = _run(DeviceSampler(entry, dtype, columns, live), logits, draws)
    return found, wanted, milliseconds


def _run(sampler: DeviceSampler, logits: Any, draws: list[Draw]) -> tuple[list[int], float]:
    records = np.array([record(draw, draw.row) for draw in draws], RECORD)
    with ExitStack() as owned:
        stream = owned.enter_context(Stream())
        addresses = [_uploaded(stream, array, owned) for array in (logits, records)]
        ids, back = owned.enter_context(DeviceMemory(8 * len(draws))), owned.enter_context(PinnedMemory(8 * len(draws)))
        start, end = owned.enter_context(Event(timing=True)), owned.enter_context(Event(timing=True))

        def enqueue() -> None:
            sampler.enqueue(*addresses, len(draws), ids.address, stream)

        enqueue()  # the first time loads the kernel
        graph = owned.enter_context(stream.capture(enqueue))  # which shows that nothing in it allocates or waits
        start.record(stream)
        graph.launch(stream)
        end.record(stream)
        stream.copy_out(back, ids.address, ids.size)
        stream.synchronize()
        return back.view(0, (len(draws),), np.dtype(np.int64)).tolist(), end.milliseconds_since(start)


def _uploaded(stream: Stream, array: Any, owned: ExitStack) -> int:
    host, device = owned.enter_context(PinnedMemory(array.nbytes)), owned.enter_context(DeviceMemory(array.nbytes))
    host.bytes[:] = array.reshape(-1).view(np.uint8)
    stream.copy_in(device, host, array.nbytes)
    return device.address
