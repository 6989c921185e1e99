"""A try of everything on the example pair: losslessness on the CPU; where there is a GPU, TensorRT beside the CPU."""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.bundle import Bundle
from dflow_trt.decode import Decoder
from dflow_trt.doctor.examine import Finding
from dflow_trt.errors import UserError
from dflow_trt.example import write_example
from dflow_trt.method.sampling import SamplingParams
from dflow_trt.request import Request
from dflow_trt.runtime.base import Runtime
from dflow_trt.runtime.ort import OrtRuntime
from dflow_trt.spec import AUTOREGRESSIVE, DType
from dflow_trt.text import Tokenizer

PROMPTS, TOKENS = 6, 48
OPTIONS = BuildOptions(max_batch_size=4, max_input_len=384, max_seq_len=512)
RANKED = 16  # alternatives that are looked at where two runtimes differ
TIE: dict[DType, float] = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
"""Two tokens are a near tie in engines of a dtype where the reference's logits are closer than this."""


@dataclass(frozen=True)
class Parity:
    """How a runtime's greedy tokens compare with the reference's.

    same: sequences that are equal to the end. gaps: for each of the others, the reference's logit gap between the two
    tokens at the first difference; infinite where the other token is not even among its best.
    """

    sequences: int
    same: int
    gaps: tuple[float, ...]
    bound: float

    @property
    def near_ties(self) -> int:
        return sum(gap < self.bound for gap in self.gaps)

    @property
    def ok(self) -> bool:
        """Every difference is a near tie."""
        return self.near_ties == len(self.gaps)

    def __str__(self) -> str:
        text = f"{self.same} of {self.sequences} sequences equal"
        if self.gaps:
            widest = max(self.gaps)
            text += f", {self.near_ties} of {len(self.gaps)} differences are near ties, the widest gap is {widest:.3g}"
        return text


def self_test(backends: Sequence[str]) -> list[Finding]:
    """Build the example and run it: on the CPU always, and with each of ``backends`` beside it."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "example"
        write_example(folder)
        bundle = build_example(folder, OPTIONS)
        prompts = example_prompts(folder, bundle)
        with closing(OrtRuntime(bundle)) as reference:
            findings = [lossless(bundle, reference, prompts)]
            findings += [_on_gpu(folder, backend, bundle, reference, prompts) for backend in backends]
    return findings


def build_example(folder: Path, options: BuildOptions) -> Bundle:
    """The example pair of a folder as a bundle beside it."""
    drafters = [DrafterSource(folder / name) for name in ("dflash", "dflow")]
    output = folder / f"bundle-{options.backend}-{options.dtype}"
    return build_bundle(folder / "target", drafters, output, options)


def example_prompts(folder: Path, bundle: Bundle) -> list[list[int]]:
    """The first of the example's prompts, as token ids."""
    assert bundle.tokenizer_path is not None
    tokenizer = Tokenizer.from_folder(bundle.tokenizer_path)
    lines = (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:PROMPTS]
    return [tokenizer.encode_chat([{"role": "user", "content": json.loads(line)["prompt"]}]) for line in lines]


def lossless(bundle: Bundle, runtime: Runtime, prompts: Sequence[Sequence[int]]) -> Finding:
    """Every strategy against plain decoding on one runtime: greedy, and sampled from one seed."""
    same = total = 0
    for params in (SamplingParams(max_tokens=TOKENS), SamplingParams(max_tokens=TOKENS, temperature=0.8, top_p=0.95)):
        wanted = generate(bundle, runtime, prompts, AUTOREGRESSIVE, params)
        for strategy in [name for name in bundle.strategies if name != AUTOREGRESSIVE]:
            found = generate(bundle, runtime, prompts, strategy, params)
            same += sum(a == b for a, b in zip(found, wanted, strict=True))
            total += len(prompts)
    text = f"{same} of {total} sequences with drafts are those of plain decoding"
    return _verdict("self-test: CPU", "everything", same == total, text)


def _verdict(name: str, serves: str, fine: bool, text: str) -> Finding:
    return Finding(name, serves, "ok" if fine else "broken", text, "" if fine else "please report this")


def generate(
    bundle: Bundle, runtime: Runtime, prompts: Sequence[Sequence[int]], strategy: str, params: SamplingParams
) -> list[list[int]]:
    """The tokens of every prompt, all in flight together."""
    found: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for request_id, picks in _run(bundle, runtime, prompts, strategy, params):
        found[request_id] += [pick.token for pick in picks]
    return list(found.values())


def _run(
    bundle: Bundle, runtime: Runtime, prompts: Sequence[Sequence[int]], strategy: str, params: SamplingParams
) -> list[tuple[str, Any]]:
    decoder, emitted = Decoder(bundle, runtime), list[tuple[str, Any]]()
    for i, prompt in enumerate(prompts):
        decoder.submit(Request(str(i), prompt, params, bundle.strategy(strategy), seed=i))
    while not decoder.idle:
        emitted += [(emission.request_id, emission.picks) for emission in decoder.step().emissions]
    return emitted


def compare(
    reference: tuple[Bundle, Runtime], other: tuple[Bundle, Runtime], prompts: Sequence[Sequence[int]], strategy: str
) -> Parity:
    """Greedy tokens of a strategy on another runtime against the reference's plain ones."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    wanted = generate(*reference, prompts, AUTOREGRESSIVE, params)
    found = generate(*other, prompts, strategy, params)
    gaps = []
    for prompt, ours, theirs in zip(prompts, found, wanted, strict=True):
        first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if first is not None:
            gaps.append(_gap(reference, [*prompt, *theirs[:first]], ours[first]))
    return Parity(len(prompts), len(prompts) - len(gaps), tuple(gaps), TIE[other[0].build.dtype])


def _gap(reference: tuple[Bundle, Runtime], prefix: Sequence[int], token: int) -> float:
    """How far below the reference's own choice after ``prefix`` it ranks ``token``."""
    params = SamplingParams(max_tokens=1, logprobs=RANKED, ignore_eos=True)
    [(_, [pick])] = _run(*reference, [prefix], AUTOREGRESSIVE, params)
    ranked: Mapping[int, float] = dict(pick.top_logprobs)
    return float(pick.logprob - ranked[token]) if token in ranked else math.inf


def _on_gpu(
    folder: Path, backend: str, bundle: Bundle, reference: Runtime, prompts: Sequence[Sequence[int]]
) -> Finding:
    """The same pair built for a GPU backend, every strategy of it against the CPU's plain decoding."""
    from dflow_trt.runtime.trt import TrtRuntime

    name = f"self-test: {backend}"
    options = dataclasses.replace(OPTIONS, backend=backend)
    try:
        built = build_example(folder, options)
        with closing(TrtRuntime(built)) as runtime:
            sides = (bundle, reference), (built, runtime)
            parities = {strategy: compare(*sides, prompts, strategy) for strategy in built.strategies}
    except (UserError, RuntimeError) as error:
        return Finding(name, "GPU", "broken", str(error), "put that right and run it again")
    text = "; ".join(f"{strategy}: {parity}" for strategy, parity in parities.items())
    return _verdict(name, "GPU", all(parity.ok for parity in parities.values()), text)
