"""Draft models and prompt lookup on real engines: what they draft in every round, whatever goes on around them.

A draft model that is the target itself must always be right: a wrong row in its cache shows as a rejected draft. Its
cache is also the target's, row by row and bit by bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_sources import LOOKUP, MODEL, MODEL_DRAFTS
from lookup import by_definition
from pairs import FLASH, FLOW, PEERS, VOCAB, Pair, PoisonedRuntime, Variant, build_tiny
from tiny import make_target

from dflow_trt import contract as c
from dflow_trt.api import LLM
from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.decode import Decoder
from dflow_trt.method.policy import Candidate, FixedLength
from dflow_trt.method.sampling import SamplingParams
from dflow_trt.request import Request
from dflow_trt.runtime.base import Array
from dflow_trt.slots import common_prefix

TIE = 1e-3  # two float implementations may choose differently where the two best logits are closer than this
SPEAKERS = ("self", "model")
OPPOSITE = {"num_key_value_heads": 1}  # of two: the draft model has as many heads a group as the target has not
TWO, ONE = "two heads a group", "one head a group"
VARIANTS = {
    heads: Variant(
        target,
        drafters={"dflash": FLASH, "dflow": FLOW},
        models={"self": None, "model": {**MODEL, **model}},
        lookup=LOOKUP,
        draft_weights="float",
    )
    for heads, target, model in ((TWO, {}, {}), (ONE, PEERS, OPPOSITE))
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Pair]]:
    """The variants, each built once."""
    built: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in built:
            built[name] = build_tiny(tmp_path_factory.mktemp("drafting"), VARIANTS[name])
        return built[name]

    yield get
    for pair in built.values():
        pair.runtime.close()


GetPair = Callable[[str], Pair]


# -- what is run, and what is seen of it -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A request, the step at which it comes, and the one at which it is cancelled."""

    request: Request
    step: int
    cancelled: int | None = None


@dataclass(frozen=True)
class Proposal:
    """Drafts of one request in one round: ``tokens`` were committed, ``wanted`` drafts asked for."""

    drafter: str
    request: str
    tokens: tuple[int, ...]
    wanted: int
    drafts: tuple[int, ...]


class BoundedRuntime(PoisonedRuntime):
    """Poisoned, and no call has more token rows than the build allows: what the largest buffers are made for."""

    def run(
        self, engine: str, drafter: str | None, slots: range, feeds: Mapping[str, Array], fetch: Any = ()
    ) -> list[Array]:
        if c.INPUT_IDS.name in feeds:
            assert feeds[c.INPUT_IDS.name].size <= 64, f"{drafter} {engine}: {feeds[c.INPUT_IDS.name].shape} rows"
        return super().run(engine, drafter, slots, feeds, fetch)


class Bench:
    """A decoder whose drafters and caches are looked at in every step."""

    def __init__(self, pair: Pair, policy: str = "fixed", **options: Any) -> None:
        self.pair, self.runtime = pair, BoundedRuntime(pair.runtime)
        named: Any = "adaptive" if policy == "adaptive" else "fixed"
        self.decoder = Decoder(pair.bundle, self.runtime, draft_policy=named, **options)
        if policy == "pauses":
            self.decoder._policy = Pauses()
        self.proposals: list[Proposal] = []
        for name, drafting in self.decoder._draftings.items():
            drafting.propose = self._watched(name, drafting.propose)
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, Any] = {}
        self.rejected: Counter[str] = Counter()
        self.compared = 0

    def _watched(self, name: str, propose: Callable[..., Any]) -> Callable[..., Any]:
        def watched(slots: range, rows: Sequence[Any], wanted: Sequence[int]) -> Any:
            made = propose(slots, rows, wanted)
            for slot, count, drafts in zip(rows, wanted, made, strict=True):
                assert len(drafts) <= count
                if count:
                    place = slot.request.id, tuple(slot.tokens), count
                    self.proposals.append(Proposal(name, *place, tuple(drafts)))
            return made

        return watched

    def submit(self, request: Request) -> None:
        self.decoder.submit(request)
        self.tokens[request.id] = []

    def step(self, hold: Sequence[str] = ()) -> None:
        for emission in self.decoder.step(hold).emissions:
            self.tokens[emission.request_id] += emission.tokens
            self.last[emission.request_id] = emission
            if emission.finish_reason != "cancelled":
                self.rejected[emission.request_id] += emission.num_drafted - emission.num_accepted
        self._compare_caches()

    def _compare_caches(self) -> None:
        """What the target has read as its own drafter is what it has read as the target."""
        caches = self.pair.runtime.caches
        for i, slot in enumerate(self.decoder._slots):
            if slot.request.strategy.drafter == "self":
                rows = slot.context_len
                assert rows <= slot.kv_len
                for own, target in zip(caches[c.DRAFTER, "self"], caches[c.TARGET, None], strict=True):
                    assert (own[i, :, :rows] == target[i, :, :rows]).all(), f"rows of {slot.request.id}"
                self.compared += rows

    def run(self, jobs: Sequence[Job], held: int = 0) -> None:
        """Jobs at their steps; ``held`` per cent of them wait in a step."""
        rng, waiting, step = np.random.default_rng(0), list(jobs), 0
        while waiting or not self.decoder.idle:
            for job in [job for job in waiting if job.step <= step]:
                waiting.remove(job)
                self.submit(job.request)
            for job in jobs:
                if job.cancelled == step:
                    self.decoder.cancel(job.request.id)
            self.step([job.request.id for job in jobs if rng.integers(100) < held])
            step += 1
            assert step < 5000, "no progress"

    def request(self, id: str, prompt: Sequence[int], strategy: str, count: int, **more: Any) -> Request:
        params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=more.pop("temperature", 0.0))
        return Request(id, list(prompt), params, self.pair.bundle.strategy(strategy), 7, **more)

    def of(self, *drafters: str) -> list[Proposal]:
        return [each for each in self.proposals if each.drafter in drafters]


class Pauses(FixedLength):
    """Rounds of drafting, and rounds without, of some requests or of all: as long as would fill several chunks."""

    def __init__(self) -> None:
        self._rng, self._left, self._share = np.random.default_rng(3), 0, 0

    def lengths(self, requests: Sequence[Candidate | None]) -> list[int]:
        if not self._left:
            self._left = int(self._rng.choice([1, 2, 5, 20, 80]))
            self._share = int(self._rng.choice([0, 50, 100, 100]))
        self._left -= 1
        limits = [request.limit if request else 0 for request in requests]
        return [limit if self._rng.integers(100) < self._share else 0 for limit in limits]


def plain_tokens(pair: Pair, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The target's own greedy tokens, drafted by nobody."""
    llm = LLM(pair.bundle, runtime=pair.runtime, prefix_reuse=False)
    given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = llm.generate(given, SamplingParams(max_tokens=count, ignore_eos=True), strategy="ar")
    return [list(out.token_ids) for out in outputs]


class Speaker:
    """A model in transformers, which says what it would say greedily behind any tokens."""

    def __init__(self, folder: Path) -> None:
        self._torch = pytest.importorskip("torch", reason="the reference is torch code")
        transformers = pytest.importorskip("transformers", reason="the reference is transformers' Qwen3")
        self._torch.set_num_threads(1)
        load = transformers.Qwen3ForCausalLM.from_pretrained
        self._model = load(folder, dtype=self._torch.float32, attn_implementation="eager").eval()

    def ties(self, said: Proposal) -> int:
        """Drafts that are not its own choice, which takes a tie each; a choice hangs on the drafts before it."""
        ids = self._torch.tensor([[*said.tokens, *said.drafts[:-1]]])
        with self._torch.inference_mode():
            rows = self._model(ids, use_cache=False).logits[0, len(said.tokens) - 1 :].numpy()
        count = 0
        for row, draft in zip(rows, said.drafts, strict=True):
            if int(row.argmax()) != draft:
                top = np.sort(row)[-2:]
                assert top[1] - top[0] < TIE, f"{said}: the gap is {top[1] - top[0]:.2g}"
                assert row[draft] == top[0], "the other of the two"
                count += 1
        return count


@cache
def speaker(folder: Path) -> Speaker:
    return Speaker(folder)


def ties(pair: Pair, proposals: Sequence[Proposal]) -> int:
    """Of draft models, all of whose drafts are checked against transformers."""
    folders = {"self": pair.target, "model": pair.target.parent / "model"}
    return sum(speaker(folders[said.drafter]).ties(said) for said in proposals)


# -- everything at once ------------------------------------------------------------------------------------------------


def mixed_jobs(pair: Pair, bench: Bench, count: int, seed: int = 1) -> list[Job]:
    """Ragged jobs, mostly of draft models: long prompts, next turns of chats, caps, cancels, the last cache row."""
    rng = np.random.default_rng(seed)
    first = [rng.integers(2, VOCAB, length).tolist() for length in (1, 2, 118, 20, 45, 75)]
    answers = plain_tokens(pair, first, 20)
    turns = [[*first[i], *answers[i]] for i in (3, 4, 5)]
    strategies = [*SPEAKERS * 4, "ngram", "ngram", *pair.strategies]
    jobs, step = [], 0
    for i in range(count):
        strategy = strategies[rng.integers(len(strategies))]
        begun = turns[2 if strategy == "model" else rng.integers(2)]
        tail = rng.integers(2, VOCAB, rng.integers(1, 15)).tolist()
        prompt = first[i] if i < len(first) else [*begun[: len(begun) - rng.integers(20)], *tail]
        request = bench.request(
            str(i),
            prompt,
            strategy,
            int(rng.choice([2, 6, 25, 60, 150])),
            temperature=float(rng.choice([0, 0, 1.5])),
            draft_tokens=[0, 1, 3, *[None] * 7][rng.integers(10)],
        )
        step += int(rng.integers(0, 5)) if i > 8 else 0
        jobs.append(Job(request, step, step + int(rng.integers(1, 9)) if i % 9 == 8 else None))
    return jobs


def wanted_drafts(bench: Bench, job: Job, said: Proposal) -> int:
    """How many drafts may count: of those that it makes, as many as may still be emitted, and as were asked for."""
    spec, limit = bench.pair.bundle.drafters[said.drafter].spec, bench.pair.bundle.build.max_seq_len
    end = min(len(job.request.prompt_ids) + job.request.params.max_tokens, limit)
    cap = job.request.draft_tokens
    return min(spec.num_drafts, end - len(said.tokens) - 1, spec.num_drafts if cap is None else cap)


@pytest.mark.parametrize(
    ("variant", "policy"), [*((variant, "fixed") for variant in VARIANTS), (TWO, "adaptive"), (ONE, "pauses")]
)
def test_every_draft_is_the_one_that_its_drafter_makes_of_the_committed_tokens(
    pairs: GetPair, variant: str, policy: str, record_property: Callable[[str, object], None]
) -> None:
    pair = pairs(variant)
    bench = Bench(pair, policy)
    jobs = mixed_jobs(pair, bench, 50)
    bench.run(jobs, held=15)
    greedy = [job for job in jobs if not job.request.params.temperature]
    longest = plain_tokens(pair, [job.request.prompt_ids for job in greedy], 150)
    for job, tokens in zip(greedy, longest, strict=True):
        found = bench.tokens[job.request.id]
        assert found == tokens[: len(found)], f"{job.request.strategy.name}, {job.request.id}"
        if job.request.strategy.name == "self":
            assert bench.rejected[job.request.id] == 0, f"{job.request.id}: a draft of its own is rejected"
    by_id = {job.request.id: job for job in jobs}
    for said in bench.of("ngram"):
        assert list(said.drafts) == by_definition(said.tokens, LOOKUP["min"], LOOKUP["max"], said.wanted)
    for said in bench.of(*SPEAKERS):
        assert len(said.drafts) == said.wanted
    for said in bench.proposals:
        most = wanted_drafts(bench, by_id[said.request], said)
        assert said.wanted == most if policy == "fixed" else said.wanted <= most
    count = ties(pair, bench.of(*SPEAKERS)[::5])
    record_property("ties", count)
    assert count <= 3
    if policy != "adaptive":  # which hangs on the clock
        check_coverage(bench, jobs)


def check_coverage(bench: Bench, jobs: Sequence[Job]) -> None:
    """That what was to go on around the drafters did."""
    drafters = {said.drafter for said in bench.proposals}
    assert drafters >= {*SPEAKERS, "ngram"}
    assert drafters & {"dflash", "dflow"}
    assert sum(bench.rejected[job.request.id] for job in jobs if job.request.strategy.name == "self") > 10, "sampling"
    stats = [(job.request.strategy.drafter, bench.last[job.request.id].stats) for job in jobs]
    for drafter in (*SPEAKERS, "ngram"):
        assert sum(s.reused_tokens for name, s in stats if name == drafter), f"{drafter} goes on from leftovers"
    assert any(s.prefill_passes > 2 for name, s in stats if name in SPEAKERS)
    ends = [bench.last[job.request.id].finish_reason for job in jobs]
    assert ends.count("cancelled") >= 4
    limit = bench.pair.bundle.build.max_seq_len
    full = [name for name, s in stats if s.prompt_tokens + s.output_tokens == limit]
    assert set(full) & set(SPEAKERS), "some end at the last row of the caches"
    assert bench.compared > 5000


# -- one thing at a time -----------------------------------------------------------------------------------------------


def always_right(bench: Bench, requests: Sequence[Request], held: int = 0) -> None:
    """Run requests of ``self``, whose every draft must be accepted, and hold their tokens against the target's own."""
    bench.run([Job(request, 0) for request in requests], held)
    longest = max(request.params.max_tokens for request in requests)
    wanted = plain_tokens(bench.pair, [request.prompt_ids for request in requests], longest)
    for request, tokens in zip(requests, wanted, strict=True):
        assert bench.tokens[request.id] == tokens[: request.params.max_tokens]
        assert bench.rejected[request.id] == 0, f"{request.id}: a draft of its own is rejected"


def prompts(count: int, length: int) -> list[list[int]]:
    return np.random.default_rng([count, length]).integers(2, VOCAB, (count, length)).tolist()


class Rest(FixedLength):
    """No drafts for so many rounds, then all."""

    def __init__(self, rounds: int) -> None:
        self._left = rounds

    def lengths(self, requests: Sequence[Candidate | None]) -> list[int]:
        self._left -= 1
        return super().lengths([request if self._left < 0 else None for request in requests])


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_was_not_read_for_many_rounds_is_read_in_calls_that_the_build_allows(
    pairs: GetPair, variant: str, batch: int
) -> None:
    """Ninety tokens behind: more than a chunk of one request, and in a batch far more than a call may have."""
    bench = Bench(pairs(variant))
    bench.decoder._policy = Rest(90)
    requests = [bench.request(str(i), ids, "self", 110) for i, ids in enumerate(prompts(batch, 30))]
    others = [bench.request(f"other {i}", ids, "model", 110) for i, ids in enumerate(prompts(8 - batch, 12))]
    bench.run([Job(each, 0) for each in (*requests, *others)])
    for request in requests:
        said = next(said for said in bench.of("self") if said.request == request.id)
        assert len(said.tokens) > 115
        assert bench.rejected[request.id] == 0
        assert bench.last[request.id].stats.accepted > 10
    assert ties(bench.pair, bench.of("model")[::7]) <= 1


@pytest.mark.parametrize("kept", [0, 7, 24, 25])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_next_turn_of_a_chat_goes_on_from_what_the_model_has_read(pairs: GetPair, variant: str, kept: int) -> None:
    """Of four rounds of five right drafts each, it has not read the last draft; the target has."""
    bench = Bench(pairs(variant))
    [ids] = prompts(1, 40)
    always_right(bench, [bench.request("first", ids, "self", 25)])
    turn = [*ids, *bench.tokens["first"][:kept], *prompts(1, 9)[0]]
    always_right(bench, [bench.request("second", turn, "self", 30)])
    same = common_prefix(np.array(turn), np.array([*ids, *bench.tokens["first"]]))
    assert bench.last["second"].stats.reused_tokens == min(same, 40 + 23)


def test_lookup_goes_on_from_anybody_s_rows_and_a_model_from_its_own_alone(pairs: GetPair) -> None:
    bench = Bench(pairs(TWO), slots=1)
    [ids] = prompts(1, 40)

    def reused(strategy: str, **more: Any) -> int:
        name = str(len(bench.last))
        bench.run([Job(bench.request(name, ids, strategy, 12, **more), 0)])
        assert bench.tokens[name] == bench.tokens["0"]
        return int(bench.last[name].stats.reused_tokens)

    order = ["self", "ngram", "ngram", "ar", "ngram", "dflow", "ngram", "self", "self", "model", "ngram", "model"]
    assert [reused(name) for name in order] == [0, 39, 39, 39, 39, 0, 39, 0, 39, 0, 39, 0]
    assert reused("model", draft_tokens=0) == 39, "read without drafting"
    assert reused("model") == 39


@pytest.mark.parametrize("cap", [0, 1, 3])
def test_a_cap_on_drafts_bounds_those_of_its_request_alone(pairs: GetPair, cap: int) -> None:
    bench = Bench(pairs(TWO))
    ids = prompts(6, 20)
    caps = [cap if i % 2 else None for i in range(6)]
    requests = [bench.request(str(i), ids[i], "self", 31, draft_tokens=caps[i]) for i in range(6)]
    always_right(bench, requests)
    rounds = [bench.last[request.id].stats.rounds for request in requests]
    assert rounds == [-(-30 // (MODEL_DRAFTS + 1)) if i % 2 == 0 else -(-30 // (cap + 1)) for i in range(6)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_drafts_up_to_the_last_row_of_its_cache(pairs: GetPair, variant: str) -> None:
    bench = Bench(pairs(variant))
    limit = bench.pair.bundle.build.max_seq_len
    requests = [bench.request(str(i), prompts(1, 112 + i)[0], "self", 100) for i in range(8)]
    bench.run([Job(request, 0) for request in requests])
    for request in requests:
        assert len(request.prompt_ids) + len(bench.tokens[request.id]) == limit
        assert bench.rejected[request.id] == 0


def test_prompt_ids_that_the_draft_model_has_no_row_for_cost_drafts_and_nothing_else(tmp_path: Path) -> None:
    """Both have 120 tokens; the target's table has 300 rows, the model's 120 in one block of 128."""
    for name, rows, seed in (("target", 300, 0), ("model", 120, 1)):
        make_target(tmp_path / name, vocab_size=rows, tokenizer=120, seed=seed)
    source = DrafterSource(tmp_path / "model", "model")
    bundle = build_bundle(tmp_path / "target", [source], tmp_path / "bundle", BuildOptions(max_seq_len=96))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    given = [{"prompt_token_ids": ids} for ids in ([5, 299, 7], [128, 127, 121], [3, 4])]
    with LLM(bundle, threads=1) as llm:
        texts = [[out.token_ids for out in llm.generate(given, params, strategy=name)] for name in ("ar", "model")]
    assert texts[0] == texts[1]
    assert all(token < 120 for tokens in texts[0] for token in tokens)


def test_a_wrong_row_of_a_draft_model_would_be_seen(pairs: GetPair) -> None:
    """The other side of all this: one row of garbage, and drafts are rejected."""
    pair = pairs(TWO)
    decoder, runtime = Decoder(pair.bundle, pair.runtime, prefix_reuse=False), pair.runtime
    params, [ids] = SamplingParams(max_tokens=60, ignore_eos=True), prompts(1, 30)
    found = {}
    for spoilt in (False, True):
        decoder.submit(Request("x", ids, params, pair.bundle.strategy("self"), 0))
        decoder.step()
        if spoilt:
            for cached in runtime.caches[c.DRAFTER, "self"]:
                cached[0, :, 12] = 5.0
        while not decoder.idle:
            [emission] = decoder.step().emissions
        found[spoilt] = emission.stats.drafted - emission.stats.accepted
    assert found[False] == 0
    assert found[True] > 0
