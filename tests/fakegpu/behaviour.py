"""What dflow_trt.runtime.cuda must do on any GPU: run on the fake by tests/unit, on a real one by tests/gpu."""

from __future__ import annotations

import numpy as np
import pytest

from dflow_trt.runtime.cuda import (
    ALIGNMENT,
    Box,
    CudaError,
    DeviceMemory,
    Event,
    OutOfMemory,
    PinnedMemory,
    Place,
    Stream,
    current_device,
    versions,
)

SIZE = 4096


def check_what_goes_in_comes_out_again() -> None:
    with Stream() as stream, PinnedMemory(SIZE) as there, PinnedMemory(SIZE) as back, DeviceMemory(SIZE) as memory:
        there.bytes[:] = np.arange(SIZE) % 251
        assert not back.bytes.any(), "pinned memory is zeroed"
        stream.copy_in(memory, there, SIZE)
        stream.copy_out(back, memory.address, SIZE)
        stream.synchronize()
        assert (back.bytes == there.bytes).all()


def check_addresses_are_aligned_and_parts_can_be_addressed() -> None:
    with Stream() as stream, PinnedMemory(SIZE) as host, DeviceMemory(SIZE) as memory:
        assert memory.address % ALIGNMENT == 0
        stream.fill(memory.address, 0, SIZE)
        stream.fill(memory.address + 100, 7, 50)
        stream.copy(memory.address + 1000, memory.address + 100, 50)
        stream.copy_out(host, memory.address, SIZE)
        stream.synchronize()
        assert np.flatnonzero(host.bytes == 7).tolist() == [*range(100, 150), *range(1000, 1050)]
        assert host.bytes.sum() == 700


def check_a_box_goes_from_rows_and_planes_to_others() -> None:
    """[3,4,8] of a [5,6,8] array of planes, rows and bytes, into a dense [3,4,4]."""
    wide, dense = (5, 6, 8), (3, 4, 4)
    with Stream() as stream, PinnedMemory(240) as host, DeviceMemory(240) as source, DeviceMemory(240) as target:
        host.bytes[:] = np.arange(240)
        array = host.bytes.reshape(wide).copy()
        stream.copy_in(source, host, 240)
        stream.copy_box(Place(target.address, 4, 4), Place(source.address + (6 + 1) * 8 + 2, 8, 6), Box(4, 4, 3))
        stream.copy_out(host, target.address, 48)
        stream.synchronize()
        assert (host.bytes[:48].reshape(dense) == array[1:4, 1:5, 2:6]).all()


def check_a_graph_repeats_what_was_captured_with_the_memory_as_it_is_then() -> None:
    with Stream() as stream, PinnedMemory(16) as host, PinnedMemory(16) as back, DeviceMemory(16) as memory:

        def work() -> None:
            stream.copy_in(memory, host, 16)
            stream.copy_out(back, memory.address, 16)

        with stream.capture(work) as graph:
            stream.synchronize()
            assert not back.bytes.any(), "nothing runs while it is captured"
            for value in (3, 200):
                host.bytes[:] = value
                graph.launch(stream)
                stream.synchronize()
                assert (back.bytes == value).all()


def check_a_capture_that_fails_halfway_leaves_the_stream_usable() -> None:
    def broken() -> None:
        stream.fill(memory.address, 1, 16)
        raise KeyError("halfway")

    with Stream() as stream, PinnedMemory(16) as host, DeviceMemory(16) as memory:
        stream.fill(memory.address, 0, 16)
        with pytest.raises(KeyError):
            stream.capture(broken)
        stream.copy_out(host, memory.address, 16)
        stream.synchronize()
        assert not host.bytes.any()
        stream.capture(lambda: stream.fill(memory.address, 2, 16)).close()


def check_an_event_waits_for_what_came_before_it() -> None:
    with Stream() as stream, PinnedMemory(16) as host, DeviceMemory(16) as memory, Event() as event:
        event.wait()  # never recorded: at once
        stream.fill(memory.address, 9, 16)
        stream.copy_out(host, memory.address, 16)
        event.record(stream)
        event.wait()
        assert (host.bytes == 9).all()


def check_two_events_give_the_time_between_them() -> None:
    with Stream() as stream, DeviceMemory(1 << 20) as memory, Event(timing=True) as start, Event(timing=True) as end:
        start.record(stream)
        for value in range(8):
            stream.fill(memory.address, value, 1 << 20)
        end.record(stream)
        end.wait()
        assert 0 < end.milliseconds_since(start) < 1000


def check_more_than_there_is_is_out_of_memory_and_no_more_than_that() -> None:
    with pytest.raises(OutOfMemory, match=r"^cudaMalloc: cudaErrorMemoryAllocation \(.+\)$"):
        DeviceMemory(1 << 50)
    check_what_goes_in_comes_out_again()


def check_an_error_carries_cudas_name() -> None:
    with Stream() as stream, Event() as start, Event() as end:
        start.record(stream)
        end.record(stream)
        end.wait()
        with pytest.raises(CudaError, match=r"^cudaEventElapsedTime: ") as raised:
            end.milliseconds_since(start)
    assert raised.value.name == "cudaErrorInvalidResourceHandle", "they keep no time"


def check_the_device_names_itself() -> None:
    device, (driver, runtime) = current_device(), versions()
    assert device.name
    assert device.memory >= device.free > 0
    for version in (device.compute_capability, driver, runtime):
        assert float(version) > 1


def check_memory_is_given_back() -> None:
    with DeviceMemory(1 << 28) as memory:
        held = current_device().free
        memory.close()
        assert current_device().free >= held + (1 << 27)
    memory.close()


CHECKS = [check for name, check in globals().items() if name.startswith("check_")]
