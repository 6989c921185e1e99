"""Writes what follows from the table of metrics: dashboard.json, and the table in docs/monitoring.md.

Run it after a change to dflow_trt/serving/families.py; with --check it writes nothing and says what is out of date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflow_trt.files import staged_file
from dflow_trt.serving import families as f
from dflow_trt.serving.series import Family

HERE = Path(__file__).resolve().parent
DASHBOARD = HERE / "dashboard.json"
DOCUMENT = HERE.parents[1] / "docs" / "monitoring.md"
BEGIN, END = "<!-- metrics: begin, written by triton_repo/monitoring/generate.py -->", "<!-- metrics: end -->"

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
SERVER = 'instance=~"$instance"'
GROUP = f'{SERVER}, strategy=~"$strategy", task=~"$task"'
DRAFTING = f'{GROUP}, strategy!="ar"'


@dataclass(frozen=True)
class Query:
    """One PromQL expression and the legend of its series."""

    text: str
    legend: str = ""
    format: str = "time_series"


@dataclass(frozen=True)
class Panel:
    """One panel. columns: its width of 24. options, defaults, custom: more of Grafana's own settings."""

    title: str
    queries: tuple[Query, ...]
    help: str
    unit: str = "short"
    kind: str = "timeseries"
    columns: int = 8
    options: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    instant: bool = False


# -- queries -----------------------------------------------------------------------------------------------------------


def rate(family: Family, labels: str = GROUP, suffix: str = "") -> str:
    return f"rate({family.name}{suffix}{{{labels}}}[$__rate_interval])"


def total(family: Family, by: str = "", labels: str = GROUP, suffix: str = "") -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped}({rate(family, labels, suffix)})"


def ratio(above: Family, below: Family, by: str = "", labels: str = GROUP) -> str:
    return f"{total(above, by, labels)} / {total(below, by, labels)}"


def quantiles(family: Family) -> tuple[Query, ...]:
    buckets = total(family, "le", suffix="_bucket")
    return tuple(Query(f"histogram_quantile({q}, {buckets})", f"p{q * 100:g}") for q in (0.5, 0.95, 0.99))


def gauge(family: Family, labels: str = SERVER) -> str:
    return f"{family.name}{{{labels}}}"


def errors() -> str:
    bad = total(f.REQUESTS, labels=f'{GROUP}, outcome=~"error|timeout"')
    return f"{bad} / {total(f.REQUESTS)}"


# -- panels ------------------------------------------------------------------------------------------------------------

STACKED = {"custom": {"stacking": {"mode": "normal"}, "fillOpacity": 40}}
SHARES = {"custom": {"stacking": {"mode": "percent"}, "fillOpacity": 60}}
HEAT = {"calculate": False, "yAxis": {"unit": "short"}, "color": {"scheme": "Blues", "mode": "scheme"}}
RATIO = {"min": 0, "max": 1}


def stat(title: str, query: str, unit: str, help: str, **defaults: Any) -> Panel:
    return Panel(title, (Query(query),), help, unit, "stat", 4, {"graphMode": "area"}, defaults)


def heartbeat_panel() -> Panel:
    steps = [{"color": "green", "value": None}, {"color": "red", "value": 30}]
    return stat(
        "Heartbeat age",
        f"max(time() - {gauge(f.HEARTBEAT)})",
        "s",
        "Seconds since the loop last showed that it is alive: the one sign of a dead model, since readiness stays 200.",
        thresholds={"mode": "absolute", "steps": steps},
    )


def overview() -> list[Panel]:
    return [
        stat("Requests", total(f.REQUESTS), "reqps", "Sequences that ended, a second."),
        stat("Output tokens", total(f.OUTPUT_TOKENS), "short", "Tokens generated, a second."),
        stat("tau emitted", ratio(f.EMITTED, f.ROUNDS), "short", "Mean tokens a verify round, bonus token included."),
        stat("Errors and timeouts", errors(), "percentunit", "Their share of all that ended."),
        stat("Queue", f"sum({gauge(f.QUEUE_LENGTH)})", "short", "Sequences that wait for a slot."),
        heartbeat_panel(),
    ]


def traffic() -> list[Panel]:
    return [
        Panel(
            "Requests by outcome",
            (Query(total(f.REQUESTS, "outcome"), "{{outcome}}"),),
            "stop and length are successes; invalid and queue_full never were queued.",
            "reqps",
            defaults=STACKED,
        ),
        Panel(
            "Tokens",
            (
                Query(total(f.PROMPT_TOKENS), "prompt"),
                Query(total(f.OUTPUT_TOKENS), "output"),
                Query(total(f.REUSED_TOKENS), "prompt, reused from a prefix"),
            ),
            "A second. Reused prompt tokens cost no prefill.",
        ),
        Panel(
            "Requests by strategy",
            (Query(total(f.REQUESTS, "strategy"), "{{strategy}}"),),
            "What the requests asked for, or were given as a canary.",
            "reqps",
            defaults=STACKED,
        ),
    ]


def latency() -> list[Panel]:
    return [
        Panel("Time to first token", quantiles(f.FIRST_TOKEN), f.FIRST_TOKEN.help, "s", columns=6),
        Panel("Inter-token latency", quantiles(f.TOKEN_LATENCY), f.TOKEN_LATENCY.help, "s", columns=6),
        Panel("Queue time", quantiles(f.QUEUE_TIME), f.QUEUE_TIME.help, "s", columns=6),
        Panel("Request time", quantiles(f.REQUEST_TIME), f.REQUEST_TIME.help, "s", columns=6),
    ]


def speculation() -> list[Panel]:
    heat = total(f.ACCEPTED_LENGTH, "le", suffix="_bucket")
    at = f"sum by (position)(increase({f.ACCEPTED_AT.name}{{{GROUP}}}[$__range]))"
    of = f"sum by (position)(increase({f.DRAFTED_AT.name}{{{GROUP}}}[$__range]))"
    bars = {"orientation": "horizontal", "displayMode": "basic", "reduceOptions": {"calcs": ["lastNotNull"]}}
    return [
        Panel(
            "tau emitted by strategy",
            (Query(ratio(f.EMITTED, f.ROUNDS, "strategy"), "{{strategy}}"),),
            "Mean tokens a verify round, bonus token included: 1 is plain decoding.",
        ),
        Panel(
            "tau emitted by task",
            (Query(ratio(f.EMITTED, f.ROUNDS, "task", DRAFTING), "{{task}}"),),
            "The same by the request parameter `task`, plain decoding left out.",
        ),
        Panel(
            "Accepted of drafted",
            (Query(ratio(f.ACCEPTED, f.DRAFTED, "strategy, task", DRAFTING), "{{strategy}} {{task}}"),),
            "The share of verified drafts that was accepted. It falls as drafts get longer: see the positions.",
            "percentunit",
            defaults=RATIO,
        ),
        Panel(
            "Acceptance by position",
            (Query(f"sort_desc({at} / {of})", "{{position}}"),),
            "Rounds that accepted the draft at a position, of those that verified one there, over the range shown.",
            "percentunit",
            "bargauge",
            options=bars,
            defaults=RATIO,
            instant=True,
        ),
        Panel(
            "Accepted length",
            (Query(heat, "{{le}}", "heatmap"),),
            "Drafts accepted a round, as a heat map.",
            kind="heatmap",
            options=HEAT,
        ),
        Panel(
            "Drafts and relayed slots a round",
            (
                Query(ratio(f.DRAFTED, f.ROUNDS, "strategy"), "drafts, {{strategy}}"),
                Query(ratio(f.RELAYED, f.ROUNDS, "strategy"), "relayed, {{strategy}}"),
            ),
            "Drafts fall towards 0 where the adaptive policy finds that they do not pay.",
        ),
    ]


def loop() -> list[Panel]:
    stages = total(f.STAGE_SECONDS, "stage", SERVER)
    return [
        Panel("Time by stage", (Query(stages, "{{stage}}"),), f.STAGE_SECONDS.help, "s", defaults=SHARES),
        Panel(
            "Milliseconds a step by stage",
            (Query(f"1000 * {stages} / ignoring (stage) group_left () {total(f.STEPS, '', SERVER)}", "{{stage}}"),),
            "What one step of the loop spends in each stage.",
            "ms",
            defaults=STACKED,
        ),
        Panel(
            "Mean batch",
            (Query(ratio(f.SLOT_STEPS, f.STEPS, "instance", SERVER), "{{instance}}"),),
            "Slots in use, averaged over steps.",
        ),
    ]


def resources() -> list[Panel]:
    used = f"sum by (cache)({gauge(f.CACHE_USED)}) / sum by (cache)({gauge(f.CACHE_BYTES)})"
    return [
        Panel(
            "Slots and queue",
            (
                Query(f"sum({gauge(f.SLOTS_IN_USE)})", "slots in use"),
                Query(f"sum({gauge(f.SLOTS)})", "slots"),
                Query(f"sum({gauge(f.QUEUE_LENGTH)})", "queue"),
                Query(f"sum({gauge(f.QUEUE_LIMIT)})", "queue limit"),
            ),
            "At the queue's limit, requests are refused.",
        ),
        Panel("KV cache in use", (Query(used, "{{cache}}"),), f.CACHE_USED.help, "percentunit", defaults=RATIO),
        Panel(
            "Cache and relay memory",
            (
                Query(f"sum by (cache)({gauge(f.CACHE_BYTES)})", "KV, {{cache}}"),
                Query(f"sum({gauge(f.RELAY_BYTES)})", "relay"),
            ),
            "Allocated once, for all slots.",
            "bytes",
            defaults=STACKED,
        ),
    ]


ROWS = {
    "Overview": overview,
    "Traffic": traffic,
    "Latency": latency,
    "Speculation": speculation,
    "The loop": loop,
    "Resources": resources,
}


# -- the dashboard -----------------------------------------------------------------------------------------------------


def dashboard() -> dict[str, Any]:
    """Grafana's JSON model."""
    return {
        "uid": "dflow-trt",
        "title": "dflow-trt",
        "tags": ["dflow-trt", "llm"],
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": list(variables())},
        "panels": list(panels()),
    }


def variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    asked = {
        "instance": f"label_values({f.SLOTS.name}, instance)",
        "strategy": f"label_values({f.REQUESTS.name}, strategy)",
        "task": f"label_values({f.REQUESTS.name}, task)",
    }
    for name, query in asked.items():
        yield {
            "name": name,
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": query, "refId": name},
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "refresh": 2,
            "sort": 1,
            "current": {"text": ["All"], "value": ["$__all"]},
        }


def panels() -> Iterator[dict[str, Any]]:
    number, top = 1, 0
    for title, members in ROWS.items():
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": _at(0, top, 24, 1),
        }
        number, top, left = number + 1, top + 1, 0
        for panel in members():
            height = 4 if panel.kind == "stat" else 8
            if left + panel.columns > WIDTH:
                left, top = 0, top + height
            yield _panel(panel, number, _at(left, top, panel.columns, height))
            number, left = number + 1, left + panel.columns
        top += height


def _at(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, **panel.defaults}, "overrides": []},
        "options": panel.options,
        "targets": [_target(query, i, panel.instant) for i, query in enumerate(panel.queries)],
    }


def _target(query: Query, index: int, instant: bool) -> dict[str, Any]:
    return {
        "refId": chr(ord("A") + index),
        "datasource": SOURCE,
        "expr": query.text,
        "legendFormat": query.legend,
        "format": query.format,
        "instant": instant,
        "range": not instant,
    }


# -- the document ------------------------------------------------------------------------------------------------------


def table() -> str:
    """The table of metrics in Markdown."""
    lines = ["| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
    for family in f.FAMILIES:
        labels = ", ".join(f"`{label}`" for label in family.labels) or "none"
        lines.append(f"| `{family.name}` | {family.kind} | {labels} | {family.help} |")
    return "\n".join(lines)


def document(text: str) -> str:
    """The document with its table as it should be."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def wanted() -> dict[Path, str]:
    """Every generated file and what should be in it."""
    return {
        DASHBOARD: json.dumps(dashboard(), indent=2) + "\n",
        DOCUMENT: document(DOCUMENT.read_text(encoding="utf-8")),
    }


def main(arguments: Sequence[str]) -> int:
    stale = [path for path, text in wanted().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if "--check" in arguments:
            print(f"{path}: out of date; run {Path(__file__).name}", file=sys.stderr)
        else:
            with staged_file(path) as partial:
                partial.write_text(wanted()[path], encoding="utf-8")
            print(path)
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
