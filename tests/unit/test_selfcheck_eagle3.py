"""The self-check's sections of EAGLE-3: sound engines pass, engines made of any other tensor are found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny import Config, edit_tensors, make_drafter, make_eagle3, make_target

from dflow_trt import contract as c
from dflow_trt import selfcheck
from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.bundle import Bundle
from dflow_trt.checkpoint.eagle3 import Eagle3Checkpoint
from dflow_trt.checkpoint.names import eagle3_tensors
from dflow_trt.checkpoint.target import read_target
from dflow_trt.errors import UserError
from dflow_trt.graphs import eagle3
from dflow_trt.selfcheck_eagle3 import check_eagle3

EVERYTHING: Config = {
    **dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual"), True),
    **dict.fromkeys(("own_embedding", "qk_norm", "attention_bias"), True),
}
MODELS: dict[str, tuple[Config, Config]] = {
    "plain": ({}, {}),
    "everything, padded": ({"tokenizer": 200}, EVERYTHING),
    "bfloat16, tied": ({"tied": True, "dtype": "bfloat16"}, {"dtype": "bfloat16"}),
}
CALLS = [f"{call}{place}" for call in ("context", "step") for place in ("", ".far")]
SECTIONS = {f"{call}.{what}" for call in CALLS for what in ("h", "draft")}
SECTIONS |= {f"context{place}.{what}" for place in ("", ".far") for what in "kv"}


def make(folder: Path, name: str) -> None:
    target, drafter = MODELS[name]
    config = make_target(folder / "target", num_hidden_layers=8, **target)
    make_eagle3(folder / "drafter", config, taps=(1, 3, 4), **drafter)
    make_drafter(folder / "other", config, taps=(4, 2), **({"dtype": "bfloat16"} if "dtype" in drafter else {}))


def build(folder: Path, **options: Any) -> Bundle:
    """With another drafter before it, so that the packed taps are not its own."""
    sources = [DrafterSource(folder / "other", "other"), DrafterSource(folder / "drafter", "chain")]
    chosen = BuildOptions(**{"max_seq_len": 192, **options})
    return build_bundle(folder / "target", sources, folder / "bundle", chosen, self_check="off")


def read(folder: Path) -> Eagle3Checkpoint:
    return eagle3.read(folder / "drafter", read_target(folder / "target"), "chain", {})


def errors(folder: Path, bundle: Bundle, draft: Eagle3Checkpoint) -> dict[str, float]:
    check = selfcheck._LayerCheck(bundle, read_target(folder / "target"), [draft])
    engines = (selfcheck._Engine(bundle, engine, "chain") for engine in (c.CONTEXT, c.DRAFTER))
    check_eagle3(check, *engines, draft)
    return check.errors


@pytest.mark.parametrize("form", ["float", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_sound_engines_pass(tmp_path: Path, name: str, form: str) -> None:
    make(tmp_path, name)
    found = errors(tmp_path, build(tmp_path, draft_weights=form), read(tmp_path))
    assert found.keys() == {f"chain.{section}" for section in SECTIONS}
    assert max(found.values()) < (2e-5 if form == "float" else 2e-2), found


def test_logits_are_checked_where_there_are_some(tmp_path: Path) -> None:
    make(tmp_path, "everything, padded")
    found = errors(tmp_path, build(tmp_path, draft_logits=True), read(tmp_path))
    assert {f"chain.{call}.logits" for call in CALLS} <= found.keys()


@pytest.mark.parametrize("form", ["float", "int8"])
def test_engines_of_any_other_tensor_are_found(tmp_path: Path, form: str) -> None:
    make(tmp_path, "everything, padded")
    bundle, spec = build(tmp_path, draft_weights=form, draft_logits=True), read(tmp_path).spec
    stored = load_file(tmp_path / "drafter" / "model.safetensors")
    for name in eagle3_tensors(spec):
        at = name.replace("layers.0.", "midlayer.")
        edit_tensors(tmp_path / "drafter", {at: _other(stored[at], at)})
        with pytest.raises(UserError, match=r"self-check: chain\."):
            pytest.fail(f"{name}: {errors(tmp_path, bundle, read(tmp_path))}")
        edit_tensors(tmp_path / "drafter", {at: stored[at]})


def _other(tensor: Any, name: str) -> Any:
    """A matrix with its last rows in another order, a vector with a larger second half. Biases are small."""
    changed, half = tensor.copy(), len(tensor) // 2
    if tensor.ndim == 1:
        changed[half:] *= np.float32(3 if name.endswith(".bias") else 4 / 3)
    else:
        changed[half:] = tensor[half:][::-1]
    return changed


def _maps(draft: Eagle3Checkpoint) -> Eagle3Checkpoint:
    return dataclasses.replace(draft, target_ids=draft.target_ids[::-1].copy())


def _flag(flag: str) -> Callable[[Eagle3Checkpoint], Eagle3Checkpoint]:
    """The same checkpoint, understood otherwise."""

    def change(draft: Eagle3Checkpoint) -> Eagle3Checkpoint:
        return dataclasses.replace(draft, spec=dataclasses.replace(draft.spec, **{flag: not getattr(draft.spec, flag)}))

    return change


@pytest.mark.parametrize(
    "change", [_maps, *map(_flag, ("norm_before_residual", "norm_output"))], ids=["maps", "residual", "feature"]
)
@pytest.mark.parametrize("name", ["plain", "everything, padded"])
def test_engines_of_another_meaning_are_found(tmp_path: Path, name: str, change: Any) -> None:
    make(tmp_path, name)
    bundle = build(tmp_path)
    with pytest.raises(UserError, match=r"self-check: chain\."):
        errors(tmp_path, bundle, change(read(tmp_path)))


def test_taps_in_another_order_are_found(tmp_path: Path) -> None:
    make(tmp_path, "plain")
    bundle, draft = build(tmp_path), read(tmp_path)
    spec = dataclasses.replace(draft.spec, target_layer_ids=(3, 1, 4))
    with pytest.raises(UserError, match=r"self-check: chain\.context\.k differs"):
        errors(tmp_path, bundle, dataclasses.replace(draft, spec=spec))
