"""Where training runs: device, precision, and the processes that `accelerate launch` started."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Self

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs

from dflow_trt.errors import UserError

Precision = Literal["float32", "bfloat16"]

LONGEST_WAIT = timedelta(days=2)
"""One process may answer prompts for hours while the others wait for it."""
ALLOWED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


@dataclass(frozen=True)
class Compute:
    """The `accelerate` environment of this process; without a launcher it is one process on the GPU, else the CPU."""

    accelerator: Any
    precision: Precision

    @classmethod
    def start(cls, precision: Precision | None = None) -> Self:
        """precision: of matrix products; by default bfloat16 on a GPU and float32 on a CPU. Weights stay float32."""
        chosen = precision or ("bfloat16" if torch.cuda.is_available() else "float32")
        wait = InitProcessGroupKwargs(timeout=LONGEST_WAIT)
        # Its own mixed precision is one setting for the whole process; `autocast` is this run's.
        accelerator: Any = Accelerator(mixed_precision="no", kwargs_handlers=[wait])
        if accelerator.distributed_type not in ALLOWED:
            kind = accelerator.distributed_type.value
            raise UserError(
                f"train: accelerate is configured for {kind}; allowed: one process or plain data parallelism "
                "(a drafter is small, and every process holds the target); run accelerate launch --multi_gpu"
            )
        return cls(accelerator, chosen)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.accelerator.device
        return device

    @property
    def count(self) -> int:
        """Processes."""
        return int(self.accelerator.num_processes)

    @property
    def index(self) -> int:
        """This process."""
        return int(self.accelerator.process_index)

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes."""
        return bool(self.accelerator.is_main_process)

    @property
    def target_dtype(self) -> torch.dtype:
        """The frozen target's weights: bfloat16 where it computes in it on a GPU, to save memory."""
        return torch.bfloat16 if self.precision == "bfloat16" and self.device.type == "cuda" else torch.float32

    def wait(self) -> None:
        """Until every process is here."""
        self.accelerator.wait_for_everyone()

    def close(self) -> None:
        """Leave the other processes: one whose threads still wait for them may abort as it exits."""
        self.accelerator.end_training()

    def autocast(self) -> Any:
        """A context in which matrix products run in the precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16")

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor summed over all processes."""
        total: torch.Tensor = self.accelerator.reduce(tensor, reduction="sum")
        return total
