"""The relay engine against its formulas in float64, and which verified rows serve which slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import TOLERANCE, Array, Engines, Pair, build_pair
from oracles import RelayOracle
from safetensors.numpy import load_file
from tiny import make_drafter

from dflow_trt import contract as c
from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.method.relay import RelayState, relay_rows, relay_state
from dflow_trt.spec import RELAY_STARTS, RelayStart

BLOCK, SLOTS, EPS = 8, 4, 1e-6
STATES = [RelayState(0, 7, 11, 12), None, RelayState(3, 5, 40, 7), RelayState(5, 7, 200, 199)]


# -- alignment ---------------------------------------------------------------------------------------------------------


def relayed(start: RelayStart, accepted: int, drafted: int, block: int, anchor: int = 1000) -> dict[int, int]:
    """{slot: verify row}, counted in absolute positions.

    The verify pass had the anchor at ``anchor`` and draft i at ``anchor + i``; the state of a position is the row whose
    input stood there. The next block begins at the bonus token, and the slot at p + 1 receives the state of p.
    """
    row_at = {anchor + row: row for row in range(drafted + 1)}
    first_rejected = anchor + accepted + 1
    new_anchor = anchor + accepted + 1
    suffix = range(first_rejected + (start == "after_rejection"), anchor + drafted + 1)
    slot_at = {new_anchor + slot: slot for slot in range(block)}
    return {slot_at[position + 1]: row_at[position] for position in suffix}


@pytest.mark.parametrize("start", RELAY_STARTS)
@pytest.mark.parametrize("block", [2, 3, 8, 16])
def test_rows_follow_absolute_positions(start: RelayStart, block: int) -> None:
    for drafted in range(1, block):
        for accepted in range(drafted):
            rows_J, on_J = relay_rows(RelayState(accepted, drafted, 5, 6), start, block)
            found = {j: int(rows_J[j]) for j in range(block) if on_J[j]}
            assert found == relayed(start, accepted, drafted, block), (accepted, drafted)
            assert rows_J.shape == on_J.shape == (block,)
            assert ((rows_J >= 0) & (rows_J < block)).all()


def test_the_worked_examples_of_the_method() -> None:
    def pairs(start: RelayStart, accepted: int) -> dict[int, int]:
        rows_J, on_J = relay_rows(RelayState(accepted, 7, 5, 6), start, 8)
        return {j: int(rows_J[j]) for j in range(8) if on_J[j]}

    assert pairs("after_rejection", 0) == {2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7}
    assert pairs("after_rejection", 3) == {2: 5, 3: 6, 4: 7}
    assert pairs("after_rejection", 7) == {}
    assert pairs("at_rejection", 0) == {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7}
    assert pairs("at_rejection", 3) == {1: 4, 2: 5, 3: 6, 4: 7}
    assert pairs("at_rejection", 7) == {}


def test_a_round_leaves_its_first_rejected_draft_and_the_bonus_token() -> None:
    drafts = (10, 11, 12, 13)
    for accepted in range(4):
        state = relay_state(drafts, (*drafts[:accepted], 99), accepted)
        assert state == RelayState(accepted, 4, bonus_id=99, reject_id=drafts[accepted])
    assert relay_state(drafts, (*drafts, 99), 4) is None
    assert relay_state((), (99,), 0) is None


# -- arithmetic --------------------------------------------------------------------------------------------------------


def _relay_pair(folder: Path, **keys: Any) -> Pair:
    return build_pair(folder, {}, {"draft": {"relay": True, "block_size": BLOCK, **keys}})


def _with_pending(pair: Pair, scale: float = 1.0) -> tuple[Engines, Array]:
    engines = Engines(pair.bundle)
    pending = engines.runtime.pending["draft"]
    pending[:] = scale * np.random.default_rng(3).standard_normal(pending.shape)
    return engines, pending


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"relay_start": "at_rejection"},
        {"input_embedding_scale": 2.5},
        {"rms_norm_eps": 1e-2},
        {"relay_scale": 3.0},
    ],
    ids=["after_rejection", "at_rejection", "input_embedding_scale", "eps", "strong"],
)
@pytest.mark.parametrize("h_scale", [1.0, 1e-3, 3e4])
def test_terms_equal_the_formulas(tmp_path: Path, keys: dict[str, Any], h_scale: float, measure: Any) -> None:
    pair = _relay_pair(tmp_path, **keys)
    engines, pending = _with_pending(pair, h_scale)
    spec = pair.bundle.drafters["draft"].spec
    assert spec.relay is not None
    oracle = RelayOracle(
        pair.target,
        pair.drafters["draft"],
        keys.get("rms_norm_eps", EPS),
        keys.get("input_embedding_scale", 1.0),
    )
    anchors = [3, 4, 5, 6]
    block_BJE = engines.embeds("draft", range(SLOTS), anchors, STATES)
    plain_BJE = engines.embeds("draft", range(SLOTS), anchors)
    worst, checked = 0.0, 0
    for i, state in enumerate(STATES):
        served = {}
        if state is not None:
            served = relayed(keys.get("relay_start", "after_rejection"), state.num_accepted, state.drafted, BLOCK)
        for j in range(BLOCK):
            if state is not None and j in served:
                row = pending[i, served[j]]
                expected = oracle.slot(spec.mask_token_id, row, state.bonus_id, state.reject_id)
                worst = max(worst, float(np.abs(block_BJE[i, j] - expected).max() / np.abs(expected).max()))
                checked += 1
                assert (block_BJE[i, j] != plain_BJE[i, j]).any()
            else:
                np.testing.assert_array_equal(block_BJE[i, j], plain_BJE[i, j])
                token = spec.mask_token_id if j else anchors[i]
                np.testing.assert_array_equal(block_BJE[i, j], oracle.table[token].astype(np.float32))
    measure("relative error", worst)
    assert checked == (8 if keys.get("relay_start") != "at_rejection" else 11)
    assert worst <= TOLERANCE["relay, relative to the largest value"]


@pytest.mark.parametrize("change", ["bonus_id", "reject_id", "h", "swapped pair"])
def test_every_input_matters(tmp_path: Path, change: str) -> None:
    engines, pending = _with_pending(_relay_pair(tmp_path))
    before = engines.embeds("draft", range(1), [3], [RelayState(0, 7, 11, 12)])
    state = {
        "bonus_id": RelayState(0, 7, 13, 12),
        "reject_id": RelayState(0, 7, 11, 13),
        "swapped pair": RelayState(0, 7, 12, 11),
    }.get(change, RelayState(0, 7, 11, 12))
    if change == "h":
        pending[0, 5] += 1
    after = engines.embeds("draft", range(1), [3], [state])
    changed = (after != before).any(axis=-1)[0]
    np.testing.assert_array_equal(changed, np.arange(BLOCK) == 5 if change == "h" else np.arange(BLOCK) >= 2)


def test_an_untrained_relay_is_the_embedding_bit_by_bit(tmp_path: Path) -> None:
    pair = _relay_pair(tmp_path, relay_scale=0.0)
    engines, _ = _with_pending(pair)
    relayed_BJE = engines.embeds("draft", range(SLOTS), [3, 4, 5, 6], STATES)
    np.testing.assert_array_equal(relayed_BJE, engines.embeds("draft", range(SLOTS), [3, 4, 5, 6]))
    make_drafter(tmp_path / "plain", pair.config, block_size=BLOCK)
    source = [DrafterSource(tmp_path / "plain", "draft")]
    plain = build_bundle(pair.target, source, tmp_path / "plain-bundle", BuildOptions(max_seq_len=256))
    plain_BJE = Engines(plain).embeds("draft", range(SLOTS), [3, 4, 5, 6])
    np.testing.assert_array_equal(relayed_BJE, plain_BJE)


@pytest.mark.parametrize("garbage", [1e30, -3e38])
@pytest.mark.parametrize("start", RELAY_STARTS)
def test_slots_without_relay_ignore_huge_pending_rows(tmp_path: Path, start: RelayStart, garbage: float) -> None:
    """Rows that no slot receives, slots of other requests, and whole requests without a state."""
    pair = _relay_pair(tmp_path, relay_start=start)
    engines, pending = _with_pending(pair)
    expected = engines.embeds("draft", range(SLOTS), [3, 4, 5, 6], STATES)
    for i, state in enumerate(STATES):
        used = set() if state is None else set(relayed(start, state.num_accepted, state.drafted, BLOCK).values())
        pending[i, [row for row in range(BLOCK) if row not in used]] = garbage
    found = engines.embeds("draft", range(SLOTS), [3, 4, 5, 6], STATES)
    np.testing.assert_array_equal(found, expected)
    table = load_file(pair.target / "model.safetensors")["model.embed_tokens.weight"]
    mask = table[pair.bundle.drafters["draft"].spec.mask_token_id]
    np.testing.assert_array_equal(found[1, 1:], np.tile(mask, (BLOCK - 1, 1)))
    assert np.isfinite(found).all()


def test_a_request_has_the_same_relay_in_every_batch(tmp_path: Path) -> None:
    engines, _ = _with_pending(_relay_pair(tmp_path))
    whole = engines.embeds("draft", range(SLOTS), [3, 4, 5, 6], STATES)
    for slots in (range(1), range(2, 3), range(1, 4), range(3, 4)):
        part = engines.embeds("draft", slots, [[3, 4, 5, 6][i] for i in slots], [STATES[i] for i in slots])
        np.testing.assert_array_equal(part, whole[slots.start : slots.stop])


def test_a_drafter_without_relay_takes_block_ids_alone(tmp_path: Path) -> None:
    pair = build_pair(tmp_path, {}, {"draft": {}})
    contracts = {contract.engine: contract for _, contract in pair.bundle.contracts()}
    assert contracts[c.RELAY].inputs == (c.BLOCK_IDS,)
