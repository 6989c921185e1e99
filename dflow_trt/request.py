"""What the decoder keeps of a request: what was asked, where it stands, what it cost."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflow_trt.bundle import Strategy
from dflow_trt.method.policy import Acceptance
from dflow_trt.method.relay import RelayState
from dflow_trt.method.sampling import Pick, Sampler, SamplingParams


class Phase(enum.Enum):
    """Where a request is: prompt rows still to run, or decoding."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass
class Request:
    """One sequence to generate.

    sample_index tells the n samples of one prompt apart. draft_tokens caps the drafts verified a round (0 is plain
    decoding). text_stop is called with every emitted token id and says whether a stop string is now complete.
    """

    id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    strategy: Strategy
    seed: int
    sample_index: int = 0
    draft_tokens: int | None = None
    text_stop: Callable[[int], bool] | None = None
    arrival: float = field(default_factory=time.monotonic)


@dataclass
class RequestStats:
    """Counts of one request. The prefill token belongs to no round.

    reused_tokens: of the prompt, those whose cache rows an earlier request left.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    relayed_slots: int = 0
    prefill_passes: int = 0
    reused_tokens: int = 0

    @property
    def target_passes(self) -> int:
        return self.prefill_passes + self.rounds

    @property
    def tau_accepted(self) -> float:
        """Mean accepted drafts a round."""
        return self.accepted / self.rounds if self.rounds else 0.0

    @property
    def tau_emitted(self) -> float:
        """Mean emitted tokens a round, bonus token included."""
        return self.emitted / self.rounds if self.rounds else 0.0


@dataclass
class Slot:
    """A request in flight. Its index in the decoder's list is its row in every cache.

    tokens: prompt and output; the last one is the anchor once decoding. kv_len: rows of the target's cache that are
    committed; while decoding it is the anchor's position. context_len: those of its drafter's caches. lookahead: how
    many tokens behind a row the drafter's cache of that row depends on; None where the drafter has no caches. draws:
    the runtime draws its tokens where the logits are. relay: what the last pass left to the next draft of a DFlow
    drafter; memory: what drafters of other kinds keep of the request. finish_reason: None while it goes on.
    """

    request: Request
    sampler: Sampler
    tokens: list[int]
    limit: int
    draws: bool = False
    lookahead: int | None = None
    kv_len: int = 0
    context_len: int = 0
    phase: Phase = Phase.PREFILL
    relay: RelayState | None = None
    memory: Any = None
    finish_reason: str | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
    stats: RequestStats = field(default_factory=RequestStats)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def sound(self) -> bool:
        """Whether its cache rows may serve another request."""
        return self.finish_reason != "error"

    @property
    def fetches_logits(self) -> bool:
        """Whether its next token is chosen on the host, from logits."""
        return self.sampler.needs_logits and not self.draws

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.limit - self.num_output

    @property
    def unread(self) -> int:
        """Prompt rows that the target has not run yet."""
        return self.prompt_len - self.kv_len


@dataclass(frozen=True)
class Emission:
    """What one round gave one request; finish_reason is None while it goes on."""

    request_id: str
    picks: tuple[Pick, ...]
    num_accepted: int
    num_drafted: int
    finish_reason: str | None
    stats: RequestStats
    error: str | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(pick.token for pick in self.picks)


@dataclass(frozen=True)
class RoundResult:
    """One step of the decoder: what it emitted, and milliseconds by stage (host: all that is no engine call)."""

    emissions: tuple[Emission, ...]
    milliseconds: dict[str, float]
