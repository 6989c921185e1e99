"""The server's own counters beside what the client saw."""

from __future__ import annotations

import http.client
import re
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence

from dflow_trt.errors import UserError
from dflow_trt.profiling.measure import Run, Trace
from dflow_trt.profiling.record import CounterCheck, ServerCheck
from dflow_trt.serving import families as f
from dflow_trt.serving.series import Family

TIMEOUT = 5.0
PATIENCE, PAUSE = 6.0, 0.5  # counters are published once a second
COMPLETED = ("stop", "length")
LINE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)(?: \d+)?")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Counts = dict[str, dict[str, float]]
"""By counter and strategy."""

COUNTERS: tuple[Family, ...] = (f.REQUESTS, f.OUTPUT_TOKENS, f.ROUNDS, f.EMITTED, f.ACCEPTED, f.DRAFTED)


def scrape(url: str, api_key: str | None) -> str:
    """A page of metrics; UserError where there is none."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy of the environment is not meant
    try:
        with direct.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as answer:
            return str(answer.read().decode())
    except (OSError, http.client.HTTPException, urllib.error.URLError, ValueError) as error:
        raise UserError(f"{url}: no metrics ({error})") from None


def read(page: str) -> Counts:
    """The counters of a page, summed over tasks; of requests, those that were completed."""
    found: Counts = {family.name: defaultdict(float) for family in COUNTERS}
    for line in page.splitlines():
        match = LINE.fullmatch(line)
        if match is None or match["name"] not in found:
            continue
        labels = dict(LABEL.findall(match["labels"] or ""))
        if labels.get("outcome", COMPLETED[0]) in COMPLETED:
            found[match["name"]][labels.get("strategy", f.NONE)] += float(match["value"])
    return found


def seen(runs: Sequence[Run]) -> Counts:
    """What the client counted."""
    found: Counts = {family.name: defaultdict(float) for family in COUNTERS}
    for run in runs:
        for trace in run.traces:
            for name, value in _counted(trace).items():
                found[name][run.point.strategy] += value
    return found


def _counted(trace: Trace) -> dict[str, float]:
    rounds = trace.rounds
    known = [tick.drafted for tick in rounds if tick.drafted is not None]
    return {
        f.REQUESTS.name: trace.finish_reason in COMPLETED,
        f.OUTPUT_TOKENS.name: trace.tokens,
        f.ROUNDS.name: len(rounds),
        f.EMITTED.name: sum(tick.tokens for tick in rounds),
        f.ACCEPTED.name: sum(tick.accepted for tick in rounds),
        f.DRAFTED.name: sum(known) if len(known) == len(rounds) else float("nan"),
    }


def compare(client: Counts, before: Mapping[str, Mapping[str, float]], after: Counts) -> list[CounterCheck]:
    """Every counter that the client knows, of every strategy that it asked for."""
    return [
        CounterCheck(
            counter=name,
            strategy=strategy,
            client=value,
            server=after[name].get(strategy, 0.0) - before[name].get(strategy, 0.0),
        )
        for name, values in client.items()
        for strategy, value in values.items()
        if value == value  # not of drafts that the client could not count
    ]


def check(url: str, api_key: str | None, before: Counts, runs: Sequence[Run]) -> ServerCheck:
    """Wait until the server has published what it counted, or does not seem to."""
    client, end = seen(runs), time.monotonic() + PATIENCE
    while True:
        found = compare(client, before, read(scrape(url, api_key)))
        if all(each.agree for each in found) or time.monotonic() > end:
            return ServerCheck(metrics_url=url, counters=found, notes=[])
        time.sleep(PAUSE)
