"""Training loops and losses: a small target language model, and block drafters for a frozen target."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from dflow_trt.training.data import Batch
from dflow_trt.training.model import Drafter
from dflow_trt.training.rollout import Round, next_anchors, play_round, relay_inputs, spread_anchors
from dflow_trt.training.target import FrozenTarget, ReadBatch

OnStep = Callable[[int, float], None]


@dataclass(frozen=True)
class OptimiserSettings:
    """AdamW with linear warm-up and a cosine decay to a tenth of the learning rate."""

    steps: int
    learning_rate: float
    warmup_steps: int = 50
    weight_decay: float = 0.01
    clip_norm: float = 1.0


@dataclass(frozen=True)
class DrafterSettings:
    """How a drafter is trained.

    `anchors`: blocks a sequence and step. `rounds`: 1 is DFlash; more continue from where the drafts of the
    round before were rejected (self-conditioning). `relay`: hand the verified states of rejected drafts to
    the next round (DFlow). `decay`: slot j of a round weighs exp(-(j - 1) / decay). `roll_out`: the drafts of a
    causal head are its own, as in decoding; without it they are what it would draft after the true tokens.
    """

    anchors: int = 8
    rounds: int = 1
    relay: bool = False
    decay: float = 4.0
    roll_out: bool = True


class DrafterLoss(nn.Module):
    """What the steps of a training make smaller.

    drafter: what is trained; no other parameter belongs to this module. terms: how many losses `forward` sums.
    """

    drafter: nn.Module
    terms = 1

    def forward(
        self, read: ReadBatch, generator: torch.Generator, base_share: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The summed loss of a batch; the sum of cross-entropies by draft [K], and how many there were [K].

        generator: of whatever is drawn. base_share: see :func:`round_loss`.
        """
        raise NotImplementedError


class RolloutLoss(DrafterLoss):
    """The loss of a drafter on trajectories that the target generated (DFlow, arXiv 2609.06498).

    Round 1 drafts at random anchors from masks alone. Every further round starts where the drafts of the one
    before were rejected; with `relay`, those *actual drafts* run through the frozen target and their states
    condition the new round. The loss is cross-entropy against the trajectory, summed over rounds. Gradients
    reach W_c through context and relayed states; drafts, anchors and the target's features carry none.
    """

    def __init__(self, drafter: Drafter, target: FrozenTarget, settings: DrafterSettings) -> None:
        super().__init__()
        self.drafter: Drafter = drafter
        self._target, self._settings, self.terms = target, settings, settings.rounds

    def forward(
        self, read: ReadBatch, generator: torch.Generator, base_share: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See :class:`DrafterLoss`; the sums are over all rounds."""
        drafter, target, settings = self.drafter, self._target, self._settings
        anchors_NM = spread_anchors(read.batch, settings.anchors, generator)
        context_NSE = drafter.context(read.features_NSC)
        played = play_round(drafter, target, read, context_NSE, anchors_NM, roll_out=settings.roll_out)
        loss, slots_K, counts_K = round_loss(played, settings.decay, base_share)
        for _ in range(settings.rounds - 1):
            relayed = relay_inputs(drafter, target, read, played) if settings.relay else None
            anchors_NM = next_anchors(read.batch, played)
            played = play_round(drafter, target, read, context_NSE, anchors_NM, relayed, settings.roll_out)
            parts = round_loss(played, settings.decay, base_share)
            loss, slots_K, counts_K = loss + parts[0], slots_K + parts[1], counts_K + parts[2]
        return loss, slots_K, counts_K


def round_loss(played: Round, decay: float, base_share: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weighted mean cross-entropy of slots 1..K; its plain sum [K] and count [K] by slot. Nothing counts past the end.

    Slot j weighs exp(-(j - 1) / decay). `base_share` is the part that a causal head's base logits have in the loss.
    """
    entropy_NMK = loss_NMK = cross_entropy(played.logits_NMKV, played.truth_NMK)
    if played.base_NMKV is not played.logits_NMKV:
        loss_NMK = (1 - base_share) * entropy_NMK + base_share * cross_entropy(played.base_NMKV, played.truth_NMK)
    loss = decayed_mean(loss_NMK, played.valid_NMK, decay)
    return loss, (entropy_NMK.detach() * played.valid_NMK).sum((0, 1)), played.valid_NMK.sum((0, 1))


def decayed_mean(loss_NMK: torch.Tensor, valid_NMK: torch.Tensor, decay: float) -> torch.Tensor:
    """The weighted mean of valid losses, where draft j weighs exp(-(j - 1) / decay)."""
    slot_K = torch.arange(loss_NMK.shape[-1], device=loss_NMK.device)
    weight_NMK = torch.exp(-slot_K / decay) * valid_NMK
    return (loss_NMK * weight_NMK).sum() / weight_NMK.sum().clamp(min=1.0)


def cross_entropy(logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Cross-entropy [...] of logits [..., V] against ids [...], in float32."""
    losses = F.cross_entropy(logits.flatten(0, -2).float(), truth.flatten(), reduction="none")
    return losses.view_as(truth)


def train_language_model(
    model: nn.Module,
    batches: Iterator[Batch],
    settings: OptimiserSettings,
    prompt_weight: float = 0.0,
    bf16: bool = False,
    on_step: OnStep | None = None,
) -> None:
    """Next-token training of a transformers causal LM, in place; prompt tokens count `prompt_weight`."""
    model.train()
    optimiser = Optimiser(model, settings)
    for step in range(settings.steps):
        batch = next(batches)
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            logits_NSV = model(input_ids=batch.ids_NS[:, :-1], use_cache=False).logits
        weight_NS = _token_weights(batch, prompt_weight)[:, 1:]
        loss_NS = F.cross_entropy(logits_NSV.float().transpose(1, 2), batch.ids_NS[:, 1:], reduction="none")
        loss = (loss_NS * weight_NS).sum() / weight_NS.sum()
        optimiser.step(loss)
        if on_step is not None:
            on_step(step, loss.item())
    model.eval()


def _token_weights(batch: Batch, prompt_weight: float) -> torch.Tensor:
    """The weights of response tokens, `prompt_weight` for prompt tokens, 0 for padding: [N, S]."""
    in_prompt_NS = torch.arange(batch.ids_NS.shape[1]) < batch.start_N[:, None]
    return torch.where(in_prompt_NS, prompt_weight, batch.weight_NS)


class Optimiser:
    """AdamW, its schedule and gradient clipping behind one `step(loss)`, or its parts for several losses."""

    def __init__(self, module: nn.Module, settings: OptimiserSettings) -> None:
        self._settings = settings
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in self._parameters if parameter.ndim >= 2]
        vectors = [parameter for parameter in self._parameters if parameter.ndim < 2]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            groups, lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=settings.weight_decay
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._adamw, self._scale)

    def _scale(self, step: int) -> float:
        if step < self._settings.warmup_steps:
            return (step + 1) / self._settings.warmup_steps
        progress = (step - self._settings.warmup_steps) / max(1, self._settings.steps - self._settings.warmup_steps)
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    def step(self, loss: torch.Tensor) -> None:
        """One update from one loss."""
        self.zero_grad()
        self.backward(loss)
        self.update()

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        self._adamw.zero_grad(set_to_none=True)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a loss."""
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self) -> float:
        """Clip the gradients and take the step; returns their norm before. Without a finite norm nothing moves on."""
        norm = float(nn.utils.clip_grad_norm_(self._parameters, self._settings.clip_norm))
        if math.isfinite(norm):
            self._adamw.step()
            self._schedule.step()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Moments and schedule."""
        return {"adamw": self._adamw.state_dict(), "schedule": self._schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._adamw.load_state_dict(state["adamw"])
        self._schedule.load_state_dict(state["schedule"])
