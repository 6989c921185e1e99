"""The frozen target as the drafter's training sees it: tapped features, and verification of actual drafts."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional as F
from transformers import DynamicCache

from dflow_trt.training.data import Batch


@dataclass(frozen=True)
class ReadBatch:
    """A batch that the target has read once: its tapped features and its keys and values, one pair a layer."""

    batch: Batch
    features_NSC: torch.Tensor
    keys_values: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of features, keys and values."""
        return self.features_NSC.nbytes + sum(tensor.nbytes for pair in self.keys_values for tensor in pair)


class BatchReader(Protocol):
    """What turns a batch on its device into what training takes of it."""

    @property
    def device(self) -> torch.device:
        """Where batches have to be."""

    def read(self, batch: Batch) -> ReadBatch:
        """What the target makes of a batch."""


@dataclass(frozen=True)
class TextAlone:
    """In a target's place where a drafter learns from the target's texts alone."""

    device: torch.device

    def read(self, batch: Batch) -> ReadBatch:
        """The batch, with nothing beside it."""
        return ReadBatch(batch, torch.empty(0), ())


class FrozenTarget:
    """A transformers causal LM that is read from, never trained.

    `target_layer_ids`: a tap L is the *output* of decoder layer L, before the final norm; taps are
    concatenated in the order given. Only layers up to the last tap run: nothing here needs the target's own
    logits.
    """

    def __init__(self, model: Any, target_layer_ids: Sequence[int]) -> None:
        if any(kind != "full_attention" for kind in getattr(model.config, "layer_types", None) or []):
            raise ValueError("training supports targets with full attention in every layer only")
        model.requires_grad_(False).eval()
        self.embedding_VE: torch.Tensor = model.get_input_embeddings().weight
        self.head_VE: torch.Tensor = model.get_output_embeddings().weight
        self.final_norm_E: torch.Tensor = model.model.norm.weight
        self._taps = list(target_layer_ids)
        self._cache_argument = cache_argument(model)
        # A second view of the same layers that ends at the last tap; the model itself stays whole.
        self._trunk = copy.copy(model.model)
        self._trunk._modules = dict(model.model._modules)
        self._trunk.layers = model.model.layers[: max(self._taps) + 1]

    @property
    def device(self) -> torch.device:
        """Where the target's weights are."""
        return self.embedding_VE.device

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's output head on the drafter's final hidden states [..., E]: [..., V]."""
        return F.linear(hidden, self.head_VE)

    @torch.no_grad()
    def read(self, batch: Batch) -> ReadBatch:
        """One causal pass over whole sequences."""
        cache: Any = DynamicCache()
        features_NSC = self._run(cache, input_ids=batch.ids_NS)
        return ReadBatch(batch, features_NSC, tuple((layer.keys, layer.values) for layer in cache.layers))

    @torch.no_grad()
    def verify(self, read: ReadBatch, anchors_NM: torch.Tensor, drafts_NMK: torch.Tensor) -> torch.Tensor:
        """Tapped features [N, M, K, C] of the rows whose inputs are the actual drafts d_1..d_K.

        Row i stands at position anchor + i and sees the sequence up to its anchor and the drafts up to
        itself, just as in the verify pass of decoding. (The anchor's own row is that of the sequence.)
        """
        batch, blocks, drafted = drafts_NMK.shape
        cache: Any = DynamicCache()
        for layer, (keys, values) in enumerate(read.keys_values):
            cache.update(keys, values, layer)
        positions_NQ = (anchors_NM[:, :, None] + torch.arange(1, drafted + 1, device=anchors_NM.device)).flatten(1)
        visible_N1QL = verify_mask(anchors_NM, drafted, read.batch.ids_NS.shape[1])
        features_NQC = self._run(
            cache,
            input_ids=drafts_NMK.flatten(1),
            position_ids=positions_NQ,
            attention_mask=attention_bias(visible_N1QL, self.embedding_VE.dtype),
        )
        return features_NQC.view(batch, blocks, drafted, -1)

    def _run(self, cache: Any, **inputs: torch.Tensor) -> torch.Tensor:
        tapped: dict[int, torch.Tensor] = {}

        def keep(layer: int, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
            tapped[layer] = output if isinstance(output, torch.Tensor) else output[0]

        hooks = [
            self._trunk.layers[tap].register_forward_hook(lambda _m, _i, output, tap=tap: keep(tap, output))
            for tap in self._taps
        ]
        try:
            self._trunk(use_cache=True, **{self._cache_argument: cache}, **inputs)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat([tapped[tap] for tap in self._taps], dim=-1)


def cache_argument(model: Any) -> str:
    """What a transformers decoder calls its cache: version 5 renames it, and warns about the older name."""
    return "cache" if "cache" in inspect.signature(model.model.forward).parameters else "past_key_values"


def attention_bias(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask of who sees whom as transformers adds it to scores."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


def verify_mask(anchors_NM: torch.Tensor, drafted: int, length: int) -> torch.Tensor:
    """Who sees whom in `verify`, bool [N, 1, M * K, S + M * K]: rows up to the anchor, own drafts causally."""
    blocks, device = anchors_NM.shape[1], anchors_NM.device
    sees_sequence_NMS = torch.arange(length, device=device) <= anchors_NM[:, :, None]
    sees_sequence_NQS = sees_sequence_NMS.repeat_interleave(drafted, dim=1)
    index_Q = torch.arange(blocks * drafted, device=device)
    same_block_QQ = (index_Q[:, None] // drafted) == (index_Q // drafted)
    causal_QQ = index_Q[:, None] >= index_Q
    sees_drafts_NQQ = (same_block_QQ & causal_QQ).expand(len(anchors_NM), -1, -1)
    return torch.cat([sees_sequence_NQS, sees_drafts_NQQ], dim=-1)[:, None]
