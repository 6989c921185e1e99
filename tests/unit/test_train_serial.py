"""`dflow-trt train --mode eagle3` and `--mode draft-model` on tiny models: folders, interruptions, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training needs torch (the extra `train`)")
pytest.importorskip("transformers", reason="training needs transformers (the extra `train`)")

from tiny import make_target  # noqa: E402
from train_place import Place, StopAt, close, make_prompts, open_place, same, tensors  # noqa: E402
from transformers import Qwen3ForCausalLM  # noqa: E402

from dflow_trt.checkpoint.eagle3 import read_eagle3  # noqa: E402
from dflow_trt.checkpoint.target import read_target  # noqa: E402
from dflow_trt.training import job  # noqa: E402
from dflow_trt.training.options import Options, Prompt, TargetSource  # noqa: E402
from dflow_trt.training.plan import OUTPUT_FILES, Plan, make_plan  # noqa: E402

LIVE, VOCAB = 250, 256
EAGLE3: dict[str, Any] = {"mode": "eagle3", "draft_vocab": 90, "intermediate_size": 48, "drafts": 3, "anchors": None}
DRAFT_MODEL: dict[str, Any] = {"mode": "draft-model", "drafts": 3, "anchors": None}
MODES = {"eagle3": EAGLE3, "draft-model": DRAFT_MODEL}


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of five layers whose answers do not end early, with a tokenizer, and prompts."""
    folder = tmp_path_factory.mktemp("serial")
    make_target(folder / "target", eos_token_id=None, num_hidden_layers=5, tokenizer=LIVE)
    make_prompts(folder / "prompts.jsonl")
    return folder


@pytest.fixture
def place(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Place:
    return open_place(files, tmp_path, capsys, monkeypatch)


def plan_of(folder: Path, mode: str) -> Plan:
    target = read_target(folder / "target")
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    prompts = [Prompt(n, tuple(json.loads(line)["prompt_token_ids"])) for n, line in enumerate(lines, 1)]
    options = Options(
        **MODES[mode], steps=6, every=2, batch_size=2, learning_rate=3e-3, max_new_tokens=12, held_out=3, accumulate=2
    )
    source = TargetSource(folder / "target", target.spec, target.fingerprint, target.tokenizer_files)
    return make_plan(source, None, prompts, options)


def test_a_head_is_written_as_intake_reads_it(place: Place) -> None:
    figures = place.trained("head", **EAGLE3)
    folder, target = place.folder / "head", read_target(place.folder / "target").spec
    found = read_eagle3(folder, target)
    assert (found.spec.target_layer_ids, found.spec.draft_vocab_size) == ((1, 2, 3), 90)
    assert (found.spec.stack.num_heads, found.spec.stack.num_kv_heads, found.spec.stack.head_dim) == (4, 2, 32)
    assert (found.spec.own_embedding, found.spec.norm_before_residual, found.spec.norm_output) == (False, False, False)
    assert found.target_ids.max() < LIVE
    assert found.target_ids.tolist() == sorted(set(found.target_ids.tolist()))
    assert {path.name for path in folder.iterdir()} == set(OUTPUT_FILES)
    card = (folder / "README.md").read_text()
    assert f"An EAGLE-3 head (arXiv 2503.01840) of {figures['parameters']:,} parameters" in card
    assert f"90 ids, {figures['draft_vocab_share']:.1%} of the answers' tokens" in card
    assert 0.5 < figures["draft_vocab_share"] <= 1.0
    assert len(figures["loss_by_slot"]) == 3


def test_a_draft_model_is_a_qwen3_folder_with_the_targets_tokenizer(place: Place) -> None:
    figures = place.trained("small", **DRAFT_MODEL)
    folder, target = place.folder / "small", read_target(place.folder / "target")
    found = read_target(folder)
    stack, whole = found.spec.stack, target.spec.stack
    assert (found.spec.vocab_size, found.spec.live_vocab) == (VOCAB, LIVE)
    assert (stack.num_layers, stack.hidden_size) == (1, whole.hidden_size // 2)
    assert (stack.num_heads, stack.num_kv_heads, stack.head_dim) == (2, 1, whole.head_dim)
    assert found.spec.eos_ids == target.spec.eos_ids
    assert (folder / "tokenizer.json").read_bytes() == (place.folder / "target" / "tokenizer.json").read_bytes()
    model, info = Qwen3ForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert job.count_parameters(model) == figures["parameters"]
    assert "by next-token cross-entropy; a round has 3 drafts" in (folder / "README.md").read_text()


@pytest.mark.parametrize("mode", MODES)
def test_training_lowers_the_loss_and_counts_every_held_out_prompt(place: Place, mode: str) -> None:
    plan = plan_of(place.folder, mode)
    bench = job.prepare(plan, job.Compute.start(), place.folder / "cache", job.Silent())
    losses = [bench.training.advance() for _ in range(6)]
    assert losses[-1] < losses[0]
    tallies = bench.tallies()
    assert [tally.emitted for tally in tallies] == [len(text.response_ids) - 1 for text in bench.held_out[0.0]]


@pytest.mark.parametrize("mode", MODES)
def test_resumed_training_is_uninterrupted_training_bit_by_bit(files: Path, tmp_path: Path, mode: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        plan = plan_of(files, mode)
        whole = job.train(plan, tmp_path / "whole", tmp_path / "cache")
        with pytest.raises(KeyboardInterrupt):
            job.train(plan, tmp_path / "parts", tmp_path / "cache", report=StopAt(5))
        assert not (tmp_path / "parts").exists()
        torch.manual_seed(99)  # what the rest of the process draws must not matter
        parts = job.train(plan, tmp_path / "parts", tmp_path / "cache", resume=True)
    finally:
        torch.set_num_threads(threads)
    assert same(tensors(tmp_path / "whole"), tensors(tmp_path / "parts"))
    timeless = {"output": None, "seconds": None, "training_cpu_seconds": None}
    assert whole | timeless == parts | timeless
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["answers"], "a finished run leaves no checkpoint"


@pytest.mark.parametrize("mode", MODES)
def test_a_dry_run_tells_the_processor_time_of_a_step_and_writes_nothing(place: Place, mode: str) -> None:
    before = sorted(place.folder.rglob("*"))
    figures = place.trained("drafter", "--dry-run", **MODES[mode])
    assert sorted(place.folder.rglob("*")) == before
    assert figures["cpu_seconds_a_step"] > 0
    assert figures["parameters"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_two_processes_train_what_one_trains_with_twice_the_batches(place: Place, mode: str) -> None:
    assert place.trained_by_two("two", **MODES[mode])["processes"] == 2
    place.trained("one", accumulate=2, **MODES[mode])
    assert close(tensors(place.folder / "one"), tensors(place.folder / "two"))


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_products_leave_weights_in_float32(place: Place, mode: str) -> None:
    assert place.trained(precision="bfloat16", **MODES[mode])["precision"] == "bfloat16"
    kinds = {tensor.dtype for tensor in tensors(place.folder / "drafter").values()}
    assert kinds == {torch.float32} | ({torch.int64, torch.bool} if mode == "eagle3" else set())


def test_an_older_draft_model_is_replaced_by_force(place: Place) -> None:
    place.trained(**DRAFT_MODEL)
    assert "exists already; give --force" in place.train(**DRAFT_MODEL).stderr
    place.trained("drafter", "--force", **EAGLE3, cache=place.folder / "drafter.cache")
    assert not (place.folder / "drafter" / "tokenizer.json").exists()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "blocks": (DRAFT_MODEL | {"block_size": 8}, "--block-size: mode draft-model has no use for it; allowed: with "),
    "anchors": (EAGLE3 | {"anchors": 4}, "--anchors: mode eagle3 has no use for it; allowed: with --mode dflash, "),
    "layers": (EAGLE3 | {"layers": 2}, "--layers: mode eagle3 has no use for it; allowed: with --mode dflash, "),
    "width": (EAGLE3 | {"hidden_size": 8}, "--hidden-size: mode eagle3 has no use for it; allowed: with --mode draft-"),
    "decay": (DRAFT_MODEL | {"decay": 2}, "--decay: mode draft-model has no use for it; allowed: with --mode "),
    "taps of none": (DRAFT_MODEL | {"taps": "1,2,3"}, "--taps: mode draft-model has no use for it; allowed: with "),
    "heads of a block": ({"heads": 2}, "--heads: mode dflash has no use for it; allowed: with --mode draft-model or "),
    "drafts of a block": ({"drafts": 2}, "--drafts: mode dflash has no use for it; allowed: with --mode draft-model "),
    "two taps": (EAGLE3 | {"taps": "1,2"}, "--taps: 1,2; allowed: 3 layers from 1 to 3 in rising order"),
    "first layer": (EAGLE3 | {"taps": "0,1,2"}, "--taps: 0,1,2; allowed: 3 layers from 1 to 3 in rising order"),
    "last layer": (EAGLE3 | {"taps": "1,2,4"}, "--taps: 1,2,4; allowed: 3 layers from 1 to 3 in rising order"),
    "falling": (EAGLE3 | {"taps": "3,2,1"}, "--taps: 3,2,1; allowed: 3 layers from 1 to 3 in rising order"),
    "wide vocabulary": (EAGLE3 | {"draft_vocab": 251}, "--draft-vocab: 251; allowed: up to 250, the target's vocabul"),
    "groups": (DRAFT_MODEL | {"heads": 4, "kv_heads": 3}, "--kv-heads: 3; allowed: a divisor of the 4 heads"),
    "odd head": (EAGLE3 | {"head_dim": 15}, "--head-dim: 15; allowed: an even number"),
    "going on": (EAGLE3 | {"from": "target"}, "--from: mode eagle3 starts anew; allowed: with --mode dflash, self-"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_do_not_fit_are_refused_in_one_line(place: Place, case: str) -> None:
    flags, message = REFUSED[case]
    result = place.train("drafter", **{"anchors": None, **flags})
    assert (result.code, result.stderr.count("\n")) == (1, 1), result.stderr
    assert result.stderr.startswith(f"error: {message}")
    assert sorted(path.name for path in place.folder.iterdir()) == ["prompts.jsonl", "target"]
