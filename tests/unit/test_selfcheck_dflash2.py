"""The numerical self-check of DFlash 2: sound engines pass, faults of convolutions and selectors are found.

Kernels and scores are checked beside their own size: here they are so small that whole layers and drafts show little.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_selfcheck import (
    Fault,
    Model,
    Patch,
    Rolled,
    alter_linear,
    live_padding,
    one_channel,
    other_final_norm,
    other_head_rows,
    permuted,
    refusal,
    rescaled,
)
from tiny import edit_tensors

from dflow_trt.graphs import dflash2, drafter
from dflow_trt.graphs.builder import GraphBuilder
from dflow_trt.selfcheck import dflash as dflash_check
from dflow_trt.selfcheck import model as model_check

MODELS = {
    "plain": Model({}, {"relay": False, "dflash2": {}}),
    "with a relay, padded, capped": Model(
        {"tokenizer": 200},
        {"dflash2": {"conv_group_size": 1}, "output_multiplier": 0.5, "final_logit_softcapping": 3.0},
        {"draft_logits": True},
    ),
    "tied bf16, biases": Model(
        {"tied": True, "dtype": "bfloat16", "attention_bias": True},
        {"dtype": "bfloat16", "attention_bias": True, "dflash2": {"conv_kernel_size": 8}},
    ),
    "every token a candidate": Model({"tokenizer": 150}, {"relay": False, "dflash2": {"selector_top_k": 256}}),
    "one candidate, kernel of one row": Model({}, {"dflash2": {"selector_top_k": 1, "conv_kernel_size": 1}}),
    "block of 2": Model({}, {"block_size": 2, "dflash2": {"conv_kernel_size": 2}}),
}


@pytest.mark.parametrize("form", ["float", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_sound_engines_pass(tmp_path: Path, name: str, form: str) -> None:
    model = MODELS[name]
    model.write(tmp_path)
    bundle = model.build(tmp_path, tmp_path / "bundle", "full", draft_weights=form)
    errors, of = bundle.self_check["errors"], next(iter(bundle.drafters))
    assert max(errors.values()) < (2e-5 if form == "float" else 2e-2), errors
    convolutions = [f"layers.{i}.{part}_conv" for i in (0, 1) for part in ("attention", "mlp")]
    sections = [f"{conv}.{what}" for conv in convolutions for what in ("dynamic", "base", "rows")]
    sections += ["layers.1", "head", "head.logits", "selector", "selector.candidates", "selector.ids", "draft"]
    assert {f"{of}.{section}" for section in sections} <= errors.keys()


def test_a_selector_that_adds_nothing_passes(tmp_path: Path) -> None:
    MODELS["plain"].write(tmp_path)
    name = "candidate_selector.hidden_projection.weight"
    edit_tensors(tmp_path / "drafter", {name: np.zeros((12, 64), np.float32)})
    MODELS["plain"].build(tmp_path, tmp_path / "bundle", "full", draft_weights="int8")


# -- faults ------------------------------------------------------------------------------------------------------------


def replaced(cls: type, name: str, change: Callable[[Any], Any]) -> Fault:
    """A method of a class under a change."""
    return lambda patch: patch.setattr(cls, name, change(getattr(cls, name)))


def altered_tensor(of: str, change: Callable[[Any], Any]) -> Fault:
    """Tensors with that in their name are written otherwise than they are."""

    def fault(patch: Patch) -> None:
        original = GraphBuilder.stored

        def stored(g: Any, name: str, array: Any, *rest: Any) -> Any:
            return original(g, name, change(array) if of in name else array, *rest)

        patch.setattr(GraphBuilder, "stored", stored)

    return fault


def swapped_codebooks(patch: Patch) -> None:
    patch.setattr(dflash2, "PREDECESSOR", dflash2.SUCCESSOR)
    patch.setattr(dflash2, "SUCCESSOR", "candidate_selector.predecessor_codebook")


def rolled_codebook(name: str) -> Fault:
    """The rows of a codebook are one off."""

    def fault(patch: Patch) -> None:
        chunks = dflash2.store.row_chunks

        def rolled(weights: Any, of: str) -> Any:
            return chunks(Rolled(weights) if of.endswith(name) else weights, of)

        patch.setattr(dflash2.store, "row_chunks", rolled)

    return fault


def other_halves(array: Any, scale: Any) -> Any:
    """What makes the kernel before attention makes the one after it."""
    half = array.shape[1] // 2
    return np.roll(array, half, axis=1), None if scale is None else np.roll(scale, half)


def unmoved(patch: Patch) -> None:
    """Every row of a kernel meets the row that it stands in."""
    patch.setattr(dflash2.Convolutions, "_shifted", lambda self, name, rows: [rows] * (self._kernel_size - 1))


def forgetful(original: Any) -> Any:
    """Every draft follows the anchor."""

    def totals(self: Any, i: int, draft: Any) -> Any:
        self.anchor = getattr(self, "anchor", draft)
        return original(self, i, self.anchor)

    return totals


def other_slots(original: Any) -> Any:
    return lambda self, i, draft: original(self, (i + 1) % len(self._ids), draft)


def worst_ids(original: Any) -> Any:
    """The smallest scores, turned."""
    return lambda self, name, x, count: original(self, name, self.op(f"{name}.turned", "Neg", x), count)


def smallest(original: Any) -> Any:
    """The worst candidate."""

    def op(self: Any, name: str, kind: str, *inputs: Any, **attributes: Any) -> Any:
        turned = name.startswith("selector.") and name.endswith(".peak")
        return original(self, name, "ReduceMin" if turned and "hidden" not in name else kind, *inputs, **attributes)

    return op


def highest(original: Any) -> Any:
    """No candidate at all, but the last id."""

    def op(self: Any, name: str, kind: str, *inputs: Any, **attributes: Any) -> Any:
        return original(self, name, "ReduceMax" if name.endswith(".id") else kind, *inputs, **attributes)

    return op


def no_transform(patch: Patch) -> None:
    patch.setattr(dflash2, "output_transform", lambda g, spec, x, dtype: x)


def no_convolutions(patch: Patch) -> None:
    """Attention and MLP alone."""
    original = drafter.DecoderLayers
    patch.setattr(drafter, "DecoderLayers", lambda *arguments: original(*arguments[:-1]))


FAULTS: dict[str, tuple[Fault, str]] = {
    "base": (
        altered_tensor("attn.conv.base", lambda array: np.roll(array, 1, axis=-1)),
        "layers.0.attention_conv.base",
    ),
    "base of the MLP": (altered_tensor("mlp.conv.base", lambda array: array * 1.05), "layers.0.mlp_conv.base"),
    "base order": (altered_tensor("conv.base", lambda array: array[::-1]), "layers.0.attention_conv.base"),
    "rows": (unmoved, "layers.0.attention_conv.rows"),
    "candidates": (replaced(GraphBuilder, "top_k", worst_ids), "selector.candidates"),
    "worst": (replaced(GraphBuilder, "op", smallest), "selector.ids"),
    "highest id": (replaced(GraphBuilder, "op", highest), "selector.ids"),
    "softcap": (no_transform, "selector.unary"),
    "base logits": (other_head_rows, "head"),
    "padding ids": (live_padding, "head"),
    "final norm": (other_final_norm, "head"),
}
ROUNDED_FAULTS: dict[str, tuple[Fault, str]] = {
    "projection": (alter_linear("attention_conv.kernel", permuted), "layers.0.attention_conv.dynamic"),
    "projection of the MLP": (alter_linear("mlp_conv.kernel", rescaled), "layers.0.mlp_conv.dynamic"),
    "one channel": (alter_linear("layers.1.mlp_conv.kernel", one_channel), "layers.1.mlp_conv.dynamic"),
    "before and after": (alter_linear("attention_conv.kernel", other_halves), "layers.0.attention_conv.dynamic"),
    "swapped codebooks": (swapped_codebooks, "selector"),
    "predecessors": (rolled_codebook("predecessor_codebook"), "selector"),
    "successors": (rolled_codebook("successor_codebook"), "selector"),
    "query": (alter_linear("hidden_projection", permuted), "selector"),
    "scale of the query": (alter_linear("hidden_projection", rescaled), "selector"),
    "one channel of the query": (alter_linear("hidden_projection", one_channel), "selector"),
    "forgetful": (replaced(dflash2._Selector, "totals", forgetful), "selector"),
    "slots": (replaced(dflash2._Selector, "totals", other_slots), "selector"),
}
"""Faults that rounding might hide."""
MODEL = Model(
    {"tokenizer": 150, "num_hidden_layers": 2, "hidden_size": 96},
    {"relay": False, "taps": (0,), "final_logit_softcapping": 3.0, "dflash2": {"selector_rank": 24}},
)


@pytest.fixture(scope="module")
def weak(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels that hardly do more than pass rows on, and scores that hardly ever change a draft."""
    folder = tmp_path_factory.mktemp("weak")
    MODEL.write(folder)
    tensors = load_file(folder / "drafter" / "model.safetensors")
    kernels = {name: value * 0.002 for name, value in tensors.items() if "kernel" in name}
    for name in [name for name in kernels if name.endswith("base_kernel")]:
        kernels[name][:, 0] += 1
    query = "candidate_selector.hidden_projection.weight"
    edit_tensors(folder / "drafter", {**kernels, query: tensors[query] * 0.01})
    return folder


@pytest.mark.parametrize("form", ["float", "int8"])
def test_the_model_of_the_faults_passes_without_them(weak: Path, tmp_path: Path, form: str) -> None:
    bundle = MODEL.build(weak, tmp_path / "bundle", "full", target_weights=form, draft_weights=form)
    assert max(bundle.self_check["errors"].values()) < 2e-2


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(weak: Path, tmp_path: Path, monkeypatch: Patch, fault: str) -> None:
    _check_found(FAULTS, fault, weak, tmp_path, monkeypatch, "float")


@pytest.mark.parametrize("form", ["float", "int8"])
@pytest.mark.parametrize("fault", ROUNDED_FAULTS)
def test_faults_are_found_through_rounding(
    weak: Path, tmp_path: Path, monkeypatch: Patch, fault: str, form: str
) -> None:
    _check_found(ROUNDED_FAULTS, fault, weak, tmp_path, monkeypatch, form)


def _check_found(
    faults: dict[str, tuple[Fault, str]], fault: str, weak: Path, tmp_path: Path, monkeypatch: Patch, form: str
) -> None:
    breakage, section = faults[fault]
    breakage(monkeypatch)
    message = refusal(MODEL, weak, tmp_path / "bundle", form)
    assert message.startswith((f"self-check: target.{section} ", f"self-check: dflash2.{section}")), message


@pytest.mark.parametrize("fault", ["rows", "forgetful", "worst", "successors", "no convolutions"])
def test_the_full_check_alone_sees_faults(tmp_path: Path, monkeypatch: Patch, fault: str) -> None:
    MODEL.write(tmp_path / "models")
    for section in ("check_convolutions", "check_selector"):
        monkeypatch.setattr(dflash_check, section, lambda *rest: None)
    monkeypatch.setattr(model_check.Blocks, "check", lambda *rest: None)
    breakage = no_convolutions if fault == "no convolutions" else (FAULTS | ROUNDED_FAULTS)[fault][0]
    breakage(monkeypatch)
    (tmp_path / "out").mkdir()
    assert "dflash2.draft" in refusal(MODEL, tmp_path / "models", tmp_path / "out" / "bundle", "float", "full")
