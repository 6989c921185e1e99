"""NVIDIA's load client against ``dflow-trt serve``: every way of asking, and its sums beside the server's own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pairs import Pair
from serve_environment import make_load_client
from test_openai import PATIENCE, Serve, serving, until

from dflow_trt.serving import families

pytestmark = pytest.mark.slow

REQUESTS, TOKENS = 24, 32
WAYS = {
    "chat": ["--endpoint-type", "chat"],
    "chat, streaming": ["--endpoint-type", "chat", "--streaming"],
    "chat, usage in every chunk": ["--endpoint-type", "chat", "--streaming", "--per-chunk-usage"],
    "completions": ["--endpoint-type", "completions"],
    "completions, streaming": ["--endpoint-type", "completions", "--streaming"],
}
# What aiperf adds up of the answers' usage, and what the server counts.
SUMS = {
    "total_usage_completion_tokens": families.OUTPUT_TOKENS.name,
    "total_usage_prompt_tokens": families.PROMPT_TOKENS.name,
    "total_usage_accepted_prediction_tokens": families.ACCEPTED.name,
}


@pytest.fixture(scope="module")
def aiperf() -> Path:
    """The Python that has it: DFLOW_AIPERF_PYTHON, or of an environment that is made once."""
    given = os.environ.get("DFLOW_AIPERF_PYTHON")
    return Path(given) if given else make_load_client(Path(sys.executable))


@pytest.fixture(scope="module")
def served(serve_python: Path, example: Pair) -> Iterator[Serve]:
    with serving(serve_python, example.bundle.path, "--model-name", "example") as running:
        yield running


def counts(served: Serve) -> dict[str, float]:
    """Of all series of a name; none is there before the first request."""
    page = httpx.get(f"{served.url}/metrics", timeout=PATIENCE).text
    return {name: sum(map(float, re.findall(rf"^{name}{{.*}} (\S+)$", page, re.MULTILINE))) for name in SUMS.values()}


@pytest.mark.parametrize("way", WAYS)
def test_every_request_is_answered_and_the_sums_agree(
    aiperf: Path, served: Serve, example: Pair, tmp_path: Path, way: str
) -> None:
    usage = ["--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0", "--use-server-token-count"]
    before = counts(served)
    report = profile(aiperf, served.url, example, tmp_path, [*usage, *WAYS[way]])
    assert report["total_usage_completion_tokens"]["avg"] == REQUESTS * TOKENS
    expected = {name: before[name] + report[sum_]["avg"] for sum_, name in SUMS.items()}
    until(lambda: counts(served) == expected, "the server's own sums")
    assert ("time_to_first_token" in report) == ("--streaming" in WAYS[way])


@pytest.mark.parametrize("model", ["ensemble", "dflow_bls"])
def test_tritons_own_streams_are_read(aiperf: Path, served: Serve, example: Pair, tmp_path: Path, model: str) -> None:
    """aiperf has no endpoint of Triton's, but one that is told what to send and what to read."""
    body = tmp_path / "body.json"
    options = f'"max_tokens": {TOKENS}, "stream": true, "ignore_eos": true'
    body.write_text(f'{{"text_input": {{{{ text|tojson }}}}, {options}}}')
    told = ["--extra-inputs", f"payload_template:{body}", "--extra-inputs", "response_field:text_output"]
    path = ["--custom-endpoint", f"/v2/models/{model}/generate_stream", "--endpoint-type", "template", "--streaming"]
    url = "http://" + served.line("triton").partition(",")[0].removeprefix("http ")
    name = families.OUTPUT_TOKENS.name
    before = counts(served)[name]
    profile(aiperf, url, example, tmp_path / "report", [*path, *told])
    until(lambda: counts(served)[name] == before + REQUESTS * TOKENS, "the server's own sums")


def profile(python: Path, url: str, example: Pair, folder: Path, way: list[str]) -> dict[str, Any]:
    """Its report on more requests than there are slots, each of as many tokens; the prompts are its own."""
    made = ["--tokenizer", str(example.bundle.tokenizer_path), "--isl", "48", "--osl", str(TOKENS)]
    load = ["--concurrency", "12", "--request-count", str(REQUESTS), "--random-seed", "1"]
    where = ["--model", "example", "--url", url, "--output-artifact-dir", str(folder), "--ui", "none"]
    command = [str(python.parent / "aiperf"), "profile", *where, *made, *load, *way]
    # Told that it is offline, it takes a folder for a name on the hub.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = dict(json.loads((folder / "profile_export_aiperf.json").read_text()))
    assert report["error_summary"] == []
    assert report["request_count"]["avg"] == REQUESTS
    return report
