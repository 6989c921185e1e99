"""``dflow-trt generate``."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflow_trt.cli.common import FILE, FOLDER, POSITIVE, as_chat, print_json
from dflow_trt.cli.interrupts import loading
from dflow_trt.errors import UserError
from dflow_trt.spec import AUTOREGRESSIVE, DRAFT_POLICIES, DraftPolicy

if TYPE_CHECKING:
    from dflow_trt.api import LLM, Prompt
    from dflow_trt.console import StrategyRun
    from dflow_trt.method.sampling import SamplingParams

COMPARISON_TURNS, COMPARISON_SECONDS = 5, 8.0  # timed turns of --compare-ar: as many as begin in that time


def _sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Every field of SamplingParams as a flag."""
    flags: list[tuple[str, dict[str, Any]]] = [
        ("--max-tokens", {"type": int, "help": "Most tokens to emit. [default: 128]", "default": 128}),
        ("--temperature", {"type": float, "help": "0 is greedy."}),
        ("--top-k", {"type": int}),
        ("--top-p", {"type": float}),
        ("--min-p", {"type": float}),
        ("--seed", {"type": int}),
        ("--n", {"type": int, "help": "Samples of each prompt."}),
        ("--stop", {"multiple": True, "help": "Stop string; repeatable."}),
        ("--stop-token-id", {"multiple": True, "type": int, "help": "Repeatable."}),
        ("--ignore-eos", {"is_flag": True, "default": None}),
        ("--min-tokens", {"type": int}),
        ("--repetition-penalty", {"type": float}),
        ("--presence-penalty", {"type": float}),
        ("--frequency-penalty", {"type": float}),
        ("--logit-bias", {"multiple": True, "metavar": "ID=BIAS", "help": "Repeatable."}),
        ("--bad-word", {"multiple": True, "help": "Text that must not appear; repeatable."}),
        ("--logprobs", {"type": int, "help": "Log-probabilities of that many alternatives."}),
    ]
    for flag, settings in reversed(flags):
        command = click.option(flag, **settings)(command)
    return command


def _sampling(options: dict[str, Any]) -> SamplingParams:
    from dflow_trt.method.sampling import SamplingParams

    given = {name: value for name, value in options.items() if value is not None and value != ()}
    renamed = {"stop_token_id": "stop_token_ids", "bad_word": "bad_words"}
    given = {renamed.get(name, name): value for name, value in given.items()}
    if "logit_bias" in given:
        given["logit_bias"] = dict(_bias(entry) for entry in given["logit_bias"])
    return SamplingParams.from_dict(given)


def _bias(entry: str) -> tuple[int, float]:
    token, _, value = entry.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise UserError(f"--logit-bias: {entry!r}; allowed: ID=BIAS, e.g. 42=-5.0") from None


@click.command()
@click.argument("bundle", type=FOLDER)
@click.option("-p", "--prompt", "texts", multiple=True, help="A prompt; repeatable.")
@click.option("--prompts", "file", type=FILE, help="JSONL with prompt, messages or prompt_token_ids.")
@click.option("--limit", type=POSITIVE, help="Only the first so many prompts.")
@click.option("--chat", is_flag=True, help="Format prompts as one user message by the model's chat template.")
@click.option("--strategy", "strategies", multiple=True, help="ar, dflash, dflow, ...; repeatable. [default: the best]")
@click.option("--draft-tokens", type=int, help="Most drafts verified in a round.")
@click.option("--draft-policy", type=click.Choice(DRAFT_POLICIES), default="fixed", show_default=True)
@click.option("--compare-ar", is_flag=True, help="Also decode plainly, and fail unless every token is the same.")
@click.option("--batch-size", type=POSITIVE, help="Requests in flight. [default: the bundle's limit]")
@click.option("--threads", type=POSITIVE, help="CPU threads. [default: all cores]")
@click.option("--stream", is_flag=True, help="Print text as it comes; accepted drafts are coloured.")
@click.option("--json", "as_json", is_flag=True, help="Print results as JSON.")
@click.option("--quiet", is_flag=True, help="Only the table of figures.")
@_sampling_options
def generate(
    bundle: Path,
    texts: Sequence[str],
    file: Path | None,
    limit: int | None,
    chat: bool,
    strategies: Sequence[str],
    draft_tokens: int | None,
    draft_policy: DraftPolicy,
    compare_ar: bool,
    batch_size: int | None,
    threads: int | None,
    stream: bool,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Generate text, losslessly faster."""
    if stream and (as_json or compare_ar or quiet or len(strategies) > 1):
        raise UserError("--stream: shows the text of one strategy; leave out --json, --compare-ar and --quiet")
    with loading():
        from dflow_trt import console
        from dflow_trt.api import LLM

    params = _sampling(options)
    if params.logprobs is not None and not as_json:
        raise UserError("--logprobs: shown with --json alone; add it")
    prompts = _prompts(texts, file, chat)[:limit]
    alone = not compare_ar and len(strategies) < 2  # else each strategy has all prompts to run, as the others had
    limits: dict[str, Any] = {"threads": threads, "max_batch_size": batch_size}
    with LLM(bundle, **limits, draft_policy=draft_policy, prefix_reuse=alone) as llm:
        names = list(dict.fromkeys(strategies or [llm.bundle.default_strategy]))
        if stream:
            if params.n > 1:
                raise UserError("--stream: shows one sample; leave out --n")
            _stream(llm, prompts, params, names[0], draft_tokens)
            return
        if compare_ar:
            names = [AUTOREGRESSIVE, *(name for name in names if name != AUTOREGRESSIVE)]
            params = _seeded(params)
        runs = _run_strategies(llm, prompts, params, names, draft_tokens, compare_ar)
    if as_json:
        print_json({"runs": [_run_json(run) for run in runs]})
    else:
        if compare_ar and len(runs) > 1 and not quiet:
            console.show_comparison(runs[0], runs[-1])
        elif not quiet:
            for output in runs[-1].outputs:
                console.show_text(output)
        console.show_runs(runs)
    _check_lossless(runs)
    _check_errors(runs)


def _check_errors(runs: Sequence[StrategyRun]) -> None:
    """A request that failed alone fails the command, after everything else was shown."""
    failed = [sample for run in runs for output in run.outputs for sample in output.outputs if sample.error]
    if failed:
        raise UserError(f"generate: {len(failed)} requests failed, the first with: {failed[0].error}")


def _prompts(texts: Sequence[str], file: Path | None, chat: bool) -> list[Prompt]:
    """Prompts of the flags, then those of the file."""
    from dflow_trt.prompts import read_prompts

    prompts: list[Prompt] = [*texts, *(read_prompts(file) if file else [])]
    if not prompts:
        raise UserError("generate: no prompt; give -p TEXT or --prompts FILE.jsonl")
    return [as_chat(prompt) for prompt in prompts] if chat else prompts


def _seeded(params: SamplingParams) -> SamplingParams:
    """Runs are comparable only with one seed."""
    from dflow_trt.method.sampling import fresh_seed

    return params if params.seed is not None else dataclasses.replace(params, seed=fresh_seed())


def _run_strategies(
    llm: LLM,
    prompts: list[Prompt],
    params: SamplingParams,
    names: Sequence[str],
    draft_tokens: int | None,
    compare: bool,
) -> list[StrategyRun]:
    """Every strategy on the same prompts. A comparison warms up, and takes the best of rounds in which they take turns:
    what else the machine does then falls on all alike."""
    from dflow_trt.console import StrategyRun

    runs: dict[str, StrategyRun] = {}
    for name in names if compare else ():  # first calls of a shape bind and allocate
        llm.generate(prompts[:1], params, strategy=name, draft_tokens=draft_tokens)
    end = time.perf_counter() + COMPARISON_SECONDS
    for turn in range(COMPARISON_TURNS if compare else 1):
        for name in names if turn == 0 or time.perf_counter() < end else ():
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, strategy=name, draft_tokens=draft_tokens)
            seconds = time.perf_counter() - start
            same = _num_same(runs[names[0]].outputs, outputs) if runs and compare and name != names[0] else None
            best = min(seconds, runs[name].seconds) if name in runs else seconds
            runs[name] = StrategyRun(name, outputs, best, same)
    return list(runs.values())


def _num_same(baseline: Sequence[Any], outputs: Sequence[Any]) -> int:
    pairs = zip(baseline, outputs, strict=True)
    return sum(a.token_ids == b.token_ids for x, y in pairs for a, b in zip(x.outputs, y.outputs, strict=True))


def _check_lossless(runs: Sequence[StrategyRun]) -> None:
    for run in runs:
        total = run.figures["sequences"]
        if run.same is not None and run.same != total:
            raise UserError(
                f"strategy {run.strategy}: {total - run.same} of {total} sequences differ from ar; please report this"
            )


def _run_json(run: StrategyRun) -> dict[str, Any]:
    return {**run.figures, "results": [_output_json(output) for output in run.outputs]}


def _output_json(output: Any) -> dict[str, Any]:
    data = dataclasses.asdict(output)
    for sample, plain in zip(output.outputs, data["outputs"], strict=True):
        plain["stats"] |= {"tau_accepted": sample.stats.tau_accepted, "tau_emitted": sample.stats.tau_emitted}
    return data


def _stream(llm: LLM, prompts: list[Prompt], params: SamplingParams, strategy: str, draft_tokens: int | None) -> None:
    """Prompts one after another; the pieces of a round in one colour: green where drafts were accepted."""
    with loading():
        from dflow_trt import console

    for number, prompt in enumerate(prompts, 1):
        if len(prompts) > 1:
            console.show_title(number, len(prompts), prompt)
        for piece in llm.generate_stream(prompt, params, strategy=strategy, draft_tokens=draft_tokens):
            text = piece.text if llm.tokenizer else "".join(f"{token} " for token in piece.token_ids)
            click.secho(text, fg="green" if piece.num_accepted else None, nl=False)
            sys.stdout.flush()
            if piece.error:
                raise UserError(piece.error)
        click.echo()
