"""Lossless on real engines: every strategy gives what plain decoding gives, token by token and bit by bit.

The mechanics run on random tiny pairs; their vocabulary is so small that chance drafts are accepted now and then. The
example pair then shows the same with drafts that are mostly right.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from pairs import VARIANTS, VOCAB, Pair, PoisonedRuntime

from dflow_trt.api import LLM, RequestOutput
from dflow_trt.decode import Decoder
from dflow_trt.errors import UserError
from dflow_trt.method.sampling import SamplingParams
from dflow_trt.request import Request
from dflow_trt.runtime.ort import OrtRuntime

TIE = 1e-3  # two float implementations may choose differently where the two best logits are closer than this
GetPair = Callable[[str], Pair]
Job = tuple[int, str]  # (prompt, strategy)


def random_prompts(count: int, seed: int = 0, longest: int = 110) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    lengths = [1, 2, 7, 8, 9, longest, *rng.integers(1, 60, count).tolist()][:count]
    return [{"prompt_token_ids": rng.integers(2, VOCAB, length).tolist()} for length in lengths]


def generate(
    pair: Pair,
    prompts: Sequence[Any],
    params: SamplingParams | Sequence[SamplingParams],
    strategy: str | Sequence[str] = "ar",
    batch: int = 8,
    runtime: Any = None,
    **options: Any,
) -> list[RequestOutput]:
    llm = LLM(pair.bundle, runtime=runtime or pair.runtime, max_batch_size=batch, prefix_reuse=False)
    strategy = strategy if isinstance(strategy, str) else list(strategy)
    return llm.generate(list(prompts), params, strategy=strategy, **options)


def run_ragged(
    pair: Pair, jobs: Sequence[Job], prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], seed: int
) -> dict[Job, tuple[list[int], Any]]:
    """Jobs that join in random order while others are in flight, some held back in some steps."""
    rng, decoder = np.random.default_rng(seed), Decoder(pair.bundle, pair.runtime, prefix_reuse=False)
    waiting = [jobs[i] for i in rng.permutation(len(jobs))]
    tokens: dict[Job, list[int]] = {job: [] for job in jobs}
    stats: dict[Job, Any] = {}
    by_id = {f"{prompt}-{strategy}": (prompt, strategy) for prompt, strategy in jobs}
    while waiting or not decoder.idle:
        for _ in range(int(rng.integers(0, 4))):
            if waiting:
                i, strategy = waiting.pop()
                seed_i = params[i].seed or 0
                decoder.submit(
                    Request(f"{i}-{strategy}", prompts[i], params[i], pair.bundle.strategy(strategy), seed_i)
                )
        hold = [request_id for request_id in by_id if rng.integers(100) < 15]
        for emission in decoder.step(hold).emissions:
            tokens[by_id[emission.request_id]] += emission.tokens
            stats[by_id[emission.request_id]] = emission.stats
    return {job: (tokens[job], stats[job]) for job in jobs}


def mixed_runs(
    pair: Pair, prompts: Sequence[Any], ids: Sequence[Sequence[int]], params: Sequence[SamplingParams], seed: int = 1
) -> dict[str, dict[Job, tuple[list[int], Any]]]:
    """Every prompt under every strategy, dealt at random to batches of 1, 2, 3, 8 and to a ragged run."""
    rng = np.random.default_rng(seed)
    jobs = list(itertools.product(range(len(prompts)), pair.strategies))
    order = [jobs[i] for i in rng.permutation(len(jobs))]
    shares = {"1": 10, "2": 15, "3": 20, "8": 30, "ragged": 25}  # per cent
    found, start = {}, 0
    for name, share in shares.items():
        end = len(order) if name == "ragged" else start + len(order) * share // 100
        part, start = order[start:end], end
        if name == "ragged":
            found[name] = run_ragged(pair, part, ids, params, seed)
            continue
        outputs = generate(
            pair, [prompts[i] for i, _ in part], [params[i] for i, _ in part], [s for _, s in part], int(name)
        )
        found[name] = {job: (list(out.token_ids), out.stats) for job, out in zip(part, outputs, strict=True)}
    return found


def check_lossless(pair: Pair, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> Counter[str]:
    """All strategies and batch mixes against plain decoding; gives the sums of the counts by strategy."""
    plain_run = generate(pair, prompts, params)
    wanted = [list(out.token_ids) for out in plain_run]
    ids = [out.prompt_token_ids for out in plain_run]
    runs = mixed_runs(pair, prompts, ids, params)
    totals: Counter[str] = Counter()
    for mix, found in runs.items():
        for (i, strategy), (tokens, stats) in found.items():
            assert tokens == wanted[i], f"prompt {i}, {strategy}, batch {mix}"
            assert stats.output_tokens == stats.emitted + 1 == len(tokens)
            totals[f"{strategy} accepted"] += stats.accepted
            totals[f"{strategy} rounds"] += stats.rounds
            totals[f"{strategy} relayed"] += stats.relayed_slots
            totals["runs"] += 1
    assert totals["runs"] == len(prompts) * len(pair.strategies)
    return totals


# -- every strategy, every batch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_tiny_every_strategy_and_batch_mix_equals_plain_decoding(tiny_pair: GetPair, variant: str) -> None:
    pair, rng = tiny_pair(variant), np.random.default_rng(5)
    params = [SamplingParams(max_tokens=int(rng.integers(1, 48)), ignore_eos=bool(rng.integers(2))) for _ in range(50)]
    totals = check_lossless(pair, random_prompts(50), params)
    for strategy in pair.strategies:
        assert bool(totals[f"{strategy} accepted"]) == (strategy != "ar"), "drafts are accepted now and then"
        assert bool(totals[f"{strategy} relayed"]) == strategy.endswith("dflow")


def test_example_every_strategy_and_batch_mix_equals_plain_decoding(
    example: Pair, example_prompts: list[dict[str, Any]]
) -> None:
    rng = np.random.default_rng(5)
    params = [SamplingParams(max_tokens=int(rng.integers(16, 81))) for _ in example_prompts]
    totals = check_lossless(example, example_prompts, params)
    for strategy in example.strategies:
        if strategy != "ar":
            assert totals[f"{strategy} accepted"] > 0.1 * totals[f"{strategy} rounds"], "drafts are accepted"


@pytest.mark.parametrize("variant", ["plain", "heads are kv heads", "domino"])
def test_drafts_do_not_depend_on_batch_mates_or_schedule(tiny_pair: GetPair, variant: str) -> None:
    """Accepted, drafted and relayed counts of a request are those of the same request alone."""
    pair = tiny_pair(variant)
    prompts, params = random_prompts(24, seed=3), [SamplingParams(max_tokens=40, ignore_eos=True)] * 24
    ids = [each["prompt_token_ids"] for each in prompts]
    jobs = list(itertools.product(range(24), [s for s in pair.strategies if s != "ar"]))
    found = run_ragged(pair, jobs, ids, params, 2)
    for strategy in {s for _, s in jobs}:
        for i, out in enumerate(generate(pair, prompts, params, strategy, batch=1)):
            alone, mixed = dataclasses.asdict(out.stats), dataclasses.asdict(found[i, strategy][1])
            for name in ("rounds", "drafted", "accepted", "emitted", "relayed_slots"):
                assert alone[name] == mixed[name], f"{name} of prompt {i}, {strategy}"


@pytest.mark.parametrize("draft_tokens", [0, 1, 3, 99])
def test_a_cap_on_drafts_changes_no_token(plain: Pair, draft_tokens: int) -> None:
    prompts, params = random_prompts(8, seed=4), SamplingParams(max_tokens=30, ignore_eos=True)
    wanted = [out.token_ids for out in generate(plain, prompts, params)]
    for strategy in plain.strategies[1:]:
        outputs = generate(plain, prompts, params, strategy, draft_tokens=draft_tokens)
        assert [out.token_ids for out in outputs] == wanted
        assert all(out.stats.drafted <= draft_tokens * out.stats.rounds for out in outputs)
        assert bool(sum(out.stats.drafted for out in outputs)) == bool(draft_tokens)


# -- against transformers ----------------------------------------------------------------------------------------------


class Transformers:
    """The target in transformers, float32; logits of live ids after every token."""

    def __init__(self, pair: Pair) -> None:
        self.torch = pytest.importorskip("torch", reason="the reference is torch code")
        transformers = pytest.importorskip("transformers", reason="the reference is transformers' Qwen3")
        self.torch.set_num_threads(1)
        model = transformers.Qwen3ForCausalLM.from_pretrained(
            pair.target, dtype=self.torch.float32, attn_implementation="eager"
        )
        self.model, self.live = model.eval(), pair.bundle.target.live_vocab

    def logits(self, tokens: Sequence[int]) -> Any:
        with self.torch.inference_mode():
            out = self.model(self.torch.tensor([list(tokens)]), use_cache=False)
        return out.logits[0, :, : self.live].numpy()

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """transformers' own loop, with its cache."""
        ids = self.torch.tensor([list(prompt)])
        with self.torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=count,
                pad_token_id=0,
                eos_token_id=None,
                suppress_tokens=list(range(self.live, self.model.config.vocab_size)) or None,
            )
        found: list[int] = out[0, len(prompt) :].tolist()
        return found


def differences(reference: Transformers, outputs: Sequence[RequestOutput]) -> int:
    """Places where transformers, given our own tokens so far, chooses otherwise: every one must be a tie."""
    count = 0
    for out in outputs:
        prompt, tokens = list(out.prompt_token_ids), list(out.token_ids)
        rows = reference.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        for position, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            if int(row.argmax()) != token:
                top = np.sort(row)[-2:]
                assert top[1] - top[0] < TIE, f"token {position} of {out.request_id}: the gap is {top[1] - top[0]:.2g}"
                assert row[token] == top[0], "the other of the two"
                count += 1
    return count


@pytest.mark.parametrize("variant", ["plain", "heads are kv heads", "sliding window"])
def test_tiny_plain_decoding_equals_transformers(
    tiny_pair: GetPair, variant: str, record_property: Callable[[str, object], None]
) -> None:
    pair = tiny_pair(variant)
    outputs = generate(pair, random_prompts(24, seed=6), SamplingParams(max_tokens=60, ignore_eos=True))
    count = differences(Transformers(pair), outputs)
    record_property("tokens", sum(len(out.token_ids) for out in outputs))
    record_property("differences", count)
    assert count <= 2


def test_example_plain_decoding_equals_transformers(
    example: Pair, example_prompts: list[dict[str, Any]], record_property: Callable[[str, object], None]
) -> None:
    reference = Transformers(example)
    outputs = generate(example, example_prompts[:100], SamplingParams(max_tokens=64, ignore_eos=True))
    count = differences(reference, outputs)
    record_property("tokens", sum(len(out.token_ids) for out in outputs))
    record_property("differences", count)
    assert count <= 5
    for out in outputs[:8]:
        theirs = reference.greedy(out.prompt_token_ids, 64)
        first = next((i for i in range(64) if theirs[i] != out.token_ids[i]), None)
        if first is not None:
            row = reference.logits([*out.prompt_token_ids, *theirs[:first]])[-1]
            top = np.sort(row)[-2:]
            assert top[1] - top[0] < TIE, f"they differ at token {first}"


# -- sampling ----------------------------------------------------------------------------------------------------------

TINY_GRID: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 2.0},
    "top_k": {"temperature": 1.0, "top_k": 4},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "all filters": {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"temperature": 0.8, "presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "all penalties": {"temperature": 1.0, "repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 1},
    "bias": {"logit_bias": {5: 3.0, 6: -np.inf, 7: -2.5}},
    "bad words": {"bad_words_ids": [[5], [6, 7], [8, 9, 10], [9, 9]]},
    "min_tokens": {"temperature": 1.0, "min_tokens": 20, "ignore_eos": False, "stop_token_ids": [4, 9]},
    "stop ids": {"temperature": 0.9, "stop_token_ids": [11, 13]},
    "eos": {"temperature": 1.0, "ignore_eos": False},
    "logprobs": {"temperature": 1.0, "logprobs": 3},
    "greedy logprobs": {"logprobs": 0},
}


def fingerprint(out: RequestOutput) -> list[tuple[Any, ...]]:
    """All that a caller sees of every sample, log-probabilities to the bit."""
    return [(o.text, o.token_ids, o.finish_reason, o.logprobs, o.seed) for o in out.outputs]


@pytest.mark.parametrize("case", TINY_GRID)
def test_tiny_sampling_is_the_same_under_every_strategy(tiny_pair: GetPair, plain: Pair, case: str) -> None:
    options = {"ignore_eos": True, **TINY_GRID[case]}
    prompts = random_prompts(6, seed=8)
    params = [SamplingParams(max_tokens=40, seed=100 + i, n=1 + (i == 2) * 2, **options) for i in range(6)]
    wanted = [fingerprint(out) for out in generate(plain, prompts, params)]
    mixed = [plain.strategies[i % len(plain.strategies)] for i in range(6)]
    for strategy, batch in [(each, 8) for each in plain.strategies[1:]] + [("ar", 1), ("dflow", 3), ("mixed", 5)]:
        outputs = generate(plain, prompts, params, mixed if strategy == "mixed" else strategy, batch)
        assert [fingerprint(out) for out in outputs] == wanted, f"{strategy} in batches of {batch}"
    other = tiny_pair("other kinds")  # of the same target
    outputs = generate(other, prompts, params, ["self", "model", "ngram", *["eagle3"] * 3], batch=5)
    assert [fingerprint(out) for out in outputs] == wanted, "drafters of other kinds"
    samples = [o.token_ids for o in generate(plain, prompts, params, "dflow")[2].outputs]
    assert len(samples) == 3
    if params[0].temperature > 0 and params[0].temperature != 0.9:
        assert len(set(samples)) == 3, "the samples of one prompt differ"


def test_penalties_bias_and_bad_words_do_what_they_say_on_engines(plain: Pair) -> None:
    """Otherwise equality between strategies could be equality of two things that do nothing."""
    prompts = random_prompts(6, seed=8)

    def run(**options: Any) -> list[tuple[int, ...]]:
        params = SamplingParams(max_tokens=40, ignore_eos=True, seed=1, **options)
        return [out.token_ids for out in generate(plain, prompts, params, "dflow")]

    greedy = run()
    for case in ("repetition", "frequency", "bias", "bad words"):
        assert run(**TINY_GRID[case]) != greedy
    assert all(6 not in tokens for tokens in run(logit_bias={6: -np.inf}))
    for tokens in run(bad_words_ids=[[5], [6, 7]], temperature=1.5):
        assert 5 not in tokens
        assert (6, 7) not in set(itertools.pairwise(tokens))


def test_a_seed_is_independent_of_batch_mates(plain: Pair) -> None:
    prompts = random_prompts(8, seed=9)
    params = [SamplingParams(max_tokens=30, temperature=1.0, seed=i, ignore_eos=True) for i in range(8)]
    alone = [generate(plain, [p], each, "dflow")[0].token_ids for p, each in zip(prompts, params, strict=True)]
    for order in (list(range(8)), list(range(7, -1, -1)), [3, 0, 6, 1, 7, 2, 5, 4]):
        outputs = generate(plain, [prompts[i] for i in order], [params[i] for i in order], "dflow")
        assert [out.token_ids for out in outputs] == [alone[i] for i in order]
    same = generate(plain, [prompts[0]] * 8, params, "dflow")
    assert len({out.token_ids for out in same}) == 8, "and seeds differ from each other"


# -- the distribution --------------------------------------------------------------------------------------------------


def chi_square_z(counts: Sequence[int], probabilities: Any) -> float:
    """Wilson and Hilferty's normal score of Pearson's statistic; cells that expect fewer than 5 are put together."""
    expected, observed = np.asarray(probabilities) * sum(counts), np.asarray(counts)
    assert observed[expected == 0].sum() == 0, "a token that cannot be drawn"
    small = expected < 5
    cells = [(o, e) for o, e in zip(observed[~small], expected[~small], strict=True)]
    if expected[small].sum() >= 5:
        cells.append((observed[small].sum(), expected[small].sum()))
    statistic, free = sum((o - e) ** 2 / e for o, e in cells), len(cells) - 1
    return float(((statistic / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free)))


def filtered(logits: Any, temperature: float, top_k: int, top_p: float) -> Any:
    """The distribution that a request asks for, by its definition."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    order = np.argsort(-logits, kind="stable")
    keep = np.zeros(len(logits), bool)
    keep[order[: top_k or None]] = True
    weights = np.where(keep, weights, 0) / weights[keep].sum()
    ranked = np.cumsum(weights[order])
    weights[order[int(np.searchsorted(ranked, top_p)) + 1 :]] = 0
    return weights / weights.sum()


@pytest.mark.parametrize("strategy", ["ar", "dflash", "dflow"])
@pytest.mark.parametrize("options", [{}, {"top_k": 9, "top_p": 0.9}], ids=["plain", "filtered"])
def test_samples_follow_the_targets_own_softmax(plain: Pair, strategy: str, options: dict[str, Any]) -> None:
    """First tokens, and second tokens after each frequent first one, over fixed seeds.

    A round with drafts yields the second token; it takes three tokens for that round to draft two.
    """
    reference, prompt = Transformers(plain), random_prompts(7, seed=11)[6]
    temperature, count = 1.5, 2000
    params = [
        SamplingParams(max_tokens=3, temperature=temperature, seed=seed, ignore_eos=True, **options)
        for seed in range(count)
    ]
    outputs = generate(plain, [prompt] * count, params, strategy)
    settings = (temperature, options.get("top_k", 0), options.get("top_p", 1.0))

    def score(prefix: Sequence[int], drawn: Sequence[int]) -> float:
        logits = reference.logits([*prompt["prompt_token_ids"], *prefix])[-1]
        counts = np.bincount(np.asarray(drawn), minlength=len(logits))
        return chi_square_z(counts.tolist(), filtered(logits, *settings))

    assert score([], [out.token_ids[0] for out in outputs]) < 3.7
    firsts = Counter(out.token_ids[0] for out in outputs)
    tested = [first for first, times in firsts.most_common(4) if times >= 100]
    assert len(tested) >= 2
    for first in tested:
        assert score([first], [out.token_ids[1] for out in outputs if out.token_ids[0] == first]) < 3.7
    if strategy != "ar":
        assert sum(out.stats.accepted for out in outputs) > 20, "the distribution holds for accepted drafts too"


def test_the_chi_square_score_sees_a_wrong_temperature(plain: Pair) -> None:
    prompt = random_prompts(7, seed=11)[6]
    params = [SamplingParams(max_tokens=1, temperature=1.5, seed=seed, ignore_eos=True) for seed in range(3000)]
    counts = Counter(out.token_ids[0] for out in generate(plain, [prompt] * 3000, params))
    logits = Transformers(plain).logits(prompt["prompt_token_ids"])[-1]
    observed = [counts[token] for token in range(len(logits))]
    assert chi_square_z(observed, filtered(logits, 1.5, 0, 1.0)) < 3.7
    assert chi_square_z(observed, filtered(logits, 1.35, 0, 1.0)) > 3.7


# -- poison ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_garbage_in_unused_cache_rows_changes_nothing(tiny_pair: GetPair, variant: str) -> None:
    """Before and between requests and passes: tokens, drafts and log-probabilities stay as they were, bit by bit."""
    pair = tiny_pair(variant)
    prompts = random_prompts(20, seed=12)
    params = [
        SamplingParams(max_tokens=12 + i, temperature=i % 2, seed=i, logprobs=2, ignore_eos=True) for i in range(20)
    ]
    strategies = [pair.strategies[i % len(pair.strategies)] for i in range(20)]
    clean = generate(pair, prompts, params, strategies, batch=6)
    runtime = PoisonedRuntime(pair.runtime)
    for _ in range(2):
        found = generate(pair, prompts, params, strategies, batch=6, runtime=runtime)
        assert [fingerprint(out) for out in found] == [fingerprint(out) for out in clean]
        counts = [dataclasses.astuple(out.stats) for out in found]
        assert counts == [dataclasses.astuple(out.stats) for out in clean]
        runtime.poison_all()


def test_garbage_in_live_rows_would_be_seen(plain: Pair) -> None:
    """The other side of the test above: the poison is strong enough to be noticed where it is read."""
    decoder = Decoder(plain.bundle, plain.runtime, prefix_reuse=False)
    prompt = list(random_prompts(7, seed=13)[6]["prompt_token_ids"])
    params = SamplingParams(max_tokens=24, ignore_eos=True)

    def run(spoil: bool) -> list[int]:
        decoder.submit(Request("x", prompt, params, plain.bundle.strategy("ar"), 0))
        tokens = list(decoder.step().emissions[0].tokens)
        if spoil:
            for cache in plain.runtime.caches["target", None]:
                cache[0, :, : len(prompt)] = 1e4
        while not decoder.idle:
            tokens += [token for emission in decoder.step().emissions for token in emission.tokens]
        return tokens

    clean = run(False)
    assert run(True) != clean
    assert run(False) == clean, "and the next request is not touched by it"


# -- the API: streams, stop strings, cancels ---------------------------------------------------------------------------

EXAMPLE_GRID: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "n": 3},
    "filters": {"temperature": 1.2, "top_k": 20, "min_p": 0.02},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.1, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {20: 4.0, 30: -np.inf}},
    "bad words": {"bad_words": ["1", "2 ", "the"]},
    "logprobs": {"temperature": 1.0, "logprobs": 4},
    "min_tokens": {"min_tokens": 30, "temperature": 0.9},
    "ignore eos": {"ignore_eos": True, "max_tokens": 90},
    "stop ids": {"stop_token_ids": list(range(40, 60))},
}


@pytest.mark.parametrize("case", EXAMPLE_GRID)
def test_example_sampling_is_the_same_under_every_strategy(
    example: Pair, example_prompts: list[dict[str, Any]], case: str
) -> None:
    prompts = example_prompts[:8]
    params = [SamplingParams(**{"max_tokens": 48, "seed": i, **EXAMPLE_GRID[case]}) for i in range(8)]
    wanted = [fingerprint(out) for out in generate(example, prompts, params)]
    for strategy in example.strategies[1:]:
        outputs = generate(example, prompts, params, strategy, batch=5)
        assert [fingerprint(out) for out in outputs] == wanted, strategy


def stop_strings(text: str) -> list[str]:
    """Pieces of a text from one to nine characters, which begin and end anywhere in its tokens."""
    return [
        text[start : start + length] for start, length in [(3, 1), (7, 2), (12, 4), (20, 9), (31, 6)] if text[start:]
    ]


def test_example_stop_strings_across_tokens_are_the_same_under_every_strategy(
    example: Pair, example_prompts: list[dict[str, Any]]
) -> None:
    prompts, cut = example_prompts[:6], 0
    whole = generate(example, prompts, SamplingParams(max_tokens=60))
    for prompt, full in zip(prompts, whole, strict=True):
        for stop in stop_strings(full.text):
            params = SamplingParams(max_tokens=60, stop=[stop, "never in any text"], seed=0)
            wanted = generate(example, [prompt], params)[0]
            assert wanted.text == full.text[: full.text.index(stop)]
            assert wanted.finish_reason == "stop"
            assert full.token_ids[: len(wanted.token_ids)] == wanted.token_ids
            cut += len(wanted.token_ids) < len(full.token_ids)
            for strategy in example.strategies[1:]:
                found = generate(example, [prompt], params, strategy)[0]
                assert fingerprint(found) == fingerprint(wanted), f"{stop!r} under {strategy}"
                assert found.stats.output_tokens == len(found.token_ids)
    assert cut > 10, "stops that end before the text would"


def joined(
    llm: LLM, prompts: Sequence[Any], params: Any, strategy: Any
) -> dict[tuple[int, int], tuple[str, list[int], Any]]:
    """A stream's pieces put together: (text, tokens, finish reason) by (prompt, sample)."""
    texts: dict[tuple[int, int], tuple[str, list[int], Any]] = {}
    for piece in llm.generate_stream(prompts, params, strategy=strategy):
        key = piece.prompt_index, piece.index
        text, tokens, reason = texts.get(key, ("", [], None))
        assert reason is None, "nothing comes after the last piece"
        texts[key] = text + piece.text, [*tokens, *piece.token_ids], piece.finish_reason
    return texts


@pytest.mark.parametrize("strategy", ["ar", "dflow"])
def test_example_streams_joined_are_the_one_shot_text(
    example: Pair, example_prompts: list[dict[str, Any]], strategy: str
) -> None:
    llm = LLM(example.bundle, runtime=example.runtime, max_batch_size=4)
    prompts = example_prompts[:10]
    params = [SamplingParams(max_tokens=40, temperature=0.5 * (i % 2), seed=i, n=1 + i % 3) for i in range(10)]
    params[3] = SamplingParams(max_tokens=40, stop=["1", "and"])
    outputs = llm.generate(prompts, params, strategy=strategy)
    streams = joined(llm, prompts, params, strategy)
    assert streams == {
        (i, o.index): (o.text, list(o.token_ids), o.finish_reason) for i, out in enumerate(outputs) for o in out.outputs
    }
    assert {reason for *_, reason in streams.values()} <= {"stop", "length"}


@pytest.mark.parametrize("pieces", [0, 1, 2, 5, 11])
def test_a_stream_left_early_leaves_nothing_behind(plain: Pair, pieces: int) -> None:
    prompts, params = random_prompts(12, seed=14), SamplingParams(max_tokens=30, ignore_eos=True, seed=0)
    fresh = [fingerprint(out) for out in generate(plain, prompts, params, "dflow", batch=3)]
    llm = LLM(plain.bundle, runtime=plain.runtime, max_batch_size=3)
    stream = llm.generate_stream(prompts, params, strategy="dflow")
    for _ in range(pieces):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert [fingerprint(out) for out in llm.generate(prompts, params, strategy="dflow")] == fresh


def test_cancelling_one_request_of_a_stream_leaves_the_others_alone(plain: Pair) -> None:
    prompts, params = random_prompts(5, seed=19), SamplingParams(max_tokens=30, ignore_eos=True, seed=0)
    wanted = [list(out.token_ids) for out in generate(plain, prompts, params)]
    llm = LLM(plain.bundle, runtime=plain.runtime, max_batch_size=3)
    found: dict[int, list[int]] = {i: [] for i in range(5)}
    reasons: dict[int, str | None] = {}
    for piece in llm.generate_stream(prompts, params, strategy="dflow"):
        found[piece.prompt_index] += piece.token_ids
        reasons[piece.prompt_index] = piece.finish_reason
        if piece.prompt_index == 1 and len(found[1]) >= 4 and piece.finish_reason is None:
            assert llm.cancel(piece.request_id)
    assert reasons == {0: "length", 1: "cancelled", 2: "length", 3: "length", 4: "length"}
    assert 4 <= len(found[1]) < 30
    assert found[1] == wanted[1][: len(found[1])]
    assert [found[i] for i in (0, 2, 3, 4)] == [wanted[i] for i in (0, 2, 3, 4)]


@pytest.mark.parametrize("params", [{"max_tokens": 3}, [None], 3])
def test_params_of_another_type_are_refused(plain: Pair, params: Any) -> None:
    llm = LLM(plain.bundle, runtime=plain.runtime)
    with pytest.raises(UserError, match=r"^sampling_params: .* allowed: SamplingParams"):
        llm.generate([{"prompt_token_ids": [1]}], params)


def test_a_queue_without_room_is_refused(plain: Pair) -> None:
    with pytest.raises(UserError, match=r"^max_queue: 0; allowed: 1 or more"):
        LLM(plain.bundle, runtime=plain.runtime, max_queue=0)


def test_a_second_call_beside_an_open_stream_is_refused_and_not_waited_for(plain: Pair) -> None:
    """One thread cannot wait for itself; the stream goes on, and after it the call is welcome."""
    llm = LLM(plain.bundle, runtime=plain.runtime)
    prompts, params = random_prompts(2, seed=20), SamplingParams(max_tokens=12, ignore_eos=True)
    stream = llm.generate_stream(prompts, params, strategy="dflow")
    tokens = list(next(stream).token_ids)
    with pytest.raises(UserError, match="a stream of this LLM is open in this thread"):
        llm.generate(prompts, params)
    tokens += [token for piece in stream for token in piece.token_ids]
    assert len(tokens) == 24
    assert len(llm.generate(prompts, params)) == 2


def test_calls_from_several_threads_take_turns(plain: Pair) -> None:
    llm = LLM(plain.bundle, runtime=plain.runtime)
    prompts = random_prompts(6, seed=21)
    params = [SamplingParams(max_tokens=20, temperature=1.0, seed=i, ignore_eos=True) for i in range(6)]
    wanted = [out.token_ids for out in generate(plain, prompts, params)]
    with ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(llm.generate, p, each, strategy="dflow") for p, each in zip(prompts, params, strict=True)]
        assert [call.result(timeout=120)[0].token_ids for call in calls] == wanted


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("variant", ["plain", "heads are kv heads", "int8 target"])
def test_the_number_of_threads_changes_nothing(tiny_pair: GetPair, variant: str, threads: int) -> None:
    """Prompt and output together pass 128 cache rows, where a matrix product may be split among threads."""
    pair = tiny_pair(variant)
    prompts = random_prompts(4, seed=22, longest=110)[2:] + random_prompts(6, seed=23, longest=115)[5:]
    params = SamplingParams(max_tokens=70, ignore_eos=True, logprobs=1, seed=0)
    wanted = [fingerprint(out) for out in generate(pair, prompts, params, "dflow")]
    runtime = OrtRuntime(pair.bundle, threads)
    for batch in (1, 8):
        found = generate(pair, prompts, params, "dflow", batch, runtime)
        assert [fingerprint(out) for out in found] == wanted
    runtime.close()


def test_tiny_streams_joined_are_the_one_shot_tokens(plain: Pair) -> None:
    prompts, params = random_prompts(9, seed=15), SamplingParams(max_tokens=25, temperature=1.0, seed=4, n=2)
    llm = LLM(plain.bundle, runtime=plain.runtime, max_batch_size=4)
    wanted = {
        (i, o.index): ("", list(o.token_ids), o.finish_reason)
        for i, out in enumerate(llm.generate(prompts, params, strategy="dflash"))
        for o in out.outputs
    }
    assert joined(llm, prompts, params, "dflash") == wanted


def test_more_prompts_than_the_queue_holds(plain: Pair) -> None:
    prompts, params = random_prompts(20, seed=16), SamplingParams(max_tokens=6, ignore_eos=True)
    llm = LLM(plain.bundle, runtime=plain.runtime, max_batch_size=2, max_queue=3)
    outputs = llm.generate(prompts, params, strategy="dflow")
    assert [out.token_ids for out in outputs] == [out.token_ids for out in generate(plain, prompts, params)]
    assert [list(out.prompt_token_ids) for out in outputs] == [each["prompt_token_ids"] for each in prompts]


# -- more of the same --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_tiny_lossless_over_many_prompts_and_samplings(tiny_pair: GetPair, variant: str) -> None:
    pair, rng, grid = tiny_pair(variant), np.random.default_rng(17), list(TINY_GRID.values())
    params = [
        SamplingParams(
            **{"max_tokens": int(rng.integers(20, 72)), "ignore_eos": True, "seed": i, **grid[i % len(grid)]}
        )
        for i in range(250)
    ]
    check_lossless(pair, random_prompts(250, seed=18), params)


@pytest.mark.slow
def test_example_lossless_to_the_end_of_every_answer(example: Pair, example_prompts: list[dict[str, Any]]) -> None:
    params = [SamplingParams(max_tokens=160, temperature=0.6 * (i % 2), seed=i) for i in range(len(example_prompts))]
    check_lossless(example, example_prompts, params)


def test_every_option_of_sampling_is_in_a_grid() -> None:
    """A new option of SamplingParams has to be shown lossless as well."""
    shown: set[str] = {"max_tokens", "seed", "n", "stop"}
    for grid in (TINY_GRID, EXAMPLE_GRID):
        for options in grid.values():
            shown |= set(options)
    assert {field.name for field in dataclasses.fields(SamplingParams)} == shown
