"""Tiny bundles for the fake GPU, and what is done with them: jobs that join, wait, leave and are cancelled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from draft_sources import chain_sources, draft_sources
from tiny import Config, make_drafter, make_target

from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.bundle import Bundle
from dflow_trt.decode import Decoder
from dflow_trt.method.sampling import SamplingParams
from dflow_trt.request import Request
from dflow_trt.runtime.base import Runtime

VOCAB = 24  # small, so that random drafts are right often enough to be accepted
DRAFTERS: Mapping[str, Config] = {
    "dflash": {"block_size": 5, "taps": (1, 0), "seed": 3},
    "dflow": {"block_size": 8, "relay": True},
}
SAMPLINGS: Sequence[dict[str, Any]] = (
    {},
    {"temperature": 0.8, "seed": 3},
    {},
    {"temperature": 1.2, "top_k": 9, "top_p": 0.9, "seed": 4},
    {"logprobs": 2},
    {"repetition_penalty": 1.3},
)


def tiny_bundle(
    folder: Path,
    drafters: Mapping[str, Config] = DRAFTERS,
    int8: bool = False,
    models: Mapping[str, Config | None] | None = None,
    lookup: Mapping[str, int] | None = None,
    chains: Mapping[str, Config] | None = None,
    **target: Any,
) -> Bundle:
    """A random pair, built for ONNX Runtime: 8 slots, prompts of 120, sequences of 192.

    models, lookup, chains: see :mod:`draft_sources`.
    """
    config = make_target(folder / "target", vocab_size=VOCAB, eos=[1], **target)
    for name, keys in drafters.items():
        make_drafter(folder / name, config, **keys)
    options = BuildOptions(
        max_batch_size=8,
        max_input_len=120,
        max_seq_len=192,
        max_num_tokens=64,
        target_weights="int8" if int8 else "float",
    )
    sources = [DrafterSource(folder / name, name) for name in drafters]
    sources += draft_sources(folder, VOCAB, models or {}, lookup) + chain_sources(folder, config, chains or {})
    return build_bundle(folder / "target", sources, folder / "bundle", options, self_check="off")


@dataclass(frozen=True)
class Job:
    """A request, the step at which it is submitted, and the one at which it is cancelled."""

    request: Request
    step: int
    cancelled: int | None


def make_jobs(bundle: Bundle, count: int, seed: int = 0) -> list[Job]:
    """Mixed strategies, samplings, prompt lengths and output lengths; now and then one is cancelled on its way."""
    rng, strategies = np.random.default_rng(seed), list(bundle.strategies.values())
    lengths = [1, 2, 9, 110, *rng.integers(1, 60, count).tolist()]
    jobs, step = [], 0
    for i in range(count):
        step += int(rng.integers(0, 4)) if i > 3 else 0
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 40)), ignore_eos=bool(i % 3), **SAMPLINGS[i % len(SAMPLINGS)]
        )
        prompt = rng.integers(2, VOCAB, lengths[i]).tolist()
        request = Request(str(i), prompt, params, strategies[i % len(strategies)], seed=i)
        jobs.append(Job(request, step, step + int(rng.integers(1, 6)) if i % 7 == 5 else None))
    return jobs


def run_jobs(bundle: Bundle, runtime: Runtime, jobs: Sequence[Job], held: int = 15) -> dict[str, list[Any]]:
    """What each request emitted, round by round: picks with their log-probabilities, counts, the reason to end.

    The same schedule for every runtime: ``held`` per cent of the requests wait in a step, chosen at random.
    """
    decoder, rng = Decoder(bundle, runtime), np.random.default_rng(1)
    waiting, step = list(jobs), 0
    found: dict[str, list[Any]] = {job.request.id: [] for job in jobs}
    while waiting or not decoder.idle:
        for job in [job for job in waiting if job.step <= step]:
            waiting.remove(job)
            decoder.submit(replace(job.request))
        for job in jobs:
            if job.cancelled == step:
                decoder.cancel(job.request.id)
        hold = [job.request.id for job in jobs if rng.integers(100) < held]
        for each in decoder.step(hold).emissions:
            found[each.request_id].append((each.picks, each.num_accepted, each.num_drafted, each.finish_reason))
        step += 1
    return found


def tokens(emissions: Sequence[Any]) -> list[int]:
    return [pick.token for picks, *_ in emissions for pick in picks]
