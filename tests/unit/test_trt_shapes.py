"""What calls are padded to."""

from __future__ import annotations

import fakegpu.bundles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflow_trt.runtime.trt.shapes import Limits, bucket, padded
from dflow_trt.spec import CACHE_STEP

CACHE_ROWS = 64 * 70
LIMITS = Limits(slots=12, rows=512, verify_rows=9, cache_rows=CACHE_ROWS)

slots_of_twelve = st.tuples(st.integers(0, 11), st.integers(1, 12)).map(lambda at: range(at[0], min(12, sum(at))))
live_lengths = st.integers(1, CACHE_ROWS // CACHE_STEP).map(lambda steps: steps * CACHE_STEP)


@given(slots_of_twelve, st.integers(1, 9), live_lengths)
def test_a_decoding_call_is_widened_to_buckets_and_stays_inside_the_slots(slots: range, rows: int, live: int) -> None:
    call = padded(LIMITS, slots, {"B": len(slots), "S": rows, "R": rows, "T": live})
    assert call.decoding
    assert 0 <= call.window.start <= slots.start < slots.stop <= call.window.stop <= LIMITS.slots
    assert call.sizes["B"] == len(call.window) in {1, 2, 4, 8, 12}
    assert rows <= call.sizes["S"] == call.sizes["R"] in {1, 2, 4, 8, 9}
    assert live <= call.sizes["T"] <= min(CACHE_ROWS, max(live + CACHE_STEP, live * 9 / 8))
    assert call.sizes["T"] % CACHE_STEP == 0


@given(slots_of_twelve, st.integers(10, 256), live_lengths)
def test_a_prefill_chunk_keeps_its_slots_and_rows(slots: range, rows: int, live: int) -> None:
    call = padded(LIMITS, slots, {"B": len(slots), "S": rows, "R": 1, "T": live})
    assert not call.decoding
    assert call.window == slots
    assert {dim: call.sizes[dim] for dim in "BSR"} == {"B": len(slots), "S": rows, "R": 1}


@given(slots_of_twelve, st.integers(1, 256), live_lengths)
def test_engines_that_hand_on_to_each_other_are_padded_alike(slots: range, rows: int, live: int) -> None:
    target = padded(LIMITS, slots, {"B": len(slots), "S": rows, "R": 1, "T": live})
    context = padded(LIMITS, slots, {"B": len(slots), "S": rows})
    assert (context.window, context.sizes["S"]) == (target.window, target.sizes["S"])
    relay, drafter = padded(LIMITS, slots, {"B": len(slots)}), padded(LIMITS, slots, {"B": len(slots), "T": live})
    assert relay.window == drafter.window


def test_live_lengths_take_few_values() -> None:
    steps = range(CACHE_STEP, CACHE_ROWS + 1, CACHE_STEP)
    found = sorted({padded(LIMITS, range(1), {"B": 1, "S": 1, "T": live}).sizes["T"] for live in steps})
    assert found[:20] == [64 * i for i in range(1, 17)] + [128 * i for i in range(9, 13)]
    assert len(found) < 35
    assert found[-1] == CACHE_ROWS


@pytest.mark.parametrize("seq", [2, 63, 64, 65, 127, 1024])
@pytest.mark.parametrize(("chunk", "verify_rows"), [(1, 1), (1, 16), (256, 16), (16, 9)])
def test_the_end_of_a_cache_is_free_of_live_rows(seq: int, chunk: int, verify_rows: int) -> None:
    """Of max_seq_len tokens the last is never written: live rows are below max_seq_len - 1."""
    from dflow_trt.spec import BuildSpec

    build = BuildSpec("onnxruntime", "float32", 4, chunk, seq, 256, "float", "float", False)
    widest = bucket(max(verify_rows, 2), max(verify_rows, 2))
    assert build.cache_rows(verify_rows) - widest >= seq - 1


def test_buckets_are_powers_of_two_up_to_the_most() -> None:
    assert [bucket(count, 12) for count in (1, 2, 3, 4, 5, 8, 9, 12)] == [1, 2, 4, 4, 8, 8, 12, 12]


def test_limits_leave_room_for_every_call_of_the_decoder(tmp_path_factory: pytest.TempPathFactory) -> None:
    bundle = fakegpu.bundles.tiny_bundle(tmp_path_factory.mktemp("trt"))
    assert Limits.of(bundle, 8) == Limits(slots=8, rows=64, verify_rows=8, cache_rows=256)
    assert Limits.of(bundle, 3) == Limits(slots=3, rows=64, verify_rows=8, cache_rows=256)
