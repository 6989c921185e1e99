"""A drafter's training that can stop at any step and go on later to the same result."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from dflow_trt.errors import UserError
from dflow_trt.files import staged_file
from dflow_trt.training.compute import Compute
from dflow_trt.training.data import Batch
from dflow_trt.training.recipe import DrafterLoss, Optimiser, OptimiserSettings
from dflow_trt.training.target import BatchReader, ReadBatch

READ_BYTES = 2 * 2**30
"""Features, keys and values of batches that are kept in memory; batches beyond that are read anew every time."""


class Reader:
    """Batches as the target reads them, each once while they fit into memory."""

    def __init__(self, target: BatchReader, batches: Sequence[Batch], limit: int = READ_BYTES) -> None:
        self._target, self._batches, self._left = target, batches, limit
        self._kept: dict[int, ReadBatch] = {}

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> ReadBatch:
        if index in self._kept:
            return self._kept[index]
        read = self._target.read(self._batches[index].to(self._target.device))
        if read.nbytes <= self._left:
            self._left -= read.nbytes
            self._kept[index] = read
        return read


class DrafterTraining:
    """Steps of a drafter's training, in place. All that a later step depends on is in `state()`.

    accumulate: batches whose gradients make one step, in every process. losses: one a step, the mean of its rounds and
    batches. slot_losses: cross-entropy of each draft of a round in the last step. seconds: processor time of all steps.
    """

    def __init__(
        self,
        loss: DrafterLoss,
        reader: Reader,
        settings: OptimiserSettings,
        seed: int,
        accumulate: int = 1,
        compute: Compute | None = None,
    ) -> None:
        self.drafter, self.losses, self.slot_losses, self.seconds = loss.drafter, list[float](), list[float](), 0.0
        self._reader, self._settings, self._seed, self._accumulate = reader, settings, seed, accumulate
        self._compute, self._terms = compute or Compute.start(), loss.terms
        self._loss: Any = self._compute.accelerator.prepare(loss)
        self._optimiser = Optimiser(self._loss, settings)

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.losses)

    @property
    def base_share(self) -> float:
        """What a causal head's base logits weigh in the loss: all at first, nothing at the end (arXiv 2605.29707)."""
        return 1.0 - self.step / self._settings.steps

    def advance(self) -> float:
        """One step; returns its loss. UserError, naming step and batch, if loss or gradient is not finite."""
        start = time.process_time()
        self.drafter.train()
        self._optimiser.zero_grad()
        sums = torch.stack([self._backward(at) for at in range(self._accumulate)]).sum(0)
        if not math.isfinite(norm := self._optimiser.update()):
            raise self._diverged("gradient norm", norm, self.batch_index(self._number(self._accumulate - 1)))
        loss, *slots = self._compute.sum(sums).double().tolist()
        drafted = len(slots) // 2
        self.slot_losses = [total / max(1.0, n) for total, n in zip(slots[:drafted], slots[drafted:], strict=True)]
        self.losses.append(loss / (self._accumulate * self._compute.count * self._terms))
        self.drafter.eval()
        self.seconds += time.process_time() - start
        return self.losses[-1]

    def _number(self, at: int) -> int:
        """The number of this step's batch `at` of this process, counted over all steps and processes."""
        return (self.step * self._accumulate + at) * self._compute.count + self._compute.index

    def batch_index(self, number: int) -> int:
        """The batch that is used as that number: every batch once, then all again in another order."""
        turn, place = divmod(number, len(self._reader))
        return random.Random(f"{self._seed}-{turn}").sample(range(len(self._reader)), len(self._reader))[place]

    def _backward(self, at: int) -> torch.Tensor:
        """Add one batch's gradients; its loss, its cross-entropy by slot and its counts, as one vector."""
        number = self._number(at)
        read = self._reader[index := self.batch_index(number)]
        generator = torch.Generator().manual_seed(random.Random(f"{self._seed}-anchors-{number}").getrandbits(63))
        with self._last_or_alone(at):
            with self._compute.autocast():
                loss, slots_K, counts_K = self._loss(read, generator, self.base_share)
            if not math.isfinite(value := loss.item()):
                raise self._diverged("loss", value, index)
            self._optimiser.backward(loss / self._accumulate)
        return torch.cat([loss.detach().float()[None], slots_K.float(), counts_K.float()])

    def _last_or_alone(self, at: int) -> Any:
        """Gradients travel between processes with a step's last batch only."""
        return nullcontext() if at == self._accumulate - 1 else self._compute.accelerator.no_sync(self._loss)

    def _diverged(self, what: str, value: float, batch: int) -> UserError:
        where = f"step {self.step + 1}, batch {batch + 1} of {len(self._reader)}"
        return UserError(f"train: the {what} is {value} at {where}; lower --learning-rate, or look at the target")

    def state(self) -> dict[str, Any]:
        """Model, optimiser, schedule and losses (hence the step, and with it all random numbers)."""
        return {
            "drafter": self.drafter.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "losses": list(self.losses),
            "slot_losses": list(self.slot_losses),
            "seconds": self.seconds,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where `state()` was taken."""
        self.drafter.load_state_dict(state["drafter"])
        self._optimiser.load_state_dict(state["optimiser"])
        self.losses, self.slot_losses = list(state["losses"]), list(state["slot_losses"])
        self.seconds = state["seconds"]


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write a training state, whole or not at all."""
    with staged_file(path) as partial:
        torch.save(state, partial)


def load_state(path: Path) -> dict[str, Any]:
    """Read what `save_state` wrote."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state
