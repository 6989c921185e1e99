"""Storms of requests and cancels on a real tritonserver: afterwards every slot is free, every stream ended, sums agree.

    python build_scripts/stress_serving.py                   # this Python has dflow-trt[triton,serve]
    python build_scripts/stress_serving.py --python VENV/bin/python --minutes 5 --seed 3

A storm is 200 requests to dflow, ensemble and dflow_bls at once. Most are cut: cancelled after a random time, left
after some responses, or ended by a stop of their id. Those that are not must get the tokens that the same request gets
alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_common import REPO
from tritonclient.grpc.aio import InferenceServerClient

from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.prompts import read_prompts
from dflow_trt.serving.package import PackageOptions, package_bundle
from dflow_trt.serving.server import TritonServer
from dflow_trt.text import Tokenizer

sys.path.insert(0, str(REPO / "tests"))
from triton_client import Answer, ask, metrics

FRONTS = ("dflow", "ensemble", "dflow_bls")
CUTS = ("whole", "cancel", "leave", "stop")
WEIGHTS = (3, 4, 2, 1)
LATEST_CANCEL = 1.5  # seconds
LONGEST = 120  # tokens: over the ensemble a request that was left runs to its end
PUBLISHED = 1.5  # seconds until the metrics are those of now
PATIENCE = 10.0  # seconds until all is quiet, and for the first answer behind a storm
STRATEGIES = ("dflow", "dflash", "ar")


class Failure(Exception):
    """Something is not as it must be after a storm."""


@dataclass(frozen=True)
class Shot:
    """One request. cut: how it is ended. after: seconds until a cancel, responses until it is left."""

    number: int
    front: str
    prompt: int
    max_tokens: int
    strategy: str
    stream: bool
    cut: str
    after: float

    @property
    def key(self) -> tuple[int, int]:
        """What its tokens depend on."""
        return self.prompt, self.max_tokens


def main() -> int:
    """1 when something is wrong."""
    options = _options()
    options.work.mkdir(parents=True, exist_ok=True)
    bundle = _bundle(options.work / "stress")
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        repository, log = Path(folder) / "repository", options.work / "stress.log"
        package_bundle(bundle, repository, PackageOptions(threads=options.threads, max_queue=options.requests))
        with TritonServer(repository, python=options.python, log=log, drain=5) as server:
            try:
                report = asyncio.run(_storms(server, bundle, options))
            except Failure as error:
                print(f"error: {error} (see {log})", file=sys.stderr)
                return 1
    print(json.dumps(report))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--python", type=Path, default=Path(sys.executable), help="runs the models [this one]")
    add("--threads", type=int, default=1, help="of the engines [1]")
    add("--minutes", type=float, default=3.0, help="[3]")
    add("--requests", type=int, default=200, help="of one storm [200]")
    add("--seed", type=int, default=1)
    add("--work", type=Path, default=REPO / "build" / "bench", help="folder for bundles, and for the server's log")
    return parser.parse_args()


def _bundle(output: Path) -> Path:
    pair = REPO / "dflow_trt" / "example_data"
    sources = [DrafterSource(pair / drafter) for drafter in ("dflash", "dflow")]
    limits = BuildOptions(max_batch_size=8, max_input_len=512, max_seq_len=704)
    return build_bundle(pair / "target", sources, output, limits, force=True, self_check="off").path


async def _storms(server: TritonServer, bundle: Path, options: argparse.Namespace) -> dict[str, Any]:
    rng, end, totals = random.Random(options.seed), time.monotonic() + 60 * options.minutes, Counter[str]()
    tokenizer = Tokenizer.from_folder(bundle / "tokenizer")
    prompts = read_prompts(REPO / "dflow_trt" / "example_data" / "prompts.jsonl")
    texts = [tokenizer.render_chat([{"role": "user", "content": each["prompt"]}]) for each in prompts[:24]]
    number = 0
    while time.monotonic() < end:
        shots = [_shot(rng, i, len(texts)) for i in range(options.requests)]
        async with InferenceServerClient(server.grpc_address) as client:
            storm = Storm(server, client, texts, [tokenizer.encode(text) for text in texts], f"storm-{number}")
            totals += await storm.run(shots)
        number += 1
        print(f"storm {number}: {dict(sorted(totals.items()))}", flush=True)
    return {"storms": number, "seed": options.seed, **totals}


def _shot(rng: random.Random, number: int, prompts: int) -> Shot:
    cut = rng.choices(CUTS, WEIGHTS)[0]
    after = rng.random() ** 3 * LATEST_CANCEL if cut == "cancel" else rng.randrange(1, 5)
    stream = cut == "leave" or rng.random() < 0.7
    front, strategy = rng.choice(FRONTS), rng.choice(STRATEGIES)
    return Shot(number, front, rng.randrange(prompts), rng.randrange(1, LONGEST), strategy, stream, cut, after)


class Storm:
    """One of them. label: of the ids of its requests."""

    def __init__(
        self,
        server: TritonServer,
        client: InferenceServerClient,
        texts: Sequence[str],
        ids: Sequence[list[int]],
        label: str,
    ) -> None:
        self._server, self._client, self._texts, self._ids, self._label = server, client, texts, ids, label

    async def run(self, shots: Sequence[Shot]) -> Counter[str]:
        """All at once, then all checks; how many requests ended how."""
        await asyncio.sleep(PUBLISHED)
        before = metrics(self._server)
        answers = await asyncio.gather(*map(self._fire, shots))
        await self._quiet()
        for front in FRONTS:
            await self._fresh(front)
        whole = [pair for pair in zip(shots, answers, strict=True) if pair[0].cut == "whole"]
        for shot, answer in whole:
            if answer.message is not None or answer.finals != 1:
                raise Failure(f"{self._label}: {shot} ended with {answer.finals} finals, {answer.message}")
        await self._compare(whole)
        await asyncio.sleep(PUBLISHED)
        return self._count(before, shots)

    async def _fire(self, shot: Shot) -> Answer:
        task = asyncio.create_task(self._ask(shot))
        if shot.cut == "cancel":
            await asyncio.sleep(shot.after)
            task.cancel()
        if shot.cut == "stop":
            await asyncio.sleep(shot.after / 4)
            await ask(self._client, "dflow", _stop(), request_id=self._id(shot))
        return await task

    async def _ask(self, shot: Shot) -> Answer:
        async def leave(answer: Answer) -> bool:
            return shot.cut != "leave" or len(answer.responses) < shot.after

        options = self._request(shot.front, shot) | {"stream": shot.stream, "strategy": shot.strategy}
        task = {"task": shot.cut}
        return await ask(
            self._client, shot.front, options, request_id=self._id(shot), parameters=task, on_response=leave
        )

    def _id(self, shot: Shot) -> str:
        return f"{self._label}-{shot.number}"

    def _request(self, front: str, shot: Shot) -> dict[str, Any]:
        prompt = {"input_ids": self._ids[shot.prompt]} if front == "dflow" else {"text_input": self._texts[shot.prompt]}
        return {**prompt, "max_tokens": shot.max_tokens, "ignore_eos": True}

    # -- afterwards ----------------------------------------------------------------------------------------------------

    async def _quiet(self) -> None:
        end = time.monotonic() + PATIENCE
        while (found := _in_flight(self._server)) != (0, 0):
            if time.monotonic() > end:
                raise Failure(f"{self._label}: {found} slots and places in the queue are not free")
            await asyncio.sleep(0.1)

    async def _fresh(self, front: str) -> None:
        """Each front answers a new request."""
        shot = Shot(-1, front, 0, 4, "ar", False, "whole", 0)
        answer = await ask(self._client, front, self._request(front, shot), seconds=PATIENCE)
        if answer.finals != 1:
            raise Failure(f"{self._label}: {front} is silent behind a storm: {answer.code} {answer.message}")

    async def _compare(self, whole: Sequence[tuple[Shot, Answer]]) -> None:
        """The same requests alone, one of each kind."""
        alone: dict[tuple[int, int], list[int]] = {}
        for shot, answer in whole:
            if shot.key not in alone:
                single = await ask(self._client, "dflow", self._request("dflow", shot) | {"strategy": "ar"})
                alone[shot.key] = single.ids()[0]
            if answer.ids()[0] != alone[shot.key]:
                raise Failure(f"{self._label}: {shot} got other tokens than alone")

    def _count(self, before: dict[str, float], shots: Sequence[Shot]) -> Counter[str]:
        """Sums of the endpoint against what this client knows."""
        outcomes = _outcomes(metrics(self._server)) - _outcomes(before)
        sent = Counter(shot.cut for shot in shots)
        for cut in CUTS:
            ended = sum(count for (each, _), count in outcomes.items() if each == cut)
            # A request that was cancelled soon may never have been seen.
            if ended > sent[cut] or (ended < sent[cut] and cut != "cancel"):
                raise Failure(f"{self._label}: {ended} of {sent[cut]} requests ({cut}) were counted")
        if outcomes["whole", "length"] != sent["whole"]:
            raise Failure(
                f"{self._label}: {outcomes['whole', 'length']} of {sent['whole']} whole requests were counted"
            )
        return Counter({f"{cut} {outcome}": count for (cut, outcome), count in outcomes.items() if count})


def _outcomes(found: dict[str, float]) -> Counter[tuple[str, str]]:
    """Sequences that ended, by how they were cut (the task label) and by outcome."""
    counts: Counter[tuple[str, str]] = Counter()
    for series, value in found.items():
        labels = dict(re.findall(r'(\w+)="([^"]*)"', series))
        if series.startswith("dflow_requests_total{") and labels["task"] in CUTS:
            counts[labels["task"], labels["outcome"]] += int(value)
    return counts


def _stop() -> dict[str, Any]:
    return {"input_ids": [0], "max_tokens": 1, "stop": True}


def _in_flight(server: TritonServer) -> tuple[int, int]:
    found = metrics(server)
    return int(found["dflow_slots_in_use"]), int(found["dflow_queue_length"])


if __name__ == "__main__":
    sys.exit(main())
