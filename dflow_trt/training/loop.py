"""A drafter's training that can stop at any step and go on later to the same result."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dflow_trt.errors import UserError
from dflow_trt.training.data import Batch
from dflow_trt.training.files import staged_file
from dflow_trt.training.model import Drafter
from dflow_trt.training.recipe import DrafterSettings, Optimiser, rollout_loss
from dflow_trt.training.rollout import spread_anchors
from dflow_trt.training.target import FrozenTarget, ReadBatch

READ_BYTES = 2 * 2**30
"""Features, keys and values of batches that are kept in memory; batches beyond that are read anew every time."""


class Reader:
    """Batches as the target reads them, each once while they fit into memory."""

    def __init__(self, target: FrozenTarget, batches: Sequence[Batch], limit: int = READ_BYTES) -> None:
        self._target, self._batches, self._left = target, batches, limit
        self._kept: dict[int, ReadBatch] = {}

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> ReadBatch:
        if index in self._kept:
            return self._kept[index]
        read = self._target.read(self._batches[index])
        size = sum(tensor.nbytes for pair in read.keys_values for tensor in pair) + read.features_NSC.nbytes
        if size <= self._left:
            self._left -= size
            self._kept[index] = read
        return read


class DrafterTraining:
    """Steps of a drafter's training, in place. All that a later step depends on is in `state()`.

    accumulate: batches whose gradients make one step. losses: one a step, the mean of its rounds and batches.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: FrozenTarget,
        reader: Reader,
        settings: DrafterSettings,
        seed: int,
        accumulate: int = 1,
    ) -> None:
        self.drafter, self.losses = drafter, list[float]()
        self._target, self._reader, self._settings = target, reader, settings
        self._seed, self._accumulate = seed, accumulate
        self._optimiser = Optimiser(drafter, settings.optimiser)
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.losses)

    def advance(self) -> float:
        """One step; returns its loss. UserError, naming step and batch, if loss or gradient is not finite."""
        self.drafter.train()
        self._optimiser.zero_grad()
        first = self.step * self._accumulate
        indices = [self.batch_index(at) for at in range(first, first + self._accumulate)]
        loss = sum(self._backward(index) for index in indices) / self._accumulate
        if not math.isfinite(norm := self._optimiser.update()):
            raise self._diverged("gradient norm", norm, indices[-1])
        self.losses.append(loss)
        self.drafter.eval()
        return loss

    def batch_index(self, at: int) -> int:
        """The batch that is used as number `at`: every batch once, then all again in another order."""
        turn, place = divmod(at, len(self._reader))
        return random.Random(f"{self._seed}-{turn}").sample(range(len(self._reader)), len(self._reader))[place]

    def _backward(self, index: int) -> float:
        read = self._reader[index]
        anchors_NM = spread_anchors(read.batch, self._settings.anchors, self._generator)
        loss = rollout_loss(self.drafter, self._target, read, anchors_NM, self._settings)
        if not math.isfinite(value := loss.item()):
            raise self._diverged("loss", value, index)
        self._optimiser.backward(loss / self._accumulate)
        return value / self._settings.rounds

    def _diverged(self, what: str, value: float, batch: int) -> UserError:
        where = f"step {self.step + 1}, batch {batch + 1} of {len(self._reader)}"
        return UserError(f"train: the {what} is {value} at {where}; lower --learning-rate, or look at the target")

    def state(self) -> dict[str, Any]:
        """Model, optimiser, schedule, random numbers and losses (hence the step)."""
        return {
            "drafter": self.drafter.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "generator": self._generator.get_state(),
            "losses": list(self.losses),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where `state()` was taken."""
        self.drafter.load_state_dict(state["drafter"])
        self._optimiser.load_state_dict(state["optimiser"])
        self._generator.set_state(state["generator"])
        self.losses = list(state["losses"])


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write a training state, whole or not at all."""
    with staged_file(path) as partial:
        torch.save(state, partial)


def load_state(path: Path) -> dict[str, Any]:
    """Read what `save_state` wrote."""
    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state
