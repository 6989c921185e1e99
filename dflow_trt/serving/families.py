"""The table of metric families: what the server publishes, as data.

Prometheus' conventions: a unit at the end of a name, ``_total`` on counters. ``docs/monitoring.md`` shows it.
"""

from __future__ import annotations

from dflow_trt.serving.series import Family

MAX_TASKS = 64  # distinct task labels; every one is a set of series in Prometheus
MAX_TASK_LENGTH = 64
NONE, OTHER = "none", "other"

# How a sequence ends: as the decoder says, or "timeout" and "unavailable" (the server is stopping), which the server
# decides. "invalid" and "queue_full" are of requests that were never queued; "unavailable" may be either.
OUTCOMES = ("stop", "length", "cancelled", "timeout", "error", "unavailable", "invalid", "queue_full")

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0)
GROUP = ("strategy", "task")


def _counter(name: str, help: str, labels: tuple[str, ...] = GROUP) -> Family:
    return Family(name, "counter", help, labels)


def _gauge(name: str, help: str, labels: tuple[str, ...] = ()) -> Family:
    return Family(name, "gauge", help, labels)


def _seconds(name: str, help: str, buckets: tuple[float, ...] = SECONDS) -> Family:
    return Family(name, "histogram", help, GROUP, buckets)


def _lengths(name: str, help: str, reached: Family) -> Family:
    """The buckets depend on the bundle."""
    return Family(name, "histogram", help, GROUP, (), reached)


REQUESTS = _counter(
    "dflow_requests_total",
    "Sequences that ended, by outcome; a request for n samples is n of them. A request that was refused before it was "
    "queued (invalid, queue_full, or unavailable while the server stops) counts once.",
    (*GROUP, "outcome"),
)
PROMPT_TOKENS = _counter("dflow_prompt_tokens_total", "Prompt tokens of sequences whose first token came.")
REUSED_TOKENS = _counter(
    "dflow_prefix_reused_tokens_total", "Of the prompt tokens, those whose cache rows an earlier sequence had left."
)
OUTPUT_TOKENS = _counter("dflow_output_tokens_total", "Tokens generated, the first of each sequence included.")
ROUNDS = _counter("dflow_rounds_total", "Verify rounds, counted a sequence: the denominator of tau.")
DRAFTED = _counter("dflow_drafted_tokens_total", "Drafts that the target verified.")
ACCEPTED = _counter("dflow_accepted_tokens_total", "Drafts that were accepted; over rounds, tau_accepted.")
EMITTED = _counter(
    "dflow_emitted_tokens_total",
    "Tokens of verify rounds, bonus tokens included; over rounds, tau_emitted. The first token of a sequence comes "
    "from its prefill and is not among them.",
)
RELAYED = _counter("dflow_relayed_slots_total", "Block slots that were drafted with a verifier state relayed to them.")
DRAFTED_AT = _counter(
    "dflow_drafted_at_position_total",
    "Rounds that verified a draft at this position; 1 is next to the anchor.",
    (*GROUP, "position"),
)
ACCEPTED_AT = _counter(
    "dflow_accepted_at_position_total", "Rounds that accepted the draft at this position.", (*GROUP, "position")
)
STEPS = _counter(
    "dflow_steps_total", "Steps of the loop: one round of everything in flight, or a chunk of prefill.", ()
)
SLOT_STEPS = _counter("dflow_slot_steps_total", "Slots in use after each step; over steps, the mean batch.", ())
STAGE_SECONDS = _counter(
    "dflow_stage_seconds_total",
    "Time of the loop by stage: relay, draft, verify, prefill, context, and host for all that is no engine.",
    ("stage",),
)

DRAFT_LENGTH = _lengths("dflow_draft_length_tokens", "Drafts verified in a round of a sequence.", DRAFTED_AT)
ACCEPTED_LENGTH = _lengths("dflow_accepted_length_tokens", "Drafts accepted in a round of a sequence.", ACCEPTED_AT)
QUEUE_TIME = _seconds("dflow_queue_time_seconds", "From arrival to a slot.")
FIRST_TOKEN = _seconds("dflow_time_to_first_token_seconds", "From arrival to the first token.")
TOKEN_LATENCY = _seconds(
    "dflow_inter_token_latency_seconds",
    "Time a token after the first: the gap between two rounds over the tokens of the later one, counted once a token.",
    TOKEN_SECONDS,
)
REQUEST_TIME = _seconds("dflow_request_time_seconds", "From arrival to the end of a sequence.")

SLOTS_IN_USE = _gauge("dflow_slots_in_use", "Sequences in flight.")
SLOTS = _gauge("dflow_slots", "Sequences that can be in flight.")
QUEUE_LENGTH = _gauge("dflow_queue_length", "Sequences that wait for a slot.")
QUEUE_LIMIT = _gauge("dflow_queue_limit", "Sequences that may wait; more are refused.")
CACHE_BYTES = _gauge("dflow_cache_bytes", "Size of the KV caches, of the target or of all drafters.", ("cache",))
CACHE_USED = _gauge("dflow_cache_used_bytes", "Of the KV caches, what sequences in flight have committed.", ("cache",))
RELAY_BYTES = _gauge("dflow_relay_state_bytes", "Size of the verifier states that are kept for relays.")
HEARTBEAT = _gauge(
    "dflow_heartbeat_timestamp_seconds", "When the loop last showed that it is alive, in Unix time; it does when idle."
)

FAMILIES: tuple[Family, ...] = tuple(family for family in list(globals().values()) if isinstance(family, Family))
