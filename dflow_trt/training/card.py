"""The folder of a trained drafter: weights and configuration that `dflow-trt build` reads, a record, a card."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflow_trt.training.files import staged_folder
from dflow_trt.training.model import Drafter
from dflow_trt.training.plan import RECORD, Plan

TITLES = {"dflash": "DFlash drafter", "self-conditioned": "Self-conditioned DFlash drafter", "dflow": "DFlow drafter"}

CARD = """---
library_name: dflow-trt
---
# {title} for {target}

A block drafter (DFlash, arXiv 2602.06036{relay}) of {layers} and {parameters:,} parameters: blocks of
{block}, taps {taps}. Trained for {steps} steps on the target's own answers to {prompts} prompts ({tokens:,} tokens),
{how}. Seed {seed}.

    {command}

Tokens a round on {held_out} held-out prompts, greedy; emitted tokens count the bonus token, accepted drafts do not:

| drafter | tau_emitted | tau_accepted |
| --- | --- | --- |
{rows}

`{record}` has all settings and figures. The licence is yours to add.
"""


def write_drafter(
    output: Path, drafter: Drafter, plan: Plan, figures: dict[str, Any], command: str, replace: bool
) -> None:
    """Write the drafter's folder, whole or not at all; without `replace` one that is there already is refused."""
    record = {
        "command": command,
        "target_fingerprint": plan.target.fingerprint,
        "settings": asdict(plan.options) | asdict(plan.shape),
        "from_fingerprint": plan.source.fingerprint if plan.source else None,
        "figures": figures,
    }
    with staged_folder(output, replace) as folder:
        drafter.save(folder)
        (folder / "model.safetensors").chmod(0o644)  # safetensors makes it its user's alone
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(card(plan, figures, command), encoding="utf-8")


def card(plan: Plan, figures: dict[str, Any], command: str) -> str:
    """The model card."""
    return CARD.format(
        title=TITLES[plan.options.mode],
        target=plan.target.path.resolve().name,
        relay="; with the relay of DFlow, arXiv 2609.06498" if plan.shape.relay_start else "",
        layers=f"{plan.shape.layers} layer{'s' * (plan.shape.layers > 1)}",
        parameters=figures["parameters"],
        block=plan.shape.block_size,
        taps=", ".join(map(str, plan.shape.taps)),
        steps=figures["steps"],
        prompts=len(plan.training),
        tokens=figures["training_tokens"],
        how=_how(plan),
        seed=plan.options.seed,
        command=command,
        held_out=figures["held_out_prompts"],
        rows="\n".join(_rows(figures)),
        record=RECORD,
    )


def _how(plan: Plan) -> str:
    """The rounds of a step, in words."""
    rounds, relay = (
        plan.options.conditioned_rounds,
        ", given what the target made of them" * (plan.options.mode == "dflow"),
    )
    more = f" and {rounds} more, each from where the drafts before were rejected{relay}"
    return "one round from masks alone" + more * bool(rounds)


def _rows(figures: dict[str, Any]) -> list[str]:
    measured = {"as trained": figures} | ({"relay off": figures["relay_off"]} if "relay_off" in figures else {})
    return [f"| {name} | {tau['tau_emitted']:.2f} | {tau['tau_accepted']:.2f} |" for name, tau in measured.items()]
