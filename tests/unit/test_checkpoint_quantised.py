"""Folders of NVIDIA ModelOpt: what they say, what their layers are, and what is refused, by key and value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from modelopt_copies import ALGOS, CONFIG, FOLDERS, KEPT, SAID, copy_folder, edit, edit_json, tensors, values
from tiny import DELETE, edit_config, make_target

from dflow_trt.checkpoint.names import linear_layers, target_tensors
from dflow_trt.checkpoint.target import read_target
from dflow_trt.errors import UserError
from dflow_trt.spec import target_from_json, to_json


@pytest.mark.parametrize("name", ALGOS)
def test_what_a_folder_says(name: str) -> None:
    target = read_target(FOLDERS / name, quantised=True)
    spec, quantisation = target.spec, target.spec.quantisation
    assert quantisation is not None
    assert (quantisation.algo, quantisation.kept) == (ALGOS[name], (KEPT,))
    assert quantisation.group_size == (16 if name == "int4_awq" else None)
    assert spec.checkpoint_dtype == "float32"
    assert {name: target.weights.shape(name) for name in target.weights.names()} == target_tensors(spec)
    assert target_from_json(json.loads(json.dumps(to_json(spec)))) == spec


@pytest.mark.parametrize("name", ALGOS)
def test_layers_read_as_their_values(name: str) -> None:
    target, stored = read_target(FOLDERS / name, quantised=True), tensors(FOLDERS / name)
    for module in linear_layers(target.spec.stack, "model."):
        weight = f"{module}.weight"
        layer = target.weights.quantised(weight)
        assert (layer is None) == (module == KEPT)
        found, wanted = target.weights.read(weight), stored[weight] if layer is None else values(stored, module)
        assert (found.dtype, found.dtype) == (np.float32, target.weights.dtype(weight))
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert target.weights.quantised("model.norm.weight") is None


@pytest.mark.parametrize("name", ALGOS)
@pytest.mark.parametrize("rows", [slice(0, 5), slice(5, 6), slice(7, 20), slice(31, 32), slice(4, 4)])
def test_some_outputs_are_those_of_the_whole(name: str, rows: slice) -> None:
    """Two int4 outputs share a byte: ranges may begin and end within one."""
    weights, weight = read_target(FOLDERS / name, quantised=True).weights, "model.layers.0.self_attn.q_proj.weight"
    np.testing.assert_array_equal(weights.read(weight, rows), weights.read(weight)[rows])


@pytest.mark.parametrize("name", ALGOS)
def test_either_file_alone_says_enough(tmp_path: Path, name: str) -> None:
    whole = read_target(FOLDERS / name, quantised=True)
    (copy_folder(name, tmp_path / "inside") / SAID).unlink()
    edit_config(copy_folder(name, tmp_path / "beside"), quantization_config=DELETE)
    for place in ("inside", "beside"):
        part = read_target(tmp_path / place, quantised=True)
        assert part.spec == whole.spec
        assert part.fingerprint != whole.fingerprint


def test_modules_are_excluded_by_name_or_prefix(tmp_path: Path) -> None:
    folder = copy_folder("int8_weights", tmp_path)
    stored = tensors(folder)
    layer = [name.removesuffix("_scale") for name in stored if name.startswith("model.layers.1.") and "_scale" in name]
    floats = {name: values(stored, name.removesuffix(".weight")).astype(np.float32) for name in layer}
    edit(folder, floats | {f"{name}_scale": DELETE for name in layer})
    edit_json(folder / SAID, "quantization", exclude_modules=["lm_head", "model.layers.1*"])
    quantisation = read_target(folder, quantised=True).spec.quantisation
    assert quantisation is not None
    assert len(quantisation.kept) == 7
    assert all(module.startswith("model.layers.1.") for module in quantisation.kept)


@pytest.mark.parametrize("shape", [(1,), (32,)])
def test_scales_of_fp8_may_be_of_a_tensor_or_a_channel(tmp_path: Path, shape: tuple[int, ...]) -> None:
    module = "model.layers.0.self_attn.q_proj"
    scale = np.linspace(0.01, 0.02, shape[0]).astype(np.float32)
    folder = copy_folder("fp8", tmp_path, {f"{module}.weight_scale": scale})
    found = read_target(folder, quantised=True).weights.read(f"{module}.weight")
    np.testing.assert_allclose(found, values(tensors(folder), module), rtol=1e-6)


def test_scales_may_be_half_precision(tmp_path: Path) -> None:
    module = "model.layers.0.mlp.up_proj"
    scale = tensors(FOLDERS / "int4_awq")[f"{module}.weight_scale"].astype(ml_dtypes.bfloat16)
    folder = copy_folder("int4_awq", tmp_path, {f"{module}.weight_scale": scale})
    found = read_target(folder, quantised=True).weights.read(f"{module}.weight")
    np.testing.assert_allclose(found, values(tensors(folder), module), rtol=1e-6)


# -- refusals ----------------------------------------------------------------------------------------------------------

Damage = Callable[[Path], None]
Q = "model.layers.0.self_attn.q_proj"


def _said(**changes: Any) -> Damage:
    return lambda folder: edit_json(folder / SAID, "quantization", **changes)


def _inside(**changes: Any) -> Damage:
    """Where config.json alone says it."""

    def damage(folder: Path) -> None:
        (folder / SAID).unlink()
        edit_json(folder / CONFIG, "quantization_config", **changes)

    return damage


def _tensors(changes: dict[str, Any]) -> Damage:
    return lambda folder: edit(folder, changes)


def _both(*damages: Damage) -> Damage:
    def damage(folder: Path) -> None:
        for each in damages:
            each(folder)

    return damage


def _algo(name: str) -> tuple[Damage, tuple[str, ...]]:
    words = ("hf_quant_config.json", f"quantization.quant_algo is {name!r}", "'FP8' or 'W8A8_SQ")
    return _both(_said(quant_algo=name), _beside_alone), words


def _beside_alone(folder: Path) -> None:
    edit_config(folder, quantization_config=DELETE)


def _undescribed(folder: Path) -> None:
    (folder / SAID).write_text("{}")


def _scales(**changes: Any) -> dict[str, Any]:
    return {f"{Q}.{kind}": value for kind, value in changes.items()}


F32 = np.float32
REFUSED: dict[str, tuple[str, Damage, tuple[str, ...]]] = {
    **{
        name: ("fp8", *_algo(name))
        for name in ("NVFP4", "W4A8_AWQ", "MXFP8", "MIXED_PRECISION", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4_AWQ")
    },
    "no algorithm": ("fp8", _said(quant_algo=None), ("quant_algo is 'FP8'", "missing, as in hf_quant_config.json")),
    "no section": (
        "fp8",
        _undescribed,
        ("hf_quant_config.json: quantization is missing",),
    ),
    "cache": ("fp8", _said(kv_cache_quant_algo="FP8"), ("kv_cache_quant_algo is 'FP8'", "without KV cache")),
    "cache, in config.json": ("fp8", _inside(kv_cache_scheme={"num_bits": 8}), ("kv_cache_scheme is {'num_bits': 8}",)),
    "zero points": ("int4_awq", _said(has_zero_point=True), ("has_zero_point is True", "allowed: false")),
    "exclusions": ("fp8", _said(exclude_modules="lm_head"), ("exclude_modules is 'lm_head'", "a list of module names")),
    "tool": (
        "fp8",
        _inside(quant_method="awq"),
        ("config.json: quantization_config.quant_method is 'awq'", "'modelopt'"),
    ),
    "algorithm in config.json": ("fp8", _inside(quant_algo="NVFP4"), ("quantization_config.quant_algo is 'NVFP4'",)),
    "two algorithms": (
        "fp8",
        lambda folder: edit_json(folder / CONFIG, "quantization_config", quant_algo="NVFP4"),
        ("quantization_config.quant_algo is 'NVFP4'; allowed: 'FP8', as in hf_quant_config.json",),
    ),
    "group size": ("int4_awq", _said(group_size=5), ("group_size is 5", "a divisor of the 32 input features")),
    "no groups": (
        "int4_awq",
        _both(_inside(), _tensors(_scales(weight_scale=np.ones(32, F32)))),
        (f"{Q}.weight_scale is of shape [32]", "[32, groups]"),
    ),
    "another group size": ("int4_awq", _said(group_size=8), (".weight_scale is of shape [32, 2]", "allowed: [32, 4]")),
    "no scale": ("fp8", _tensors(_scales(weight_scale=DELETE)), (f"{Q}.weight_scale is missing", "shape []")),
    "no input scale": ("int8", _tensors(_scales(input_scale=DELETE)), (f"{Q}.input_scale is missing",)),
    "scale shape": (
        "int8",
        _tensors(_scales(weight_scale=np.ones(31, F32))),
        (f"{Q}.weight_scale is of shape [31]; allowed: [32], beside {Q}.weight",),
    ),
    "input scale shape": (
        "fp8",
        _tensors(_scales(input_scale=np.ones(32, F32))),
        (f"{Q}.input_scale is of shape [32]; allowed: []",),
    ),
    "scale dtype": (
        "int8",
        _tensors(_scales(weight_scale=np.ones(32, np.int32))),
        (f"{Q}.weight_scale is of dtype I32", "F32 or F16 or BF16"),
    ),
    "smoothing shape": (
        "int8",
        _tensors(_scales(pre_quant_scale=np.ones(16, F32))),
        (f"{Q}.pre_quant_scale is of shape [16]; allowed: [32]",),
    ),
    "smoothing that FP8 has not": (
        "fp8",
        _tensors(_scales(pre_quant_scale=np.ones(32, F32))),
        (f"{Q}.pre_quant_scale is left over",),
    ),
    "weight dtype": (
        "fp8",
        _tensors({f"{Q}.weight": np.ones((32, 32), np.int8)}),
        (f"{Q}.weight is of dtype I8; allowed: F8_E4M3, as quant_algo FP8 says; list the layer in exclude_modules",),
    ),
    "weight shape": (
        "int4_awq",
        _tensors({f"{Q}.weight": np.ones((32, 32), np.uint8)}),
        (f"{Q}.weight is of shape [32, 32]; allowed: [16, 32]",),
    ),
    "float layer that is not excluded": (
        "int8",
        _said(exclude_modules=["lm_head"]),
        (f"{KEPT}.weight is of dtype F32; allowed: I8",),
    ),
    "quantised layer that is excluded": (
        "int8_weights",
        _said(exclude_modules=["lm_head", KEPT, Q]),
        (f"{Q}.weight", "excluded"),
    ),
    "quantised head": (
        "int8_weights",
        _tensors({"lm_head.weight_scale": np.ones(32, F32)}),
        ("lm_head.weight_scale is in the checkpoint", "with lm_head excluded"),
    ),
    "quantised embedding": (
        "int8_weights",
        _tensors({"model.embed_tokens.weight": np.ones((32, 32), np.int8)}),
        ("model.embed_tokens.weight is of dtype I8", "F32 or F16 or BF16"),
    ),
    "missing weight": ("int8", _tensors({f"{Q}.weight": DELETE}), (f"{Q}.weight is missing", "shape [32, 32]")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_key_value_and_allowed_values(tmp_path: Path, case: str) -> None:
    name, damage, words = REFUSED[case]
    folder = copy_folder(name, tmp_path / name)
    read_target(folder, quantised=True)
    damage(folder)
    with pytest.raises(UserError) as caught:
        read_target(folder, quantised=True)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.startswith(str(tmp_path))
    assert "; allowed: " in message
    assert [word for word in words if word not in message] == [], message


@pytest.mark.parametrize(
    ("kind", "value"), [("weight_scale", 0.0), ("weight_scale", np.nan), ("input_scale", -1.0), ("input_scale", np.inf)]
)
def test_values_that_are_no_scale_are_refused_when_they_are_read(tmp_path: Path, kind: str, value: float) -> None:
    folder = copy_folder("fp8", tmp_path, _scales(**{kind: np.array(value, F32)}))
    layer = read_target(folder, quantised=True).weights.quantised(f"{Q}.weight")
    assert layer is not None
    allowed = "finite numbers above 0|no NaN"
    with pytest.raises(UserError, match=rf"model.safetensors: {Q}.{kind} is .*; allowed: ({allowed})"):
        layer.scale(), layer.input_scale()


def test_who_cannot_use_quantised_layers_gets_none(tmp_path: Path) -> None:
    for keep_inside in (True, False):
        folder = copy_folder("fp8", tmp_path / str(keep_inside))
        if not keep_inside:
            edit_config(folder, quantization_config=DELETE)
        with pytest.raises(UserError, match=r"quant_algo is 'FP8'; allowed: float weights in this use; take the unq"):
            read_target(folder)


def test_packed_tensors_without_a_description_are_refused(tmp_path: Path) -> None:
    make_target(tmp_path)
    edit(tmp_path, {f"{Q}.weight": np.ones((128, 64), ml_dtypes.float8_e4m3fn)})
    with pytest.raises(UserError, match=rf"{Q}.weight is of dtype F8_E4M3; allowed: F32 or F16 or BF16"):
        read_target(tmp_path, quantised=True)
