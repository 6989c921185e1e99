"""EAGLE-3 folders: the layouts, tap conventions and vocabulary maps that are read, and what is refused, by key."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny import DELETE, Config, edit_config, edit_tensors, make_eagle3, make_target, make_tokenizer

from dflow_trt import contract as c
from dflow_trt.checkpoint.eagle3 import (
    ARCHITECTURES,
    NESTED_ARCHITECTURES,
    Eagle3Checkpoint,
    read_eagle3,
    without_copied_embedding,
)
from dflow_trt.checkpoint.names import eagle3_tensors
from dflow_trt.checkpoint.target import read_target
from dflow_trt.errors import UserError
from dflow_trt.graphs.eagle3 import describe, stored
from dflow_trt.kinds import KINDS
from dflow_trt.spec import Eagle3Spec, TargetSpec, to_json

IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def _pair(folder: Path, layers: int = 8, tokenizer: int | None = None, **keys: Any) -> TargetSpec:
    """Write a pair; the drafter lies in ``folder / "drafter"``."""
    config = make_target(folder / "target", num_hidden_layers=layers, tokenizer=tokenizer)
    make_eagle3(folder / "drafter", config, **{"taps": (1, 3, 4), **keys})
    return read_target(folder / "target").spec


def _read(folder: Path, settings: Mapping[str, int] | None = None, **keys: Any) -> Eagle3Checkpoint:
    return read_eagle3(folder / "drafter", _pair(folder, **keys), None, settings)


def _tensors(folder: Path) -> dict[str, Any]:
    return load_file(folder / "drafter" / "model.safetensors")


def test_an_eagle3_drafter(tmp_path: Path) -> None:
    drafter = _read(tmp_path)
    spec = drafter.spec
    assert (spec.kind, spec.serial, spec.name, spec.strategies) == ("eagle3", True, "eagle3", ("eagle3",))
    assert (spec.num_drafts, spec.verify_rows, spec.draft_vocab) == (5, 6, 100)
    assert (spec.taps, spec.target_hidden_size, spec.vocab_size) == ((1, 3, 4), 64, 256)
    assert (spec.stack.num_layers, spec.stack.causal, spec.stack.windows) == (1, (True,), (None,))
    assert (spec.stack.qk_norm, spec.own_embedding) == (False, False)
    assert [getattr(spec, flag) for flag in FLAGS] == [False] * 4
    assert (spec.checkpoint_dtype, spec.architecture) == ("float32", "LlamaForCausalLMEagle3")
    assert {name: drafter.weights.shape(name) for name in drafter.weights.names()} == eagle3_tensors(spec)
    assert drafter.weights.shape("layers.0.self_attn.q_proj.weight") == (128, 2 * 64)
    assert Eagle3Spec.from_json(json.loads(json.dumps(to_json(spec)))) == spec


def test_draft_ids_map_to_the_targets_by_offsets(tmp_path: Path) -> None:
    drafter, tensors = _read(tmp_path), _tensors(tmp_path)
    np.testing.assert_array_equal(drafter.target_ids, np.flatnonzero(tensors["t2d"]))
    assert drafter.target_ids.dtype == np.int64
    assert (drafter.target_ids != np.arange(100)).any()


@pytest.mark.parametrize("change", ["int32", "no t2d", "another order"])
def test_maps_of_other_forms(tmp_path: Path, change: str) -> None:
    target = _pair(tmp_path)
    offsets = _tensors(tmp_path)["d2t"]
    if change == "another order":
        offsets = (offsets + np.arange(100))[::-1] - np.arange(100)
    maps = {"int32": {"d2t": offsets.astype(np.int32)}, "no t2d": {"t2d": DELETE}}.get(change, {"d2t": offsets.copy()})
    edit_tensors(tmp_path / "drafter", maps)
    np.testing.assert_array_equal(
        read_eagle3(tmp_path / "drafter", target).target_ids, offsets.astype(np.int64) + np.arange(100)
    )


@pytest.mark.parametrize("said", [True, False])
def test_a_whole_vocabulary_needs_no_maps(tmp_path: Path, said: bool) -> None:
    target = _pair(tmp_path, draft_vocab_size=256, maps=False)
    if not said:
        edit_config(tmp_path / "drafter", draft_vocab_size=DELETE)
    drafter = read_eagle3(tmp_path / "drafter", target)
    assert drafter.spec.draft_vocab_size == 256
    np.testing.assert_array_equal(drafter.target_ids, np.arange(256))


def test_layouts_give_the_same_drafter(tmp_path: Path) -> None:
    variants: dict[str, Config] = {
        "plain": {},
        "speculators": {"speculators": True},
        "shards": {"shards": 3},
        "transformers 5": {"layout": 5},
        "vllm": {"architectures": ["Eagle3LlamaForCausalLM"]},
    }
    specs = [to_json(_read(tmp_path / name, **keys).spec) for name, keys in variants.items()]
    assert all({**spec, "architecture": ""} == {**specs[0], "architecture": ""} for spec in specs)


def test_a_leading_model_in_names_and_the_targets_tensors_change_nothing(tmp_path: Path) -> None:
    target = _pair(tmp_path)
    plain, tensors = read_eagle3(tmp_path / "drafter", target), _tensors(tmp_path)
    renamed = {f"model.{name}": value for name, value in tensors.items() if name.startswith(("midlayer.", "fc."))}
    frozen = {"verifier_lm_head.weight": np.zeros((100, 64), np.float32)}
    edit_tensors(
        tmp_path / "drafter", {**renamed, **frozen, **{name.removeprefix("model."): DELETE for name in renamed}}
    )
    drafter = read_eagle3(tmp_path / "drafter", target)
    assert drafter.spec == plain.spec
    assert set(drafter.weights.names()) == set(plain.weights.names())


def test_the_registry_knows_every_architecture() -> None:
    assert KINDS["eagle3"].architectures == (*ARCHITECTURES, *NESTED_ARCHITECTURES)


def test_variants_are_read_from_either_layout(tmp_path: Path) -> None:
    flags = dict.fromkeys(FLAGS, True)
    for name, nested in (("flat", False), ("nested", True)):
        drafter = _read(tmp_path / name, own_embedding=True, qk_norm=True, speculators=nested, **flags)
        spec = drafter.spec
        assert (spec.own_embedding, spec.stack.qk_norm) == (True, True)
        assert [getattr(spec, flag) for flag in FLAGS] == [True] * 4
        shapes = {name: drafter.weights.shape(name) for name in drafter.weights.names()}
        assert shapes["input_norm.weight"] == (192,)
        assert shapes["fc_norm.2.weight"] == (64,)
        assert shapes["embed_tokens.weight"] == (256, 64)


def test_variants_may_stand_in_eagle_config(tmp_path: Path) -> None:
    target = _pair(tmp_path, norm_before_fc=True)
    edit_config(tmp_path / "drafter", norm_before_fc=DELETE, eagle_config={IDS: [1, 3, 4], "norm_before_fc": True})
    assert read_eagle3(tmp_path / "drafter", target).spec.norm_before_fc


@pytest.mark.parametrize(
    ("ids", "taps"),
    [
        (None, (1, 3, 4)),
        ([1, 3, 4], (1, 3, 4)),
        ([2, 4, 5], (1, 3, 4)),
        ([2, 4, 7], (1, 3, 6)),
        ([3, 5, 7], (2, 4, 6)),
        ([1, 5, 6], (1, 5, 6)),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_tap_ids_name_outputs_where_they_begin_with_1_and_inputs_elsewhere(
    tmp_path: Path, ids: list[int] | None, taps: tuple[int, ...], nested: bool
) -> None:
    target = _pair(tmp_path, speculators=nested)
    edit_config(tmp_path / "drafter", **({IDS: ids} if nested else {"eagle_config": {IDS: ids}}))
    assert read_eagle3(tmp_path / "drafter", target).spec.taps == taps


def test_taps_of_another_number(tmp_path: Path) -> None:
    drafter = _read(tmp_path, taps=(2, 4, 5, 6))
    assert drafter.spec.taps == (2, 4, 5, 6)
    assert drafter.weights.shape("fc.weight") == (64, 256)


def test_absent_keys_mean_what_they_mean_in_a_llama(tmp_path: Path) -> None:
    target = _pair(tmp_path, num_key_value_heads=4, head_dim=16)
    before = read_eagle3(tmp_path / "drafter", target).spec
    edit_config(tmp_path / "drafter", num_key_value_heads=DELETE, head_dim=DELETE, rope_theta=DELETE)
    spec = read_eagle3(tmp_path / "drafter", target).spec
    assert (spec.stack.num_kv_heads, spec.stack.head_dim, spec.stack.rope.theta) == (4, 16, 10000.0)
    assert spec == before
    edit_config(tmp_path / "drafter", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert read_eagle3(tmp_path / "drafter", target).spec.stack.rope.theta == 5e5


def test_another_width_takes_an_embedding_of_its_own(tmp_path: Path) -> None:
    keys: Config = {"hidden_size": 48, "head_dim": 24, "target_hidden_size": 64}
    drafter = _read(tmp_path / "own", own_embedding=True, **keys)
    assert (drafter.spec.stack.hidden_size, drafter.spec.target_hidden_size) == (48, 64)
    assert drafter.weights.shape("fc.weight") == (48, 192)
    with pytest.raises(UserError, match="hidden_size is 48; allowed: 64, the width of the target's embedding"):
        _read(tmp_path / "borrowed", **keys)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_copy_of_the_targets_embedding_is_not_kept(tmp_path: Path, dtype: str) -> None:
    """Even where the copy was widened; other values stay."""
    config = make_target(tmp_path / "target", num_hidden_layers=8, dtype=dtype)
    make_eagle3(tmp_path / "drafter", config, taps=(1, 3, 4), own_embedding=True)
    target = read_target(tmp_path / "target")
    kept = without_copied_embedding(read_eagle3(tmp_path / "drafter", target.spec), target)
    assert kept.spec.own_embedding
    table = target.weights.read("model.embed_tokens.weight").astype(np.float32)
    edit_tensors(tmp_path / "drafter", {"embed_tokens.weight": table})
    found = without_copied_embedding(read_eagle3(tmp_path / "drafter", target.spec), target)
    assert not found.spec.own_embedding
    assert set(found.weights.names()) == set(eagle3_tensors(found.spec))
    table[-1, -1] += 0.5
    edit_tensors(tmp_path / "drafter", {"embed_tokens.weight": table})
    assert without_copied_embedding(read_eagle3(tmp_path / "drafter", target.spec), target).spec.own_embedding


def test_settings_and_names(tmp_path: Path) -> None:
    target = _pair(tmp_path)
    spec = read_eagle3(tmp_path / "drafter", target, "chain", {"drafts": 15}).spec
    assert (spec.name, spec.num_drafts) == ("chain", 15)
    for settings, words in (({"drafts": 16}, "drafts=16; allowed: 1 to 15"), ({"drafts": 0}, "drafts=0; allowed")):
        with pytest.raises(UserError, match=words):
            read_eagle3(tmp_path / "drafter", target, None, settings)
    with pytest.raises(UserError, match="top_k=4; allowed settings: drafts"):
        read_eagle3(tmp_path / "drafter", target, None, {"top_k": 4})
    with pytest.raises(UserError, match="drafter name is 'ar'"):
        read_eagle3(tmp_path / "drafter", target, "ar")


def test_the_fingerprint_knows_the_maps(tmp_path: Path) -> None:
    target = _pair(tmp_path)
    before = read_eagle3(tmp_path / "drafter", target).fingerprint
    offsets = _tensors(tmp_path)["d2t"]
    edit_tensors(tmp_path / "drafter", {"d2t": (offsets + np.arange(100))[::-1].copy() - np.arange(100)})
    assert read_eagle3(tmp_path / "drafter", target).fingerprint != before


def test_what_a_build_is_told(tmp_path: Path) -> None:
    spec = _read(tmp_path, taps=(1, 3, 4)).spec
    assert describe(spec) == (
        "EAGLE-3 of 1 layers, hidden 64, 4/2 heads of 32, vocabulary 100, 5 drafts, taps [1, 3, 4]"
    )
    files = stored(spec)
    assert files.keys() == {c.CONTEXT, c.DRAFTER}
    assert files[c.DRAFTER].shared_with == c.CONTEXT, "the drafter's graph refers to the context's file"
    assert files[c.CONTEXT].wide["fc.weight"] == (64, 192)
    assert files[c.CONTEXT].formed["lm_head.weight"] == (128, 64)
    assert not files[c.CONTEXT].head


# -- refusals ----------------------------------------------------------------------------------------------------------


def _config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, **changes)


def _eagle(**changes: Any) -> Callable[[Path], None]:
    return _config(eagle_config={IDS: [1, 3, 4], **changes})


def _ids(*ids: Any) -> Callable[[Path], None]:
    return _config(eagle_config={IDS: list(ids)})


def _tensor(name: str, value: Any) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, {name: value})


def _offset(at: int, value: int) -> Callable[[Path], None]:
    """One entry of d2t, by the target id it then gives."""

    def change(folder: Path) -> None:
        offsets = load_file(folder / "model.safetensors")["d2t"].copy()
        offsets[at] = value - at
        edit_tensors(folder, {"d2t": offsets})

    return change


def _flip_t2d(folder: Path) -> None:
    has_draft = load_file(folder / "model.safetensors")["t2d"].copy()
    has_draft[7] = not has_draft[7]
    edit_tensors(folder, {"t2d": has_draft})


ONES = np.ones(64, np.float32)
SLIDING = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"]}
REFUSED: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "another architecture": (
        _config(architectures=["LlamaForCausalLM"]),
        ("architectures is ['LlamaForCausalLM']", "['LlamaForCausalLMEagle3'] or ['Eagle3LlamaForCausalLM']"),
    ),
    "another model": (_config(model_type="gemma"), ("model_type is 'gemma'", "'llama' or 'qwen3'")),
    "two layers": (_config(num_hidden_layers=2), ("num_hidden_layers is 2", "allowed: 1", "more layers")),
    "layers of the target": (_config(num_hidden_layers=36), ("num_hidden_layers is 36", "allowed: 1")),
    "a window": (_config(**SLIDING), ("sliding_window is 8", "absent")),
    "quantised": (_config(quantization_config={"bits": 4}), ("quantization_config", "absent")),
    "biases of the MLP": (_config(mlp_bias=True), ("mlp_bias is True", "false or absent")),
    "scaled embeddings": (_config(scale_emb=12), ("scale_emb is 12", "1 or absent")),
    "capped logits": (_config(final_logit_softcapping=30.0), ("final_logit_softcapping is 30.0", "0 or absent")),
    "MoE": (_config(num_experts=4), ("num_experts is 4", "absent")),
    "rope of Llama 3": (
        _config(rope_scaling={"rope_type": "llama3", "factor": 8.0}),
        ("rope_scaling.rope_type is 'llama3'", "'default' or 'linear' or 'yarn'"),
    ),
    "hidden sizes": (_config(hidden_size=32), ("hidden_size is 32", "64, the width of the target's embedding")),
    "tap width": (_config(target_hidden_size=32), ("target_hidden_size is 32", "64, the target's hidden_size")),
    "vocabularies": (_config(vocab_size=300), ("vocab_size is 300", "256, the target's vocab_size")),
    "a larger draft vocabulary": (_config(draft_vocab_size=257), ("draft_vocab_size is 257", "at most 256")),
    "a wrong draft vocabulary": (
        _config(draft_vocab_size=99),
        ("lm_head.weight is of shape [100, 64]", "[99, 64], as config.json says"),
    ),
    "fc of fewer taps": (
        _ids(1, 3),
        ("fc.weight is of shape [64, 192]", "[64, 128], as config.json says"),
    ),
    "no taps of so few": (_ids(), (f"{IDS} is []", "a non-empty list of integers")),
    "taps out of order": (_ids(1, 4, 3), (f"{IDS} is [1, 4, 3]", "ids from 1 to 6 in rising order", "begins with 1")),
    "a tap twice": (_ids(2, 4, 4), (f"{IDS} is [2, 4, 4]", "ids from 1 to 7 in rising order")),
    "the last layer's output": (_ids(1, 3, 7), (f"{IDS} is [1, 3, 7]", "ids from 1 to 6", "its last is no tap")),
    "the input of no layer": (_ids(2, 4, 8), (f"{IDS} is [2, 4, 8]", "ids from 1 to 7", "8 layers")),
    "the embedding": (_ids(0, 3, 4), (f"{IDS} is [0, 3, 4]", "ids from 1 to 7")),
    "two lists of taps": (_config(**{IDS: [2, 4, 5]}), (f"eagle_config.{IDS}", "the value at the top level")),
    "no aux states": (_eagle(use_aux_hidden_state=False), ("use_aux_hidden_state is False", "true or absent")),
    "no input norm": (
        _eagle(use_input_layernorm_in_first_layer=False),
        ("use_input_layernorm_in_first_layer is False", "true or absent"),
    ),
    "an MTP norm": (_eagle(use_mtp_layernorm=True), ("use_mtp_layernorm is True", "false or absent")),
    "both ways": (_config(is_causal=False), ("is_causal is False", "true or absent")),
    "parallel drafts": (_eagle(parallel_draft_step=4), ("parallel_draft_step is 4", "1 or absent")),
    "no d2t": (_tensor("d2t", DELETE), ("d2t is missing", "the offsets of 100 draft ids")),
    "a short d2t": (_tensor("d2t", np.zeros(99, np.int64)), ("d2t is of shape [99]", "[100], as config.json says")),
    "d2t of floats": (_tensor("d2t", np.zeros(100, np.float32)), ("d2t is of dtype F32", "I64 or I32")),
    "d2t outside": (_offset(99, 256), ("d2t is 157 at draft id 99, target id 256", "target ids from 0 to 255")),
    "d2t below": (_offset(3, -1), ("d2t is -4 at draft id 3, target id -1", "target ids from 0 to 255")),
    "d2t beyond integers": (_offset(99, 2**63 - 1), ("at draft id 99", "target ids from 0 to 255")),
    "two drafts of one id": (
        lambda folder: _offset(0, int(load_file(folder / "model.safetensors")["d2t"][1] + 1))(folder),
        ("d2t is the same target id for two draft ids",),
    ),
    "t2d of another map": (_flip_t2d, ("t2d is", "at target id 7", "as d2t says")),
    "a short t2d": (_tensor("t2d", np.zeros(255, np.bool_)), ("t2d is of shape [255]", "[256]")),
    "t2d of integers": (_tensor("t2d", np.zeros(256, np.int64)), ("t2d is of dtype I64", "BOOL")),
    "no head": (_tensor("lm_head.weight", DELETE), ("lm_head.weight is missing", "[100, 64]")),
    "no norm of features": (
        _tensor("midlayer.hidden_norm.weight", DELETE),
        ("layers.0.hidden_norm.weight is missing",),
    ),
    "half a norm of heads": (
        _tensor("midlayer.self_attn.q_norm.weight", np.ones(32, np.float32)),
        ("layers.0.self_attn.k_norm.weight is missing",),
    ),
    "a second layer's tensor": (_tensor("layers.1.hidden_norm.weight", ONES), ("layers.1.hidden_norm.weight is left",)),
    "both names of the layer": (
        _tensor("layers.0.hidden_norm.weight", ONES),
        ("layers.0.hidden_norm.weight is twice",),
    ),
    "norms of taps unsaid": (_tensor("fc_norm.0.weight", ONES), ("fc_norm.0.weight is left over",)),
    "norms of taps missing": (_config(fc_norm=True), ("fc_norm.0.weight is missing (and 2 more)",)),
    "a mask of parallel drafts": (_tensor("mask_hidden", ONES), ("mask_hidden is left over",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_key_value_and_allowed_values(tmp_path: Path, name: str) -> None:
    _assert_refused(tmp_path, _pair(tmp_path), *REFUSED[name])


NESTED_REFUSED: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "no word on the residual": (
        _config(norm_before_residual=DELETE),
        ("norm_before_residual is missing", "true or false"),
    ),
    "another kind": (_config(speculators_model_type="peagle"), ("speculators_model_type is 'peagle'", "'eagle3'")),
    "architecture": (
        _config(architectures=["LlamaForCausalLMEagle3"]),
        ("architectures is", "['Eagle3Speculator'] or ['Eagle3DraftModel']"),
    ),
    "nested key": (
        _config(transformer_layer_config={"hidden_size": "64", "num_attention_heads": 4}),
        ("transformer_layer_config.hidden_size is '64'", "an integer from 1"),
    ),
}


@pytest.mark.parametrize("name", NESTED_REFUSED)
def test_the_speculators_layout_is_refused_by_key_too(tmp_path: Path, name: str) -> None:
    _assert_refused(tmp_path, _pair(tmp_path, speculators=True), *NESTED_REFUSED[name])


def test_default_taps_need_a_deep_target(tmp_path: Path) -> None:
    target = _pair(tmp_path, layers=6, taps=(1, 3, 4))
    _assert_refused(
        tmp_path, target, _config(eagle_config=DELETE), (f"{IDS} is missing", "has only 6 layers", "write the taps")
    )


def test_a_map_without_any_token_is_refused(tmp_path: Path) -> None:
    target = _pair(tmp_path, maps=False, draft_vocab_size=256)
    make_tokenizer(tmp_path / "target", 100)
    target = read_target(tmp_path / "target").spec
    assert target.live_vocab == 100
    edit_config(tmp_path / "drafter", draft_vocab_size=50)
    head = _tensors(tmp_path)["lm_head.weight"][:50]
    edit_tensors(tmp_path / "drafter", {"lm_head.weight": head, "d2t": np.full(50, 50)})
    assert len(read_eagle3(tmp_path / "drafter", target).target_ids) == 50
    edit_tensors(tmp_path / "drafter", {"d2t": np.full(50, 100)})
    with pytest.raises(UserError, match="d2t is a map to ids that no tokenizer knows; allowed: ids below 100"):
        read_eagle3(tmp_path / "drafter", target)


def _assert_refused(folder: Path, target: TargetSpec, damage: Any, words: tuple[str, ...]) -> None:
    read_eagle3(folder / "drafter", target)
    damage(folder / "drafter")
    with pytest.raises(UserError) as caught:
        read_eagle3(folder / "drafter", target)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.startswith(str(folder / "drafter"))
    assert "; allowed: " in message
    assert [word for word in words if word not in message] == [], message
