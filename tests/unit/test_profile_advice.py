"""What follows from measured costs: the length to verify, break-even, the roofline, prices."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import fake
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_cases import DRAFTED, PLAIN, result, run, trace
from safetensors.numpy import load_file
from tiny import make_target

from dflow_trt.checkpoint.target import read_target
from dflow_trt.profiling import metrics, words
from dflow_trt.profiling.advice import advise, break_even_rate, geometric_tokens, tokens_by_length
from dflow_trt.profiling.measure import Step
from dflow_trt.profiling.prices import cost
from dflow_trt.profiling.record import Point, PointResult, Roof, RoundCost
from dflow_trt.profiling.roofline import Engine, drafter_engine, roofline, target_engine, working_set


def round_cost(strategy: str, drafts: int, milliseconds: float, batch: int = 1, kind: str = "dflash") -> RoundCost:
    return RoundCost(
        strategy=strategy,
        kind=kind if drafts else None,
        batch=batch,
        temperature=0.0,
        input_len=None,
        drafts=drafts,
        rounds=8,
        context=100.0,
        milliseconds={"verify": milliseconds, "draft": 0.0} if drafts else {"verify": milliseconds},
    )


def measured(point: Point, rounds: list[tuple[int, int]], base: PointResult | None = None) -> PointResult:
    """A point whose steps take a millisecond each."""
    times = [i / 1000 for i in range(len(rounds) + 1)]
    found = trace(times, rounds)
    steps = [Step(i, i + 0.001, 1, kept + 1, {"verify": 1.0}) for i, (_, kept) in enumerate(rounds)]
    runs = [run(point, [found], 1.0, steps=steps)]
    base_runs = [run(PLAIN, [trace([0, 1], [(0, 0)])], 1.0, steps=[Step(0, 0.001, 1, 1, {"verify": 1.0})])]
    return result(point, runs, base_runs if point != PLAIN else None)


# -- lengths -----------------------------------------------------------------------------------------------------------


def test_tokens_by_length_are_what_shorter_rounds_would_have_given() -> None:
    rounds = [(3, 3), (3, 1), (3, 0), (3, 2)]
    counts = metrics.total([trace(range(5), rounds)])
    for k, tokens in enumerate(tokens_by_length(counts, 3)):
        assert tokens == pytest.approx(sum(min(kept, k) + 1 for _, kept in rounds) / 4)


@given(st.floats(0.01, 0.99), st.integers(1, 20))
def test_break_even_rate_is_the_inverse_of_the_tokens(rate: float, drafts: int) -> None:
    found = break_even_rate(geometric_tokens(rate, drafts), drafts)
    assert found == pytest.approx(rate, abs=1e-6)


def test_a_round_that_never_pays_has_no_rate() -> None:
    assert break_even_rate(8.01, 7) is None
    assert break_even_rate(8.0, 7) == pytest.approx(1.0)
    assert break_even_rate(1.0, 7) == pytest.approx(0.0)
    assert break_even_rate(0.5, 7) == pytest.approx(0.0)


def test_the_best_length_is_the_one_with_most_tokens_a_millisecond() -> None:
    drafted = measured(DRAFTED, [(3, 3), (3, 1), (3, 1), (3, 1)])
    costs = [round_cost("ar", 0, 2.0)]
    costs += [round_cost("dflow", k, ms) for k, ms in ((1, 2.2), (2, 4.0), (3, 4.4))]
    [found] = advise(costs, [measured(PLAIN, [(0, 0)]), drafted])
    tokens = [2.0, 2.25, 2.5]
    assert [each.tau_emitted for each in found.forecasts] == tokens
    predicted = [2 * each / ms for each, ms in zip(tokens, (2.2, 4.0, 4.4), strict=True)]
    assert [each.predicted for each in found.forecasts] == pytest.approx(predicted)
    assert (found.best_drafts, found.plain) == (1, 2.0)
    assert found.break_even == 2.2
    assert found.break_even_rate is not None
    assert geometric_tokens(found.break_even_rate, 3) == pytest.approx(2.2)
    assert [each.measured for each in found.forecasts] == [None, None, pytest.approx(2.5)]
    assert words.choice(found) == "--draft-tokens 1 (blocks of 2)"
    assert words.choice(found.model_copy(update={"kind": "eagle3"})) == "--draft-tokens 1"
    assert words.choice(found.model_copy(update={"kind": "ngram", "best_drafts": 3})) == "all 3 drafts"
    assert words.where(found) == "1 at once"


def test_times_between_measured_lengths_lie_on_a_line() -> None:
    drafted = measured(DRAFTED, [(3, 3)])
    costs = [round_cost("ar", 0, 1.0), round_cost("dflow", 1, 2.0), round_cost("dflow", 3, 4.0)]
    [found] = advise(costs, [drafted])
    assert [each.milliseconds for each in found.forecasts] == [2.0, 3.0, 4.0]
    assert found.best_drafts == 1 == found.forecasts[0].predicted or found.best_drafts == 0


def test_plain_decoding_wins_where_no_length_pays() -> None:
    drafted = measured(DRAFTED, [(3, 0), (3, 0)])
    [found] = advise([round_cost("ar", 0, 1.0), *(round_cost("dflow", k, 2.0) for k in (1, 3))], [drafted])
    assert found.best_drafts == 0
    assert words.choice(found) == "plain decoding"


def test_a_measured_point_is_held_against_its_own_length() -> None:
    short = measured(DRAFTED.model_copy(update={"draft_tokens": 1}), [(1, 1), (1, 1)])
    full = measured(DRAFTED, [(3, 2), (3, 2)])
    [found] = advise([round_cost("ar", 0, 1.0), *(round_cost("dflow", k, 1.0) for k in (1, 3))], [short, full])
    assert [each.measured for each in found.forecasts] == [pytest.approx(2.0), None, pytest.approx(3.0)]


def test_no_advice_without_its_halves() -> None:
    costs = [round_cost("ar", 0, 1.0), round_cost("dflow", 3, 1.0)]
    full = measured(DRAFTED, [(3, 2)])
    assert advise(costs[1:], [full]) == [], "no plain decoding to compare with"
    assert advise(costs, []) == []
    assert advise(costs, [result(DRAFTED, [run(DRAFTED, [trace([1.0], [])], 1.0)])]) == [], "no round"
    other = measured(DRAFTED.model_copy(update={"concurrency": 2}), [(3, 2)])
    assert advise(costs, [other]) == [], "another load"


# -- the roofline ------------------------------------------------------------------------------------------------------


def test_weights_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    make_target(tmp_path, vocab_size=256)
    spec = read_target(tmp_path).spec
    tensors = load_file(tmp_path / "model.safetensors")
    matrices = {name: value for name, value in tensors.items() if value.ndim == 2 and "embed" not in name}
    engine = target_engine(dataclasses.replace(fake.make_bundle([]), target=spec))
    assert engine.matrices + engine.head == sum(value.size for value in matrices.values())


def test_work_of_a_pass() -> None:
    """One layer, one head of 4, hidden 4, MLP of 8: small enough to count."""
    stack = fake.stack_spec(heads_per_group=2)
    q, kv, out, mlp = 4 * 8, 4 * 4, 8 * 4, 3 * 4 * 8
    engine = Engine(stack, q + 2 * kv + out + mlp, vocab_columns=128, item=1, cache_item=4)
    assert engine.head == 128 * 4
    work = engine.work(batch=2, rows=3, head_rows=2, context=10)
    assert work.bytes == engine.matrices + engine.head + 2 * 10 * 2 * 4 * 4
    attention = 2 * (2 * 8 * 10)  # scores and their sum over values, 8 query features, a row
    assert work.operations == 2 * (3 * 2 * engine.matrices + 2 * 2 * engine.head + 3 * attention)


def test_the_roof_is_the_slower_of_memory_and_compute() -> None:
    bundle = fake.make_bundle([fake.drafter_spec("dflow", 8, "after_rejection")])
    roof = Roof(memory_bandwidth=1e9, working_set=1, working_set_bandwidth=1e6, operations={"float32": 1e12}, threads=1)
    costs = [round_cost("ar", 0, 50.0), round_cost("dflow", 3, 50.0), round_cost("dflow", 7, 50.0)]
    costs = [cost.model_copy(update={"milliseconds": {"verify": 50.0, "draft": 25.0}}) for cost in costs]
    found = roofline(bundle, costs, roof)
    assert [(each.strategy, each.stage, each.drafts) for each in found.passes] == [
        ("ar", "verify", 0),
        ("dflow", "verify", 7),
        ("dflow", "draft", 7),
    ]
    for each in found.passes:
        assert each.bound == "memory"
        assert each.roof == pytest.approx(each.bytes / 1e3)
        assert each.fraction == pytest.approx(each.roof / each.milliseconds)
    slow = roof.model_copy(update={"operations": {"float32": 1e3}})
    assert {each.bound for each in roofline(bundle, costs[:1], slow).passes} == {"compute"}
    engines = target_engine(bundle), drafter_engine(bundle, "dflow")
    assert working_set(bundle) == sum((engine.matrices + engine.head) * engine.item for engine in engines)


# -- prices ------------------------------------------------------------------------------------------------------------


def test_prices() -> None:
    quick = result(PLAIN, [run(PLAIN, [trace([0, 1], [(0, 0)])], 0.02)])  # 100 tokens a second
    nothing = result(DRAFTED, [run(DRAFTED, [], 1.0)])
    found = cost([quick, nothing], 0.72, 4.0)
    assert found.rows[0].per_million == pytest.approx(2.0)
    assert found.rows[0].busy_share == pytest.approx(0.5)
    assert (found.rows[1].per_million, found.rows[1].busy_share) == (None, None)
    assert cost([quick], 0.72, None).rows[0].busy_share is None
    assert json.loads(found.model_dump_json())["price_per_hour"] == 0.72
