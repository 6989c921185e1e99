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
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from dflow_trt.errors import UserError
from dflow_trt.training.cache import AnswerSettings, Ids, answered, digest
from dflow_trt.training.card import write_drafter
from dflow_trt.training.data import Batch, Trajectory, collate
from dflow_trt.training.generate import generate_trajectories
from dflow_trt.training.loop import DrafterTraining, Reader, load_state, save_state
from dflow_trt.training.model import Drafter, with_relay
from dflow_trt.training.plan import DrafterSource, Plan, Prompt
from dflow_trt.training.progress import Report, Silent
from dflow_trt.training.recipe import DrafterSettings, OptimiserSettings
from dflow_trt.training.simulate import simulate, tau_accepted, tau_emitted
from dflow_trt.training.target import FrozenTarget

SHARED_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("hidden_act", "rms_norm_eps", "initializer_range", "max_position_embeddings"),
    *("rope_parameters", "rope_theta", "rope_scaling"),
)
TIMED_STEPS, TIMED_TOKENS = 2, 8
WARMUP_SHARE = 0.04

Tau = dict[str, float]


def set_threads(count: int | None) -> None:
    """CPU threads of everything that follows; None leaves them as they are."""
    if count is not None:
        torch.set_num_threads(count)


def load_target(plan: Plan) -> Any:
    """The target in float32; answers follow this job's settings alone, not those of generation_config.json."""
    library: Any = logging
    library.disable_progress_bar()
    model: Any = Qwen3ForCausalLM.from_pretrained(plan.target.path)
    model = model.float().eval()
    dead = list(range(plan.target.spec.live_vocab, plan.target.spec.vocab_size))
    generation: Any = GenerationConfig
    model.generation_config = generation(suppress_tokens=dead or None)
    return model


def make_drafter(plan: Plan, model: Any, target: FrozenTarget) -> Drafter:
    """The drafter before its first step: new, or that of `--from`; a relay that it lacks is added, adding nothing."""
    with torch.random.fork_rng():
        torch.manual_seed(plan.options.seed)
        if plan.source is None:
            drafter = Drafter(_new_config(plan, model))
            drafter.norm.weight.data.copy_(target.final_norm_E)  # both feed the same head
        else:
            drafter = _read_drafter(plan.source)
        if plan.shape.relay_start is not None and not drafter.has_relay:
            drafter = with_relay(drafter, plan.shape.relay_start)
    return drafter


def _new_config(plan: Plan, model: Any) -> Any:
    known, shape = model.config.to_dict(), plan.shape
    config: Any = Qwen3Config  # which takes any further keys
    return config(
        **{key: known[key] for key in SHARED_KEYS if key in known},
        num_hidden_layers=shape.layers,
        tie_word_embeddings=False,
        use_sliding_window=False,
        block_size=shape.block_size,
        num_target_layers=plan.target.spec.stack.num_layers,
        dflash_config={"mask_token_id": shape.mask_token_id, "target_layer_ids": list(shape.taps)},
    )


def _read_drafter(source: DrafterSource) -> Drafter:
    """A checkpoint in the z-lab layout, in float32, whichever of the two places its drafting keys are in."""
    spec = source.spec
    fields = Qwen3Config.from_pretrained(source.path).to_dict()
    fields = {key: value for key, value in fields.items() if key not in ("dtype", "torch_dtype", "dflow_config")}
    taps = {"mask_token_id": spec.mask_token_id, "target_layer_ids": list(spec.target_layer_ids)}
    fields |= {"dflash_config": taps, "block_size": spec.block_size, "num_target_layers": spec.num_target_layers}
    fields |= {"dflow_config": {"relay_start": spec.relay.start}} if spec.relay else {}
    drafter = Drafter(Qwen3Config.from_dict(fields))
    names = list(drafter.state_dict())
    drafter.load_state_dict({name: torch.from_numpy(source.read(name).astype(np.float32)) for name in names})
    return drafter


def drafter_settings(plan: Plan) -> DrafterSettings:
    """The flags as the training loop takes them."""
    options = plan.options
    warmup = min(50, max(1, round(WARMUP_SHARE * options.steps)))
    optimiser = OptimiserSettings(options.steps, options.learning_rate, warmup_steps=warmup)
    rounds, relay = 1 + options.conditioned_rounds, options.mode == "dflow"
    return DrafterSettings(optimiser, options.anchors, rounds, relay and rounds > 1, options.decay)


@dataclass(frozen=True)
class Bench:
    """The parts of a job: what trains, on what, and what it is measured on."""

    plan: Plan
    target: FrozenTarget
    training: DrafterTraining
    held_out: list[Trajectory]
    tokens: int

    def measure(self, relay: bool | None = None) -> Tau:
        """tau of the drafter as it is now, with its relay unless said."""
        drafter = self.training.drafter
        relay = drafter.has_relay if relay is None else relay
        tallies = simulate(drafter.eval(), self.target, self.held_out, pad_id(self.plan), relay)
        return {"tau_emitted": round(tau_emitted(tallies), 3), "tau_accepted": round(tau_accepted(tallies), 3)}


def pad_id(plan: Plan) -> int:
    """What fills batches: nothing looks at it."""
    return plan.target.spec.pad_id or 0


def prepare(plan: Plan, model: Any, cache: Path, report: Report) -> Bench:
    """Answers (from the cache as far as they are there), batches, drafter."""
    held_out = answers(plan, model, plan.held_out, cache, 0.0, "held out", report)
    training = answers(plan, model, plan.training, cache, plan.options.temperature, "answers", report)
    tokens = sum(len(trajectory.response_ids) for trajectory in training)
    if tokens < plan.shape.block_size or not held_out:
        found = f"{tokens} tokens to train on and {len(held_out)} answers held out"
        raise UserError(f"--prompts: the target's answers of 2 tokens or more give {found}; give more prompts")
    target = FrozenTarget(model, plan.shape.taps)
    return Bench(plan, target, make_training(plan, model, target, training), held_out, tokens)


def make_training(plan: Plan, model: Any, target: FrozenTarget, trajectories: Sequence[Trajectory]) -> DrafterTraining:
    """The loop at its first step; trajectories of similar lengths share a batch."""
    by_length, size, options = sorted(trajectories, key=len), plan.options.batch_size, plan.options
    groups = [by_length[at : at + size] for at in range(0, len(by_length), size)]
    batches: list[Batch] = [collate(group, pad_id(plan)) for group in groups]
    drafter, reader = make_drafter(plan, model, target), Reader(target, batches)
    return DrafterTraining(drafter, target, reader, drafter_settings(plan), options.seed, options.accumulate)


def answers(
    plan: Plan, model: Any, prompts: Sequence[Prompt], cache: Path, temperature: float, title: str, report: Report
) -> list[Trajectory]:
    """The target's answers that have a token to draft: those of 2 tokens or more."""
    options = plan.options
    settings = AnswerSettings(plan.target.fingerprint, options.max_new_tokens, temperature, options.seed)
    report.stage(title, len(prompts))

    def answer(piece: Sequence[Ids], settings: AnswerSettings, seed: int) -> list[Trajectory]:
        return generate(plan, model, piece, settings.max_new_tokens, settings.temperature, seed)

    found = answered(cache, [prompt.ids for prompt in prompts], settings, answer, report.advance)
    return [trajectory for trajectory in found if len(trajectory.response_ids) > 1]


def generate(
    plan: Plan, model: Any, prompts: Sequence[Ids], limit: int, temperature: float, seed: int
) -> list[Trajectory]:
    """The target's answers, drawn by a seed of their own."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        ends, size = plan.target.spec.eos_ids, len(prompts)
        return generate_trajectories(model, prompts, ends, pad_id(plan), limit, size, temperature=temperature)


def run_key(plan: Plan) -> str:
    """A name for everything that a run's result depends on."""
    source = plan.source.fingerprint if plan.source else None
    prompts = [[prompt.ids for prompt in part] for part in (plan.training, plan.held_out)]
    options = {key: value for key, value in asdict(plan.options).items() if key != "every"}
    return digest([plan.target.fingerprint, source, prompts, asdict(plan.shape), options])


def train(
    plan: Plan,
    output: Path,
    cache: Path,
    resume: bool = False,
    force: bool = False,
    command: str = "",
    report: Report | None = None,
) -> dict[str, Any]:
    """Run a job to its end and return its figures; the drafter's folder is written whole or not at all.

    cache: folder of answers and checkpoints. resume: go on from the checkpoint of a run with the same plan.
    force: replace a folder that is there. command: what the card says the drafter was made with.
    """
    report, start = report or Silent(), time.perf_counter()
    checkpoint = cache / f"checkpoint-{run_key(plan)}.pt"
    if resume and not checkpoint.is_file():
        raise UserError(f"--resume: {cache} has no checkpoint of a run with these settings; leave out --resume")
    bench = prepare(plan, load_target(plan), cache, report)
    taus = run_steps(bench, checkpoint, _begin(bench, checkpoint, resume, report), report)
    figures = collect_figures(bench, taus, time.perf_counter() - start)
    write_drafter(output, bench.training.drafter, plan, figures, command, force)
    checkpoint.unlink(missing_ok=True)
    return {"output": str(output), **figures}


def _begin(bench: Bench, checkpoint: Path, resume: bool, report: Report) -> dict[int, Tau]:
    """Go to where the run starts or goes on: tau by step, as measured so far."""
    if resume:
        state = load_state(checkpoint)
        bench.training.load_state(state["training"])
        report.say(f"going on after step {bench.training.step}")
        return dict(state["taus"])
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
        report.advance(training.step, f"loss {loss:.3f}")
        if training.step % options.interval == 0 or training.step == options.steps:
            taus[training.step] = bench.measure()
            save_state(checkpoint, {"training": training.state(), "taus": taus})
            report.say(f"step {training.step}: loss {loss:.3f}, {_shown(taus[training.step])}")
    return taus


def _shown(tau: Tau) -> str:
    return f"tau {tau['tau_emitted']:.2f} emitted, {tau['tau_accepted']:.2f} accepted a round"


def collect_figures(bench: Bench, taus: dict[int, Tau], seconds: float) -> dict[str, Any]:
    """What is known of a finished run; `seconds` since it was last resumed."""
    training, drafter = bench.training, bench.training.drafter
    tail = training.losses[-10:]
    figures = {
        "steps": training.step,
        "loss": round(sum(tail) / len(tail), 4),
        **taus[training.step],
        "held_out_prompts": len(bench.held_out),
        "training_tokens": bench.tokens,
        "parameters": count_parameters(drafter),
        "seconds": round(seconds, 1),
        "tau_by_step": {str(step): tau for step, tau in taus.items()},
    }
    return figures | ({"relay_off": bench.measure(relay=False)} if drafter.has_relay else {})


def count_parameters(module: torch.nn.Module) -> int:
    """Numbers in a module."""
    return sum(parameter.numel() for parameter in module.parameters())


def estimate(plan: Plan) -> dict[str, Any]:
    """What a job would take: sizes, and times from a few steps on made-up answers of full length. Writes nothing."""
    model, options = load_target(plan), plan.options
    target = FrozenTarget(model, plan.shape.taps)
    chosen = plan.training[: options.batch_size * options.accumulate]
    training = make_training(plan, model, target, _made_up(chosen, plan))
    drafter, total = training.drafter, len(plan.training) + len(plan.held_out)
    training.advance()  # the first step reads the batch and allocates
    step = _seconds(lambda: [training.advance() for _ in range(TIMED_STEPS)]) / TIMED_STEPS
    few = [prompt.ids for prompt in plan.training[:16]]
    token = _seconds(lambda: generate(plan, model, few, min(TIMED_TOKENS, options.max_new_tokens), 0.0, 0))
    token /= len(few) * min(TIMED_TOKENS, options.max_new_tokens)
    memory = 4 * count_parameters(model) + 16 * count_parameters(drafter)  # float32; gradient and two moments
    return {
        "parameters": count_parameters(drafter),
        "target_parameters": count_parameters(model),
        "weights_and_optimiser_bytes": memory,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "seconds_a_step": round(step, 4),
        "training_seconds": round(step * options.steps, 1),
        "answers_seconds": round(token * total * options.max_new_tokens, 1),
        "training_prompts": len(plan.training),
        "held_out_prompts": len(plan.held_out),
    }


def _made_up(prompts: Sequence[Prompt], plan: Plan) -> list[Trajectory]:
    """Prompts with answers of full length, whose tokens mean nothing."""
    drawn = np.random.default_rng(plan.options.seed)
    shape = (len(prompts), plan.options.max_new_tokens)
    rows = drawn.integers(0, plan.target.spec.live_vocab, shape).tolist()
    return [Trajectory(prompt.ids, tuple(row)) for prompt, row in zip(prompts, rows, strict=True)]


def _seconds(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
