"""The decoder on the scripted runtime: lossless, unmoved by scheduling, clean after every end."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from fake import (
    LIVE_VOCAB,
    VOCAB_SIZE,
    FakeRuntime,
    Round,
    Script,
    TargetCall,
    Toy,
    drafter_spec,
    expect,
    make_bundle,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow_trt.bundle import Bundle
from dflow_trt.decode import Decoder, QueueFull
from dflow_trt.errors import UserError
from dflow_trt.method.sampling import SamplingParams
from dflow_trt.request import Emission, Request

TOY = Toy()
FLOW, FLASH = drafter_spec("flow", 8, "after_rejection"), drafter_spec("flash", 5, None)
LATE, SHIFTED = drafter_spec("late", 6, "at_rejection"), drafter_spec("shifted", 8, None, shifted=True)
SCRIPTS = {
    "flow": Script("mixed", 75, 1),
    "flash": Script("mixed", 60, 2),
    "late": Script("mixed", 50, 3),
    "shifted": Script("mixed", 80, 4),
}
STRATEGIES = ("ar", "flow", "flow-norelay", "flash", "late", "late-norelay", "shifted")


@dataclass
class Bench:
    """A decoder on a fake, and what every step of it must hold."""

    bundle: Bundle
    scripts: Mapping[str, Script]
    max_queue: int = 1024
    requests: dict[str, Request] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    last: dict[str, Emission] = field(default_factory=dict)
    accepted: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    steps: int = 0

    def __post_init__(self) -> None:
        self.runtime = FakeRuntime(self.bundle, TOY, self.scripts)
        self.decoder = Decoder(self.bundle, self.runtime, self.max_queue)

    def request(
        self,
        prompt: Sequence[int],
        strategy: str = "ar",
        *,
        id: str | None = None,
        draft_tokens: int | None = None,
        text_stop: Callable[[int], bool] | None = None,
        seed: int = 0,
        **params: Any,
    ) -> Request:
        return Request(
            id or f"r{len(self.requests)}",
            list(prompt),
            SamplingParams(**params),
            self.bundle.strategy(strategy),
            seed,
            draft_tokens=draft_tokens,
            text_stop=text_stop,
        )

    def submit(self, request: Request) -> str:
        self.decoder.submit(request)
        self.requests[request.id] = request
        self.tokens[request.id] = []
        self.accepted[request.id] = []
        self.last.pop(request.id, None)
        return request.id

    @property
    def unfinished(self) -> set[str]:
        return {i for i in self.requests if i not in self.last or self.last[i].finish_reason is None}

    def step(self, hold: Collection[str] = ()) -> tuple[Emission, ...]:
        before = len(self.runtime.target_calls)
        result = self.decoder.step(hold)
        self.steps += 1
        rows = sum(call.rows for call in self.runtime.target_calls[before:])
        least = 3 - self.bundle.target.stack.heads_per_group  # rows of a pass, padding included
        assert rows <= max(self.bundle.build.max_num_tokens, least), "a step's target rows"
        for emission in result.emissions:
            assert emission.request_id in self.unfinished, "nothing is emitted after the end"
            assert emission.request_id not in hold or emission.finish_reason == "cancelled", "a held request waits"
            first = not self.tokens[emission.request_id]
            self.tokens[emission.request_id] += emission.tokens
            self.last[emission.request_id] = emission
            if not first and emission.finish_reason not in ("cancelled", "error"):
                counts = (emission.num_drafted, emission.num_accepted, len(emission.tokens))
                self.accepted[emission.request_id].append(counts)
        assert self.decoder.num_active + self.decoder.num_queued == len(self.unfinished), "slots are freed at once"
        assert self.decoder.num_active <= self.bundle.build.max_batch_size
        assert self.decoder.idle == (not self.unfinished)
        assert set(result.milliseconds) <= {"host", "relay", "drafter", "verify", "context", "prefill"}
        return result.emissions

    def drain(self) -> None:
        limit = self.steps + 3000
        while not self.decoder.idle:
            self.step()
            assert self.steps < limit, "no progress"

    def run(self, *requests: Request) -> list[list[int]]:
        """Tokens of requests that start together."""
        ids = [self.submit(request) for request in requests]
        self.drain()
        return [self.tokens[i] for i in ids]

    def blocks(self, request: Request) -> list[tuple[int, tuple[int, ...]]]:
        """(anchor position, anchor and drafts) of every verify pass of a request with a first token of its own."""
        name, length = request.prompt_ids[0], len(request.prompt_ids)
        return [
            (start, block)
            for call in self.runtime.target_calls
            for start, block, first in zip(call.starts, call.blocks, call.names, strict=True)
            if first == name and start >= length and block
        ]

    def check(self, request: Request) -> None:
        """A finished request gave what it gives alone: tokens, drafts round by round, and counts."""
        wanted = expect(self.bundle, TOY, self.scripts, request)
        found, rounds = self.last[request.id], wanted.rounds
        assert tuple(self.tokens[request.id]) == wanted.tokens
        assert found.finish_reason == wanted.finish_reason
        assert self.blocks(request) == [(r.position, r.block) for r in rounds], "the drafts"
        counts = [(d, a) for d, a, _ in self.accepted[request.id]]
        assert counts == [(len(r.block) - 1, r.accepted) for r in rounds]
        self.check_stats(request, rounds)

    def check_stats(self, request: Request, rounds: Sequence[Round]) -> None:
        stats = self.last[request.id].stats
        assert stats.prompt_tokens == len(request.prompt_ids)
        assert stats.output_tokens == len(self.tokens[request.id])
        assert stats.rounds == len(rounds)
        assert stats.drafted == sum(len(r.block) - 1 for r in rounds)
        assert stats.accepted == sum(r.accepted for r in rounds)
        assert stats.emitted == stats.output_tokens - 1, "the prefill token is in no round"
        assert stats.relayed_slots == sum(r.relayed for r in rounds)
        prefills = [call for call in self.runtime.target_calls if self.prefills(call, request)]
        assert stats.prefill_passes == len(prefills)
        assert stats.target_passes == stats.prefill_passes + stats.rounds

    @staticmethod
    def prefills(call: TargetCall, request: Request) -> bool:
        """Whether a pass ran prompt rows of a request with a first token of its own."""
        return any(
            name == request.prompt_ids[0] and start < len(request.prompt_ids) and block
            for start, block, name in zip(call.starts, call.blocks, call.names, strict=True)
        )


def make_bench(scripts: Mapping[str, Script] = SCRIPTS, max_queue: int = 1024, **build: Any) -> Bench:
    specs = [spec for spec in (FLOW, FLASH, LATE, SHIFTED) if spec.name in scripts]
    return Bench(make_bundle(specs, **build), scripts, max_queue)


def prompt(first: int, length: int, seed: int = 0) -> list[int]:
    """A prompt whose first token names its request."""
    rng = np.random.default_rng([seed, first, length])
    return [first, *rng.integers(0, LIVE_VOCAB, length - 1).tolist()]


def toy_tokens(ids: Sequence[int], count: int) -> list[int]:
    return TOY.continuation(ids, count)


# -- the fake itself ---------------------------------------------------------------------------------------------------


def test_the_fake_tells_every_relay_and_context_input_apart() -> None:
    script, ids = SCRIPTS["flow"], [1, 2, 3]
    embeds = [7, 8, 9, 10, 11, 12, 13, 14]
    drafts = script.drafts(TOY, ids, 5, embeds, 7)
    changed = [script.drafts(TOY, ids, 5, [*embeds[:j], 99, *embeds[j + 1 :]], 7) for j in range(len(embeds))]
    changed += [script.drafts(TOY, other, 5, embeds, 7) for other in ([2, 2, 3], [1, 3, 2], [1, 2], [1, 2, 3, 3])]
    assert all(other != drafts for other in changed)


# -- drafters at the extremes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flow", "flash", "late", "shifted"])
def test_self_draft_accepts_everything(name: str) -> None:
    bench = make_bench({name: Script("self")})
    rows = bench.bundle.verify_rows
    request = bench.request(prompt(3, 9), name, max_tokens=1 + 6 * rows)
    assert bench.run(request) == [toy_tokens(request.prompt_ids, 1 + 6 * rows)]
    stats = bench.last[request.id].stats
    assert stats.accepted == stats.drafted == 6 * (rows - 1)
    assert (stats.rounds, stats.tau_emitted, stats.tau_accepted) == (6, rows, rows - 1)
    assert stats.relayed_slots == 0, "nothing was rejected, so nothing is relayed"


@pytest.mark.parametrize("name", ["flow", "flow-norelay", "flash"])
def test_an_always_wrong_drafter_emits_one_right_token_a_round(name: str) -> None:
    bench = make_bench({"flow": Script("wrong"), "flash": Script("wrong")})
    request = bench.request(prompt(3, 9), name, max_tokens=21)
    assert bench.run(request) == [toy_tokens(request.prompt_ids, 21)]
    stats = bench.last[request.id].stats
    assert (stats.rounds, stats.emitted, stats.accepted) == (20, 20, 0)
    assert stats.tau_emitted == 1.0
    assert stats.drafted > 0
    assert bool(stats.relayed_slots) == (name == "flow")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_request_alone_gives_the_method_round_by_round(strategy: str) -> None:
    for length in (1, 5, 16, 17, 50):
        bench = make_bench()
        request = bench.request(prompt(length % 60, length), strategy, max_tokens=40)
        bench.run(request)
        bench.check(request)
        assert bench.tokens[request.id] == toy_tokens(request.prompt_ids, 40)
        if strategy != "ar":
            assert 1.2 < bench.last[request.id].stats.tau_emitted < 8, "the mixture rejects and accepts"


def test_the_relay_reads_what_it_should_and_only_where_it_is_on() -> None:
    bench = make_bench()
    for strategy, name in [("flow", "flow"), ("flow-norelay", "flow"), ("late", "late"), ("late-norelay", "late")]:
        request = bench.request(prompt(len(bench.requests), 8), strategy, max_tokens=50)
        before = len(bench.runtime.relayed[name])
        bench.run(request)
        on = sum(int(call[2].sum()) for call in bench.runtime.relayed[name][before:])
        assert on == bench.last[request.id].stats.relayed_slots
        assert bool(on) == (not strategy.endswith("norelay"))
    first_slots = {name: {int(j) for call in calls for j in np.nonzero(call[2])[1]} for name, calls in
                   bench.runtime.relayed.items()}  # fmt: skip
    assert min(first_slots["flow"]) == 2
    assert min(first_slots["late"]) == 1


# -- scheduling --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """One request of a random run."""

    length: int
    max_tokens: int
    strategy: str
    draft_tokens: int | None
    arrival: int
    cancel: int | None  # steps after arrival
    hold_percent: int
    temperature: float


def plans_of(strategies: Sequence[str]) -> st.SearchStrategy[list[Plan]]:
    """The requests of a random run."""
    plan = st.builds(
        Plan,
        length=st.integers(1, 80),
        max_tokens=st.integers(1, 30),
        strategy=st.sampled_from(strategies),
        draft_tokens=st.none() | st.integers(0, 9),
        arrival=st.integers(0, 12),
        cancel=st.none() | st.integers(0, 15),
        hold_percent=st.sampled_from([0, 0, 30, 70]),
        temperature=st.sampled_from([0.0, 0.0, 0.7]),
    )
    return st.lists(plan, min_size=1, max_size=9)


BUILDS = st.fixed_dictionaries(
    {
        "max_batch_size": st.integers(1, 5),
        "max_num_tokens": st.integers(45, 130),
        "max_seq_len": st.sampled_from([82, 96, 128]),
        "heads_per_group": st.sampled_from([1, 2]),
        "eos_ids": st.sampled_from([(), (3, 5)]),
    }
)


@settings(max_examples=150, deadline=None)
@given(plans_of(STRATEGIES), BUILDS, st.integers(0, 2**32))
def test_no_schedule_changes_a_token_or_a_draft(plans: list[Plan], build: dict[str, Any], seed: int) -> None:
    """Arrivals, lengths, strategies, cancels in any phase, holds, shorter verifies and chunk budgets, all mixed."""
    check_schedule(make_bench(**build), plans, seed)


def check_schedule(bench: Bench, plans: Sequence[Plan], seed: int) -> None:
    """Every request gives what it gives alone, or, where it was cancelled, the beginning of that."""
    rng = np.random.default_rng(seed)
    requests = [
        bench.request(
            prompt(i, plan.length, seed),
            plan.strategy,
            id=f"q{i}",
            draft_tokens=plan.draft_tokens,
            seed=i,
            max_tokens=plan.max_tokens,
            temperature=plan.temperature,
        )
        for i, plan in enumerate(plans)
    ]
    known: dict[str, bool] = {}
    for step in itertools.count():
        for plan, request in zip(plans, requests, strict=True):
            if plan.arrival == step:
                bench.submit(request)
            if plan.cancel is not None and plan.arrival + plan.cancel == step:
                known[request.id] = bench.decoder.cancel(request.id)
                assert known[request.id] == (request.id in bench.unfinished)
        if step > 12 and bench.decoder.idle:
            break
        odds = {request.id: plan.hold_percent for plan, request in zip(plans, requests, strict=True)}
        hold = {i for i in bench.unfinished if step < 60 and rng.integers(100) < odds[i]}
        bench.step(hold)
        for request in requests:
            if known.get(request.id):
                assert request.id not in bench.unfinished, "a cancelled request ends at the next step"
    for request in requests:
        if known.get(request.id):
            wanted = expect(bench.bundle, TOY, bench.scripts, request)
            assert bench.last[request.id].finish_reason == "cancelled"
            count = len(bench.tokens[request.id])
            assert tuple(bench.tokens[request.id]) == wanted.tokens[:count]
            assert bench.last[request.id].stats.output_tokens == count
            done = bench.blocks(request)
            assert done == [(r.position, r.block) for r in wanted.rounds][: len(done)]
        else:
            bench.check(request)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kept", [0, 5, 11, 12])
def test_a_prompt_goes_on_from_the_rows_of_a_finished_one_and_drafts_as_if_it_were_cold(
    strategy: str, kept: int
) -> None:
    """A next turn of a chat: the first prompt, some of its output, and something new."""
    bench = make_bench(eos_ids=())
    [output] = bench.run(bench.request(prompt(7, 40), strategy, max_tokens=12))
    bench.runtime.target_calls.clear()
    turn = [*prompt(7, 40), *output[:kept], *prompt(9, 20)]
    request = bench.request(turn, strategy, max_tokens=15)
    bench.run(request)
    bench.check(request)
    rows = sum(len(block) for call in bench.runtime.target_calls for block in call.blocks if call.starts[0] < len(turn))
    reused = bench.last[request.id].stats.reused_tokens
    assert reused == 40 + min(kept, 11), "the last token of an output is in no cache"
    assert rows == len(turn) - reused


def test_rows_are_reused_only_with_the_drafter_whose_context_they_are() -> None:
    bench, ids = make_bench(eos_ids=()), prompt(7, 40)

    def reused(strategy: str) -> int:
        request = bench.request(ids, strategy, max_tokens=4)
        bench.run(request)
        assert bench.tokens[request.id] == toy_tokens(ids, 4)
        return bench.last[request.id].stats.reused_tokens

    assert [reused(name) for name in ("flow", "flash", "flow-norelay", "ar")] == [0, 0, 39, 39]
    assert reused("late") == 0


@pytest.mark.parametrize("broken", [True, False])
def test_after_an_error_and_without_reuse_every_row_is_run(broken: bool) -> None:
    bench = make_bench(eos_ids=())
    bench.decoder = Decoder(bench.bundle, bench.runtime, prefix_reuse=broken)
    bench.runtime.fail_logits = lambda name, position: broken and position == 42
    first = bench.request(prompt(7, 40), "flow", max_tokens=8, temperature=1.0)
    bench.run(first)
    assert bench.last[first.id].finish_reason == ("error" if broken else "length")
    again = bench.request(prompt(7, 40), "flow", max_tokens=4)
    bench.run(again)
    assert bench.last[again.id].stats.reused_tokens == 0


@dataclass(frozen=True)
class Turn:
    """One request of a run with shared beginnings: so much of one of two texts, then a tail of its own."""

    text: int
    shared: int
    tail: int
    strategy: str
    arrival: int
    cancel: bool


def turns_of(strategies: Sequence[str]) -> st.SearchStrategy[list[Turn]]:
    """The requests of such a run."""
    turn = st.builds(
        Turn,
        text=st.integers(0, 1),
        shared=st.integers(0, 60),
        tail=st.integers(1, 15),
        strategy=st.sampled_from(strategies),
        arrival=st.integers(0, 60),
        cancel=st.booleans(),
    )
    return st.lists(turn, min_size=2, max_size=14)


@settings(max_examples=100, deadline=None)
@given(turns_of(STRATEGIES), st.integers(1, 4), st.sampled_from(["fixed", "adaptive"]))
def test_shared_beginnings_in_any_order_change_no_token(turns: list[Turn], slots: int, policy: Any) -> None:
    check_turns(make_bench(max_batch_size=slots, max_num_tokens=60, eos_ids=()), turns, policy)


def check_turns(bench: Bench, turns: Sequence[Turn], policy: Any) -> None:
    """Every request gives what it gives alone and cold."""
    bench.decoder = Decoder(bench.bundle, bench.runtime, draft_policy=policy)
    texts, rng = [prompt(1, 60), prompt(2, 60)], np.random.default_rng(len(turns))
    requests = [
        bench.request(
            [*texts[turn.text][: turn.shared], *rng.integers(0, LIVE_VOCAB, turn.tail).tolist()],
            turn.strategy,
            max_tokens=6,
            id=str(i),
        )
        for i, turn in enumerate(turns)
    ]
    for step in range(61):
        for turn, request in zip(turns, requests, strict=True):
            if turn.arrival == step:
                bench.submit(request)
            if turn.arrival + 2 == step and turn.cancel:
                bench.decoder.cancel(request.id)
        bench.step()
    bench.drain()
    for request in requests:
        wanted, found = expect(bench.bundle, TOY, bench.scripts, request), bench.tokens[request.id]
        assert tuple(found) == wanted.tokens[: len(found)]
        if bench.last[request.id].finish_reason != "cancelled":
            assert len(found) == 6
            if policy == "fixed":
                counts = [(drafted, accepted) for drafted, accepted, _ in bench.accepted[request.id]]
                assert counts == [(len(r.block) - 1, r.accepted) for r in wanted.rounds], (
                    "drafts are those of a cold run"
                )


def test_a_skipped_round_keeps_the_relay() -> None:
    """A request held after a rejection, while another verifies fewer rows, drafts next as if it had not waited."""
    bench = make_bench(max_batch_size=3)
    request = bench.request(prompt(1, 8), "flow", max_tokens=40)
    others = [bench.request(prompt(2 + i, 4), name, id=name, max_tokens=60) for i, name in enumerate(["ar", "flow"])]
    for each in (request, *others):
        bench.submit(each)
    held = 0
    while request.id in bench.unfinished:
        bench.step()
        for _ in range(3):
            if request.id in bench.unfinished:
                bench.step(hold=[request.id, "flow"])
                held += 1
    bench.drain()
    assert held > 10
    for each in (request, *others):
        bench.check(each)
    assert bench.last[request.id].stats.relayed_slots > 0


def test_the_relay_of_a_held_request_between_two_others_is_used_once() -> None:
    bench, rng = make_bench(max_batch_size=4), np.random.default_rng(0)
    requests = [bench.request(prompt(i, 5), "flow", id=f"q{i}", max_tokens=50) for i in range(4)]
    for request in requests:
        bench.submit(request)
    while bench.unfinished:
        bench.step({i for i in bench.unfinished if rng.integers(2)})
    for request in requests:
        bench.check(request)


def test_holding_everything_runs_nothing() -> None:
    bench = make_bench()
    for i in range(3):
        bench.submit(bench.request(prompt(i, 5), "flow", id=f"q{i}"))
    bench.step()
    calls = len(bench.runtime.calls)
    for _ in range(3):
        assert bench.step(hold=[*bench.requests]) == ()
    assert len(bench.runtime.calls) == calls
    bench.drain()
    for request in bench.requests.values():
        bench.check(request)


def test_a_long_prompt_does_not_stop_others_from_decoding() -> None:
    bench = make_bench(max_num_tokens=40, max_input_len=100, max_seq_len=160)
    short = bench.request(prompt(1, 4), "flow", id="short", max_tokens=60)
    long = bench.request(prompt(2, 100), "flow", id="long", max_tokens=5)
    bench.submit(short)
    bench.step()
    bench.submit(long)
    while not bench.tokens["long"]:
        before = len(bench.tokens["short"])
        bench.step()
        assert len(bench.tokens["short"]) > before, "a decoding request emits in every step"
    assert bench.last["long"].stats.prefill_passes >= 100 // 40
    bench.drain()
    bench.check(short)
    bench.check(long)


def test_short_prompts_beside_a_long_one_start_in_the_first_step() -> None:
    bench = make_bench(max_num_tokens=96, max_input_len=100, max_seq_len=160)
    bench.submit(bench.request(prompt(1, 100), "ar", id="long"))
    bench.submit(bench.request(prompt(2, 7), "flow", id="short"))
    bench.step()
    assert bench.tokens["short"]
    assert not bench.tokens["long"]
    assert bench.runtime.target_calls[0].width == 16, "nothing long pads the short one"
    bench.drain()
    for request in bench.requests.values():
        bench.check(request)


def test_two_drafters_serve_one_batch() -> None:
    bench = make_bench()
    requests = [bench.request(prompt(i, 5 + i), name, id=name, max_tokens=25) for i, name in
                enumerate(["flow", "late", "flash", "flow-norelay"])]  # fmt: skip
    for request in requests:
        bench.submit(request)
    bench.step()
    assert bench.runtime.calls.count("target") == 1
    assert bench.runtime.calls.count("context") == 3, "one a drafter in use"
    bench.drain()
    for request in requests:
        bench.check(request)


def test_a_request_without_drafts_costs_no_drafter_call() -> None:
    bench = make_bench()
    requests = [
        bench.request(prompt(1, 5), "ar", id="a", max_tokens=9),
        bench.request(prompt(2, 5), "flow", id="b", max_tokens=9, draft_tokens=0),
    ]
    bench.run(*requests)
    assert "drafter" not in bench.runtime.calls
    assert "relay" not in bench.runtime.calls
    for request in requests:
        bench.check(request)


def test_context_runs_right_after_each_target_pass_and_never_for_ar_alone() -> None:
    bench = make_bench()
    bench.run(bench.request(prompt(1, 40), "flash", max_tokens=12))
    for call, following in itertools.pairwise(bench.runtime.calls):
        if call == "target":
            assert following == "context"
    bench.runtime.calls.clear()
    bench.run(bench.request(prompt(1, 40), "ar", max_tokens=12))
    assert set(bench.runtime.calls) == {"target"}


# -- slots -------------------------------------------------------------------------------------------------------------


def run_two(first_end: int | None) -> tuple[list[tuple[int, tuple[int, ...]]], list[int]]:
    """Blocks and tokens of a request whose slot served another before, cancelled after ``first_end`` steps or not."""
    bench = make_bench(max_batch_size=1)
    if first_end is not None:
        first = bench.submit(bench.request(prompt(9, 70), "flow", id="first", max_tokens=30))
        for _ in range(first_end):
            bench.step()
        bench.decoder.cancel(first)
        bench.drain()
    second = bench.request(prompt(4, 6), "flow", id="second", max_tokens=30)
    bench.run(second)
    bench.check(second)
    return bench.blocks(second), bench.tokens["second"]


@pytest.mark.parametrize("first_end", [0, 1, 2, 3, 4, 6, 40])
def test_a_slot_used_before_gives_what_a_fresh_decoder_gives(first_end: int) -> None:
    assert run_two(first_end) == run_two(None)


def test_cancel_in_every_phase_frees_the_slot_at_the_next_step() -> None:
    bench = make_bench(max_batch_size=2, max_num_tokens=40)
    a = bench.submit(bench.request(prompt(1, 5), "flow", id="decoding", max_tokens=40))
    bench.step()
    b = bench.submit(bench.request(prompt(2, 80), "flow", id="prefill", max_tokens=40))
    bench.step()
    queued = bench.submit(bench.request(prompt(3, 5), "flow", id="queued", max_tokens=40))
    waiting = bench.request(prompt(4, 5), "late", id="waiting", max_tokens=12)
    bench.submit(waiting)
    bench.step()
    assert bench.tokens[a]
    assert not bench.tokens[b]
    assert (bench.decoder.num_active, bench.decoder.num_queued) == (2, 2)
    for each in (a, b, queued):
        assert bench.decoder.cancel(each)
        assert bench.decoder.cancel(each), "twice is once"
    emissions = bench.step()
    cancelled = [e for e in emissions if e.finish_reason == "cancelled"]
    assert sorted(e.request_id for e in cancelled) == sorted([a, b, queued])
    assert all(e.tokens == () and e.error is None for e in cancelled)
    assert not bench.decoder.cancel(a)
    assert not bench.decoder.cancel("never seen")
    bench.drain()
    bench.check(waiting)


def test_an_id_is_free_again_after_its_end() -> None:
    bench = make_bench()
    first = bench.run(bench.request(prompt(1, 5), "flow", id="same", max_tokens=7))
    assert bench.run(bench.request(prompt(1, 5), "flow", id="same", max_tokens=7)) == first
    bench.submit(bench.request(prompt(1, 5), "flow", id="same", max_tokens=7))
    bench.decoder.cancel("same")
    bench.step()
    assert bench.run(bench.request(prompt(1, 5), "flow", id="same", max_tokens=7)) == first, (
        "the cancel was the other's"
    )


# -- ends --------------------------------------------------------------------------------------------------------------


def end_cases() -> list[tuple[int, int]]:
    """(index of the output token that ends the request, max_tokens), around the first two blocks of eight."""
    return [(end, limit) for end in range(12) for limit in range(1, 11)]


@pytest.mark.parametrize("kind", ["eos", "stop_token_ids", "text_stop"])
@pytest.mark.parametrize("rule", ["self", "mixed", "wrong"])
def test_an_end_at_every_position_of_a_block_and_every_max_tokens(kind: str, rule: str) -> None:
    """The end is a token that did not come before; B + 2 = 10 is the largest max_tokens."""
    scripts = {"flow": Script(rule)}  # type: ignore[arg-type]
    for end, limit in end_cases():
        ids, output = fresh_ending(end)
        params: dict[str, Any] = {"max_tokens": limit}
        eos: tuple[int, ...] = ()
        stop = None
        if kind == "eos":
            eos = (output[end],)
        elif kind == "stop_token_ids":
            params["stop_token_ids"] = [output[end]]
        else:
            stop = output[end].__eq__
        bench = make_bench(scripts, eos_ids=eos)
        request = bench.request(ids, "flow", text_stop=stop, **params)
        assert bench.run(request) == [output[: min(end + 1, limit)]]
        last = bench.last[request.id]
        assert last.finish_reason == ("stop" if end < limit else "length")
        assert last.stats.emitted == len(bench.tokens[request.id]) - 1
        assert last.stats.emitted == sum(emitted for *_, emitted in bench.accepted[request.id])
        assert last.stats.accepted == sum(a for _, a, _ in bench.accepted[request.id])
        if kind != "text_stop":
            bench.check(request)


def fresh_ending(end: int) -> tuple[list[int], list[int]]:
    """A prompt and its continuation in which token ``end`` is new."""
    for seed in itertools.count():
        ids = prompt(5, 6, seed)
        output = toy_tokens(ids, 12)
        if output[end] not in output[:end]:
            return ids, output
    raise AssertionError


@pytest.mark.parametrize("strategy", ["ar", "flow"])
def test_ignore_eos_and_min_tokens(strategy: str) -> None:
    ids, output = fresh_ending(4)
    eos = output[4]
    ignoring = make_bench(eos_ids=(eos,))
    assert ignoring.run(ignoring.request(ids, strategy, max_tokens=12, ignore_eos=True)) == [output]
    for at_least in range(1, 10):
        bench = make_bench(eos_ids=(eos,))
        request = bench.request(ids, strategy, max_tokens=12, min_tokens=at_least)
        [tokens] = bench.run(request)
        bench.check(request)
        assert eos not in tokens[:at_least]
        assert (tokens == output[:5]) == (at_least <= 4)
        assert len(tokens) > at_least or bench.last[request.id].finish_reason == "length"


@pytest.mark.parametrize("strategy", ["ar", "flow", "flash"])
def test_text_stop_sees_every_emitted_token_once_in_order(strategy: str) -> None:
    bench = make_bench()
    seen: list[int] = []

    def stop(token: int) -> bool:
        seen.append(token)
        return len(seen) == 11

    ids = prompt(5, 6)
    [tokens] = bench.run(bench.request(ids, strategy, text_stop=stop, max_tokens=30))
    assert tokens == seen == toy_tokens(ids, 11)
    assert bench.last["r0"].finish_reason == "stop"


def test_text_stop_waits_for_min_tokens() -> None:
    bench = make_bench()
    request = bench.request(prompt(5, 6), "flow", text_stop=lambda token: True, max_tokens=30, min_tokens=13)
    [tokens] = bench.run(request)
    assert tokens == toy_tokens(prompt(5, 6), 13)


# -- prompts and limits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("length", [1, 7, 8, 9, 79, 80])
def test_prompts_of_every_length_that_matters(strategy: str, length: int) -> None:
    """1, B - 1, B, B + 1, and the limit of the bundle."""
    bench = make_bench()
    assert bench.bundle.build.max_input_len == 80
    request = bench.request(prompt(5, length), strategy, max_tokens=20)
    bench.run(request)
    bench.check(request)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("length", [81, 88, 89, 90, 94, 95])
def test_output_ends_at_max_seq_len(strategy: str, length: int) -> None:
    bench = make_bench(max_seq_len=96, max_input_len=95)
    request = bench.request(prompt(5, length), strategy, max_tokens=50)
    [tokens] = bench.run(request)
    bench.check(request)
    assert tokens == toy_tokens(request.prompt_ids, 96 - length)
    assert bench.last[request.id].finish_reason == "length"


def test_prompts_near_the_limit_beside_each_other() -> None:
    bench = make_bench(max_seq_len=96, max_input_len=95)
    requests = [bench.request(prompt(i, 92 + i), "flow", id=f"q{i}", max_tokens=50) for i in range(4)]
    bench.run(*requests)
    for request in requests:
        bench.check(request)


BAD_REQUESTS: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "empty": ([], {}, "the prompt is empty"),
    "too long": ([1] * 81, {}, "81 tokens, this bundle takes 80"),
    "id past the vocabulary": ([1, VOCAB_SIZE], {}, f"ids go from 0 to {VOCAB_SIZE - 1}"),
    "negative id": ([1, -1], {}, "-1"),
    "text": (["a"], {}, "'a'"),
    "float": ([1.0], {}, "1.0"),
    "bool": ([True], {}, "True"),
    "draft_tokens": ([1], {"draft_tokens": -1}, "draft_tokens is -1"),
    "bias past the vocabulary": ([1], {"logit_bias": {LIVE_VOCAB: 1.0}}, "logit_bias"),
    "bad word past the vocabulary": ([1], {"bad_words_ids": [[LIVE_VOCAB]]}, "bad_words"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_is_refused_and_leaves_no_trace(case: str) -> None:
    ids, options, message = BAD_REQUESTS[case]
    bench = make_bench()
    good = bench.request(prompt(5, 6), "flow", id="good", max_tokens=20)
    bench.submit(good)
    bench.step()
    bad = bench.request(ids, "flow", id="bad", **options)
    for refuse in (bench.decoder.submit, bench.decoder.check):
        with pytest.raises(UserError, match=message) as error:
            refuse(bad)
        assert "\n" not in str(error.value)
        assert "bad" in str(error.value) or "id" in str(error.value)
    assert (bench.decoder.num_queued, bench.decoder.num_active) == (0, 1)
    bench.drain()
    bench.check(good)


def test_prompt_ids_of_the_padded_vocabulary_and_numpy_ids_are_prompts() -> None:
    bench = make_bench()
    request = bench.request([5, VOCAB_SIZE - 1, VOCAB_SIZE - 2], "flow", max_tokens=9)
    other = dataclasses.replace(request, id="numpy", prompt_ids=np.array(request.prompt_ids))
    first, second = bench.run(request, other)
    assert first == second == toy_tokens(request.prompt_ids, 9)


def test_the_queue_has_a_bound_and_recovers() -> None:
    bench = make_bench(max_queue=2, max_batch_size=1)
    requests = [bench.request(prompt(i, 4), "flow", id=f"q{i}", max_tokens=6) for i in range(4)]
    bench.submit(requests[0])
    bench.step()
    bench.submit(requests[1])
    bench.submit(requests[2])
    with pytest.raises(QueueFull, match="request q3: 2 requests are queued, at most 2 are"):
        bench.decoder.submit(requests[3])
    assert bench.decoder.num_queued == 2
    bench.drain()
    bench.run(requests[3])
    for request in requests:
        bench.check(request)


def test_an_id_in_flight_is_refused() -> None:
    bench = make_bench(max_batch_size=1)
    first = bench.request(prompt(1, 5), "flow", id="same", max_tokens=9)
    queued = bench.request(prompt(2, 5), "flow", id="queued", max_tokens=9)
    bench.submit(first)
    bench.step()
    bench.submit(queued)
    for taken in ("same", "queued"):
        with pytest.raises(UserError, match=f"request {taken}: this id is in flight already"):
            bench.decoder.submit(bench.request(prompt(3, 5), id=taken))
    bench.drain()
    bench.check(first)
    bench.check(queued)


def test_requests_start_in_the_order_they_came() -> None:
    bench = make_bench(max_batch_size=2)
    for i in range(6):
        bench.submit(bench.request(prompt(i, 4), "flow", id=f"q{i}", max_tokens=6))
    started: list[str] = []
    while not bench.decoder.idle:
        started += [e.request_id for e in bench.step() if e.request_id not in started]
    assert started == [f"q{i}" for i in range(6)]


@pytest.mark.parametrize("slots", [1, 2])
def test_fewer_slots_than_the_bundle_was_built_for(slots: int) -> None:
    bundle = make_bundle([FLOW])
    runtime = FakeRuntime(bundle, TOY, {"flow": SCRIPTS["flow"]}, slots)
    decoder = Decoder(bundle, runtime, slots=slots)
    for i in range(5):
        decoder.submit(Request(f"q{i}", prompt(i, 5), SamplingParams(max_tokens=5), bundle.strategy("flow"), 0))
    found: dict[str, list[int]] = {}
    while not decoder.idle:
        for emission in decoder.step().emissions:
            found.setdefault(emission.request_id, []).extend(emission.tokens)
        assert decoder.num_active <= slots
    assert found == {f"q{i}": toy_tokens(prompt(i, 5), 5) for i in range(5)}


@pytest.mark.parametrize("heads_per_group", [1, 2])
@pytest.mark.parametrize(("name", "budget"), [("flow", 3 * 8), ("shifted", 3 * 9)])
def test_prefill_goes_on_within_the_smallest_token_budget(name: str, budget: int, heads_per_group: int) -> None:
    """max_num_tokens as small as a build allows, with prompts that are many times longer."""
    limits = {"max_batch_size": 3, "max_num_tokens": budget, "heads_per_group": heads_per_group}
    bench = make_bench({name: SCRIPTS[name]}, **limits)
    requests = [bench.request(prompt(i, 80 - i), name, id=f"q{i}", max_tokens=12) for i in range(6)]
    bench.run(*requests)
    for request in requests:
        bench.check(request)


def test_the_smallest_bundle_of_all_still_moves() -> None:
    """One slot, one token row a step, and an engine that never runs fewer than two."""
    bench = make_bench({}, max_batch_size=1, max_num_tokens=1, heads_per_group=1)
    request = bench.request(prompt(1, 6), max_tokens=4)
    bench.run(request)
    bench.check(request)


def test_more_waiting_prompts_than_rows_take_turns() -> None:
    """Two rows a request at least (one head a group), and fewer rows in all than that for everyone."""
    bench = make_bench({}, max_batch_size=8, max_num_tokens=9, heads_per_group=1)
    for i in range(8):
        bench.submit(bench.request(prompt(i, 20), id=f"q{i}", max_tokens=1))
    bench.drain()
    for request in bench.requests.values():
        bench.check(request)


# -- sampling ----------------------------------------------------------------------------------------------------------

SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 5, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3, "logprobs": 2},
    {"logit_bias": {3: 5.0, 4: -np.inf}, "temperature": 0.5, "min_p": 0.05},
    {"bad_words_ids": [[3], [4, 5]], "temperature": 1.2},
]


@pytest.mark.parametrize("params", SAMPLED, ids=lambda p: "-".join(p))
def test_sampled_requests_give_the_same_tokens_under_every_strategy(params: dict[str, Any]) -> None:
    outputs = []
    for strategy in STRATEGIES:
        bench = make_bench(eos_ids=(7,))
        requests = [
            bench.request(prompt(5, 9), strategy, seed=11, max_tokens=40, **params),
            bench.request(prompt(6, 3), "flow", id="greedy", max_tokens=40),
        ]
        bench.run(*requests)
        for request in requests:
            bench.check(request)
        outputs.append(bench.tokens["r0"])
    assert all(tokens == outputs[0] for tokens in outputs)


def test_sampler_errors_fail_their_request_alone_and_keep_what_was_emitted_before() -> None:
    """Only one token is allowed, and twice in a row is banned: no token is left for the third."""
    banned = {token: -np.inf for token in range(LIVE_VOCAB) if token != 7}
    results = []
    for strategy in STRATEGIES:
        scripts = {name: Script("self") for name in SCRIPTS}
        bench = make_bench(scripts)
        failing = bench.request(prompt(1, 5), strategy, id="failing", max_tokens=30, logit_bias=banned,
                                bad_words_ids=[[7, 7, 7]])  # fmt: skip
        other = bench.request(prompt(2, 5), "flow", id="other", max_tokens=30)
        bench.run(failing, other)
        bench.check(other)
        last = bench.last["failing"]
        assert last.finish_reason == "error"
        assert last.error is not None
        assert "position 7" in last.error
        assert last.stats.output_tokens == len(bench.tokens["failing"]), "counts equal what was emitted"
        assert last.stats.emitted == 1, "and the prefill token is in no round"
        results.append(bench.tokens["failing"])
    assert results == [[7, 7]] * len(STRATEGIES)


@pytest.mark.parametrize("position", range(5, 16))
@pytest.mark.parametrize("strategy", ["ar", "flow", "flash"])
def test_broken_logits_end_one_request_where_they_break(strategy: str, position: int) -> None:
    """NaN logits for one request from one position on, whether the prefill, a drafted row or the bonus meets it."""
    bench = make_bench()
    bench.runtime.fail_logits = lambda name, at: name == 1 and at >= position
    sampled = bench.request(prompt(1, 5), strategy, id="sampled", max_tokens=30, temperature=0.01, seed=3)
    other = bench.request(prompt(2, 5), "flow", id="other", max_tokens=30)
    bench.run(sampled, other)
    bench.check(other)
    wanted = expect(bench.bundle, TOY, SCRIPTS, sampled).tokens
    last = bench.last["sampled"]
    assert last.finish_reason == "error"
    assert last.error is not None
    assert f"position {position}" in last.error
    assert tuple(bench.tokens["sampled"]) == wanted[: position - 5], "what came before is delivered"
    assert last.stats.output_tokens == position - 5
    assert last.stats.emitted == max(0, position - 6)
    assert last.stats.accepted == sum(a for _, a, _ in bench.accepted["sampled"]) + last.num_accepted
    assert last.num_accepted == len(last.tokens)


def test_an_error_beside_shorter_verifies_keeps_the_others_relay() -> None:
    """The failing request's last rejection left more rows than its last pass has: nothing may be kept of it."""
    for position in range(8, 20):
        bench = make_bench(max_batch_size=2)
        bench.runtime.fail_logits = lambda name, at, position=position: name == 1 and at >= position
        failing = bench.request(prompt(1, 5), "flow", id="failing", max_tokens=15, temperature=1.0, seed=3)
        other = bench.request(prompt(2, 5), "flow", id="other", max_tokens=40, draft_tokens=2)
        bench.run(failing, other)
        bench.check(other)
        assert bench.last["failing"].finish_reason == "error"
