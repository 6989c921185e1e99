"""Opening a bundle: what it says about itself, and every fault refused in one line that says what to do."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake import drafter_spec, make_bundle
from tiny import make_drafter, make_target

from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.bundle import Bundle, open_bundle
from dflow_trt.checkpoint.target import read_target
from dflow_trt.errors import UserError
from dflow_trt.memory import plan_memory, show_bytes
from dflow_trt.spec import DominoSpec, DraftModelSpec, NgramSpec

Data = dict[str, Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders: bundle, one of another target, of other limits, of other drafters beside it, and of Domino's: causal.

    kinds: a draft model, and lookup.
    """
    folder = tmp_path_factory.mktemp("bundles")
    config = make_target(folder / "target", tokenizer=250, num_hidden_layers=4)
    make_drafter(folder / "flow", config, relay=True)
    make_drafter(folder / "flash", config, seed=2, taps=(2, 0))
    make_drafter(folder / "turn", config, domino={"shift_label": True})
    make_target(folder / "stranger", seed=7, tokenizer=250, num_hidden_layers=4)

    def make(name: str, target: str, drafters: tuple[str, ...], **options: Any) -> None:
        sources = [DrafterSource(folder / drafter) for drafter in drafters]
        build_bundle(folder / target, sources, folder / name, BuildOptions(**options), self_check="off")

    make("bundle", "target", ("flow", "flash"))
    make("foreign", "stranger", ("flow", "flash"))
    make("shorter", "target", ("flow", "flash"), max_seq_len=256)
    make("fewer", "target", ("flow",))
    make("bare", "target", ())
    make("causal", "target", ("turn",))
    make_target(folder / "small", tokenizer=250, hidden_size=32, num_hidden_layers=1, tied=True)
    kinds = [DrafterSource(folder / "small", "small", {"drafts": 3}), DrafterSource(Path("ngram"), None, {"min": 1})]
    build_bundle(folder / "target", kinds, folder / "kinds", BuildOptions(), self_check="off")
    return folder


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "bundle", tmp_path / "bundle"))


def manifest(path: Path) -> Data:
    return dict(json.loads((path / "dflow.json").read_text()))


def edit(path: Path, change: Callable[[Data], Any]) -> None:
    data = manifest(path)
    change(data)
    (path / "dflow.json").write_text(json.dumps(data))


def refusal(path: Path, verify: bool = True) -> str:
    with pytest.raises(UserError) as caught:
        open_bundle(path, verify)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert any(advice in message for advice in ("build", "copy", "make")), message
    return message


def test_a_bundle_opens_as_it_was_built(made: Path) -> None:
    bundle = open_bundle(made / "bundle")
    assert list(bundle.strategies) == ["ar", "dflow", "dflow-norelay", "dflash"]
    assert bundle.default_strategy == "dflow"
    assert bundle.taps == (0, 1, 2)
    assert bundle.drafters["dflash"].spec.target_layer_ids == (2, 0)
    assert bundle.verify_rows == 8
    assert bundle.tokenizer_path == made / "bundle" / "tokenizer"
    listed = {made / "bundle" / name for name in [*bundle.files, "dflow.json"]}
    assert listed == {path for path in (made / "bundle").rglob("*") if path.is_file()}


def test_a_bundle_moves_and_still_opens(bundle: Path) -> None:
    moved = bundle.rename(bundle.with_name("elsewhere [x] ü"))
    assert open_bundle(moved).path == moved


def test_a_bundle_without_drafters_offers_plain_decoding_alone(made: Path) -> None:
    bundle = open_bundle(made / "bare")
    assert list(bundle.strategies) == ["ar"]
    assert bundle.default_strategy == "ar"
    assert bundle.taps == ()


def test_the_default_strategy_is_the_drafter_that_has_most() -> None:
    plain, head = drafter_spec("plain", 8, None), drafter_spec("head", 8, None, shifted=True)
    relay = drafter_spec("relay", 8, "at_rejection")
    both = dataclasses.replace(relay, name="both", head=DominoSpec(0, 4, 4, False))
    assert make_bundle([plain, head]).default_strategy == "head"
    assert make_bundle([plain, head, relay]).default_strategy == "relay"
    assert make_bundle([plain, head, relay, both]).default_strategy == "both"


def test_a_head_that_shifts_makes_room_for_one_more_row() -> None:
    plain, shifted = (make_bundle([drafter_spec("x", 8, None, shifted)], max_seq_len=120) for shifted in (False, True))
    assert (plain.verify_rows, shifted.verify_rows) == (8, 9)
    outputs = [plan_memory(bundle, 2).outputs for bundle in (plain, shifted)]
    assert outputs[1] - outputs[0] == 2 * 128 * 4  # a row of logits a slot


def test_an_unknown_strategy_is_refused_with_those_offered(made: Path) -> None:
    with pytest.raises(UserError, match=r"'dflow-2'; it offers ar, dflow, dflow-norelay, dflash$"):
        open_bundle(made / "bundle", verify=False).strategy("dflow-2")


def test_memory_plan_counts_weights_and_caches(made: Path) -> None:
    bundle = open_bundle(made / "bundle", verify=False)
    plan = plan_memory(bundle, 2)
    data = sum(path.stat().st_size for path in bundle.path.glob("*.data"))
    rows, packed = bundle.cache_rows, 256 * 64 + 4096  # the second drafter's int8 head, and a page of its scales
    assert plan.weights == data + packed
    assert plan.target_cache == 2 * 4 * 2 * 2 * rows * 32 * 4  # k,v x layers x slots x kv heads x rows x size x bytes
    assert plan.drafter_cache == 2 * (2 * 2 * 2 * 2 * rows * 32 * 4)
    state = plan.relay_state + plan.outputs + plan.workspace
    assert plan.total == data + packed + plan.target_cache + plan.drafter_cache + state
    assert plan_memory(bundle, 4).target_cache == 2 * plan.target_cache


def test_sizes_for_people() -> None:
    assert [show_bytes(n) for n in (5, 2500, 3_400_000, 1_240_000_000)] == ["5 B", "2.5 kB", "3.4 MB", "1.2 GB"]


# -- faults ------------------------------------------------------------------------------------------------------------


def test_no_folder(tmp_path: Path) -> None:
    assert "no such folder" in refusal(tmp_path / "nothing")


def test_a_folder_without_manifest(tmp_path: Path) -> None:
    assert "dflow.json is missing" in refusal(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"not json", b"[]", b"null", b"3", b"{}", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"format_version": 3}'],
    ids=["empty", "text", "list", "null", "number", "no version", "string", "not utf-8", "deep", "no fields"],
)
def test_a_manifest_that_is_no_manifest(bundle: Path, content: bytes) -> None:
    (bundle / "dflow.json").write_bytes(content)
    assert "dflow.json" in refusal(bundle)


@pytest.mark.parametrize("version", [0, 1, 2, 4, "3", None])
def test_another_format_version(bundle: Path, version: Any) -> None:
    edit(bundle, lambda data: data.update(format_version=version))
    assert f"format_version {version!r}, this version reads 3; build the bundle again" in refusal(bundle)


def test_a_bundle_of_the_format_before_causal_heads(bundle: Path) -> None:
    """Format 1 had no ``head``: refused for its format, whatever else it lacks."""

    def older(data: Data) -> None:
        data.update(format_version=1)
        for entry in data["drafters"].values():
            del entry["spec"]["head"]

    edit(bundle, older)
    assert "format_version 1, this version reads 3; build the bundle again" in refusal(bundle)


def test_a_causal_head_is_in_the_manifest_and_sealed(made: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(made / "causal", tmp_path / "bundle"))
    assert open_bundle(path).drafters["domino"].spec.head == DominoSpec(0, 24, 20, True)
    edit(path, lambda data: data["drafters"]["domino"]["spec"]["head"].update(shifted=False))
    assert "was built for other limits" in refusal(path)
    edit(path, lambda data: data["drafters"]["domino"]["spec"]["head"].update(shifted=0))
    assert "drafters.domino.spec.head has another type" in refusal(path)
    edit(path, lambda data: data["drafters"]["domino"]["spec"]["head"].pop("rank"))
    assert "rank" in refusal(path)


def test_draft_models_and_lookup_open_as_they_were_built(made: Path) -> None:
    bundle, model = open_bundle(made / "kinds"), read_target(made / "small")
    small, lookup = bundle.drafters["small"], bundle.drafters["ngram"]
    assert small.spec == DraftModelSpec("small", None, model.spec, 3)
    assert (small.fingerprint, small.target_fingerprint) == (model.fingerprint, bundle.target_fingerprint)
    assert lookup.spec == NgramSpec("ngram", None, 1, 4, 8)
    assert (bundle.taps, bundle.verify_rows, list(bundle.strategies)) == ((), 9, ["ar", "small", "ngram"])
    assert bundle.default_strategy == "small"
    assert [(name, engine.engine) for name, engine in bundle.contracts()] == [(None, "target"), ("small", "drafter")]
    assert {name for name in bundle.files if name.startswith(("small", "ngram"))} == {
        "small.drafter.onnx",
        "small.drafter.data",
        "small.vocab.data",
    }
    assert {name: data["kind"] for name, data in manifest(bundle.path)["drafters"].items()} == {
        "small": "draft-model",
        "ngram": "ngram",
    }


KIND_FAULTS: dict[str, tuple[Callable[[Data], Any], str]] = {
    "a kind of a later version": (
        lambda drafters: drafters["ngram"].update(kind="tree"),
        "a drafter of kind 'tree'; this version knows dflash, eagle3, draft-model, ngram",
    ),
    "no kind": (lambda drafters: drafters["ngram"].pop("kind"), "no field 'kind'"),
    "a kind that is no name": (lambda drafters: drafters["ngram"].update(kind=["ngram"]), "malformed"),
    "another kind": (lambda drafters: drafters["ngram"].update(kind="draft-model"), "malformed (no field 'model')"),
    "another kind still": (lambda drafters: drafters["small"].update(kind="ngram"), "malformed ("),
    "more drafts": (lambda drafters: drafters["small"]["spec"].update(drafts=4), "was built for other limits"),
    "a longer match": (lambda drafters: drafters["ngram"]["spec"].update(max_match=5), "was built for other limits"),
    "drafts as text": (lambda drafters: drafters["small"]["spec"].update(drafts="3"), "small.spec.drafts has another"),
    "a match as yes": (lambda drafters: drafters["ngram"]["spec"].update(min_match=True), "min_match has another type"),
    "another head": (
        lambda drafters: drafters["small"]["spec"]["model"].update(tied_head=False),
        "was built for other limits",
    ),
    "layers as text": (
        lambda drafters: drafters["small"]["spec"]["model"]["stack"].update(num_layers="1"),
        "drafters.small.spec.model.stack.num_layers has another type",
    ),
    "no vocabulary": (lambda drafters: drafters["small"]["spec"]["model"].pop("vocab_size"), "vocab_size"),
    "a surprise": (lambda drafters: drafters["small"]["spec"]["model"].update(surprise=1), "surprise"),
    "a setting of later versions": (lambda drafters: drafters["ngram"]["spec"].update(surprise=1), "surprise"),
}


@pytest.mark.parametrize("case", KIND_FAULTS)
def test_an_edited_draft_model_or_lookup(made: Path, tmp_path: Path, case: str) -> None:
    path, (change, message) = Path(shutil.copytree(made / "kinds", tmp_path / "bundle")), KIND_FAULTS[case]
    edit(path, lambda data: change(data["drafters"]))
    assert message in refusal(path)


@pytest.mark.parametrize("name", ["small.drafter.onnx", "small.drafter.data", "small.vocab.data"])
def test_files_of_a_draft_model_are_checked(made: Path, tmp_path: Path, name: str) -> None:
    path = Path(shutil.copytree(made / "kinds", tmp_path / "bundle"))
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)
    assert f"{name}: sha256" in refusal(path)
    (path / name).unlink()
    assert f"{name}: listed in dflow.json but missing" in refusal(path, verify=False)
    edit(path, lambda data: data["files"].pop(name))
    changed = f"engine {name} is not listed" if name.endswith(".onnx") else "changed since the bundle was built"
    assert changed in refusal(path)


SECTIONS: dict[str, Callable[[Data], Data]] = {
    "top": lambda data: data,
    "target": lambda data: data["target"],
    "target spec": lambda data: data["target"]["spec"],
    "stack": lambda data: data["target"]["spec"]["stack"],
    "rope": lambda data: data["target"]["spec"]["stack"]["rope"],
    "drafter": lambda data: data["drafters"]["dflow"],
    "drafter spec": lambda data: data["drafters"]["dflow"]["spec"],
    "relay": lambda data: data["drafters"]["dflow"]["spec"]["relay"],
    "build": lambda data: data["build"],
    "file": lambda data: data["files"]["target.onnx"],
}


@pytest.mark.parametrize("section", SECTIONS)
def test_an_unknown_field(bundle: Path, section: str) -> None:
    edit(bundle, lambda data: SECTIONS[section](data).update(surprise=1))
    assert "surprise" in refusal(bundle)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_missing_field(bundle: Path, section: str) -> None:
    missing = []

    def change(data: Data) -> None:
        part = SECTIONS[section](data)
        missing.append(next(iter(part)))
        del part[missing[0]]

    edit(bundle, change)
    assert missing[0] in refusal(bundle)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["build"].update(max_seq_len="512"),
        lambda data: data["build"].update(dtype="int3"),
        lambda data: data["build"].update(draft_logits=0),
        lambda data: data["build"].update(max_batch_size=True),
        lambda data: data["target"].update(spec=[]),
        lambda data: data["target"].update(fingerprint=5),
        lambda data: data["target"]["spec"].update(eos_ids=["a"]),
        lambda data: data["target"]["spec"].update(eos_ids=1),
        lambda data: data["target"]["spec"]["stack"].update(windows=[None, "x", None]),
        lambda data: data["target"]["spec"]["stack"]["rope"].update(theta=None),
        lambda data: data["drafters"]["dflow"]["spec"].update(relay=[1]),
        lambda data: data.update(drafters=[]),
        lambda data: data.update(files=None),
        lambda data: data["files"]["target.onnx"].update(size="many"),
        lambda data: data["files"].update({"target.onnx": "sha"}),
        lambda data: data.update(self_check=3),
    ],
)
def test_a_value_of_another_type(bundle: Path, change: Callable[[Data], Any]) -> None:
    edit(bundle, change)
    refusal(bundle)


@pytest.mark.parametrize(
    "name", ["target.onnx", "target.data", "vocab.data", "dflow.relay.data", "tokenizer/tokenizer.json"]
)
def test_a_wrong_hash(bundle: Path, name: str) -> None:
    content = bytearray((bundle / name).read_bytes())
    content[len(content) // 2] ^= 1
    (bundle / name).write_bytes(content)
    assert f"{name}: sha256" in refusal(bundle)
    assert isinstance(open_bundle(bundle, verify=False), Bundle)  # the quick check is about names and sizes


@pytest.mark.parametrize("verify", [True, False])
def test_a_missing_file(bundle: Path, verify: bool) -> None:
    (bundle / "dflash.drafter.onnx").unlink()
    assert "dflash.drafter.onnx: listed in dflow.json but missing" in refusal(bundle, verify)


@pytest.mark.parametrize("verify", [True, False])
def test_a_truncated_file(bundle: Path, verify: bool) -> None:
    size = (bundle / "target.data").stat().st_size
    with (bundle / "target.data").open("r+b") as file:
        file.truncate(size - 1)
    assert f"target.data: {size - 1} bytes, dflow.json says {size}" in refusal(bundle, verify)


def test_an_engine_that_is_not_listed(bundle: Path) -> None:
    edit(bundle, lambda data: data["files"].pop("dflow.relay.onnx"))
    assert "engine dflow.relay.onnx is not listed" in refusal(bundle)


def transplant(bundle: Path, donor: Path, name: str) -> None:
    """Engine files and manifest entries of one drafter, from another bundle."""
    entries = json.loads((donor / "dflow.json").read_text())

    def change(data: Data) -> None:
        data["drafters"][name] = entries["drafters"][name]
        for file, entry in entries["files"].items():
            if file.startswith(f"{name}."):
                data["files"][file] = entry
                shutil.copyfile(donor / file, bundle / file)

    edit(bundle, change)


def test_a_drafter_of_another_target(bundle: Path, made: Path) -> None:
    transplant(bundle, made / "foreign", "dflow")
    assert "drafter 'dflow' was built for target" in refusal(bundle)


@pytest.mark.parametrize("donor", ["shorter", "fewer"])
def test_a_drafter_of_another_build_of_the_same_target(bundle: Path, made: Path, donor: str) -> None:
    """Its cache or its packed taps have other sizes."""
    if donor == "fewer":
        bundle = Path(shutil.copytree(made / "fewer", bundle.with_name("receiver")))
        transplant(bundle, made / "bundle", "dflash")
    else:
        transplant(bundle, made / donor, "dflow")
    assert "was built for other limits or beside other drafters" in refusal(bundle)


def test_a_drafter_transplanted_into_the_same_build_is_no_fault(bundle: Path, made: Path) -> None:
    transplant(bundle, made / "bundle", "dflow")
    open_bundle(bundle)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["build"].update(max_seq_len=400),
        lambda data: data["target"]["spec"].update(live_vocab=256),
        lambda data: data["drafters"]["dflow"]["spec"].update(mask_token_id=3),
        lambda data: data["drafters"].update(renamed=data["drafters"].pop("dflow")),
        lambda data: data["drafters"].pop("dflash"),
    ],
    ids=["limits", "vocabulary", "mask", "name", "a drafter less"],
)
def test_an_edited_manifest(bundle: Path, change: Callable[[Data], Any]) -> None:
    edit(bundle, change)
    refusal(bundle)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/../../outside", "..", "", ".", "..\\outside"])
def test_a_file_name_that_leaves_the_bundle(bundle: Path, name: str) -> None:
    (bundle.parent / "outside").write_bytes(b"")
    edit(bundle, lambda data: data["files"].update({name: {"sha256": "0", "size": 0}}))
    assert f"file {name!r} is outside the bundle" in refusal(bundle)


def test_a_drafter_name_that_leaves_the_bundle(bundle: Path) -> None:
    edit(bundle, lambda data: data["drafters"].update({"../dflow": data["drafters"].pop("dflow")}))
    refusal(bundle)
