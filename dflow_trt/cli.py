"""``dflow-trt``: the command line. Every command imports what it needs when it runs, so that help is quick."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflow_trt import __version__
from dflow_trt.errors import UserError
from dflow_trt.spec import AUTOREGRESSIVE, DTYPES, HARDWARE, RELAY_STARTS, WEIGHT_FORMS

if TYPE_CHECKING:
    from dflow_trt.api import LLM, Prompt
    from dflow_trt.console import StrategyRun
    from dflow_trt.method.sampling import SamplingParams

COMPARISON_TURNS, COMPARISON_SECONDS = 5, 8.0  # timed turns of --compare-ar: as many as begin in that time
FOLDER = click.Path(path_type=Path, file_okay=False)


def _size_option(name: str, help_text: str, default: int | None = None) -> Callable[[Any], Any]:
    """An integer flag, spelled with dashes and, as trtllm-build does, with underscores."""
    return click.option(f"--{name}", f"--{name.replace('-', '_')}", type=int, default=default, help=help_text)


@click.group(
    context_settings={
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    }
)
@click.version_option(__version__, prog_name="dflow-trt")
def cli() -> None:
    """DFlow block-diffusion speculative decoding: build a bundle, generate from it, look inside."""


ENGINE_OPTIONS: dict[str, dict[str, Any]] = {
    "--plugin": {
        "type": click.Path(path_type=Path),
        "help": "Library of the dflow:: plugins. [default: the checkout's]",
    },
    "--no-plugin": {"is_flag": True, "help": "Compile the ONNX bodies of the plugins' nodes instead."},
    "--compute-capability": {
        "multiple": True,
        "metavar": "N.N",
        "help": "GPUs of tensorrt-rtx; repeatable. [default: all that it has]",
    },
    "--hardware-compatibility": {
        "type": click.Choice(HARDWARE),
        "default": "none",
        "show_default": True,
        "help": "On what else than this GPU engines of tensorrt run.",
    },
    "--version-compatible": {"is_flag": True, "help": "Let engines of tensorrt run on later versions, too."},
    "--timing-cache": {"type": FOLDER, "help": "Where tensorrt keeps its timings from build to build."},
    "--keep-onnx": {"is_flag": True, "help": "Leave the graphs in the bundle, beside the compiled engines."},
}
"""How engines are compiled; see :class:`dflow_trt.compile.base.EngineOptions`."""


def _engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of compiled engines, gathered into one argument ``engine``."""

    @functools.wraps(command)
    def gathered(*arguments: Any, **options: Any) -> Any:
        names = [flag.removeprefix("--").replace("-", "_") for flag in ENGINE_OPTIONS]
        return command(*arguments, engine={name: options.pop(name) for name in names}, **options)

    for flag, settings in reversed(ENGINE_OPTIONS.items()):
        gathered = click.option(flag, **settings)(gathered)
    return gathered


@cli.command()
@click.option("--target", type=FOLDER, required=True, help="Folder of the target model (Qwen3, safetensors).")
@click.option(
    "--drafter", "drafters", multiple=True, metavar="[NAME=]DIR", help="A DFlash, Domino or DFlow drafter; repeatable."
)
@click.option("--output", type=FOLDER, required=True, help="Folder of the bundle.")
@click.option(
    "--backend", default="onnxruntime", show_default=True, help="onnxruntime (CPU), tensorrt, or tensorrt-rtx."
)
@click.option("--dtype", type=click.Choice(DTYPES), help="[default: float32 on onnxruntime, else bfloat16]")
@_size_option("max-batch-size", "Requests in flight. [default: 8]", 8)
@_size_option("max-input-len", "Longest prompt. [default: 1024, or what fits]")
@_size_option("max-seq-len", "Longest prompt and output together. [default: 2048, or what the target takes]")
@_size_option("max-num-tokens", "Token rows of one step. [default: 256, or batch x (drafts + 1)]")
@click.option("--draft-weights", type=click.Choice(WEIGHT_FORMS), help="[default: int8 on onnxruntime, else float]")
@click.option("--target-weights", type=click.Choice(WEIGHT_FORMS), default="float", show_default=True)
@_engine_options
@click.option("--self-check", type=click.Choice(["off", "layer", "full"]), default="layer", show_default=True)
@click.option("--draft-logits", is_flag=True, help="Also give the drafter's logits (for analysis; slower).")
@click.option("--force", is_flag=True, help="Replace an existing bundle.")
@click.option("--json", "as_json", is_flag=True, help="Print what was built as JSON.")
def build(
    target: Path,
    drafters: Sequence[str],
    output: Path,
    self_check: str,
    force: bool,
    as_json: bool,
    engine: dict[str, Any],
    **options: Any,
) -> None:
    """Build a bundle from a target and its drafters."""
    from dflow_trt import console
    from dflow_trt.build import BuildOptions, build_bundle
    from dflow_trt.compile.base import EngineOptions

    start = time.perf_counter()
    engine["compute_capabilities"] = engine.pop("compute_capability")
    sources = [_drafter_source(text) for text in drafters]
    signal.signal(signal.SIGTERM, _interrupt)  # as Ctrl-C: nothing half-written stays
    with console.BuildProgress() as progress:
        bundle = build_bundle(
            target,
            sources,
            output,
            BuildOptions(**options, engine=EngineOptions(**engine)),
            force=force,
            self_check=self_check,
            report=progress,
        )
    if as_json:
        _print_json(_bundle_json(bundle))
    else:
        console.show_built(bundle, time.perf_counter() - start)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _drafter_source(text: str) -> Any:
    from dflow_trt.build import DrafterSource

    name, separator, path = text.partition("=")
    if separator and not Path(text).exists():
        if not name:
            raise UserError(f"--drafter: {text!r} has no name before '='; allowed: NAME=DIR, or DIR alone")
        return DrafterSource(Path(path), name)
    return DrafterSource(Path(text))


@cli.command()
@click.argument("bundle", type=FOLDER)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def inspect(bundle: Path, as_json: bool) -> None:
    """Show what a bundle holds, and check it."""
    from dflow_trt import console
    from dflow_trt.bundle import open_bundle

    opened = open_bundle(bundle)
    if as_json:
        _print_json(_bundle_json(opened))
    else:
        console.show_bundle(opened)


def _bundle_json(bundle: Any) -> dict[str, Any]:
    from dflow_trt.memory import plan_memory

    engines = {
        f"{name}.{contract.engine}" if name else contract.engine: dataclasses.asdict(contract)
        for name, contract in bundle.contracts()
    }
    manifest = json.loads((bundle.path / "dflow.json").read_text(encoding="utf-8"))
    return {
        "path": str(bundle.path),
        **manifest,
        "engines": engines,
        "strategies": list(bundle.strategies),
        "memory": plan_memory(bundle).figures(),
    }


@cli.command()
@click.argument("folder", type=FOLDER)
def example(folder: Path) -> None:
    """Write the example pair (target, dflash and dflow drafters, prompts) into FOLDER."""
    from dflow_trt.example import write_example

    names = write_example(folder)
    click.echo(f"{folder}: {', '.join(names)}")
    drafters = " ".join(f"--drafter {folder / name}" for name in names if name in ("dflash", "dflow"))
    click.echo(f"next: dflow-trt build --target {folder / 'target'} {drafters} --output {folder / 'bundle'}")


@cli.command()
@click.option("--self-test", is_flag=True, help="Also build the example and run it, on a GPU beside the CPU.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(self_test: bool, as_json: bool) -> None:
    """Show what this machine has, what is missing, and the command that fixes it."""
    from dflow_trt.doctor import show
    from dflow_trt.doctor.examine import backends, examine

    findings = examine()
    if self_test and show.works_on_cpu(findings):
        from dflow_trt.doctor.selftest import self_test as run

        findings += run(backends(findings))
    if as_json:
        _print_json(show.as_json(findings))
    else:
        show.show(findings)
    if not show.works_on_cpu(findings):
        raise UserError("doctor: the CPU path does not work here; the findings say what to do")


POSITIVE = click.IntRange(1)


@cli.command()
@click.option("--target", type=FOLDER, required=True, help="Folder of the target model (Qwen3, safetensors).")
@click.option(
    "--prompts", "file", type=click.Path(path_type=Path), required=True, help="JSONL, as for generate; see --chat."
)
@click.option("--output", type=FOLDER, required=True, help="Folder of the drafter.")
@click.option("--mode", type=click.Choice(["dflash", "self-conditioned", "dflow"]), help="[default: dflash]")
@click.option("--from", "source", type=FOLDER, help="A drafter to go on from, e.g. DFlash for --mode dflow.")
@click.option("--rounds", type=POSITIVE, help="Rounds a step after the mask-only one. [default: 2; dflash has none]")
@click.option("--block-size", type=click.IntRange(2), help="The anchor and its drafts. [default: 16, or as --from]")
@click.option("--taps", metavar="N,N,...", help="Target layers that are read. [default: spread evenly, or as --from]")
@click.option("--layers", type=POSITIVE, help="Layers of the drafter. [default: 5, or as --from]")
@click.option("--intermediate-size", type=POSITIVE, help="Width of its SwiGLU. [default: the target's, or as --from]")
@click.option("--mask-token-id", type=int, help="[default: the first spare row, else the token <|mask|>]")
@click.option(
    "--relay-start", type=click.Choice(RELAY_STARTS), help="[default: after_rejection; dflow only, or as --from]"
)
@click.option(
    "--head", type=click.Choice(["domino"]), help="A causal head over the drafts. [default: none, or as --from]"
)
@click.option("--head-state", type=POSITIVE, help="State size of the head's GRU. [default: 1024, or as --from]")
@click.option("--head-rank", type=POSITIVE, help="Rank of the head's correction. [default: 256, or as --from]")
@click.option("--head-prefix", type=click.IntRange(0), help="Drafts before the head's. [default: 1, or as --from]")
@click.option(
    "--rollout",
    type=click.Choice(["real", "teacher-forced"]),
    help="A head's drafts between rounds: its own, or, to compare, those after the true tokens. [default: real]",
)
@click.option("--decay", type=float, help="Slot j weighs exp(-(j - 1) / decay). [default: 4]")
@click.option("--steps", type=POSITIVE, help="[default: 1000]")
@click.option("--batch-size", type=POSITIVE, help="Sequences of a batch. [default: 8]")
@click.option("--anchors", type=POSITIVE, help="Blocks a sequence and batch. [default: 8]")
@click.option("--learning-rate", type=float, help="[default: 0.0006]")
@click.option("--accumulate", type=POSITIVE, help="Batches of a step. [default: 1]")
@click.option("--max-new-tokens", type=click.IntRange(2), help="Longest answer of the target. [default: 256]")
@click.option("--temperature", type=float, help="Of the answers trained on; 0 is greedy. [default: 0]")
@click.option("--held-out", type=POSITIVE, help="Prompts to measure on and not to train on. [default: 32]")
@click.option("--held-out-prompts", type=click.Path(path_type=Path), help="JSONL of the prompts to measure on instead.")
@click.option("--every", type=POSITIVE, help="Steps between checkpoints, with tau measured. [default: a tenth]")
@click.option("--seed", type=click.IntRange(0), help="[default: 0]")
@click.option("--threads", type=POSITIVE, help="CPU threads. [default: all cores]")
@click.option(
    "--precision",
    type=click.Choice(["float32", "bfloat16"]),
    help="Of matrix products. [default: bfloat16 on a GPU, else float32]",
)
@click.option("--cache", type=FOLDER, help="Folder of answers and checkpoints. [default: OUTPUT.cache]")
@click.option("--chat", is_flag=True, help="Format prompts as one user message by the model's chat template.")
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint of a run with the same settings.")
@click.option("--dry-run", is_flag=True, help="Print sizes, memory and times after a few steps; write nothing.")
@click.option("--force", is_flag=True, help="Replace an existing drafter.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def train(
    target: Path,
    file: Path,
    output: Path,
    source: Path | None,
    held_out_prompts: Path | None,
    threads: int | None,
    precision: str | None,
    cache: Path | None,
    chat: bool,
    resume: bool,
    dry_run: bool,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Train a DFlash, DFlow or Domino drafter on the target's own answers.

    On the GPU if there is one, else on the CPU. On several GPUs: accelerate launch --multi_gpu -m dflow_trt train ...
    """
    job, plans, progress, computes = _training()
    place = cache or output.with_name(output.name + ".cache")
    plans.check_output(output, place, force, [target, *([source] if source else [])])
    given = {name: value for name, value in options.items() if value is not None}
    given |= {"taps": _taps(given["taps"])} if "taps" in given else {}
    prompts = _training_prompts(target, file, chat, "--prompts")
    held_out = held_out_prompts and _training_prompts(target, held_out_prompts, chat, "--held-out-prompts")
    plan = plans.make_plan(*_pair(plans, target, source), prompts, plans.Options(**given), held_out)
    signal.signal(signal.SIGTERM, _interrupt)  # as Ctrl-C: nothing half-written stays
    job.set_threads(threads)
    compute = computes.Compute.start(precision)
    command = shlex.join(["dflow-trt", *sys.argv[1:]])
    with progress.Bar(shown=compute.first and not dry_run) as bar:
        run = (plan, output, place, resume, force, command, bar, compute)
        figures = job.estimate(plan, compute) if dry_run else job.train(*run)
    if compute.first:
        _show_figures(figures, as_json)


def _training() -> tuple[Any, Any, Any, Any]:
    """The modules behind `train`, which need torch."""
    try:
        from dflow_trt.training import compute, job, plan, progress
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("torch", "transformers", "accelerate"):
            raise
        todo = "install the extra from the checkout: pip install '.[train]'"
        raise UserError(f"train: needs {error.name}; {todo}") from None
    return job, plan, progress, compute


def _taps(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--taps: {text!r}; allowed: layer numbers with commas between, e.g. 1,3,4") from None


def _pair(plans: Any, target: Path, source: Path | None) -> tuple[Any, Any]:
    """The target's and, if given, the drafter's folder as the plan takes them."""
    from dflow_trt.checkpoint.drafter import read_drafter
    from dflow_trt.checkpoint.target import read_target

    model = read_target(target)
    checked = plans.TargetSource(target, model.spec, model.fingerprint)
    if source is None:
        return checked, None
    draft = read_drafter(source, model.spec)
    return checked, plans.DrafterSource(source, draft.spec, draft.fingerprint, draft.weights.read)


def _training_prompts(target: Path, file: Path, chat: bool, flag: str) -> list[Any]:
    """Token ids of every prompt in the file that a flag names, with its line."""
    from dflow_trt.prompts import read_prompts
    from dflow_trt.text import Tokenizer
    from dflow_trt.training.plan import Prompt

    prompts = [_as_chat(prompt) if chat else prompt for prompt in read_prompts(file, flag)]
    texts = any("prompt_token_ids" not in prompt for prompt in prompts)
    tokenizer = Tokenizer.from_folder(target) if texts else None
    return [Prompt(line, _ids(prompt, tokenizer)) for line, prompt in enumerate(prompts, 1)]


def _ids(prompt: Any, tokenizer: Any) -> tuple[int, ...]:
    ((kind, value),) = prompt.items()
    if kind == "prompt_token_ids":
        return tuple(value)
    return tuple(tokenizer.encode_chat(value) if kind == "messages" else tokenizer.encode(value))


def _show_figures(figures: dict[str, Any], as_json: bool) -> None:
    if as_json:
        _print_json(figures)
        return
    from dflow_trt.memory import show_bytes

    for name, value in figures.items():
        shown = show_bytes(value) if name.endswith("_bytes") else f"{value:,}" if isinstance(value, int) else value
        if not isinstance(value, dict):
            click.echo(f"{name.removesuffix('_bytes').replace('_', ' ')}: {shown}")


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


@cli.command()
@click.argument("bundle", type=FOLDER)
@click.option("-p", "--prompt", "texts", multiple=True, help="A prompt; repeatable.")
@click.option(
    "--prompts", "file", type=click.Path(path_type=Path), help="JSONL with prompt, messages or prompt_token_ids."
)
@click.option("--limit", type=click.IntRange(1), help="Only the first so many prompts.")
@click.option("--chat", is_flag=True, help="Format prompts as one user message by the model's chat template.")
@click.option("--strategy", "strategies", multiple=True, help="ar, dflash, dflow, ...; repeatable. [default: the best]")
@click.option("--draft-tokens", type=int, help="Most drafts verified in a round.")
@click.option("--compare-ar", is_flag=True, help="Also decode plainly, and fail unless every token is the same.")
@click.option("--batch-size", type=click.IntRange(1), help="Requests in flight. [default: the bundle's limit]")
@click.option("--threads", type=click.IntRange(1), help="CPU threads. [default: all cores]")
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
    from dflow_trt import console
    from dflow_trt.api import LLM

    params = _sampling(options)
    if params.logprobs is not None and not as_json:
        raise UserError("--logprobs: shown with --json alone; add it")
    prompts = _prompts(texts, file, chat)[:limit]
    with LLM(bundle, threads=threads, max_batch_size=batch_size) as llm:
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
        _print_json({"runs": [_run_json(run) for run in runs]})
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
    return [_as_chat(prompt) for prompt in prompts] if chat else prompts


def _as_chat(prompt: Prompt) -> Prompt:
    text = prompt if isinstance(prompt, str) else prompt.get("prompt")
    return prompt if text is None else {"messages": [{"role": "user", "content": text}]}


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
    for prompt in prompts:
        for piece in llm.generate_stream(prompt, params, strategy=strategy, draft_tokens=draft_tokens):
            text = piece.text if llm.tokenizer else "".join(f"{token} " for token in piece.token_ids)
            click.secho(text, fg="green" if piece.num_accepted else None, nl=False)
            sys.stdout.flush()
            if piece.error:
                raise UserError(piece.error)
        click.echo()


def _options_of_build(*names: str) -> Callable[[Any], Any]:
    """These options of `build`, word for word."""

    def add(command: Any) -> Any:
        shared = [param for param in build.params if param.name in names]
        command.__click_params__ = [*getattr(command, "__click_params__", []), *reversed(shared)]
        return command

    return add


@cli.command()
@click.argument("target", type=FOLDER)
@click.argument("drafters", nargs=-1, metavar="[[NAME=]DRAFTER]...")
@click.option("--gpu-memory", metavar="SIZE", help="Of the card (or the machine), e.g. 80GiB; adds what fits into it.")
@click.option(
    "--memory-fraction", type=float, help="What may be used of it: the CUDA context takes some. [default: 0.9]"
)
@click.option("--backend", default="tensorrt", show_default=True, help="As in build; it need not be installed.")
@_options_of_build(
    "dtype",
    "max_batch_size",
    "max_input_len",
    "max_seq_len",
    "max_num_tokens",
    "draft_weights",
    "target_weights",
    "draft_logits",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def plan(
    target: Path,
    drafters: Sequence[str],
    gpu_memory: str | None,
    memory_fraction: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Show the memory that a pair needs and, with --gpu-memory, which batches and lengths fit. Nothing is loaded."""
    from dflow_trt import console
    from dflow_trt.build import BuildOptions
    from dflow_trt.plan import MEMORY_FRACTION, make_plan, parse_size

    memory = None if gpu_memory is None else parse_size("--gpu-memory", gpu_memory)
    fraction = MEMORY_FRACTION if memory_fraction is None else memory_fraction
    made = make_plan(target, [_drafter_source(text) for text in drafters], BuildOptions(**options), memory, fraction)
    if as_json:
        _print_json(made.figures())
    else:
        console.show_plan(made)


SERVER_LIMIT = "As in build; written where given."


@cli.command("export-trtllm")
@click.option("--target", type=FOLDER, required=True, help="Folder of the target model.")
@click.option("--drafter", type=FOLDER, required=True, help="Folder of the drafter.")
@click.option("--output", type=FOLDER, required=True, help="Folder of the export.")
@click.option("--trtllm-version", "version", help="Whose configuration is written. [default: 1.4]")
@click.option(
    "--dtype", type=click.Choice(DTYPES[1:]), help="Of the drafter. [default: the target's; bfloat16 for float32]"
)
@_size_option("max-batch-size", SERVER_LIMIT)
@_size_option("max-input-len", SERVER_LIMIT)
@_size_option("max-seq-len", SERVER_LIMIT)
@_size_option("max-num-tokens", SERVER_LIMIT)
@click.option("--force", is_flag=True, help="Replace an existing export.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def export_trtllm(
    target: Path,
    drafter: Path,
    output: Path,
    version: str | None,
    dtype: Any,
    force: bool,
    as_json: bool,
    **limits: int | None,
) -> None:
    """Write a drafter for TensorRT-LLM's DFlash, with the YAML files that serve the pair there."""
    from dflow_trt.trtllm.export import Limits, export_trtllm
    from dflow_trt.trtllm.schema import DEFAULT_VERSION

    signal.signal(signal.SIGTERM, _interrupt)  # as Ctrl-C: nothing half-written stays
    chosen = version or DEFAULT_VERSION
    made = export_trtllm(target, drafter, output, version=chosen, dtype=dtype, limits=Limits(**limits), force=force)
    if as_json:
        _print_json(dataclasses.asdict(made))
        return
    click.echo(f"{made.path}: {', '.join(made.files)}")
    for note in made.notes:
        click.echo(f"note: {note}")


def _print_json(data: Any) -> None:
    click.echo(json.dumps(data, ensure_ascii=False, default=str))


def main() -> None:
    """The console script: user errors are one line and exit code 1."""
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="replace")  # a terminal that cannot show a character shows a mark
    try:
        cli(standalone_mode=False)
        if sys.stdout is not None:  # None where the caller closed it
            sys.stdout.flush()
    except UserError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    except (click.exceptions.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        click.echo(f"error: {error.filename or 'the system'}: {error.strerror or error}", err=True)
        sys.exit(1)
