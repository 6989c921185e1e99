"""Make the example pair that ships with dflow-trt: texts, tokenizer, target, DFlash drafter, DFlow drafter.

Everything is drawn from one seed. A worksheet domain (`dflow_trt.training.texts`) gives the texts; a small
Qwen3 target learns to answer them; a one-layer DFlash drafter learns from the target's own answers; DFlow
continues from that drafter with self-conditioned rounds and the relay. Takes some 20 minutes on one
core; needs the package installed with its extra `train`.

    python build_scripts/make_example.py --output example/
    python build_scripts/make_example.py --output example/ --target example/target   # keep a finished target

The last line printed is one JSON object with every figure.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dflow_trt.training.data import Trajectory, collate, length_bucketed
from dflow_trt.training.generate import generate_trajectories
from dflow_trt.training.model import Drafter, with_relay
from dflow_trt.training.recipe import (
    DrafterSettings,
    OnStep,
    OptimiserSettings,
    train_drafter,
    train_language_model,
)
from dflow_trt.training.simulate import simulate, tau_accepted, tau_emitted
from dflow_trt.training.target import FrozenTarget, ReadBatch
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
CONTROL_STEPS = 6  # plain DFlash steps in the time of one DFlow step
SPECIAL_TOKENS = [END, TURN_START, TURN_END, MASK, PAD]

console = Console(stderr=True)


@dataclass(frozen=True)
class Stage:
    """A stage of the target's training: worksheets of 1 to `most_lines` lines."""

    optimiser: OptimiserSettings
    batch_size: int
    most_lines: int


@dataclass(frozen=True)
class Recipe:
    """Sizes and lengths of the whole run."""

    seed: int = 0
    vocab_size: int = 760
    hidden_size: int = 128
    target_layers: int = 6
    target_ffn: int = 320
    drafter_ffn: int = 128
    block_size: int = 8
    taps: tuple[int, ...] = (1, 3, 4)
    relay_start: str = "after_rejection"
    max_new_tokens: int = 160
    trajectories: int = 2000
    held_out_per_task: int = 30
    copying: Stage = Stage(OptimiserSettings(300, 2e-3), batch_size=64, most_lines=8)
    short: Stage = Stage(OptimiserSettings(1000, 2e-3, weight_decay=0.05), batch_size=16, most_lines=10)
    long: Stage = Stage(OptimiserSettings(1800, 2e-3, weight_decay=0.05), batch_size=16, most_lines=26)
    drafter_batch: int = 16
    dflash: DrafterSettings = field(default_factory=lambda: DrafterSettings(OptimiserSettings(1500, 3e-3), anchors=12))
    dflow: DrafterSettings = field(
        default_factory=lambda: DrafterSettings(OptimiserSettings(1600, 1.5e-3), anchors=12, rounds=3, relay=True)
    )


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


def make_drafter(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, target: FrozenTarget) -> Drafter:
    """An untrained one-layer drafter whose final norm is the target's, as both feed the same head."""
    torch.manual_seed(recipe.seed + 2)
    config = Qwen3Config(
        **qwen3_fields(recipe, tokenizer, layers=1, ffn=recipe.drafter_ffn),
        tie_word_embeddings=False,
        block_size=recipe.block_size,
        num_target_layers=recipe.target_layers,
        dflash_config={
            "mask_token_id": tokenizer.convert_tokens_to_ids(MASK),
            "target_layer_ids": list(recipe.taps),
        },
    )
    drafter = Drafter(config)
    drafter.norm.weight.data.copy_(target.final_norm_E)
    return drafter


def read_batches(
    recipe: Recipe, target: FrozenTarget, trajectories: Sequence[Trajectory], pad_id: int
) -> list[ReadBatch]:
    """All trajectories, batched by length and read by the target once, not once a step."""
    by_length = sorted(trajectories, key=len)
    size = recipe.drafter_batch
    groups = [by_length[at : at + size] for at in range(0, len(by_length), size)]
    with progress("reading", len(groups)) as on_step:
        batches = []
        for index, group in enumerate(groups):
            batches.append(target.read(collate(group, pad_id)))
            on_step(index, 0.0)
    return batches


@dataclass(frozen=True)
class Bench:
    """What drafters of one target are trained on and measured on."""

    target: FrozenTarget
    batches: list[ReadBatch]
    held_out: list[Trajectory]
    pad_id: int

    def train(self, title: str, drafter: Drafter, settings: DrafterSettings, seed: int) -> None:
        """Train in place, on the batches in a new order each time round, with a progress bar."""
        with progress(title, settings.optimiser.steps) as on_step:
            train_drafter(drafter, self.target, shuffled(self.batches, seed), settings, seed, on_step)

    def measure(self, title: str, drafter: Drafter, relay: bool) -> dict[str, float]:
        """tau on the held-out prompts."""
        tallies = simulate(drafter, self.target, self.held_out, self.pad_id, relay)
        measured = {
            "tau_emitted": round(tau_emitted(tallies), 3),
            "tau_accepted": round(tau_accepted(tallies), 3),
            "prompts": len(tallies),
        }
        console.print(f"{title}: {measured}")
        return measured


def shuffled(batches: Sequence[ReadBatch], seed: int) -> Iterator[ReadBatch]:
    """The batches again and again, in a new order each time."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(batches, len(batches))


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


def make_pair(recipe: Recipe, output: Path, finished_target: Path | None, control: bool) -> dict[str, Any]:
    """Run every stage, write the three checkpoints and the held-out prompts, return all figures."""
    seconds: dict[str, float] = {}
    texts = held_out_examples(recipe.seed + 3, recipe.held_out_per_task)
    excluded = frozenset(text.prompt for text in texts)
    with timed(seconds, "target"):
        if finished_target is None:
            tokenizer = make_tokenizer(recipe)
            model = make_target(recipe, tokenizer, excluded)
        else:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(finished_target)
            model = Qwen3ForCausalLM.from_pretrained(finished_target)
        save_target(model, tokenizer, output / "target")

    training_texts = itertools.islice(stream_examples(recipe.seed + 4, excluded), recipe.trajectories)
    with timed(seconds, "answers"):
        prompts = [prompt_ids(tokenizer, text.prompt) for text in [*texts, *training_texts]]
        answers = answer(model, tokenizer, prompts, recipe.max_new_tokens)
    held_out, training = answers[: len(texts)], answers[len(texts) :]
    accuracy = line_accuracy(tokenizer, texts, held_out)
    console.print(f"target: {accuracy['all']:.1%} of held-out lines are right")

    target = FrozenTarget(model, recipe.taps)
    with timed(seconds, "reading"):
        batches = read_batches(recipe, target, training, tokenizer.pad_token_id)
    bench = Bench(target, batches, held_out, tokenizer.pad_token_id)
    dflash, dflow, tau = make_drafters(recipe, tokenizer, bench, seconds)
    if control:
        tau["dflash_longer"] = measure_control(recipe, dflash, bench, seconds)
    figures = {
        "line_accuracy": accuracy,
        "answers_ended": sum(one.response_ids[-1] == tokenizer.eos_token_id for one in held_out),
        "mean_response_tokens": round(sum(len(one.response_ids) for one in held_out) / len(held_out), 1),
        "tau": tau,
        "seconds": seconds,
    }
    dflash.save(output / "dflash")
    dflow.save(output / "dflow")
    write_prompts(output / "prompts.jsonl", texts)
    write_cards(output, recipe, figures)
    return figures


def make_drafters(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, bench: Bench, seconds: dict[str, float]
) -> tuple[Drafter, Drafter, dict[str, dict[str, float]]]:
    """DFlash from scratch, DFlow from DFlash, and their tau."""
    tau = {}
    with timed(seconds, "dflash"):
        dflash = make_drafter(recipe, tokenizer, bench.target)
        bench.train("dflash", dflash, recipe.dflash, recipe.seed)
    tau["dflash"] = bench.measure("dflash", dflash, relay=False)
    with timed(seconds, "dflow"):
        dflow = with_relay(dflash, recipe.relay_start)
        bench.train("dflow", dflow, recipe.dflow, recipe.seed + 1)
    tau["dflow"] = bench.measure("dflow", dflow, relay=True)
    tau["dflow_relay_off"] = bench.measure("dflow, relay off", dflow, relay=False)
    return dflash, dflow, tau


def measure_control(recipe: Recipe, dflash: Drafter, bench: Bench, seconds: dict[str, float]) -> dict[str, float]:
    """tau of a plain DFlash drafter that trains on for about the processor time of the DFlow stage."""
    control = copy.deepcopy(dflash)
    optimiser = replace(recipe.dflow.optimiser, steps=CONTROL_STEPS * recipe.dflow.optimiser.steps)
    with timed(seconds, "control"):
        bench.train("control", control, replace(recipe.dflash, optimiser=optimiser), recipe.seed + 1)
    return bench.measure("dflash, trained on", control, relay=False)


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
# Example {title}

{what}

{figures}

Part of the example pair of dflow-trt, made by its `build_scripts/make_example.py` from one seed ({seed}): texts from
templates, a byte-level BPE tokenizer of {vocab} tokens with a chat template, float32 weights. The target answers
worksheets of short labelled lines (sums, products, comparisons, receipts and the like, see `prompts.jsonl`) and knows
nothing else: the pair exists to show speculative decoding on any machine.
"""
DFLASH_CARD = """A one-layer block drafter (DFlash, arXiv 2602.06036) for the example target: blocks of {block}, {steps}
steps on the target's own answers."""
DFLOW_CARD = """The example DFlash drafter with the relay of DFlow (arXiv 2609.06498), trained on for {steps} steps of
{rounds} rounds each, in which the verified states of the rejected drafts condition the next round. Such a step costs
about {control} steps of plain DFlash, which would gain something too: see DFlow with its relay off as well."""
TAU_ROWS = {
    "dflash": "DFlash",
    "dflash_longer": "DFlash, trained on for the time of the DFlow stage",
    "dflow_relay_off": "DFlow, relay off",
    "dflow": "DFlow",
}


def write_cards(output: Path, recipe: Recipe, figures: dict[str, Any]) -> None:
    """A model card in each of the three folders."""
    accuracy, tau = figures["line_accuracy"]["all"], figures["tau"]
    target = f"A Qwen3 model of {recipe.target_layers} layers and hidden size {recipe.hidden_size}."
    accurate = (
        f"Of the lines that it answers on {tau['dflash']['prompts']} held-out prompts {accuracy:.1%} are right. An "
        f"answer has\n{figures['mean_response_tokens']} tokens on average; {figures['answers_ended']} end with the "
        f"end-of-turn token within {recipe.max_new_tokens} tokens."
    )
    dflash = DFLASH_CARD.format(block=recipe.block_size, steps=recipe.dflash.optimiser.steps)
    dflow = DFLOW_CARD.format(steps=recipe.dflow.optimiser.steps, rounds=recipe.dflow.rounds, control=CONTROL_STEPS)
    write_card(output / "target", "target", target, accurate, recipe)
    write_card(output / "dflash", "DFlash drafter", dflash, tau_table(tau), recipe)
    write_card(output / "dflow", "DFlow drafter", dflow, tau_table(tau), recipe)


def write_card(folder: Path, title: str, what: str, figures: str, recipe: Recipe) -> None:
    """One README.md."""
    card = CARD.format(title=title, what=what, figures=figures, seed=recipe.seed, vocab=recipe.vocab_size)
    (folder / "README.md").write_text(card, encoding="utf-8")


def tau_table(tau: dict[str, dict[str, float]]) -> str:
    """The measurements as a Markdown table with its caption."""
    head = (
        f"Tokens a round on {tau['dflash']['prompts']} held-out prompts (`prompts.jsonl`), greedy; emitted tokens "
        "count the bonus\ntoken, accepted drafts do not:\n\n"
        "| drafter | tau_emitted | tau_accepted |\n| --- | --- | --- |"
    )
    rows = (
        f"| {name} | {tau[key]['tau_emitted']:.2f} | {tau[key]['tau_accepted']:.2f} |"
        for key, name in TAU_ROWS.items()
        if key in tau
    )
    return "\n".join([head, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write the pair to")
    parser.add_argument("--target", type=Path, help="a finished target folder to keep, instead of training one")
    parser.add_argument("--control", action="store_true", help="also measure DFlash trained on for as long as DFlow")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    recipe = Recipe(seed=arguments.seed)
    figures = make_pair(recipe, arguments.output, arguments.target, arguments.control)
    print(json.dumps({"output": str(arguments.output), "recipe": asdict(recipe), **figures}))


if __name__ == "__main__":
    main()
