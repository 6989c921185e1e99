"""``dflow-trt profile`` of drafters of every kind, over lengths, policies and temperatures; its report has room."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from browser import chromium, show
from selenium.webdriver.common.by import By
from test_profile import QUICK, Run, dflow, main, refused
from tiny import make_eagle3

from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.profiling.record import Profile, read_record

__all__ = ["dflow"]
EXAMPLE = Path(str(files("dflow_trt") / "example_data"))
LENGTHS = {"dflow": 7, "dflow-norelay": 7, "eagle3": 3, "draft": 3, "ngram": 8}
STAGES = {"eagle3": {"draft", "context"}, "draft": {"draft"}, "ngram": set[str]()}
HOST = {"verify", "sampling", "host"}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's target as its own draft model, and a random EAGLE-3 drafter beside the others."""
    folder = tmp_path_factory.mktemp("drafters")
    make_eagle3(folder / "eagle3", json.loads((EXAMPLE / "target" / "config.json").read_text()))
    sources = [
        DrafterSource(EXAMPLE / "dflow"),
        DrafterSource(folder / "eagle3", "eagle3", {"drafts": 3}),
        DrafterSource(EXAMPLE / "target", "draft", {"drafts": 3}),
        DrafterSource(Path("ngram")),
    ]
    return build_bundle(EXAMPLE / "target", sources, folder / "bundle", BuildOptions(), self_check="off").path


@pytest.fixture(scope="module")
def profiled(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile") / "out"
    sweep = ("--draft-tokens", "2,3,9", "--draft-policy", "fixed,adaptive", "--temperature", "0,0.8")
    few = ("--threads", "1", "--requests", "2", "--repetitions", "1", "--warmup", "0", "--max-tokens", "24")
    assert main(("profile", bundle, *few, *sweep, "--concurrency", "2", "--output", folder)) == 0
    return folder


@pytest.fixture(scope="module")
def record(profiled: Path) -> Profile:
    return read_record(profiled)


def test_every_strategy_is_measured_at_the_lengths_that_it_has(record: Profile) -> None:
    for strategy, most in LENGTHS.items():
        found = {each.point.draft_tokens for each in record.results if each.point.strategy == strategy}
        assert found == ({2, None} if most == 3 else {2, 3, None}), "9 is all of them, and so is 3 of 3"
    assert record.lossless.same == record.lossless.compared == 2 * len(record.results)
    for each in record.results:
        total, point = each.total, each.point
        assert total.drafted is not None
        most = min(LENGTHS.get(point.strategy, 0), point.draft_tokens or 99)
        assert len(total.drafted_at) <= most
        if point.strategy == "draft":
            assert total.accepted == total.drafted, "its own target's words"
        if each.stages is not None and point.strategy in STAGES and point.draft_policy == "fixed":
            assert set(each.stages.milliseconds) == HOST | STAGES[point.strategy]


def test_what_pays_and_what_it_takes_is_told_of_every_kind(record: Profile) -> None:
    assert {(each.strategy, each.batch, each.temperature) for each in record.advice} == {
        (strategy, 2, temperature) for strategy in LENGTHS for temperature in (0.0, 0.8)
    }
    for each in record.advice:
        assert (each.drafts, len(each.forecasts)) == (LENGTHS[each.strategy],) * 2
    kinds = {cost.strategy: cost.kind for cost in record.costs}
    assert kinds["ar"] is None
    assert (kinds["eagle3"], kinds["draft"], kinds["ngram"]) == ("eagle3", "draft-model", "ngram")
    drafting = {
        name: [c.milliseconds.get("draft", 0.0) for c in record.costs if c.strategy == name] for name in LENGTHS
    }
    assert drafting["ngram"] == [0.0] * len(drafting["ngram"])
    assert drafting["draft"][2] > 1.5 * drafting["draft"][0], "a call a draft"
    assert record.roofline is not None
    drafted = {each.strategy for each in record.roofline.passes if each.stage == "draft"}
    assert drafted == {"dflow", "dflow-norelay", "eagle3", "draft"}
    assert record.memory is not None
    assert {name: each.weights > 0 for name, each in record.memory.drafters.items()} == {
        "dflow": True,
        "eagle3": True,
        "draft": True,
        "ngram": False,
    }


def test_another_set_of_strategies_is_compared_where_both_have_it(
    dflow: Run, bundle: Path, profiled: Path, tmp_path: Path
) -> None:
    for name, strategy in (("a", "ngram"), ("b", "draft")):
        assert dflow("profile", bundle, *QUICK, "--strategy", strategy, "--output", tmp_path / name).code == 0
    found = dflow("profile", "diff", tmp_path / "a", tmp_path / "b")
    assert (found.code, found.err) == (0, "")
    assert "only in A ngram\nonly in B draft\n" in found.out
    assert "comparable: every setting is the same" in found.out
    refused(dflow("profile", "diff", profiled, tmp_path / "a"), "not comparable")


def test_the_report_has_room_for_all_of_them(profiled: Path) -> None:
    """Every text of a plot lies within it, and every strategy has its heat map."""
    with chromium() as browser:
        show(browser, (profiled / "report.html").as_uri(), 1280, False)
        outside: Any = browser.execute_script(  # type: ignore[no-untyped-call]
            """return [...document.querySelectorAll('figure svg')].flatMap(svg => {
                const box = svg.getBoundingClientRect();
                return [...svg.querySelectorAll('text')].filter(text => {
                    const own = text.getBoundingClientRect();
                    return own.left < box.left - 3 || own.right > box.right + 3 ||
                        own.top < box.top - 3 || own.bottom > box.bottom + 3;
                }).map(text => text.textContent);
            })"""
        )
        assert outside == []
        texts = [each.text for each in browser.find_elements(By.CSS_SELECTOR, "#acceptance svg text")]
        for strategy in LENGTHS:
            assert texts.count(strategy) == texts.count(f"{strategy} T=0.8") == 1
        assert browser.get_log("browser") == []
