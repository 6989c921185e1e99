"""Serving benchmark: tokens a second and time to the first token through tritonserver, against the in-process ``LLM``.

    python build_scripts/bench_serving.py                    # this Python has dflow-trt[triton,serve]
    python build_scripts/bench_serving.py --python VENV/bin/python --only example

The same bundle, prompts, strategy and threads on both sides, in turns; ratios are paired. Every token must be the same.
The random 107M pair accepts next to no drafts, so each of its rounds gives one token and costs most; in the example's
rounds, of some milliseconds, what serving costs shows most. Tables are for people; the last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_common import (
    REPO,
    Disagreement,
    Goal,
    paired_ratio,
    print_goals,
    print_settings,
    print_table,
    rotated,
    settings,
)
from bench_random import VOCABULARY, write_pair
from tritonclient.grpc.aio import InferenceServerClient

from dflow_trt.api import LLM
from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.bundle import Bundle
from dflow_trt.method.sampling import SamplingParams
from dflow_trt.profiling.workload import random_workload
from dflow_trt.prompts import read_prompts
from dflow_trt.serving.package import PackageOptions, package_bundle
from dflow_trt.serving.server import TritonServer

sys.path.insert(0, str(REPO / "tests"))
from tiny import make_tokenizer
from triton_client import Answer, ask

FRONTS = ("dflow", "ensemble", "dflow_bls")
BASE = "LLM"
OUTPUTS = ["text_output", "output_ids", "sequence_index", "finish_reason"]  # what a client that streams reads
CONCURRENCIES = (1, 8, 32)
FIRST_TOKENS = 16  # turns in which the first token is timed
SHARE_GOAL, FIRST_TOKEN_GOAL = 0.9, 10.0


@dataclass(frozen=True)
class Case:
    """A bundle with what is asked of it. unique: a word for a number."""

    name: str
    bundle: Bundle
    prompts: Sequence[str]
    max_tokens: int
    unique: Callable[[int], str]


@dataclass(frozen=True)
class Timed:
    """One go at a batch of requests: seconds to the end, and to each request's first token."""

    seconds: float
    first: list[float]
    tokens: list[list[int]]


def main() -> int:
    """1 when outputs disagree."""
    options = _options()
    options.work.mkdir(parents=True, exist_ok=True)
    run = settings(options.threads)
    print_settings(run)
    report: dict[str, Any] = {"settings": run}
    goals: list[Goal] = []
    try:
        for name, make in (("random", _random_case), ("example", _example_case)):
            if options.only in (None, name):
                report[name] = _measure(make(options), options, goals if name == "random" else [])
    except Disagreement as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print_goals(goals)
    report["goals"] = [goal.as_json() for goal in goals]
    print(json.dumps(report))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--python", type=Path, default=Path(sys.executable), help="runs the models [this one]")
    add("--threads", type=int, default=2, help="of the engines, on both sides [2]")
    add("--only", choices=("random", "example"))
    add("--strategy", default="dflow")
    add("--concurrency", type=int, nargs="*", default=CONCURRENCIES, help="requests at once [1 8 32]")
    add("--repetitions", type=int, default=3)
    add("--max-tokens", type=int, help="tokens a request [random 10, example 96]")
    add("--work", type=Path, default=REPO / "build" / "bench", help="folder for models and bundles")
    return parser.parse_args()


def _random_case(options: argparse.Namespace) -> Case:
    pair = write_pair(options.work / "serving")
    make_tokenizer(pair / "target", 32000)  # words w0, w1, ...: a text is its token ids
    bundle = _bundle(pair, options, "random", max_input_len=256, max_seq_len=512)
    items = [random_workload(64 + 8 * (i % 8), 1, VOCABULARY, i).items[0] for i in range(max(CONCURRENCIES))]
    prompts = [" ".join(f"w{token}" for token in item.prompt["prompt_token_ids"]) for item in items]
    return Case("random 107M pair", bundle, prompts, options.max_tokens or 10, lambda number: f"w{number}")


def _example_case(options: argparse.Namespace) -> Case:
    pair = REPO / "dflow_trt" / "example_data"
    bundle = _bundle(pair, options, "example", max_input_len=512, max_seq_len=704)
    with LLM(bundle, threads=1, verify=False) as llm:
        assert llm.tokenizer is not None
        chats = [{"role": "user", "content": prompt["prompt"]} for prompt in read_prompts(pair / "prompts.jsonl")]
        prompts = [llm.tokenizer.render_chat([chat]) for chat in chats]
    return Case("example pair", bundle, prompts, options.max_tokens or 96, str)


def _bundle(pair: Path, options: argparse.Namespace, name: str, **limits: int) -> Bundle:
    sources = [DrafterSource(pair / drafter) for drafter in ("dflash", "dflow")]
    output = options.work / f"serving-{name}"
    return build_bundle(
        pair / "target", sources, output, BuildOptions(max_batch_size=8, **limits), force=True, self_check="off"
    )


# -- contenders --------------------------------------------------------------------------------------------------------


def _in_process(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int, strategy: str) -> Timed:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    start, first = time.perf_counter(), {}
    tokens: list[list[int]] = [[] for _ in prompts]
    for piece in llm.generate_stream([{"prompt_token_ids": ids} for ids in prompts], params, strategy=strategy):
        first.setdefault(piece.prompt_index, time.perf_counter() - start)
        tokens[piece.prompt_index] += piece.token_ids
    return Timed(time.perf_counter() - start, list(first.values()), tokens)


async def _through(
    client: InferenceServerClient, front: str, prompts: Sequence[Any], max_tokens: int, strategy: str
) -> Timed:
    start, first = time.perf_counter(), {}

    async def one(i: int) -> list[int]:
        async def note(answer: Answer) -> bool:
            first.setdefault(i, time.perf_counter() - start)
            return True

        options: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True, "stream": True, "strategy": strategy}
        options["input_ids" if front == "dflow" else "text_input"] = prompts[i]
        answer = await ask(client, front, options, on_response=note, outputs=OUTPUTS, seconds=600.0)
        if answer.message:
            raise Disagreement(f"{front}: {answer.message}")
        return answer.ids()[0]

    tokens = await asyncio.gather(*(one(i) for i in range(len(prompts))))
    return Timed(time.perf_counter() - start, list(first.values()), list(tokens))


def _measure(case: Case, options: argparse.Namespace, goals: list[Goal]) -> dict[str, Any]:
    found: dict[tuple[str, int], list[Timed]] = {}

    async def go(llm: LLM, client: InferenceServerClient, name: str, texts: list[str], max_tokens: int) -> Timed:
        assert llm.tokenizer is not None
        ids = [llm.tokenizer.encode(text) for text in texts]
        if name == BASE:
            return _in_process(llm, ids, max_tokens, options.strategy)
        return await _through(client, name, ids if name == "dflow" else texts, max_tokens, options.strategy)

    async def turns(llm: LLM, address: str) -> None:
        async with InferenceServerClient(address) as client:
            for turn in range(FIRST_TOKENS):
                for name in rotated((BASE, *FRONTS), turn):  # a prompt of its own each time: nobody can reuse one
                    text = f"{case.unique(next(numbers))} {case.prompts[0]}"
                    found.setdefault((name, 0), []).append(await go(llm, client, name, [text], 1))
            for count in options.concurrency:
                for turn in range(options.repetitions + 1):  # the first one warms up
                    for name in rotated((BASE, *FRONTS), turn):
                        timed = await go(llm, client, name, list(case.prompts[:count]), case.max_tokens)
                        if turn:
                            found.setdefault((name, count), []).append(timed)

    numbers = itertools.count(100)
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        repository = Path(folder) / "repository"
        package_bundle(case.bundle.path, repository, PackageOptions(threads=options.threads))
        server = TritonServer(repository, python=options.python, log=Path(folder) / "log", drain=5)
        # Both sides reuse the prompts that they have seen.
        with LLM(case.bundle, threads=options.threads, verify=False) as llm, server:
            asyncio.run(turns(llm, server.grpc_address))
    _check(case, found)
    return _report(case, found, goals)


def _check(case: Case, found: dict[tuple[str, int], list[Timed]]) -> None:
    for (name, count), times in found.items():
        for timed in times:
            if count and timed.tokens != found[BASE, count][0].tokens:
                raise Disagreement(f"{case.name}: {name} at {count} gave other tokens than the in-process LLM")


# -- figures -----------------------------------------------------------------------------------------------------------


def _report(case: Case, found: dict[tuple[str, int], list[Timed]], goals: list[Goal]) -> dict[str, Any]:
    speeds, rows = {}, []
    for count in sorted({count for _, count in found if count}):
        rates = {name: [_rate(timed) for timed in found[name, count]] for name in (BASE, *FRONTS)}
        shares = {front: paired_ratio(rates[front], rates[BASE]) for front in FRONTS}
        medians = {name: statistics.median(values) for name, values in rates.items()}
        speeds[count] = {"tokens_per_second": medians, "share": shares}
        rows.append((f"{count}", *medians.values(), *shares.values()))
        goals += [
            Goal(f"{case.name}: {front}, {count} at once", share, SHARE_GOAL, True) for front, share in shares.items()
        ]
    headers = ("at once", *(f"{name} tok/s" for name in (BASE, *FRONTS)), *(f"{front} share" for front in FRONTS))
    print_table(f"{case.name}: tokens a second", headers, rows)
    first = {name: statistics.median(timed.first[0] for timed in found[name, 0]) * 1e3 for name in (BASE, *FRONTS)}
    added = {front: first[front] - first[BASE] for front in FRONTS}
    goals += [
        Goal(f"{case.name}: {front}, added ms to first token", value, FIRST_TOKEN_GOAL, False)
        for front, value in added.items()
    ]
    hops = {
        "gRPC, server and dflow": added["dflow"],
        "preprocessing, in the ensemble": added["ensemble"] - added["dflow"],
        "dflow_bls in place of it": added["dflow_bls"] - added["dflow"],
    }
    print_table(
        f"{case.name}: milliseconds to the first token, one request",
        ("", "ms"),
        [*first.items(), *((f"hop: {name}", value) for name, value in hops.items())],
    )
    return {"speeds": speeds, "first_token_ms": first, "added_ms": added, "hops_ms": hops}


def _rate(timed: Timed) -> float:
    return sum(map(len, timed.tokens)) / timed.seconds


if __name__ == "__main__":
    sys.exit(main())
