"""Make the example that ships with dflow-trt: texts, tokenizer, target, and drafters of four kinds.

Everything is drawn from one seed. A worksheet domain (`dflow_trt.training.texts`) gives the texts; a small Qwen3 target
learns to answer them; `dflow-trt train` makes a one-layer DFlash drafter from the target's own answers. From there two
drafters go on for the same processor time: DFlash as it is, and DFlow. An EAGLE-3 head and a small draft model start
anew and take the processor time of both stages of DFlash. Takes more than an hour on one core; needs the package
installed with its extra `train`.

    python build_scripts/make_example.py --output example/
    python build_scripts/make_example.py --output example/ --target example/target    # keep a finished target
    python build_scripts/make_example.py --output example/ --only eagle3 draft-model  # beside what is there

The last line printed is one JSON object with every figure.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dflow_trt.training.data import Trajectory, length_bucketed
from dflow_trt.training.generate import generate_trajectories
from dflow_trt.training.recipe import OnStep, OptimiserSettings, train_language_model
from dflow_trt.training.texts import (
    CHAT_TEMPLATE,
    SPLIT_PATTERN,
    TASK_NAMES,
    Example,
    held_out_examples,
    stream_copies,
    stream_examples,
)

END, TURN_START, TURN_END, MASK, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>", "<|pad|>"
MAX_POSITIONS = 1024
TRAINING_PROMPTS = 2000
HELD_OUT_PER_TASK = 30
TAPS = (1, 3, 4)
TAPPING = ("--intermediate-size", "128", "--taps", ",".join(map(str, TAPS)))
DRAFTER = ("--block-size", "8", "--layers", "1", *TAPPING)
EAGLE3 = ("--mode", "eagle3", "--draft-vocab", "160", *TAPPING)
DRAFT_MODEL = ("--mode", "draft-model", "--layers", "2", "--hidden-size", "64", "--intermediate-size", "160")
DRAFTERS = ("dflash", "dflow", "eagle3", "draft-model")
SPECIAL_TOKENS = [END, TURN_START, TURN_END, MASK, PAD]

console = Console(stderr=True)


@dataclass(frozen=True)
class Stage:
    """A stage of the target's training: worksheets of 1 to `most_lines` lines."""

    optimiser: OptimiserSettings
    batch_size: int
    most_lines: int


@dataclass(frozen=True)
class DrafterStages:
    """How the drafters are trained: DFlash from scratch, then a second stage that goes on from it.

    dflow_cost, self_cost: steps of a plain stage in the processor time of one DFlow step, and self-conditioned ones;
    eagle3_cost, draft_model_cost: the same of EAGLE-3's and of a draft model's step, which have one stage. drafts: of a
    round of the latter two, as many as a block has.
    """

    dflash_steps: int = 4000
    dflash_rate: float = 1e-3
    dflow_steps: int = 1200
    dflow_rate: float = 5e-4
    dflow_cost: int = 5
    self_cost: int = 2
    eagle3_rate: float = 2e-3
    eagle3_cost: float = 3.6
    draft_model_rate: float = 5e-3
    draft_model_cost: float = 0.84
    drafts: tuple[str, ...] = ("--drafts", "7")
    anchors: tuple[str, ...] = ("--anchors", "12")
    common: tuple[str, ...] = ("--chat", "--batch-size", "4", "--max-new-tokens", "160")

    @property
    def dflash_long_steps(self) -> int:
        """Plain steps in the time of the DFlow stage."""
        return self.dflow_cost * self.dflow_steps

    def steps_at(self, cost: float) -> int:
        """Steps of one stage in the time of both of DFlash's."""
        return round((self.dflash_steps + self.dflash_long_steps) / cost)


STAGES = DrafterStages()


@dataclass(frozen=True)
class Recipe:
    """Sizes and lengths of the target's training."""

    seed: int = 0
    vocab_size: int = 760
    hidden_size: int = 128
    target_layers: int = 6
    target_ffn: int = 320
    max_new_tokens: int = 160
    copying: Stage = Stage(OptimiserSettings(300, 2e-3), batch_size=64, most_lines=8)
    short: Stage = Stage(OptimiserSettings(1000, 2e-3, weight_decay=0.05), batch_size=16, most_lines=10)
    long: Stage = Stage(OptimiserSettings(1800, 2e-3, weight_decay=0.05), batch_size=16, most_lines=26)


def held_out_texts(seed: int = Recipe.seed) -> list[Example]:
    """The worksheets that nothing is trained on."""
    return held_out_examples(seed + 3, HELD_OUT_PER_TASK)


def write_training_prompts(path: Path, seed: int = Recipe.seed) -> None:
    """The prompts that the drafters are trained on, one JSON object a line; none of them is held out."""
    excluded = frozenset(text.prompt for text in held_out_texts(seed))
    texts = itertools.islice(stream_examples(seed + 4, excluded), TRAINING_PROMPTS)
    path.write_text("".join(json.dumps({"prompt": text.prompt}) + "\n" for text in texts), encoding="utf-8")


def make_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """A byte-level BPE: all 256 bytes are tokens, so every string survives; numbers up to 99 are tokens too."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    numbers = [" " + " ".join(map(str, range(100))), "\n".join(map(str, range(100)))] * 100
    examples = itertools.islice(stream_examples(recipe.seed), 4000)
    texts = (f"user\n{example.prompt}\nassistant\n{example.answer}" for example in examples)
    bpe.train_from_iterator(itertools.chain(numbers, texts), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[END, TURN_START, MASK],
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_target(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the target's folder; the tokenizer's configuration in the form that transformers 4 and 5 both read."""
    model.save_pretrained(folder)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    configuration = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": PAD,
        "additional_special_tokens": [END, TURN_START, MASK],
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(configuration, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def prompt_ids(tokenizer: PreTrainedTokenizerFast, prompt: str) -> tuple[int, ...]:
    """A user's prompt as the chat template writes it, up to the place where the answer starts."""
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def reference(tokenizer: PreTrainedTokenizerFast, example: Example) -> Trajectory:
    """A worksheet with its right answer, as token ids."""
    answer = tokenizer.encode(example.answer + TURN_END, add_special_tokens=False)
    return Trajectory(prompt_ids(tokenizer, example.prompt), tuple(answer))


def copy_exercise(tokenizer: PreTrainedTokenizerFast, lines: Sequence[tuple[str, str]]) -> Trajectory:
    """A list to copy out, of which only the copied values count in the loss."""
    text = "\n".join(label + value for label, value in lines)
    response: list[int] = []
    weights: list[float] = []
    for label, value in lines:
        for piece, weight in ((label, 0.0), (value, 1.0), ("\n", 0.0)):
            ids = tokenizer.encode(piece, add_special_tokens=False)
            response += ids
            weights += [weight] * len(ids)
    return Trajectory(prompt_ids(tokenizer, f"Copy the list.\n{text}"), tuple(response), tuple(weights))


def make_target(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, excluded: frozenset[str]) -> Qwen3ForCausalLM:
    """Train the target on right answers, on a stream of worksheets that never repeats."""
    torch.manual_seed(recipe.seed)
    config = Qwen3Config(
        **qwen3_fields(recipe, tokenizer, recipe.target_layers, recipe.target_ffn),
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.set_attn_implementation("eager")  # the faster one for bf16 training on a CPU
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END)],
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    copies = (copy_exercise(tokenizer, lines) for lines in stream_copies(recipe.seed + 1, recipe.copying.most_lines))
    train_stage("copying", model, copies, recipe.copying, recipe.seed)
    for title, stage in (("short", recipe.short), ("long", recipe.long)):
        texts = stream_examples(recipe.seed + stage.most_lines, excluded, stage.most_lines)
        train_stage(title, model, (reference(tokenizer, text) for text in texts), stage, recipe.seed)
    return model


def train_stage(
    title: str, model: Qwen3ForCausalLM, trajectories: Iterator[Trajectory], stage: Stage, seed: int
) -> None:
    """One stage of the target's training, with a progress bar."""
    batches = length_bucketed(trajectories, stage.batch_size, model.config.pad_token_id, random.Random(seed))
    with progress(title, stage.optimiser.steps) as on_step:
        train_language_model(model, batches, stage.optimiser, bf16=True, on_step=on_step)


def qwen3_fields(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, layers: int, ffn: int) -> dict[str, Any]:
    """What target and drafter have in common."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": recipe.hidden_size,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "use_sliding_window": False,
        "bos_token_id": None,
    }


def line_accuracy(
    tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example], trajectories: Sequence[Trajectory]
) -> dict[str, float]:
    """Share of right lines in the target's own answers, by task and over all."""
    right: dict[str, list[bool]] = {}
    for example, trajectory in zip(examples, trajectories, strict=True):
        answered = tokenizer.decode(trajectory.response_ids, skip_special_tokens=True).split("\n")
        for index, line in enumerate(example.answer.split("\n")):
            right.setdefault(example.task, []).append(answered[index : index + 1] == [line])
    everything = [line for lines in right.values() for line in lines]
    shares = {task: sum(lines) / len(lines) for task, lines in right.items()}
    return {task: round(share, 3) for task, share in {**shares, "all": sum(everything) / len(everything)}.items()}


@contextmanager
def progress(title: str, steps: int) -> Iterator[OnStep]:
    """A progress bar as a context; what it yields is told (step, loss)."""
    columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as bar:
        task = bar.add_task(title, total=steps, note="")
        yield lambda step, loss: bar.update(task, completed=step + 1, note=f"loss {loss:.3f}" if loss else "")


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Note the wall-clock and processor seconds of one stage."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    seconds[stage] = round(time.perf_counter() - wall, 1)
    seconds[f"{stage}_cpu"] = round(time.process_time() - cpu, 1)


def make_pair(recipe: Recipe, output: Path, finished_target: Path | None) -> dict[str, Any]:
    """Run every stage, write the three checkpoints and the held-out prompts, return all figures."""
    seconds: dict[str, float] = {}
    texts = held_out_texts(recipe.seed)
    output.mkdir(parents=True, exist_ok=True)
    write_prompts(output / "prompts.jsonl", texts)
    with timed(seconds, "target"):
        if finished_target is None:
            tokenizer = make_tokenizer(recipe)
            model = make_target(recipe, tokenizer, frozenset(text.prompt for text in texts))
        else:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(finished_target)
            model = Qwen3ForCausalLM.from_pretrained(finished_target)
        save_target(model, tokenizer, output / "target")
    prompts = [prompt_ids(tokenizer, text.prompt) for text in texts]
    held_out = answer(model, tokenizer, prompts, recipe.max_new_tokens)
    accuracy = line_accuracy(tokenizer, texts, held_out)
    console.print(f"target: {accuracy['all']:.1%} of held-out lines are right")
    figures = {
        "line_accuracy": accuracy,
        "answers_ended": sum(one.response_ids[-1] == tokenizer.eos_token_id for one in held_out),
        "mean_response_tokens": round(sum(len(one.response_ids) for one in held_out) / len(held_out), 1),
    }
    write_target_card(output / "target", recipe, figures, len(texts), seconds["target"])
    return figures | {"seconds": seconds, **make_drafters(output, work_folder(output, recipe))}


def work_folder(output: Path, recipe: Recipe) -> Path:
    """Beside the output: the training prompts, and what training keeps."""
    work = output.with_name(output.name + ".work")
    work.mkdir(exist_ok=True)
    write_training_prompts(work / "training.jsonl", recipe.seed)
    return work


def make_drafters(output: Path, work: Path, chosen: Sequence[str] = DRAFTERS) -> dict[str, Any]:
    """The chosen drafters, and the first stage that those with blocks go on from; their figures."""
    first, serial = work / "first", STAGES.drafts
    block, go_on = STAGES.anchors, ("--from", str(first), *STAGES.anchors)
    eagle3_steps, model_steps = STAGES.steps_at(STAGES.eagle3_cost), STAGES.steps_at(STAGES.draft_model_cost)
    stages = {
        "first": (first, (*DRAFTER, *block), STAGES.dflash_steps, STAGES.dflash_rate),
        "dflash": (output / "dflash", go_on, STAGES.dflash_long_steps, STAGES.dflow_rate),
        "dflow": (output / "dflow", ("--mode", "dflow", *go_on), STAGES.dflow_steps, STAGES.dflow_rate),
        "eagle3": (output / "eagle3", (*EAGLE3, *serial), eagle3_steps, STAGES.eagle3_rate),
        "draft-model": (output / "draft-model", (*DRAFT_MODEL, *serial), model_steps, STAGES.draft_model_rate),
    }
    wanted = {*chosen, "first"} if {"dflash", "dflow"} & {*chosen} else {*chosen}
    return {name: train(output, work, *stage) for name, stage in stages.items() if name in wanted}


def train(pair: Path, work: Path, drafter: Path, flags: Sequence[str], steps: int, rate: float) -> dict[str, Any]:
    """One `dflow-trt train`; its figures."""
    files = ("--prompts", work / "training.jsonl", "--held-out-prompts", pair / "prompts.jsonl", "--output", drafter)
    run = ("--steps", steps, "--learning-rate", rate, "--threads", 1, "--cache", work / "cache", "--force", "--json")
    arguments = [str(part) for part in ("--target", pair / "target", *files, *flags, *STAGES.common, *run)]
    console.print(shlex.join(["dflow-trt", "train", *arguments]), style="dim")
    command = [sys.executable, "-m", "dflow_trt", "train", *arguments]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, Any] = json.loads(found.stdout)
    return figures


def answer(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[Sequence[int]], limit: int
) -> list[Trajectory]:
    """The target's greedy answers, with a progress bar."""
    done = 0
    with progress("answers", len(prompts)) as on_step:

        def on_batch(count: int) -> None:
            nonlocal done
            done += count
            on_step(done - 1, 0.0)

        end_ids = model.generation_config.eos_token_id
        return generate_trajectories(model, prompts, end_ids, tokenizer.pad_token_id, limit, on_batch=on_batch)


def write_prompts(path: Path, examples: Sequence[Example]) -> None:
    """One JSON object a line: id, task, prompt. Tasks take turns, so that any first n prompts are a mixture."""
    by_task = [[example for example in examples if example.task == task] for task in TASK_NAMES]
    mixed = [example for turn in zip(*by_task, strict=True) for example in turn]
    records = (
        {
            "id": f"{example.task}-{index // len(TASK_NAMES):02d}",
            "task": example.task,
            "prompt": example.prompt,
        }
        for index, example in enumerate(mixed)
    )
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


CARD = """---
license: apache-2.0
library_name: dflow-trt
---
# Example target

A Qwen3 model of {layers} layers and hidden size {hidden}, trained by `build_scripts/make_example.py` of dflow-trt in
{seconds:.0f} s on one core, from seed {seed}. It answers worksheets of short labelled lines (sums, products,
comparisons, receipts and the like, see `prompts.jsonl`) and knows nothing else: it exists to show speculative decoding
on any machine. Texts come from templates; the tokenizer is a byte-level BPE of {vocab} tokens with a chat template;
weights are float32.

Of the lines that it answers on {prompts} held-out prompts {accuracy:.1%} are right. An answer has {tokens} tokens on
average; {ended} end with the end-of-turn token within {limit} tokens.
"""


def write_target_card(folder: Path, recipe: Recipe, figures: dict[str, Any], prompts: int, seconds: float) -> None:
    """The target's README.md."""
    card = CARD.format(
        layers=recipe.target_layers,
        hidden=recipe.hidden_size,
        seconds=seconds,
        seed=recipe.seed,
        vocab=recipe.vocab_size,
        prompts=prompts,
        accuracy=figures["line_accuracy"]["all"],
        tokens=figures["mean_response_tokens"],
        ended=figures["answers_ended"],
        limit=recipe.max_new_tokens,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def finish_card(card: Path, table: str | None = None) -> None:
    """Put the licence on a drafter's card, and the ablation's table at its end."""
    text = card.read_text(encoding="utf-8").replace("---\n", "---\nlicense: apache-2.0\n", 1)
    text = text.replace(" The licence is yours to add.", "")
    head = "What each part gains on this target (`build_scripts/ablation.py`; 95 % intervals over seeds and prompts):"
    card.write_text(text if table is None else f"{text}\n{head}\n\n{table}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write the pair to")
    parser.add_argument("--target", type=Path, help="a finished target folder to keep, instead of training one")
    parser.add_argument(
        "--only", nargs="+", choices=DRAFTERS, help="make these drafters, for the target and prompts that are there"
    )
    parser.add_argument("--table", type=Path, help="table.md of ablation.py, for the DFlow drafter's card")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    recipe = Recipe(seed=arguments.seed)
    output = arguments.output
    if arguments.only:
        figures = make_drafters(output, work_folder(output, recipe), arguments.only)
    else:
        figures = make_pair(recipe, output, arguments.target)
    table = arguments.table and arguments.table.read_text(encoding="utf-8")
    for name in arguments.only or DRAFTERS:
        finish_card(output / name / "README.md", table if name == "dflow" else None)
    print(json.dumps({"output": str(output), "recipe": asdict(recipe), **figures}))


if __name__ == "__main__":
    main()
