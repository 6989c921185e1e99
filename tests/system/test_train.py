"""A drafter from `dflow-trt train` in a bundle: what training counted is what the runtime counts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("torch", reason="training needs torch (the extra `train`)")

from transformers import Qwen3ForCausalLM

from dflow_trt import LLM, SamplingParams
from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.cli import cli
from dflow_trt.training.data import Trajectory
from dflow_trt.training.model import Drafter
from dflow_trt.training.simulate import Tally, simulate
from dflow_trt.training.target import FrozenTarget

HELD_OUT, LIMIT, PAD = 12, 160, 4
NAME = "domino-dflow"


@pytest.fixture(scope="module")
def trained(example_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter with relay and causal head, trained a little on from the example's DFlow drafter."""
    folder = tmp_path_factory.mktemp("trained")
    lines = (example_folder / "prompts.jsonl").read_text().splitlines()
    (folder / "held.jsonl").write_text("\n".join(lines[:HELD_OUT]) + "\n")
    (folder / "prompts.jsonl").write_text("\n".join(lines[HELD_OUT : HELD_OUT + 24]) + "\n")
    files = ["--prompts", folder / "prompts.jsonl", "--held-out-prompts", folder / "held.jsonl", "--chat"]
    start = ["--mode", "dflow", "--from", example_folder / "dflow", "--head", "domino"]
    sizes = ["--head-state", 24, "--head-rank", 16, "--batch-size", 4, "--steps", 12, "--max-new-tokens", LIMIT]
    run = ["--learning-rate", 3e-3, "--threads", 1, "--target", example_folder / "target", "--output", folder / NAME]
    result = CliRunner().invoke(cli, ["train", *(str(part) for part in (*files, *start, *sizes, *run))])
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="module")
def llm(trained: Path, example_folder: Path) -> Iterator[LLM]:
    options = BuildOptions(max_batch_size=8, max_input_len=256, max_seq_len=512, draft_weights="float")
    bundle = build_bundle(example_folder / "target", [DrafterSource(trained / NAME)], trained / "bundle", options)
    with LLM(bundle, threads=1) as opened:
        yield opened


def prompts(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "held.jsonl").read_text().splitlines()
    return [{"messages": [{"role": "user", "content": json.loads(line)["prompt"]}]} for line in lines]


def counted(outputs: Sequence[Any]) -> list[tuple[int, int, int | None]]:
    """Rounds, emitted and accepted tokens; not the latter where the limit cut a text off, as drafts stop before it."""
    return [(output.stats.rounds, output.stats.emitted, _accepted(output)) for output in outputs]


def _accepted(output: Any) -> int | None:
    return int(output.stats.accepted) if output.finish_reason == "stop" else None


def expected(counts: Sequence[Sequence[int]], outputs: Sequence[Any]) -> list[tuple[int, int, int | None]]:
    """What training counted, with the same gaps."""
    ended = [output.finish_reason == "stop" for output in outputs]
    return [(row[0], row[1], row[2] if whole else None) for row, whole in zip(counts, ended, strict=True)]


@pytest.mark.parametrize(("strategy", "way"), [(NAME, "greedy"), (f"{NAME}-norelay", "relay_off")])
def test_tau_of_training_is_tau_of_the_runtime(trained: Path, llm: LLM, strategy: str, way: str) -> None:
    record = json.loads((trained / NAME / "training.json").read_text())["held_out"][way]
    outputs = llm.generate(prompts(trained), SamplingParams(max_tokens=LIMIT), strategy=strategy)
    assert counted(outputs) == expected(record, outputs)
    assert sum(output.finish_reason == "stop" for output in outputs) > HELD_OUT // 2
    plain = llm.generate(prompts(trained), SamplingParams(max_tokens=LIMIT), strategy="ar")
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]


def test_simulated_tau_of_sampled_texts_is_that_of_sampling(trained: Path, example_folder: Path, llm: LLM) -> None:
    asked = [SamplingParams(max_tokens=LIMIT, temperature=1.0, seed=seed) for seed in range(HELD_OUT)]
    plain = llm.generate(prompts(trained), asked, strategy="ar")
    texts = [Trajectory(tuple(output.prompt_token_ids), tuple(output.token_ids)) for output in plain]
    drafter = Drafter.load(trained / NAME).eval()
    target = FrozenTarget(Qwen3ForCausalLM.from_pretrained(example_folder / "target"), drafter.target_layer_ids)
    for strategy, relay in ((NAME, True), (f"{NAME}-norelay", False)):
        simulated: list[Tally] = simulate(drafter, target, texts, PAD, relay)
        outputs = llm.generate(prompts(trained), asked, strategy=strategy)
        assert [tuple(output.token_ids) for output in outputs] == [text.response_ids for text in texts]
        assert counted(outputs) == expected([astuple(tally) for tally in simulated], outputs)
