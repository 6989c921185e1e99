"""The self-check by kind: every kind names its own, and a bundle of all of them is checked whole."""

from __future__ import annotations

from inspect import signature
from pathlib import Path

import pytest
from tiny import make_drafter, make_eagle3, make_target

from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.kinds import KINDS

KIND_BY_NAME = {"small": "draft-model", "chain": "eagle3", "flow": "dflash"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_names_its_check(kind: str) -> None:
    module = KINDS[kind].check_module()
    assert list(signature(module.check).parameters) == ["checks", "draft"]
    assert list(signature(module.check_whole).parameters) == ["checks", "prompt", "draft"]


@pytest.mark.parametrize("mode", ["layer", "full"])
def test_every_drafter_of_a_bundle_is_checked(tmp_path: Path, mode: str) -> None:
    """In the order given, on one runtime: what the target left is there for the last as for the first."""
    config = make_target(tmp_path / "target", num_hidden_layers=8)
    make_target(tmp_path / "small", num_hidden_layers=2, seed=4)
    make_eagle3(tmp_path / "chain", config, taps=(1, 3, 4))
    make_drafter(tmp_path / "flow", config, relay=True, taps=(4, 2))
    sources = [DrafterSource(Path("ngram")), *(DrafterSource(tmp_path / name, name) for name in KIND_BY_NAME)]
    bundle = build_bundle(tmp_path / "target", sources, tmp_path / "bundle", BuildOptions(), self_check=mode)
    errors = bundle.self_check["errors"]
    assert {section.split(".")[0] for section in errors} == {"target", *KIND_BY_NAME}
    assert [(spec.name, spec.kind) for spec in bundle.specs] == [("ngram", "ngram"), *KIND_BY_NAME.items()]
    whole = {"target.logits", "small.draft", "chain.prompt.draft", "chain.chain.3.draft", "flow.draft"}
    assert errors.keys() & whole == (whole if mode == "full" else set())
    assert max(errors.values()) < 2e-2
