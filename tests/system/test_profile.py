"""``dflow-trt profile`` as people and scripts meet it, on the example pair; its report in a real browser."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from browser import chromium, show
from pairs import Pair
from selenium import webdriver
from selenium.webdriver.common.by import By

from dflow_trt import cli, console
from dflow_trt.profiling.measure import LocalDriver
from dflow_trt.profiling.record import Profile, read_record

QUICK = ("--threads", "1", "--requests", "3", "--repetitions", "2", "--max-tokens", "24", "--no-roofline")
STRATEGIES = ["ar", "dflash", "dflow", "dflow-norelay"]
STAGES = {"relay", "draft", "verify", "context", "sampling", "host"}


@dataclass
class Output:
    code: int
    out: str
    err: str

    @property
    def record(self) -> Profile:
        assert self.code == 0, self.err
        return Profile.model_validate_json(self.out)


Run = Callable[..., Output]


def main(arguments: tuple[Any, ...]) -> int:
    sys.argv = ["dflow-trt", *map(str, arguments)]
    handler = signal.getsignal(signal.SIGTERM)
    try:
        cli.main()
    except SystemExit as end:
        return int(str(end.code))
    finally:
        signal.signal(signal.SIGTERM, handler)
    return 0


@pytest.fixture
def dflow(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The console script in this process."""
    monkeypatch.setattr(console.out, "width", console.PLAIN_WIDTH)
    monkeypatch.setattr(sys, "argv", sys.argv)

    def run(*arguments: Any) -> Output:
        code = main(arguments)
        captured = capsys.readouterr()
        return Output(code, captured.out, captured.err)

    return run


def refused(output: Output, *parts: str, code: int = 1) -> None:
    """One line on standard error that names the parts."""
    assert output.code == code, output
    lines = output.err.strip().split("\n")
    assert len(lines) == 1, output.err
    assert lines[0].startswith("error: ")
    for part in parts:
        assert part in lines[0]


@pytest.fixture(scope="module")
def bundle(block_example: Pair) -> Path:
    return block_example.bundle.path


@pytest.fixture(scope="module")
def profiled(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of ``--output`` with everything in it: two loads, prices, bounds, the roofline."""
    folder = tmp_path_factory.mktemp("profile") / "out"
    options = ("--threads", "1", "--requests", "7", "--repetitions", "2", "--max-tokens", "24", "--concurrency", "1,2")
    prices = ("--price-per-hour", "0.5", "--hosted-price", "0.4", "--ttft-bound", "1000", "--tpot-bound", "1000")
    kept = sys.argv
    try:
        assert main(("profile", bundle, *options, *prices, "--output", folder)) == 0
    finally:
        sys.argv = kept
    return folder


# -- what it measures --------------------------------------------------------------------------------------------------


def test_the_record_has_every_strategy_with_its_figures(profiled: Path) -> None:
    record = read_record(profiled)
    assert [(each.point.strategy, each.point.concurrency) for each in record.results] == [
        (strategy, concurrency) for concurrency in (1, 2) for strategy in STRATEGIES
    ]
    for result in record.results:
        plain = result.point.strategy == "ar"
        assert (result.requests, result.failed, result.compared, result.same) == (14, 0, 14, 14)
        assert result.total.tau_emitted == pytest.approx((result.total.tau_accepted or 0) + 1)
        assert (result.total.tau_emitted == 1) == plain
        assert result.total.drafted_at == ([] if plain else result.total.drafted_at)
        assert result.throughput.output_tokens == sum(turn.tokens for turn in result.turns)
        assert result.latency.itl.n == result.throughput.output_tokens - 14
        assert result.goodput is not None
        assert result.goodput.requests == 14
        assert result.stages is not None
        assert set(result.stages.milliseconds) == ({"verify", "sampling", "host"} if plain else STAGES)
        assert (result.speedup is None) == plain
    tau = {each.point.strategy: each.total.tau_emitted or 0 for each in record.results[:4]}
    assert tau["dflow"] > tau["dflow-norelay"] > 1.5, "the relay pays"
    assert {counts.task for counts in record.results[0].by_task} > {"sums", "products"}


def test_what_follows_from_it_is_there(profiled: Path) -> None:
    record = read_record(profiled)
    assert {(each.strategy, each.batch) for each in record.advice} == {(s, b) for s in STRATEGIES[1:] for b in (1, 2)}
    for advice in record.advice:
        assert [each.drafts for each in advice.forecasts] == list(range(1, 8))
        assert advice.forecasts[-1].measured is not None
        assert 0 <= advice.best_drafts <= 7
    assert record.roofline is not None
    assert {(each.strategy, each.stage) for each in record.roofline.passes} >= {("ar", "verify"), ("dflow", "draft")}
    assert all(0 < each.fraction < 1.5 for each in record.roofline.passes)
    assert record.memory is not None
    assert record.memory.planned["total"] > record.memory.planned["weights"] > 0
    assert record.memory.after is not None
    assert record.memory.after > 0
    assert record.cost is not None
    assert all(row.per_million and row.busy_share for row in record.cost.rows)
    assert record.settings.threads == 1
    assert record.lossless.compared == record.lossless.same == 8 * 14


def test_files_for_other_programs(profiled: Path) -> None:
    assert {path.name for path in profiled.iterdir()} == {
        "profile.json",
        "report.html",
        "points.csv",
        "acceptance.csv",
        "requests.csv",
        "rounds.csv",
    }
    with (profiled / "requests.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8 * 14
    assert all(float(row["ttft_ms"]) > 0 for row in rows)


def test_json_is_the_record_alone(dflow: Run, bundle: Path) -> None:
    result = dflow("profile", bundle, *QUICK, "--strategy", "dflow", "--json")
    assert result.err == ""
    assert [each.point.strategy for each in result.record.results] == ["ar", "dflow"]
    assert result.record.settings.workload[0].source == "example"


def test_a_table_for_people(dflow: Run, bundle: Path) -> None:
    result = dflow("profile", bundle, *QUICK, "--strategy", "dflow")
    assert (result.code, result.err) == (0, "")
    lines = result.out.split("\n")
    header = next(line for line in lines if "decode tok/s" in line)
    assert header.split()[:5] == ["load", "strategy", "tau", "kept", "wasted"]
    assert "drafts to verify" in result.out
    assert "too few" in result.out
    assert lines[-2].startswith("lossless  all 12 sequences are ar's, token for token")


def test_random_prompts_sweeps_and_an_open_loop(dflow: Run, bundle: Path) -> None:
    sweep = ("--input-len", "16,48", "--output-len", "9", "--block-size", "4", "--draft-policy", "fixed,adaptive")
    loads = ("--rate", "200", "--temperature", "0,0.8", "--strategy", "dflash", "--warmup", "0")
    record = dflow("profile", bundle, *QUICK[:6], "--no-roofline", *sweep, *loads, "--json").record
    assert len(record.results) == 2 * 2 * 3
    assert {each.point.input_len for each in record.results} == {16, 48}
    assert {each.point.rate for each in record.results} == {200.0}
    assert {each.point.draft_tokens for each in record.results} == {None, 3}
    assert {(each.requests, each.throughput.output_tokens) for each in record.results} == {(6, 54)}
    assert record.lossless.compared == record.lossless.same == 72
    assert (record.costs, record.advice, record.settings.ignore_eos) == ([], [], True)
    assert all(len(each.total.drafted_at) <= 3 for each in record.results)


def test_prompts_of_a_file(dflow: Run, bundle: Path, tmp_path: Path) -> None:
    lines = [{"question": "13 + 17?", "answer": "#"}, {"instruction": "Work.", "output": "x"}, {"prompt": "a) 2 + 3"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags = ("--prompts", tmp_path / "p.jsonl", "--strategy", "dflow", "--json")
    record = dflow("profile", bundle, *QUICK, *flags).record
    assert [counts.task for counts in record.results[1].by_task] == ["alpaca", "gsm8k", "none"]


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_loss_fails_the_profile_after_everything_was_written(
    dflow: Run, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = LocalDriver.run

    def spoiled(self: LocalDriver, point: Any, *rest: Any) -> Any:
        run = original(self, point, *rest)
        if point.strategy == "dflow":
            run.traces[0].token_ids[3] += 1
        return run

    monkeypatch.setattr(LocalDriver, "run", spoiled)
    result = dflow("profile", bundle, *QUICK, "--strategy", "dflow", "--output", tmp_path / "out")
    refused(result, "profile: not lossless: 2 of 12 sequences differ from ar's; the first: dflow, 1 at once: ")
    record = read_record(tmp_path / "out")
    assert (record.lossless.compared, record.lossless.same) == (12, 10)
    assert "bad" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["BUNDLE", "--concurrency", "9"], ["--concurrency: 9; allowed: up to 8, which the bundle was built for"]),
        (["BUNDLE", "--concurrency", "0"], ["--concurrency: 0"]),
        (["BUNDLE", "--strategy", "domino"], ["--strategy", "'domino'", "ar, dflash, dflow, dflow-norelay"]),
        (["BUNDLE", "--draft-policy", "bold"], ["'bold'", "fixed, adaptive"]),
        (["BUNDLE", "--prompts", "/none.jsonl"], ["--prompts: /none.jsonl: No such file"]),
        (["BUNDLE", "--prompts", "PROMPTS"], ["p.jsonl line 2: no JSON"]),
        (["BUNDLE", "--example", "--input-len", "9"], ["--example and --input-len"]),
        (["BUNDLE", "--input-len", "600"], ["the prompt has 600 tokens, this bundle takes 512"]),
        (["BUNDLE", "--max-tokens", "0"], ["--max-tokens: 0"]),
        (["BUNDLE", "--max-tokens", "4", "--output-len", "4"], ["--output-len and --max-tokens"]),
        (["BUNDLE", "--block-size", "4", "--draft-tokens", "3"], ["--block-size and --draft-tokens"]),
        (["BUNDLE", "--hosted-price", "1"], ["--hosted-price", "--price-per-hour"]),
        (["BUNDLE", "--price-per-hour", "0"], ["--price-per-hour: 0"]),
        (["BUNDLE", "--output", "FOLDER"], ["--output: ", "exists", "--force"]),
        (["FOLDER"], ["not a bundle"]),
        ([], ["profile: nothing to profile", "--url"]),
        (["--url", "x"], ["--url: 'x'"]),
        (["--url", "http://x", "--threads", "1"], ["--threads: is the server's own"]),
        (["--url", "http://x", "--draft-policy", "adaptive"], ["--draft-policy: is the server's own"]),
        (["diff", "FOLDER", "FOLDER"], ["profile.json: No such file"]),
    ],
)
def test_refusals_are_one_line(
    dflow: Run, bundle: Path, tmp_path: Path, arguments: list[str], parts: list[str]
) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt"\n')
    named = {"BUNDLE": str(bundle), "PROMPTS": str(tmp_path / "p.jsonl"), "FOLDER": str(tmp_path)}
    result = dflow("profile", *(named.get(each, each) for each in arguments))
    refused(result, *parts)
    assert result.out == ""


@pytest.mark.parametrize("arguments", [["--concurrency", "1,x"], ["--rate", ""], ["--colour"], ["--seed", "-1"]])
def test_words_that_are_wrong(dflow: Run, bundle: Path, arguments: list[str]) -> None:
    refused(dflow("profile", bundle, *arguments), "(see dflow-trt profile --help)", code=2)


def test_help_names_both_commands(dflow: Run) -> None:
    assert "Usage: dflow-trt profile [OPTIONS] [BUNDLE]" in dflow("profile", "--help").out
    assert "profile diff A B" in dflow("profile", "--help").out
    assert "Usage: dflow-trt profile diff [OPTIONS] A B" in dflow("profile", "diff", "--help").out


@pytest.mark.parametrize(
    ("arguments", "extra", "missing"),
    [
        (["bundle"], "profile", "pydantic"),
        (["bundle", "--output", "out"], "profile", "pydantic, matplotlib"),
        (["--url", "http://127.0.0.1:1"], "profile,serve", "pydantic, httpx, tritonclient.grpc"),
        (["diff", "a", "b"], "profile", "pydantic"),
    ],
)
def test_a_missing_extra_is_named(arguments: list[str], extra: str, missing: str) -> None:
    names = ("pydantic", "matplotlib", "httpx", "tritonclient")
    hidden = f"import sys; sys.modules.update(dict.fromkeys({names})); from dflow_trt.cli import main; main()"
    command = [sys.executable, "-c", hidden, "profile", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert (done.returncode, done.stdout) == (1, "")
    lacks = f"error: profile: the extra {extra} is not installed (no {missing})"
    assert done.stderr == f"{lacks}; pip install '.[{extra}]' in the checkout\n"


# -- two of them -------------------------------------------------------------------------------------------------------


def test_two_profiles(dflow: Run, bundle: Path, profiled: Path, tmp_path: Path) -> None:
    flags = ("--strategy", "dflow", "--output", tmp_path / "b")
    assert dflow("profile", bundle, *QUICK, *flags).code == 0
    same = dflow("profile", "diff", tmp_path / "b", tmp_path / "b" / "profile.json")
    assert (same.code, same.err) == (0, "")
    assert "comparable: every setting is the same" in same.out
    other = dflow("profile", "diff", profiled, tmp_path / "b")
    refused(other, "profile diff: not comparable: ttft_bound: 1000.0 in A, - in B")
    assert "requests.1 at once: 7 in A, 3 in B" in other.out
    assert "only in A dflash; dflow-norelay; ar, 2 at once; dflow, 2 at once" in other.out
    data = json.loads(dflow("profile", "diff", tmp_path / "b", tmp_path / "b", "--json").out)
    assert data["comparable"] is True
    assert {change["ratio"]["value"] for change in data["changes"] if change["figure"] == "tokens/s"} == {1.0}


# -- the report --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    with chromium() as opened:
        yield opened


def luminance(colour: str) -> float:
    """Relative luminance of rgb(r, g, b), as WCAG defines it."""
    parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1280])
def test_the_report_in_a_browser(browser: webdriver.Chrome, profiled: Path, width: int, dark: bool) -> None:
    show(browser, (profiled / "report.html").as_uri(), width, dark)
    script: Callable[[str], Any] = browser.execute_script
    assert script("return document.documentElement.scrollWidth <= innerWidth"), "wide tables scroll by themselves"
    background = script("return getComputedStyle(document.body).backgroundColor")
    assert (luminance(background) < 0.2) == dark
    shown = {each.get_attribute("id") for each in browser.find_elements(By.CSS_SELECTOR, "section")}
    drawn = {"speedup", "latency", "stages", "load", "acceptance", "lengths", "roofline", "memory"}
    assert shown == drawn | {"cost", "settings"}
    drawings = browser.find_elements(By.CSS_SELECTOR, "figure svg")
    assert len(drawings) == 8
    for drawing in drawings:
        assert drawing.size["height"] > 60
        assert drawing.accessible_name
    fills = "return [...document.querySelectorAll('{} svg text')].map(e => getComputedStyle(e).fill)"
    colours, cells = set(script(fills.format("figure"))), set(script(fills.format("#acceptance")))
    assert all(contrast(colour, background) >= 4.5 for colour in colours - cells)
    texts = script("return [...document.querySelectorAll('#stages svg text')].map(e => e.textContent)")
    assert {"relay", "draft", "verify", "sampling", "host"} <= set(texts)
    assert sum(", relay " in text for text in texts) == 6
    assert "The paper's relay takes 1.2 %" in browser.find_element(By.ID, "stages").text


def test_the_report_asks_nothing_of_the_network(browser: webdriver.Chrome, profiled: Path) -> None:
    show(browser, (profiled / "report.html").as_uri(), 1280, False)
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith(("file://", "data:"))] == []
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.scripts.length") == 0  # type: ignore[no-untyped-call]


def test_plots_hold_what_the_record_says(browser: webdriver.Chrome, profiled: Path) -> None:
    show(browser, (profiled / "report.html").as_uri(), 1280, False)
    record = read_record(profiled)
    texts = browser.execute_script(  # type: ignore[no-untyped-call]
        "return [...document.querySelectorAll('#acceptance svg text')].map(e => e.textContent)"
    )
    for result in record.results[1:4]:
        assert f"{result.total.tau_emitted:.2f}" in texts
        assert result.point.strategy in texts
    assert texts.count("all") == 1, "every strategy has a panel beside the others, with the same rows"
    cards = [card.text for card in browser.find_elements(By.CSS_SELECTOR, ".cards b")]
    assert cards[-1] == f"{record.lossless.same} of {record.lossless.compared}"
    first = browser.find_elements(By.CSS_SELECTOR, "table")[1].find_elements(By.CSS_SELECTOR, "tbody tr")
    assert len(first) == len(record.results)
    summary = browser.find_element(By.CSS_SELECTOR, "#roofline summary")
    summary.click()
    rows = browser.find_elements(By.CSS_SELECTOR, "#roofline tbody tr")
    assert record.roofline is not None
    assert len(rows) == len(record.roofline.passes)
    assert rows[0].is_displayed()
