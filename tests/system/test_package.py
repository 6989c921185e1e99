"""``dflow-trt package`` on real bundles."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from pairs import Pair

from dflow_trt.bundle import open_bundle
from dflow_trt.cli import cli
from dflow_trt.errors import UserError
from dflow_trt.serving.package import package_bundle


def test_the_repository_stands_alone(example: Pair, tmp_path: Path) -> None:
    output = tmp_path / "repository"
    arguments = ["package", str(example.bundle.path), "--output", str(output), "--max-queue", "9", "--json"]
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert json.loads(result.output) == {
        "path": str(output),
        "models": ["preprocessing", "dflow", "ensemble", "dflow_bls"],
    }
    inside = open_bundle(output / "dflow" / "1" / "bundle")
    assert inside.files == example.bundle.files
    assert 'string_value: "9"' in (output / "dflow" / "config.pbtxt").read_text()
    for model in ("preprocessing", "dflow_bls"):
        assert (output / model / "1" / "tokenizer" / "tokenizer.json").is_file()
        assert "dflow_trt.serving.triton" in (output / model / "1" / "model.py").read_text()
    assert (output / "ensemble" / "1").is_dir()


def test_a_folder_that_is_there_stays_unless_it_may_go(example: Pair, tmp_path: Path) -> None:
    output = tmp_path / "repository"
    output.mkdir()
    (output / "mine").write_text("mine")
    with pytest.raises(UserError, match=r"exists; .*--force"):
        package_bundle(example.bundle.path, output)
    assert (output / "mine").read_text() == "mine"
    package_bundle(example.bundle.path, output, force=True)
    assert not (output / "mine").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["repository"]


def test_a_bundle_without_a_tokenizer_gets_the_model_of_ids(tiny_pair: Callable[[str], Pair], tmp_path: Path) -> None:
    made = package_bundle(tiny_pair("plain").bundle.path, tmp_path / "repository")
    assert made.models == ("dflow",)
    assert [path.name for path in made.path.iterdir()] == ["dflow"]


def test_a_bad_option_writes_nothing(example: Pair, tmp_path: Path) -> None:
    share = ["--strategy-share", "medusa=0.1"]
    arguments = ["package", str(example.bundle.path), "--output", str(tmp_path / "repository"), *share]
    with pytest.raises(UserError, match="no 'medusa'"):
        CliRunner().invoke(cli, arguments, catch_exceptions=False, standalone_mode=False)
    assert list(tmp_path.iterdir()) == []
