"""A random 107M-parameter pair, round by round: our steps and OpenVINO GenAI's, interleaved in one run.

Random weights accept next to no drafts, and what a round costs does not depend on how many it accepts: every round
here is a full one, 15 drafts drafted and verified. The requests of all contenders are alive at once; each contender
runs a short burst of rounds in turn, the first round of a burst (cold caches) is not counted.
"""

from __future__ import annotations

import functools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

from bench_common import (
    REPO,
    Disagreement,
    Goal,
    check_near_ties,
    common_prefix,
    paired_ratio,
    print_table,
    rotated,
)
from bench_peers import OpenVino

from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.bundle import Bundle
from dflow_trt.decode import Decoder
from dflow_trt.method.sampling import SamplingParams
from dflow_trt.request import Request
from dflow_trt.runtime import ort as ort_runtime
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
CONTEXT, LONG_SEQ, SHORT_SEQ = 128, 2048, 512
STAGES = ("relay", "drafter", "verify", "context", "host")
FORM_NAMES: dict[WeightForm, str] = {"float": "fp32+int8", "int8": "int8+int8"}  # target + drafter


@dataclass(frozen=True)
class RandomOptions:
    """How much to run. contexts: live lengths beyond CONTEXT that are measured too."""

    work: Path
    contexts: tuple[int, ...]
    cycles: int
    burst: int
    threads: int
    peers: Path | None


@dataclass(frozen=True)
class Round:
    """One step of a contender, in milliseconds. engines: processor time inside ONNX Runtime calls."""

    wall: float
    cpu: float
    engines: float = 0.0
    stages: Mapping[str, float] = field(default_factory=dict)


class Lane(Protocol):
    """A contender with its requests in flight."""

    name: str
    rounds: list[list[Round]]
    tokens: dict[int, list[int]]

    def burst(self, count: int) -> None:
        """Run ``count`` rounds, keep all but the first."""
        ...


# -- ours --------------------------------------------------------------------------------------------------------------


class _TimedSession:
    """An ONNX Runtime session that adds up the processor time of its calls."""

    spent = 0.0

    def __init__(self, session: Any) -> None:
        self._session = session
        self.io_binding = session.io_binding

    def run_with_iobinding(self, binding: Any) -> None:
        start = time.process_time()
        self._session.run_with_iobinding(binding)
        _TimedSession.spent += time.process_time() - start


@contextmanager
def _shared_sessions() -> Iterator[None]:
    """Runtimes made inside share one (timed) session an engine file: contenders differ in caches, not in weights."""
    load, loaded = ort_runtime._session, {}

    def session(bundle: Bundle, key: Any, options: Any) -> Any:
        path = bundle.engine_path(*key)
        if path not in loaded:
            loaded[path] = _TimedSession(load(bundle, key, options))
        return loaded[path]

    with patch.object(ort_runtime, "_session", session):
        yield


class OurLane:
    """A decoder with ``batch`` requests of one strategy, prefilled."""

    def __init__(self, bundle: Bundle, strategy: str, batch: int, context: int, threads: int) -> None:
        form, build = FORM_NAMES[bundle.build.target_weights], bundle.build
        self.name = f"{form} {strategy} B{batch} ctx{context} max{build.max_seq_len}"
        self.strategy, self.batch, self.context, self.form = strategy, batch, context, build.target_weights
        self.max_seq_len = build.max_seq_len
        self.rounds: list[list[Round]] = []
        self.tokens: dict[int, list[int]] = {i: [] for i in range(batch)}
        self._decoder = Decoder(bundle, OrtRuntime(bundle, threads, batch), slots=batch)
        params = SamplingParams(max_tokens=build.max_seq_len, ignore_eos=True)
        for i in range(batch):
            prompt = random_prompt(i, context)
            self._decoder.submit(Request(str(i), prompt, params, bundle.strategies[strategy], seed=0))
        while len(self._step()[1]) < batch:
            pass  # prefill, and decoding of those that were through earlier

    def _step(self) -> tuple[Round, list[int]]:
        engines, wall, cpu = _TimedSession.spent, time.perf_counter(), time.process_time()
        result = self._decoder.step()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        for emission in result.emissions:
            self.tokens[int(emission.request_id)] += emission.tokens
        spent = (_TimedSession.spent - engines) * 1e3
        who = [int(emission.request_id) for emission in result.emissions]
        return Round(wall * 1e3, cpu * 1e3, spent, result.milliseconds), who

    def burst(self, count: int) -> None:
        """See :class:`Lane`."""
        self.rounds.append([self._step()[0] for _ in range(count)][1:])


def random_prompt(seed: int, length: int) -> list[int]:
    """The prompt of request ``seed``, the same for every contender."""
    rng = random.Random(seed)
    return [rng.randrange(2, STACK["vocab_size"] - 2) for _ in range(length)]


# -- OpenVINO ----------------------------------------------------------------------------------------------------------


class PeerLane:
    """One request in an OpenVINO GenAI pipeline (its DFlash takes one at a time)."""

    def __init__(self, peer: OpenVino, name: str, target: Path, drafter: Path | None) -> None:
        self.name = f"openvino {name} B1 ctx{CONTEXT}"
        self.rounds: list[list[Round]] = []
        self._peer = peer
        peer.open(self.name, target, drafter)
        prompt, drafts = random_prompt(0, CONTEXT), BLOCK - 1 if drafter else 0
        self.tokens = {
            0: peer.ask("start", name=self.name, prompt=prompt, max_tokens=2000, num_drafts=drafts)["tokens"]
        }

    def burst(self, count: int) -> None:
        """See :class:`Lane`."""
        answer = self._peer.ask("step", name=self.name, count=count)
        self.tokens[0] += answer["tokens"]
        rounds = [Round(wall * 1e3, cpu * 1e3) for wall, cpu in zip(answer["wall"], answer["cpu"], strict=True)]
        self.rounds.append(rounds[1:])


PEER_DFLASH = {
    "fp32+fp32 dflash": ("fp32", "fp32"),
    "fp32+int8 dflash": ("fp32", "int8"),
    "int8+int8 dflash": ("int8", "int8"),
}
PEER_PLAIN = {"fp32 ar": "fp32", "int8 ar": "int8"}


def _peer_lanes(peer: OpenVino, pair: Path) -> list[PeerLane]:
    """Its DFlash with float and with int8 weights, and its plain decoding."""
    models = pair / "openvino"
    peer.export({"target": pair / "target", "dflash": pair / "dflash"}, models)
    lanes = [
        PeerLane(peer, name, models / f"target-{target}", models / f"dflash-{drafter}")
        for name, (target, drafter) in PEER_DFLASH.items()
    ]
    return lanes + [PeerLane(peer, name, models / f"target-{form}", None) for name, form in PEER_PLAIN.items()]


# -- the run -----------------------------------------------------------------------------------------------------------


def run_random(options: RandomOptions) -> tuple[dict[str, Any], list[Goal]]:
    """Measure and print; figures and goals come back. Raises Disagreement, or PeerError when a peer fails."""
    pair = write_pair(options.work)
    with _shared_sessions():
        ours = _our_lanes(pair, options)
        if options.peers is None:
            return _measure(ours, [], pair, options, {})
        with OpenVino(options.peers, options.threads, options.work / "openvino.log") as peer:
            theirs = _peer_lanes(peer, pair)
            return _measure(ours, theirs, pair, options, peer.versions)


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
        max_batch_size=8,
        max_seq_len=max_seq_len,
        max_input_len=max_seq_len - 64,
        max_num_tokens=2048,
        target_weights=form,
    )
    return build_bundle(
        pair / "target", drafters, work / f"random-{form}-{max_seq_len}", options, force=True, self_check="off"
    )


def _our_lanes(pair: Path, options: RandomOptions) -> list[OurLane]:
    """Both weight forms at batch 1 and 8; then long contexts, and the same context in a smaller cache."""
    bundles: dict[WeightForm, Bundle] = {form: _build(pair, options.work, form, LONG_SEQ) for form in FORM_NAMES}
    strategies = (AUTOREGRESSIVE, "dflash", "dflow")
    lane: Callable[..., OurLane] = functools.partial(OurLane, threads=options.threads)
    lanes = [lane(bundle, s, batch, CONTEXT) for bundle in bundles.values() for s in strategies for batch in (1, 8)]
    if options.contexts:
        small = _build(pair, options.work, "float", SHORT_SEQ)
        lanes += [lane(small, "dflow", batch, CONTEXT) for batch in (1, 8)]
        lanes += [lane(bundles["float"], s, 1, ctx) for ctx in options.contexts for s in (AUTOREGRESSIVE, "dflow")]
    return lanes


def _measure(
    ours: Sequence[OurLane],
    theirs: Sequence[PeerLane],
    pair: Path,
    options: RandomOptions,
    versions: Mapping[str, str],
) -> tuple[dict[str, Any], list[Goal]]:
    lanes: dict[str, Lane] = {lane.name: lane for lane in [*ours, *theirs]}
    for cycle in range(options.cycles):
        for name in rotated(list(lanes), cycle):
            lanes[name].burst(options.burst)
    figures = {
        "pair": {**STACK, "layers": TARGET_LAYERS, "draft_layers": DRAFT_LAYERS, "block": BLOCK, "taps": TAPS},
        "rounds": options.cycles * (options.burst - 1),
        "peer_versions": dict(versions),
        "rows": [_row(lane) for lane in lanes.values()],
        "agreement": _check(ours, theirs, pair),
        "ratios": _ratios(ours, theirs, options),
    }
    _print(figures)
    return figures, _goals(figures, options)


def _check(ours: Sequence[OurLane], theirs: Sequence[PeerLane], pair: Path) -> dict[str, Any]:
    """Ours equal our own ar of the same weights as far as both went; the float peers equal it up to near ties."""
    plain_lanes = [lane for lane in ours if lane.strategy == AUTOREGRESSIVE]
    plain = {(each.form, each.context, i): tokens for each in plain_lanes for i, tokens in each.tokens.items()}
    agreement: dict[str, Any] = {}
    for lane in ours:
        lengths = []
        for i, tokens in lane.tokens.items():
            expected = plain[lane.form, lane.context, i]
            lengths.append(min(len(tokens), len(expected)))
            if common_prefix(tokens, expected) < lengths[-1]:
                raise Disagreement(f"{lane.name}: request {i} differs from ar")
        agreement[lane.name] = {"sequences": lane.batch, "same": lane.batch, "tokens": sum(lengths)}
    for peer in theirs:
        agreement[peer.name] = _check_peer(peer, plain["float", CONTEXT, 0], pair)
    agreement |= _self_agreement(theirs)
    return agreement


def _self_agreement(theirs: Sequence[PeerLane]) -> dict[str, Any]:
    """How far the peer's int8 DFlash gives the tokens of its own int8 plain decoding: reported, not required."""
    tokens = {lane.name: lane.tokens[0] for lane in theirs}
    names = [_theirs("int8+int8 dflash"), _theirs("int8 ar")]
    if not all(name in tokens for name in names):
        return {}
    fast, plain = (tokens[name] for name in names)
    length, same = min(len(fast), len(plain)), common_prefix(fast, plain)
    label = f"{names[0]} against its own int8 ar"
    return {label: {"sequences": 1, "same": int(same >= length), "tokens": length, "first_difference": same}}


def _check_peer(peer: PeerLane, expected: Sequence[int], pair: Path) -> dict[str, Any]:
    length = min(len(expected), len(peer.tokens[0]))
    same = common_prefix(expected, peer.tokens[0])
    if "fp32" not in peer.name or same >= length:  # its int8 target is another model than the float one
        return {"sequences": 1, "same": int(same >= length), "tokens": length, "first_difference": same}
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float32).eval()
    tokens = [expected[:length]], [peer.tokens[0][:length]]
    return check_near_ties(peer.name, model, [random_prompt(0, CONTEXT)], *tokens) | {"first_difference": same}


# -- figures -----------------------------------------------------------------------------------------------------------


def _median(lane: Lane, value: Callable[[Round], float]) -> float:
    return statistics.median(value(each) for burst in lane.rounds for each in burst)


def _row(lane: Lane) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": lane.name,
        "wall_ms": _median(lane, lambda r: r.wall),
        "cpu_ms": _median(lane, lambda r: r.cpu),
    }
    if isinstance(lane, PeerLane):
        return row
    stages = {stage: _median(lane, lambda r, stage=stage: r.stages.get(stage, 0.0)) for stage in STAGES}  # type: ignore[misc]
    host = _median(lane, lambda r: (r.cpu - r.engines) / r.cpu)
    return row | stages | {"host_%": 100 * host}


def _cycle_times(lane: Lane, options: RandomOptions) -> list[float]:
    """The median round of each burst: processor time with one thread, else the clock on the wall."""
    clock = "cpu" if options.threads == 1 else "wall"
    return [statistics.median(getattr(each, clock) for each in burst) for burst in lane.rounds]


def _ratios(ours: Sequence[OurLane], theirs: Sequence[PeerLane], options: RandomOptions) -> dict[str, float]:
    """Round against round, paired by cycle; below 1 the first is faster."""
    lanes: dict[str, Lane] = {lane.name: lane for lane in [*ours, *theirs]}
    pairs = [(_ours("float", s, 1), _theirs(p)) for s in ("dflash", "dflow") for p in PEER_DFLASH if "fp32" in p]
    pairs += [(_ours("int8", s, 1), _theirs("int8+int8 dflash")) for s in ("dflash", "dflow")]
    pairs += [
        (_ours("float", AUTOREGRESSIVE, 1), _theirs("fp32 ar")),
        (_ours("int8", AUTOREGRESSIVE, 1), _theirs("int8 ar")),
    ]
    pairs += [(_ours(f, "dflow", b), _ours(f, AUTOREGRESSIVE, b)) for f in FORM_NAMES for b in (1, 8)]
    pairs += [(_ours("float", "dflow", b), _ours("float", "dflow", b, max_seq_len=SHORT_SEQ)) for b in (1, 8)]
    pairs += [(_ours("float", "dflow", 1, ctx), _ours("float", "dflow", 1)) for ctx in options.contexts]
    return {
        f"{a} / {b}": paired_ratio(_cycle_times(lanes[a], options), _cycle_times(lanes[b], options))
        for a, b in pairs
        if a in lanes and b in lanes
    }


def _ours(form: WeightForm, strategy: str, batch: int, context: int = CONTEXT, max_seq_len: int = LONG_SEQ) -> str:
    return f"{FORM_NAMES[form]} {strategy} B{batch} ctx{context} max{max_seq_len}"


def _theirs(name: str) -> str:
    return f"openvino {name} B1 ctx{CONTEXT}"


def _goals(figures: dict[str, Any], options: RandomOptions) -> list[Goal]:
    ratios, rows = figures["ratios"], {row["name"]: row for row in figures["rows"]}
    wanted = [
        (_ours("float", "dflash", 1), _theirs("fp32+fp32 dflash"), 0.70),
        (_ours("int8", "dflash", 1), _theirs("int8+int8 dflash"), 0.60),
        (_ours("float", "dflow", 1), _ours("float", "dflow", 1, max_seq_len=SHORT_SEQ), 1.05),
        (_ours("float", "dflow", 8), _ours("float", "dflow", 8, max_seq_len=SHORT_SEQ), 1.05),
    ]
    goals = [Goal(f"{a} / {b}", ratios[f"{a} / {b}"], bound, False) for a, b, bound in wanted if f"{a} / {b}" in ratios]
    if options.threads == 1:
        for form in FORM_NAMES:
            name = _ours(form, "dflow", 8)
            goals.append(Goal(f"host % of {name}", rows[name]["host_%"], 5.0, False))
    return goals


def _print(figures: dict[str, Any]) -> None:
    headers = ("name", "wall_ms", "cpu_ms", *STAGES, "host_%")
    title = f"Random 107M pair, block {BLOCK}: milliseconds a round (ar: a step), median of {figures['rounds']}; "
    title += "stages on the wall clock; host_% is processor time outside ONNX Runtime"
    print_table(title, headers, [[row.get(name) for name in headers] for row in figures["rows"]])
    print_table("Ratios, paired by cycle", ("rounds", "ratio"), figures["ratios"].items())
    peers = {name: counts for name, counts in figures["agreement"].items() if name.startswith("openvino")}
    print("ours equal our own ar; " + "; ".join(f"{name}: {counts}" for name, counts in peers.items()))
