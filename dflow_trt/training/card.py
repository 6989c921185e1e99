"""The folder of a trained drafter: weights and configuration that `dflow-trt build` reads, a record, a card."""

from __future__ import annotations

import json
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from dflow_trt.files import staged_folder
from dflow_trt.training.options import RECORD
from dflow_trt.training.plan import Plan
from dflow_trt.training.shapes import BlockShape, DraftModelShape, Eagle3Shape
from dflow_trt.training.simulate import Tally
from dflow_trt.training.trainee import Trainee

TITLES = {
    "dflash": "DFlash drafter",
    "self-conditioned": "Self-conditioned DFlash drafter",
    "dflow": "DFlow drafter",
    "draft-model": "Draft model",
    "eagle3": "EAGLE-3 head",
}

CARD = """---
library_name: dflow-trt
---
# {title} for {target}

{what}. Trained {start}for {steps} steps on the target's own answers to {prompts} prompts
({tokens:,} tokens), {how}. Seed {seed}; {seconds} of processor time for the steps.

    {command}

Tokens a round on {held_out} held-out prompts, greedy (T = 0) and sampled (T = 1); emitted tokens count the bonus token,
accepted drafts do not:

| drafter | tau_emitted, T = 0 | tau_accepted | tau_emitted, T = 1 | tau_accepted |
| --- | --- | --- | --- | --- |
{rows}

`{record}` has all settings and figures. The licence is yours to add.
"""


def write_drafter(
    output: Path,
    trainee: Trainee,
    plan: Plan,
    figures: dict[str, Any],
    played: dict[str, list[Tally]],
    command: str,
    replace: bool,
) -> None:
    """Write the drafter's folder, whole or not at all; without `replace` one that is there already is refused.

    played: counts of each held-out prompt, by how it was played: rounds, emitted tokens, accepted drafts.
    """
    record = {
        "command": command,
        "target_fingerprint": plan.target.fingerprint,
        "settings": asdict(plan.options) | asdict(plan.shape),
        "from_fingerprint": plan.source.fingerprint if plan.source else None,
        "figures": figures,
        "held_out": {name: [astuple(tally) for tally in tallies] for name, tallies in played.items()},
    }
    with staged_folder(output, replace, "move it, then go on with --resume") as folder:
        trainee.save(folder)
        (folder / "model.safetensors").chmod(0o644)  # safetensors makes it its user's alone
        (folder / RECORD).write_text(json.dumps(record) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(card(plan, figures, command), encoding="utf-8")


def card(plan: Plan, figures: dict[str, Any], command: str) -> str:
    """The model card."""
    return CARD.format(
        title=TITLES[plan.options.mode],
        target=plan.target.path.resolve().name,
        what=_what(plan, figures),
        start=f"on from `{plan.source.path.name}` " if plan.source else "",
        steps=figures["steps"],
        prompts=len(plan.training),
        tokens=figures["training_tokens"],
        how=_how(plan),
        seed=plan.options.seed,
        seconds=f"{figures['training_cpu_seconds']:,.0f} s",
        command=command,
        held_out=figures["held_out_prompts"],
        rows="\n".join(_rows(figures)),
        record=RECORD,
    )


def _what(plan: Plan, figures: dict[str, Any]) -> str:
    """The drafter's kind and sizes, in words."""
    shape, size = plan.shape, f"{figures['parameters']:,} parameters"
    if isinstance(shape, DraftModelShape):
        sizes = f"{_layers(shape.layers)}, hidden size {shape.hidden_size},\n{size}"
        return f"A smaller Qwen3 model with the target's tokenizer: {sizes}"
    taps = ", ".join(map(str, shape.taps))
    if isinstance(shape, Eagle3Shape):
        vocab = f"{shape.draft_vocab} ids, {figures['draft_vocab_share']:.1%} of the answers' tokens"
        return f"An EAGLE-3 head (arXiv 2503.01840) of {size}: taps {taps}, a draft\nvocabulary of {vocab}"
    sizes = f"{_layers(shape.layers)} and {size}: blocks of\n{shape.block_size}, taps {taps}"
    return f"A block drafter (DFlash, arXiv 2602.06036{_parts(shape)}) of {sizes}"


def _layers(count: int) -> str:
    return f"{count} layer{'s' * (count > 1)}"


def _parts(shape: BlockShape) -> str:
    """What the drafter has beside DFlash's parts."""
    relay = "; with the relay of DFlow, arXiv 2609.06498" * (shape.relay_start is not None)
    return relay + "; with the causal head of Domino, arXiv 2605.29707" * (shape.head is not None)


def _how(plan: Plan) -> str:
    """What a step does, in words."""
    if isinstance(plan.shape, DraftModelShape):
        return f"by next-token cross-entropy; a round has {plan.shape.num_drafts} drafts"
    if isinstance(plan.shape, Eagle3Shape):
        return f"unrolled over the {plan.shape.num_drafts} drafts of a round on its own features"
    rounds, relay = plan.options.conditioned_rounds, ", given what the target made of them"
    more = (
        f" and {rounds} more, each from where the drafts before were rejected{relay * (plan.options.mode == 'dflow')}"
    )
    return "one round from masks alone" + more * bool(rounds)


def _rows(figures: dict[str, Any]) -> list[str]:
    measured = {"as trained": (figures, figures["sampled"])}
    if "relay_off" in figures:
        measured["relay off"] = figures["relay_off"], figures["relay_off_sampled"]
    return [f"| {name} | {_cells(greedy)} | {_cells(sampled)} |" for name, (greedy, sampled) in measured.items()]


def _cells(tau: dict[str, Any]) -> str:
    return f"{tau['tau_emitted']:.2f} | {tau['tau_accepted']:.2f}"
