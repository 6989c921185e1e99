"""What the decoder asks of a runtime. ONNX Runtime, TensorRT and the scripted fake of the tests all give this."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from dflow_trt.runtime.draw import Draw

Array = np.ndarray[Any, np.dtype[Any]]
Drawer = Callable[[Sequence[Draw]], Array]


class Runtime(Protocol):
    """Engines over a fixed number of slots.

    A slot is one row of every KV cache and of ``pending_h``. The tensors that the contract calls "device" stay inside
    the runtime: the target leaves ``hidden`` for the context, the context ``h``, the relay ``block_embeds``. The rows
    of ``h`` that are kept are ``pending_h`` of later calls.
    """

    @property
    def drawer(self) -> Drawer | None:
        """Draws tokens where the logits are, see :mod:`dflow_trt.runtime.draw`; None where logits must be fetched."""
        ...

    def run(
        self, engine: str, drafter: str | None, slots: range, feeds: Mapping[str, Array], fetch: Sequence[str] = ()
    ) -> list[Array]:
        """One engine call on adjacent slots: host inputs by name in, the host outputs named by ``fetch`` back.

        The arrays that come back are valid until the next call of the same engine.
        """
        ...

    def keep_pending(self, drafter: str, rows: Mapping[int, int], slots: range) -> None:
        """Keep ``h`` of the drafter's last call that gave it (on ``slots``): the first rows[slot] rows of each slot
        named there."""
        ...

    def swap(self, a: int, b: int, rows: int) -> None:
        """Exchange two slots: the first ``rows`` rows of every cache, and all of ``pending_h``."""
        ...

    def close(self) -> None:
        """Release engines and memory; nothing may be called afterwards."""
        ...
