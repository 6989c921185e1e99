"""The Python API used wrongly, across threads, after the end, or while its bundle changes underneath."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pairs import VOCAB, Pair

from dflow_trt import LLM, SamplingParams, UserError
from dflow_trt.bundle import open_bundle
from dflow_trt.runtime.ort import OrtRuntime

PROMPT = {"prompt_token_ids": [3, 4, 5]}


@pytest.fixture
def llm(plain: Pair) -> Iterator[LLM]:
    with LLM(plain.bundle, threads=1) as opened:
        yield opened


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"prompts": None}, "prompts: NoneType"),
        ({"prompts": 3}, "prompts: int"),
        ({"prompts": [{"prompt_token_ids": 3}]}, "prompt 0: prompt_token_ids is int"),
        ({"prompts": [{"prompt_token_ids": None}]}, "prompt 0: prompt_token_ids is NoneType"),
        ({"prompts": [{"prompt_token_ids": [3, "x"]}]}, "prompt 0: prompt token 'x'"),
        ({"prompts": [{3: 4, "x": 5}]}, "prompt 0: ['3', 'x']"),
        ({"prompts": [PROMPT, {"prompt_token_ids": []}]}, "prompt 1: the prompt is empty"),
        ({"prompts": PROMPT, "strategy": [["x"]]}, "has no ['x']"),
        ({"prompts": PROMPT, "strategy": ""}, "has no ''"),
        ({"prompts": PROMPT, "draft_tokens": "3"}, "draft_tokens: '3'"),
        ({"prompts": PROMPT, "draft_tokens": math.nan}, "draft_tokens: nan"),
        ({"prompts": PROMPT, "draft_tokens": -1}, "draft_tokens: -1"),
    ],
    ids=str,
)
def test_a_wrong_call_is_one_line(llm: LLM, call: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        llm.generate(**call)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_repr_says_what_is_open(llm: LLM) -> None:
    offered = ", ".join(llm.bundle.strategies)
    assert repr(llm) == f"<LLM {llm.bundle.path}: onnxruntime float32, strategies {offered}>"
    llm.close()
    assert repr(llm).endswith(f"strategies {offered}, closed>")


@pytest.mark.parametrize("threads", [0, -1, 99999, "2", 1.5])
def test_threads_that_make_no_sense(plain: Pair, threads: Any) -> None:
    with pytest.raises(UserError, match=r"threads: .*; allowed: 1 to"):
        LLM(plain.bundle, threads=threads)


@pytest.mark.parametrize("size", [0, 9, "2", 1.5, True])
def test_batch_sizes_that_the_bundle_has_not(plain: Pair, size: Any) -> None:
    with pytest.raises(UserError, match=r"max_batch_size: .*; allowed: 1 to 8"):
        LLM(plain.bundle, threads=1, max_batch_size=size)


def test_numpy_ids_come_back_as_plain_integers(llm: LLM) -> None:
    [output] = llm.generate({"prompt_token_ids": np.array([3, 4, 5])}, SamplingParams(max_tokens=2))
    assert json.dumps([output.prompt_token_ids, output.token_ids])


def test_an_error_of_one_request_leaves_the_others(llm: LLM) -> None:
    banned = SamplingParams(logit_bias=dict.fromkeys(range(VOCAB), -math.inf))
    failed, fine = llm.generate([PROMPT, PROMPT], [banned, SamplingParams(max_tokens=3, ignore_eos=True)])
    assert failed.finish_reason == "error"
    assert failed.outputs[0].error
    assert (fine.finish_reason, len(fine.token_ids)) == ("length", 3)


def test_a_closed_llm_says_so(plain: Pair) -> None:
    llm = LLM(plain.bundle, threads=1)
    stream = llm.generate_stream(PROMPT, SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    llm.close()
    for use in (lambda: next(stream), lambda: llm.generate(PROMPT)):
        with pytest.raises(UserError, match="was closed"):
            use()


def test_closing_while_another_thread_generates_waits_for_its_round_and_ends_it(plain: Pair) -> None:
    for _ in range(10):
        llm, found = LLM(plain.bundle, threads=1), []
        started = threading.Event()

        def work(llm: LLM = llm, found: list[str] = found, started: threading.Event = started) -> None:
            try:
                for _ in llm.generate_stream([PROMPT] * 8, SamplingParams(max_tokens=150, ignore_eos=True)):
                    started.set()
            except UserError as error:
                found.append(str(error))

        worker = threading.Thread(target=work)
        worker.start()
        assert started.wait(30)
        llm.close()
        worker.join(timeout=30)
        assert len(found) == 1
        assert "was closed" in found[0]


def test_a_stream_read_on_by_another_thread_does_not_block_it(llm: LLM) -> None:
    stream = llm.generate_stream(PROMPT, SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    found: list[Any] = []

    def read_on() -> None:
        next(stream)
        try:
            llm.generate(PROMPT)
        except UserError as error:
            found.append(str(error))

    reader = threading.Thread(target=read_on, daemon=True)
    reader.start()
    reader.join(timeout=60)
    assert not reader.is_alive()
    assert "a stream of this LLM is open in this thread" in found[0]


def test_a_cancelled_request_ends_and_the_others_go_on(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    reasons: dict[int, str] = {}
    for piece in llm.generate_stream([PROMPT, PROMPT], params):
        if piece.prompt_index == 0 and not reasons:
            llm.cancel(piece.request_id)
        if piece.finish_reason:
            reasons[piece.prompt_index] = piece.finish_reason
    assert reasons == {0: "cancelled", 1: "length"}


def test_a_bundle_replaced_while_it_is_opened_is_refused(plain: Pair, tmp_path: Path) -> None:
    shutil.copytree(plain.bundle.path, tmp_path / "bundle")
    opened = open_bundle(tmp_path / "bundle")
    manifest = tmp_path / "bundle" / "dflow.json"
    data = json.loads(manifest.read_text())
    data["built_with"]["date"] = "another day"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflow_trt.bundle._seal", lambda data: data["seal"])
        manifest.write_text(json.dumps(data))
        with pytest.raises(UserError, match="was replaced while it was being opened"):
            LLM(opened, threads=1)


@pytest.mark.parametrize("value", [0, -1, 4])
def test_limits_edited_by_hand_are_refused(plain: Pair, tmp_path: Path, value: int) -> None:
    shutil.copytree(plain.bundle.path, tmp_path / "bundle")
    manifest = tmp_path / "bundle" / "dflow.json"
    data = json.loads(manifest.read_text())
    data["build"]["max_batch_size"] = value
    data["drafters"] = {}
    manifest.write_text(json.dumps(data))
    with pytest.raises(UserError, match="changed since the bundle was built"):
        open_bundle(tmp_path / "bundle")


def test_a_link_out_of_the_bundle_is_refused(plain: Pair, tmp_path: Path) -> None:
    shutil.copytree(plain.bundle.path, tmp_path / "bundle")
    shutil.move(tmp_path / "bundle" / "vocab.data", tmp_path / "elsewhere")
    (tmp_path / "bundle" / "vocab.data").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"'vocab\.data' is outside the bundle"):
        open_bundle(tmp_path / "bundle")


def test_threads_of_an_engine_rest_while_another_works(plain: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr("dflow_trt.runtime.ort._session", lambda bundle, key, options: made.append(options))
    OrtRuntime(plain.bundle, threads=2)
    assert len(made) == len(list(plain.bundle.contracts()))
    assert {options.get_session_config_entry("session.force_spinning_stop") for options in made} == {"1"}


def shipped(folder: Path, name: str, way: str) -> tuple[np.ndarray, np.ndarray]:
    """Rounds and emitted tokens of each held-out prompt, as the shipped drafter's training counted them."""
    record = json.loads((folder / name / "training.json").read_text())
    rounds, emitted, _ = np.array(record["held_out"][way]).T
    return rounds, emitted


def bootstrap(rounds: np.ndarray, emitted: np.ndarray) -> tuple[float, float]:
    """99 % of tau over resampled prompts."""
    chosen = np.random.default_rng(0).integers(0, len(rounds), (2000, len(rounds)))
    low, high = np.quantile(emitted[chosen].sum(1) / rounds[chosen].sum(1), [0.005, 0.995])
    return float(low), float(high)


def test_the_shipped_pair_keeps_its_tau_and_its_relay_pays(
    example: Pair, example_folder: Path, example_prompts: list[dict[str, Any]]
) -> None:
    with LLM(example.bundle, threads=1) as llm:
        params, tau = SamplingParams(max_tokens=160), {}
        for strategy in ("dflow", "dflow-norelay", "dflash"):
            stats = [output.stats for output in llm.generate(example_prompts[:60], params, strategy=strategy)]
            tau[strategy] = sum(s.emitted for s in stats) / sum(s.rounds for s in stats)
    for strategy, way in (("dflow", "greedy"), ("dflow-norelay", "relay_off"), ("dflash", "greedy")):
        rounds, emitted = shipped(example_folder, strategy.removesuffix("-norelay"), way)
        low, high = bootstrap(rounds[:60], emitted[:60])
        assert low <= tau[strategy] <= high, strategy
    assert tau["dflow"] >= 3.5
    assert tau["dflow"] > tau["dflow-norelay"]
    assert tau["dflow"] > tau["dflash"]
