"""EAGLE-3's two engines over many rounds on one cache, against torch in float64 that recomputes every row.

Ragged requests; verify passes whose wrong drafts are overwritten, chains that are overwritten by the next context.
Shape suffixes: B requests of one call, S token rows, K calls of a chain, V draft ids, E the drafter's width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import DEAD, Array, Config, Engines, live_rows, random_tokens
from oracles import TargetOracle
from safetensors.numpy import load_file
from tiny import edit_tensors, make_drafter, make_eagle3, make_target

from dflow_trt import contract as c
from dflow_trt.api import LLM, SamplingParams
from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.bundle import Bundle
from dflow_trt.checkpoint.eagle3 import read_eagle3
from dflow_trt.drafting import eagle3 as drafting
from dflow_trt.feeds import positions
from dflow_trt.reference import ReferenceEagle3

pytest.importorskip("torch", reason="the reference is torch code")
pytest.importorskip("transformers", reason="the reference is transformers' Qwen3")

from eagle3_oracle import Eagle3Oracle

ROUNDS, CHUNK, PROMPTS, DRAFTS, TAPS = 7, 16, (37, 21, 8), 4, (1, 3, 4)
TOLERANCE = {"draft logits": 2e-4, "features": 2e-4, "draft logits of a wrong tap, at least": 1e-1}
TARGET: Config = {"num_hidden_layers": 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
TOGETHER: Config = {"norm_before_fc": True, "norm_output": True}
CASES: dict[str, Config] = {
    "plain": {},
    "default taps": {"taps": None},
    "taps counted from the embedding": {"taps": (2, 3, 6)},
    "speculators' layout": {"speculators": True},
    "norm before the residual": {"norm_before_residual": True},
    "EAGLE 3.1, taps normed together": TOGETHER,
    "EAGLE 3.1, taps normed each": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "an embedding of its own": {"own_embedding": True},
    "another width": {"own_embedding": True, "hidden_size": 48, "head_dim": 24, "target_hidden_size": 64},
    "the whole vocabulary": {"draft_vocab_size": 256, "maps": False},
    "normed heads": {"qk_norm": True},
    "attention_bias": {"attention_bias": True},
    "one head a group": {"num_key_value_heads": 4},
    "one kv head": {"num_key_value_heads": 1},
    "odd sizes": {"intermediate_size": 97, "draft_vocab_size": 131, "theta": 1e6},
    "bfloat16": {"dtype": "bfloat16"},
    "sharded, transformers 5": {"shards": 3, "layout": 5},
    "yarn": {"rope": YARN},
}


@dataclass(frozen=True)
class Pair:
    """A bundle with an EAGLE-3 drafter, called draft, and the folders that it was built from."""

    bundle: Bundle
    target: Path
    draft: Path


def make(folder: Path, drafter: Config, target: Config | None = None) -> None:
    config = make_target(folder / "target", **{**TARGET, **(target or {})})
    make_eagle3(folder / "draft", config, **{"taps": TAPS, **drafter})


def build(folder: Path, others: Sequence[DrafterSource] = (), **options: Any) -> Pair:
    """The folders that are there, built; ``others`` come before the drafter."""
    chosen = BuildOptions(**{"max_seq_len": 256, "draft_weights": "float", "draft_logits": True, **options})
    sources = [*others, DrafterSource(folder / "draft", "draft", {"drafts": DRAFTS})]
    bundle = build_bundle(folder / "target", sources, folder / "bundle", chosen, self_check="off")
    return Pair(bundle, folder / "target", folder / "draft")


@dataclass(frozen=True)
class Drafted:
    """What one call gave for each request: the feature that its row passes on, the draft, and its logits."""

    features_BE: Array
    ids_B: Array
    logits_BV: Array

    def at(self, i: int) -> Drafted:
        """One request's."""
        return Drafted(self.features_BE[i], self.ids_B[i], self.logits_BV[i])


class ChainEngines(Engines):
    """The two calls of a chain drafter; cache rows that nobody may read are poisoned before each."""

    def chain_context(
        self, slots: range, starts: Sequence[int], next_ids_BS: Array, kept: Sequence[int], bucket: int = 0
    ) -> Drafted:
        """Right after :meth:`target` with the same rows: kept[i] of them are committed, the last of which drafts."""
        start_B, width = np.array(starts, np.int64), next_ids_BS.shape[1]
        feeds = {
            c.NEXT_INPUT_IDS.name: next_ids_BS,
            c.POSITION_IDS.name: positions(start_B, width),
            c.LOGIT_ROWS.name: np.maximum(np.array(kept) - 1, 0)[:, None],
            c.WRITE_INDEX.name: start_B,
            c.KV_INDEX.name: live_rows(int(start_B.max()) + width, bucket),
        }
        drafting = [slot for slot, count in zip(slots, kept, strict=True) if count]
        return self._call(c.CONTEXT, slots, starts, feeds, drafting)

    def chain_step(self, slots: range, starts: Sequence[int], ids_B: Array, bucket: int = 0) -> Drafted:
        """One row each, at ``starts``, behind the row of the last call of these slots."""
        start_B = np.array(starts, np.int64)
        feeds = {
            c.STEP_IDS.name: ids_B[:, None],
            c.BLOCK_POSITION_IDS.name: start_B[:, None],
            c.BLOCK_WRITE_INDEX.name: start_B,
            c.KV_INDEX.name: live_rows(int(start_B.max()) + 1, bucket),
        }
        return self._call(c.DRAFTER, slots, starts, feeds, slots)

    def _call(
        self, engine: str, slots: range, starts: Sequence[int], feeds: dict[str, Array], drafting: Sequence[int]
    ) -> Drafted:
        self._poison(self.runtime.caches[c.DRAFTER, "draft"], slots, starts, len(feeds[c.KV_INDEX.name]))
        fetch = (c.FEATURE.name, c.DRAFT_IDS.name, c.DRAFT_LOGITS.name)
        found = [array.copy()[:, 0] for array in self.runtime.run(engine, "draft", slots, feeds, fetch)]
        self.runtime.keep_pending("draft", dict.fromkeys(drafting, 1), slots)
        return Drafted(*found)


@dataclass(frozen=True)
class Compared:
    """One request's chain of K drafts from both sides."""

    ids_K: Array
    ours_KV: Array
    theirs_KV: Array
    our_features_KE: Array
    their_features_KE: Array


class Chain:
    """Ragged requests through target, context and steps; the oracle beside them on transformers' target states."""

    def __init__(self, pair: Pair, engines: ChainEngines, tap_offset: int = 1) -> None:
        self.engines, self.rng = engines, np.random.default_rng(0)
        self.vocab, taps = pair.bundle.target.live_vocab, pair.bundle.drafters["draft"].spec.taps
        length = max(PROMPTS) + ROUNDS * (DRAFTS + 1) + 2
        self.sequences = [random_tokens(self.rng, length, self.vocab) for _ in PROMPTS]
        target = TargetOracle(pair.target)
        states = [target(sequence)[1] for sequence in self.sequences]
        self.states = [np.concatenate([state[tap + tap_offset] for tap in taps], axis=-1) for state in states]
        table = load_file(pair.target / "model.safetensors")["model.embed_tokens.weight"].astype(np.float32)
        self.oracle = Eagle3Oracle(pair.draft, pair.bundle.target.stack.hidden_size, table)
        self.at = [0] * len(PROMPTS)
        self.first: dict[int, Drafted] = {}

    def run(self) -> Iterator[Compared]:
        """Every chain of every round."""
        while any(at < prompt for at, prompt in zip(self.at, PROMPTS, strict=True)):
            left = [prompt - at for at, prompt in zip(self.at, PROMPTS, strict=True)]
            self._pass([min(int(self.rng.integers(0, CHUNK + 1)), count) for count in left], [0] * len(left), CHUNK)
        for round_ in range(ROUNDS):
            if round_ in (2, 5):  # plain steps become context all the same
                self._pass([1] * len(PROMPTS), [0] * len(PROMPTS), 1)
                continue
            yield from self._draft(range(round_ % 2, len(PROMPTS)))
            wrong = [int(self.rng.integers(0, DRAFTS + 1)) for _ in PROMPTS]
            kept = [1 + int(self.rng.integers(0, DRAFTS + 1 - count)) for count in wrong]
            self._pass(kept, wrong, DRAFTS + 1)

    def _pass(self, kept: Sequence[int], wrong: Sequence[int], width: int) -> None:
        """Committed tokens, then wrong ones, through target and context. Drafts come from the last committed row."""
        slots, rows, width = range(len(kept)), [], max(width, self.engines.min_rows)
        next_ids_BS = self.rng.integers(0, self.vocab, (len(kept), width))
        for i, (at, count) in enumerate(zip(self.at, kept, strict=True)):
            rows.append([*self.sequences[i][at : at + count], *random_tokens(self.rng, wrong[i], self.vocab)])
            next_ids_BS[i, :count] = self.sequences[i][at + 1 : at + count + 1]
        self.engines.target(slots, rows, self.at, width)
        drafted = self.engines.chain_context(slots, self.at, next_ids_BS, kept)
        self.first |= {i: drafted.at(i) for i, count in enumerate(kept) if count}
        self.at = [at + count for at, count in zip(self.at, kept, strict=True)]

    def _draft(self, slots: range) -> Iterator[Compared]:
        chains = [[self.first[slot]] for slot in slots]
        for i in range(DRAFTS - 1):
            last_B = np.array([chain[-1].ids_B for chain in chains])
            call = self.engines.chain_step(slots, [self.at[slot] + i for slot in slots], last_B)
            for row, chain in enumerate(chains):
                chain.append(call.at(row))
        for slot, chain in zip(slots, chains, strict=True):
            at, ids_K = self.at[slot], np.array([each.ids_B for each in chain])
            ours = (np.stack([each.logits_BV for each in chain]), np.stack([each.features_BE for each in chain]))
            theirs = self.oracle.drafts(self.states[slot][:at], self.sequences[slot][1 : at + 1], ids_K[:-1].tolist())
            yield Compared(ids_K, ours[0], theirs[1], ours[1], theirs[0])


@dataclass
class Worst:
    """Over all chains: the largest differences, and how many drafts were compared."""

    logits: float = 0.0
    features: float = 0.0
    drafts: int = 0


def compare(chain: Chain) -> Worst:
    """Drafts must be equal wherever the oracle's are clear, as long as the numbers are."""
    worst, unclear = Worst(), 0
    alive_V, count = chain.oracle.target_ids < chain.vocab, len(chain.oracle.target_ids)
    for found in chain.run():
        assert (found.ours_KV[:, count:] <= DEAD).all()
        assert (found.ours_KV[:, :count][:, ~alive_V] <= DEAD).all()
        ours_KV, theirs_KV = found.ours_KV[:, :count][:, alive_V], found.theirs_KV[:, alive_V]
        worst.logits = max(worst.logits, float(np.abs(ours_KV - theirs_KV).max()))
        worst.features = max(worst.features, float(np.abs(found.our_features_KE - found.their_features_KE).max()))
        top = np.sort(theirs_KV, axis=-1)[:, -2:]
        clear_K = top[:, 1] - top[:, 0] > 2 * TOLERANCE["draft logits"]
        unclear, worst.drafts = unclear + int((~clear_K).sum()), worst.drafts + len(clear_K)
        if worst.logits <= TOLERANCE["draft logits"]:
            best_K = chain.oracle.target_ids[alive_V][theirs_KV.argmax(-1)]
            np.testing.assert_array_equal(found.ids_K[clear_K], best_K[clear_K])
    assert unclear <= 0.05 * worst.drafts
    return worst


@pytest.mark.parametrize("keys", CASES.values(), ids=CASES.keys())
def test_chains_equal_the_reference(tmp_path: Path, keys: Config, measure: Any) -> None:
    make(tmp_path, keys, {"dtype": keys.get("dtype", "float32")})
    pair = build(tmp_path)
    worst = compare(Chain(pair, ChainEngines(pair.bundle)))
    measure("draft logits", worst.logits)
    measure("features", worst.features)
    assert worst.drafts >= 10 * DRAFTS
    assert worst.logits <= TOLERANCE["draft logits"]
    assert worst.features <= TOLERANCE["features"]


def test_two_drafters_of_one_bundle_read_their_own_taps(tmp_path: Path) -> None:
    """The packed layers begin with those of the other, in another order."""
    make(tmp_path, {})
    make_drafter(tmp_path / "other", make_target(tmp_path / "target", **TARGET), taps=(4, 2, 1))
    pair = build(tmp_path, [DrafterSource(tmp_path / "other", "other")])
    assert pair.bundle.taps == (4, 2, 1, 3)
    assert compare(Chain(pair, ChainEngines(pair.bundle))).logits <= TOLERANCE["draft logits"]


@pytest.mark.parametrize("offset", [0, 2])
def test_a_wrong_tap_offset_makes_the_comparison_fail(tmp_path: Path, offset: int) -> None:
    make(tmp_path, {})
    pair = build(tmp_path)
    worst = compare(Chain(pair, ChainEngines(pair.bundle), offset))
    assert worst.logits > TOLERANCE["draft logits of a wrong tap, at least"]


def test_the_numpy_forward_equals_the_reference(tmp_path: Path) -> None:
    """What builds check themselves against; rows behind given ones are as rows of a whole."""
    norms = ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual", "qk_norm", "attention_bias")
    for name, keys in {"plain": {}, "normed": dict.fromkeys(norms, True)}.items():
        make(tmp_path / name, {**keys, "own_embedding": True})
        pair = build(tmp_path / name)
        draft = read_eagle3(pair.draft, pair.bundle.target)
        rng, ours = np.random.default_rng(1), ReferenceEagle3(draft.weights, draft.spec)
        taps, ids = rng.standard_normal((9, 3 * 64), np.float32), rng.integers(0, 256, 9)
        embeds, features = draft.weights.read("embed_tokens.weight")[ids], ours.features(taps)
        h = ours.layer(embeds, features, np.arange(9))
        past = ours.inputs(embeds[:4], features[:4])
        np.testing.assert_allclose(ours.layer(embeds[4:], features[4:], np.arange(4, 9), past), h[4:], atol=1e-5)
        passed, logits = Eagle3Oracle(pair.draft, 64, embeds).drafts(taps, ids.tolist(), ())
        np.testing.assert_allclose(ours.passed_on(h)[-1:], passed, atol=1e-4)
        np.testing.assert_allclose(ours.logits(h)[-1:], logits, atol=1e-4)


def test_the_decoder_drafts_as_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chain of whole requests, in flight together, behind the tokens that each had then."""
    make(tmp_path, TOGETHER)
    pair, proposed, propose = build(tmp_path, max_batch_size=2), [], drafting.Drafting.propose

    def recorded(self: Any, slots: range, rows: Any, wanted: Sequence[int]) -> Any:
        found = propose(self, slots, rows, wanted)
        proposed.extend((list(slot.tokens), ids) for slot, ids in zip(rows, found, strict=True) if ids)
        return found

    monkeypatch.setattr(drafting.Drafting, "propose", recorded)
    rng, target = np.random.default_rng(0), TargetOracle(pair.target)
    prompts = [{"prompt_token_ids": random_tokens(rng, length, 256)} for length in (40, 9, 23)]
    params = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
    plain, drafted = (LLM(pair.bundle.path).generate(prompts, params, strategy=name) for name in ("ar", "draft"))
    assert [each.outputs[0].token_ids for each in plain] == [each.outputs[0].token_ids for each in drafted]
    table = load_file(pair.target / "model.safetensors")["model.embed_tokens.weight"]
    oracle = Eagle3Oracle(pair.draft, 64, table)
    for tokens, ids in proposed:
        states = target(tokens)[1]
        taps = np.concatenate([states[tap + 1] for tap in TAPS], axis=-1)[:-1]
        _, logits_KV = oracle.drafts(taps, tokens[1:], ids[:-1])
        np.testing.assert_array_equal(ids, oracle.target_ids[logits_KV.argmax(-1)])
    assert sum(len(ids) for _, ids in proposed) > 60


def test_what_stale_cache_rows_hold_changes_no_draft(tmp_path: Path) -> None:
    make(tmp_path, TOGETHER)
    pair, runs = build(tmp_path), []
    for poison in (None, 1e4, -3e4):
        chain = Chain(pair, ChainEngines(pair.bundle, poison=poison))
        runs.append(np.stack([found.ours_KV for found in chain.run()]))
    for run in runs[1:]:
        np.testing.assert_array_equal(run, runs[0])


@pytest.mark.parametrize("keys", [{}, {**TOGETHER, "intermediate_size": 97}], ids=["plain", "odd width"])
def test_an_int8_drafter_agrees_with_the_float_one(tmp_path: Path, keys: Config, measure: Any) -> None:
    """Each draft behind those that the engine made before it."""
    make(tmp_path, {**keys, "draft_vocab_size": 128})
    pair, same, total, errors = build(tmp_path, draft_weights="int8"), 0, 0, []
    chain = Chain(pair, ChainEngines(pair.bundle))
    for found in chain.run():
        np.testing.assert_array_equal(found.ids_K, chain.oracle.target_ids[found.ours_KV.argmax(-1)])
        same += int((found.ids_K == chain.oracle.target_ids[found.theirs_KV.argmax(-1)]).sum())
        total += len(found.ids_K)
        errors.append(np.std(found.ours_KV - found.theirs_KV) / np.std(found.theirs_KV))
    measure("agreement", same / total)
    measure("relative error", float(np.mean(errors)))
    assert same / total > 0.8
    assert 0 < np.mean(errors) < 0.1


@pytest.mark.parametrize("form", ["float", "int8"])
def test_draft_ids_without_a_token_are_never_chosen(tmp_path: Path, form: str) -> None:
    """However large their logits: 200 of the target's 300 ids are tokens."""
    make(tmp_path, {}, {"vocab_size": 300, "tokenizer": 200})
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    dead_V = tensors["d2t"] + np.arange(100) >= 200
    assert 10 < dead_V.sum() < 90
    scale_V = np.where(dead_V, 50, 1).astype(np.float32)
    edit_tensors(tmp_path / "draft", {"lm_head.weight": scale_V[:, None] * tensors["lm_head.weight"]})
    pair = build(tmp_path, draft_weights=form)
    chains = list(Chain(pair, ChainEngines(pair.bundle)).run())
    assert len({int(id_) for found in chains for id_ in found.ids_K}) > 5
    for found in chains:
        assert (found.ids_K < 200).all()
        assert (found.ours_KV[:, :100][:, dead_V] < -1e20).all()
        assert (np.abs(found.ours_KV[:, :100][:, ~dead_V]) < 1e20).all()


@pytest.mark.parametrize("form", ["float", "int8"])
def test_the_lowest_draft_id_wins_a_tie(tmp_path: Path, form: str) -> None:
    """A head whose second half repeats the first, while the target's ids fall: so it is not the target's lowest."""
    make(tmp_path, {"draft_vocab_size": 128})
    head, ids = load_file(tmp_path / "draft" / "model.safetensors")["lm_head.weight"], 200 - np.arange(128)
    has_draft = np.zeros(256, np.bool_)
    has_draft[ids] = True
    maps = {"d2t": ids - np.arange(128), "t2d": has_draft}
    edit_tensors(tmp_path / "draft", {"lm_head.weight": np.concatenate([head[:64], head[:64]]), **maps})
    pair = build(tmp_path, draft_weights=form)
    for found in Chain(pair, ChainEngines(pair.bundle)).run():
        np.testing.assert_array_equal(found.ours_KV[:, :64], found.ours_KV[:, 64:])
        assert ((found.ids_K > 200 - 64) & (found.ids_K <= 200)).all()


@pytest.mark.parametrize("form", ["float", "int8"])
def test_drafts_of_a_request_do_not_depend_on_its_batch_or_call_shape(tmp_path: Path, form: str) -> None:
    """Alone or among others, in any slot, over a longer cache slice, its prompt chunked otherwise, on two threads."""
    make(tmp_path, {})
    pair, rng = build(tmp_path, draft_weights=form), np.random.default_rng(7)
    prompts = [random_tokens(rng, length, 256) for length in (61, 37, 90, 5, 61, 20, 44, 3)]

    def draft(slots: range, slot: int, chunk: int, bucket: int, threads: int) -> Array:
        engines, row = ChainEngines(pair.bundle, threads), slot - slots.start
        rows, last, found = [prompts[0] if i == slot else prompts[i] for i in slots], {}, []
        for start in range(0, 96, chunk):
            tokens, starts = [each[start : start + chunk] for each in rows], [min(start, len(each)) for each in rows]
            next_ids = np.array([(each[start + 1 :] + [7] * (chunk + 1))[:chunk] for each in rows])
            engines.target(slots, tokens, starts, chunk, bucket)
            call = engines.chain_context(slots, starts, next_ids, list(map(len, tokens)), bucket)
            last |= {i: call.at(i) for i, each in enumerate(tokens) if each}
        drafted = [last[i] for i in range(len(rows))]
        for i in range(3):
            found.append(drafted[row].logits_BV)
            ids_B = np.array([each.ids_B for each in drafted])
            call = engines.chain_step(slots, [len(each) + i for each in rows], ids_B, bucket)
            drafted = [call.at(i) for i in range(len(rows))]
        return np.stack([*found, drafted[row].logits_BV])

    expected = draft(range(1), 0, 96, 0, 1)
    for shape in [
        (range(8), 0, 96, 0, 1),
        (range(8), 7, 96, 0, 2),
        (range(3), 1, 16, 0, 1),
        (range(2, 4), 3, 5, 192, 2),
        (range(1), 0, 1, 256, 2),
    ]:
        np.testing.assert_array_equal(draft(*shape), expected, err_msg=str(shape))
