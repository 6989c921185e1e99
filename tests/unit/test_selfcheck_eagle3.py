"""The self-check of EAGLE-3: sound engines pass, engines made of any other tensor are found, and faults in a build."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_selfcheck import Fault, Patch, alter_linear, one_channel, other_extract, permuted, rolled_table, shifted_write
from tiny import Config, edit_tensors, make_drafter, make_eagle3, make_target

from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.bundle import Bundle
from dflow_trt.checkpoint.eagle3 import Eagle3Checkpoint
from dflow_trt.checkpoint.names import eagle3_tensors
from dflow_trt.checkpoint.target import read_target
from dflow_trt.errors import UserError
from dflow_trt.graphs import eagle3
from dflow_trt.runtime.ort import OrtRuntime
from dflow_trt.selfcheck.base import Checks
from dflow_trt.selfcheck.eagle3 import check

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
WHOLE = {f"{row}.{what}" for row in ("prompt", "chain.1", "chain.2", "chain.3") for what in ("h", "draft")}


def make(folder: Path, name: str) -> None:
    target, drafter = MODELS[name]
    config = make_target(folder / "target", num_hidden_layers=8, **target)
    make_eagle3(folder / "drafter", config, taps=(1, 3, 4), **drafter)
    make_drafter(folder / "other", config, taps=(4, 2), **({"dtype": "bfloat16"} if "dtype" in drafter else {}))


def build(folder: Path, mode: str = "off", **options: Any) -> Bundle:
    """With another drafter before it, so that the packed taps are not its own."""
    sources = [DrafterSource(folder / "other", "other"), DrafterSource(folder / "drafter", "chain")]
    chosen = BuildOptions(**{"max_seq_len": 192, **options})
    return build_bundle(folder / "target", sources, folder / "bundle", chosen, self_check=mode)


def read(folder: Path) -> Eagle3Checkpoint:
    return eagle3.read(folder / "drafter", read_target(folder / "target"), "chain", {})


def errors(folder: Path, bundle: Bundle, draft: Eagle3Checkpoint) -> dict[str, float]:
    checks = Checks(bundle, read_target(folder / "target"))
    check(checks, draft)
    return checks.errors


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


# -- in a build --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["float", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_a_build_checks_sections_and_whole_chains(tmp_path: Path, name: str, form: str) -> None:
    make(tmp_path, name)
    found = build(tmp_path, "full", target_weights=form, draft_weights=form).self_check["errors"]
    assert {f"chain.{section}" for section in SECTIONS | WHOLE} <= found.keys()
    assert max(found.values()) < (2e-5 if form == "float" else 2e-2), found


def alone(folder: Path, mode: str, drafts: int = 4, **options: Any) -> Bundle:
    """Without another drafter, which would have the fault as well."""
    source, chosen = DrafterSource(folder / "drafter", "chain", {"drafts": drafts}), BuildOptions(**options)
    return build_bundle(folder / "target", [source], folder / mode, chosen, self_check=mode)


def test_one_draft_needs_no_step(tmp_path: Path) -> None:
    make(tmp_path, "plain")
    bundle = alone(tmp_path, "full", drafts=1, max_seq_len=8, max_batch_size=1)
    whole = {section for section in bundle.self_check["errors"] if section.startswith(("chain.prompt", "chain.chain"))}
    assert whole == {"chain.prompt.h", "chain.prompt.draft"}


def only_in(name: str, fault: Fault) -> Fault:
    """The fault, while that graph of the drafter is built."""

    def limited(patch: Patch) -> None:
        original = getattr(eagle3, f"build_eagle3_{name}")

        def faulty(*arguments: Any) -> None:
            with pytest.MonkeyPatch.context() as inner:
                fault(inner)
                original(*arguments)

        patch.setattr(eagle3, f"build_eagle3_{name}", faulty)

    return limited


def other_norm(patch: Patch) -> None:
    """The final norm's weights are those of the layer's."""
    original = eagle3.rms_norm

    def rms_norm(g: Any, name: str, x: Any, weight: str, *rest: Any) -> Any:
        swap = "layers.0.hidden_norm.weight" if weight == "norm.weight" else weight
        return original(g, name, x, swap, *rest)

    patch.setattr(eagle3, "rms_norm", rms_norm)


def other_row(patch: Patch) -> None:
    """The first row drafts, whichever is asked for."""
    original = eagle3.GraphBuilder.input

    def first(g: Any, spec: Any) -> Any:
        row = original(g, spec)
        return g.op("first", "Mul", row, g.ints(0)) if spec.name == "logit_rows" and "R" in g.contract.static else row

    patch.setattr(eagle3.GraphBuilder, "input", first)


FAULTS: dict[str, tuple[Fault, str]] = {
    "fc": (only_in("context", alter_linear("fc.weight", permuted)), "context.k"),
    "keys": (only_in("context", alter_linear("self_attn.k_proj", permuted)), "context.k"),
    "one channel of down": (only_in("context", alter_linear("mlp.down_proj", one_channel)), "context.h"),
    "head": (rolled_table("draft.head"), "context.logits"),
    "row": (only_in("context", other_row), "context.h"),
    "cache row": (only_in("context", shifted_write), "context.k"),
    "cache row of a step": (only_in("step", shifted_write), "step.h"),
    "final norm of a step": (only_in("step", other_norm), "step.logits"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(tmp_path: Path, monkeypatch: Patch, fault: str) -> None:
    make(tmp_path, "plain")
    breakage, section = FAULTS[fault]
    breakage(monkeypatch)
    with pytest.raises(UserError, match=rf"self-check: chain\.{section} differs"):
        alone(tmp_path, "layer", draft_weights="float", draft_logits=True)
    assert not (tmp_path / "layer").exists()


BETWEEN: dict[str, tuple[Fault, str]] = {
    "taps as packed": (other_extract, "prompt.h"),
    "caches of their own": (lambda patch: patch.setattr(OrtRuntime, "_share_drafter_caches", _nothing), "chain.1.h"),
    "features that are not kept": (lambda patch: patch.setattr(OrtRuntime, "keep_pending", _nothing), "chain.1.h"),
}


def _nothing(*arguments: Any) -> None: ...


@pytest.mark.parametrize("form", ["float", "int8"])
@pytest.mark.parametrize("fault", BETWEEN)
def test_faults_between_engines_need_the_full_check(tmp_path: Path, monkeypatch: Patch, fault: str, form: str) -> None:
    make(tmp_path, "plain")
    breakage, section = BETWEEN[fault]
    breakage(monkeypatch)
    alone(tmp_path, "layer", target_weights=form, draft_weights=form)
    with pytest.raises(UserError, match=rf"self-check: chain\.{section} differs"):
        alone(tmp_path, "full", target_weights=form, draft_weights=form)
