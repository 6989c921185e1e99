"""Folders that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dflow_trt.errors import UserError
from dflow_trt.files import staged_folder


def fill(path: Path, text: str, replace: bool = False, then: Callable[[], object] = lambda: None) -> None:
    with staged_folder(path, replace) as folder:
        (folder / "file").write_text(text)
        then()


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    with staged_folder(tmp_path / "a" / "b", replace=False) as folder:
        (folder / "file").write_text("x")
        assert not (tmp_path / "a" / "b").exists()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_an_interrupted_one_leaves_the_old_one(tmp_path: Path) -> None:
    fill(tmp_path / "out", "old")
    with pytest.raises(KeyboardInterrupt):
        fill(tmp_path / "out", "new", replace=True, then=interrupt)
    assert (tmp_path / "out" / "file").read_text() == "old"
    fill(tmp_path / "out", "new", replace=True)
    assert (tmp_path / "out" / "file").read_text() == "new"
    assert os.listdir(tmp_path) == ["out"]


def test_what_another_process_filled_meanwhile_stays(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--output: .*out was filled meanwhile; nothing was replaced, choose another$"):
        fill(tmp_path / "out", "ours", then=lambda: fill(tmp_path / "out", "theirs"))
    assert (tmp_path / "out" / "file").read_text() == "theirs"
    assert os.listdir(tmp_path) == ["out"]


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        fill(tmp_path / "out", "x")
    finally:
        os.umask(old)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
