"""The example pair, end to end: our strategies against transformers' generate, the ``dflash`` package and llama.cpp.

A profile (:mod:`dflow_trt.profiling`) in which the peers take turns with our strategies: greedy, the same prompts and
max_tokens, whole generations from token ids to token ids.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_common import (
    Contenders,
    Goal,
    check_equal,
    check_near_ties,
    float_model,
    print_table,
)
from bench_peers import LLAMA, LOOKUP, Peer, open_llama, open_worker

from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.bundle import Bundle
from dflow_trt.method.sampling import SamplingParams
from dflow_trt.profiling import metrics
from dflow_trt.profiling.measure import Asked, LocalDriver, Run, Tick, Trace
from dflow_trt.profiling.points import Family, Options
from dflow_trt.profiling.record import Interval, Point, PointResult
from dflow_trt.profiling.run import encode, tokenizer_of, vocabulary_of
from dflow_trt.profiling.session import Driver, Session, Silent
from dflow_trt.profiling.workload import Workload, random_workload, read_workload, takes_chats
from dflow_trt.runtime.ort import OrtRuntime
from dflow_trt.spec import AUTOREGRESSIVE

BATCHES = (1, 8)
TRANSFORMERS, PACKAGE, LLAMA_PLAIN, LLAMA_LOOKUP = "transformers", "dflash package", "llama.cpp", "llama.cpp lookup"
PEERS = (TRANSFORMERS, PACKAGE, LLAMA_PLAIN, LLAMA_LOOKUP)
RANDOM_LENGTHS = (16, 48)  # of prompts, for a pair without any
Answers = list[tuple[list[int], list[int]]]
"""Token ids of each prompt, and the tokens of each of its rounds where there are rounds."""


@dataclass(frozen=True)
class ExampleOptions:
    """How much to run."""

    pair: Path
    work: Path
    num_prompts: int
    max_tokens: int
    repetitions: int
    threads: int
    peers: Path | None


def run_example(options: ExampleOptions) -> tuple[dict[str, Any], list[Goal]]:
    """Measure and print; figures and goals come back. Raises Disagreement, or PeerError when a peer fails."""
    bundle, model = _build(options), float_model(options.pair / "target")
    with ExitStack() as owned:
        runtime = OrtRuntime(bundle, options.threads, max(BATCHES))
        owned.callback(runtime.close)
        ours: dict[str, Driver] = dict.fromkeys(bundle.strategies, LocalDriver(bundle, runtime, max(BATCHES)))
        peers = {**_Here(options, bundle, model).contenders(), **_llama(options, bundle, owned)}
        families = [_family([*ours, *peers], batch, _asked(options, bundle)) for batch in BATCHES]
        profiled = Options(max_tokens=options.max_tokens, repetitions=options.repetitions)
        session = Session(Contenders({**ours, **peers}), families, profiled, Silent())
        session.measure()
    agreement = {_label(each.point): _agreement(session, each, model) for each in session.results()}
    figures = _figures(session, options, agreement)
    _print(figures)
    return figures, _goals(session, options)


def _build(options: ExampleOptions) -> Bundle:
    drafters = [DrafterSource(options.pair / name) for name in ("dflash", "dflow") if (options.pair / name).is_dir()]
    return build_bundle(
        options.pair / "target",
        [*drafters, DrafterSource(Path("ngram"), None, LOOKUP)],
        options.work / "example-bundle",
        BuildOptions(max_batch_size=max(BATCHES)),
        force=True,
    )


def _workload(options: ExampleOptions, bundle: Bundle) -> Workload:
    """The first prompts of prompts.jsonl, as chats; random ids where the pair has none."""
    file = options.pair / "prompts.jsonl"
    if file.is_file() and bundle.tokenizer_path is not None:
        found = read_workload(file)
        return found.as_chats() if takes_chats(tokenizer_of(bundle)) else found
    lengths = random.Random(0).choices(range(*RANDOM_LENGTHS), k=options.num_prompts)
    items = [random_workload(length, 1, vocabulary_of(bundle), i).items[0] for i, length in enumerate(lengths)]
    return Workload("random", "random tokens", tuple(items))


def _asked(options: ExampleOptions, bundle: Bundle) -> tuple[Asked, ...]:
    prompts = encode(_workload(options, bundle), tokenizer_of(bundle))[: options.num_prompts]
    params = SamplingParams(max_tokens=options.max_tokens, seed=0)
    return tuple(Asked(i, item, ids, params) for i, (item, ids) in enumerate(prompts))


def _family(names: Sequence[str], batch: int, asked: tuple[Asked, ...]) -> Family:
    """One turn a repetition: all prompts. Peers but transformers take one at a time."""
    alone = () if batch == 1 else PEERS[1:]
    return Family(tuple(Point(strategy=name, concurrency=batch) for name in names if name not in alone), (asked,))


# -- peers -------------------------------------------------------------------------------------------------------------


def _llama(options: ExampleOptions, bundle: Bundle, owned: ExitStack) -> dict[str, Driver]:
    """Plain, and with its prompt lookup; nothing where it is not installed."""
    worker = open_worker(LLAMA, options.peers, options.threads, options.work, owned)
    if worker is None:
        return {}
    models = open_llama(worker, options.pair / "target", options.work / "example.gguf", bundle.target.eos_ids)
    return {label: Peer(worker, name) for label, name in zip((LLAMA_PLAIN, LLAMA_LOOKUP), models, strict=True)}


@dataclass(frozen=True)
class _Whole:
    """A peer in this process. Its answers come whole, so that only their end has a time."""

    generate: Callable[[list[list[int]], int], Answers]

    def run(self, point: Point, asked: Sequence[Asked], offsets: Sequence[float] | None = None) -> Run:
        """See :class:`dflow_trt.profiling.session.Driver`."""
        assert point.concurrency is not None
        start, cpu = time.perf_counter(), time.process_time()
        answers = self.generate([list(each.prompt_ids or ()) for each in asked], point.concurrency)
        end, spent = time.perf_counter(), time.process_time() - cpu
        traces = (_trace(each, start, end, *answer) for each, answer in zip(asked, answers, strict=True))
        return Run(point, start, end, spent, tuple(traces))


def _trace(asked: Asked, start: float, end: float, ids: list[int], rounds: list[int]) -> Trace:
    """rounds: tokens of each, the bonus token among them; what is beyond the answer's end was not emitted."""
    trace = Trace(asked, start, [], ids, "length")
    left = len(ids) - 1 if rounds else 0
    trace.ticks.append(Tick(end, len(ids) - left, is_round=False))
    for count in rounds:
        emitted = min(count, left)
        trace.ticks += [Tick(end, emitted, None, min(count - 1, emitted))] if emitted else []
        left -= emitted
    return trace


class _Here:
    """transformers and the dflash package on the same folders, float32."""

    def __init__(self, options: ExampleOptions, bundle: Bundle, model: Any) -> None:
        import torch

        torch.set_num_threads(options.threads)
        self._max_tokens, self._model, self._folder = options.max_tokens, model, options.pair / "dflash"
        self._eos = list(bundle.target.eos_ids)
        self._pad = bundle.target.pad_id if bundle.target.pad_id is not None else 0

    def contenders(self) -> dict[str, Driver]:
        """The package only with a drafter for it."""
        found: dict[str, Driver] = {TRANSFORMERS: _Whole(self._transformers)}
        if self._folder.is_dir():
            self._drafter = self._load_drafter(self._folder)
            found[PACKAGE] = _Whole(self._package)
        return found

    @staticmethod
    def _load_drafter(folder: Path) -> Any:
        import dflash.model as package
        import torch

        package._cuda_time = time.perf_counter  # its clock waits for a GPU
        return package.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()

    def _transformers(self, prompts: list[list[int]], batch: int) -> Answers:
        import torch
        from transformers import GenerationConfig

        config = GenerationConfig(
            max_new_tokens=self._max_tokens, do_sample=False, eos_token_id=self._eos or None, pad_token_id=self._pad
        )
        found: Answers = []
        for start in range(0, len(prompts), batch):
            ids_BS, mask_BS = self._left_padded(prompts[start : start + batch])
            with torch.inference_mode():
                out = self._model.generate(ids_BS, attention_mask=mask_BS, generation_config=config)
            found += [(self._until_eos(row), []) for row in out[:, ids_BS.shape[1] :].tolist()]
        return found

    def _left_padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Any, Any]:
        import torch

        width = max(map(len, prompts))
        ids = [[self._pad] * (width - len(row)) + list(row) for row in prompts]
        mask = [[0] * (width - len(row)) + [1] * len(row) for row in prompts]
        return torch.tensor(ids), torch.tensor(mask)

    def _until_eos(self, row: Sequence[int]) -> list[int]:
        end = next((i + 1 for i, token in enumerate(row) if token in self._eos), len(row))
        return list(row[:end])

    def _package(self, prompts: list[list[int]], batch: int) -> Answers:
        import dflash.model as package
        import torch

        found: Answers = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            stops = self._eos or None
            out = package.dflash_generate(self._drafter, self._model, ids, self._max_tokens, stops, return_stats=True)
            found.append((self._until_eos(out.output_ids[0, len(prompt) :].tolist()), list(out.acceptance_lengths)))
        return found


# -- what came of it ---------------------------------------------------------------------------------------------------


def _label(point: Point) -> str:
    return f"{point.strategy} at batch {point.concurrency}"


def _agreement(session: Session, result: PointResult, model: Any) -> dict[str, Any]:
    """Ours equal our ar at batch 1, every time and token by token; the float peers equal it up to near ties. Raises
    Disagreement."""
    point, label = result.point, _label(result.point)
    baseline = session.runs[Point(strategy=AUTOREGRESSIVE, concurrency=1)][0]
    expected = [trace.token_ids for trace in baseline.traces]
    answers = [[trace.token_ids for trace in run.traces] for run in session.runs[point]]
    if point.strategy not in PEERS:
        checks = [check_equal(label, expected, got) for got in answers]
        return checks[0]
    prompts = [list(trace.asked.prompt_ids or ()) for trace in baseline.traces]
    return check_near_ties(label, model, prompts, expected, answers[0])


def _clock(options: ExampleOptions) -> str:
    """One thread: processor time, which other programs disturb less. More threads: the clock on the wall."""
    return "cpu" if options.threads == 1 else "wall"


def _speedup(session: Session, name: str, other: str, batch: int, clock: str) -> Interval | None:
    """Of one over the other at a batch size, turn by turn."""
    theirs, ours = (metrics.turns(session.runs[Point(strategy=each, concurrency=batch)]) for each in (other, name))
    found = metrics.speedup(theirs, ours)
    return found and found[clock == "cpu"]


def _figures(session: Session, options: ExampleOptions, agreement: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompts": session.families[0].requests,
        "max_tokens": options.max_tokens,
        "repetitions": options.repetitions,
        "ratios_by": _clock(options),
        "rows": [_row(session, result, _clock(options)) for result in session.results()],
        "agreement": agreement,
    }


def _row(session: Session, result: PointResult, clock: str) -> dict[str, Any]:
    name, batch, total, speed = result.point.strategy, result.point.concurrency or 1, result.total, result.throughput
    drafts = name != AUTOREGRESSIVE and total.rounds
    row: dict[str, Any] = {"name": name, "batch": batch, "tokens": speed.output_tokens // len(result.turns)}
    row |= {"tokens_per_s": speed.tokens_per_second, "tokens_per_cpu_s": speed.tokens_per_cpu_second}
    row |= {
        "tau_emitted": total.tau_emitted if drafts else None,
        "tau_accepted": total.tau_accepted if drafts else None,
    }
    for other in (AUTOREGRESSIVE, *PEERS):
        found = _speedup(session, name, other, batch, clock)
        row |= {f"x_{other.replace(' ', '_')}": found.value if found else None}
    return row


def _print(figures: dict[str, Any]) -> None:
    rows = figures["rows"]
    columns = [name for name in rows[0] if name != "tokens" and any(row[name] is not None for row in rows)]
    title = f"Example pair: {figures['prompts']} prompts, max_tokens {figures['max_tokens']}, greedy, "
    title += f"{figures['repetitions']} repetitions in turn; ratios of {figures['ratios_by']} time a token, paired"
    print_table(title, columns, [[row[name] for name in columns] for row in rows])
    same = [f"{name} {counts['same']}/{counts['sequences']}" for name, counts in figures["agreement"].items()]
    print("same output as ar (differences of the float peers are near ties): " + ", ".join(same))


def _goals(session: Session, options: ExampleOptions) -> list[Goal]:
    wanted = [("ar", TRANSFORMERS, 1, 2.0), ("ar", TRANSFORMERS, 8, 2.0), ("dflow", PACKAGE, 1, 2.0)]
    wanted.append(("dflow", AUTOREGRESSIVE, 1, 1.5))
    goals = []
    for name, other, batch, bound in wanted:
        found = _speedup(session, name, other, batch, _clock(options))
        if found is not None:
            goals.append(Goal(f"example: {name} / {other}, batch {batch}", found.value, bound, True))
    return goals
