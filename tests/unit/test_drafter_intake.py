"""Draft models and prompt lookup as drafters of a target: what is taken, and what is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import modelopt_copies
import pytest
from tiny import DELETE, edit_config, edit_tensors, make_drafter, make_target, make_tokenizer

from dflow_trt.build import DrafterSource, read_drafters
from dflow_trt.checkpoint.folder import DrafterCheckpoint
from dflow_trt.checkpoint.target import read_target
from dflow_trt.errors import UserError
from dflow_trt.graphs.intake import read_any_drafter
from dflow_trt.kinds import KINDS
from dflow_trt.spec import DraftModelSpec, NgramSpec, to_json

SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "seed": 5}
Settings = dict[str, int]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """target and small: one vocabulary of 250 words; the target's table has some more rows of padding."""
    make_target(tmp_path / "target", tokenizer=250)
    make_target(tmp_path / "small", tokenizer=250, vocab_size=252, tied=True, eos=7, **SMALL)
    return tmp_path


def read(models: Path, drafter: str, settings: Settings | None = None, **more: Any) -> DrafterCheckpoint:
    """A drafter folder beside the target, or lookup."""
    place = Path(drafter) if drafter == "ngram" else models / drafter
    return read_any_drafter(place, read_target(models / "target"), settings=settings, **more)


def refusal(models: Path, drafter: str, settings: Settings | None = None, **more: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(models, drafter, settings, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- draft models ------------------------------------------------------------------------------------------------------


def test_a_smaller_model_is_a_drafter(models: Path) -> None:
    (models / "small" / "README.md").write_text("---\nlicense: mit\n---\n")
    found, model = read(models, "small"), read_target(models / "small")
    assert found.spec == DraftModelSpec("draft-model", "mit", model.spec, 4)
    assert (found.fingerprint, found.path) == (model.fingerprint, models / "small")
    assert (found.spec.num_drafts, found.spec.verify_rows, found.spec.taps) == (4, 5, ())
    assert (found.spec.serial, found.spec.relays, found.spec.strategies) == (True, False, ("draft-model",))
    assert found.spec.decoder == model.spec.stack
    assert set(found.weights.names()) == set(model.weights.names())
    assert DraftModelSpec.from_json(json.loads(json.dumps(to_json(found.spec)))) == found.spec


def test_a_model_may_draft_for_itself(models: Path) -> None:
    found, target = read(models, "target", {"drafts": 31}, name="self"), read_target(models / "target")
    assert found.spec == DraftModelSpec("self", None, target.spec, 31)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drafts": 0}, ":drafts=0; allowed: 1 to 31"),
        ({"drafts": 32}, ":drafts=32; allowed: 1 to 31"),
        ({"draft": 3}, ":draft=3; allowed settings: drafts"),
        ({"drafts": 3, "min": 2}, ":min=2; allowed settings: drafts"),
    ],
)
def test_settings_of_a_draft_model(models: Path, settings: Settings, message: str) -> None:
    assert refusal(models, "small", settings) == f"--drafter: {models}/small{message}"


def test_a_block_drafter_has_no_settings(models: Path) -> None:
    make_drafter(models / "flash", make_target(models / "other"))
    message = refusal(models, "flash", {"drafts": 3})
    assert message == f"--drafter: {models}/flash:drafts=..: this drafter has no settings; leave drafts out"


def change_words(changes: dict[int, str]) -> Callable[[Path], None]:
    """Words of the draft model's tokenizer by id."""

    def change(models: Path) -> None:
        path = models / "small" / "tokenizer.json"
        data = json.loads(path.read_text())
        words = {i: word for word, i in data["model"]["vocab"].items()} | changes
        data["model"]["vocab"] = {word: i for i, word in words.items()}
        path.write_text(json.dumps(data))

    return change


VOCABULARIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "fewer words": (
        lambda models: make_tokenizer(models / "small", 247),
        "small/tokenizer.json: the vocabulary is of 247 tokens; the first ids that differ: 247 is None here and 'w247' "
        "there, 248 is None here and 'w248' there, 249 is None here and 'w249' there; allowed: the target's, of 250 "
        "tokens; use a model of its family",
    ),
    "an added token more": (
        lambda models: make_tokenizer(models / "small", 250, ["<call>"]),
        "the vocabulary is of 251 tokens; the first ids that differ: 250 is '<call>' here and None there; allowed: the "
        "target's, of 250",
    ),
    "other words": (
        change_words({3: "w4", 4: "w3", 200: "line\nfeed"}),
        "the vocabulary is of 250 tokens; the first ids that differ: 3 is 'w4' here and 'w3' there, 4 is 'w3' here and "
        "'w4' there, 200 is 'line\\nfeed' here and 'w200' there; allowed: the target's, of 250 tokens",
    ),
    "no tokenizer here": (
        lambda models: (models / "small" / "tokenizer.json").unlink(),
        "small: tokenizer.json is missing; allowed: one, as ",
    ),
    "no tokenizer there": (
        lambda models: (models / "target" / "tokenizer.json").unlink(),
        "target: tokenizer.json is missing; allowed: one, as ",
    ),
}


@pytest.mark.parametrize("case", VOCABULARIES)
def test_another_vocabulary_is_refused(models: Path, case: str) -> None:
    change, message = VOCABULARIES[case]
    change(models)
    assert message in refusal(models, "small")


def test_without_tokenizers_the_tables_must_be_equally_long(tmp_path: Path) -> None:
    for name, rows in (("target", 256), ("same", 256), ("small", 252)):
        make_target(tmp_path / name, vocab_size=rows)
    assert read(tmp_path, "same").spec.name == "draft-model"
    message = refusal(tmp_path, "small")
    assert message == (
        f"{tmp_path}/small: the vocabulary is of 252 tokens; allowed: the target's, of 256 tokens; use a model of its "
        "family"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda folder: edit_config(folder, architectures=["LlamaForCausalLM"]),
            "architectures is ['LlamaForCausalLM']",
        ),
        (lambda folder: edit_config(folder, architectures=["Qwen3MoeForCausalLM"]), "['Qwen3ForCausalLM']"),
        (lambda folder: edit_config(folder, architectures=DELETE), "architectures is missing"),
        (lambda folder: edit_config(folder, architectures=["Qwen3ForCausalLM"] * 2), "architectures is ["),
        (lambda folder: edit_config(folder, hidden_act="gelu"), "hidden_act"),
        (lambda folder: edit_tensors(folder, {"model.norm.weight": DELETE}), "model.norm.weight"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json"),
    ],
    ids=["llama", "experts", "none", "two", "activation", "tensor", "no config", "no object"],
)
def test_a_folder_that_is_no_whole_model_of_a_known_kind(
    models: Path, change: Callable[[Path], Any], message: str
) -> None:
    change(models / "small")
    assert message in refusal(models, "small")


@pytest.mark.parametrize("name", modelopt_copies.ALGOS)
def test_a_quantised_draft_model_is_refused(tmp_path: Path, name: str) -> None:
    folder = modelopt_copies.copy_folder(name, tmp_path / "small")
    make_target(tmp_path / "target", vocab_size=json.loads((folder / "config.json").read_text())["vocab_size"])
    message = refusal(tmp_path, "small")
    assert f"quant_algo is {modelopt_copies.ALGOS[name]!r}; allowed: float weights" in message
    assert message.endswith("take the unquantised checkpoint")


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["small", "ngram"])
@pytest.mark.parametrize("name", ["ar", "target", "vocab", "x-norelay", "Small", "a/b", "-x", "a.b"])
def test_names_that_no_drafter_may_have(models: Path, drafter: str, name: str) -> None:
    assert refusal(models, drafter, name=name).startswith(f"drafter name is {name!r}; allowed: [a-z0-9]")


def test_two_drafters_of_one_name_are_refused(models: Path) -> None:
    target = read_target(models / "target")
    lookup, small = Path("ngram"), models / "small"
    for sources, name in (
        ((DrafterSource(lookup), DrafterSource(lookup, None, {"min": 1})), "ngram"),
        ((DrafterSource(small, "ngram"), DrafterSource(lookup)), "ngram"),
        ((DrafterSource(small), DrafterSource(models / "target")), "draft-model"),
    ):
        with pytest.raises(UserError, match=rf"^--drafter: two drafters are called '{name}'; name one of them"):
            read_drafters(sources, target)
    found = read_drafters([DrafterSource(small), DrafterSource(lookup), DrafterSource(lookup, "far")], target)
    assert [draft.spec.name for draft in found] == ["draft-model", "ngram", "far"]


# -- lookup ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, (2, 4, 8)),
        ({"drafts": 64}, (2, 4, 64)),
        ({"max": 1}, (1, 1, 8)),
        ({"max": 3}, (2, 3, 8)),
        ({"min": 1}, (1, 4, 8)),
        ({"min": 6}, (6, 6, 8)),
        ({"min": 16, "max": 16, "drafts": 1}, (16, 16, 1)),
    ],
)
def test_lookup_and_its_settings(models: Path, settings: Settings, wanted: tuple[int, int, int]) -> None:
    found = read(models, "ngram", settings)
    assert found.spec == NgramSpec("ngram", None, *wanted)
    assert (found.spec.num_drafts, found.spec.taps, found.spec.decoder) == (wanted[2], (), None)
    assert (found.spec.serial, found.spec.strategies, list(found.weights.names())) == (False, ("ngram",), [])
    assert NgramSpec.from_json(json.loads(json.dumps(to_json(found.spec)))) == found.spec


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min": 0}, "min=0; allowed: 1 to 16"),
        ({"min": 17}, "min=17; allowed: 1 to 16"),
        ({"max": 0}, "max=0; allowed: 1 to 16"),
        ({"max": 17}, "max=17; allowed: 1 to 16"),
        ({"min": 3, "max": 2}, "min=3,max=2; allowed: min up to max"),
        ({"drafts": 0}, "drafts=0; allowed: 1 to 64"),
        ({"drafts": 65}, "drafts=65; allowed: 1 to 64"),
        ({"length": 2}, "length=2; allowed settings: min, max, drafts"),
    ],
)
def test_lookup_refuses_settings_by_name(models: Path, settings: Settings, message: str) -> None:
    assert refusal(models, "ngram", settings) == f"--drafter: ngram:{message}"


def test_ngram_alone_is_the_kind_and_with_a_place_a_folder(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_target(models / "ngram", tokenizer=250, **SMALL)
    monkeypatch.chdir(models)
    target = read_target(models / "target")
    assert read_any_drafter(Path("ngram"), target).spec.kind == "ngram"
    assert read_any_drafter(models / "ngram", target).spec.kind == "draft-model"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ngram"])
def test_a_kind_with_a_folder_is_not_found_by_its_name(models: Path, kind: str) -> None:
    assert "config.json is missing, there is no such folder" in refusal(models, kind)
