"""The draft-verify-relay loop with in-flight batching.

One :meth:`Decoder.step` reads: admit -> draft -> target (verify) -> accept -> observe -> target (prefill chunks) ->
observe -> retire. How drafts are made, and what is taken from a target pass for the next ones (relay, drafter and
context of the DFlash family), is each drafter's own: :mod:`dflow_trt.drafting`. Requests join and leave between any two
steps.

Shape suffixes: B requests of one call, S token rows, R logit rows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflow_trt import contract as c
from dflow_trt.bundle import Bundle
from dflow_trt.drafting.base import Drafting, Passed
from dflow_trt.errors import UserError
from dflow_trt.feeds import kv_index, padded, positions
from dflow_trt.kinds import KINDS
from dflow_trt.method.draft import draft_length
from dflow_trt.method.policy import Candidate, draft_load, make_policy
from dflow_trt.method.sampling import Pick, Sampler, Workspace
from dflow_trt.method.verify import Accepted, accept
from dflow_trt.request import Emission, Phase, Request, RequestStats, RoundResult, Slot
from dflow_trt.runtime.base import Array, Runtime
from dflow_trt.runtime.draw import Draw, drawable, drawn_pick
from dflow_trt.slots import SlotTable
from dflow_trt.spec import DraftPolicy

CHUNK_STEP = 16  # prefill rows are padded to this, so that call shapes repeat


class QueueFull(UserError):
    """The bounded queue takes no more requests; try again when some have finished."""


@dataclass
class _Round:
    """Scratch of one step: emissions so far and the time spent in engines."""

    emissions: list[Emission] = field(default_factory=list)
    milliseconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Pass:
    """The arrays of one target pass over adjacent slots.

    tokens_BR: the target's own tokens, for those requests whose choice is made beside the logits; for the others,
    logits_BRV.
    """

    slots: range
    feeds: dict[str, Array]
    tokens_BR: Array
    logits_BRV: Array | None


class Decoder:
    """Runs requests over a runtime's slots. Not thread-safe: one owner calls submit, step and cancel.

    max_queue: requests that may wait. slots: requests in flight, by default what the bundle was built for.
    draft_policy: "fixed", or "adaptive" (:mod:`dflow_trt.method.policy`). prefix_reuse: a prompt goes on from the cache
    rows that a finished request with the same beginning left. None of them changes any output.
    """

    def __init__(
        self,
        bundle: Bundle,
        runtime: Runtime,
        max_queue: int = 1024,
        slots: int | None = None,
        *,
        draft_policy: DraftPolicy = "fixed",
        prefix_reuse: bool = True,
    ) -> None:
        self._bundle, self._runtime, self._max_queue = bundle, runtime, max_queue
        self._queue: deque[Slot] = deque()
        self._table = SlotTable(slots or bundle.build.max_batch_size, runtime.swap, prefix_reuse)
        self._slots = self._table.active
        self._policy = make_policy(draft_policy)
        self._draftings: dict[str, Drafting[Any]] = {
            spec.name: KINDS[spec.kind].drafting_module().Drafting(spec, bundle, runtime, self._run)
            for spec in bundle.specs
        }
        self._cancels: deque[str] = deque()  # appended to from any thread
        self._min_rows = 2 if bundle.target.stack.heads_per_group == 1 else 1
        self._workspace = Workspace(bundle.target.live_vocab)
        self._round = _Round()

    # -- requests ----------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing queued, nothing in flight."""
        return not self._queue and not self._slots

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_active(self) -> int:
        return len(self._slots)

    def submit(self, request: Request) -> None:
        """Queue a request. UserError names what is wrong with it; QueueFull says that the queue is at its bound."""
        if len(self._queue) >= self._max_queue:
            raise QueueFull(
                f"request {request.id}: {len(self._queue)} requests are queued, at most {self._max_queue} are"
            )
        if any(slot.request.id == request.id for slot in (*self._queue, *self._slots)):
            raise UserError(f"request {request.id}: this id is in flight already; choose another")
        self._queue.append(self._slot(request))

    def check(self, request: Request) -> None:
        """UserError if :meth:`submit` would refuse the request for what it asks."""
        self._slot(request)

    def _slot(self, request: Request) -> Slot:
        build, target, params = self._bundle.build, self._bundle.target, request.params
        prompt = self._checked_prompt(request)
        if request.draft_tokens is not None and request.draft_tokens < 0:
            raise UserError(
                f"request {request.id}: draft_tokens is {request.draft_tokens}; allowed: 0 or more, or None"
            )
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(target.eos_ids))
        sampler = Sampler(params, prompt, target.live_vocab, stops, request.seed, request.sample_index, self._workspace)
        limit = min(params.max_tokens, build.max_seq_len - len(prompt))
        draws = self._runtime.drawer is not None and drawable(params)
        stats = RequestStats(prompt_tokens=len(prompt))
        return Slot(request, sampler, prompt, limit, draws, self._lookahead(request), stats=stats)

    def _lookahead(self, request: Request) -> int | None:
        """See :class:`~dflow_trt.request.Slot`."""
        drafting = self._draftings.get(request.strategy.drafter or "")
        return drafting.lookahead if drafting is not None and drafting.keeps_context else None

    def _checked_prompt(self, request: Request) -> list[int]:
        build, vocab = self._bundle.build, self._bundle.target.vocab_size
        prompt, limit = list(request.prompt_ids), min(build.max_input_len, build.max_seq_len - 1)
        if not prompt:
            raise UserError(f"request {request.id}: the prompt is empty; give at least one token")
        if len(prompt) > limit:
            raise UserError(
                f"request {request.id}: the prompt has {len(prompt)} tokens, this bundle takes {limit}; "
                "shorten it or build with a larger --max-input-len and --max-seq-len"
            )
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < vocab:
                raise UserError(f"request {request.id}: prompt token {token!r}, ids go from 0 to {vocab - 1}")
        return [int(token) for token in prompt]

    def cancel(self, request_id: str) -> bool:
        """End a request at the next step, whatever its phase; False if it is not here."""
        known = any(slot.request.id == request_id for slot in (*self._queue, *self._slots))
        if known:
            self._cancels.append(request_id)
        return known

    # -- one round ---------------------------------------------------------------------------------------------------

    def step(self, hold: Collection[str] = ()) -> RoundResult:
        """One round of everything in flight; requests named in ``hold`` wait, their state untouched."""
        start = time.perf_counter()
        self._round = _Round()
        self._drop_cancelled()
        self._admit()
        decoding = [slot for slot in self._slots if slot.phase is Phase.DECODE]
        rows = self._decode_round(decoding, hold)
        budget = max(self._bundle.build.max_num_tokens, self._min_rows) - rows
        self._prefill(range(len(decoding), len(self._slots)), budget, hold)
        self._table.retire()
        spent = self._round.milliseconds
        spent["host"] = (time.perf_counter() - start) * 1e3 - sum(spent.values())
        return RoundResult(tuple(self._round.emissions), spent)

    def _drop_cancelled(self) -> None:
        cancelled = {self._cancels.popleft() for _ in range(len(self._cancels))}
        if not cancelled:
            return
        for slot in [slot for slot in (*self._queue, *self._slots) if slot.request.id in cancelled]:
            self._emit(slot, Accepted((), 0, "cancelled"), (), 0)
        self._queue = deque(slot for slot in self._queue if slot.request.id not in cancelled)
        self._table.retire()

    def _admit(self) -> None:
        while self._queue and not self._table.full:
            self._table.admit(self._queue.popleft())

    def _decode_round(self, decoding: Sequence[Slot], hold: Collection[str]) -> int:
        """Draft, verify and accept for every decoding request; gives the token rows of the target pass."""
        live = [slot.request.id not in hold for slot in decoding]
        if not any(live):
            return 0
        start = time.perf_counter()
        asked = [self._candidate(slot) if alive else None for slot, alive in zip(decoding, live, strict=True)]
        drafts = self._draft(decoding, self._policy.lengths(asked))
        blocks = [[slot.tokens[-1], *drafts[i]] if live[i] else [] for i, slot in enumerate(decoding)]
        passed = self._target(range(len(decoding)), blocks, [list(range(len(block))) for block in blocks], "verify")
        accepted = [
            self._accept(slot, i, drafts[i], passed, asked[i]) if live[i] else None for i, slot in enumerate(decoding)
        ]
        self._observe(passed, decoding, [len(each.tokens) if each else 0 for each in accepted], drafts, accepted)
        rows, spent = passed.feeds[c.INPUT_IDS.name].size, self._round.milliseconds
        drafting = spent.get(c.RELAY, 0.0) + spent.get(c.DRAFTER, 0.0)
        verifying = (time.perf_counter() - start) * 1e3 - drafting
        self._policy.timed(rows, verifying, draft_load(asked, [len(each) for each in drafts]), drafting)
        return rows

    def _candidate(self, slot: Slot) -> Candidate | None:
        """A request that drafts could be verified for in this round."""
        drafter = slot.request.strategy.drafter
        if drafter is None:
            return None
        spec = self._bundle.drafters[drafter].spec
        limit = draft_length(spec.num_drafts, slot.remaining, slot.request.draft_tokens)
        return Candidate(drafter, limit, slot.acceptance, spec.serial, spec.decoder is None) if limit else None

    # -- draft -------------------------------------------------------------------------------------------------------

    def _draft(self, decoding: Sequence[Slot], wanted: Sequence[int]) -> list[tuple[int, ...]]:
        """At most wanted[i] drafts of each request, from its own drafter: all of a drafter's requests together."""
        drafts: list[tuple[int, ...]] = [()] * len(decoding)
        for name, drafting in self._draftings.items():
            users = [i for i, k in enumerate(wanted) if k and decoding[i].request.strategy.drafter == name]
            if not users:
                continue
            slots = range(users[0], users[-1] + 1)
            asked = [wanted[i] if i in users else 0 for i in slots]
            made = drafting.propose(slots, decoding[slots.start : slots.stop], asked)
            for i in users:
                drafts[i] = tuple(made[i - slots.start])
        return drafts

    # -- target --------------------------------------------------------------------------------------------------------

    def _target(
        self,
        slots: range,
        tokens: Sequence[Sequence[int]],
        logit_rows: Sequence[Sequence[int]],
        stage: str,
        pad: int = 1,
    ) -> _Pass:
        """One target pass: tokens[i] at the end of slot i's cache, logits at logit_rows[i]."""
        rows = [self._slots[i] for i in slots]
        width = max(self._min_rows, -(-max(map(len, tokens)) // pad) * pad)
        start_B = np.array([slot.kv_len for slot in rows], np.int64)
        feeds = {
            c.INPUT_IDS.name: padded(tokens, width),
            c.POSITION_IDS.name: positions(start_B, width),
            c.ROW_COUNT.name: np.array([len(row) for row in tokens], np.int64),
            c.LOGIT_ROWS.name: padded(logit_rows, max(map(len, logit_rows))),
            c.WRITE_INDEX.name: start_B,
            c.KV_INDEX.name: kv_index(int(start_B.max()) + width),
        }
        fetch = [c.NEXT_IDS.name]
        if any(slot.fetches_logits for slot, row in zip(rows, logit_rows, strict=True) if row):
            fetch.append(c.LOGITS.name)
        outputs = self._run(c.TARGET, None, slots, feeds, fetch, stage)
        tokens_BR = self._drawn(slots, logit_rows, outputs[0])
        return _Pass(slots, feeds, tokens_BR, outputs[1] if len(outputs) > 1 else None)

    def _drawn(self, slots: range, logit_rows: Sequence[Sequence[int]], next_ids_BR: Array) -> Array:
        """The argmax of every row, and what was drawn instead for requests that the runtime draws for."""
        draws, places = [], []
        for b, (slot, rows) in enumerate(zip(self._slots[slots.start : slots.stop], logit_rows, strict=True)):
            if slot.draws:
                request = slot.request
                key = request.params, request.seed, request.sample_index
                draws += [Draw(slots[b], r, *key, slot.kv_len + row + 1) for r, row in enumerate(rows)]
                places += [(b, r) for r in range(len(rows))]
        if not draws:
            return next_ids_BR
        assert self._runtime.drawer is not None
        tokens_BR = next_ids_BR.copy()
        tokens_BR[tuple(np.transpose(places))] = self._runtime.drawer(draws)
        return tokens_BR

    def _observe(
        self,
        passed: _Pass,
        rows: Sequence[Slot],
        kept: Sequence[int],
        drafts: Sequence[tuple[int, ...]] = (),
        accepted: Sequence[Accepted | None] = (),
    ) -> None:
        """Right after every target pass: each drafter in use takes from it what it needs."""
        used = {slot.request.strategy.drafter for slot, count in zip(rows, kept, strict=True) if count}
        nothing: list[None] = [None] * len(rows)
        positions_BS, start_B = passed.feeds[c.POSITION_IDS.name], passed.feeds[c.WRITE_INDEX.name]
        whole = Passed(passed.slots, rows, positions_BS, start_B, kept, drafts or [()] * len(rows), accepted or nothing)
        for name, drafting in self._draftings.items():
            if name in used:
                drafting.observe(whole)

    # -- accept ------------------------------------------------------------------------------------------------------

    def _accept(
        self, slot: Slot, row: int, drafts: tuple[int, ...], passed: _Pass, candidate: Candidate | None
    ) -> Accepted:
        picks: list[Pick] = []
        error = None
        try:
            accepted = accept(drafts, lambda i: self._choose(slot, passed, row, i, picks), lambda t: self._finish(slot))
        except UserError as failure:  # of this request alone; what came before it were accepted drafts
            accepted = Accepted(tuple(pick.token for pick in picks), len(picks), "error")
            error = str(failure)
        slot.kv_len += len(accepted.tokens)
        if candidate is not None:
            self._policy.accepted(candidate, len(drafts), accepted.num_accepted)
        stats = slot.stats
        stats.rounds += 1
        stats.drafted += len(drafts)
        stats.accepted += accepted.num_accepted
        stats.emitted += len(accepted.tokens)
        self._emit(slot, accepted, picks, len(drafts), error)
        return accepted

    def _choose(self, slot: Slot, passed: _Pass, row: int, i: int, picks: list[Pick]) -> int:
        """The target's own token at row i, committed."""
        if slot.fetches_logits:
            assert passed.logits_BRV is not None
            pick = slot.sampler.pick(passed.logits_BRV[row, i], len(slot.tokens))
        else:
            pick = drawn_pick(int(passed.tokens_BR[row, i]), len(slot.tokens))
        slot.sampler.commit(pick.token)
        slot.tokens.append(pick.token)
        picks.append(pick)
        return pick.token

    def _finish(self, slot: Slot) -> str | None:
        """Why the request ends with its newest token, or None."""
        request, params = slot.request, slot.request.params
        token = slot.tokens[-1]
        text_stop = request.text_stop is not None and request.text_stop(token)
        eos = token in self._bundle.target.eos_ids and not params.ignore_eos
        if slot.num_output >= params.min_tokens and (eos or token in params.stop_token_ids or text_stop):
            return "stop"
        return "length" if slot.remaining <= 0 else None

    def _emit(
        self, slot: Slot, accepted: Accepted, picks: Sequence[Pick], drafted: int, error: str | None = None
    ) -> None:
        slot.stats.output_tokens = slot.num_output
        slot.finish_reason = accepted.finish_reason
        emission = Emission(
            slot.request.id, tuple(picks), accepted.num_accepted, drafted, accepted.finish_reason, slot.stats, error
        )
        self._round.emissions.append(emission)

    # -- prefill -----------------------------------------------------------------------------------------------------

    def _prefill(self, slots: range, budget: int, hold: Collection[str]) -> None:
        """A chunk of every waiting prompt within ``budget`` token rows; the last chunk yields the first token."""
        slots = slots[: max(0, budget) // self._min_rows]
        rows = [self._slots[i] for i in slots]
        if not rows or all(slot.request.id in hold for slot in rows):
            return
        width = self._chunk_width(rows, budget)
        counts = [0 if slot.request.id in hold else min(width, slot.unread) for slot in rows]
        tokens = [slot.tokens[slot.kv_len : slot.kv_len + count] for slot, count in zip(rows, counts, strict=True)]
        last = [[count - 1] if count == slot.unread else [] for slot, count in zip(rows, counts, strict=True)]
        passed = self._target(slots, tokens, last, "prefill", min(width, CHUNK_STEP))
        for i, (slot, count) in enumerate(zip(rows, counts, strict=True)):
            slot.kv_len += count
            slot.stats.prefill_passes += count > 0
            if last[i]:
                self._first_token(slot, i, passed)
        self._observe(passed, rows, counts)
        self._table.promote(slots.start)

    def _chunk_width(self, rows: Sequence[Slot], budget: int) -> int:
        """Rows a request: no wider than the shortest waiting prompt, so that nothing long pads it; in whole steps."""
        room = min(budget // len(rows), self._bundle.build.prefill_chunk)
        shortest = min(slot.unread for slot in rows)
        wanted = min(room, -(-shortest // CHUNK_STEP) * CHUNK_STEP)
        return wanted if wanted < CHUNK_STEP else wanted // CHUNK_STEP * CHUNK_STEP

    def _first_token(self, slot: Slot, row: int, passed: _Pass) -> None:
        """The prefill's own token: emitted, counted in no round, the first anchor."""
        picks: list[Pick] = []
        slot.phase = Phase.DECODE
        try:
            self._choose(slot, passed, row, 0, picks)
        except UserError as error:
            self._emit(slot, Accepted((), 0, "error"), (), 0, str(error))
            return
        self._emit(slot, Accepted((slot.tokens[-1],), 0, self._finish(slot)), picks, 0)

    # -- engines ------------------------------------------------------------------------------------------------------

    def _run(
        self,
        engine: str,
        drafter: str | None,
        slots: range,
        feeds: dict[str, Array],
        fetch: Sequence[str] = (),
        stage: str | None = None,
    ) -> list[Array]:
        with self._timed(stage or engine):
            return self._runtime.run(engine, drafter, slots, feeds, fetch)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        """What is done inside belongs to this stage of the round."""
        start = time.perf_counter()
        yield
        spent = self._round.milliseconds
        spent[stage] = spent.get(stage, 0.0) + (time.perf_counter() - start) * 1e3
