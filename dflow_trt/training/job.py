"""A training job from prompts to a drafter's folder: answers of the target, steps, measurements, output."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, Qwen3ForCausalLM
from transformers.utils import logging

from dflow_trt.errors import UserError
from dflow_trt.training.block import BlockTrainee
from dflow_trt.training.cache import AnswerSettings, Ids, answered, digest
from dflow_trt.training.card import write_drafter
from dflow_trt.training.compute import Compute
from dflow_trt.training.data import Batch, Trajectory, collate
from dflow_trt.training.draft_model import DraftModelTrainee
from dflow_trt.training.eagle3 import Eagle3Trainee
from dflow_trt.training.generate import generate_trajectories
from dflow_trt.training.loop import DrafterTraining, Reader, load_state, save_state
from dflow_trt.training.options import Options, Prompt
from dflow_trt.training.plan import Plan
from dflow_trt.training.progress import Report, Silent
from dflow_trt.training.recipe import OptimiserSettings
from dflow_trt.training.shapes import DraftModelShape, Eagle3Shape
from dflow_trt.training.simulate import Tally, play, tau_accepted, tau_emitted
from dflow_trt.training.trainee import Trainee

TIMED_STEPS, TIMED_TOKENS = 2, 8
WARMUP_SHARE = 0.04

Tau = dict[str, float]


def set_threads(count: int | None) -> None:
    """CPU threads of everything that follows; None leaves them as they are."""
    if count is not None:
        torch.set_num_threads(count)


def load_target(plan: Plan, compute: Compute) -> Any:
    """The target on its device; answers follow this job's settings alone, not those of generation_config.json."""
    library: Any = logging
    library.disable_progress_bar()
    model: Any = Qwen3ForCausalLM.from_pretrained(plan.target.path, dtype=compute.target_dtype)
    model = model.to(compute.device).eval()
    dead = list(range(plan.target.spec.live_vocab, plan.target.spec.vocab_size))
    generation: Any = GenerationConfig
    model.generation_config = generation(suppress_tokens=dead or None)
    return model


@dataclass(frozen=True)
class Bench:
    """The parts of a job: what trains, on what, and what it is measured on.

    held_out: answers by the temperature that they were drawn with; greedy ones are those of 0.
    """

    plan: Plan
    compute: Compute
    trainee: Trainee
    training: DrafterTraining
    held_out: dict[float, list[Trajectory]]
    tokens: int

    def measure(self, relay: bool | None = None, temperature: float = 0.0) -> Tau:
        """tau of the drafter as it is now, with its relay unless said."""
        return _tau(self.tallies(relay, temperature))

    def tallies(self, relay: bool | None = None, temperature: float = 0.0) -> list[Tally]:
        """Counts of each held-out prompt."""
        trainee = self.trainee
        relay = trainee.relays if relay is None else relay
        self.training.drafter.eval()
        with self.compute.autocast():
            chosen = self.held_out[temperature]
            return play(trainee.reader, lambda read: trainee.rounds(read, relay), chosen, pad_id(self.plan))


def _tau(tallies: Sequence[Tally]) -> Tau:
    return {"tau_emitted": round(tau_emitted(tallies), 3), "tau_accepted": round(tau_accepted(tallies), 3)}


def pad_id(plan: Plan) -> int:
    """What fills batches: nothing looks at it."""
    return plan.target.spec.pad_id or 0


def prepare(plan: Plan, compute: Compute, cache: Path, report: Report) -> Bench:
    """Answers (from the cache as far as they are there), batches, drafter."""
    model = load_target(plan, compute)
    held_out = {
        temperature: answers(plan, compute, model, plan.held_out, cache, temperature, title, report)
        for temperature, title in ((0.0, "held out"), (1.0, "held out, sampled"))
    }
    training = answers(plan, compute, model, plan.training, cache, plan.options.temperature, "answers", report)
    tokens = sum(len(trajectory.response_ids) for trajectory in training)
    if tokens <= plan.shape.num_drafts or not all(held_out.values()):
        found = f"{tokens} tokens to train on and {min(map(len, held_out.values()))} answers held out"
        raise UserError(f"--prompts: the target's answers of 2 tokens or more give {found}; give more prompts")
    trainee = make_trainee(plan, model, training)
    return Bench(plan, compute, trainee, make_training(plan, compute, trainee, training), held_out, tokens)


def make_trainee(plan: Plan, model: Any, trajectories: Sequence[Trajectory]) -> Trainee:
    """The drafter before its first step."""
    shape = plan.shape
    if isinstance(shape, DraftModelShape):
        return DraftModelTrainee(plan, shape, model)
    if isinstance(shape, Eagle3Shape):
        return Eagle3Trainee(plan, shape, model, trajectories)
    return BlockTrainee(plan, shape, model)


def make_training(
    plan: Plan, compute: Compute, trainee: Trainee, trajectories: Sequence[Trajectory]
) -> DrafterTraining:
    """The loop at its first step; trajectories of similar lengths share a batch."""
    by_length, size, options = sorted(trajectories, key=len), plan.options.batch_size, plan.options
    groups = [by_length[at : at + size] for at in range(0, len(by_length), size)]
    batches: list[Batch] = [collate(group, pad_id(plan)) for group in groups]
    reader, settings = Reader(trainee.reader, batches), optimiser_settings(options)
    return DrafterTraining(trainee.loss, reader, settings, options.seed, options.accumulate, compute)


def optimiser_settings(options: Options) -> OptimiserSettings:
    """The flags as the optimiser takes them."""
    warmup = min(50, max(1, round(WARMUP_SHARE * options.steps)))
    return OptimiserSettings(options.steps, options.learning_rate, warmup_steps=warmup)


def answers(
    plan: Plan,
    compute: Compute,
    model: Any,
    prompts: Sequence[Prompt],
    cache: Path,
    temperature: float,
    title: str,
    report: Report,
) -> list[Trajectory]:
    """The target's answers that have a token to draft: those of 2 tokens or more. Processes share the work."""
    options, ids = plan.options, [prompt.ids for prompt in prompts]
    settings = AnswerSettings(plan.target.fingerprint, options.max_new_tokens, temperature, options.seed)

    def answer(piece: Sequence[Ids], settings: AnswerSettings, seed: int) -> list[Trajectory]:
        return generate(plan, model, piece, settings.max_new_tokens, settings.temperature, seed)

    report.stage(title, len(prompts))
    if compute.count > 1:
        answered(cache, ids, settings, answer, share=(compute.index, compute.count))
        compute.wait()
    found = answered(cache, ids, settings, answer, report.advance)
    return [trajectory for trajectory in found if len(trajectory.response_ids) > 1]


def generate(
    plan: Plan, model: Any, prompts: Sequence[Ids], limit: int, temperature: float, seed: int
) -> list[Trajectory]:
    """The target's answers, drawn by a seed of their own."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        ends, size = plan.target.spec.eos_ids, len(prompts)
        return generate_trajectories(model, prompts, ends, pad_id(plan), limit, size, temperature=temperature)


def run_key(plan: Plan, compute: Compute) -> str:
    """A name for everything that a run's result depends on."""
    source = plan.source.fingerprint if plan.source else None
    prompts = [[prompt.ids for prompt in part] for part in (plan.training, plan.held_out)]
    options = {key: value for key, value in asdict(plan.options).items() if key != "every"}
    return digest([plan.target.fingerprint, source, prompts, asdict(plan.shape), options, *_kind(compute)])


def _kind(compute: Compute) -> tuple[int, str, str]:
    return compute.count, compute.precision, compute.device.type


def train(
    plan: Plan,
    output: Path,
    cache: Path,
    resume: bool = False,
    force: bool = False,
    command: str = "",
    report: Report | None = None,
    compute: Compute | None = None,
) -> dict[str, Any]:
    """Run a job to its end and return its figures; the drafter's folder is written whole or not at all.

    cache: folder of answers and checkpoints. resume: go on from the checkpoint of a run with the same plan.
    force: replace a folder that is there. command: what the card says the drafter was made with. compute: of several
    processes, all of which call this, only the first reports, measures, writes and returns figures.
    """
    compute, start = compute or Compute.start(), time.perf_counter()
    report = report if report and compute.first else Silent()
    checkpoint = cache / f"checkpoint-{run_key(plan, compute)}.pt"
    if resume and not checkpoint.is_file():
        raise UserError(f"--resume: {cache} has no checkpoint of a run with these settings; leave out --resume")
    bench = prepare(plan, compute, cache, report)
    taus = run_steps(bench, checkpoint, _begin(bench, checkpoint, resume, report), report)
    if not compute.first:
        return {}
    played = play_held_out(bench)
    figures = collect_figures(bench, taus, played, time.perf_counter() - start)
    write_drafter(output, bench.trainee, plan, figures, played, command, force)
    checkpoint.unlink(missing_ok=True)
    return {"output": str(output), **figures}


def _begin(bench: Bench, checkpoint: Path, resume: bool, report: Report) -> dict[int, Tau]:
    """Go to where the run starts or goes on: tau by step, as measured so far."""
    if resume:
        state = load_state(checkpoint)
        bench.training.load_state(state["training"])
        report.say(f"going on after step {bench.training.step}")
        return dict(state["taus"])
    if not bench.compute.first:
        return {}
    if checkpoint.is_file():
        report.say("starting anew: an unfinished run with these settings is there, which --resume would go on with")
    taus = {0: bench.measure()}
    report.say(f"step 0: {_shown(taus[0])}")
    return taus


def run_steps(bench: Bench, checkpoint: Path, taus: dict[int, Tau], report: Report) -> dict[int, Tau]:
    """All steps that are left, with tau and a checkpoint every so many; `taus` and what is measured here."""
    training, options = bench.training, bench.plan.options
    report.stage("training", options.steps, training.step)
    while training.step < options.steps:
        loss = training.advance()
        report.advance(training.step, f"loss {loss:.3f}, by draft {_by_draft(training)}")
        due = training.step % options.interval == 0 or training.step == options.steps
        if due and bench.compute.first:
            taus[training.step] = bench.measure()
            save_state(checkpoint, {"training": training.state(), "taus": taus})
            report.say(f"step {training.step}: loss {loss:.3f}, {_shown(taus[training.step])}")
    return taus


def _by_draft(training: DrafterTraining) -> str:
    return " ".join(f"{loss:.1f}" for loss in training.slot_losses)


def _shown(tau: Tau) -> str:
    return f"tau {tau['tau_emitted']:.2f} emitted, {tau['tau_accepted']:.2f} accepted a round"


def play_held_out(bench: Bench) -> dict[str, list[Tally]]:
    """Counts of each held-out prompt, greedy and sampled, without the relay too: drafters compare prompt by prompt."""
    ways: dict[str, tuple[bool | None, float]] = {"greedy": (None, 0.0), "sampled": (None, 1.0)}
    if bench.trainee.relays:
        ways |= {"relay_off": (False, 0.0), "relay_off_sampled": (False, 1.0)}
    return {name: bench.tallies(*way) for name, way in ways.items()}


def collect_figures(
    bench: Bench, taus: dict[int, Tau], played: dict[str, list[Tally]], seconds: float
) -> dict[str, Any]:
    """What is known of a finished run; `seconds` since it was last resumed."""
    training = bench.training
    tail = training.losses[-10:]
    return {
        "steps": training.step,
        "loss": round(sum(tail) / len(tail), 4),
        "loss_by_slot": [round(loss, 4) for loss in training.slot_losses],
        **_tau(played["greedy"]),
        "held_out_prompts": len(played["greedy"]),
        "training_tokens": bench.tokens,
        "parameters": count_parameters(training.drafter),
        **bench.trainee.facts,
        "seconds": round(seconds, 1),
        "training_cpu_seconds": round(training.seconds, 1),
        "processes": bench.compute.count,
        "device": bench.compute.device.type,
        "precision": bench.compute.precision,
        "tau_by_step": {str(step): tau for step, tau in taus.items()},
        **{name: _tau(tallies) for name, tallies in played.items() if name != "greedy"},
    }


def count_parameters(module: torch.nn.Module) -> int:
    """Numbers in a module."""
    return sum(parameter.numel() for parameter in module.parameters())


def estimate(plan: Plan, compute: Compute | None = None) -> dict[str, Any]:
    """What a job would take: sizes, and times from a few steps on made-up answers of full length. Writes nothing."""
    compute, options = compute or Compute.start(), plan.options
    model = load_target(plan, compute)
    made_up = _made_up(plan.training[: options.batch_size * options.accumulate], plan)
    training = make_training(plan, compute, make_trainee(plan, model, made_up), made_up)
    drafter, total = training.drafter, len(plan.training) + 2 * len(plan.held_out)
    training.advance()  # the first step reads the batch and allocates
    first = training.seconds
    step = _seconds(lambda: [training.advance() for _ in range(TIMED_STEPS)]) / TIMED_STEPS
    busy = (training.seconds - first) / TIMED_STEPS
    few = [prompt.ids for prompt in plan.training[:16]]
    token = _seconds(lambda: generate(plan, model, few, min(TIMED_TOKENS, options.max_new_tokens), 0.0, 0))
    token /= len(few) * min(TIMED_TOKENS, options.max_new_tokens)
    training_s, answers_s = step * options.steps, token * total * options.max_new_tokens / compute.count
    memory = model.dtype.itemsize * count_parameters(model)
    memory += 16 * count_parameters(drafter)  # float32 weights and gradients, two moments
    on_gpu = compute.device.type == "cuda"
    return {
        "device": compute.device.type,
        "processes": compute.count,
        "precision": compute.precision,
        "parameters": count_parameters(drafter),
        "target_parameters": count_parameters(model),
        "weights_and_optimiser_bytes": memory,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else _peak_resident_bytes(),
        "seconds_a_step": round(step, 4),
        "cpu_seconds_a_step": round(busy, 4),
        "training_seconds": round(training_s, 1),
        "answers_seconds": round(answers_s, 1),
        "device_hours": round((training_s + answers_s) * compute.count / 3600, 3),
        "training_prompts": len(plan.training),
        "held_out_prompts": len(plan.held_out),
    }


def _peak_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _made_up(prompts: Sequence[Prompt], plan: Plan) -> list[Trajectory]:
    """Prompts with answers of full length, whose tokens mean nothing."""
    drawn = np.random.default_rng(plan.options.seed)
    shape = (len(prompts), plan.options.max_new_tokens)
    rows = drawn.integers(0, plan.target.spec.live_vocab, shape).tolist()
    return [Trajectory(prompt.ids, tuple(row)) for prompt, row in zip(prompts, rows, strict=True)]


def _seconds(work: Any) -> float:
    start = time.perf_counter()
    work()  # which ends with numbers on the host, so a GPU has finished too
    return time.perf_counter() - start
