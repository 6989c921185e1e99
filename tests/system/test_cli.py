"""The command line as people and scripts meet it: what it prints where, how it refuses, how it is interrupted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny import make_drafter, make_target

from dflow_trt import cli, console, example
from dflow_trt.bundle import open_bundle
from dflow_trt.cli import generate

MAIN = "from dflow_trt.cli import main; main()"
PROMPT = "w1 w2 w3"


@dataclass
class Result:
    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """Standard output, which must be one JSON document and nothing else."""
        assert self.code == 0, self.stderr
        return json.loads(self.stdout)


Run = Callable[..., Result]


@pytest.fixture
def dflow(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The console script, in this process."""

    monkeypatch.setattr(console.out, "width", console.PLAIN_WIDTH)  # as in a file, whatever the environment

    def run(*arguments: Any) -> Result:
        monkeypatch.setattr(sys, "argv", ["dflow-trt", *map(str, arguments)])
        handler = signal.getsignal(signal.SIGTERM)
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        finally:
            signal.signal(signal.SIGTERM, handler)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target, flash, flow, and bundle: all of them built."""
    folder = tmp_path_factory.mktemp("models")
    config = make_target(folder / "target", tokenizer=250, max_position_embeddings=4096)
    make_drafter(folder / "flash", config, seed=2)
    make_drafter(folder / "flow", config, relay=True)
    command = [sys.executable, "-c", MAIN, "build", "--target", folder / "target", "--drafter", folder / "flash"]
    command += ["--drafter", folder / "flow", "--output", folder / "bundle", "--max-seq-len", "4096"]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    return folder


@pytest.fixture
def bundle(models: Path) -> Path:
    return models / "bundle"


def refused(result: Result, *parts: str, code: int = 1) -> None:
    """One line on standard error that names the parts; nothing on standard output."""
    assert result.code == code, result
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    lines = result.stderr.strip().split("\n")
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert lines[0].endswith(" --help)") == (code == 2), "where the words of a command are wrong, what lists them"
    for part in parts:
        assert part in lines[0], result.stderr


# -- build -------------------------------------------------------------------------------------------------------------


def test_build_says_what_it_built(dflow: Run, models: Path, tmp_path: Path) -> None:
    result = dflow("build", "--target", models / "target", "--drafter", models / "flow", "--output", tmp_path / "[b] ü")
    assert result.code == 0
    assert result.stderr == ""  # no bar where nobody watches
    lines = result.stdout.split("\n")
    assert lines[0].startswith(f"{tmp_path}/[b] ü: ")
    assert lines[1] == "strategies: ar, dflow, dflow-norelay"
    assert lines[2].startswith("memory: weights ")
    assert lines[3].startswith("self-check: layer, ")
    assert open_bundle(tmp_path / "[b] ü").default_strategy == "dflow"


def test_build_json_is_the_bundle(dflow: Run, models: Path, tmp_path: Path) -> None:
    flags = ["--json", "--self-check", "full", "--target-weights", "int8", "--draft-weights", "float", "--draft-logits"]
    drafter = f"mine={models / 'flow'}"
    result = dflow("build", "--target", models / "target", "--drafter", drafter, "--output", tmp_path / "b", *flags)
    data = result.json
    assert data["strategies"] == ["ar", "mine", "mine-norelay"]
    assert data["self_check"]["mode"] == "full"
    assert "mine.draft" in data["self_check"]["errors"]
    assert data["build"] | {"target_weights": "int8", "draft_weights": "float", "draft_logits": True} == data["build"]
    assert "full self-check: needs about" in result.stderr


@pytest.mark.parametrize("dash", ["-", "_"])
def test_build_takes_the_flags_of_trtllm_build(dflow: Run, models: Path, tmp_path: Path, dash: str) -> None:
    limits = {"max_batch_size": 2, "max_input_len": 100, "max_seq_len": 200, "max_num_tokens": 64}
    flags = [part for name, value in limits.items() for part in (f"--{name.replace('_', dash)}", value)]
    result = dflow(
        "build", "--target", models / "target", "--output", tmp_path / "b", "--self-check", "off", "--json", *flags
    )
    assert result.json["build"] | limits == result.json["build"]


def test_a_drafter_folder_may_have_an_equals_sign_in_its_name(dflow: Run, models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "flow", tmp_path / "a=b")
    output = tmp_path / "b"
    dflow(
        "build", "--target", models / "target", "--drafter", tmp_path / "a=b", "--output", output, "--self-check", "off"
    )
    assert list(open_bundle(output).drafters) == ["dflow"]


def test_a_folder_called_ngram_is_one_where_it_has_a_place(
    dflow: Run, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(models / "flow", tmp_path / "ngram")
    monkeypatch.chdir(tmp_path)
    base = ["build", "--target", models / "target", "--output", "b", "--self-check", "off", "--force"]
    for text, kinds in (
        ("ngram", {"ngram": "ngram"}),
        ("ngram:drafts=3", {"ngram": "ngram"}),
        ("mine=ngram", {"mine": "ngram"}),
        ("./ngram", {"dflow": "dflash"}),
        ("mine=ngram/", {"mine": "dflash"}),
        (tmp_path / "ngram", {"dflow": "dflash"}),
    ):
        assert dflow(*base, "--drafter", text).code == 0
        assert {name: entry.spec.kind for name, entry in open_bundle("b").drafters.items()} == kinds, text


def test_a_folder_whose_name_looks_like_settings_is_a_folder(dflow: Run, models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "target", tmp_path / "a:drafts=2")
    base = ["build", "--target", models / "target", "--output", tmp_path / "b", "--self-check", "off", "--force"]
    for text, drafts in (("", 4), (":drafts=9", 9)):
        for prefix, name in (("", "draft-model"), ("mine=", "mine")):
            assert dflow(*base, "--drafter", f"{prefix}{tmp_path / 'a:drafts=2'}{text}").code == 0
            [spec] = open_bundle(tmp_path / "b").specs
            assert (spec.name, spec.num_drafts) == (name, drafts)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--max-batch-size", "0"], ["--max-batch-size: 0; allowed: 1 to 4096"]),
        (["--max-seq-len", "1"], ["--max-seq-len: 1; allowed: 2 to 4096"]),
        (["--max-seq-len", "5000"], ["--max-seq-len: 5000", "max_position_embeddings"]),
        (["--max-seq-len", "0"], ["--max-seq-len: 0"]),
        (["--max-input-len", "0"], ["--max-input-len: 0"]),
        (["--max-input-len", "64", "--max_seq_len", "64"], ["--max-input-len: 64; allowed: 1 to 63"]),
        (["--max-num-tokens", "7"], ["--max-num-tokens: 7; allowed: 64 to 1048576 (max_batch_size 8 x 8 rows"]),
        (["--max-num-tokens", "0"], ["--max-num-tokens: 0"]),
        (["--backend", "tensorflow"], ["--backend", "'tensorflow'", "onnxruntime"]),
        (["--dtype", "bfloat16"], ["--dtype: bfloat16"]),
        (["--drafter", "=x"], ["'=x' has no name"]),
        (["--drafter", "ar=FLOW"], ["'ar'"]),
        (["--drafter", "FLOW"], ["two drafters are called 'dflow'"]),
        (["--drafter", "a/../b=FLOW"], ["a/../b"]),
        (["--drafter", "/nonexistent"], ["/nonexistent"]),
        (["--drafter", "/nonexistent:drafts=3"], ["/nonexistent: config.json is missing"]),
        (["--drafter", "FLOW:drafts=3"], ["flow:drafts=..: this drafter has no settings; leave drafts out"]),
        (["--drafter", "TARGET:drafts=32"], ["target:drafts=32; allowed: 1 to 31"]),
        (["--drafter", "TARGET:length=3"], ["target:length=3; allowed settings: drafts"]),
        (["--drafter", "ngram:min"], ["'ngram:min' is no folder, and 'min' behind its colon no settings"]),
        (["--drafter", "ngram:min=2;max=3"], ["'min=2;max=3' behind its colon no settings; allowed: KEY=NUMBER,.."]),
        (["--drafter", "x=ngram:drafts=-1"], ["'drafts=-1' behind its colon no settings"]),
        (["--drafter", "ngram:min=2,drafts=4,min=3"], ["'ngram:min=2,drafts=4,min=3' sets min twice; allowed: once"]),
        (["--drafter", "ngram:min=3,max=2"], ["ngram:min=3,max=2; allowed: min up to max"]),
        (["--drafter", "ngram", "--drafter", "ngram:min=1"], ["two drafters are called 'ngram'"]),
        (["--drafter", "ar=ngram"], ["drafter name is 'ar'"]),
        (["--drafter", "=ngram:min=1"], ["'=ngram:min=1' has no name"]),
        (["--target", "/nonexistent"], ["/nonexistent", "config.json"]),
        (["--target", "FLOW"], ["architectures"]),
    ],
)
def test_build_refuses_by_name(dflow: Run, models: Path, tmp_path: Path, flags: list[str], parts: list[str]) -> None:
    flags = [flag.replace("FLOW", str(models / "flow")).replace("TARGET", str(models / "target")) for flag in flags]
    base = ["--target", models / "target", "--drafter", models / "flow", "--output", tmp_path / "b"]
    refused(dflow("build", *base, *flags), *parts)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags",
    [
        ["--max-batch-size", "many"],
        ["--self-check", "some"],
        ["--draft-weights", "int4"],
        ["--dtype", "f32"],
        ["--target", __file__],
        ["--output", __file__],
        ["--colour"],
        ["surplus"],
    ],
)
def test_build_usage_errors(dflow: Run, models: Path, tmp_path: Path, flags: list[str]) -> None:
    refused(dflow("build", "--target", models / "target", "--output", tmp_path / "b", *flags), code=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["build", "inspect", "generate", "example"])
def test_incomplete_commands_are_usage_errors(dflow: Run, command: str) -> None:
    refused(dflow(command), "missing ", f" (see dflow-trt {command} --help)", code=2)


def test_an_unknown_command_is_a_usage_error(dflow: Run) -> None:
    refused(dflow("nonsense"), "no such command 'nonsense' (see dflow-trt --help)", code=2)
    refused(dflow("--nonsense"), "no such option '--nonsense' (see dflow-trt --help)", code=2)


def test_no_command_at_all_is_a_usage_error_that_shows_the_help(dflow: Run) -> None:
    result = dflow()
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr.startswith("Usage: dflow-trt [OPTIONS] COMMAND [ARGS]...")


def test_help_and_version(dflow: Run) -> None:
    for command in ("build", "inspect", "generate", "example"):
        assert f"Usage: dflow-trt {command} " in dflow(command, "-h").stdout
    assert dflow("--version").stdout.startswith("dflow-trt, version ")


def test_force_is_named_where_it_is_needed(dflow: Run, models: Path, bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle, tmp_path / "b")
    base = ["build", "--target", models / "target", "--output", tmp_path / "b", "--self-check", "off"]
    refused(dflow(*base), "--force")
    assert dflow(*base, "--force").code == 0
    assert list(open_bundle(tmp_path / "b").strategies) == ["ar"]


# -- inspect -----------------------------------------------------------------------------------------------------------


def test_inspect_shows_engines_tensors_and_files(dflow: Run, bundle: Path) -> None:
    result = dflow("inspect", bundle)
    assert result.code == 0
    for part in ("3 layers, hidden 64", "block 8, taps 0, 1, relay after_rejection", "no relay", "pending_h[B,J,E]"):
        assert part in result.stdout
    for name in open_bundle(bundle).files:
        assert name in result.stdout
    assert "…" not in result.stdout


def test_inspect_names_a_causal_head(dflow: Run, models: Path, tmp_path: Path) -> None:
    config = json.loads((models / "target" / "config.json").read_text())
    make_drafter(tmp_path / "draft", config, domino={"shift_label": True, "pure_draft_prefix_len": 1})
    flags = ["--drafter", tmp_path / "draft", "--output", tmp_path / "bundle", "--self-check", "off"]
    assert "strategies: ar, domino" in dflow("build", "--target", models / "target", *flags).stdout
    head = "Domino head from draft 2 on (state 24, rank 20, shifted slots)"
    assert f"block 8, taps 0, 1, no relay, {head}" in dflow("inspect", tmp_path / "bundle").stdout


def test_inspect_names_convolutions_and_a_selector(dflow: Run, models: Path, tmp_path: Path) -> None:
    config = json.loads((models / "target" / "config.json").read_text())
    make_drafter(tmp_path / "draft", config, dflash2={})
    flags = ["--drafter", tmp_path / "draft", "--output", tmp_path / "bundle", "--self-check", "off"]
    assert "strategies: ar, dflash2" in dflow("build", "--target", models / "target", *flags).stdout
    parts = "convolutions over 3 rows (groups of 16), selector among 6 (rank 12)"
    assert f"block 8, taps 0, 1, no relay, {parts}" in dflow("inspect", tmp_path / "bundle").stdout


def test_draft_models_and_lookup_are_shown_and_run(dflow: Run, models: Path, tmp_path: Path) -> None:
    config = {"hidden_size": 32, "num_hidden_layers": 1, "tied": True, "max_position_embeddings": 4096}
    make_target(tmp_path / "small", tokenizer=250, **config)
    drafters = ["--drafter", f"small={tmp_path / 'small'}:drafts=3", "--drafter", "ngram:min=1,drafts=6"]
    flags = [*drafters, "--output", tmp_path / "bundle"]
    built = dflow("build", "--target", models / "target", *flags).stdout
    assert "strategies: ar, small, ngram" in built
    shown = dflow("inspect", tmp_path / "bundle").stdout
    for part in (
        "small: draft model of 1 layers, hidden 32, 4/2 heads of 32, vocabulary 256, 3 drafts",
        "ngram: prompt lookup of the last 1 to 4 tokens, 6 drafts",
        "small.drafter",
        "small.vocab.data",
    ):
        assert part in shown
    assert "fingerprint none" not in shown, "lookup has no checkpoint"
    data = dflow("inspect", tmp_path / "bundle", "--json").json
    kinds = {name: (entry["kind"], entry["spec"]["drafts"]) for name, entry in data["drafters"].items()}
    assert kinds == {"small": ("draft-model", 3), "ngram": ("ngram", 6)}
    assert data["engines"].keys() == {"target", "small.drafter"}
    assert data["strategies"] == ["ar", "small", "ngram"]
    given = ["generate", tmp_path / "bundle", "-p", PROMPT, "--json", "--compare-ar", *SHORT]
    runs = dflow(*given, "--strategy", "ngram", "--strategy", "small").json["runs"]
    assert [(run["strategy"], run["same_as_ar"]) for run in runs] == [("ar", None), ("ngram", 1), ("small", 1)]
    assert dflow(*given).json["runs"][1]["strategy"] == "small", "the model is the better guess"
    refused(dflow(*given, "--strategy", "lookup"), "no 'lookup'; it offers ar, small, ngram")
    planned = ["plan", models / "target", f"small={tmp_path / 'small'}:drafts=3", "ngram:min=1,drafts=6"]
    plan = dflow(*planned, "--backend", "onnxruntime", "--json").json
    for part in ("target_cache", "drafter_cache", "relay_state", "outputs", "workspace"):
        assert plan["memory"][part] == data["memory"][part], part
    refused(dflow(*planned, "ngram:max=0"), "ngram:max=0; allowed: 1 to 16")


def test_inspect_json_is_the_manifest_and_more(dflow: Run, bundle: Path) -> None:
    data = dflow("inspect", bundle, "--json").json
    assert json.loads((bundle / "dflow.json").read_text()).items() <= data.items()
    assert data["strategies"] == ["ar", "dflash", "dflow", "dflow-norelay"]
    assert {tensor["name"] for tensor in data["engines"]["dflow.relay"]["inputs"]} >= {"pending_h", "relay_src"}
    assert data["memory"]["total"] > data["memory"]["weights"]


def test_inspect_refuses_what_is_no_bundle(dflow: Run, models: Path, bundle: Path, tmp_path: Path) -> None:
    refused(dflow("inspect", models / "target"), "not a bundle")
    refused(dflow("inspect", tmp_path / "none"), "no such folder")
    refused(dflow("inspect", bundle / "dflow.json"), "is a file", code=2)
    shutil.copytree(bundle, tmp_path / "b")
    (tmp_path / "b" / "vocab.data").write_bytes(b"x")
    refused(dflow("inspect", tmp_path / "b"), "vocab.data: 1 bytes", "build the bundle again")


def test_a_file_that_cannot_be_read_is_one_line(dflow: Run, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permission: tests may run as root, whom no file refuses."""
    original = Path.read_text

    def denied(self: Path, *rest: Any, **more: Any) -> str:
        if self.name == "dflow.json":
            raise PermissionError(13, "Permission denied", str(self))
        return original(self, *rest, **more)

    monkeypatch.setattr(Path, "read_text", denied)
    refused(dflow("inspect", bundle), "dflow.json: Permission denied")


def test_an_engine_file_that_cannot_be_read_is_one_line(
    dflow: Run, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("dflow_trt.bundle.file_sha256", denied)
    refused(dflow("inspect", bundle), "Permission denied")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_one_line(dflow: Run, bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle, tmp_path / "b")
    (tmp_path / "b" / "target.data").chmod(0)
    refused(dflow("inspect", tmp_path / "b"), "target.data", "Permission denied")


# -- generate ----------------------------------------------------------------------------------------------------------

SHORT = ["--max-tokens", "12", "--threads", "1", "--ignore-eos"]


def test_generate_prints_text_and_figures(dflow: Run, bundle: Path) -> None:
    result = dflow("generate", bundle, "-p", PROMPT, "-p", "w7", *SHORT)
    assert result.code == 0
    assert result.stderr == ""
    lines = result.stdout.split("\n")
    assert lines[0].startswith(f"{PROMPT}")
    assert lines[0].endswith("(length)")
    header = next(line for line in lines if "strategy" in line)
    assert header.split() == ["strategy", "tokens", "passes", "tau", "kept", "tok/s", "speed-up", "same"]


def test_generate_json_is_json_alone(dflow: Run, bundle: Path) -> None:
    data = dflow("generate", bundle, "-p", PROMPT, "--json", "--compare-ar", *SHORT).json
    plain, drafted = data["runs"]
    assert (plain["strategy"], drafted["strategy"]) == ("ar", "dflow")
    assert (plain["same_as_ar"], drafted["same_as_ar"]) == (None, 1)
    texts = [run["results"][0]["outputs"][0]["text"] for run in data["runs"]]
    assert texts[0] == texts[1]
    assert len(texts[0].split()) == 12
    assert drafted["results"][0]["prompt"] == PROMPT
    assert {"tau_accepted", "tau_emitted", "rounds"} <= drafted["results"][0]["outputs"][0]["stats"].keys()


def test_generate_takes_strategies_in_order(dflow: Run, bundle: Path) -> None:
    flags = ["--strategy", "dflow-norelay", "--strategy", "dflash", "--strategy", "dflow", "--compare-ar"]
    data = dflow("generate", bundle, "-p", PROMPT, "--json", *flags, *SHORT).json
    assert [run["strategy"] for run in data["runs"]] == ["ar", "dflow-norelay", "dflash", "dflow"]
    assert [run["same_as_ar"] for run in data["runs"]] == [None, 1, 1, 1]


def test_compare_ar_shows_texts_side_by_side(dflow: Run, bundle: Path) -> None:
    prompts = [part for i in range(5) for part in ("-p", f"w{i} w{i + 1}")]
    result = dflow("generate", bundle, *prompts, "--compare-ar", *SHORT)
    assert result.code == 0
    lines = result.stdout.split("\n")
    assert lines[1].split() == ["ar", "dflow"]
    shown = [line for line in lines if "the same 12 tokens in " in line]
    assert [line.split("the same")[0].strip() for line in shown] == ["w0 w1", "w1 w2", "w2 w3"]
    assert any("and 2 more prompts" in line for line in lines)
    rows = {line.split()[0]: line.split() for line in lines if line.strip().startswith(("ar ", "dflow "))}
    assert rows["dflow"][-1] == "5/5"
    text = lines[lines.index(shown[0]) + 1]
    left, right = text[: len(text) // 2].split(), text[len(text) // 2 :].split()
    assert left == right
    assert left


def test_compare_ar_fails_where_tokens_differ(dflow: Run, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "_num_same", lambda baseline, outputs: 0)
    result = dflow("generate", bundle, "-p", PROMPT, "--compare-ar", "--quiet", *SHORT)
    assert result.code == 1
    assert result.stderr.startswith("error: strategy dflow: 1 of 1 sequences differ from ar")


def test_quiet_prints_the_table_alone(dflow: Run, bundle: Path) -> None:
    result = dflow("generate", bundle, "-p", PROMPT, "--compare-ar", "--quiet", *SHORT)
    assert result.code == 0
    rows = [line.split()[0].strip("─") for line in result.stdout.split("\n") if line.strip()]
    assert rows == ["strategy", "", "ar", "dflow"]


def test_stream_prints_the_text_of_generate(dflow: Run, bundle: Path) -> None:
    whole = dflow("generate", bundle, "-p", PROMPT, "--json", *SHORT).json["runs"][0]["results"]
    result = dflow("generate", bundle, "-p", PROMPT, "--stream", *SHORT)
    assert result.stdout.split("\n") == [whole[0]["outputs"][0]["text"], ""]


def test_stream_says_which_of_several_prompts_a_text_belongs_to(dflow: Run, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "w4"}\n{"prompt_token_ids": [7, 8]}\n')
    prompts = ("generate", bundle, "-p", "w1\nw2", "--prompts", tmp_path / "p.jsonl", *SHORT)
    texts = [entry["outputs"][0]["text"] for entry in dflow(*prompts, "--json").json["runs"][0]["results"]]
    titles = ("[1/3] w1 w2", "[2/3] w4", "[3/3] prompt of 2 tokens")
    lines = [line for pair in zip(titles, texts, strict=True) for line in pair]
    assert dflow(*prompts, "--stream").stdout.split("\n") == [*lines, ""]


def test_without_tokenizer_token_ids_are_printed(dflow: Run, models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "target", tmp_path / "target")
    (tmp_path / "target" / "tokenizer.json").unlink()
    bundle = tmp_path / "b"
    dflow(
        "build",
        "--target",
        tmp_path / "target",
        "--drafter",
        models / "flow",
        "--output",
        bundle,
        "--self-check",
        "off",
    )
    refused(dflow("generate", bundle, "-p", PROMPT), "no tokenizer")
    (tmp_path / "ids.jsonl").write_text('{"prompt_token_ids": [1, 2, 3]}\n')
    base = ["generate", bundle, "--prompts", tmp_path / "ids.jsonl", *SHORT]
    ids = dflow(*base, "--json").json["runs"][0]["results"][0]["outputs"][0]["token_ids"]
    shown = " ".join(map(str, ids))
    assert len(ids) == 12
    assert shown in dflow(*base).stdout
    assert shown in dflow(*base, "--stream").stdout
    assert " ".join(map(str, ids[:8])) in dflow(*base, "--compare-ar").stdout


def test_limit_and_repeated_prompts_keep_their_order(dflow: Run, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('\ufeff{"prompt": "w4", "id": 7}\n{"prompt": "w5"}\n{"prompt": "w6"}\n\n')
    base = ["generate", bundle, "-p", "w1", "-p", "w2", "--prompts", tmp_path / "p.jsonl", "--json", *SHORT]

    def prompts(*more: str) -> list[str]:
        return [entry["prompt"] for entry in dflow(*base, *more).json["runs"][0]["results"]]

    assert prompts() == ["w1", "w2", "w4", "w5", "w6"]
    assert prompts("--limit", "3") == ["w1", "w2", "w4"]


@pytest.mark.parametrize("text", ["你好，世界", "🙂🚀 é", "[bold]w1[/bold] [/x]", "w1\nw2"])
def test_prompts_of_all_kinds_are_shown_as_they_are(dflow: Run, bundle: Path, text: str) -> None:
    result = dflow("generate", bundle, "-p", text, "--json", *SHORT)
    assert result.json["runs"][0]["results"][0]["prompt"] == text
    shown = dflow("generate", bundle, "-p", text, *SHORT)
    assert shown.code == 0
    assert shown.stdout.startswith(text)
    compared = dflow("generate", bundle, "-p", text, "--compare-ar", *SHORT)
    assert compared.code == 0
    assert " ".join(text.split()) in compared.stdout


LINES = [
    ("", "holds no prompt"),
    ("\n \n", "holds no prompt"),
    ("not json", "line 1: no JSON"),
    ('{"prompt": "w1"}\n{"prompt": ', "line 2: no JSON"),
    ('{"prompt": "w1"}\n\n{"prompt": "w1"}', "line 2: empty; remove the line, or write a prompt there"),
    ('{"prompt": "w1"}\n[]', "line 2: needs exactly one of prompt, messages, prompt_token_ids"),
    ('"w1"', "line 1: needs exactly one of"),
    ("null", "line 1: needs exactly one of"),
    ('{"text": "w1"}', "line 1: needs exactly one of"),
    ('{"prompt": "w1", "messages": []}', "line 1: needs exactly one of"),
    ('{"prompt": 5}', "line 1: prompt is 5; allowed: a text"),
    ('{"prompt": null}', "line 1: prompt is null"),
    ('{"prompt_token_ids": "1 2"}', 'line 1: prompt_token_ids is "1 2"; allowed: a list of token ids'),
    ('{"prompt_token_ids": [1, "2"]}', "line 1: prompt_token_ids"),
    ('{"prompt_token_ids": [true]}', "line 1: prompt_token_ids"),
    ('{"prompt_token_ids": []}', "line 1: prompt_token_ids"),
    ('{"messages": "w1"}', "line 1: messages"),
    ('{"messages": [{"content": "w1"}]}', "line 1: messages"),
    ('{"prompt_token_ids": [99999]}', "99999"),
    ('{"prompt_token_ids": [-1]}', "-1"),
    ("[" * 20_000, "line 1: no JSON"),
]


@pytest.mark.parametrize(("content", "message"), LINES)
def test_prompt_files_are_refused_by_line(dflow: Run, bundle: Path, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    refused(dflow("generate", bundle, "--prompts", tmp_path / "p.jsonl"), message)


def test_prompt_files_that_cannot_be_read(dflow: Run, bundle: Path, tmp_path: Path) -> None:
    refused(dflow("generate", bundle, "--prompts", tmp_path / "none.jsonl"), "none.jsonl: No such file")
    refused(dflow("generate", bundle, "--prompts", tmp_path), "Is a directory")
    (tmp_path / "latin").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    refused(dflow("generate", bundle, "--prompts", tmp_path / "latin"), "not UTF-8 text")


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--strategy", "dflow2"], ["'dflow2'", "ar, dflash, dflow, dflow-norelay"]),
        (["--temperature", "-1"], ["temperature", "-1"]),
        (["--temperature", "nan"], ["temperature"]),
        (["--top-p", "1.5"], ["top_p", "1.5"]),
        (["--top-k", "-5"], ["top_k", "-5"]),
        (["--min-p", "2"], ["min_p", "2"]),
        (["--max-tokens", "0"], ["max_tokens", "0"]),
        (["--n", "0"], ["n is 0"]),
        (["--min-tokens", "500"], ["min_tokens", "500"]),
        (["--repetition-penalty", "0"], ["repetition_penalty"]),
        (["--presence-penalty", "9"], ["presence_penalty"]),
        (["--logprobs", "-3"], ["logprobs"]),
        (["--stop-token-id", "-1"], ["stop_token_ids"]),
        (["--stop", ""], ["stop"]),
        (["--logit-bias", "x"], ["--logit-bias: 'x'", "ID=BIAS"]),
        (["--logit-bias", "999999=1"], ["logit_bias", "999999"]),
        (["--logit-bias", "1=nan"], ["logit_bias"]),
        (["--draft-tokens", "-1"], ["draft_tokens"]),
        (["--batch-size", "99"], ["max_batch_size: 99"]),
        (["--chat"], ["chat template"]),
        (["--stream", "--json"], ["--stream"]),
        (["--stream", "--compare-ar"], ["--stream"]),
    ],
)
def test_generate_refuses_by_name(dflow: Run, bundle: Path, flags: list[str], parts: list[str]) -> None:
    refused(dflow("generate", bundle, "-p", PROMPT, *flags), *parts)


@pytest.mark.parametrize("flags", [["--limit", "0"], ["--threads", "0"], ["--top-k", "many"], ["--top", "1"]])
def test_generate_usage_errors(dflow: Run, bundle: Path, flags: list[str]) -> None:
    refused(dflow("generate", bundle, "-p", PROMPT, *flags), code=2)


def test_generate_without_prompt_or_bundle(dflow: Run, bundle: Path, tmp_path: Path) -> None:
    refused(dflow("generate", bundle), "no prompt; give -p TEXT or --prompts FILE.jsonl")
    refused(dflow("generate", tmp_path, "-p", PROMPT), "not a bundle")
    refused(dflow("generate", bundle, "-p", ""), "prompt")


def test_a_prompt_that_is_too_long_is_refused(dflow: Run, bundle: Path) -> None:
    refused(dflow("generate", bundle, "-p", " ".join(["w1"] * 1025)), "1025", "1024")


# -- terminals, pipes, signals -----------------------------------------------------------------------------------------


def launch(*arguments: Any, **settings: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MAIN, *map(str, arguments)]
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **settings}
    return subprocess.Popen(command, text=True, **settings)


def test_a_file_or_pipe_gets_whole_tables(bundle: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    long = ["--strategy", "dflow-norelay", "--compare-ar", *SHORT]
    with (tmp_path / "out.txt").open("w") as file:
        assert launch("generate", bundle, "-p", PROMPT, *long, stdout=file, env=environment).wait() == 0
        assert launch("inspect", bundle, stdout=file, env=environment).wait() == 0
    text = (tmp_path / "out.txt").read_text()
    assert "dflow-norelay" in text
    assert "…" not in text
    assert "\x1b" not in text
    relay = next(line for line in text.split("\n") if "dflow.relay " in line and "pending_h" in line)
    assert "reject_id[B]" in relay


def test_a_narrow_terminal_still_gets_readable_headers(bundle: Path) -> None:
    long = ["--strategy", "dflow-norelay", "--compare-ar", "--quiet", *SHORT]
    process = launch("generate", bundle, "-p", PROMPT, *long, env={**os.environ, "COLUMNS": "80"})
    stdout, _ = process.communicate()
    assert max(map(len, stdout.split("\n"))) <= 80
    assert "…" not in stdout
    for name in ("strategy", "tokens", "passes", "tau", "kept", "tok/s", "speed-up", "same", "dflow-norelay"):
        assert name in stdout


@pytest.mark.parametrize("command", [["inspect"], ["inspect", "--json"], ["generate", "-p", PROMPT, "--stream"]])
def test_a_closed_pipe_is_no_error_message(bundle: Path, command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = launch(command[0], bundle, *command[1:], stdout=writer)
    os.close(writer)
    _, stderr = process.communicate(timeout=60)
    assert stderr == ""
    assert process.returncode != 0


def test_closed_standard_output_is_no_traceback(bundle: Path) -> None:
    shell = '"$0" -c "$1" inspect "$2" >&-'
    done = subprocess.run(["bash", "-c", shell, sys.executable, MAIN, str(bundle)], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_leaves_early(bundle: Path) -> None:
    """As `dflow-trt generate ... --stream | head -1`."""
    prompts = [part for i in range(200) for part in ("-p", f"w{i} w3")]
    process = launch("generate", bundle, *prompts, "--stream", "--ignore-eos", "--max-tokens", "200", "--threads", "1")
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "[1/200] w0 w3\n"
    assert process.stdout.readline().startswith("w")
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) != 0


def test_ctrl_c_while_generating(bundle: Path) -> None:
    prompts = [part for i in range(200) for part in ("-p", f"w{i} w3")]
    process = launch("generate", bundle, *prompts, "--stream", "--ignore-eos", "--max-tokens", "500", "--threads", "1")
    assert process.stdout is not None
    assert process.stdout.readline() == "[1/200] w0 w3\n"
    assert process.stdout.read(1) == "w"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.strip() == "interrupted"


INTERRUPTING = """
import os, signal, sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[-1]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
interrupts = Interrupts()
sys.meta_path.insert(0, interrupts)
"""


@pytest.mark.parametrize(
    "module", ["click", "dflow_trt.cli.build", "dflow_trt.console", "numpy", "numpy.linalg", "onnx"]
)
def test_ctrl_c_while_modules_are_imported(tmp_path: Path, module: str) -> None:
    command = [sys.executable, "-c", INTERRUPTING + MAIN, "build", "--target", tmp_path, "--output", tmp_path / module]
    done = subprocess.run(list(map(str, [*command, "--drafter", module])), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_whoever_ignores_ctrl_c_ignores_it_while_modules_are_imported(tmp_path: Path) -> None:
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    command = [sys.executable, "-c", ignoring + INTERRUPTING + MAIN, "inspect", "numpy"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: numpy: ")


def test_progress_stays_out_of_json(models: Path, tmp_path: Path) -> None:
    """Even in a terminal: standard output is JSON, bars and notes go to standard error."""
    arguments = ["build", "--target", models / "target", "--output", tmp_path / "b", "--json", "--self-check", "full"]
    environment = {**os.environ, "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "TERM": "xterm"}
    stdout, stderr = launch(*arguments, env=environment).communicate(timeout=120)
    assert json.loads(stdout)["strategies"] == ["ar"]
    assert "weights" in stderr


# -- example -----------------------------------------------------------------------------------------------------------

NEEDS_DATA = pytest.mark.skipif(
    not (Path(example.__file__).parent / example.DATA).is_dir(), reason="this checkout has no example data"
)


@NEEDS_DATA
def test_example_writes_what_build_takes(dflow: Run, tmp_path: Path) -> None:
    result = dflow("example", tmp_path / "demo")
    assert result.code == 0
    head, following = result.stdout.strip().split("\n")
    assert head == f"{tmp_path / 'demo'}: dflash, dflow, draft-model, eagle3, prompts.jsonl, target"
    assert following.startswith("next: dflow-trt build --target ")
    built = dflow(*following.removeprefix("next: dflow-trt ").split())
    assert built.code == 0, built.stderr
    bundle = tmp_path / "demo" / "bundle"
    flags = ["--prompts", tmp_path / "demo" / "prompts.jsonl", "--limit", "4", "--max-tokens", "48", "--compare-ar"]
    runs = dflow("generate", bundle, *flags, "--strategy", "dflash", "--strategy", "dflow", "--json").json["runs"]
    assert [run["same_as_ar"] for run in runs] == [None, 4, 4]
    assert all(run["tau_accepted"] > 0 for run in runs[1:])  # how good the drafts are is not the point here


@NEEDS_DATA
def test_example_replaces_nothing(dflow: Run, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "mine").write_text("x")
    refused(dflow("example", tmp_path), "exists already; choose another folder")
    assert os.listdir(tmp_path) == ["target"]
    refused(dflow("example", tmp_path / "target" / "mine"), code=2)


def test_example_without_data_is_one_line(dflow: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "DATA", "no_such_data")
    refused(dflow("example", tmp_path / "demo"), "no example data")
    assert not (tmp_path / "demo").exists()
