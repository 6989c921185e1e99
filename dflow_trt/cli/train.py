"""``dflow-trt train``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from dflow_trt.cli.common import FILE, FOLDER, POSITIVE, as_chat, print_json
from dflow_trt.cli.interrupts import loading, undo_on_sigterm
from dflow_trt.errors import UserError
from dflow_trt.spec import RELAY_STARTS

MODES = ("dflash", "self-conditioned", "dflow", "eagle3", "draft-model")


@click.command()
@click.option("--target", type=FOLDER, required=True, help="Folder of the target model (Qwen3, safetensors).")
@click.option("--prompts", "file", type=FILE, required=True, help="JSONL, as for generate; see --chat.")
@click.option("--output", type=FOLDER, required=True, help="Folder of the drafter.")
@click.option("--mode", type=click.Choice(MODES), help="[default: dflash]")
@click.option("--from", "source", type=FOLDER, help="A drafter to go on from, e.g. DFlash for --mode dflow.")
@click.option("--rounds", type=POSITIVE, help="Rounds a step after the mask-only one. [default: 2; dflash has none]")
@click.option("--block-size", type=click.IntRange(2), help="The anchor and its drafts. [default: 16, or as --from]")
@click.option("--taps", metavar="N,N,...", help="Target layers that are read. [default: spread evenly, or as --from]")
@click.option("--layers", type=POSITIVE, help="Of the drafter. [default: 5, or as --from; draft-model: a third]")
@click.option("--hidden-size", type=POSITIVE, help="Width of a draft model. [default: half the target's]")
@click.option(
    "--intermediate-size",
    type=POSITIVE,
    help="Width of its SwiGLU. [default: the target's, or as --from; draft-model: half]",
)
@click.option("--heads", type=POSITIVE, help="Attention heads. [default: eagle3 as the target, draft-model half]")
@click.option("--kv-heads", type=POSITIVE, help="Key/value heads. [default: likewise]")
@click.option("--head-dim", type=POSITIVE, help="Size of a head. [default: the target's]")
@click.option("--draft-vocab", type=POSITIVE, help="Most frequent ids, which eagle3 drafts. [default: 32000]")
@click.option("--drafts", type=click.IntRange(2), help="Of a round. [default: eagle3 5, draft-model 4]")
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
@click.option("--decay", type=float, help="Draft j weighs exp(-(j - 1) / decay). [default: 4]")
@click.option("--steps", type=POSITIVE, help="[default: 1000]")
@click.option("--batch-size", type=POSITIVE, help="Sequences of a batch. [default: 8]")
@click.option("--anchors", type=POSITIVE, help="Blocks a sequence and batch. [default: 8]")
@click.option("--learning-rate", type=float, help="[default: 0.0006]")
@click.option("--accumulate", type=POSITIVE, help="Batches of a step. [default: 1]")
@click.option("--max-new-tokens", type=click.IntRange(2), help="Longest answer of the target. [default: 256]")
@click.option("--temperature", type=float, help="Of the answers trained on; 0 is greedy. [default: 0]")
@click.option("--held-out", type=POSITIVE, help="Prompts to measure on and not to train on. [default: 32]")
@click.option("--held-out-prompts", type=FILE, help="JSONL of the prompts to measure on instead.")
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
    """Train a drafter on the target's own answers: DFlash, DFlow or Domino, an EAGLE-3 head, or a draft model.

    On the GPU if there is one, else on the CPU. On several GPUs: accelerate launch --multi_gpu -m dflow_trt train ...
    """
    job, plans, progress, computes = _training()
    place = cache or output.with_name(output.name + ".cache")
    plans.check_output(output, place, force, [target, *([source] if source else [])], _parts(plans))
    given = {name: value for name, value in options.items() if value is not None}
    given |= {"taps": _taps(given["taps"])} if "taps" in given else {}
    asked = plans.Options(**given)
    if source is not None:
        plans.check_goes_on(asked)
    prompts = _training_prompts(target, file, chat, "--prompts")
    held_out = held_out_prompts and _training_prompts(target, held_out_prompts, chat, "--held-out-prompts")
    plan = plans.make_plan(*_pair(plans, target, source), prompts, asked, held_out)
    undo_on_sigterm()
    job.set_threads(threads)
    compute = computes.Compute.start(precision)
    command = shlex.join(["dflow-trt", *sys.argv[1:]])
    with progress.Bar(shown=compute.first and not dry_run) as bar:
        run = (plan, output, place, resume, force, command, bar, compute)
        figures = job.estimate(plan, compute) if dry_run else job.train(*run)
    compute.close()
    if compute.first:
        _show_figures(figures, as_json)


def _training() -> tuple[Any, Any, Any, Any]:
    """The modules behind `train`, which need torch."""
    try:
        with loading():
            from dflow_trt.training import compute, job, plan, progress
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("torch", "transformers", "accelerate"):
            raise
        todo = "install the extra from the checkout: pip install '.[train]'"
        raise UserError(f"train: needs {error.name}; {todo}") from None
    return job, plan, progress, compute


def _parts(plans: Any) -> tuple[str, ...]:
    """The files that a drafter's folder may have; a draft model has a tokenizer."""
    with loading():
        from dflow_trt.checkpoint.target import TOKENIZER_FILES

    return (*plans.OUTPUT_FILES, *TOKENIZER_FILES)


def _taps(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--taps: {text!r}; allowed: layer numbers with commas between, e.g. 1,3,4") from None


def _pair(plans: Any, target: Path, source: Path | None) -> tuple[Any, Any]:
    """The target's and, if given, the drafter's folder as the plan takes them."""
    with loading():
        from dflow_trt.checkpoint.drafter import read_drafter
        from dflow_trt.checkpoint.target import read_target

    model = read_target(target)
    checked = plans.TargetSource(target, model.spec, model.fingerprint, model.tokenizer_files)
    if source is None:
        return checked, None
    draft = read_drafter(source, model.spec)
    return checked, plans.DrafterSource(source, draft.spec, draft.fingerprint, draft.weights.read)


def _training_prompts(target: Path, file: Path, chat: bool, flag: str) -> list[Any]:
    """Token ids of every prompt in the file that a flag names, with its line."""
    with loading():
        from dflow_trt.prompts import read_prompts
        from dflow_trt.text import Tokenizer
        from dflow_trt.training.options import Prompt

    prompts = [as_chat(prompt) if chat else prompt for prompt in read_prompts(file, flag)]
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
        print_json(figures)
        return
    from dflow_trt.memory import show_bytes

    for name, value in figures.items():
        shown = show_bytes(value) if name.endswith("_bytes") else f"{value:,}" if isinstance(value, int) else value
        if not isinstance(value, dict):
            click.echo(f"{name.removesuffix('_bytes').replace('_', ' ')}: {shown}")
