"""The self-check of draft models: it passes on sound ones, and no faulty engine or table of theirs gets past it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_selfcheck import (
    STACK_FAULTS,
    WINDOWS,
    YARN,
    Fault,
    Patch,
    alter_linear,
    live_padding,
    other_head_rows,
    permuted,
    rolled_table,
)
from tiny import Config, make_target

from dflow_trt import build
from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.bundle import Bundle
from dflow_trt.errors import UserError
from dflow_trt.graphs import draft_model
from dflow_trt.selfcheck import draft_model as draft_model_check

FORMS = ["float", "int8"]
MODELS: dict[str, Config] = {
    "plain": {},
    "tied": {"tied": True},
    "tied, in bfloat16, longer table": {"tied": True, "dtype": "bfloat16", "vocab_size": 400},
    "wider than the target": {"hidden_size": 96, "num_hidden_layers": 1},
    "bias": {"attention_bias": True},
    "windows": WINDOWS,
    "yarn": {"rope": YARN},
    "one query head a key head": {"num_key_value_heads": 4},
}
# every fault has a consequence: heads are equal, matrices square, there are windows, and ids that are no token
TOUCHY: Config = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 64,
    "rope": YARN,
    "use_sliding_window": True,
    "sliding_window": 100,
    "max_window_layers": 1,
    "vocab_size": 300,
}


def write(folder: Path, model: Config) -> None:
    make_target(folder / "target", tokenizer=150, num_hidden_layers=1)
    make_target(folder / "small", tokenizer=150, seed=4, **model)


def made(folder: Path, output: Path, form: Any, mode: str = "layer") -> Bundle:
    options = BuildOptions(target_weights=form, draft_weights=form, max_seq_len=300)
    return build_bundle(folder / "target", [DrafterSource(folder / "small", "small")], output, options, self_check=mode)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_sound_draft_models_pass(tmp_path: Path, name: str, form: str) -> None:
    write(tmp_path, MODELS[name])
    bundle = made(tmp_path, tmp_path / "bundle", form, "full")
    errors = {part: error for part, error in bundle.self_check["errors"].items() if part.startswith("small.")}
    assert max(errors.values()) < (2e-5 if form == "float" else 1e-2), errors
    assert errors.keys() >= {f"small.{part}" for part in ("embed", "layers.0", "layers.0.far", "head", "draft")}


@pytest.fixture(scope="module")
def touchy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("touchy")
    write(folder, TOUCHY)
    return folder


def refusal(folder: Path, output: Path, form: str, mode: str = "layer") -> str:
    with pytest.raises(UserError, match="self-check") as caught:
        made(folder, output, form, mode)
    assert "\n" not in str(caught.value)
    assert not output.exists()
    return str(caught.value)


def while_calling(patch: Patch, place: Any, name: str, fault: Fault) -> None:
    """The fault, during that function alone."""
    original = getattr(place, name)

    def faulty(*arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            fault(inner)
            return original(*arguments)

    patch.setattr(place, name, faulty)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fault", STACK_FAULTS)
def test_faulty_layers_are_refused(touchy: Path, tmp_path: Path, monkeypatch: Patch, fault: str, form: str) -> None:
    breakage, section = STACK_FAULTS[fault]
    while_calling(monkeypatch, draft_model, "build_target", breakage)
    message = refusal(touchy, tmp_path / "bundle", form)
    assert message.startswith(f"self-check: small.{section}"), message


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("fault", "section"),
    [(other_head_rows, "head"), (rolled_table("vocab.embed"), "embed"), (live_padding, "head")],
    ids=["head rows", "embedding rows", "padding ids"],
)
def test_faulty_tables_are_refused(
    touchy: Path, tmp_path: Path, monkeypatch: Patch, fault: Fault, section: str, form: str
) -> None:
    while_calling(monkeypatch, build._Writer, "tables", fault)
    message = refusal(touchy, tmp_path / "bundle", form)
    assert message.startswith(f"self-check: small.{section}"), message


@pytest.mark.parametrize("form", FORMS)
def test_the_target_s_own_tables_are_not_those_of_the_draft_model(
    touchy: Path, tmp_path: Path, monkeypatch: Patch, form: str
) -> None:
    monkeypatch.setattr(build._Writer, "tables", lambda self, drafter, source: self.vocabulary)
    message = refusal(touchy, tmp_path / "bundle", form)
    assert message.startswith("self-check: small.embed"), message


def test_a_layer_in_the_middle_is_seen_by_the_full_check_alone(tmp_path: Path, monkeypatch: Patch) -> None:
    write(tmp_path / "models", {"num_hidden_layers": 3})
    while_calling(monkeypatch, draft_model, "build_target", alter_linear("layers.1.mlp.down_proj", permuted))
    made(tmp_path / "models", tmp_path / "passes", "float")
    message = refusal(tmp_path / "models", tmp_path / "bundle", "float", "full")
    assert message.startswith("self-check: small.draft"), message


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fault", ["permuted q", "k and v swapped", "turned o", "cache row"])
def test_the_full_check_alone_sees_faults(
    touchy: Path, tmp_path: Path, monkeypatch: Patch, fault: str, form: str
) -> None:
    monkeypatch.setattr(draft_model_check, "check_model", lambda *rest: None)
    while_calling(monkeypatch, draft_model, "build_target", STACK_FAULTS[fault][0])
    message = refusal(touchy, tmp_path / "bundle", form, "full")
    assert message.startswith("self-check: small.draft "), message
