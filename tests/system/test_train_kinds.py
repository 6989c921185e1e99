"""An EAGLE-3 head and a draft model from `dflow-trt train` in a bundle: what training counted the runtime counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("torch", reason="training needs torch (the extra `train`)")

from dflow_trt import LLM, SamplingParams
from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.cli import cli

HELD_OUT, LIMIT, DRAFTS = 12, 160, 4
SIZES: dict[str, tuple[Any, ...]] = {
    "eagle3": ("--draft-vocab", 150, "--intermediate-size", 64),
    "draft-model": ("--layers", 1, "--hidden-size", 48, "--intermediate-size", 64),
}


@pytest.fixture(scope="module")
def trained(example_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both, trained a little on the example's target."""
    folder = tmp_path_factory.mktemp("serial")
    lines = (example_folder / "prompts.jsonl").read_text().splitlines()
    (folder / "held.jsonl").write_text("\n".join(lines[:HELD_OUT]) + "\n")
    (folder / "prompts.jsonl").write_text("\n".join(lines[HELD_OUT : HELD_OUT + 24]) + "\n")
    for mode, sizes in SIZES.items():
        files = ["--prompts", folder / "prompts.jsonl", "--held-out-prompts", folder / "held.jsonl", "--chat"]
        run = ["--batch-size", 4, "--steps", 60, "--every", 60, "--learning-rate", 8e-3, "--max-new-tokens", LIMIT]
        where = ["--target", example_folder / "target", "--output", folder / mode, "--cache", folder / "cache"]
        flags = [*files, "--mode", mode, *sizes, "--drafts", DRAFTS, *run, "--threads", 1, *where]
        result = CliRunner().invoke(cli, ["train", *map(str, flags)])
        assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="module")
def llm(trained: Path, example_folder: Path) -> Iterator[LLM]:
    options = BuildOptions(max_batch_size=8, max_input_len=256, max_seq_len=512, draft_weights="float")
    sources = [DrafterSource(trained / mode, settings={"drafts": DRAFTS}) for mode in SIZES]
    bundle = build_bundle(example_folder / "target", sources, trained / "bundle", options)
    with LLM(bundle, threads=1) as opened:
        yield opened


@pytest.mark.parametrize("mode", SIZES)
def test_tau_of_training_is_tau_of_the_runtime(trained: Path, llm: LLM, mode: str) -> None:
    lines = (trained / "held.jsonl").read_text().splitlines()
    prompts = [{"messages": [{"role": "user", "content": json.loads(line)["prompt"]}]} for line in lines]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=LIMIT), strategy=mode)
    plain = llm.generate(prompts, SamplingParams(max_tokens=LIMIT), strategy="ar")
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    counts = json.loads((trained / mode / "training.json").read_text())["held_out"]["greedy"]
    whole = [output.finish_reason == "stop" for output in outputs]
    assert sum(whole) > HELD_OUT // 2
    found = [(output.stats.rounds, output.stats.emitted) for output in outputs]
    assert found == [(rounds, emitted) for rounds, emitted, _ in counts]
    kept = [output.stats.accepted for output, ended in zip(outputs, whole, strict=True) if ended]
    assert kept == [accepted for (_, _, accepted), ended in zip(counts, whole, strict=True) if ended]
    assert sum(kept) > sum(rounds for rounds, _, _ in counts) // 4, "the toy must accept some drafts"
