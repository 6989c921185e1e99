"""`dflow-trt plan` and `dflow-trt export-trtllm` as people and scripts meet them."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import make_drafter, make_target

from dflow_trt import cli, console

Run = Callable[..., str]


@pytest.fixture
def dflow(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The console script in this process: its standard output, or, of a refusal, the one line on standard error."""
    monkeypatch.setattr(console.out, "width", console.PLAIN_WIDTH)  # as in a file, whatever the environment

    def run(*arguments: object, fails: bool = False) -> str:
        monkeypatch.setattr(sys, "argv", ["dflow-trt", *map(str, arguments)])
        handler, code = signal.getsignal(signal.SIGTERM), 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(str(end.code))
        finally:
            signal.signal(signal.SIGTERM, handler)
        out, err = capsys.readouterr()
        assert code == (1 if fails else 0), err
        if fails:
            assert out == ""
            assert err.startswith("error: ")
            assert err.count("\n") == 1
        return err if fails else out

    return run


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target, flow with a relay, and flash whose taps are not ascending."""
    folder = tmp_path_factory.mktemp("models")
    config = make_target(folder / "target", max_position_embeddings=4096, dtype="bfloat16")
    make_drafter(folder / "flow", config, relay=True, dtype="bfloat16")
    make_drafter(folder / "flash", config, taps=(1, 0), dtype="bfloat16")
    return folder


def test_plan_prints_what_a_pair_needs_and_what_fits(dflow: Run, models: Path) -> None:
    text = dflow("plan", models / "target", models / "flow", models / "flash", "--gpu-memory", "64MiB")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    assert lines[0] == (
        "tensorrt bfloat16  weights: target float, drafters float; batch 8, sequence 2048, tokens a pass 256"
    )
    assert lines[1].split() == ["memory", "size", "a", "request", "a", "token"]
    names = ("target weights", "drafter weights", "vocabulary tables", "target KV", "drafter KV", "relay state")
    for name in (*names, "hidden states and logits", "workspace (estimate)", "in all"):
        assert any(line.startswith(name) for line in lines), name
    assert any(line.startswith("60.4 MB (0.9 of 67.1 MB): fits, ") for line in lines)
    assert any(line.startswith("largest batch for sequences of 2048: ") for line in lines)
    assert any(line.startswith("longest sequence for a batch of 8: ") for line in lines)
    assert ["batch", "1024", "2048", "4096"] in [line.split() for line in lines]


def test_plan_without_a_memory_size_prints_the_sums_alone(dflow: Run, models: Path) -> None:
    text = dflow("plan", models / "target")
    assert "in all" in text
    assert "largest batch" not in text


def test_plan_says_when_what_was_asked_does_not_fit(dflow: Run, models: Path) -> None:
    asked = ("plan", models / "target", models / "flow", "--gpu_memory", "16MB", "--max_batch_size", "1024")
    assert " (0.9 of 16.0 MB): does not fit, " in dflow(*asked)
    assert "longest sequence for a batch of 1024: none fits" in dflow(*asked)


def test_plan_gives_json(dflow: Run, models: Path) -> None:
    pair = (models / "target", f"mine={models / 'flow'}")
    limits = ("--max-batch-size", 2, "--max_seq_len", 512, "--memory-fraction", 0.5)
    data = json.loads(dflow("plan", *pair, "--backend", "onnxruntime", "--gpu-memory", "1GB", *limits, "--json"))
    built = tuple(data["build"][name] for name in ("backend", "dtype", "draft_weights"))
    assert built == ("onnxruntime", "float32", "int8")
    assert (data["build"]["max_batch_size"], data["build"]["max_seq_len"]) == (2, 512)
    assert data["memory"]["total"] > data["memory"]["weights"] > 0
    assert data["fit"]["budget"] == 500_000_000
    assert {"max_batch_size": 2, "max_seq_len": 512} in [
        {name: cell[name] for name in ("max_batch_size", "max_seq_len")} for row in data["fit"]["table"] for cell in row
    ]
    assert json.loads(dflow("plan", *pair, "--json"))["fit"] is None


def test_plan_refuses_in_one_line(dflow: Run, models: Path) -> None:
    target, flow = models / "target", models / "flow"
    for arguments, reason in (
        ((target, "--gpu-memory", "lots"), "--gpu-memory: 'lots'; allowed: bytes, or a number with its unit"),
        ((target, "--gpu-memory", "100kB"), "--gpu-memory: weights alone take "),
        ((target, "--memory-fraction", "2"), "--memory-fraction: 2; allowed: above 0, at most 1"),
        ((target, "--max-seq-len", "5000"), "--max-seq-len: 5000; allowed: 2 to 4096"),
        ((target, flow, flow), "two drafters are called 'dflow'"),
        ((target, "--backend", "onnxruntime", "--dtype", "float16"), "--dtype: float16 does not run on onnxruntime"),
        ((models, flow), "config.json"),
    ):
        assert reason in dflow("plan", *arguments, fails=True)


@pytest.mark.parametrize("flag", ["--target-weights", "--draft-weights"])
@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_plan_refuses_what_build_refuses(dflow: Run, models: Path, tmp_path: Path, backend: str, flag: str) -> None:
    options = ("--backend", backend, flag, "int8")
    pair = ("--target", models / "target", "--drafter", models / "flow", "--output", tmp_path / "out")
    refusal = dflow("build", *pair, *options, fails=True)
    assert refusal.startswith(f"error: {flag}: int8 ")
    assert dflow("plan", models / "target", models / "flow", *options, fails=True) == refusal


def test_export_says_what_it_wrote_and_what_lies_apart(dflow: Run, models: Path, tmp_path: Path) -> None:
    asked = ("export-trtllm", "--target", models / "target", "--drafter", models / "flow", "--output", tmp_path / "out")
    written, note = dflow(*asked, "--max_batch_size", 4).splitlines()
    assert written.startswith(f"{tmp_path / 'out'}: README.md, drafter/config.json, drafter/model.safetensors, relay/")
    assert note == "note: relay/: TensorRT-LLM has no relay; DFlash there is what dflow-norelay is here"
    assert "holds an export already; give --force" in dflow(*asked, fails=True)
    data = json.loads(dflow(*asked, "--force", "--json", "--trtllm_version", "1.4.0"))
    assert data["path"] == str(tmp_path / "out")
    assert "trtllm-serve.yaml" in data["files"]
    assert "max_batch_size" not in (tmp_path / "out" / "trtllm-serve.yaml").read_text()


def test_export_refuses_in_one_line(dflow: Run, models: Path, tmp_path: Path) -> None:
    asked = ("export-trtllm", "--target", models / "target", "--output", tmp_path / "out", "--drafter")
    for arguments, reason in (
        ((models / "flash",), "drafter: target_layer_ids [1, 0]; allowed for TensorRT-LLM: ascending ids, as [0, 1]"),
        ((models / "flow", "--trtllm-version", "1.2.1"), "--trtllm-version: 1.2.1 has no DFlash, it came with 1.3"),
        ((models / "flow", "--max-num-tokens", "-1"), "--max-num-tokens: -1; allowed: at least 1"),
        ((models / "target",), "architectures"),
    ):
        assert reason in dflow(*asked, *arguments, fails=True)
    assert list(tmp_path.iterdir()) == []
