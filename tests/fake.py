"""A scripted runtime: the whole contract between decoder and engines, without an engine.

The target's next token is a function of *every* token before it and of their positions, as they stand in the slot's
cache; a draft is a function of the whole drafter context and of every relay input, and a draft model's of every token
in its own cache. So a wrong cache row, position, slot move, relay row or missing context call changes a token or a
draft, or trips an assertion here. Rows that nobody may read are poisoned, arrays die with their engine's next call, and
what stays on the device is bound to its own pass.

:func:`expect` says what one request alone must give, written from the method with absolute positions.

Shape suffixes: B requests, S token rows, J block slots, K drafts, R logit rows, L cache rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from lookup import by_definition

from dflow_trt import contract as c
from dflow_trt.bundle import Bundle, DrafterEntry, Strategy
from dflow_trt.method.sampling import Sampler
from dflow_trt.request import Request
from dflow_trt.spec import (
    CACHE_STEP,
    BuildSpec,
    DFlashSpec,
    DominoSpec,
    DrafterSpec,
    DraftModelSpec,
    NgramSpec,
    RelaySpec,
    RelayStart,
    RopeSpec,
    StackSpec,
    TargetSpec,
)

LIVE_VOCAB, VOCAB_SIZE = 61, 64
ROWS_OF_LOGITS = 997
EMPTY = -1  # a cache row that holds nothing
NOTHING = 0  # a state that is none
WORD = (1 << 64) - 1
DTYPES = {"int64": np.int64, "bool": np.bool_}

Array = np.ndarray[Any, np.dtype[Any]]
Rule = Literal["self", "wrong", "mixed"]


def mix(*values: int) -> int:
    """One well-mixed 64-bit number of several (splitmix64's finaliser); never NOTHING."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state ^ (int(value) & WORD)) * 0xBF58476D1CE4E5B9 & WORD
        state = (state ^ state >> 27) * 0x94D049BB133111EB & WORD
        state ^= state >> 31
    return state or 1


class Toy:
    """The toy target. The state after a prefix is a position-weighted sum of its tokens; it picks a row of logits."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self._weights_L = rng.integers(1, 1 << 63, 4096, np.uint64)
        self._logits = (2 * rng.standard_normal((ROWS_OF_LOGITS, LIVE_VOCAB))).astype(np.float32)
        self._best = self._logits.argmax(axis=1)

    def states(self, tokens: Sequence[int] | Array) -> Array:
        """The state after each token of a prefix, uint64."""
        ids = np.asarray(tokens, np.int64).astype(np.uint64) + np.uint64(1)
        return np.cumsum(ids * self._weights_L[: len(ids)], dtype=np.uint64)

    def logits(self, state: int) -> Array:
        """[LIVE_VOCAB] float32: the next token's logits after a state."""
        return self._logits[mix(state) % ROWS_OF_LOGITS]

    def next(self, state: int) -> int:
        return int(self._best[mix(state) % ROWS_OF_LOGITS])

    def continuation(self, tokens: Sequence[int], count: int) -> list[int]:
        """The greedy tokens after ``tokens``."""
        state, found = int(self.states(tokens)[-1]), []
        for position in range(len(tokens), len(tokens) + count):
            found.append(self.next(state))
            state = (state + (found[-1] + 1) * int(self._weights_L[position])) & WORD
        return found


@dataclass(frozen=True)
class Script:
    """How a fake drafter drafts: as the target would, wrongly throughout, or each slot right with ``percent``.

    "mixed" draws from everything that a drafter may depend on: the whole context, the anchor and each block embedding.
    """

    rule: Rule = "mixed"
    percent: int = 75
    salt: int = 1

    def h(self, state: int) -> int:
        """What this drafter's context makes of one row of the target."""
        return mix(state, self.salt)

    def drafts(self, toy: Toy, committed: Sequence[int], anchor: int, embeds: Sequence[int], count: int) -> list[int]:
        """``count`` drafts behind ``committed`` (the context) and the anchor, given J embeddings."""
        true = toy.continuation([*committed, anchor], count)
        if self.rule == "self":
            return true
        if self.rule == "wrong":
            return [(token + 1) % LIVE_VOCAB for token in true]
        key = mix(self.salt, *map(self.h, toy.states(committed).tolist()), anchor, *embeds)
        return [self._drawn(token, mix(key, j)) for j, token in enumerate(true)]

    def speaks(self, toy: Toy, tokens: Sequence[int]) -> int:
        """What a draft model says behind ``tokens``, all of them its own cache; EMPTY where one of them is missing."""
        if EMPTY in tokens:
            return EMPTY
        true = toy.next(int(toy.states(tokens)[-1]))
        if self.rule == "mixed":
            return self._drawn(true, mix(self.salt, *tokens))
        return true if self.rule == "self" else (true + 1) % LIVE_VOCAB

    def _drawn(self, true: int, draw: int) -> int:
        """The right token with ``percent``, else any."""
        return true if draw % 100 < self.percent else draw // 100 % LIVE_VOCAB


def embedding(token: int, relayed: tuple[int, int, int] | None = None) -> int:
    """A block slot's input: E(token), with the relay term of (b, y_hat, h) where there is one."""
    return mix(token) if relayed is None else mix(token, *relayed)


# -- a bundle without files --------------------------------------------------------------------------------------------


def stack_spec(heads_per_group: int = 2) -> StackSpec:
    rope = RopeSpec("default", 10000.0)
    return StackSpec(4, 1, heads_per_group, 1, 4, 8, 1e-6, False, rope, (None,), (True,))


def drafter_spec(name: str, block_size: int, relay: RelayStart | None, shifted: bool = False) -> DFlashSpec:
    """``shifted``: by a causal head, so that the block has as many drafts as slots."""
    return DFlashSpec(
        name=name,
        stack=stack_spec(),
        block_size=block_size,
        mask_token_id=VOCAB_SIZE - 1,
        target_layer_ids=(0,),
        target_hidden_size=4,
        num_target_layers=2,
        vocab_size=VOCAB_SIZE,
        input_embedding_scale=1.0,
        output_multiplier=1.0,
        final_logit_softcapping=None,
        relay=RelaySpec(relay, 1e-6) if relay else None,
        head=DominoSpec(prefix_length=0, state_size=4, rank=4, shifted=True) if shifted else None,
        conv=None,
        checkpoint_dtype="float32",
        architecture="DFlashDraftModel",
        licence=None,
    )


def draft_model_spec(name: str, drafts: int, heads_per_group: int = 2) -> DraftModelSpec:
    """One layer of the target's vocabulary."""
    return DraftModelSpec(name, None, target_spec(heads_per_group, 128), drafts)


def target_spec(heads_per_group: int, max_position: int, eos_ids: tuple[int, ...] = ()) -> TargetSpec:
    return TargetSpec(
        stack=stack_spec(heads_per_group),
        vocab_size=VOCAB_SIZE,
        live_vocab=LIVE_VOCAB,
        tied_head=True,
        max_position=max_position,
        eos_ids=eos_ids,
        bos_id=None,
        pad_id=None,
        checkpoint_dtype="float32",
        architecture="Qwen3ForCausalLM",
        licence=None,
    )


def make_bundle(
    drafters: Iterable[DrafterSpec] = (),
    *,
    max_batch_size: int = 4,
    max_input_len: int = 80,
    max_seq_len: int = 128,
    max_num_tokens: int = 64,
    eos_ids: tuple[int, ...] = (),
    heads_per_group: int = 2,
) -> Bundle:
    """A bundle for the fake: specs alone, no files."""
    target = target_spec(heads_per_group, max_seq_len, eos_ids)
    build = BuildSpec(
        backend="onnxruntime",
        dtype="float32",
        max_batch_size=max_batch_size,
        max_input_len=max_input_len,
        max_seq_len=max_seq_len,
        max_num_tokens=max_num_tokens,
        target_weights="float",
        draft_weights="float",
        draft_logits=False,
    )
    entries = {spec.name: DrafterEntry(spec, "d", "t") for spec in drafters}
    return Bundle(Path("nowhere"), target, "t", entries, build, {}, {}, {})


# -- the runtime -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TargetCall:
    """One target pass as it was asked for; blocks[i] are the live tokens of row i, at position starts[i]."""

    slots: range
    width: int
    starts: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    names: tuple[int, ...]  # the first token of each slot's sequence, by which tests tell requests apart

    @property
    def rows(self) -> int:
        return self.width * len(self.slots)


@dataclass
class _Device:
    """What one pass leaves on the device: states [B,S], NOTHING where a row is not live."""

    slots: range
    start_B: Array
    states_BS: Array
    tokens_BS: Array
    taken: set[str] = field(default_factory=set)


class FakeRuntime:
    """:class:`dflow_trt.runtime.base.Runtime`, asserting its own contract."""

    def __init__(
        self, bundle: Bundle, toy: Toy, scripts: Mapping[str, Script] | None = None, slots: int | None = None
    ) -> None:
        self.toy, self.scripts = toy, dict(scripts or {})
        self.slots = slots or bundle.build.max_batch_size
        self._contracts = {(contract.engine, name): contract for name, contract in bundle.contracts()}
        self._min_rows = 2 if bundle.target.stack.heads_per_group == 1 else 1
        self._max_rows = max(bundle.build.max_num_tokens, 2 * self.slots)
        self._specs = {spec.name: spec for spec in bundle.specs if isinstance(spec, DFlashSpec)}
        models = [spec for spec in bundle.specs if isinstance(spec, DraftModelSpec)]
        self._model_rows = {spec.name: 2 if spec.model.stack.heads_per_group == 1 else 1 for spec in models}
        assert set(self.scripts) == {*self._specs, *self._model_rows}
        shape = (self.slots, bundle.cache_rows)
        self._tokens_SL = np.full(shape, EMPTY)
        self._read_SL = {name: np.full(shape, EMPTY) for name in self._model_rows}
        self._context = {name: np.zeros(shape, np.uint64) for name in self._specs}
        self._pending = {name: np.zeros((self.slots, spec.block_size), np.uint64) for name, spec in self._specs.items()}
        self._pass: _Device | None = None
        self._h: dict[str, tuple[range, Array]] = {}
        self._embeds: dict[str, tuple[range, Array, Array]] = {}
        self._lent: dict[tuple[str, str | None], list[Array]] = {}
        self._closed = False
        self.calls: list[str] = []
        self.target_calls: list[TargetCall] = []
        self.relayed: dict[str, list[tuple[range, Array, Array, Array]]] = {name: [] for name in self._specs}
        self.fail_logits: Callable[[int, int], bool] = lambda name, position: False

    # -- the protocol ------------------------------------------------------------------------------------------------

    @property
    def drawer(self) -> None:
        return None

    def run(
        self, engine: str, drafter: str | None, slots: range, feeds: Mapping[str, Array], fetch: Sequence[str] = ()
    ) -> list[Array]:
        self._check_call(engine, drafter, slots, feeds, fetch)
        self.calls.append(engine)
        for lent in self._lent.pop((engine, drafter), []):
            lent.fill(EMPTY if lent.dtype == np.int64 else np.nan)
        if engine == c.TARGET:
            outputs = self._target(slots, feeds)
        elif engine == c.CONTEXT:
            outputs = self._run_context(str(drafter), slots, feeds)
        elif engine == c.RELAY:
            outputs = self._relay(str(drafter), slots, feeds)
        elif drafter in self._model_rows:
            outputs = self._model(str(drafter), slots, feeds)
        else:
            outputs = self._draft(str(drafter), slots, feeds)
        given = [outputs[name] for name in fetch]
        self._lent[engine, drafter] = given
        return given

    def keep_pending(self, drafter: str, rows: Mapping[int, int], slots: range) -> None:
        assert not self._closed
        of, h_BS = self._h[drafter]
        assert slots == of, "h belongs to other slots"
        assert self._pass is not None, "h belongs to an earlier place of its slots"
        pending = self._pending[drafter]
        for slot, count in rows.items():
            assert slot in slots
            kept = h_BS[slot - slots.start, :count]
            assert len(kept) == count, "more rows than the pass had"
            assert (kept != NOTHING).all(), "a row that was not live is kept"
            pending[slot] = NOTHING
            pending[slot, :count] = kept

    def swap(self, a: int, b: int, rows: int) -> None:
        assert not self._closed
        assert 0 <= a < self.slots
        assert 0 <= b < self.slots
        assert 0 <= rows <= self._tokens_SL.shape[1]
        tokens = [(cache, EMPTY) for cache in (self._tokens_SL, *self._read_SL.values())]
        for cache, empty in [*tokens, *((cache, NOTHING) for cache in self._context.values())]:
            cache[[a, b], :rows] = cache[[b, a], :rows]
            cache[[a, b], rows:] = empty  # what a move leaves behind is nobody's
        for pending in self._pending.values():
            pending[[a, b]] = pending[[b, a]]
        self._pass = None
        self._h.clear()
        self._embeds.clear()

    def close(self) -> None:
        self._closed = True

    # -- the contract ------------------------------------------------------------------------------------------------

    def _check_call(
        self, engine: str, drafter: str | None, slots: range, feeds: Mapping[str, Array], fetch: Sequence[str]
    ) -> None:
        assert not self._closed, "called after close"
        contract = self._contracts[engine, drafter]
        assert slots.step == 1
        assert 0 <= slots.start < slots.stop <= self.slots, f"slots {slots}"
        wanted = {spec.name: spec for spec in contract.inputs if spec.home == "host"}
        assert set(feeds) == set(wanted), f"{engine} is fed {sorted(feeds)}"
        offered = {spec.name for spec in contract.outputs if spec.home == "host"}
        assert set(fetch) <= offered, f"{engine} does not give {fetch} to the host"
        sizes = {**contract.static, "B": len(slots)}
        for name, array in feeds.items():
            assert array.dtype == DTYPES[wanted[name].kind], f"{name} is {array.dtype}"
            assert array.ndim == len(wanted[name].dims)
            for dim, size in zip(wanted[name].dims, array.shape, strict=True):
                assert sizes.setdefault(dim, size) == size, f"{engine} {name}: {dim} is {size}, not {sizes[dim]}"
                assert size > 0
        if c.KV_INDEX.name in feeds:
            self._check_live_length(engine, feeds)
        if c.WRITE_INDEX.name in feeds:
            start_B, positions = feeds[c.WRITE_INDEX.name], feeds[c.POSITION_IDS.name]
            assert (start_B >= 0).all()
            assert (start_B + positions.shape[1] <= self._tokens_SL.shape[1]).all(), "a write past the cache"
            assert (positions == start_B[:, None] + np.arange(positions.shape[1])).all(), "positions"

    def _check_live_length(self, engine: str, feeds: Mapping[str, Array]) -> None:
        index, rows = feeds[c.KV_INDEX.name], feeds[c.POSITION_IDS.name].shape[1]
        needed = int(feeds[c.WRITE_INDEX.name].max()) + rows
        assert (index == np.arange(len(index))).all()
        assert len(index) % CACHE_STEP == 0
        assert needed <= len(index) < needed + CACHE_STEP, f"{engine}: live length {len(index)} for {needed} rows"
        assert len(index) <= self._tokens_SL.shape[1], "a live length past the cache"

    # -- the engines -------------------------------------------------------------------------------------------------

    def _target(self, slots: range, feeds: Mapping[str, Array]) -> dict[str, Array]:
        ids_BS, count_B = feeds[c.INPUT_IDS.name], feeds[c.ROW_COUNT.name]
        start_B, rows_BR = feeds[c.WRITE_INDEX.name], feeds[c.LOGIT_ROWS.name]
        width = ids_BS.shape[1]
        assert width >= self._min_rows, "one row of one head a group takes another way through the engine"
        assert ((count_B >= 0) & (count_B <= width)).all()
        assert count_B.any(), "a pass without a live row"
        assert ((ids_BS >= 0) & (ids_BS < VOCAB_SIZE)).all()
        assert ((rows_BR >= 0) & (rows_BR < width)).all()
        states_BS = np.zeros((len(slots), width), np.uint64)
        for i, slot in enumerate(slots):
            start, count = int(start_B[i]), int(count_B[i])
            cache = self._tokens_SL[slot]
            cache[start : start + width] = EMPTY  # padding is written too, over whatever lay there
            cache[start : start + count] = ids_BS[i, :count]
            if count:
                assert (cache[: start + count] != EMPTY).all(), "a row reads cache rows that nobody wrote"
                states_BS[i, :count] = self.toy.states(cache[: start + count])[start:]
        self._pass = _Device(slots, start_B.copy(), states_BS, ids_BS.copy())
        self._h.clear()
        self.target_calls.append(
            TargetCall(
                slots,
                width,
                tuple(start_B.tolist()),
                tuple(tuple(ids_BS[i, :count].tolist()) for i, count in enumerate(count_B)),
                tuple(int(self._tokens_SL[slot, 0]) for slot in slots),
            )
        )
        return self._chosen(slots, start_B, states_BS, rows_BR)

    def _chosen(self, slots: range, start_B: Array, states_BS: Array, rows_BR: Array) -> dict[str, Array]:
        next_BR = np.full(rows_BR.shape, EMPTY)
        logits_BRV = np.full((*rows_BR.shape, c.vocab_columns(VOCAB_SIZE)), np.nan, np.float32)
        for i, r in np.ndindex(rows_BR.shape):
            row = rows_BR[i, r]
            state = int(states_BS[i, row])
            if state != NOTHING and not self.fail_logits(int(self._tokens_SL[slots[i], 0]), int(start_B[i] + row) + 1):
                next_BR[i, r] = self.toy.next(state)
                logits_BRV[i, r, :LIVE_VOCAB] = self.toy.logits(state)
        return {c.NEXT_IDS.name: next_BR, c.LOGITS.name: logits_BRV}

    def _run_context(self, drafter: str, slots: range, feeds: Mapping[str, Array]) -> dict[str, Array]:
        given = self._pass
        assert given is not None, "context without a target pass of these slots"
        assert slots == given.slots
        assert (feeds[c.WRITE_INDEX.name] == given.start_B).all()
        assert feeds[c.POSITION_IDS.name].shape == given.states_BS.shape
        assert drafter not in given.taken, "context twice for one pass"
        given.taken.add(drafter)
        script, cache = self.scripts[drafter], self._context[drafter]
        h_BS = np.zeros_like(given.states_BS)
        for i, s in zip(*np.nonzero(given.states_BS), strict=True):
            h_BS[i, s] = script.h(int(given.states_BS[i, s]))
        for i, slot in enumerate(slots):
            start = int(given.start_B[i])
            cache[slot, start : start + h_BS.shape[1]] = h_BS[i]
        self._h[drafter] = slots, h_BS
        return {}

    def _relay(self, drafter: str, slots: range, feeds: Mapping[str, Array]) -> dict[str, Array]:
        spec, ids_BJ = self._specs[drafter], feeds[c.BLOCK_IDS.name]
        assert (ids_BJ[:, 1:] == spec.mask_token_id).all()
        assert ((ids_BJ[:, 0] >= 0) & (ids_BJ[:, 0] < VOCAB_SIZE)).all()
        embeds_BJ = np.array([[embedding(token) for token in row] for row in ids_BJ.tolist()], np.uint64)
        if spec.relay:
            source_BJ, on_BJ = feeds[c.RELAY_SRC.name], feeds[c.RELAY_ON.name]
            bonus_B, reject_B = feeds[c.BONUS_ID.name], feeds[c.REJECT_ID.name]
            assert ((source_BJ >= 0) & (source_BJ < spec.block_size)).all()
            assert not on_BJ[:, 0].any(), "the anchor is never relayed"
            for ids_B in (bonus_B, reject_B):
                assert ((ids_B >= 0) & (ids_B < VOCAB_SIZE)).all()
            for i, j in zip(*np.nonzero(on_BJ), strict=True):
                h = int(self._pending[drafter][slots[i], source_BJ[i, j]])
                assert h != NOTHING, "the relay reads a row that was not kept"
                embeds_BJ[i, j] = embedding(int(ids_BJ[i, j]), (int(bonus_B[i]), int(reject_B[i]), h))
            self.relayed[drafter].append((slots, source_BJ.copy(), on_BJ.copy(), np.stack([bonus_B, reject_B], 1)))
        self._embeds[drafter] = slots, ids_BJ[:, 0].copy(), embeds_BJ
        return {}

    def _draft(self, drafter: str, slots: range, feeds: Mapping[str, Array]) -> dict[str, Array]:
        of, anchor_B, embeds_BJ = self._embeds.pop(drafter)
        assert of == slots, "the block's embeddings belong to other slots"
        assert feeds[c.POSITION_IDS.name].shape == embeds_BJ.shape
        script, cache = self.scripts[drafter], self._context[drafter]
        count = self._contracts[c.DRAFTER, drafter].static["K"]
        drafts_BK = np.full((len(slots), count), EMPTY)
        for i, (slot, length) in enumerate(zip(slots, feeds[c.WRITE_INDEX.name].tolist(), strict=True)):
            cache[slot, length : length + embeds_BJ.shape[1]] = NOTHING  # the block's own rows, never kept
            committed = self._tokens_SL[slot, :length].tolist()
            states = map(script.h, self.toy.states(committed).tolist())
            if cache[slot, :length].tolist() != list(states):
                continue  # not the context of the committed tokens: right for a row without this drafter, never fed on
            drafts_BK[i] = script.drafts(self.toy, committed, int(anchor_B[i]), embeds_BJ[i].tolist(), count)
        return {c.DRAFT_IDS.name: drafts_BK}

    def _model(self, drafter: str, slots: range, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """A draft model: all that it knows is in its own cache. Of a row without tokens it writes id 0, as of any."""
        ids_BS, start_B, row_B = feeds[c.INPUT_IDS.name], feeds[c.WRITE_INDEX.name], feeds[c.LOGIT_ROWS.name][:, 0]
        width = ids_BS.shape[1]
        assert width >= self._model_rows[drafter], "one row of one head a group takes another way through the engine"
        assert ids_BS.size <= self._max_rows, "more rows than any call may have"
        assert ((ids_BS >= 0) & (ids_BS < VOCAB_SIZE)).all()
        assert ((row_B >= 0) & (row_B < width)).all()
        next_BR = np.full((len(slots), 1), EMPTY)
        for i, (slot, start, row) in enumerate(zip(slots, start_B.tolist(), row_B.tolist(), strict=True)):
            cache = self._read_SL[drafter][slot]
            cache[start : start + width] = EMPTY  # padding is written too, over whatever lay there
            cache[start : start + row + 1] = ids_BS[i, : row + 1]
            next_BR[i, 0] = self.scripts[drafter].speaks(self.toy, cache[: start + row + 1].tolist())
        return {c.NEXT_IDS.name: next_BR}


# -- what must come out ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """One verify pass of one request: the anchor's position, anchor and drafts, how many of them were accepted."""

    position: int
    block: tuple[int, ...]
    accepted: int
    relayed: int


@dataclass(frozen=True)
class Expected:
    """The whole life of a request that runs alone and uninterrupted."""

    tokens: tuple[int, ...]
    finish_reason: str
    rounds: tuple[Round, ...]


def expect(bundle: Bundle, toy: Toy, scripts: Mapping[str, Script], request: Request) -> Expected:
    """What a request gives by the method, token by token and draft by draft; a request without text_stop."""
    return _Oracle(bundle, toy, scripts, request).run()


class _Oracle:
    def __init__(self, bundle: Bundle, toy: Toy, scripts: Mapping[str, Script], request: Request) -> None:
        self.bundle, self.toy, self.request = bundle, toy, request
        self.strategy: Strategy = request.strategy
        params = request.params
        self.stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(bundle.target.eos_ids))
        self.sampler = Sampler(params, request.prompt_ids, LIVE_VOCAB, self.stops, request.seed, request.sample_index)
        self.tokens = list(request.prompt_ids)
        self.limit = min(params.max_tokens, bundle.build.max_seq_len - len(self.tokens))
        self.spec = bundle.drafters[self.strategy.drafter].spec if self.strategy.drafter else None
        self.script = scripts.get(self.strategy.drafter) if self.strategy.drafter else None

    def run(self) -> Expected:
        rounds: list[Round] = []
        reason = self._emit()
        left: dict[int, int] = {}  # absolute position -> h of the last verify pass
        pair = (0, 0)
        while reason is None:
            position, anchor = len(self.tokens) - 1, self.tokens[-1]
            drafts, relayed = self._drafts(left, pair)
            rows = self.toy.states([*self.tokens, *drafts])[position:].tolist()
            accepted, reason = 0, None
            for row in range(len(drafts) + 1):
                reason = self._emit()
                matched = row < len(drafts) and self.tokens[-1] == drafts[row]
                accepted += matched
                if reason or not matched:
                    break
            rounds.append(Round(position, (anchor, *drafts), accepted, relayed))
            left = {}
            if accepted < len(drafts) and self.script is not None and isinstance(self.spec, DFlashSpec):
                left = {position + i: self.script.h(state) for i, state in enumerate(rows)}
                pair = self.tokens[-1], drafts[accepted]
        return Expected(tuple(self.tokens[len(self.request.prompt_ids) :]), reason, tuple(rounds))

    def _drafts(self, left: Mapping[int, int], pair: tuple[int, int]) -> tuple[list[int], int]:
        """This round's drafts, and how many of their slots were relayed."""
        remaining = self.limit - (len(self.tokens) - len(self.request.prompt_ids))
        if self.spec is None:
            return [], 0
        wanted = min(self.spec.num_drafts, remaining - 1)
        if self.request.draft_tokens is not None:
            wanted = min(wanted, self.request.draft_tokens)
        if wanted <= 0:
            return [], 0
        if isinstance(self.spec, NgramSpec):
            return by_definition(self.tokens, self.spec.min_match, self.spec.max_match, wanted), 0
        assert self.script is not None
        if isinstance(self.spec, DraftModelSpec):
            return self._spoken(self.script, wanted), 0
        assert isinstance(self.spec, DFlashSpec)
        position, mask, embeds, relayed = len(self.tokens) - 1, self.spec.mask_token_id, [], 0
        for j in range(self.spec.block_size):
            first = 2 if self.spec.relay and self.spec.relay.start == "after_rejection" else 1
            source = left.get(position + j - 1) if self.strategy.relay and j >= first else None
            relayed += source is not None
            token = mask if j else self.tokens[-1]
            embeds.append(embedding(token, None if source is None else (*pair, source)))
        drafts = self.script.drafts(self.toy, self.tokens[:-1], self.tokens[-1], embeds, self.spec.num_drafts)
        return drafts[:wanted], relayed

    def _spoken(self, script: Script, count: int) -> list[int]:
        """A draft model's drafts, each said behind the ones before it."""
        text = list(self.tokens)
        for _ in range(count):
            text.append(script.speaks(self.toy, text))
        return text[len(self.tokens) :]

    def _emit(self) -> str | None:
        """The target's next token; why the request ends with it, or None."""
        params, state = self.request.params, int(self.toy.states(self.tokens)[-1])
        token = self.sampler.pick(self.toy.logits(state), len(self.tokens)).token
        self.sampler.commit(token)
        self.tokens.append(token)
        count = len(self.tokens) - len(self.request.prompt_ids)
        if token in self.stops and count >= params.min_tokens:
            return "stop"
        return "length" if count >= self.limit else None
