"""A drafter in training: what a job knows of it, whatever its kind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from dflow_trt.training.recipe import DrafterLoss
from dflow_trt.training.simulate import Play
from dflow_trt.training.target import BatchReader, ReadBatch

STACK_KEYS = (
    *("vocab_size", "hidden_act", "rms_norm_eps", "initializer_range", "max_position_embeddings"),
    *("rope_parameters", "rope_theta", "rope_scaling"),
)
"""What every new drafter's configuration takes over from the target's."""
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


class Trainee(Protocol):
    """A drafter in training.

    loss: what its steps make smaller. reader: what reads its batches. relays: whether it has a relay, which can be off.
    facts: what its data decided, for the record.
    """

    @property
    def loss(self) -> DrafterLoss: ...

    @property
    def reader(self) -> BatchReader: ...

    @property
    def relays(self) -> bool: ...

    @property
    def facts(self) -> dict[str, Any]: ...

    def rounds(self, read: ReadBatch, relay: bool) -> Play:
        """How it drafts, in every round of a batch."""

    def save(self, folder: Path) -> None:
        """Write what it is built from."""


def taken_over(config: Any, keys: Sequence[str]) -> dict[str, Any]:
    """These keys of the target's configuration, as far as it has them."""
    known = config.to_dict()
    return {key: known[key] for key in keys if key in known}
