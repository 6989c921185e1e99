"""A random 107M-parameter pair: ours, OpenVINO GenAI's and llama.cpp's rounds, interleaved in one run.

Random weights accept next to no drafts, and what a round costs does not depend on how many it accepts. So a turn is a
prefill and a few rounds, each a full one, 15 drafts drafted and verified; then the requests are left. Prompt lookup
finds something only where a text repeats itself: its turns are whole answers, long enough for the model to do so.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from bench_common import (
    REPO,
    Contenders,
    Disagreement,
    Goal,
    check_near_ties,
    common_prefix,
    float_model,
    print_table,
)
from bench_peers import LLAMA, LOOKUP, OPENVINO, Peer, Worker, open_llama, open_worker

from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.bundle import Bundle
from dflow_trt.method.sampling import SamplingParams
from dflow_trt.profiling import metrics
from dflow_trt.profiling.measure import SAMPLING, Asked, LocalDriver, Run, Trace
from dflow_trt.profiling.points import Family, Options
from dflow_trt.profiling.record import Interval, Point
from dflow_trt.profiling.session import Driver, Session, Silent
from dflow_trt.profiling.workload import Vocabulary, random_workload
from dflow_trt.runtime.ort import OrtRuntime
from dflow_trt.spec import AUTOREGRESSIVE, WeightForm

STACK = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2304,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
TARGET_LAYERS, DRAFT_LAYERS, BLOCK, TAPS = 12, 5, 16, (1, 5, 9)
VOCABULARY = Vocabulary(STACK["vocab_size"], (0, 1))
CONTEXT, LONG_SEQ, SHORT_SEQ, BATCH = 128, 2048, 512, 8
ROUND_TOKENS, TEXT_TOKENS = 256, 96  # of a request: more than the rounds of a turn give; a whole answer
STAGES = ("relay", "draft", "verify", "context", "host")

# Contenders: ours by the weights of target and drafter, theirs by their name.
FLOAT, INT8, SMALL, TEXT = "fp32+int8", "int8+int8", f" max{SHORT_SEQ}", ", text"
FORMS: dict[WeightForm, str] = {"float": FLOAT, "int8": INT8}
PLAIN = f"{FLOAT} {AUTOREGRESSIVE}"
OPENVINO_MODELS = {
    "openvino fp32+fp32 dflash": ("target-fp32", "dflash-fp32"),
    "openvino fp32+int8 dflash": ("target-fp32", "dflash-int8"),
    "openvino int8+int8 dflash": ("target-int8", "dflash-int8"),
    "openvino fp32 ar": ("target-fp32", None),
    "openvino int8 ar": ("target-int8", None),
}
REFERENCES = {name: "openvino int8 ar" for name, (target, _) in OPENVINO_MODELS.items() if target == "target-int8"}
"""Whose tokens a peer's are held against, where that is not our float ar."""
Unit = Literal["rounds", "tokens"]


@dataclass(frozen=True)
class RandomOptions:
    """How much to run. contexts: live lengths beyond CONTEXT that are measured too. rounds: of a turn."""

    work: Path
    contexts: tuple[int, ...]
    cycles: int
    rounds: int
    threads: int
    peers: Path | None


@dataclass(frozen=True)
class Ours:
    """One of our strategies as a contender. reference: the contender whose tokens it must give."""

    driver: LocalDriver
    strategy: str
    reference: str

    def run(self, point: Point, asked: Sequence[Asked], offsets: Sequence[float] | None = None) -> Run:
        """See :class:`dflow_trt.profiling.session.Driver`."""
        found = self.driver.run(point.model_copy(update={"strategy": self.strategy}), asked, offsets)
        return replace(found, point=point)


def run_random(options: RandomOptions) -> tuple[dict[str, Any], list[Goal]]:
    """Measure and print; figures and goals come back. Raises Disagreement, or PeerError when a peer fails."""
    pair = write_pair(options.work)
    with ExitStack() as owned:
        ours, workers = _ours(pair, options, owned), dict[str, Worker]()
        theirs = _peers(pair, options, owned, workers)
        families = _families([*ours, *theirs], options)
        session = Session(Contenders({**ours, **theirs}), families, Options(repetitions=options.cycles), Silent())
        session.measure()
    figures = {
        "pair": {**STACK, "layers": TARGET_LAYERS, "draft_layers": DRAFT_LAYERS, "block": BLOCK, "taps": TAPS},
        "rounds": options.rounds * options.cycles,
        "peer_versions": {name: worker.versions for name, worker in workers.items()},
        "rows": [_row(session, point) for family in families for point in family.points],
        "agreement": _agreement(session, ours, pair),
        "ratios": {name: found.model_dump() for name, found in _ratios(session, options).items()},
    }
    _print(figures)
    return figures, _goals(figures, options)


# -- contenders --------------------------------------------------------------------------------------------------------


def write_pair(work: Path) -> Path:
    """The random target and drafters, kept from run to run."""
    pair = work / f"random-pair-{TARGET_LAYERS}-{DRAFT_LAYERS}-{STACK['hidden_size']}"
    done = pair / "sizes.json"
    if done.is_file():
        return pair
    sys.path.insert(0, str(REPO / "tests"))
    from tiny import make_drafter, make_target

    target: dict[str, Any] = {"num_hidden_layers": TARGET_LAYERS, "max_window_layers": TARGET_LAYERS}
    config = make_target(pair / "target", tied=True, theta=1e6, **STACK, **target)
    drafter: dict[str, Any] = {"num_hidden_layers": DRAFT_LAYERS, "max_window_layers": DRAFT_LAYERS, "theta": 1e6}
    for name, relay in (("dflash", False), ("dflow", True)):
        make_drafter(pair / name, config, relay=relay, taps=TAPS, block_size=BLOCK, **drafter)
    done.write_text(json.dumps(STACK))
    return pair


def _build(pair: Path, work: Path, form: WeightForm, max_seq_len: int) -> Bundle:
    drafters = [DrafterSource(pair / name) for name in ("dflash", "dflow")]
    options = BuildOptions(
        max_batch_size=BATCH,
        max_seq_len=max_seq_len,
        max_input_len=max_seq_len - 64,
        max_num_tokens=2048,
        target_weights=form,
    )
    output = work / f"random-{form}-{max_seq_len}"
    drafters.append(DrafterSource(Path("ngram"), None, LOOKUP))
    return build_bundle(pair / "target", drafters, output, options, force=True, self_check="off")


def _ours(pair: Path, options: RandomOptions, owned: ExitStack) -> dict[str, Ours]:
    """Both weight forms; then a smaller cache, and there whole answers with prompt lookup."""
    found: dict[str, Ours] = {}
    for form, name in FORMS.items():
        driver, _ = _drivers(_build(pair, options.work, form, LONG_SEQ), options, owned)
        plain = f"{name} {AUTOREGRESSIVE}"
        found |= {f"{name} {each}": Ours(driver, each, plain) for each in (AUTOREGRESSIVE, "dflash", "dflow")}
    driver, whole = _drivers(_build(pair, options.work, "float", SHORT_SEQ), options, owned)
    found |= {f"{FLOAT} {each}{SMALL}": Ours(driver, each, PLAIN) for each in (AUTOREGRESSIVE, "dflow")}
    return found | {f"{FLOAT} {each}{TEXT}": Ours(whole, each, PLAIN + TEXT) for each in (AUTOREGRESSIVE, "ngram")}


def _drivers(bundle: Bundle, options: RandomOptions, owned: ExitStack) -> tuple[LocalDriver, LocalDriver]:
    """For some rounds of a request, and for all of it."""
    runtime = OrtRuntime(bundle, options.threads, BATCH)
    owned.callback(runtime.close)
    return LocalDriver(bundle, runtime, BATCH, rounds=options.rounds), LocalDriver(bundle, runtime, BATCH)


def _peers(pair: Path, options: RandomOptions, owned: ExitStack, workers: dict[str, Worker]) -> dict[str, Driver]:
    """OpenVINO GenAI's DFlash and plain decoding, llama.cpp's plain decoding and prompt lookup; what is installed."""
    found: dict[str, Driver] = {}
    for package, models in ((OPENVINO, _openvino), (LLAMA, _llama)):
        worker = open_worker(package, options.peers, options.threads, options.work, owned)
        if worker is not None:
            workers[package.name] = worker
            found |= models(pair, worker, options)
    return found


def _openvino(pair: Path, worker: Worker, options: RandomOptions) -> dict[str, Driver]:
    folder = pair / "openvino"
    for model in ("target", "dflash"):
        if not (folder / f"{model}-int8" / "config.json").is_file():
            worker.ask("export", source=str(pair / model), output=str(folder / model))
    for name, (target, drafter) in OPENVINO_MODELS.items():
        drafting = (
            {"drafter": str(folder / drafter), "drafts": BLOCK - 1} if drafter else {"drafter": None, "drafts": 0}
        )
        worker.open(name, target=str(folder / target), **drafting)
    return {name: Peer(worker, name, options.rounds) for name in OPENVINO_MODELS}


def _llama(pair: Path, worker: Worker, options: RandomOptions) -> dict[str, Driver]:
    plain, lookup = open_llama(worker, pair / "target", pair / "llama.gguf", stop_ids=[])
    return {
        "llama.cpp fp32 ar": Peer(worker, plain, options.rounds),
        f"llama.cpp fp32 ar{TEXT}": Peer(worker, plain),
        f"llama.cpp fp32 lookup{TEXT}": Peer(worker, lookup),
    }


# -- turns -------------------------------------------------------------------------------------------------------------


def _families(names: Sequence[str], options: RandomOptions) -> list[Family]:
    """Everybody alone; ours in a batch; longer contexts; texts."""
    rounds = [name for name in names if not name.endswith(TEXT)]
    ours = [name for name in rounds if name.startswith((FLOAT, INT8))]
    return [
        _family(rounds),
        _family(ours, batch=BATCH),
        *(_family([PLAIN, f"{FLOAT} dflow"], context=context) for context in options.contexts),
        _family([name for name in names if name.endswith(TEXT)], max_tokens=TEXT_TOKENS),
    ]


def _family(names: Sequence[str], batch: int = 1, context: int = CONTEXT, max_tokens: int = ROUND_TOKENS) -> Family:
    """One turn, of a request a place."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0)
    items = random_workload(context, batch, VOCABULARY, seed=0).items
    asked = tuple(Asked(i, item, tuple(item.prompt["prompt_token_ids"]), params) for i, item in enumerate(items))
    return Family(tuple(_point(name, batch, context) for name in names), (asked,))


def _point(name: str, batch: int = 1, context: int = CONTEXT) -> Point:
    return Point(strategy=name, concurrency=batch, input_len=context)


def _label(point: Point) -> str:
    return f"{point.strategy} B{point.concurrency} ctx{point.input_len}"


# -- agreement ---------------------------------------------------------------------------------------------------------


def _agreement(session: Session, ours: Mapping[str, Ours], pair: Path) -> dict[str, Any]:
    """Ours give the tokens of our own ar of the same weights, as far as both went; float peers do up to near ties. How
    far the peer's int8 DFlash gives those of its own int8 ar is reported."""
    found: dict[str, Any] = {}
    for point, runs in session.runs.items():
        name, label = point.strategy, _label(point)
        usual = PLAIN + TEXT if name.endswith(TEXT) else PLAIN
        reference = ours[name].reference if name in ours else REFERENCES.get(name, usual)
        pairs = [_both(session, point, reference, trace) for run in runs for trace in run.traces]
        wrong = [pair for pair in pairs if pair[1] != pair[2]]
        found[label] = {"sequences": len(pairs), "same": len(pairs) - len(wrong)}
        if wrong:
            prompt, expected, tokens = wrong[0]
            found[label] |= {"tokens": len(tokens), "first_difference": common_prefix(expected, tokens)}
            if name in ours:
                raise Disagreement(f"{label}: differs from {reference}: {found[label]}")
            if reference == usual:
                checked = check_near_ties(label, float_model(pair / "target"), [prompt], [expected], [tokens])
                found[label]["near_tie_gaps"] = checked["near_tie_gaps"]
    return found


def _both(
    session: Session, point: Point, reference: str, trace: Trace
) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """A prompt, what the reference answered, and what was answered here, as far as both went."""
    said = [
        other.token_ids
        for there, runs in session.runs.items()
        if (there.strategy, there.input_len) == (reference, point.input_len)
        for other in runs[0].traces
        if other.asked.index == trace.asked.index
    ]
    length = min(max(map(len, said)), len(trace.token_ids))
    return trace.asked.prompt_ids or (), max(said, key=len)[:length], trace.token_ids[:length]


# -- figures -----------------------------------------------------------------------------------------------------------


def _row(session: Session, point: Point) -> dict[str, Any]:
    """Medians of rounds. host_%: what is in no engine, of the stages together."""
    steps = [step for run in session.runs[point] for step in metrics.full_steps(run)]
    stages = metrics.median_stages([step.milliseconds for step in steps])
    row: dict[str, Any] = {
        "name": _label(point),
        "tau": sum(step.tokens for step in steps) / sum(step.rounds for step in steps),
        "wall_ms": 1e3 * statistics.median(step.end - step.start for step in steps),
        "cpu_ms": 1e3 * statistics.median(step.cpu for step in steps),
    }
    if not stages:  # a peer's
        return row
    host = {"host_%": 100 * (stages["host"] + stages[SAMPLING]) / sum(stages.values())}
    return row | {name: stages.get(name, 0.0) for name in STAGES} | host


def _ratios(session: Session, options: RandomOptions) -> dict[str, Interval]:
    """Time of a round over that of another, or of a token in texts; below 1 the first is faster."""
    pairs = [(f"{FLOAT} {ours}", f"openvino fp32+{d} dflash") for ours in ("dflash", "dflow") for d in ("fp32", "int8")]
    pairs += [(f"{INT8} {ours}", "openvino int8+int8 dflash") for ours in ("dflash", "dflow")]
    pairs += [(PLAIN, f"{peer} fp32 ar") for peer in ("openvino", "llama.cpp")]
    pairs += [(f"{INT8} ar", "openvino int8 ar")]
    points = [(_point(a), _point(b)) for a, b in pairs]
    for batch in (1, BATCH):
        dflow = _point(f"{FLOAT} dflow", batch)
        points += [(_point(f"{form} dflow", batch), _point(f"{form} ar", batch)) for form in (FLOAT, INT8)]
        points += [(each, _point(each.strategy + SMALL, batch)) for each in (_point(PLAIN, batch), dflow)]
    points += [(_point(f"{FLOAT} dflow", 1, context), _point(f"{FLOAT} dflow")) for context in options.contexts]
    plain, ngram, llama = (f"{name}{TEXT}" for name in (PLAIN, f"{FLOAT} ngram", "llama.cpp fp32 ar"))
    texts = [(plain, llama), (ngram, f"llama.cpp fp32 lookup{TEXT}"), (ngram, plain), (ngram, llama)]
    points += [(_point(a), _point(b)) for a, b in texts]
    found = ((a, b, _ratio(session, a, b, options.threads)) for a, b in points if {a, b} <= session.runs.keys())
    return {f"{_label(a)} / {_label(b)}": ratio for a, b, ratio in found}


def _ratio(session: Session, a: Point, b: Point, threads: int) -> Interval:
    """Turn by turn: processor time with one thread, else the clock on the wall."""
    sums = [np.array([_decoding(run, threads) for run in session.runs[point]]) for point in (b, a)]
    return metrics.paired_interval(*sums[0].T, *sums[1].T)


def _decoding(run: Run, threads: int) -> tuple[int, float]:
    """Rounds of a turn, or tokens of a text, and their seconds."""
    steps = metrics.full_steps(run)
    count = sum(step.tokens for step in steps) if run.point.strategy.endswith(TEXT) else len(steps)
    return count, sum(step.cpu if threads == 1 else step.end - step.start for step in steps)


def _goals(figures: dict[str, Any], options: RandomOptions) -> list[Goal]:
    ratios, rows = figures["ratios"], {row["name"]: row for row in figures["rows"]}
    dflow, small = f"{FLOAT} dflow", f"{FLOAT} dflow{SMALL}"
    wanted = [
        (_point(f"{FLOAT} dflash"), _point("openvino fp32+fp32 dflash"), 0.70),
        (_point(f"{INT8} dflash"), _point("openvino int8+int8 dflash"), 0.60),
        *((_point(dflow, batch), _point(small, batch), 1.05) for batch in (1, BATCH)),
    ]
    names = [(f"{_label(a)} / {_label(b)}", bound) for a, b, bound in wanted]
    goals = [Goal(name, ratios[name]["value"], bound, False) for name, bound in names if name in ratios]
    hosts = [_label(_point(f"{form} dflow", BATCH)) for form in (FLOAT, INT8)]
    return [*goals, *(Goal(f"host % of {name}", rows[name]["host_%"], 5.0, False) for name in hosts)]


def _print(figures: dict[str, Any]) -> None:
    headers = ("name", "tau", "wall_ms", "cpu_ms", *STAGES, "host_%")
    title = (
        f"Random 107M pair, block {BLOCK}: milliseconds a round (ar: a step), median of {figures['rounds']} or more; "
    )
    title += "stages on the wall clock; tau: tokens a round; host_%: what is in no engine"
    print_table(title, headers, [[row.get(name) for name in headers] for row in figures["rows"]])
    rows = [(name, *(each[part] for part in ("value", "low", "high"))) for name, each in figures["ratios"].items()]
    print_table("Ratios of time a round (texts: a token), paired by turn", ("", "ratio", "low", "high"), rows)
    theirs = {name: each for name, each in figures["agreement"].items() if not name.startswith((FLOAT, INT8))}
    print("ours equal our own ar; " + "; ".join(f"{name}: {counts}" for name, counts in theirs.items()))
