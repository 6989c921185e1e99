"""Drafter folders: the layouts, masks and relays that are accepted, and what is refused, by key and value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import DELETE, DOMINO_DEFAULTS, edit_config, edit_tensors, make_drafter, make_target

from dflow_trt.checkpoint.drafter import DrafterCheckpoint, read_drafter
from dflow_trt.checkpoint.names import DOMINO_NAMES, RELAY_NAMES, drafter_tensors
from dflow_trt.checkpoint.target import read_target
from dflow_trt.errors import UserError
from dflow_trt.spec import DFlashSpec, DominoSpec, RelaySpec, TargetSpec, to_json

SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 16,
    "layer_types": ["full_attention", "sliding_attention"],
}


def _pair(folder: Path, target_keys: Any = None, **keys: Any) -> TargetSpec:
    """Write a pair; the drafter lies in ``folder / "drafter"``."""
    config = make_target(folder / "target", **(target_keys or {}))
    make_drafter(folder / "drafter", config, **keys)
    return read_target(folder / "target").spec


def _read(folder: Path, **keys: Any) -> DrafterCheckpoint:
    return read_drafter(folder / "drafter", _pair(folder, **keys))


def test_a_dflash_drafter(tmp_path: Path) -> None:
    drafter = _read(tmp_path)
    spec = drafter.spec
    assert (spec.name, spec.relay, spec.strategies) == ("dflash", None, ("dflash",))
    assert (spec.block_size, spec.num_drafts, spec.mask_token_id) == (8, 7, 255)
    assert (spec.target_layer_ids, spec.target_hidden_size, spec.num_target_layers) == ((0, 1), 64, 3)
    assert (spec.stack.num_layers, spec.stack.windows, spec.stack.causal) == (2, (None, None), (False, False))
    assert (spec.input_embedding_scale, spec.output_multiplier, spec.final_logit_softcapping) == (
        1.0,
        1.0,
        None,
    )
    assert (spec.vocab_size, spec.checkpoint_dtype, spec.architecture) == (256, "float32", "DFlashDraftModel")
    assert {name: drafter.weights.shape(name) for name in drafter.weights.names()} == drafter_tensors(spec)
    assert DFlashSpec.from_json(json.loads(json.dumps(to_json(spec)))) == spec


@pytest.mark.parametrize("start", ["after_rejection", "at_rejection"])
def test_a_dflow_drafter(tmp_path: Path, start: Any) -> None:
    drafter = _read(tmp_path, relay=True, relay_start=start, rms_norm_eps=1e-5)
    assert drafter.spec.relay == RelaySpec(start, 1e-5)
    assert drafter.spec.strategies == ("dflow", "dflow-norelay")
    assert drafter.weights.shape("relay_mlp.0.weight") == (128, 192)
    assert set(RELAY_NAMES) <= set(drafter.weights.names())


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("prefix", [0, 1, 7])
def test_a_domino_drafter(tmp_path: Path, shifted: bool, prefix: int) -> None:
    drafter = _read(tmp_path, domino={"pure_draft_prefix_len": prefix, "shift_label": shifted})
    spec = drafter.spec
    assert (spec.name, spec.relay, spec.strategies) == ("domino", None, ("domino",))
    assert spec.head == DominoSpec(prefix_length=prefix, state_size=24, rank=20, shifted=shifted)
    assert (spec.block_size, spec.num_drafts, spec.verify_rows) == ((8, 8, 9) if shifted else (8, 7, 8))
    assert spec.first_slot == (0 if shifted else 1)
    assert list(spec.corrected_drafts) == [i for i in range(1, spec.num_drafts + 1) if i > prefix]
    assert [drafter.weights.shape(name) for name in DOMINO_NAMES] == [(72, 64), (72, 24), (20, 88), (256, 20)]
    assert {name: drafter.weights.shape(name) for name in drafter.weights.names()} == drafter_tensors(spec)
    assert DFlashSpec.from_json(json.loads(json.dumps(to_json(spec)))) == spec


def test_a_domino_drafter_with_a_relay(tmp_path: Path) -> None:
    spec = _read(tmp_path, relay=True, domino={}).spec
    assert spec.relay is not None
    assert spec.head is not None
    assert spec.strategies == ("domino-dflow", "domino-dflow-norelay")


@pytest.mark.parametrize("keys", [{"top_level": True}, {"layout": 4}, {"shards": 3}])
def test_layouts_give_the_same_domino_drafter(tmp_path: Path, keys: dict[str, Any]) -> None:
    head = {"shift_label": True, "pure_draft_prefix_len": 2}
    plain, other = (_read(tmp_path / name, domino=head, **more).spec for name, more in (("a", {}), ("b", keys)))
    assert plain == other


def test_keys_of_a_domino_drafter_may_be_repeated_or_absent(tmp_path: Path) -> None:
    target = _pair(tmp_path, domino={}, emb_dim=20)
    sizes = {"projector_type": "domino", "emb_dim": 20, "gru_hidden_dim": 24}
    edit_config(tmp_path / "drafter", dflash_config={**DRAFT, **sizes})
    assert read_drafter(tmp_path / "drafter", target).spec.head == DominoSpec(0, 24, 20, False)


@pytest.mark.parametrize("keys", [{"top_level": True}, {"layout": 4}, {"shards": 2}, {"speculators": True}])
def test_layouts_give_the_same_drafter(tmp_path: Path, keys: dict[str, Any]) -> None:
    plain, other = _read(tmp_path / "a").spec, _read(tmp_path / "b", **keys).spec
    assert {**to_json(plain), "architecture": ""} == {**to_json(other), "architecture": ""}


def test_the_order_of_the_taps_is_kept(tmp_path: Path) -> None:
    for nested in (False, True):
        drafter = _read(tmp_path, target_keys={"num_hidden_layers": 6}, taps=(4, 0, 2), speculators=nested)
        assert drafter.spec.target_layer_ids == (4, 0, 2)
        assert drafter.weights.shape("fc.weight") == (64, 192)


@pytest.mark.parametrize(
    ("keys", "windows", "causal"),
    [
        (SLIDING, (None, 16), (False, True)),
        ({**SLIDING, "is_causal": False}, (None, 16), (False, False)),
        ({**SLIDING, "is_causal": True}, (None, 16), (True, True)),
        ({"is_causal": True}, (None, None), (True, True)),
        (
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
            (None, 16),
            (False, True),
        ),
        ({"sliding_window": 16, "max_window_layers": 0}, (None, None), (False, False)),
    ],
)
def test_masks_follow_the_rule_of_the_dflash_package(
    tmp_path: Path, keys: dict[str, Any], windows: tuple[Any, ...], causal: tuple[bool, ...]
) -> None:
    stack = _read(tmp_path, **keys).spec.stack
    assert (stack.windows, stack.causal) == (windows, causal)
    dflash = pytest.importorskip("dflash.model", reason="the reference is the dflash package")
    model = dflash.DFlashDraftModel.from_pretrained(tmp_path / "drafter")
    assert tuple(layer.self_attn.sliding_window for layer in model.layers) == windows
    assert tuple(layer.self_attn.is_causal for layer in model.layers) == causal


@pytest.mark.parametrize("both_ways", [False, True])
def test_masks_of_the_speculators_layout(tmp_path: Path, both_ways: bool) -> None:
    target = _pair(tmp_path, speculators=True, **SLIDING)
    edit_config(tmp_path / "drafter", sliding_window_non_causal=both_ways)
    stack = read_drafter(tmp_path / "drafter", target).spec.stack
    assert (stack.windows, stack.causal) == ((None, 16), (False, not both_ways))


def test_a_shape_of_its_own(tmp_path: Path) -> None:
    keys = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16, "intermediate_size": 32}
    stack = _read(tmp_path, attention_bias=True, num_hidden_layers=1, **keys).spec.stack
    assert (stack.num_layers, stack.num_heads, stack.num_kv_heads, stack.head_dim) == (1, 6, 3, 16)
    assert stack.attention_bias


@pytest.mark.parametrize("inside", [True, False])
def test_scales_and_softcap(tmp_path: Path, inside: bool) -> None:
    target = _pair(tmp_path)
    scales = {"input_embedding_scale": 8, "output_multiplier": 0.5, "final_logit_softcapping": 30.0}
    draft = {"block_size": 8, "mask_token_id": 255, "target_layer_ids": [0, 1]}
    changes = {"dflash_config": {**draft, **scales}} if inside else scales
    edit_config(tmp_path / "drafter", **changes)
    spec = read_drafter(tmp_path / "drafter", target).spec
    assert (spec.input_embedding_scale, spec.output_multiplier, spec.final_logit_softcapping) == (
        8.0,
        0.5,
        30.0,
    )


def test_a_softcap_of_zero_is_none(tmp_path: Path) -> None:
    assert _read(tmp_path, final_logit_softcapping=0.0).spec.final_logit_softcapping is None


def test_the_mask_token_may_be_a_padding_row(tmp_path: Path) -> None:
    target = _pair(tmp_path, target_keys={"tokenizer": 100})
    assert target.live_vocab == 100
    assert read_drafter(tmp_path / "drafter", target).spec.mask_token_id == 255


def test_names(tmp_path: Path) -> None:
    target = _pair(tmp_path, relay=True)
    assert read_drafter(tmp_path / "drafter", target, name="big_2-x").spec.name == "big_2-x"
    for name in ("ar", "target", "vocab", "", "Dflow", "-x", "a b", "x-norelay", "a\n"):
        with pytest.raises(UserError, match=r"drafter name is .*; allowed: \[a-z0-9\]") as caught:
            read_drafter(tmp_path / "drafter", target, name=name)
        assert len(str(caught.value).splitlines()) == 1


def test_the_fingerprint_tells_drafters_apart(tmp_path: Path) -> None:
    target = _pair(tmp_path)
    prints = set()
    for seed in (1, 1, 2):
        make_drafter(tmp_path / "drafter", json.loads((tmp_path / "target/config.json").read_text()), seed=seed)
        prints.add(read_drafter(tmp_path / "drafter", target).fingerprint)
    assert len(prints) == 2


DRAFT = {"block_size": 8, "mask_token_id": 255, "target_layer_ids": [0, 1]}


def _config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, **changes)


def _draft(**changes: Any) -> Callable[[Path], None]:
    keys = {key: value for key, value in {**DRAFT, **changes}.items() if value is not DELETE}
    return _config(dflash_config=keys)


def _tensor(name: str, value: Any) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, {name: value})


ZERO = np.zeros((256, 64), np.float32)
REFUSED: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "no block_size": (_draft(block_size=DELETE), ("block_size is missing", "an integer from 2")),
    "block of one": (_draft(block_size=1), ("block_size is 1", "an integer from 2")),
    "block as text": (_draft(block_size="8"), ("block_size is '8'", "an integer from 2")),
    "no mask id": (_draft(mask_token_id=DELETE), ("mask_token_id is missing", "an integer from 0 to 255")),
    "mask id outside": (_draft(mask_token_id=256), ("mask_token_id is 256", "an integer from 0 to 255")),
    "mask id is eos": (
        _draft(mask_token_id=1),
        ("mask_token_id is 1", "an id that is not an eos id of the target"),
    ),
    "mask id is pad": (
        _draft(mask_token_id=5),
        ("mask_token_id is 5", "an id that is not the pad id of the target"),
    ),
    "no taps": (
        _draft(target_layer_ids=DELETE),
        ("target_layer_ids is missing", "a non-empty list of integers"),
    ),
    "empty taps": (_draft(target_layer_ids=[]), ("target_layer_ids is []", "a non-empty list of integers")),
    "tap as bool": (
        _draft(target_layer_ids=[0, True]),
        ("target_layer_ids is [0, True]", "list of integers"),
    ),
    "tap outside": (
        _draft(target_layer_ids=[0, 3]),
        ("target_layer_ids is [0, 3]", "ids from 0 to 1", "3 layers"),
    ),
    "tap negative": (_draft(target_layer_ids=[-1, 0]), ("target_layer_ids is [-1, 0]", "ids from 0 to 1")),
    "tap last": (
        _draft(target_layer_ids=[0, 2]),
        ("target_layer_ids is [0, 2]", "ids from 0 to 1", "before or after the final norm"),
    ),
    "tap twice": (
        _draft(target_layer_ids=[1, 1]),
        ("target_layer_ids is [1, 1]", "ids from 0 to 1, each once"),
    ),
    "dflash_config not an object": (_config(dflash_config=[1]), ("dflash_config is [1]", "a JSON object")),
    "two block sizes": (
        _config(block_size=16),
        ("dflash_config.block_size is 8", "the value at the top level, 16"),
    ),
    "no num_hidden_layers": (_config(num_hidden_layers=DELETE), ("num_hidden_layers is missing",)),
    "hidden sizes": (_config(hidden_size=32), ("hidden_size is 32", "64, the target's hidden_size")),
    "tap width": (_config(target_hidden_size=32), ("target_hidden_size is 32", "64, as in the target")),
    "vocabularies": (_config(vocab_size=300), ("vocab_size is 300", "256, the target's vocab_size")),
    "depth inside": (_draft(num_target_layers=36), ("dflash_config.num_target_layers is 36", "at the top level, 3")),
    "depth": (_config(num_target_layers=36), ("num_target_layers is 36", "3, as in the target")),
    "draft vocabulary": (_config(draft_vocab_size=128), ("draft_vocab_size is 128", "256, as in the target")),
    "d2t map": (_tensor("d2t", np.zeros(8, np.int64)), ("d2t is a vocabulary map", "no draft vocabulary")),
    "own embedding": (
        _tensor("embed_tokens.weight", ZERO),
        ("embed_tokens.weight is in the drafter", "the target's"),
    ),
    "own head": (
        _tensor("lm_head.weight", ZERO),
        ("lm_head.weight is in the drafter", "the target's own table"),
    ),
    "domino without tensors": (
        _draft(projector_type="domino"),
        ("prefix_gru.weight_ih_l0 is missing, while projector_type is 'domino'", "all Domino head tensors"),
    ),
    "domino tensor without config": (
        _tensor("embed_proj.2.weight", np.zeros((256, 8), np.float32)),
        ("prefix_gru.weight_ih_l0 is missing, while embed_proj.2.weight is there", "with projector_type, or none"),
    ),
    "dspark": (_config(projector_type="dspark"), ("projector_type is 'dspark'", "'dflash' or 'domino'")),
    "another architecture": (
        _config(architectures=["DFlash3DraftModel"]),
        ("architectures is ['DFlash3DraftModel']", "['DFlashDraftModel'] or ['DFlash2DraftModel']"),
    ),
    "shifted labels": (_draft(shift_label=True), ("shift_label is True", "false or absent")),
    "sampled anchor": (_config(sample_from_anchor=True), ("sample_from_anchor is True", "false or absent")),
    "MoE": (_config(num_experts=4), ("num_experts is 4", "allowed: absent")),
    "quantised": (
        _config(quantization_config={"bits": 4}),
        ("quantization_config is {'bits': 4}", "allowed: absent"),
    ),
    "rope": (
        _config(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4}),
        ("rope_parameters.rope_type is 'llama3'", "'default' or 'linear' or 'yarn'"),
    ),
    "too many layers": (
        _config(num_hidden_layers=10**9),
        ("num_hidden_layers is 1000000000", "from 1 to 1024"),
    ),
    "heads do not divide": (_config(num_key_value_heads=3), ("num_key_value_heads is 3", "a divisor of")),
    "NaN": (
        lambda folder: edit_config(folder, output_multiplier=float("nan")),
        ("the content is the number NaN", "one JSON object"),
    ),
    "scale": (_config(input_embedding_scale="2"), ("input_embedding_scale is '2'", "a finite number")),
    "is_causal": (_config(is_causal=1), ("is_causal is 1", "true or false")),
    "sliding without window": (
        _config(layer_types=["full_attention", "sliding_attention"], sliding_window=8),
        ("sliding_window is 8", "together with use_sliding_window true"),
    ),
    "missing tensor": (_tensor("fc.weight", DELETE), ("fc.weight is missing",)),
    "missing norm": (_tensor("hidden_norm.weight", DELETE), ("hidden_norm.weight is missing", "shape [64]")),
    "left-over tensor": (
        _tensor("candidate_selector.hidden_projection.weight", ZERO),
        ("candidate_selector.hidden_projection.weight is left over", "the tensors of config.json's model"),
    ),
    "fc shape": (
        _draft(target_layer_ids=[0]),
        ("fc.weight is of shape [64, 128]", "[64, 64], as config.json says"),
    ),
    "relay tensor without config": (
        _tensor("relay_norm.bias", np.zeros(64, np.float32)),
        (
            "relay_norm.weight is missing, while relay_norm.bias is there",
            "all relay tensors with relay_start, or none",
        ),
    ),
    "relay_start without tensors": (
        _config(dflow_config={"relay_start": "at_rejection"}),
        ("relay_norm.weight is missing, while relay_start is 'at_rejection'", "all relay tensors"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_key_value_and_allowed_values(tmp_path: Path, name: str) -> None:
    damage, words = REFUSED[name]
    target = _pair(tmp_path, target_keys={"pad_token_id": 5})
    _assert_refused(tmp_path, target, damage, words)


RELAY_REFUSED: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "no relay_start": (
        _config(dflow_config={}),
        ("dflow_config.relay_start is missing", "'after_rejection' or 'at_rejection'"),
    ),
    "no dflow_config": (
        _config(dflow_config=DELETE),
        ("dflow_config.relay_start is missing", "'after_rejection' or 'at_rejection'"),
    ),
    "unknown relay_start": (
        _config(dflow_config={"relay_start": "always"}),
        ("dflow_config.relay_start is 'always'", "'after_rejection' or 'at_rejection'"),
    ),
    "partial": (
        _tensor("relay_mlp.2.bias", DELETE),
        ("relay_mlp.2.bias is missing, while relay_norm.weight is there", "all relay tensors"),
    ),
    "shape": (
        _tensor("relay_mlp.0.weight", np.zeros((128, 128), np.float32)),
        ("relay_mlp.0.weight is of shape [128, 128]", "[128, 192]"),
    ),
    "third layer": (_tensor("relay_mlp.4.weight", ZERO), ("relay_mlp.4.weight is left over",)),
}


@pytest.mark.parametrize("name", RELAY_REFUSED)
def test_broken_relays_are_refused(tmp_path: Path, name: str) -> None:
    damage, words = RELAY_REFUSED[name]
    _assert_refused(tmp_path, _pair(tmp_path, relay=True), damage, words)


def _domino(**changes: Any) -> Callable[[Path], None]:
    return _draft(**{**DOMINO_DEFAULTS, **changes})


DOMINO_REFUSED: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "no projector_type": (
        _domino(projector_type=DELETE),
        ("projector_type is missing", "'domino', as prefix_gru.weight_ih_l0 is there"),
    ),
    "another projector_type": (_domino(projector_type="dflash"), ("projector_type is 'dflash'", "allowed: 'domino'")),
    "partial": (
        _tensor("embed_proj.0.weight", DELETE),
        (
            "embed_proj.0.weight is missing, while prefix_gru.weight_ih_l0 is there",
            "all Domino head tensors with projector_type, or none; complete the Domino head, or remove it",
        ),
    ),
    "shape": (_domino(emb_dim=16), ("embed_proj.0.weight is of shape [20, 88]", "[16, 88], as config.json says")),
    "state": (_domino(gru_hidden_dim=16), ("prefix_gru.weight_ih_l0 is of shape [72, 64]", "[48, 64]")),
    "a bias": (
        _tensor("prefix_gru.bias_ih_l0", np.zeros(72, np.float32)),
        ("prefix_gru.bias_ih_l0 is left over",),
    ),
    "no rank": (_domino(emb_dim=DELETE), ("emb_dim is missing", "an integer from 1")),
    "rank of zero": (_domino(emb_dim=0), ("emb_dim is 0", "an integer from 1")),
    "two ranks": (_config(emb_dim=16), ("dflash_config.emb_dim is 20", "the value at the top level, 16")),
    "no state size": (_domino(gru_hidden_dim=DELETE), ("gru_hidden_dim is missing", "an integer from 1")),
    "negative state size": (_domino(gru_hidden_dim=-1), ("gru_hidden_dim is -1", "an integer from 1")),
    "negative prefix": (_domino(pure_draft_prefix_len=-1), ("pure_draft_prefix_len is -1", "from 0 to 7")),
    "prefix past the drafts": (_domino(pure_draft_prefix_len=8), ("pure_draft_prefix_len is 8", "from 0 to 7")),
    "prefix past the shifted drafts": (
        _domino(pure_draft_prefix_len=9, shift_label=True),
        ("pure_draft_prefix_len is 9", "from 0 to 8"),
    ),
    "shift_label": (_domino(shift_label="yes"), ("shift_label is 'yes'", "true or false")),
    "embedding scale": (
        _config(input_embedding_scale=2.0),
        ("input_embedding_scale is 2.0", "1 or absent with a Domino head"),
    ),
    "multiplier": (_domino(output_multiplier=0.5), ("output_multiplier is 0.5", "1 or absent with a Domino head")),
    "softcap": (
        _domino(final_logit_softcapping=30.0),
        ("final_logit_softcapping is 30.0", "0 or absent with a Domino head"),
    ),
    "sampled anchor": (_domino(sample_from_anchor=True), ("sample_from_anchor is True", "false or absent")),
}


@pytest.mark.parametrize("name", DOMINO_REFUSED)
def test_broken_domino_heads_are_refused(tmp_path: Path, name: str) -> None:
    damage, words = DOMINO_REFUSED[name]
    _assert_refused(tmp_path, _pair(tmp_path, domino={}), damage, words)


def test_shifted_slots_with_a_relay_are_refused(tmp_path: Path) -> None:
    words = ("shift_label is True", "false or absent with a relay")
    _assert_refused(tmp_path, _pair(tmp_path, domino={}, relay=True), _domino(shift_label=True), words)


NESTED_REFUSED: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "algorithm": (
        _config(speculators_model_type="eagle3"),
        ("speculators_model_type is 'eagle3'", "'dflash'"),
    ),
    "no taps": (_config(aux_hidden_state_layer_ids=None), ("aux_hidden_state_layer_ids is missing",)),
    "embedding output": (
        _config(aux_hidden_state_layer_ids=[0, 1]),
        ("aux_hidden_state_layer_ids is [0, 1]", "ids from 1 to 2"),
    ),
    "last layer": (
        _config(aux_hidden_state_layer_ids=[1, 3]),
        ("aux_hidden_state_layer_ids is [1, 3]", "ids from 1 to 2", "before or after the final norm"),
    ),
    "domino": (_config(projector_type="domino"), ("projector_type is 'domino'", "'dflash'")),
    "architecture": (_config(architectures=["Eagle3Speculator"]), ("architectures is ['Eagle3Speculator']",)),
    "draft vocabulary": (_config(draft_vocab_size=128), ("draft_vocab_size is 128", "256, as in the target")),
    "quantised": (_config(quantization_config={"bits": 4}), ("quantization_config is {'bits': 4}", "absent")),
    "nested key": (
        _config(transformer_layer_config={"vocab_size": 256, "hidden_size": "64"}),
        ("transformer_layer_config.hidden_size is '64'", "an integer from 1"),
    ),
}


@pytest.mark.parametrize("name", NESTED_REFUSED)
def test_the_speculators_layout_is_refused_by_key_too(tmp_path: Path, name: str) -> None:
    damage, words = NESTED_REFUSED[name]
    _assert_refused(tmp_path, _pair(tmp_path, speculators=True), damage, words)


def _assert_refused(folder: Path, target: TargetSpec, damage: Any, words: tuple[str, ...]) -> None:
    read_drafter(folder / "drafter", target)
    damage(folder / "drafter")
    with pytest.raises(UserError) as caught:
        read_drafter(folder / "drafter", target)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.startswith(str(folder / "drafter"))
    assert "; allowed: " in message
    assert [word for word in words if word not in message] == [], message
