"""DFlash 2 folders: what is read of them, and what is refused, by key and value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_checkpoint_drafter import DRAFT, _assert_refused, _config, _pair, _read, _tensor
from tiny import DELETE, DFLASH2_DEFAULTS, edit_config

from dflow_trt.checkpoint.drafter import read_drafter
from dflow_trt.checkpoint.names import PREDECESSOR, SELECTOR_HIDDEN, SUCCESSOR, drafter_tensors
from dflow_trt.errors import UserError
from dflow_trt.spec import ConvSpec, DFlashSpec, SelectorSpec, to_json

BASE, PROJECTION = "layers.1.mlp_conv.base_kernel", "layers.0.attention_conv.kernel_projection.weight"


def _second(**changes: Any) -> Callable[[Path], None]:
    """Keys of DFlash 2 over those that ``make_drafter`` wrote."""
    keys = {**DRAFT, **DFLASH2_DEFAULTS, **changes}
    return _config(dflash_config={key: value for key, value in keys.items() if value is not DELETE})


def test_a_dflash2_drafter(tmp_path: Path) -> None:
    drafter = _read(tmp_path, dflash2={})
    spec = drafter.spec
    assert (spec.name, spec.relay, spec.strategies) == ("dflash2", None, ("dflash2",))
    assert (spec.conv, spec.head) == (ConvSpec(kernel_size=3, group_size=16), SelectorSpec(rank=12, top_k=6))
    assert (spec.first_slot, spec.num_drafts, spec.verify_rows) == (1, 7, 8)
    assert list(spec.corrected_drafts) == [1, 2, 3, 4, 5, 6, 7]
    assert spec.corrects
    assert (spec.kind, spec.architecture) == ("dflash", "DFlash2DraftModel")
    shapes = {name: drafter.weights.shape(name) for name in drafter.weights.names()}
    assert shapes == drafter_tensors(spec)
    assert (shapes[BASE], shapes[PROJECTION]) == ((2, 3, 64), (24, 64))
    assert [shapes[name] for name in (PREDECESSOR, SUCCESSOR, SELECTOR_HIDDEN)] == [(256, 12), (256, 12), (12, 64)]
    assert DFlashSpec.from_json(json.loads(json.dumps(to_json(spec)))) == spec


def test_a_dflash2_drafter_with_a_relay(tmp_path: Path) -> None:
    spec = _read(tmp_path, relay=True, dflash2={}).spec
    assert spec.relay is not None
    assert spec.strategies == ("dflash2-dflow", "dflash2-dflow-norelay")
    assert DFlashSpec.from_json(json.loads(json.dumps(to_json(spec)))) == spec


@pytest.mark.parametrize("keys", [{"top_level": True}, {"layout": 4}, {"shards": 3}])
def test_layouts_give_the_same_drafter(tmp_path: Path, keys: dict[str, Any]) -> None:
    plain, other = (_read(tmp_path / name, dflash2={}, **more).spec for name, more in (("a", {}), ("b", keys)))
    assert plain == other


@pytest.mark.parametrize("keys", [{"shards": 1}, {"shards": 3}])
def test_codebooks_may_be_spelt_as_a_fresh_model_saves_them(tmp_path: Path, keys: dict[str, Any]) -> None:
    target = _pair(tmp_path, dflash2={}, **keys)
    wanted = read_drafter(tmp_path / "drafter", target)
    tables = {name: wanted.weights.read(name) for name in (PREDECESSOR, SUCCESSOR)}
    _respell(tmp_path / "drafter")
    found = read_drafter(tmp_path / "drafter", target)
    assert found.spec == wanted.spec
    assert set(found.weights.names()) == set(wanted.weights.names())
    for name, table in tables.items():
        np.testing.assert_array_equal(found.weights.read(name), table)


def _respell(folder: Path) -> None:
    """Write ``.weight`` behind the codebooks, in whatever files they are."""
    from safetensors.numpy import save_file

    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({_with_weight(name): value for name, value in tensors.items()}, file)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        data = json.loads(index.read_text())
        data["weight_map"] = {_with_weight(name): file for name, file in data["weight_map"].items()}
        index.write_text(json.dumps(data))


def _with_weight(name: str) -> str:
    return f"{name}.weight" if name.endswith("codebook") else name


def test_limits_that_are_allowed(tmp_path: Path) -> None:
    keys = {"conv_kernel_size": 8, "conv_group_size": 64, "selector_rank": 1, "selector_top_k": 256}
    spec = _read(tmp_path, dflash2=keys).spec
    assert (spec.conv, spec.head) == (ConvSpec(8, 64), SelectorSpec(1, 256))


REFUSED: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    **{
        f"no {key}": (_second(**{key: DELETE}), (f"{key} is missing", "an integer from 1"))
        for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    },
    "a kernel of no rows": (_second(conv_kernel_size=0), ("conv_kernel_size is 0", "an integer from 1 to 8")),
    "a kernel longer than the block": (_second(conv_kernel_size=9), ("conv_kernel_size is 9", "from 1 to 8")),
    "groups that do not divide": (
        _second(conv_group_size=24),
        ("conv_group_size is 24", "a divisor of hidden_size 64"),
    ),
    "groups wider than the rows": (_second(conv_group_size=128), ("conv_group_size is 128", "from 1 to 64")),
    "group size as text": (_second(conv_group_size="16"), ("conv_group_size is '16'", "an integer from 1 to 64")),
    "more candidates than ids": (_second(selector_top_k=257), ("selector_top_k is 257", "an integer from 1 to 256")),
    "rank of zero": (_second(selector_rank=0), ("selector_rank is 0", "an integer from 1")),
    "a multiplier that turns the logits": (
        _second(output_multiplier=-1.0),
        ("output_multiplier is -1.0", "a finite number above 0"),
    ),
    "two kernel sizes": (
        _config(conv_kernel_size=4),
        ("dflash_config.conv_kernel_size is 3", "the value at the top level, 4"),
    ),
    "another kernel": (
        _second(conv_kernel_size=2),
        ("base_kernel is of shape [2, 3, 64]", "[2, 2, 64], as config.json"),
    ),
    "other groups": (_second(conv_group_size=8), ("kernel_projection.weight is of shape [24, 64]", "[48, 64]")),
    "another rank": (_second(selector_rank=8), ("codebook is of shape [256, 12]", "[256, 8], as config.json says")),
    "no base kernel": (_tensor(BASE, DELETE), (f"{BASE} is missing", "a tensor of shape [2, 3, 64]")),
    "no projection": (_tensor(PROJECTION, DELETE), (f"{PROJECTION} is missing", "shape [24, 64]")),
    "no codebook": (_tensor(SUCCESSOR, DELETE), (f"{SUCCESSOR} is missing", "shape [256, 12]")),
    "no query": (_tensor(SELECTOR_HIDDEN, DELETE), (f"{SELECTOR_HIDDEN} is missing", "shape [12, 64]")),
    "a codebook twice": (
        _tensor(f"{PREDECESSOR}.weight", np.zeros((256, 12), np.float32)),
        (f"{PREDECESSOR} is twice, also in model.safetensors", "one tensor a name"),
    ),
    "a bias": (
        _tensor(SELECTOR_HIDDEN.replace("weight", "bias"), np.zeros(12, np.float32)),
        ("hidden_projection.bias is left over", "the tensors of config.json's model"),
    ),
    "a Domino head as well": (_second(projector_type="domino"), ("projector_type is 'domino'", "allowed: 'dflash'")),
    "tensors of a Domino head as well": (
        _tensor("embed_proj.2.weight", np.zeros((256, 8), np.float32)),
        ("embed_proj.2.weight is left over", "the tensors of config.json's model"),
    ),
    "shifted labels": (_second(shift_label=True), ("shift_label is True", "false or absent")),
    "plain DFlash by its architecture": (
        _config(architectures=["DFlashDraftModel"]),
        (
            "conv_kernel_size is 3",
            "allowed: absent",
            "DFlash 2 drafters have it, of architecture ['DFlash2DraftModel']",
        ),
    ),
    "two architectures": (
        _config(architectures=["DFlashDraftModel", "DFlash2DraftModel"]),
        ("architectures is ['DFlashDraftModel', 'DFlash2DraftModel']", "['DFlash2DraftModel']"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_key_value_and_allowed_values(tmp_path: Path, name: str) -> None:
    damage, words = REFUSED[name]
    _assert_refused(tmp_path, _pair(tmp_path, dflash2={}), damage, words)


@pytest.mark.parametrize("key", DFLASH2_DEFAULTS)
@pytest.mark.parametrize("inside", [True, False])
def test_its_keys_are_refused_in_other_drafters(tmp_path: Path, key: str, inside: bool) -> None:
    change = _config(dflash_config={**DRAFT, key: 4}) if inside else _config(**{key: 4})
    _assert_refused(tmp_path, _pair(tmp_path), change, (f"{key} is 4", "allowed: absent", "DFlash 2 drafters have it"))


def test_it_is_refused_in_the_layout_of_speculators(tmp_path: Path) -> None:
    target = _pair(tmp_path, speculators=True)
    edit_config(tmp_path / "drafter", architectures=["DFlash2DraftModel"])
    with pytest.raises(UserError, match=r"architectures is \['DFlash2DraftModel'\]"):
        read_drafter(tmp_path / "drafter", target)


def test_the_package_reads_the_same_folder(tmp_path: Path) -> None:
    """The tiny folder is one of the package's own: every tensor has its place there, and none is left."""
    dflash = pytest.importorskip("dflash.model", reason="the reference is the dflash package")
    drafter = _read(tmp_path, dflash2={})
    model, info = dflash.DFlash2DraftModel.from_pretrained(tmp_path / "drafter", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    table = model.candidate_selector.successor_codebook.weight.detach().numpy()
    np.testing.assert_array_equal(table, drafter.weights.read(SUCCESSOR))
    base = model.layers[1].mlp_conv.base_kernel.detach().numpy()
    np.testing.assert_array_equal(base, drafter.weights.read(BASE))
