"""Drafters of every kind in a profile: what they cost, what pays, what they read and hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fake
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_cases import PLAIN, asked, result, run, trace
from safetensors.numpy import load_file
from tiny import make_drafter, make_eagle3, make_target

from dflow_trt import contract as c
from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.bundle import Bundle
from dflow_trt.memory import drafter_memory, plan_memory
from dflow_trt.profiling import metrics, words
from dflow_trt.profiling.advice import advise, times_by_length, tokens_by_length
from dflow_trt.profiling.costs import measure_costs
from dflow_trt.profiling.measure import LocalDriver
from dflow_trt.profiling.points import Options, families
from dflow_trt.profiling.record import Acceptance, Advice, Point, Roof, RoundCost
from dflow_trt.profiling.roofline import drafter_engine, roofline, target_engine
from dflow_trt.profiling.run import most_drafts, subject_of
from dflow_trt.runtime.ort import OrtRuntime
from dflow_trt.spec import NgramSpec

LOOKUP = NgramSpec("ngram", None, min_match=1, max_match=2, drafts=8)
STAGES = {
    "dflash": {"relay", "draft", "context"},
    "draft-model": {"draft"},
    "eagle3": {"draft", "context"},
    "ngram": set(),
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """One of each kind, three drafts each."""
    folder = tmp_path_factory.mktemp("kinds")
    config = make_target(folder / "target", eos=[1])
    make_drafter(folder / "dflash", config, taps=(1, 0), block_size=4)
    make_eagle3(folder / "eagle3", config)
    drafts = {"drafts": 3}
    sources = [
        DrafterSource(folder / "dflash"),
        DrafterSource(folder / "eagle3", "eagle3", drafts),
        DrafterSource(folder / "target", "draft", drafts),
        DrafterSource(Path("ngram"), None, drafts),
    ]
    options = BuildOptions(
        max_batch_size=3, max_input_len=60, max_seq_len=160, max_num_tokens=48, draft_weights="float"
    )
    return build_bundle(folder / "target", sources, folder / "bundle", options, self_check="off")


@pytest.fixture(scope="module")
def costs(bundle: Bundle) -> list[RoundCost]:
    runtime = OrtRuntime(bundle, threads=1)
    points = [Point(strategy=name, concurrency=2) for name in bundle.strategies]
    found = measure_costs(LocalDriver(bundle, runtime, 2), bundle, points, [asked(0), asked(1)])
    runtime.close()
    return found


def kind(bundle: Bundle, strategy: str) -> str:
    return bundle.drafters[strategy].spec.kind


# -- costs -------------------------------------------------------------------------------------------------------------


def test_every_kind_has_its_own_stages(bundle: Bundle, costs: list[RoundCost]) -> None:
    """And rounds of all lengths, whatever a drafter would have proposed."""
    lengths = {name: [cost.drafts for cost in costs if cost.strategy == name] for name in bundle.strategies}
    assert lengths == {"ar": [0], "dflash": [1, 3], "eagle3": [1, 3], "draft": [1, 3], "ngram": [1, 3]}
    for cost in costs:
        own = STAGES[kind(bundle, cost.strategy)] if cost.drafts else set()
        own = own - ({"draft"} if (cost.strategy, cost.drafts) == ("eagle3", 1) else set())
        assert set(cost.milliseconds) == {"verify", "sampling", "host"} | own, cost.strategy
        assert cost.kind == (kind(bundle, cost.strategy) if cost.drafts else None)


def test_prompt_lookup_is_timed_with_as_many_drafts_as_were_asked_for() -> None:
    """On a text that never repeats itself it would propose nothing."""
    made = fake.make_bundle([LOOKUP], max_seq_len=256)
    driver = LocalDriver(made, fake.FakeRuntime(made, fake.Toy(), {}), 3)
    point = Point(strategy="ngram", concurrency=3)
    found = measure_costs(driver, made, [point], [asked(0)], wanted=[4])
    assert [cost.drafts for cost in found] == [1, 3, 4, 7, 8]
    assert all(cost.rounds >= 4 for cost in found)


# -- what pays ---------------------------------------------------------------------------------------------------------


def counts(rounds: list[tuple[int, int]]) -> Acceptance:
    return metrics.total([trace(range(len(rounds) + 1), rounds)])


ROUNDS = st.lists(st.sampled_from([(0, 0), (4, 0), (4, 1), (4, 4)]), min_size=1, max_size=12)


@given(ROUNDS, st.integers(1, 4))
def test_lengths_of_a_drafter_that_has_nothing_to_propose_in_some_rounds(rounds: list[tuple[int, int]], k: int) -> None:
    """Against the rounds one by one, each cut to k drafts; t(k) = 1 + k milliseconds."""
    found, costs = counts(rounds), [1.0, 2.0, 3.0, 4.0, 5.0]
    assert tokens_by_length(found, 4)[k] == pytest.approx(sum(1 + min(kept, k) for _, kept in rounds) / len(rounds))
    times = [costs[min(made, k)] for made, _ in rounds]
    assert times_by_length(found, 1, costs)[k] == pytest.approx(sum(times) / len(rounds))


def test_a_pass_is_as_wide_as_its_longest_request() -> None:
    found = counts([(0, 0), (0, 0), (0, 0), (4, 4)])
    assert times_by_length(found, 2, [1.0, 1.0, 1.0, 1.0, 9.0])[4] == pytest.approx(1 + 8 * (1 - 0.75**2))


def advice(rounds: list[tuple[int, int]], point: Point, kind: str) -> Advice:
    """Rounds of 1, 1.5 and 5 ms at 0, 1 and 8 drafts."""
    data: dict[str, Any] = {"batch": 1, "temperature": 0.0, "input_len": None, "rounds": 8, "context": 9.0}
    timed = [("ar", None, 0, 1.0), (point.strategy, kind, 1, 1.5), (point.strategy, kind, 8, 5.0)]
    costs = [
        RoundCost(strategy=name, kind=which, drafts=drafts, milliseconds={"verify": time}, **data)
        for name, which, drafts, time in timed
    ]
    measured = result(point, [run(point, [trace(range(len(rounds) + 1), rounds)], 1.0)])
    [found] = advise(costs, [measured])
    return found


def test_lookup_that_finds_nothing_costs_nothing() -> None:
    found = advice([(0, 0)] * 3, Point(strategy="ngram", concurrency=1), "ngram")
    assert [each.predicted for each in found.forecasts] == [1.0] * 8
    assert (found.best_drafts, found.drafts, words.choice(found)) == (0, 8, "plain decoding")


def test_a_cut_run_tells_of_no_longer_lengths() -> None:
    """Of eight drafts at most three were verified: what more would give is not known."""
    found = advice([(3, 3), (3, 3)], Point(strategy="draft", concurrency=1, draft_tokens=3), "draft-model")
    assert [each.drafts for each in found.forecasts] == [1, 2, 3]
    assert (found.best_drafts, found.drafts, words.choice(found)) == (3, 8, "--draft-tokens 3")


# -- points ------------------------------------------------------------------------------------------------------------


def test_as_many_drafts_as_there_are_is_one_point(bundle: Bundle) -> None:
    prompts = {None: [(asked(0).item, (3, 4))]}
    [family] = families(Options(draft_tokens=(2, 3, 8, None)), most_drafts(bundle) | {"far": None}, prompts)
    lengths = {name: [p.draft_tokens for p in family.points if p.strategy == name] for name in ("ar", "draft", "far")}
    assert lengths == {"ar": [None], "draft": [2, None], "far": [2, 3, 8, None]}


def test_the_record_names_kinds(bundle: Bundle) -> None:
    found = {name: (each.kind, each.drafts, str(each)) for name, each in subject_of(bundle).drafters.items()}
    assert found["draft"] == ("draft-model", 3, "3 drafts (draft-model)")
    assert {name: each[0] for name, each in found.items()} == {
        "dflash": "dflash",
        "eagle3": "eagle3",
        "draft": "draft-model",
        "ngram": "ngram",
    }


# -- the machine -------------------------------------------------------------------------------------------------------


def test_the_work_of_drafting_is_that_of_all_its_calls(bundle: Bundle, costs: list[RoundCost]) -> None:
    """EAGLE-3's first draft comes with the reading of the target's pass; lookup has no engine."""
    roof = Roof(memory_bandwidth=1e9, working_set=1, working_set_bandwidth=1e9, operations={"float32": 1e9}, threads=1)
    found = {each.strategy: each for each in roofline(bundle, costs, roof).passes if each.stage == "draft"}
    assert set(found) == {"dflash", "eagle3", "draft"}
    context = {cost.strategy: cost.context for cost in costs if cost.drafts == 3}
    for name, calls, rows, head_rows in (("dflash", 1, 4, 3), ("eagle3", 2, 1, 1), ("draft", 3, 1, 1)):
        engine = drafter_engine(bundle, name)
        assert engine is not None
        call = engine.work(2, rows, head_rows, context[name])
        assert (found[name].bytes, found[name].operations) == (calls * call.bytes, calls * call.operations)
    short = [cost for cost in costs if cost.drafts < 3]
    assert {each.strategy for each in roofline(bundle, short, roof).passes if each.stage == "draft"} == {
        "dflash",
        "draft",
    }


def test_a_draft_call_reads_the_weights_of_its_checkpoint(bundle: Bundle) -> None:
    """A draft model is the target itself here; an EAGLE-3 step reads all but what mixes the taps."""
    model, target = drafter_engine(bundle, "draft"), target_engine(bundle)
    assert model is not None
    assert model.matrices == target.matrices
    engine = drafter_engine(bundle, "eagle3")
    assert engine is not None
    tensors = load_file(bundle.path.parent / "eagle3" / "model.safetensors")
    read = {
        name: value.size
        for name, value in tensors.items()
        if value.ndim == 2 and name not in ("fc.weight", "lm_head.weight")
    }
    assert engine.matrices == sum(read.values())


def test_a_drafters_memory_is_its_share_of_the_plan(bundle: Bundle) -> None:
    plan, found = plan_memory(bundle, 2), drafter_memory(bundle, 2)
    assert list(found) == ["dflash", "eagle3", "draft", "ngram"]
    assert sum(each.weights for each in found.values()) == plan.draft_weights
    assert sum(each.cache for each in found.values()) == plan.drafter_cache
    assert sum(each.relay_state for each in found.values()) == plan.relay_state
    assert vars(found["ngram"]) == {"weights": 0, "cache": 0, "relay_state": 0}
    assert found["draft"].cache == plan.target_cache, "the same model, the same rows"
    files = {path.name: path.stat().st_size for path in bundle.path.glob("*.data")}
    own = sum(size for name, size in files.items() if name.startswith("draft."))
    assert found["draft"].weights == own >= files[f"draft.{c.VOCAB_DATA}"] > 0
    assert PLAIN.strategy not in found
