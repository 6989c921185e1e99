"""Bitwise independence: a request's results do not depend on its batch, its slot, the call's shape or the threads.

Lossless speculation rests on this. A verify row must equal the plain step at the same position to the last bit, or
near ties would fall differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Array, Engines, Pair, build_pair, random_tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflow_trt import contract as c
from dflow_trt.errors import UserError

LENGTH, BATCH = 77, 8
ODD = {"hidden_size": 60, "head_dim": 30, "intermediate_size": 97, "vocab_size": 300}
WINDOW = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
INT8 = {"target_weights": "int8"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "odd sizes": (ODD, {}),
    "odd intermediate size": ({"intermediate_size": 97}, {}),
    "one head a group": ({"num_key_value_heads": 4}, {}),
    "one head a group, odd sizes": ({**ODD, "num_key_value_heads": 4}, {}),
    "one kv head": ({"num_key_value_heads": 1}, {}),
    "one layer": ({"num_hidden_layers": 1}, {}),
    "sliding window": (WINDOW, {}),
    "attention_bias, tied": ({"attention_bias": True, "tied": True}, {}),
    "wide": ({"hidden_size": 384, "head_dim": 64, "intermediate_size": 1000, "vocab_size": 1500}, {}),
    "int8": ({}, INT8),
    "int8, odd sizes": (ODD, INT8),
    "int8, one head a group": ({"num_key_value_heads": 4}, INT8),
}


@dataclass(frozen=True)
class Trace:
    """All that a request leaves behind: logits [N,V], packed taps [N,X], its rows of every cache."""

    logits_NV: Array
    hidden_NX: Array
    caches: list[Array]

    def assert_same(self, other: Trace, what: str) -> None:
        np.testing.assert_array_equal(self.hidden_NX, other.hidden_NX, err_msg=f"hidden, {what}")
        np.testing.assert_array_equal(self.logits_NV, other.logits_NV, err_msg=f"logits, {what}")
        for i, (ours, theirs) in enumerate(zip(self.caches, other.caches, strict=True)):
            np.testing.assert_array_equal(ours, theirs, err_msg=f"cache {i}, {what}")


class Case:
    """A built target, eight ragged requests, and the first one's trace from one pass, alone, on one thread."""

    def __init__(self, folder: Path, keys: dict[str, Any], options: dict[str, Any], length: int = LENGTH) -> None:
        taps = tuple(reversed(range(keys.get("num_hidden_layers", 3) - 1)))
        plain = {"use_sliding_window": False, "attention_bias": False}
        self.pair: Pair = build_pair(folder, keys, {"draft": {"taps": taps, **plain}} if taps else {}, **options)
        rng, vocab = np.random.default_rng(0), self.pair.config["vocab_size"]
        lengths = [length, *(max(3, length - 11 * i) for i in range(1, BATCH))]
        self.prompts = [random_tokens(rng, count, vocab) for count in lengths]
        self._engines: dict[int, Engines] = {}
        self.expected = self.trace([length])

    def engines(self, threads: int) -> Engines:
        if threads not in self._engines:
            self._engines[threads] = Engines(self.pair.bundle, threads)
        return self._engines[threads]

    def trace(
        self,
        chunks: Sequence[int],
        slots: range = range(1),
        slot: int = 0,
        width: int = 0,
        bucket: int = 0,
        threads: int = 1,
    ) -> Trace:
        """The first request in ``slot``, others around it, read in these chunks (the last one repeats)."""
        engines, row = self.engines(threads), slot - slots.start
        rows = [self.prompts[0] if i == slot else self.prompts[1 + i % (BATCH - 1)] for i in slots]
        logits, hidden = [], []
        for start, count in _spans(chunks, len(self.prompts[0])):
            tokens = [tokens[start : start + count] for tokens in rows]
            starts = [min(start, len(tokens)) for tokens in rows]
            passed = engines.target(slots, tokens, starts, max(width, count), bucket)
            logits.append(passed.logits_BSV[row, :count])
            if passed.hidden_BSX is not None:
                hidden.append(passed.hidden_BSX[row, :count])
        caches = engines.runtime.caches[c.TARGET, None]
        live = [cache[slot, :, : len(self.prompts[0])].copy() for cache in caches]
        return Trace(np.concatenate(logits), np.concatenate(hidden) if hidden else np.zeros(0), live)


def _spans(chunks: Sequence[int], length: int) -> Iterator[tuple[int, int]]:
    start, i = 0, 0
    while start < length:
        count = min(chunks[min(i, len(chunks) - 1)], length - start)
        yield start, count
        start, i = start + count, i + 1


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("case"), *request.param)


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
def test_rows_of_a_call(case: Case, rows: int) -> None:
    case.trace([rows]).assert_same(case.expected, "exact rows")
    case.trace([rows], width=16).assert_same(case.expected, "padded rows")
    case.trace([rows], threads=2).assert_same(case.expected, "two threads")


@pytest.mark.parametrize("batch", [2, 3, 8])
def test_batch_and_place_in_it(case: Case, batch: int) -> None:
    for slot in {0, batch // 2, batch - 1}:
        case.trace([16], range(batch), slot).assert_same(case.expected, f"slot {slot}")
        case.trace([16], range(batch), slot, threads=2).assert_same(case.expected, f"slot {slot}, two threads")
    case.trace([40, 1], range(BATCH - batch, BATCH), BATCH - 1).assert_same(case.expected, "another range of slots")


@pytest.mark.parametrize("bucket", [128, 192, 384])
def test_length_of_the_cache_slice(case: Case, bucket: int) -> None:
    assert bucket <= case.pair.bundle.cache_rows
    case.trace([16], bucket=bucket).assert_same(case.expected, "alone")
    case.trace([16], range(3), 1, bucket=bucket, threads=2).assert_same(case.expected, "in a batch")


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_partition_of_the_prompt(case: Case, data: st.DataObject) -> None:
    chunks = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    batch = data.draw(st.integers(1, BATCH))
    slot = data.draw(st.integers(0, batch - 1))
    width = data.draw(st.sampled_from([0, 3, 16, 40]))
    threads = data.draw(st.sampled_from([1, 2]))
    found = case.trace(chunks, range(batch), slot, width, threads=threads)
    found.assert_same(case.expected, f"{chunks}, slot {slot} of {batch}, width {width}, {threads} threads")


@pytest.mark.parametrize("heads", [(2, 1), (4, 2), (2, 2)], ids=["one kv head", "two kv heads", "one head a group"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_contexts_on_more_threads_than_kv_heads(tmp_path: Path, heads: tuple[int, int], head_dim: int) -> None:
    """A split of one head's product among threads would change the order of its sums, from some 128 rows on."""
    keys = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": head_dim}
    options = {"max_seq_len": 500, "max_input_len": 450}
    case = Case(tmp_path, {**keys, "num_hidden_layers": 2}, options, length=450)
    for threads in (1, 2, 3, 8):
        for chunks in ([256], [16], [400, 1]):
            case.trace(chunks, threads=threads).assert_same(case.expected, f"{threads} threads, {chunks}")
        case.trace([100], range(3), 1, threads=threads).assert_same(case.expected, f"{threads} threads, batch")


def test_heads_too_wide_for_this_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="head_dim is 256"):
        build_pair(tmp_path, {"head_dim": 256})


def test_another_token_changes_the_trace(tmp_path: Path) -> None:
    """The comparison sees one changed token, from its position on and nowhere before."""
    case = Case(tmp_path, {}, {})
    case.prompts[0][40] = (case.prompts[0][40] + 1) % 256
    found = case.trace([16])
    with pytest.raises(AssertionError):
        found.assert_same(case.expected, "changed")
    np.testing.assert_array_equal(found.logits_NV[:40], case.expected.logits_NV[:40])
    assert (found.logits_NV[40:] != case.expected.logits_NV[40:]).any(axis=-1).all()
