"""Bundles that the system tests share, each built once: random tiny pairs, and the pair that ships with the package."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from pairs import VARIANTS, Pair, build_tiny
from serve_environment import make_environment

from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.example import DATA, write_example
from dflow_trt.runtime.ort import OrtRuntime


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Pair]]:
    """Tiny pairs by variant, each built once."""
    built: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in built:
            built[name] = build_tiny(tmp_path_factory.mktemp("tiny"), VARIANTS[name])
        return built[name]

    yield get
    for pair in built.values():
        pair.runtime.close()


@pytest.fixture(scope="session")
def plain(tiny_pair: Callable[[str], Pair]) -> Pair:
    return tiny_pair("plain")


@pytest.fixture(scope="session")
def example_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (Path(str(files("dflow_trt"))) / DATA).is_dir():
        pytest.skip("the example pair does not ship with this version yet")
    folder = tmp_path_factory.mktemp("example")
    write_example(folder)
    return folder


BLOCKS = ("dflash", "dflow")
"""The example's block drafters."""


@pytest.fixture(scope="session")
def example(example_folder: Path) -> Iterator[Pair]:
    """The example with drafters of every kind."""
    sources = [DrafterSource(example_folder / name) for name in (*BLOCKS, "eagle3", "draft-model")]
    yield from _example(example_folder, [*sources, DrafterSource(Path("ngram"))], "bundle")


@pytest.fixture(scope="session")
def block_example(example_folder: Path) -> Iterator[Pair]:
    """The example with its block drafters alone: fewer strategies, where each of them takes time."""
    yield from _example(example_folder, [DrafterSource(example_folder / name) for name in BLOCKS], "blocks")


def _example(folder: Path, sources: list[DrafterSource], name: str) -> Iterator[Pair]:
    options = BuildOptions(max_batch_size=8, max_input_len=512, max_seq_len=704)
    bundle = build_bundle(folder / "target", sources, folder / name, options)
    runtime = OrtRuntime(bundle, threads=1)
    yield Pair(bundle, folder / "target", runtime)
    runtime.close()


@pytest.fixture(scope="session")
def example_prompts(example_folder: Path) -> list[dict[str, Any]]:
    """200 held-out prompts as conversations: repeated with a shorter text where the file has fewer."""
    lines = (example_folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines if line.strip()]
    assert len(texts) >= 50
    cut = 1
    while len(texts) < 200:
        texts += [text[: len(text) * cut // (cut + 1)] for text in texts[: 200 - len(texts)]]
        cut += 1
    return [{"messages": [{"role": "user", "content": text}]} for text in texts[:200]]


@pytest.fixture(scope="session")
def serve_python() -> Path:
    """A Python that has what a server needs: DFLOW_SERVE_PYTHON, or of an environment that is made once.

    Its numpy is older than the one that the other tests run with.
    """
    given = os.environ.get("DFLOW_SERVE_PYTHON")
    return Path(given) if given else make_environment(Path(sys.executable))
