"""The record of a profile: one JSON schema, versioned. Tables, CSV files and the HTML report all come from it.

Times are milliseconds where a name or docstring does not say seconds; sizes are bytes. None means "not measured", or,
for a percentile or an interval, "too few samples": never a guess.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from dflow_trt.errors import UserError
from dflow_trt.files import staged_file

SCHEMA_VERSION: Literal[1] = 1
RECORD_FILE = "profile.json"
ALL_TASKS = "all"
PERCENTILES = (50, 90, 95, 99)
PAPER_RELAY_SHARE = 0.012  # arXiv 2609.06498: 0.51 ms a round


class Part(BaseModel):
    """A piece of the record: read strictly, never changed."""

    model_config = ConfigDict(frozen=True, extra="forbid")


# -- what was asked ----------------------------------------------------------------------------------------------------


class Point(Part):
    """One setting that is measured. Either ``concurrency`` requests are always in flight (closed loop), or they arrive
    at random, ``rate`` a second (open loop). draft_tokens: most drafts verified in a round, None is all. input_len: of
    random prompts; None where prompts are texts."""

    strategy: str
    concurrency: int | None = None
    rate: float | None = None
    draft_tokens: int | None = None
    draft_policy: str = "fixed"
    temperature: float = 0.0
    input_len: int | None = None

    @property
    def load(self) -> str:
        """For people."""
        return f"{self.rate:g}/s" if self.rate is not None else f"{self.concurrency} at once"

    @property
    def label(self) -> str:
        """The strategy, and what else tells it from others of the same load."""
        return " ".join([self.strategy, *self.variant])

    @property
    def variant(self) -> list[str]:
        """What differs from the plain setting of a strategy."""
        parts = [f"k={self.draft_tokens}"] if self.draft_tokens is not None else []
        parts += [self.draft_policy] if self.draft_policy != "fixed" else []
        parts += [f"T={self.temperature:g}"] if self.temperature else []
        return parts + ([f"ctx {self.input_len}"] if self.input_len is not None else [])


class WorkloadInfo(Part):
    """kind: of prompts, "file", "example" or "random". source: the file's name. digest: of tasks, prompts and lengths.

    prompts, tasks: how many there are, in all and by task.
    """

    kind: Literal["file", "example", "random"]
    source: str
    digest: str
    prompts: int
    tasks: dict[str, int]


class Settings(Part):
    """Everything that two profiles must have in common to be comparable. requests: a point's, in one repetition, by its
    load. warmup: turns before the measured ones. threads: of the CPU runtime, None of a server's."""

    workload: list[WorkloadInfo]
    points: list[Point]
    requests: dict[str, int]
    repetitions: int
    warmup: int
    max_tokens: int
    ignore_eos: bool
    seed: int
    threads: int | None
    ttft_bound: float | None
    tpot_bound: float | None


class DrafterInfo(Part):
    """A drafter. kind: see :mod:`dflow_trt.kinds`, None where a server does not say. drafts: the most of a round."""

    kind: str | None
    drafts: int

    def __str__(self) -> str:
        drafts = f"{self.drafts} draft{'s' if self.drafts > 1 else ''}"
        return drafts if self.kind is None else f"{drafts} ({self.kind})"


class Subject(Part):
    """What was profiled: a bundle here, or a server."""

    kind: Literal["bundle", "server"]
    name: str
    backend: str
    dtype: str
    target: str
    target_weights: str
    draft_weights: str
    max_batch_size: int | None
    max_seq_len: int | None
    drafters: dict[str, DrafterInfo]


class Machine(Part):
    """Where the profile ran (of a server: its client)."""

    cpu: str
    cpu_features: list[str]
    cores: int
    memory: int | None
    platform: str
    load_average: list[float]
    versions: dict[str, str]


# -- what was measured -------------------------------------------------------------------------------------------------


class Distribution(Part):
    """Samples. A percentile is None where there are too few for it, see :func:`dflow_trt.profiling.metrics.needed`.

    curve: values at evenly spaced shares, from the least to the greatest.
    """

    n: int
    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    curve: list[float]

    def percentile(self, percent: int) -> float | None:
        value: float | None = getattr(self, f"p{percent}")
        return value


class Interval(Part):
    """A figure with its 95 % interval, None where there are too few pairs for one."""

    value: float
    low: float | None
    high: float | None
    pairs: int


class Acceptance(Part):
    """Counts of rounds. drafted_at[i], accepted_at[i]: rounds that verified, and that accepted, draft i + 1;
    reached_at[i]: those that verified it after accepting all before it.

    tau_accepted: accepted drafts a round; tau_emitted: tokens a round, the bonus token included. wasted: the share of
    drafts that were verified and not accepted. The token of the prefill belongs to no round. What a server does not say
    of its drafts is None, and then nothing is known by position.
    """

    task: str
    requests: int
    rounds: int
    drafted: int | None
    accepted: int
    emitted: int
    drafted_at: list[int]
    accepted_at: list[int]
    reached_at: list[int]
    tau_accepted: float | None
    tau_emitted: float | None
    wasted: float | None


class Latency(Part):
    """ttft: arrival to first token. tpot: a request's mean time a token after the first. itl: the same token by token,
    the gap before a round spread over its tokens. round_gap: between two rounds of a request, which is how text stalls.
    request: arrival to end."""

    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    round_gap: Distribution
    request: Distribution


class Throughput(Part):
    """seconds: of the turns, one after another. decode_tokens_per_second: of steps in which every place of a closed
    loop decodes and none prefills. mean_batch: requests with a round in a step, over steps that have any."""

    seconds: float
    cpu_seconds: float | None
    output_tokens: int
    tokens_per_second: float | None
    tokens_per_cpu_second: float | None
    requests_per_second: float | None
    decode_tokens_per_second: float | None
    mean_batch: float | None


class Goodput(Part):
    """Requests whose TTFT and TPOT are both within the bounds."""

    requests: int
    share: float | None
    requests_per_second: float | None
    tokens_per_second: float | None


class Stages(Part):
    """Mean milliseconds a round by stage, over steps that decode and do not prefill."""

    rounds: int
    milliseconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.milliseconds.values())

    @property
    def relay_share(self) -> float | None:
        """Of a strategy that has such a stage."""
        relay = self.milliseconds.get("relay")
        return relay / self.total if relay is not None and self.total else None


class Turn(Part):
    """One slice of the workload, run by one point while the others wait."""

    repetition: int
    number: int
    requests: int
    tokens: int
    seconds: float
    cpu_seconds: float | None


class Speedup(Part):
    """Over ar at the same load, turn by turn: wall clock, and processor time where it is known. decode: the ratio of
    both decode_tokens_per_second."""

    wall: Interval
    cpu: Interval | None
    decode: float | None


class PointResult(Part):
    """One point. compared, same: sequences held against ar's, and those that are equal to it token for token."""

    point: Point
    requests: int
    failed: int
    compared: int
    same: int
    total: Acceptance
    by_task: list[Acceptance]
    latency: Latency
    throughput: Throughput
    goodput: Goodput | None
    stages: Stages | None
    speedup: Speedup | None
    turns: list[Turn]


# -- what follows ------------------------------------------------------------------------------------------------------


class RoundCost(Part):
    """Median milliseconds of a round with ``batch`` requests and ``drafts`` drafts each, by stage, measured apart from
    the workload. kind: of the strategy's drafter. context: the live tokens of a request, on average."""

    strategy: str
    kind: str | None
    batch: int
    temperature: float
    input_len: int | None
    drafts: int
    rounds: int
    context: float
    milliseconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.milliseconds.values())


class Forecast(Part):
    """Verifying at most ``drafts`` drafts. tau_emitted: tokens a round by the measured acceptance; milliseconds: of a
    round, those without drafts among them. predicted: the decode speed-up over ar that follows; measured: that of a
    point with this length, where there is one."""

    drafts: int
    tau_emitted: float
    milliseconds: float
    predicted: float
    measured: float | None


class Advice(Part):
    """Which length to verify at one load. kind, drafts: of the strategy's drafter, and the most that it makes. plain:
    milliseconds of a step of ar. break_even: tokens a round that make a round of all drafts worth its time;
    break_even_rate: the chance of each draft that gives them, None where none does. best_drafts: 0 where plain decoding
    is fastest."""

    strategy: str
    kind: str | None
    drafts: int
    batch: int
    temperature: float
    input_len: int | None
    plain: float
    break_even: float
    break_even_rate: float | None
    best_drafts: int
    forecasts: list[Forecast]


class Roof(Part):
    """What this machine can do, measured: bytes a second from main memory and from a working set of the model's size,
    and operations a second by weight form."""

    memory_bandwidth: float
    working_set: int
    working_set_bandwidth: float
    operations: dict[str, float]
    threads: int


class PassWork(Part):
    """One engine pass held against the roof. roof: the least milliseconds for so many bytes and operations; fraction:
    that over what was measured. bound: which of the two it is."""

    strategy: str
    stage: Literal["verify", "draft"]
    batch: int
    drafts: int
    form: str
    bytes: int
    operations: int
    milliseconds: float
    roof: float
    fraction: float
    bound: Literal["memory", "compute"]


class Roofline(Part):
    roof: Roof
    passes: list[PassWork]


class DrafterSizes(Part):
    """What one drafter has of the plan, see :class:`dflow_trt.memory.DrafterMemory`."""

    weights: int
    cache: int
    relay_state: int


class Memory(Part):
    """Planned (see :class:`dflow_trt.memory.MemoryPlan`) beside used, by this process or on the whole GPU: before the
    engines were loaded, after it, after the runs, and at most. drafters: the plan by drafter. anonymous: of that after
    the runs, what no file backs. batch_limit: requests that the memory of the machine, or of the GPU, would hold."""

    device: Literal["process", "GPU"]
    planned: dict[str, int]
    drafters: dict[str, DrafterSizes]
    before: int | None
    opened: int | None
    after: int | None
    anonymous: int | None
    peak: int | None
    batch_limit: int | None


class CostRow(Part):
    """per_million: price of a million output tokens on a machine that is always busy so. busy_share: of the time it
    must be, to cost no more than the hosted price; above 1 it never does."""

    point: Point
    per_million: float | None
    busy_share: float | None


class Cost(Part):
    """Prices in whatever currency they were given."""

    price_per_hour: float
    hosted_price: float | None
    rows: list[CostRow]


class Lossless(Part):
    """Sequences held against ar's, token for token. first: the first that differs, in words."""

    compared: int
    same: int
    first: str | None


class CounterCheck(Part):
    """A count of the server's own metrics beside what the client saw in the same time."""

    counter: str
    strategy: str
    client: float
    server: float

    @property
    def agree(self) -> bool:
        return self.client == self.server


class ServerCheck(Part):
    """The server's counters against the client's. notes: what could not be compared, and why."""

    metrics_url: str
    counters: list[CounterCheck]
    notes: list[str]


class Profile(Part):
    """The whole. error: why it ended before everything was measured, None where it did not."""

    schema_version: Literal[1] = SCHEMA_VERSION
    created: str
    tool: str
    settings: Settings
    subject: Subject
    machine: Machine
    results: list[PointResult]
    lossless: Lossless
    costs: list[RoundCost]
    advice: list[Advice]
    roofline: Roofline | None
    memory: Memory | None
    cost: Cost | None
    server: ServerCheck | None
    notes: list[str]
    error: str | None = None


def write_record(profile: Profile, path: Path) -> None:
    """The record as JSON; whole or not at all."""
    with staged_file(path) as partial:
        partial.write_text(profile.model_dump_json(indent=1) + "\n", encoding="utf-8")


def read_record(path: Path) -> Profile:
    """A record, given its file or the folder that ``--output`` made. UserError for anything else."""
    file = path / RECORD_FILE if path.is_dir() else path
    try:
        data: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; give the folder of a profile, or its {RECORD_FILE}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{file}: no JSON; give the folder of a profile, or its {RECORD_FILE}") from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise UserError(f"{file}: schema_version is {version!r}; this version reads {SCHEMA_VERSION}, profile again")
    try:
        return Profile.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{file}: {where}: {first['msg']}; it was changed by hand, profile again") from None
