"""The example pair, end to end: our strategies against transformers' generate and the ``dflash`` package.

Greedy, the same prompts and max_tokens, whole generations (prefill and text handling included).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_common import (
    Goal,
    Spent,
    check_equal,
    check_near_ties,
    paired_ratio,
    print_table,
    rotated,
    timed,
)

from dflow_trt.api import LLM
from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.bundle import Bundle
from dflow_trt.errors import UserError
from dflow_trt.method.sampling import SamplingParams
from dflow_trt.prompts import read_prompts
from dflow_trt.spec import AUTOREGRESSIVE

BATCHES = (1, 8)
TRANSFORMERS, PACKAGE = "transformers", "dflash package"
Tokens = list[tuple[int, ...]]


@dataclass(frozen=True)
class ExampleOptions:
    """How much to run."""

    pair: Path
    work: Path
    num_prompts: int
    max_tokens: int
    repetitions: int
    threads: int


@dataclass
class Contender:
    """One way to generate for all prompts; ``run`` gives token ids, and (accepted, emitted, rounds) or None."""

    name: str
    batch: int
    run: Callable[[], tuple[Tokens, tuple[int, int, int] | None]]
    tokens: Tokens = field(default_factory=list)
    counts: tuple[int, int, int] | None = None
    spent: list[Spent] = field(default_factory=list)

    def measure(self) -> None:
        """One repetition; a run that does not repeat itself is an error."""
        (tokens, self.counts), spent = timed(self.run)
        if self.spent:
            check_equal(f"{self.name} repeated", self.tokens, tokens)
        self.tokens = tokens
        self.spent.append(spent)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    def per_token(self, clock: str) -> list[float]:
        """Seconds a token, one figure a repetition."""
        return [getattr(spent, clock) / self.num_tokens for spent in self.spent]


def run_example(options: ExampleOptions) -> tuple[dict[str, Any], list[Goal]]:
    """Measure and print; figures and goals come back. Raises Disagreement."""
    bundle = _build(options)
    settings = {"threads": options.threads, "verify": False, "prefix_reuse": False}
    llms = {batch: LLM(bundle, max_batch_size=batch, **settings) for batch in BATCHES}
    prompts = _prompt_ids(options, llms[1])
    peers = _Peers(options, bundle)
    contenders = [*_ours(bundle, llms, prompts, options.max_tokens), *peers.contenders(prompts)]
    _interleave(contenders, options.repetitions)
    for llm in llms.values():
        llm.close()
    agreement = _check(contenders, peers, prompts)
    figures = _figures(contenders, options, agreement)
    _print(figures)
    return figures, _goals(contenders, options)


def _build(options: ExampleOptions) -> Bundle:
    drafters = [DrafterSource(options.pair / name) for name in ("dflash", "dflow") if (options.pair / name).is_dir()]
    return build_bundle(
        options.pair / "target", drafters, options.work / "example-bundle", BuildOptions(max_batch_size=8), force=True
    )


def _prompt_ids(options: ExampleOptions, llm: LLM) -> list[list[int]]:
    """The first prompts of prompts.jsonl as chats, in token ids; random ids where the pair has none."""
    file = options.pair / "prompts.jsonl"
    if not file.is_file() or llm.tokenizer is None:
        rng = random.Random(0)
        vocab = llm.bundle.target.live_vocab
        return [[rng.randrange(2, vocab - 1) for _ in range(rng.randint(16, 48))] for _ in range(options.num_prompts)]
    return [_encode(llm, prompt) for prompt in read_prompts(file)[: options.num_prompts]]


def _encode(llm: LLM, prompt: dict[str, Any]) -> list[int]:
    assert llm.tokenizer is not None
    if "prompt_token_ids" in prompt:
        return list(prompt["prompt_token_ids"])
    messages = prompt.get("messages") or [{"role": "user", "content": prompt["prompt"]}]
    try:
        return llm.tokenizer.encode_chat(messages)
    except UserError:  # no chat template
        return llm.tokenizer.encode(prompt["prompt"])


def _ours(bundle: Bundle, llms: dict[int, LLM], prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Contender]:
    params = SamplingParams(max_tokens=max_tokens)
    asked = [{"prompt_token_ids": ids} for ids in prompts]

    def run(llm: LLM, strategy: str) -> tuple[Tokens, tuple[int, int, int] | None]:
        outputs = llm.generate(asked, params, strategy=strategy)
        stats = [output.stats for output in outputs]
        counts = (sum(s.accepted for s in stats), sum(s.emitted for s in stats), sum(s.rounds for s in stats))
        return [output.token_ids for output in outputs], counts

    return [
        Contender(name, batch, lambda llm=llms[batch], name=name: run(llm, name))  # type: ignore[misc]
        for batch in BATCHES
        for name in bundle.strategies
    ]


class _Peers:
    """transformers and the dflash package on the same folders, float32."""

    def __init__(self, options: ExampleOptions, bundle: Bundle) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(options.threads)
        self._options = options
        self.model = AutoModelForCausalLM.from_pretrained(options.pair / "target", dtype=torch.float32).eval()
        self._eos = list(bundle.target.eos_ids)
        self._pad = bundle.target.pad_id if bundle.target.pad_id is not None else 0
        self._drafter = self._load_drafter(options.pair / "dflash")

    @staticmethod
    def _load_drafter(folder: Path) -> Any:
        import torch
        from dflash.model import DFlashDraftModel

        return DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval() if folder.is_dir() else None

    def contenders(self, prompts: Sequence[Sequence[int]]) -> list[Contender]:
        """generate at every batch size, and the package at its only one."""
        found = [
            Contender(TRANSFORMERS, batch, lambda batch=batch: (self._generate(prompts, batch), None))  # type: ignore[misc]
            for batch in BATCHES
        ]
        if self._drafter is not None:
            found.append(Contender(PACKAGE, 1, lambda: self._dflash(prompts)))
        return found

    def _generate(self, prompts: Sequence[Sequence[int]], batch: int) -> Tokens:
        import torch
        from transformers import GenerationConfig

        config = GenerationConfig(
            max_new_tokens=self._options.max_tokens,
            do_sample=False,
            eos_token_id=self._eos or None,
            pad_token_id=self._pad,
        )
        tokens: Tokens = []
        for start in range(0, len(prompts), batch):
            ids_BS, mask_BS = self._left_padded(prompts[start : start + batch])
            with torch.inference_mode():
                out = self.model.generate(ids_BS, attention_mask=mask_BS, generation_config=config)
            tokens += [self._until_eos(row) for row in out[:, ids_BS.shape[1] :].tolist()]
        return tokens

    def _left_padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Any, Any]:
        import torch

        width = max(map(len, prompts))
        ids = [[self._pad] * (width - len(row)) + list(row) for row in prompts]
        mask = [[0] * (width - len(row)) + [1] * len(row) for row in prompts]
        return torch.tensor(ids), torch.tensor(mask)

    def _until_eos(self, row: Sequence[int]) -> tuple[int, ...]:
        end = next((i + 1 for i, token in enumerate(row) if token in self._eos), len(row))
        return tuple(row[:end])

    def _dflash(self, prompts: Sequence[Sequence[int]]) -> tuple[Tokens, tuple[int, int, int]]:
        import time

        import dflash.model as package
        import torch

        package._cuda_time = time.perf_counter  # its clock waits for a GPU
        tokens: Tokens = []
        emitted = rounds = 0
        for prompt in prompts:
            out = package.dflash_generate(
                self._drafter,
                self.model,
                torch.tensor([list(prompt)]),
                self._options.max_tokens,
                self._eos or None,
                return_stats=True,
            )
            tokens.append(self._until_eos(out.output_ids[0, len(prompt) :].tolist()))
            emitted += sum(out.acceptance_lengths)
            rounds += len(out.acceptance_lengths)
        return tokens, (emitted - rounds, emitted, rounds)


def _interleave(contenders: Sequence[Contender], repetitions: int) -> None:
    """A repetition of everyone, then the next; one unmeasured turn first."""
    for contender in contenders:
        contender.run()
    by_name = {f"{c.batch} {c.name}": c for c in contenders}
    for turn in range(repetitions):
        for name in rotated(list(by_name), turn):
            by_name[name].measure()


def _find(contenders: Sequence[Contender], name: str, batch: int) -> Contender | None:
    return next((c for c in contenders if (c.name, c.batch) == (name, batch)), None)


def _check(contenders: Sequence[Contender], peers: _Peers, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Ours equal our ar at batch 1, token by token; the float peers equal it up to near ties."""
    baseline = _find(contenders, AUTOREGRESSIVE, 1)
    assert baseline is not None
    agreement: dict[str, Any] = {}
    for contender in contenders:
        label = f"{contender.name} at batch {contender.batch}"
        if contender.name in (TRANSFORMERS, PACKAGE):
            agreement[label] = check_near_ties(label, peers.model, prompts, baseline.tokens, contender.tokens)
        else:
            agreement[label] = check_equal(label, baseline.tokens, contender.tokens)
    return agreement


def _clock(options: ExampleOptions) -> str:
    """One thread: processor time, which other programs disturb less. More threads: the clock on the wall."""
    return "cpu" if options.threads == 1 else "wall"


def _figures(contenders: Sequence[Contender], options: ExampleOptions, agreement: dict[str, Any]) -> dict[str, Any]:
    rows = [_row(contender, contenders, options) for contender in contenders]
    return {
        "prompts": len(contenders[0].tokens),
        "max_tokens": options.max_tokens,
        "repetitions": options.repetitions,
        "ratios_by": _clock(options),
        "rows": rows,
        "agreement": agreement,
    }


def _row(contender: Contender, contenders: Sequence[Contender], options: ExampleOptions) -> dict[str, Any]:
    accepted, emitted, rounds = contender.counts or (0, 0, 0)
    speculative = contender.counts is not None and contender.name != AUTOREGRESSIVE and rounds
    return {
        "name": contender.name,
        "batch": contender.batch,
        "tokens": contender.num_tokens,
        "tokens_per_s": 1 / statistics.median(contender.per_token("wall")),
        "tokens_per_cpu_s": 1 / statistics.median(contender.per_token("cpu")),
        "tau_emitted": emitted / rounds if speculative else None,
        "tau_accepted": accepted / rounds if speculative else None,
        "x_ar": _speedup(contender, _find(contenders, AUTOREGRESSIVE, contender.batch), options),
        "x_transformers": _speedup(contender, _find(contenders, TRANSFORMERS, contender.batch), options),
        "x_dflash_package": _speedup(contender, _find(contenders, PACKAGE, contender.batch), options),
    }


def _speedup(contender: Contender, baseline: Contender | None, options: ExampleOptions) -> float | None:
    if baseline is None:
        return None
    clock = _clock(options)
    return paired_ratio(baseline.per_token(clock), contender.per_token(clock))


def _print(figures: dict[str, Any]) -> None:
    rows = figures["rows"]
    columns = [name for name in rows[0] if name != "tokens"]
    title = f"Example pair: {figures['prompts']} prompts, max_tokens {figures['max_tokens']}, greedy, "
    title += f"median of {figures['repetitions']}; ratios of {figures['ratios_by']} time a token, paired"
    print_table(title, columns, [[row[name] for name in columns] for row in rows])
    same = [f"{name} {counts['same']}/{counts['sequences']}" for name, counts in figures["agreement"].items()]
    print("same output as ar at batch 1 (differences of the float peers are near ties): " + ", ".join(same))


def _goals(contenders: Sequence[Contender], options: ExampleOptions) -> list[Goal]:
    wanted = [("ar", TRANSFORMERS, 1, 2.0), ("ar", TRANSFORMERS, 8, 2.0), ("dflow", PACKAGE, 1, 2.0)]
    wanted.append(("dflow", AUTOREGRESSIVE, 1, 1.5))
    goals = []
    for name, other, batch, bound in wanted:
        ours, theirs = _find(contenders, name, batch), _find(contenders, other, batch)
        if ours is not None and theirs is not None:
            value = _speedup(ours, theirs, options)
            assert value is not None
            goals.append(Goal(f"example: {name} / {other}, batch {batch}", value, bound, True))
    return goals
