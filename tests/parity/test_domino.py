"""What Domino's head leaves alone: drafts of its prefix, ids without a token, all of DFlash where it adds nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Array, Config, Engines, Pair, build_pair, random_tokens
from safetensors.numpy import load_file
from tiny import edit_tensors, make_drafter, make_target

from dflow_trt.build import BuildOptions, DrafterSource, build_bundle

PROMPTS, ANCHORS = (21, 9, 14), (3, 77, 130)
SHIFTED = {"shift_label": True}


@pytest.fixture(params=["float", "int8"])
def form(request: pytest.FixtureRequest) -> Any:
    return request.param


def build(folder: Path, form: str, drafters: dict[str, Config]) -> Pair:
    """Drafters of one seed, so that they differ in their heads alone; ``plain`` has none."""
    return build_pair(folder, {}, {"plain": {}, **drafters}, draft_weights=form)


def drafted(pair: Pair) -> dict[str, tuple[Array, Array]]:
    """(ids [B,K], logits [B,K,V]) of each drafter's block behind the same three prompts."""
    engines, rng, slots, starts = Engines(pair.bundle), np.random.default_rng(5), range(3), [0, 0, 0]
    engines.target(slots, [random_tokens(rng, length, 256) for length in PROMPTS], starts)
    found = {}
    for name in pair.drafters:
        engines.context(name, slots, starts, max(PROMPTS))
        engines.embeds(name, slots, ANCHORS)
        found[name] = engines.draft(name, slots, PROMPTS)
    return found


def test_drafts_of_the_prefix_are_those_of_dflash(tmp_path: Path, form: str) -> None:
    prefixes = (0, 1, 4, 7)
    drafters: dict[str, Config] = {f"behind-{p}": {"domino": {"pure_draft_prefix_len": p}} for p in prefixes}
    found = drafted(build(tmp_path, form, drafters))
    ids_BK, logits_BKV = found["plain"]
    for p in prefixes:
        head_ids_BK, head_logits_BKV = found[f"behind-{p}"]
        np.testing.assert_array_equal(head_ids_BK[:, :p], ids_BK[:, :p])
        np.testing.assert_array_equal(head_logits_BKV[:, :p], logits_BKV[:, :p])
        assert (head_logits_BKV[:, p:] != logits_BKV[:, p:]).any(axis=-1).all(), "and all others are corrected"
        assert p == 7 or (head_ids_BK[:, p:] != ids_BK[:, p:]).any()


def test_a_shifted_head_drafts_from_the_slot_before(tmp_path: Path, form: str) -> None:
    """Draft i of its prefix is what DFlash makes of slot i - 1; slot 0 gives a draft as well."""
    drafters: dict[str, Config] = {"shifted": {"domino": {**SHIFTED, "pure_draft_prefix_len": 8}}}
    found = drafted(build(tmp_path, form, drafters))
    assert (found["plain"][0].shape, found["shifted"][0].shape) == ((3, 7), (3, 8))
    for shifted, plain in zip(found["shifted"], found["plain"], strict=True):
        np.testing.assert_array_equal(shifted[:, 1:], plain)


def test_a_head_that_adds_nothing_drafts_as_dflash(tmp_path: Path, form: str) -> None:
    drafters: dict[str, Config] = {
        "zero": {"domino": {}, "domino_scale": 0.0},
        "shifted": {"domino": SHIFTED, "domino_scale": 0.0},
    }
    found = drafted(build(tmp_path, form, drafters))
    for zero, shifted, plain in zip(found["zero"], found["shifted"], found["plain"], strict=True):
        np.testing.assert_array_equal(zero, plain)
        np.testing.assert_array_equal(shifted[:, 1:], plain)


def test_logits_depend_on_every_draft_before(tmp_path: Path, form: str) -> None:
    """Two heads that differ in their prefix alone: behind it, equal logits where all drafts before are equal."""
    drafters: dict[str, Config] = {f"behind-{p}": {"domino": {"pure_draft_prefix_len": p}} for p in (1, 3)}
    found = drafted(build(tmp_path, form, drafters))
    changed = 0
    for i in range(3, 7):
        same_B = (found["behind-1"][0][:, :i] == found["behind-3"][0][:, :i]).all(axis=-1)
        equal_B = (found["behind-1"][1][:, i] == found["behind-3"][1][:, i]).all(axis=-1)
        np.testing.assert_array_equal(equal_B, same_B)
        changed += int((~same_B).sum())
    assert changed


def test_ids_without_a_token_stay_dead(tmp_path: Path, form: str) -> None:
    """However large the correction: 200 tokens, a table of 300 rows, and 384 columns of logits."""
    keys: Config = {"domino": SHIFTED, "domino_scale": 50.0}
    pair = build_pair(tmp_path, {"vocab_size": 300, "tokenizer": 200}, {"draft": keys}, draft_weights=form)
    ids_BK, logits_BKV = drafted(pair)["draft"]
    assert logits_BKV.shape == (3, 8, 384)
    assert (ids_BK < 200).all()
    assert (logits_BKV[..., 200:] < -1e20).all()
    assert (np.abs(logits_BKV[..., :200]) < 1e20).all()


def test_the_lowest_id_wins_a_tie(tmp_path: Path, form: str) -> None:
    """A vocabulary whose second half repeats the first, in the head and in what corrects it."""
    config = make_target(tmp_path / "target")
    make_drafter(tmp_path / "draft", config, domino={})
    for folder, name in (("target", "lm_head.weight"), ("draft", "embed_proj.2.weight")):
        table = load_file(tmp_path / folder / "model.safetensors")[name]
        edit_tensors(tmp_path / folder, {name: np.concatenate([table[:128], table[:128]])})
    options = BuildOptions(max_seq_len=256, draft_weights="int8" if form == "int8" else "float", draft_logits=True)
    source = DrafterSource(tmp_path / "draft", "draft")
    bundle = build_bundle(tmp_path / "target", [source], tmp_path / "bundle", options, self_check="off")
    ids_BK, logits_BKV = drafted(Pair(bundle, tmp_path / "target", {"draft": source.path}, config))["draft"]
    np.testing.assert_array_equal(logits_BKV[..., :128], logits_BKV[..., 128:])
    assert (ids_BK < 128).all()
