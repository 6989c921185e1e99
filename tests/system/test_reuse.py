"""Prefix reuse and adaptive drafts on real engines: token by token, and draft by draft, what a cold run gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from pairs import VARIANTS, VOCAB, Pair, PoisonedRuntime

from dflow_trt import LLM, SamplingParams
from dflow_trt.api import RequestOutput
from dflow_trt.decode import Decoder
from dflow_trt.request import Request

GetPair = Callable[[str], Pair]


def conversations(count: int) -> list[dict[str, Any]]:
    """Prompts that begin alike: so much of one of three texts, then something of their own."""
    rng = np.random.default_rng(4)
    texts = rng.integers(2, VOCAB, (3, 100))
    shared, tails = rng.integers(0, 100, count), rng.integers(1, 20, count)
    ids = [[*texts[i // 4 % 3][: shared[i]], *rng.integers(2, VOCAB, tails[i])] for i in range(count)]
    return [{"prompt_token_ids": [int(token) for token in each]} for each in ids]


def run(
    pair: Pair, runtime: Any, reuse: bool, batch: int, strategies: Sequence[str], **options: Any
) -> list[RequestOutput]:
    llm = LLM(pair.bundle, runtime=runtime, max_batch_size=batch, prefix_reuse=reuse, **options)
    prompts = conversations(len(strategies))
    params = [
        SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9 * (i % 2), seed=i) for i in range(len(prompts))
    ]
    return llm.generate(prompts, params, strategy=list(strategies))


def counts(out: RequestOutput) -> tuple[Any, ...]:
    stats = out.stats
    return out.token_ids, stats.rounds, stats.drafted, stats.accepted, stats.relayed_slots


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("batch", [1, 3])
def test_reused_rows_change_neither_tokens_nor_drafts(tiny_pair: GetPair, variant: str, batch: int) -> None:
    pair, rng = tiny_pair(variant), np.random.default_rng(batch)
    strategies = rng.choice(pair.strategies, 40).tolist()
    cold = run(pair, pair.runtime, False, batch, strategies)
    warm = run(pair, pair.runtime, True, batch, strategies)
    assert [counts(out) for out in warm] == [counts(out) for out in cold]
    assert sum(out.stats.reused_tokens for out in cold) == 0
    assert sum(out.stats.reused_tokens for out in warm) > 40


def test_reuse_reads_no_row_that_is_not_live(tiny_pair: GetPair) -> None:
    pair, strategies = tiny_pair("plain"), ["ar", "dflow", "dflash"] * 8
    cold = run(pair, pair.runtime, False, 2, strategies)
    warm = run(pair, PoisonedRuntime(pair.runtime), True, 2, strategies)
    assert [counts(out) for out in warm] == [counts(out) for out in cold]


@pytest.mark.parametrize("variant", VARIANTS)
def test_adaptive_drafts_change_no_token(tiny_pair: GetPair, variant: str) -> None:
    pair = tiny_pair(variant)
    strategies = np.random.default_rng(0).choice(pair.strategies, 30).tolist()
    fixed = run(pair, pair.runtime, False, 8, strategies)
    adaptive = run(pair, pair.runtime, True, 8, strategies, draft_policy="adaptive")
    assert [out.token_ids for out in adaptive] == [out.token_ids for out in fixed]


def test_drafts_that_do_not_pay_are_turned_down(tiny_pair: GetPair) -> None:
    """A random drafter of a random target: hardly ever right, so that most rounds soon are plain ones."""
    pair = tiny_pair("plain")
    drafted = {}
    for policy in ("fixed", "adaptive"):
        decoder = Decoder(pair.bundle, pair.runtime, draft_policy=policy)  # type: ignore[arg-type]
        params = SamplingParams(max_tokens=150, ignore_eos=True, temperature=1.5)
        decoder.submit(Request("a", [2, 3, 4], params, pair.bundle.strategy("dflash"), 1))
        while not decoder.idle:
            [emission] = decoder.step().emissions
        drafted[policy] = emission.stats.drafted / emission.stats.rounds
    assert drafted["adaptive"] < 0.7 * drafted["fixed"]
