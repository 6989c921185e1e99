"""The record: its schema, its differences, and that tables, files and the page say what it says."""

from __future__ import annotations

import csv
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from profile_cases import DRAFTED, PLAIN, profile, result, run, trace
from rich.console import Console

from dflow_trt.errors import UserError
from dflow_trt.profiling import words
from dflow_trt.profiling.charts import MEMORY_PARTS
from dflow_trt.profiling.diff import compare, show_difference
from dflow_trt.profiling.export import write_output
from dflow_trt.profiling.measure import Run, Step
from dflow_trt.profiling.prices import cost
from dflow_trt.profiling.record import (
    SCHEMA_VERSION,
    CounterCheck,
    DrafterSizes,
    Interval,
    Lossless,
    Memory,
    Point,
    Profile,
    ServerCheck,
    read_record,
    write_record,
)
from dflow_trt.profiling.report import report
from dflow_trt.profiling.run import Result
from dflow_trt.profiling.table import show_profile

STEP = {"drafter": 0.5, "relay": 0.1, "verify": 1.0, "host": 0.4}


def plain_runs(seconds: float = 2.0, count: int = 7) -> list[Run]:
    steps = [Step(0, 1, 1, 1, {"verify": 1.0, "host": 0.5})]
    return [run(PLAIN, [trace([1, 2], [(0, 0)], index=i)], seconds, 1.0, steps, number=i) for i in range(count)]


def drafted_runs(seconds: float = 1.0, count: int = 7) -> list[Run]:
    steps = [Step(0, 1, 1, 4, STEP)]
    return [run(DRAFTED, [trace([1, 1.5], [(7, 3)], index=i)], seconds, 0.5, steps, number=i) for i in range(count)]


def made(seconds: float = 1.0, **changes: Any) -> Profile:
    plain, drafted = plain_runs(), drafted_runs(seconds)
    return profile([result(PLAIN, plain), result(DRAFTED, drafted, plain)], **changes)


# -- the file ----------------------------------------------------------------------------------------------------------


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    record = made()
    write_record(record, tmp_path / "profile.json")
    assert read_record(tmp_path / "profile.json") == record == read_record(tmp_path)
    assert json.loads((tmp_path / "profile.json").read_text())["schema_version"] == SCHEMA_VERSION


def test_the_schema_is_one_that_tools_can_read() -> None:
    schema = Profile.model_json_schema()
    assert set(schema["required"]) >= {"settings", "results", "lossless", "machine"}
    assert schema["additionalProperties"] is False
    assert schema["properties"]["schema_version"]["const"] == SCHEMA_VERSION


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "no JSON"),
        ("[]", "schema_version is None"),
        ('{"schema_version": 99}', "schema_version is 99; this version reads 1"),
        ('{"schema_version": 1}', "created: Field required"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(UserError) as error:
        read_record(tmp_path)
    assert fault in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_field_is_named(tmp_path: Path) -> None:
    data = made().model_dump(mode="json")
    data["results"][0]["speed"] = 1
    (tmp_path / "profile.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match=r"results\.0\.speed: Extra inputs"):
        read_record(tmp_path)
    with pytest.raises(UserError, match=r"none: No such file"):
        read_record(tmp_path / "none")


# -- differences -------------------------------------------------------------------------------------------------------


def test_the_same_settings_are_comparable() -> None:
    faster = made(seconds=0.5)
    machine = faster.machine.model_copy(update={"versions": {"numpy": "3"}, "load_average": [9.0]})
    found = compare(made(), faster.model_copy(update={"machine": machine, "created": "later"}))
    assert found.comparable
    assert found.around == ["versions.numpy: 2 in A, 3 in B"]
    rates = {change.point.strategy: change.ratio for change in found.changes if change.figure == "tokens/s"}
    assert rates["ar"] is not None
    assert rates["dflow"] is not None
    assert (rates["ar"].value, rates["dflow"].value, rates["dflow"].low) == (1.0, 2.0, 2.0)
    over = next(c for c in found.changes if c.figure == "over ar" and c.point == DRAFTED)
    assert (over.a, over.b) == (pytest.approx(5.0), pytest.approx(10.0))
    assert {"TTFT p50 ms", "TPOT p50 ms", "tau", "relay ms a round"} <= {change.figure for change in found.changes}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": 65}, "max_tokens: 64 in A, 65 in B"),
        ({"seed": 1}, "seed: 0 in A, 1 in B"),
        ({"threads": 2}, "threads: 1 in A, 2 in B"),
        ({"requests": {"1 at once": 3}}, "requests.1 at once: 2 in A, 3 in B"),
        ({"ttft_bound": 9.0}, "ttft_bound: - in A, 9.0 in B"),
    ],
)
def test_other_settings_are_not(change: dict[str, Any], named: str) -> None:
    record = made()
    other = record.model_copy(update={"settings": record.settings.model_copy(update=change)})
    found = compare(record, other)
    assert (found.comparable, found.settings) == (False, [named])


def test_another_workload_is_not_but_another_name_of_it_is() -> None:
    record = made()
    [info] = record.settings.workload

    def named(**changes: str) -> Profile:
        workload = [info.model_copy(update=changes)]
        return record.model_copy(update={"settings": record.settings.model_copy(update={"workload": workload})})

    assert compare(record, named(source="copy.jsonl")).comparable
    assert compare(record, named(digest="e")).settings == ["workload[0].digest: d in A, e in B"]


def test_points_of_one_profile_alone_are_named_and_left_out() -> None:
    """A has dflow, B has ngram and another load, as after a drafter was exchanged."""
    ngram, busy = (PLAIN.model_copy(update=each) for each in ({"strategy": "ngram"}, {"concurrency": 2}))
    plain = plain_runs()
    b = profile([result(PLAIN, plain), result(ngram, plain, plain), result(busy, plain)])
    requests = {"1 at once": 2, "2 at once": 16}
    b = b.model_copy(update={"settings": b.settings.model_copy(update={"requests": requests})})
    found = compare(made(), b)
    assert found.comparable
    assert (found.only_a, found.only_b) == (["dflow"], ["ngram", "ar, 2 at once"])
    assert {change.point for change in found.changes} == {PLAIN}
    text = io.StringIO()
    show_difference(found, Console(file=text, width=150))
    assert "only in A dflow\nonly in B ngram; ar, 2 at once\n" in text.getvalue()


def test_profiles_without_a_point_in_common_are_not_comparable() -> None:
    alone = profile([result(PLAIN.model_copy(update={"concurrency": 2}), plain_runs())])
    found = compare(made(), alone)
    assert (found.comparable, found.settings) == (False, ["points: none that both have"])


def test_a_profile_that_ended_early_is_not_comparable() -> None:
    found = compare(made(), made(error="the server went away"))
    assert found.settings == ["B: ended early (the server went away)"]


def test_a_difference_reads_well() -> None:
    text = io.StringIO()
    show_difference(compare(made(), made(seconds=0.5)), Console(file=text, width=150))
    lines = text.getvalue().split("\n")
    [row] = [line for line in lines if "dflow" in line and "tokens/s" in line]
    assert row.split()[-4:] == ["2.00x", "(2.00", "to", "2.00)"]
    assert "comparable: every setting is the same" in text.getvalue()


# -- tables ------------------------------------------------------------------------------------------------------------


def shown(record: Profile) -> str:
    text = io.StringIO()
    show_profile(record, Console(file=text, width=200))
    return text.getvalue()


def test_the_table_says_what_there_are_too_few_samples_for() -> None:
    text = shown(made())
    row = next(line for line in text.split("\n") if "dflow" in line and "too few" in line)
    assert row.count("too few") == 7, "two of three percentiles of TTFT, TPOT and ITL, and the one of gaps"
    assert "p50 6, p90 29, p95 59, p99 299" in text
    assert "5.00x" in text
    assert "all 14 sequences are ar's, token for token" in text
    assert "5.0 %" in text  # the relay's share
    assert "paper 1.2 %" in text


def test_the_table_says_what_is_wrong() -> None:
    checks = [CounterCheck(counter="dflow_rounds_total", strategy="dflow", client=7, server=9)]
    record = made(
        lossless=Lossless(compared=14, same=13, first="dflow, 1 at once: line 1, token 2 is 5, ar has 6"),
        server=ServerCheck(metrics_url="http://x/metrics", counters=checks, notes=["a note"]),
        notes=["[brackets] stay"],
    )
    text = shown(record)
    assert "1 of 14 sequences differ from ar's; the first: dflow, 1 at once: line 1, token 2 is 5, ar has 6" in text
    assert "dflow_rounds_total of dflow: 9 there, 7 here" in text
    assert "[brackets] stay" in text


def test_prices_in_the_table() -> None:
    record = made()
    text = shown(record.model_copy(update={"cost": cost(record.results, 0.0018, 1.0)}))
    least = "least: 0.10 a million output tokens, dflow, 1 at once; busy 10 % of the time equals the hosted price of 1"
    assert least in text
    assert next(line for line in text.split("\n") if "at once   ar" in line).split()[-2:] == ["0.50", "7/7"]


def test_nothing_to_show_is_shown_as_nothing() -> None:
    empty = profile([result(DRAFTED, [run(DRAFTED, [], 0.0)])])
    assert "dflow" in shown(empty)
    assert "nothing was compared with ar" in shown(empty)
    assert "<h1>" in report(empty)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (Interval(value=1.5, low=1.4, high=1.6, pairs=9), "1.50x (1.40 to 1.60)"),
        (Interval(value=1.5, low=None, high=None, pairs=3), "1.50x (too few pairs: 3 of 6)"),
        (None, "-"),
    ],
)
def test_intervals_in_words(found: Interval | None, text: str) -> None:
    assert words.interval(found) == text


def test_points_have_names_of_their_own() -> None:
    point = Point(strategy="dflow", rate=2.5, draft_tokens=3, draft_policy="adaptive", temperature=0.7, input_len=64)
    assert (point.label, point.load) == ("dflow k=3 adaptive T=0.7 ctx 64", "2.5/s")


# -- files -------------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a page would load or run, and its texts."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.scripts = 0
        self.ids: list[str] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.links += [value for name in ("href", "src", "xlink:href") if (value := found.get(name))]
        self.scripts += tag == "script" or any(name.startswith("on") for name in found)
        self.ids += [value for name in ("id",) if (value := found.get(name))]

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def test_output_is_everything_in_one_folder(tmp_path: Path) -> None:
    runs = {PLAIN: plain_runs(), DRAFTED: drafted_runs()}
    write_output(Result(made(), runs), tmp_path / "out", force=False)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"profile.json", "report.html", "points.csv", "acceptance.csv", "requests.csv", "rounds.csv"}

    def rows(name: str) -> list[dict[str, str]]:
        with (tmp_path / "out" / name).open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    plain, drafted = rows("points.csv")
    assert (plain["strategy"], plain["speedup"], drafted["speedup"]) == ("ar", "", "5.0")
    assert (drafted["tau_emitted"], drafted["ttft_p50_ms"], drafted["ttft_p99_ms"]) == ("4.0", "1000.0", "")
    assert float(drafted["stage_relay_ms"]) == pytest.approx(0.1)
    requests = rows("requests.csv")
    assert len(requests) == 14
    assert (requests[-1]["output_tokens"], requests[-1]["tpot_ms"], requests[-1]["accepted"]) == ("5", "125.0", "3")
    positions = [row for row in rows("acceptance.csv") if row["strategy"] == "dflow" and row["task"] == "all"]
    assert [row["survival"] for row in positions] == ["1.0"] * 3 + ["0.0"] * 4
    assert [row["reached"] for row in positions] == ["7"] * 4 + ["0"] * 3
    with pytest.raises(UserError, match="--output"):
        write_output(Result(made(), runs), tmp_path / "out", force=False)
    write_output(Result(made(), runs), tmp_path / "out", force=True)


def test_the_page_needs_nothing_from_elsewhere() -> None:
    source = report(made(notes=["<script>alert(1)</script>"]))
    page = Page(source)
    assert page.scripts == 0
    assert all(link == "data:," or link.startswith("#") for link in page.links), page.links
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids)), "an id names one thing"
    assert not re.findall(r"@import|url\((?!#)", source)
    assert "<script>alert(1)</script>" in page.texts
    assert len(source) < 400_000


def test_loads_of_each_kind_have_a_plot_of_their_own() -> None:
    closed = [DRAFTED.model_copy(update={"concurrency": count}) for count in (1, 2)]
    opened = [Point(strategy="dflow", rate=rate) for rate in (1.0, 2.0)]
    source = report(profile([result(each, drafted_runs()) for each in (*closed, *opened)]))
    assert {"load", "rate"} <= set(Page(source).ids)
    assert {"load", "rate"} & set(Page(report(made())).ids) == set(), "one load is no curve"


def texts(source: str, section: str) -> list[str]:
    """Of one section's plot."""
    found = re.search(rf'<section id="{section}">.*?</svg>', source, re.DOTALL)
    assert found is not None
    return re.findall(r"<text[^>]*>([^<]*)</text>", found[0])


def test_a_sweep_of_lengths_is_one_heat_map_and_one_curve() -> None:
    """Those of the longest rounds: shorter ones are their beginning. Another policy is another curve."""
    short, shorter = ({"draft_tokens": drafts} for drafts in (5, 3))
    swept = [DRAFTED.model_copy(update=each) for each in (shorter, {}, short, {"draft_policy": "adaptive"})]
    swept += [each.model_copy(update={"strategy": "draft"}) for each in (swept[2], swept[0])]
    source = report(profile([result(PLAIN, plain_runs()), *(result(each, drafted_runs()) for each in swept)]))
    names = [each.label for each in swept]
    assert [text for text in texts(source, "acceptance") if text in names] == ["dflow", "draft k=5"]
    curves = [text for text in texts(source, "latency") if text in names]
    assert curves == ["dflow", "dflow adaptive", "draft k=5"]


def test_tasks_have_a_heat_map_a_strategy() -> None:
    runs = [run(DRAFTED, [trace([1, 1.5], [(7, 3)], task="sums"), trace([1, 2], [(7, 0)], task="letters")], 1.0)]
    other = DRAFTED.model_copy(update={"strategy": "ngram"})
    found = texts(report(profile([result(DRAFTED, runs), result(other, runs)])), "acceptance")
    for label in ("dflow", "ngram"):
        assert found.count(label) == 1
    for task in ("sums", "letters", "all"):
        assert found.count(task) == 1, "the rows are the same ones in every panel"
    assert found.count("4.00") == 2, "tau of sums"
    assert found.count("50") == 2 * 3, "half of all rounds kept the first three"


def test_each_drafters_memory_is_shown() -> None:
    planned = dict.fromkeys(MEMORY_PARTS, 2_000_000) | {"slots": 3, "cache_rows": 64, "total": 16_000_000}
    drafters = {
        "draft": DrafterSizes(weights=1_500_000, cache=2_000_000, relay_state=0),
        "ngram": DrafterSizes(weights=0, cache=0, relay_state=0),
    }
    figures = {"opened": None, "anonymous": None, "peak": None, "batch_limit": 9}
    memory = Memory(device="process", planned=planned, drafters=drafters, before=1, after=9_000_001, **figures)
    source = report(made(memory=memory))
    found = texts(source, "memory")
    assert {"planned", "of it draft", "of it ngram", "used", "16.0 MB", "3.5 MB", "0.0 MB", "9.0 MB"} <= set(found)
    rows = dict(re.findall(r'<td class="text">(planned[^<]*)</td><td>([^<]*)</td>', source))
    assert (rows["planned: slots"], rows["planned for draft: weights"]) == ("3", "1.5 MB")
    assert rows["planned for ngram: weights"] == "0 B"


def test_a_legend_of_any_length_leaves_the_plots_their_height() -> None:
    loads = [
        DRAFTED.model_copy(update={"concurrency": count, "strategy": f"s{i}"}) for i in range(20) for count in (1, 2)
    ]
    source = report(profile([result(each, drafted_runs(count=1)) for each in loads]))
    boxes = {
        name: float(height)
        for name, height in re.findall(r'id="(load|latency)">.*?viewBox="0 0 \S+ (\S+)"', source, re.DOTALL)
    }
    assert all(height > 72 * (3 + 0.2 * 5) for height in boxes.values()), boxes
    assert len(boxes) == 2


def test_plots_take_their_colours_from_the_page() -> None:
    source = report(made())
    drawings = re.findall(r"<svg.*?</svg>", source, re.DOTALL)
    assert len(drawings) >= 4
    for drawing in drawings:
        assert set(re.findall(r"#[0-9a-f]{6}\b", drawing)) <= {"#000000"}, "a colour that does not follow the theme"
        assert 'role="img" aria-label="' in drawing
        assert "<text" in drawing
    assert set(re.findall(r"var\((--\w+)\)", source)) <= set(re.findall(r"(--\w+):", source))
