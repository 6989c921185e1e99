"""`dflow-trt train` on tiny models: what it writes, how it goes on after an interruption, what it refuses."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training needs torch (the extra `train`)")
pytest.importorskip("transformers", reason="training needs transformers (the extra `train`)")

from accelerate.utils import DistributedType  # noqa: E402
from tiny import edit_config, make_drafter, make_target  # noqa: E402
from train_place import Place, StopAt, close, make_prompts, open_place, same, tensors  # noqa: E402

from dflow_trt.checkpoint.drafter import read_drafter  # noqa: E402
from dflow_trt.checkpoint.target import read_target  # noqa: E402
from dflow_trt.errors import UserError  # noqa: E402
from dflow_trt.spec import DominoSpec  # noqa: E402
from dflow_trt.training import block, compute, job, loop, recipe  # noqa: E402
from dflow_trt.training.cache import AnswerSettings, answered  # noqa: E402
from dflow_trt.training.compute import Compute  # noqa: E402
from dflow_trt.training.data import Trajectory  # noqa: E402
from dflow_trt.training.options import Options, Prompt, TargetSource  # noqa: E402
from dflow_trt.training.plan import Plan, make_plan  # noqa: E402
from dflow_trt.training.progress import Silent  # noqa: E402
from dflow_trt.training.shapes import spread_taps  # noqa: E402

SHAPE = {"block-size": 4, "taps": "0,1", "layers": 1, "mask-token-id": 255}


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose answers do not end early, and prompts."""
    folder = tmp_path_factory.mktemp("train")
    make_target(folder / "target", eos_token_id=None)
    make_prompts(folder / "prompts.jsonl")
    return folder


@pytest.fixture
def place(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Place:
    return open_place(files, tmp_path, capsys, monkeypatch)


def plan_of(folder: Path, **changes: Any) -> Plan:
    target = read_target(folder / "target")
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    prompts = [Prompt(n, tuple(json.loads(line)["prompt_token_ids"])) for n, line in enumerate(lines, 1)]
    options = Options(
        block_size=4, taps=(0, 1), layers=1, mask_token_id=255, steps=6, every=2, batch_size=2, anchors=2,
        learning_rate=3e-3, max_new_tokens=12, held_out=3, accumulate=2, mode="dflow", rounds=1,
    )  # fmt: skip
    source = TargetSource(folder / "target", target.spec, target.fingerprint)
    return make_plan(source, None, prompts, replace(options, **changes))


def test_dflow_starts_as_the_dflash_drafter_that_it_goes_on_from(place: Place) -> None:
    dflash = place.trained("dflash", **SHAPE)
    dflow = place.trained("dflow", mode="dflow", **{"from": place.folder / "dflash"}, cache=place.folder / "c")
    tau = {name: dflash[name] for name in ("tau_emitted", "tau_accepted")}
    assert dflow["tau_by_step"]["0"] == tau, "an untrained relay adds nothing"
    target = read_target(place.folder / "target").spec
    specs = [read_drafter(place.folder / name, target).spec for name in ("dflash", "dflow")]
    assert [spec.relay and spec.relay.start for spec in specs] == [None, "after_rejection"]
    assert all((spec.block_size, spec.target_layer_ids, spec.mask_token_id) == (4, (0, 1), 255) for spec in specs)
    assert tensors(place.folder / "dflow")["relay_mlp.2.weight"].abs().max() > 0, "and it learns"
    assert {path.name for path in place.folder.iterdir()} == {
        *("target", "prompts.jsonl", "dflash", "dflash.cache", "dflow", "c"),
    }


def test_the_card_has_command_seed_and_figures(place: Place) -> None:
    figures = place.trained(seed=7, **SHAPE)
    card = (place.folder / "drafter" / "README.md").read_text()
    assert "dflow-trt train --output" in card
    assert "Seed 7; " in card
    assert f"| as trained | {figures['tau_emitted']:.2f} | {figures['tau_accepted']:.2f} |" in card
    record = json.loads((place.folder / "drafter" / "training.json").read_text())
    assert record["target_fingerprint"] == read_target(place.folder / "target").fingerprint
    assert record["figures"]["tau_by_step"].keys() == {"0", "2", "4"}


HEAD = {"head": "domino", "head-state": 8, "head-rank": 6}


@pytest.mark.parametrize(("rollout", "rolls"), [(None, True), ("real", True), ("teacher-forced", False)])
def test_a_head_rolls_out_unless_told_otherwise(files: Path, rollout: Any, rolls: bool) -> None:
    assert block.drafter_settings(plan_of(files, head="domino", rollout=rollout).options).roll_out is rolls


def test_a_causal_head_is_added_to_a_drafter_and_kept(place: Place) -> None:
    dflash, cache = place.trained("dflash", **SHAPE), place.folder / "c"
    start = {"from": place.folder / "dflash", "mode": "dflow", "cache": cache}
    real = place.trained("real", **HEAD, **start)
    assert real["tau_by_step"]["0"]["tau_emitted"] == dflash["tau_emitted"], "an untrained head adds nothing"
    spec = read_drafter(place.folder / "real", read_target(place.folder / "target").spec).spec
    assert spec.head == DominoSpec(prefix_length=1, state_size=8, rank=6, shifted=False)
    assert spec.relay is not None
    on = place.trained("on", steps=1, **{**start, "from": place.folder / "real"})
    assert on["tau_by_step"]["0"]["tau_emitted"] == real["tau_emitted"], "and training goes on from a drafter with one"
    assert "causal head of Domino" in (place.folder / "on" / "README.md").read_text()


def test_sharded_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute.Accelerator, "distributed_type", DistributedType.FSDP)
    with pytest.raises(UserError, match=r"configured for FSDP; allowed: one process or plain data parallelism"):
        Compute.start()


def test_held_out_prompts_can_be_named_and_are_not_trained_on(place: Place) -> None:
    lines = (place.folder / "prompts.jsonl").read_text().splitlines()
    (place.folder / "held.jsonl").write_text("\n".join(lines[:5]) + "\n")
    figures = place.trained(held_out=None, held_out_prompts=place.folder / "held.jsonl", **SHAPE)
    record = json.loads((place.folder / "drafter" / "training.json").read_text())
    assert figures["held_out_prompts"] == 5
    assert {name: len(counts) for name, counts in record["held_out"].items()} == {"greedy": 5, "sampled": 5}
    assert "to 9 prompts" in (place.folder / "drafter" / "README.md").read_text()
    rounds, emitted, _ = map(sum, zip(*record["held_out"]["greedy"], strict=True))
    assert round(emitted / rounds, 3) == figures["tau_emitted"]


def test_bfloat16_products_leave_weights_in_float32(place: Place) -> None:
    figures = place.trained(precision="bfloat16", mode="dflow", **HEAD, **SHAPE)
    assert figures["precision"] == "bfloat16"
    assert {tensor.dtype for tensor in tensors(place.folder / "drafter").values()} == {torch.float32}


@pytest.mark.slow
def test_two_processes_train_what_one_trains_with_twice_the_batches(place: Place) -> None:
    two = place.trained_by_two("two", mode="dflow", **SHAPE)
    assert two["processes"] == 2, "and only the first process prints"
    place.trained("one", mode="dflow", accumulate=2, **SHAPE)
    assert close(tensors(place.folder / "one"), tensors(place.folder / "two"))


def test_self_conditioned_training_has_more_rounds_and_no_relay(place: Place) -> None:
    place.trained("plain", cache=place.folder / "c", **SHAPE)
    place.trained("conditioned", mode="self-conditioned", rounds=1, cache=place.folder / "c", **SHAPE)
    plain, conditioned = tensors(place.folder / "plain"), tensors(place.folder / "conditioned")
    assert plain.keys() == conditioned.keys()
    assert not same(plain, conditioned)


def test_interrupted_and_resumed_training_is_uninterrupted_training_bit_by_bit(files: Path, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        plan = plan_of(files)
        whole = job.train(plan, tmp_path / "whole", tmp_path / "cache")
        with pytest.raises(KeyboardInterrupt):
            job.train(plan, tmp_path / "parts", tmp_path / "cache", report=StopAt(5))
        assert not (tmp_path / "parts").exists()
        torch.manual_seed(99)  # what the rest of the process draws must not matter
        torch.rand(3)
        parts = job.train(plan, tmp_path / "parts", tmp_path / "cache", resume=True)
    finally:
        torch.set_num_threads(threads)
    assert same(tensors(tmp_path / "whole"), tensors(tmp_path / "parts"))
    timeless = {"output": None, "seconds": None, "training_cpu_seconds": None}
    assert whole | timeless == parts | timeless
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["answers"], "a finished run leaves no checkpoint"


def test_resuming_needs_a_run_with_the_same_settings(files: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        job.train(plan_of(files), tmp_path / "out", tmp_path / "cache", report=StopAt(3))
    with pytest.raises(UserError, match="no checkpoint of a run with these settings"):
        job.train(plan_of(files, seed=1), tmp_path / "out", tmp_path / "cache", resume=True)


def test_every_batch_is_used_once_in_each_turn(files: Path, tmp_path: Path) -> None:
    plan = plan_of(files)
    training = job.prepare(plan, Compute.start(), tmp_path, Silent()).training
    turns = [[training.batch_index(6 * turn + at) for at in range(6)] for turn in range(3)]
    assert all(sorted(turn) == list(range(6)) for turn in turns)
    assert turns[0] != turns[1]


def test_batches_beyond_the_memory_limit_are_read_anew_and_equal(files: Path, tmp_path: Path) -> None:
    plan = plan_of(files)
    bench = job.prepare(plan, Compute.start(), tmp_path, Silent())
    batches = bench.training._reader._batches
    kept, anew = loop.Reader(bench.trainee.reader, batches), loop.Reader(bench.trainee.reader, batches, limit=0)
    assert kept[0] is kept[0]
    assert anew[0] is not anew[0]
    assert torch.equal(kept[0].features_NSC, anew[0].features_NSC)


def counting_answer(calls: list[int], fail_at: int = -1) -> Any:
    def answer(prompts: Any, settings: Any, seed: int) -> list[Trajectory]:
        if len(calls) == fail_at:
            raise KeyboardInterrupt
        calls.append(seed)
        return [Trajectory(prompt, (*prompt, seed % 97)) for prompt in prompts]

    return answer


def test_interrupted_answers_go_on_with_the_next_piece(tmp_path: Path) -> None:
    prompts, settings = [(i, i + 1) for i in range(5)], AnswerSettings("t", 8, 0.7, 0, piece=2)
    whole = answered(tmp_path / "a", prompts, settings, counting_answer([]))
    first, rest = list[int](), list[int]()
    with pytest.raises(KeyboardInterrupt):
        answered(tmp_path / "b", prompts, settings, counting_answer(first, fail_at=2))
    assert answered(tmp_path / "b", prompts, settings, counting_answer(rest)) == whole
    assert (len(first), len(rest)) == (2, 1)
    assert answered(tmp_path / "b", prompts, settings, counting_answer([], fail_at=0)) == whole


def test_answers_are_made_anew_when_damaged_or_when_anything_they_depend_on_changes(tmp_path: Path) -> None:
    prompts, settings = [(1, 2), (3,)], AnswerSettings("t", 8, 0.7, 0)
    for changed in ({}, {"target": "u"}, {"max_new_tokens": 9}, {"temperature": 1.0}, {"seed": 1}):
        calls: list[int] = []
        answered(tmp_path, prompts, replace(settings, **changed), counting_answer(calls))
        assert len(calls) == 1, changed
    answered(tmp_path, [(1, 2), (4,)], settings, counting_answer(calls))
    assert len(calls) == 2
    for path in tmp_path.rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-3])
    answered(tmp_path, prompts, settings, counting_answer(calls))
    assert len(calls) == 3
    greedy = [replace(settings, temperature=0.0, seed=seed).key for seed in (0, 1)]
    assert greedy[0] == greedy[1]


def test_sampled_answers_follow_the_seed_and_leave_out_rows_without_a_token(files: Path) -> None:
    plan = plan_of(files)
    spec = replace(plan.target.spec, live_vocab=128)
    plan = replace(plan, target=replace(plan.target, spec=spec))
    model, prompts = job.load_target(plan, Compute.start()), [prompt.ids for prompt in plan.training]
    draw = [job.generate(plan, model, prompts, 10, 3.0, seed) for seed in (0, 0, 1)]
    assert draw[0] == draw[1] != draw[2]
    ids = [token for trajectories in draw for one in trajectories for token in one.response_ids]
    assert max(ids) < 128
    assert len(set(ids)) > 64, "a high temperature reaches most of the vocabulary"


def test_loss_that_is_not_finite_stops_with_step_and_batch(place: Place) -> None:
    result = place.train(learning_rate=1e30, **SHAPE)
    assert result.code == 1
    assert "is nan at step " in result.stderr.splitlines()[-1]
    assert " of 3; lower --learning-rate" in result.stderr.splitlines()[-1]
    assert not (place.folder / "drafter").exists()


def test_dry_run_estimates_and_writes_nothing(place: Place) -> None:
    before = sorted(place.folder.rglob("*"))
    figures = place.trained("drafter", "--dry-run", mode="dflow", **SHAPE)
    assert sorted(place.folder.rglob("*")) == before
    wide, out = 3 * 64, 2 * 64
    relay = 2 * 64 + out * (wide + 1) + out * (out + 1)
    assert figures["parameters"] > relay
    assert figures["seconds_a_step"] > 0
    assert (figures["training_prompts"], figures["held_out_prompts"]) == (11, 3)


@pytest.mark.parametrize("layout", [{"dtype": "bfloat16"}, {"top_level": True, "relay": True}])
def test_training_goes_on_from_the_layouts_that_build_reads(place: Place, files: Path, layout: Any) -> None:
    config = json.loads((files / "target" / "config.json").read_text())
    make_drafter(place.folder / "source", config, block_size=4, **layout)
    place.trained(mode="dflow", steps=1, **{"from": place.folder / "source"})
    spec = read_drafter(place.folder / "drafter", read_target(files / "target").spec).spec
    assert (spec.checkpoint_dtype, spec.block_size, spec.target_layer_ids) == ("float32", 4, (0, 1))


def test_an_existing_drafter_is_replaced_only_by_force_and_nothing_else_ever(place: Place) -> None:
    place.trained(**SHAPE, steps=1)
    old = tensors(place.folder / "drafter")
    refused = place.train(**SHAPE, steps=1)
    assert "exists already; give --force" in refused.stderr
    place.trained("drafter", "--force", **SHAPE, steps=1, seed=5)
    assert not same(tensors(place.folder / "drafter"), old)
    (place.folder / "drafter" / "notes.txt").write_text("mine")
    refused = place.train("drafter", "--force", **SHAPE)
    assert "holds 'notes.txt', no part of a drafter" in refused.stderr
    assert [path.name for path in place.folder.glob(".*")] == []


class FillAtStart(Silent):
    """Puts a file into the output folder while the job runs."""

    def __init__(self, output: Path) -> None:
        self.output = output

    def stage(self, title: str, total: int, done: int = 0) -> None:
        self.output.mkdir(exist_ok=True)
        (self.output / "notes.txt").write_text("mine")


def test_a_folder_that_was_filled_meanwhile_is_left_alone_and_no_step_is_lost(files: Path, tmp_path: Path) -> None:
    plan, output = plan_of(files, steps=2), tmp_path / "out"
    with pytest.raises(UserError, match="was filled meanwhile"):
        job.train(plan, output, tmp_path / "cache", report=FillAtStart(output))
    assert [path.name for path in output.iterdir()] == ["notes.txt"]
    output.rename(tmp_path / "moved")
    assert job.train(plan, output, tmp_path / "cache", resume=True, report=StopAt(1))["steps"] == 2


def test_accumulated_gradients_are_the_mean_of_their_batches(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "spread_anchors", lambda batch, anchors, generator: batch.start_N[:, None])
    one_batch = {"batch_size": 99, "steps": 1}
    for count in (1, 2):  # the only batch once, and twice
        job.train(plan_of(files, accumulate=count, **one_batch), tmp_path / str(count), tmp_path / "cache")
    assert same(tensors(tmp_path / "1"), tensors(tmp_path / "2"))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "last layer": ({"taps": "0,2"}, "--taps: 2 is the target's last layer, no tap; allowed: 0 to 1"),
    "tap out of range": ({"taps": "0,7"}, "--taps: 0,7; allowed: 0 to 1"),
    "tap twice": ({"taps": "1,1"}, "--taps: 1,1; allowed"),
    "no layer number": ({"taps": "1,x"}, "--taps: '1,x'; allowed: layer numbers"),
    "no mask token": ({"mask_token_id": None}, "--mask-token-id: the target has neither"),
    "mask out of range": ({"mask_token_id": 256}, "--mask-token-id: 256; allowed: 0 to 255"),
    "all held out": ({"held_out": 14}, "--held-out: 14; allowed: up to 13"),
    "too long": ({"max_new_tokens": 509}, "--prompts: line 1: "),
    "head of none": ({"head_state": 8}, "--head-state: the drafter has no causal head; allowed: with --head domino"),
    "rollout of none": ({"rollout": "real", "mode": "dflow"}, "--rollout: the drafter has no causal head"),
    "rollout of dflash": ({"head": "domino", "rollout": "real"}, "--rollout: mode dflash has no round after drafts"),
    "long head prefix": ({"head": "domino", "head_prefix": 4}, "--head-prefix: 4; allowed: 0 to 3"),
    "rounds of dflash": ({"rounds": 2}, "--rounds: mode dflash"),
    "relay of dflash": ({"relay_start": "at_rejection"}, "--relay-start: mode dflash has no relay"),
    "no rate": ({"learning_rate": "nan"}, "--learning-rate: nan; allowed"),
    "negative temperature": ({"temperature": -1}, "--temperature: -1.0; allowed"),
    "no checkpoint": ({"resume": True}, "--resume: "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_do_not_fit_are_refused_in_one_line(place: Place, case: str) -> None:
    flags, message = REFUSED[case]
    extra = ["--resume"] if flags.get("resume") else []
    flags = {name: value for name, value in flags.items() if name != "resume"}
    result = place.train("drafter", *extra, **{**{name.replace("-", "_"): v for name, v in SHAPE.items()}, **flags})
    assert (result.code, result.stderr.count("\n")) == (1, 1), result.stderr
    assert result.stderr.startswith(f"error: {message}")
    assert sorted(path.name for path in place.folder.iterdir()) == ["prompts.jsonl", "target"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt"),
        ("\n \n", "holds no prompt"),
        ('{"prompt_token_ids": [1]}\n{"prompt_token', "line 2: no JSON"),
        ('{"prompt_token_ids": [1]}\n\n{"prompt_token_ids": [1]}', "line 2: empty; remove the line"),
        ('{"prompt_token_ids": [1]}\n{}\n', "line 2: needs exactly one of"),
        ('{"prompt_token_ids": [1]}\n{"prompt_token_ids": [256]}\n\n', "line 2: token id 256; allowed: 0 to 255"),
        ('{"prompt": "w1"}\n', "tokenizer.json does not exist"),
    ],
)
def test_prompts_that_do_not_fit_are_refused_by_their_line(place: Place, text: str, message: str) -> None:
    path = place.folder / "bad.jsonl"
    path.write_text(text)
    result = place.train(prompts=path, **SHAPE)
    assert (result.code, result.stderr.count("\n")) == (1, 1), result.stderr
    assert message in result.stderr


def test_answers_without_a_token_to_draft_are_too_few(files: Path, tmp_path: Path) -> None:
    plan = plan_of(files, max_new_tokens=12)
    spec = replace(plan.target.spec, eos_ids=tuple(range(256)))
    plan = replace(plan, target=replace(plan.target, spec=spec))
    with pytest.raises(UserError, match="give 0 tokens to train on and 0 answers held out"):
        job.train(plan, tmp_path / "out", tmp_path / "cache")


def test_a_target_with_windows_is_refused(place: Place, files: Path) -> None:
    (place.folder / "target").unlink()
    make_target(place.folder / "target", use_sliding_window=True, sliding_window=8, max_window_layers=0)
    result = place.train(**SHAPE)
    assert "sliding" in result.stderr, result.stderr
    assert (result.code, result.stderr.count("\n")) == (1, 1)


def test_a_drafter_of_another_target_is_refused(place: Place, files: Path) -> None:
    config = json.loads((files / "target" / "config.json").read_text())
    make_drafter(place.folder / "wide", {**config, "hidden_size": 96})
    wide = place.train(**{"from": place.folder / "wide"})
    assert "hidden_size is 96" in wide.stderr
    make_drafter(place.folder / "other", config)
    (place.folder / "other" / "training.json").write_text('{"target_fingerprint": "another"}')
    other = place.train(**{"from": place.folder / "other"})
    assert "was trained for another target" in other.stderr
    (place.folder / "other" / "training.json").unlink()
    edit_config(place.folder / "other", output_multiplier=2.0)
    assert "has output_multiplier, which training" in place.train(**{"from": place.folder / "other"}).stderr


def test_flags_must_not_contradict_the_drafter_that_training_goes_on_from(place: Place, files: Path) -> None:
    config = json.loads((files / "target" / "config.json").read_text())
    make_drafter(place.folder / "dflow", config, relay=True)
    source = {"from": place.folder / "dflow"}
    assert "--block-size: the drafter of --from has 8" in place.train(mode="dflow", **source, block_size=4).stderr
    assert "--relay-start: the drafter of --from has after_rejection" in (
        place.train(mode="dflow", **source, relay_start="at_rejection").stderr
    )
    assert "--mode: the drafter of --from has a relay" in place.train(**source).stderr


def test_a_cache_inside_the_output_is_refused(place: Place) -> None:
    result = place.train(**SHAPE, cache=place.folder / "drafter" / "cache")
    assert result.stderr.startswith("error: --cache: ")


def test_without_torch_the_error_names_the_extra(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    import dflow_trt.training

    monkeypatch.delattr(dflow_trt.training, "job")
    for name in [name for name in sys.modules if name.startswith("dflow_trt.training.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    result = place.train(**SHAPE)
    assert result.stderr == "error: train: needs torch; install the extra from the checkout: pip install '.[train]'\n"


@pytest.mark.parametrize(
    ("layers", "count", "expected"),
    [(36, 5, (1, 9, 17, 25, 33)), (28, 5, (1, 7, 13, 19, 25)), (6, 3, (1, 2, 3)), (2, 5, (0,)), (3, 1, (1,))],
)
def test_taps_are_spread_like_those_of_released_drafters(layers: int, count: int, expected: tuple[int, ...]) -> None:
    assert spread_taps(layers, count) == expected
