"""Sampling against a naive reference: tokens, distribution, refusals, and independence of how tokens were batched."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow_trt.errors import UserError
from dflow_trt.method.sampling import (
    NOT_OFFERED,
    Pick,
    Sampler,
    SamplingParams,
    Workspace,
    fresh_seed,
    uniform,
)

Array = np.ndarray[Any, np.dtype[Any]]

LIVE = 24
PADDED = 32


def make(vocab: int = LIVE, prompt: tuple[int, ...] = (), stops: tuple[int, ...] = (), **options: Any) -> Sampler:
    seed, index = options.pop("use_seed", 0), options.pop("sample_index", 0)
    return Sampler(SamplingParams(**options), prompt, vocab, stops, seed, index)


def pick(logits: Any, position: int = 0, **options: Any) -> int:
    row = np.asarray(logits, np.float32)
    return make(len(row), **options).pick(row, position).token


# -- the reference: float64, full sorts, one step after the other --


def reference_scores(
    logits: Array, params: SamplingParams, prompt: list[int], output: list[int], stops: set[int]
) -> Array:
    scores = logits.astype(np.float32)
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += np.float32(bias)
    if len(output) < params.min_tokens:
        scores[sorted(stops)] = -np.inf
    for word in params.bad_words_ids:
        if output[len(output) - (len(word) - 1) :] == list(word[:-1]) and len(output) >= len(word) - 1:
            scores[word[-1]] = -np.inf
    for token in set(prompt) | set(output):
        factor = np.float32(params.repetition_penalty)
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token, count in Counter(output).items():
        scores[token] -= np.float32(params.frequency_penalty) * np.float32(count)
        scores[token] -= np.float32(params.presence_penalty)
    return scores


def reference_kept(scores: Array, params: SamplingParams, nudge: float = 0.0) -> Array:
    """Weights with the filtered ids at zero; ``nudge`` moves the borders of min_p and top_p by a rounding error."""
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((scores.astype(np.float64) - float(scores.max())) / params.temperature)
    weights[weights < min(params.min_p * (1 + nudge), 1.0)] = 0
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if params.top_k > 0:
        weights[order[params.top_k :]] = 0
    if params.top_p < 1:
        total, running, kept = math.fsum(weights), 0.0, []
        for token in order:
            kept.append(token)
            running += weights[token]
            if running >= (params.top_p + nudge) * total:
                break
        weights[[i for i in range(len(scores)) if i not in kept]] = 0
    return weights


def reference_token(weights: Array, u: float) -> int:
    total, running = math.fsum(weights), 0.0
    for token, weight in enumerate(weights):
        running += weight
        if running > u * total:
            return token
    return int(np.flatnonzero(weights)[-1])


def reference_tokens(scores: Array, params: SamplingParams, u: float) -> set[int]:
    """The one right token, or the two next to a border that float64 cannot tell apart."""
    if params.greedy:
        return {int(np.flatnonzero(scores == scores.max())[0])}
    kept = [reference_kept(scores, params, nudge) for nudge in (-1e-13, 0.0, 1e-13)]
    return {reference_token(weights, v) for weights in kept for v in (u * (1 - 1e-13), u, u * (1 + 1e-13))}


SCORES = st.one_of(
    st.floats(-30, 30, width=32),
    st.integers(-3, 3).map(float),
    st.sampled_from([-math.inf, 0.0, -1e30, 80.0]),
)
ROWS = st.lists(SCORES, min_size=LIVE, max_size=LIVE).filter(lambda row: max(row) > -math.inf)
TOKENS = st.integers(0, LIVE - 1)


@st.composite
def params_sets(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        max_tokens=64,
        temperature=draw(st.sampled_from([0.0, 1e-5, 0.3, 1.0, 7.5])),
        top_k=draw(st.sampled_from([-1, 0, 1, 3, LIVE - 1, LIVE, 500])),
        top_p=draw(st.one_of(st.just(1.0), st.floats(1e-9, 1.0, exclude_min=True))),
        min_p=draw(st.one_of(st.just(0.0), st.floats(0, 1))),
        min_tokens=draw(st.integers(0, 5)),
        repetition_penalty=draw(st.sampled_from([1.0, 0.7, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25, -0.5])),
        logit_bias=draw(st.none() | st.dictionaries(TOKENS, st.floats(-20, 20, width=32), max_size=4)),
        bad_words_ids=draw(st.lists(st.lists(TOKENS, min_size=1, max_size=3), max_size=3)),
    )


@settings(max_examples=400, deadline=None)
@given(
    params=params_sets(),
    rows=st.lists(ROWS, min_size=1, max_size=6),
    prompt=st.lists(TOKENS, max_size=6),
    stops=st.sets(TOKENS, max_size=3),
    seed=st.integers(0, 2**64 - 1),
)
def test_every_token_is_the_naive_references(
    params: SamplingParams, rows: list[list[float]], prompt: list[int], stops: set[int], seed: int
) -> None:
    sampler = Sampler(params, prompt, LIVE, stops, seed, 0)
    output: list[int] = []
    for position, row in enumerate(np.array(rows, np.float32)):
        scores = reference_scores(row, params, prompt, output, stops)
        if scores.max() == -np.inf:
            with pytest.raises(UserError, match="ban every token"):
                sampler.pick(row, position)
            return
        u = uniform(np.array([seed, 0], np.uint64), position)
        token = sampler.pick(row, position).token
        assert token in reference_tokens(scores, params, u)
        sampler.commit(token)
        output.append(token)


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.95, 0.999999])
def test_top_p_over_a_wide_vocabulary_keeps_the_references_set(spread: float, top_p: float) -> None:
    """Wide enough for the narrowing search: the last kept and the first dropped id are where a full sort puts them."""
    vocab = 20_000
    row = np.round(np.random.default_rng(3).standard_normal(vocab) * spread, 2).astype(np.float32)
    params = SamplingParams(temperature=1.0, top_p=top_p)
    weights = reference_kept_sorted(row, top_p)
    sampler = Sampler(params, (), vocab, (), 11, 0)
    for position in range(60):
        token = sampler.pick(row, position).token
        assert token == reference_token(weights, uniform(np.array([11, 0], np.uint64), position))


def reference_kept_sorted(row: Array, top_p: float) -> Array:
    weights = np.exp(row.astype(np.float64) - float(row.max()))
    order = np.lexsort((np.arange(len(row)), -row))
    sums = np.cumsum(weights[order])
    weights[order[int(np.argmax(sums >= top_p * weights.sum())) + 1 :]] = 0
    return weights


# -- the distribution and the random draws --


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.6, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 4},
        {"temperature": 1.0, "min_p": 0.2, "top_k": 6, "top_p": 0.97},
    ],
)
def test_draws_over_positions_follow_the_filtered_distribution(options: dict[str, Any]) -> None:
    row = np.array([1.0, -0.5, 2.0, 2.0, 0.0, -4.0, 1.5, 0.3, -1.0, 1.9], np.float32)
    weights = reference_kept(row, SamplingParams(**options))
    expected = 20_000 * weights / weights.sum()
    sampler = make(len(row), use_seed=20260, **options)
    observed = np.bincount([sampler.pick(row, p).token for p in range(20_000)], minlength=len(row))
    assert not observed[expected == 0].any()
    live = expected > 0
    statistic = float(((observed[live] - expected[live]) ** 2 / expected[live]).sum())
    assert chi_square_tail(statistic, int(live.sum()) - 1) > 1e-4


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(X > statistic), by Wilson and Hilferty's cube-root normal approximation: good to a few percent out here."""
    spread = 2 / (9 * freedom)
    return 0.5 * math.erfc(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(2 * spread))


def test_the_uniform_depends_on_seed_sample_and_position_and_on_nothing_else() -> None:
    def draw(seed: int, sample: int, position: int) -> float:
        return uniform(np.array([seed, sample], np.uint64), position)

    assert draw(5, 0, 9) == draw(5, 0, 9)
    assert draw(5, 1, 9) == 0.40580547998306415  # pinned: a seed keeps its text from release to release
    values = {draw(s, i, p) for s in (0, 5, 2**64 - 1) for i in (0, 1, 2) for p in range(50)}
    assert len(values) == 3 * 3 * 50
    assert all(0 <= value < 1 for value in values)


@pytest.mark.parametrize("vary", ["use_seed", "sample_index"])
def test_streams_of_two_seeds_and_of_two_samples_are_uncorrelated(vary: str) -> None:
    row = np.zeros(8, np.float32)
    changed: dict[str, Any] = {vary: 1}
    first, second = make(8, temperature=1.0), make(8, temperature=1.0, **changed)
    same = sum(first.pick(row, p).token == second.pick(row, p).token for p in range(4000))
    assert 400 < same < 600  # 500 expected, standard deviation 21


def test_a_draw_does_not_depend_on_earlier_picks() -> None:
    row = np.linspace(0, 1, LIVE).astype(np.float32)
    whole, fresh = make(temperature=1.0), make(temperature=1.0)
    tokens = [whole.pick(row, position).token for position in range(20)]
    assert fresh.pick(row, 19).token == tokens[19]


def test_fresh_seeds_are_63_bit_and_differ() -> None:
    seeds = {fresh_seed() for _ in range(50)}
    assert len(seeds) == 50
    assert all(SamplingParams(seed=seed).seed == seed < 2**63 for seed in seeds)


# -- exact under speculation --


@settings(max_examples=100, deadline=None)
@given(
    params=params_sets(),
    drafts=st.lists(st.lists(TOKENS, max_size=5), min_size=1, max_size=12),
    seed=st.integers(0, 1000),
)
def test_the_text_is_the_same_whatever_was_drafted(params: SamplingParams, drafts: list[list[int]], seed: int) -> None:
    """Sample-and-match in blocks of any partition, right and wrong drafts alike, against one token at a time."""

    def row(prefix: list[int]) -> Array:
        rng = np.random.default_rng([seed, *prefix])
        return (rng.standard_normal(LIVE) * 3).astype(np.float32)

    plain, blocked = (Sampler(params, [1, 2], LIVE, [0], seed, 0) for _ in range(2))
    try:
        expected: list[int] = []
        for position in range(12):
            expected.append(plain.pick(row(expected), position).token)
            plain.commit(expected[-1])
    except UserError:  # a drawn set of bans leaves nothing to choose
        return
    output: list[int] = []
    for draft in drafts:
        block = expected[len(output) : len(output) + len(draft) // 2] + draft  # a right head, then mostly wrong
        for drafted in [*block, None]:
            if len(output) == len(expected):
                break
            token = blocked.pick(row(output), len(output)).token
            blocked.commit(token)
            output.append(token)
            if token != drafted:
                break
    assert output == expected[: len(output)]


def test_pick_changes_neither_the_logits_nor_the_state() -> None:
    row = np.arange(LIVE, dtype=np.float32)
    sampler = make(repetition_penalty=2.0, logit_bias={3: 50.0}, bad_words_ids=[[23]], temperature=0.5, top_p=0.9)
    picks = {sampler.pick(row, 4) for _ in range(3)}
    assert len(picks) == 1
    assert np.array_equal(row, np.arange(LIVE, dtype=np.float32))


def test_samplers_that_share_a_workspace_do_not_see_each_other() -> None:
    workspace = Workspace(LIVE)
    biased = Sampler(SamplingParams(logit_bias={3: 99.0}), (), LIVE, (), 0, 0, workspace)
    other = Sampler(SamplingParams(logit_bias={4: 99.0}), (), LIVE, (), 0, 0, workspace)
    row = np.zeros(LIVE, np.float32)
    assert [s.pick(row, 0).token for s in (biased, other, biased)] == [3, 4, 3]


# -- single behaviours --


@settings(max_examples=100, deadline=None)
@given(params=params_sets(), row=ROWS, seed=st.integers(0, 99))
def test_padding_is_never_picked_however_large_its_logits(params: SamplingParams, row: list[float], seed: int) -> None:
    padded = np.array([*row, 1e30, math.inf, math.nan, 0.0, 99.0, 1e9, 5.0, 1.0], np.float32)
    assert len(padded) == PADDED
    sampler = Sampler(params, (), LIVE, (PADDED - 1,), seed, 0)
    if reference_scores(padded[:LIVE], params, [], [], set()).max() == -np.inf:
        with pytest.raises(UserError, match="ban every token"):
            sampler.pick(padded, 0)
    else:
        assert sampler.pick(padded, 0).token < LIVE


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert pick([1.0, 7.0, 7.0, 3.0]) == 1
    assert pick(np.zeros(9)) == 0


def test_equal_logits_and_top_k_keep_the_lowest_ids() -> None:
    sampler = make(temperature=1.0, top_k=3)
    assert {sampler.pick(np.zeros(LIVE, np.float32), p).token for p in range(200)} == {0, 1, 2}


def test_equal_logits_and_top_p_keep_the_lowest_ids() -> None:
    sampler = make(temperature=1.0, top_p=0.25)
    assert {sampler.pick(np.zeros(LIVE, np.float32), p).token for p in range(300)} == set(range(6))


def test_top_p_keeps_one_dominant_token() -> None:
    row = np.zeros(LIVE, np.float32)
    row[7] = 30.0
    sampler = make(temperature=1.0, top_p=0.5)
    assert {sampler.pick(row, p).token for p in range(100)} == {7}


@pytest.mark.parametrize("temperature", [1e-5, 1e-300, 5e-324])
@pytest.mark.filterwarnings("error")
def test_a_tiny_temperature_is_the_greedy_limit_without_a_warning(temperature: float) -> None:
    row = np.array([-3e38, 1.0, 1.5, -math.inf, 1.25], np.float32)
    assert [pick(row, p, temperature=temperature, top_p=0.99) for p in range(5)] == [2] * 5


@pytest.mark.filterwarnings("error")
def test_a_huge_temperature_is_uniform_and_top_k_still_ranks_by_logit() -> None:
    row = np.array([-5.0, 4.0, 3.0, -2.0, 6.0], np.float32)
    picked = {pick(row, p, temperature=1e300, top_k=3) for p in range(60)}
    assert picked == {1, 2, 4}


def test_minus_infinity_is_never_drawn() -> None:
    row = np.full(LIVE, -np.inf, np.float32)
    row[[5, 20]] = 0.0
    sampler = make(temperature=5.0, top_k=10)
    assert {sampler.pick(row, p).token for p in range(100)} == {5, 20}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_refused(value: float, temperature: float) -> None:
    with pytest.raises(UserError, match=r"position 3: the logits hold (nan|inf)"):
        pick([0.0, value, 1.0], 3, temperature=temperature)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banning_everything_is_refused_at_the_pick(temperature: float) -> None:
    sampler = make(3, logit_bias={0: -math.inf}, bad_words_ids=[[1], [2]], temperature=temperature)
    with pytest.raises(UserError, match=r"position 8: .* ban every token"):
        sampler.pick(np.zeros(3, np.float32), 8)


def test_min_tokens_masks_the_stop_ids_until_that_many_are_emitted() -> None:
    row = np.array([0.0, 1.0, 9.0, 8.0], np.float32)
    sampler = make(4, stops=(2, 3, 77), min_tokens=2)
    assert sampler.needs_logits
    for expected in (1, 1, 2):
        assert sampler.pick(row, 0).token == expected
        sampler.commit(expected)
    assert not sampler.needs_logits


def test_a_bias_of_minus_infinity_bans_and_a_large_one_forces() -> None:
    assert pick([5.0, 4.0, 3.0], logit_bias={0: -math.inf}) == 1
    assert pick([5.0, 4.0, 3.0], logit_bias={0: -1e9}) == 1
    assert pick([5.0, 4.0, 3.0], logit_bias={2: 100}) == 2


def test_a_bad_word_of_several_tokens_is_banned_only_after_its_head() -> None:
    row = np.array([0.0, 1.0, 2.0, 3.0], np.float32)
    sampler = make(4, bad_words_ids=[[1, 2, 3]], prompt=(1, 2))
    assert sampler.pick(row, 0).token == 3  # the prompt is not searched
    for token in (1, 2):
        sampler.commit(token)
    assert sampler.pick(row, 0).token == 2
    sampler.commit(2)
    assert sampler.pick(row, 0).token == 3


def test_repetition_penalty_lowers_positive_and_negative_logits_of_prompt_and_output() -> None:
    sampler = make(4, prompt=(0, 0, 999), repetition_penalty=2.0)
    assert sampler.pick(np.array([4.0, 3.0, 2.5, 0.0], np.float32), 0).token == 1
    sampler.commit(1)
    assert sampler.pick(np.array([4.0, 3.0, 2.5, 0.0], np.float32), 0).token == 2
    assert sampler.pick(np.array([-1.0, -1.5, -1.9, -9.0], np.float32), 0).token == 2


def test_presence_counts_once_and_frequency_every_time_and_the_prompt_never() -> None:
    row = np.array([1.0, 0.0], np.float32)
    presence, frequency = make(2, (0,), presence_penalty=0.6), make(2, (0,), frequency_penalty=0.6)
    for expected_presence, expected_frequency in [(0, 0), (0, 0), (0, 1)]:
        assert presence.pick(row, 0).token == expected_presence
        assert frequency.pick(row, 0).token == expected_frequency
        presence.commit(0)
        frequency.commit(0)


def test_logprobs_are_the_raw_log_softmax_over_the_live_vocabulary() -> None:
    row = np.array([1.0, 3.0, 3.0, 2.0, 1e9], np.float32)
    sampler = make(4, logprobs=3, logit_bias={0: 50.0}, temperature=0.0)
    expected = row[:4] - np.log(np.exp(row[:4].astype(np.float64)).sum())
    token, logprob, top = sampler.pick(row, 0)
    assert token == 0
    assert logprob == pytest.approx(expected[0])
    assert top is not None
    assert [i for i, _ in top] == [1, 2, 3]
    assert [value for _, value in top] == pytest.approx(expected[[1, 2, 3]])


def test_logprobs_zero_gives_the_tokens_own_and_more_than_the_vocabulary_gives_all() -> None:
    row = np.array([0.0, 2.0], np.float32)
    assert make(2, logprobs=0).pick(row, 0).top_logprobs == ()
    assert len(make(2, logprobs=9).pick(row, 0).top_logprobs or ()) == 2
    assert make(2).pick(row, 0) == Pick(1, None, None)


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({}, False),
        ({"stop": "x", "seed": 3, "top_k": 5, "top_p": 0.5}, False),
        ({"min_tokens": 3}, False),  # there is no stop id to mask
        ({"temperature": 0.1}, True),
        ({"logprobs": 0}, True),
        ({"logit_bias": {1: 1}}, True),
        ({"bad_words": [[1]]}, True),
        ({"bad_words": [[1, 2]]}, True),
        ({"presence_penalty": 1}, True),
        ({"repetition_penalty": 1.1}, True),
    ],
)
def test_logits_are_needed_only_where_argmax_is_not_the_answer(options: dict[str, Any], needed: bool) -> None:
    assert make(**options).needs_logits is needed


@pytest.mark.parametrize("options", [{"logit_bias": {LIVE: 1}}, {"bad_words": [[1, LIVE]]}])
def test_ids_outside_the_vocabulary_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"names the id {LIVE}; allowed: ids below {LIVE}"):
        make(**options)


def test_bad_words_as_text_are_refused_until_they_are_ids() -> None:
    with pytest.raises(UserError, match="bad_words holds text"):
        make(bad_words=["no"])
    params = SamplingParams(bad_words=["no", [4]], bad_words_ids=[[7, 8]])
    assert params.banned_sequences == ((4,), (7, 8))


# -- the params --

REFUSALS: list[tuple[str, list[Any]]] = [
    ("max_tokens", [0, -1, 1.0, True, "5", None, math.nan]),
    ("temperature", [-0.1, math.nan, math.inf, "hot", True, None, 10**400]),
    ("top_k", [-2, 1.5, True, math.nan]),
    ("top_p", [0, -0.1, 1.01, math.nan, "1", False]),
    ("min_p", [-0.1, 1.1, math.nan, None]),
    ("seed", [-1, 2**64, 1.0, "1", True]),
    ("n", [0, 1.5, True]),
    ("stop", ["", ["a", ""], 5, [5], {"a": 1}, b"x"]),
    ("stop_token_ids", [5, [-1], [1.5], [True], "12"]),
    ("ignore_eos", [0, None, "no"]),
    ("min_tokens", [-1, 2.5, True, 17]),
    ("repetition_penalty", [0, -1, math.nan, math.inf, "x"]),
    ("presence_penalty", [-2.1, 2.1, math.nan]),
    ("frequency_penalty", [-2.1, 2.1, None]),
    (
        "logit_bias",
        [[1, 2], {-1: 0.0}, {"x": 1}, {True: 1}, {1: math.nan}, {1: math.inf}, {1: "2"}, {1: 1e39}],
    ),
    ("bad_words", ["word", [""], [3], [[]], [[-1]], [[True]]]),
    ("bad_words_ids", [[[]], [3], "ab", [["a"]]]),
    ("logprobs", [-1, 1.5, True]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSALS for value in values])
def test_a_bad_value_is_refused_in_one_line_with_field_value_and_what_is_allowed(name: str, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(name)
    assert "allowed:" in message
    assert "\n" not in message
    assert len(message) < 240


def test_every_field_has_a_refusal_test() -> None:
    assert {name for name, _ in REFUSALS} == set(SamplingParams.__dataclass_fields__)


@pytest.mark.parametrize("name", sorted(NOT_OFFERED))
def test_what_is_not_offered_is_refused_by_name(name: str) -> None:
    for build in (lambda options: SamplingParams(**options), SamplingParams.from_dict):
        with pytest.raises(UserError, match=f"{name!r} is not offered; offered: max_tokens, temperature"):
            build({name: 1})


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="unknown sampling option 'temprature'; offered: max_tokens"):
        SamplingParams.from_dict({"temprature": 1})
    with pytest.raises(UserError, match="a mapping"):
        SamplingParams.from_dict([1])  # type: ignore[arg-type]


def test_json_null_means_not_given_and_json_keys_are_ids() -> None:
    params = SamplingParams.from_dict({"top_p": None, "stop": "END", "logit_bias": {"7": -100}, "max_tokens": 3})
    assert params == SamplingParams(stop=["END"], logit_bias={7: -100.0}, max_tokens=3)
    assert params.stop == ("END",)


@pytest.mark.filterwarnings("error")
def test_numpy_numbers_become_plain_ones() -> None:
    options: dict[str, Any] = {
        "max_tokens": np.int64(4),
        "temperature": np.float32(0.5),
        "stop_token_ids": np.array([3]),
    }
    options["logit_bias"] = {np.int32(5): np.float32(2)}
    params = SamplingParams(**options)
    assert params.logit_bias == {5: 2.0}
    assert (type(params.max_tokens), type(params.temperature), params.stop_token_ids) == (int, float, (3,))
