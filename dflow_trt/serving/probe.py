"""Whether a server works, for probes: ``python -m dflow_trt.serving.probe``.

A model whose process died, or whose loop hangs, leaves every readiness answer of Triton at 200 and its metrics as they
were last. The loop's heartbeat tells: it is published as long as the loop turns, with or without work.
"""

from __future__ import annotations

import argparse
import http.client
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

from dflow_trt.errors import UserError
from dflow_trt.serving.families import HEARTBEAT

METRICS_URL = "http://127.0.0.1:8002/metrics"
TIMEOUT_SECONDS = 5.0


def heartbeat_age(metrics: str, now: float) -> float:
    """Seconds since the loop's heartbeat in a text of metrics; UserError where there is none."""
    for line in metrics.splitlines():
        name, _, value = line.rpartition(" ")
        if name.partition("{")[0] == HEARTBEAT.name:
            return now - float(value)
    raise UserError(f"no {HEARTBEAT.name} among the metrics: the model is not loaded")


def check(metrics_url: str, max_age: float) -> None:
    """UserError, in one line, unless the loop's heartbeat is younger than ``max_age`` seconds."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy of the environment is not meant
    try:
        with direct.open(metrics_url, timeout=TIMEOUT_SECONDS) as answer:
            metrics = answer.read().decode()
    except (OSError, http.client.HTTPException, urllib.error.URLError, ValueError) as error:
        raise UserError(f"{metrics_url}: no metrics ({error})") from None
    age = heartbeat_age(metrics, time.time())
    if age > max_age:
        raise UserError(f"{metrics_url}: the loop's last heartbeat is {age:.0f} s old, allowed: {max_age:g} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if the server works; else 1, the reason on standard error."""
    parser = argparse.ArgumentParser(prog="python -m dflow_trt.serving.probe", description=__doc__)
    parser.add_argument("--metrics-url", default=METRICS_URL, help="Triton's metrics endpoint (default: %(default)s)")
    parser.add_argument("--max-age", type=float, default=30.0, help="seconds since a heartbeat (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        check(options.metrics_url, options.max_age)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
