"""A DFlash, DFlow or Domino drafter in training, for :mod:`dflow_trt.training.job`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config

from dflow_trt.spec import DominoSpec
from dflow_trt.training.model import Drafter, extended, head_fields
from dflow_trt.training.options import DrafterSource, Options
from dflow_trt.training.plan import Plan
from dflow_trt.training.recipe import DrafterSettings, RolloutLoss
from dflow_trt.training.shapes import BlockShape
from dflow_trt.training.simulate import Play, block_rounds
from dflow_trt.training.target import FrozenTarget, ReadBatch
from dflow_trt.training.trainee import STACK_KEYS, taken_over

HEAD_KEYS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")


class BlockTrainee:
    """See :class:`dflow_trt.training.trainee.Trainee`."""

    def __init__(self, plan: Plan, shape: BlockShape, model: Any) -> None:
        self.reader = FrozenTarget(model, shape.taps)
        self.drafter = make_drafter(plan, shape, model, self.reader)
        self.loss = RolloutLoss(self.drafter, self.reader, drafter_settings(plan.options))
        self.relays, self.facts = self.drafter.has_relay, dict[str, Any]()

    def rounds(self, read: ReadBatch, relay: bool) -> Play:
        """Blocks from masks, with the relay or without."""
        return block_rounds(self.drafter, self.reader, read, relay)

    def save(self, folder: Path) -> None:
        """The layout of released DFlash drafters."""
        self.drafter.save(folder)


def drafter_settings(options: Options) -> DrafterSettings:
    """The flags as the loss takes them."""
    rounds, relay = 1 + options.conditioned_rounds, options.mode == "dflow"
    roll_out = options.rollout != "teacher-forced"
    assert options.anchors is not None, "settled by the plan"
    assert options.decay is not None, "settled by the plan"
    return DrafterSettings(options.anchors, rounds, relay and rounds > 1, options.decay, roll_out)


def make_drafter(plan: Plan, shape: BlockShape, model: Any, target: FrozenTarget) -> Drafter:
    """The drafter before its first step: new, or that of `--from`; relay and head that it lacks add nothing yet."""
    with torch.random.fork_rng():
        torch.manual_seed(plan.options.seed)
        if plan.source is None:
            drafter = Drafter(_new_config(plan, shape, model))
            drafter.norm.weight.data.copy_(target.final_norm_E)  # both feed the same head
        else:
            drafter = _read_drafter(plan.source)
        relay_start = None if drafter.has_relay else shape.relay_start
        head = None if drafter.head else shape.head
        return extended(drafter, relay_start, head) if relay_start or head else drafter


def _new_config(plan: Plan, shape: BlockShape, model: Any) -> Any:
    config: Any = Qwen3Config  # which takes any further keys
    return config(
        **taken_over(model.config, (*STACK_KEYS, *HEAD_KEYS)),
        intermediate_size=shape.intermediate_size,
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
    taps |= head_fields(spec.head) if isinstance(spec.head, DominoSpec) else {}
    fields |= {"dflash_config": taps, "block_size": spec.block_size, "num_target_layers": spec.num_target_layers}
    fields |= {"dflow_config": {"relay_start": spec.relay.start}} if spec.relay else {}
    drafter = Drafter(Qwen3Config.from_dict(fields))
    names = list(drafter.state_dict())
    drafter.load_state_dict({name: torch.from_numpy(source.read(name).astype(np.float32)) for name in names})
    return drafter
