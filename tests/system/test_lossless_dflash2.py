"""DFlash 2 in real bundles: every strategy gives what plain decoding gives, whatever its batch and schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pairs import FLASH, FLOW, PEERS, Config, Pair, Variant, build_tiny
from test_lossless import check_lossless, generate, random_prompts, run_ragged

from dflow_trt.bundle import open_bundle
from dflow_trt.method.sampling import SamplingParams
from dflow_trt.spec import ConvSpec, SelectorSpec

DRAFTERS: dict[str, Config] = {
    "dflash2": {**FLASH, "dflash2": {}},
    "dflash2-dflow": {**FLOW, "dflash2": {"conv_kernel_size": 4, "selector_top_k": 24}},
    "dflash": FLASH,
}
VARIANTS = {
    "plain": Variant({}, drafters=DRAFTERS),
    "heads are kv heads, int8": Variant(PEERS, weights="int8", drafters=DRAFTERS),
}


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    built = build_tiny(tmp_path_factory.mktemp("second"), VARIANTS[request.param])
    yield built
    built.runtime.close()


def test_the_bundle_says_what_its_drafters_are(pair: Pair) -> None:
    bundle = open_bundle(pair.bundle.path)
    assert pair.strategies == ["ar", "dflash2", "dflash2-dflow", "dflash2-dflow-norelay", "dflash"]
    assert bundle.default_strategy == "dflash2-dflow"
    spec: Any = bundle.drafters["dflash2-dflow"].spec
    assert (spec.conv, spec.head) == (ConvSpec(4, 16), SelectorSpec(12, 24))


def test_every_strategy_and_batch_mix_equals_plain_decoding(pair: Pair) -> None:
    rng = np.random.default_rng(5)
    params = [SamplingParams(max_tokens=int(rng.integers(1, 48)), ignore_eos=bool(rng.integers(2))) for _ in range(30)]
    totals = check_lossless(pair, random_prompts(30), params)
    for strategy in pair.strategies:
        assert bool(totals[f"{strategy} accepted"]) == (strategy != "ar"), "drafts are accepted now and then"
        assert bool(totals[f"{strategy} relayed"]) == strategy.endswith("dflow")


def test_sampled_texts_equal_plain_decoding(pair: Pair) -> None:
    params = [SamplingParams(max_tokens=30, temperature=0.8, top_k=12, seed=seed) for seed in range(8)]
    prompts = random_prompts(8, seed=2)
    wanted = [out.token_ids for out in generate(pair, prompts, params)]
    for strategy in ("dflash2", "dflash2-dflow"):
        assert [out.token_ids for out in generate(pair, prompts, params, strategy, batch=3)] == wanted


def test_drafts_do_not_depend_on_batch_mates_or_schedule(pair: Pair) -> None:
    """Accepted and relayed counts of a request are those of the same request alone."""
    prompts, params = random_prompts(8, seed=3), [SamplingParams(max_tokens=40, ignore_eos=True)] * 8
    ids = [each["prompt_token_ids"] for each in prompts]
    jobs = [(i, strategy) for i in range(8) for strategy in ("dflash2", "dflash2-dflow")]
    found = run_ragged(pair, jobs, ids, params, 2)
    for strategy in ("dflash2", "dflash2-dflow"):
        for i, out in enumerate(generate(pair, prompts, params, strategy, batch=1)):
            mixed = found[i, strategy][1]
            for name in ("rounds", "drafted", "accepted", "relayed_slots"):
                assert getattr(out.stats, name) == getattr(mixed, name), f"{name} of prompt {i}, {strategy}"
