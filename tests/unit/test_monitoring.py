"""Dashboard, alert rules and document say what the table of metrics says, in PromQL that parses."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import deploy_tools
import pytest
import yaml

from dflow_trt.serving.families import FAMILIES, NONE, OTHER, OUTCOMES

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "triton_repo" / "monitoring"
DOCUMENT = ROOT / "docs" / "monitoring.md"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
RULES = [rule for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]

SERIES = {name: set(family.series_labels) for family in FAMILIES for name in family.series_names}
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
TARGET_LABELS = {"instance", "job"}  # what Prometheus adds to every series that it scrapes


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_monitoring", FOLDER / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> dict[str, str]:
    """Every PromQL expression there is, by where it stands; Grafana's variables replaced as it would."""
    found = {f"{p['title']} {t['refId']}": t["expr"] for p in panels() for t in p["targets"]}
    found |= {rule.get("alert") or rule["record"]: rule["expr"] for rule in RULES}
    for number, line in enumerate(re.findall(r"^    (\S.*)$", DOCUMENT.read_text(encoding="utf-8"), re.M)):
        found[f"document {number}"] = line
    return {where: re.sub(r"\$__(rate_interval|range)", "5m", text) for where, text in found.items()}


QUERIES = queries()


def test_there_is_something_to_check() -> None:
    assert len(panels()) > 20
    assert len([rule for rule in RULES if "alert" in rule]) == 8
    assert len(QUERIES) > 50


def test_generated_files_are_up_to_date() -> None:
    for path, text in generator().wanted().items():
        assert path.read_text(encoding="utf-8") == text, f"run {FOLDER.name}/generate.py"


def test_the_document_has_every_metric_once() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for family in FAMILIES:
        assert text.count(f"| `{family.name}` |") == 1


@pytest.mark.parametrize("where", QUERIES)
def test_every_name_is_in_the_table(where: str) -> None:
    names = set(re.findall(r"\bdflow[a-z_:0-9]+", QUERIES[where]))
    assert names, "a query of nothing"
    assert names <= {*SERIES, *RECORDED}


def test_names_in_the_text_of_the_document_are_in_the_table() -> None:
    names = set(re.findall(r"\bdflow_[a-z_]+(?!\.)\b", DOCUMENT.read_text(encoding="utf-8")))
    families = {family.name for family in FAMILIES}
    assert names - {"dflow_trt"} <= {*SERIES, *families}


def test_every_family_is_shown_or_alerted_on() -> None:
    shown = " ".join(QUERIES.values())
    covered = {family.reached.name: family.name for family in FAMILIES if family.reached is not None}
    unseen = {family.name for family in FAMILIES if family.name not in shown}
    assert unseen - {length for position, length in covered.items() if position in shown} == set()


def walk(node: Any) -> Iterator[Any]:
    """A PromQL expression and all in it."""
    yield node
    for name in ("expr", "lhs", "rhs", "param"):
        child = getattr(node, name, None)
        if child is not None:
            yield from walk(child)
    for child in getattr(node, "args", None) or ():
        yield from walk(child)


@pytest.fixture(scope="module")
def promql() -> Iterator[ModuleType]:
    with deploy_tools.importable():
        import promql_parser

        yield promql_parser


@pytest.mark.parametrize("where", QUERIES)
def test_every_query_parses_and_uses_labels_that_its_series_have(where: str, promql: ModuleType) -> None:
    known: set[str] = set(TARGET_LABELS)
    nodes = list(walk(promql.parse(QUERIES[where])))
    for node in nodes:
        selector = getattr(node, "vector_selector", node)
        if not hasattr(selector, "matchers"):
            continue
        labels = TARGET_LABELS | SERIES.get(selector.name, set())
        known |= labels
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels, f"{selector.name} has no label {matcher.name}"
            assert_value(matcher.name, matcher.value)
    grouped = [node.modifier.labels for node in nodes if type(node).__name__ == "AggregateExpr" and node.modifier]
    assert set(itertools.chain(*grouped)) <= known


def assert_value(label: str, value: str) -> None:
    """Values of labels whose values are known are among them."""
    known = {
        "outcome": set(OUTCOMES),
        "stage": {"relay", "draft", "verify", "prefill", "context", "host"},
        "task": {NONE, OTHER},
    }
    if label in known and not value.startswith("$"):
        assert set(value.split("|")) <= known[label]


def test_panels_have_places_of_their_own_and_queries() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in panels():
        assert panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert [target["refId"] for target in panel["targets"]] == list("ABCD")[: len(panel["targets"])]


def test_variables_of_the_dashboard_are_defined() -> None:
    defined = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$(\w+)", json.dumps([t["expr"] for p in panels() for t in p["targets"]])))
    assert {name for name in used if not name.startswith("__")} == defined - {"datasource"}


@pytest.mark.parametrize("rule", [rule for rule in RULES if "alert" in rule], ids=lambda rule: rule["alert"])
def test_alerts_say_how_bad_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["for"]
    assert rule["annotations"]["summary"]
    assert len(rule["annotations"]["description"]) > 60


def promtool(*arguments: str) -> str:
    if shutil.which("promtool") is None:
        pytest.skip("promtool was not found (Debian: apt-get install prometheus)")
    result = subprocess.run(["promtool", *arguments], capture_output=True, text=True, cwd=FOLDER)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_promtool_takes_the_rules() -> None:
    assert f"{len(RULES)} rules found" in promtool("check", "rules", "alerts.yaml")


def test_the_rules_pass_their_own_tests() -> None:
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yaml")


def test_every_alert_is_seen_to_fire_and_not_to_fire() -> None:
    tests = yaml.safe_load((FOLDER / "alerts_test.yaml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    for fires in (True, False):
        seen = {case["alertname"] for case in cases if bool(case.get("exp_alerts")) == fires}
        assert seen == {rule["alert"] for rule in RULES if "alert" in rule}
