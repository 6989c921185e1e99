"""A draft model in training: a smaller Qwen3 with the target's tokenizer, for :mod:`dflow_trt.training.job`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from dflow_trt.training.plan import Plan
from dflow_trt.training.recipe import DrafterLoss, cross_entropy
from dflow_trt.training.shapes import DraftModelShape
from dflow_trt.training.simulate import Play, serial_rounds
from dflow_trt.training.target import ReadBatch, TextAlone, attention_bias, cache_argument, verify_mask
from dflow_trt.training.trainee import STACK_KEYS, TOKEN_KEYS, taken_over


class NextTokenLoss(DrafterLoss):
    """Cross-entropy of every response token that can be drafted: all but the first, which the prefill gives."""

    def __init__(self, drafter: Any) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(
        self, read: ReadBatch, generator: torch.Generator, base_share: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See :class:`DrafterLoss`; the sums are over all drafts, as one."""
        drafter: Any = self.drafter
        batch = read.batch
        position_S = torch.arange(1, batch.ids_NS.shape[1], device=batch.ids_NS.device)
        drafted_NS = (position_S > batch.start_N[:, None]) & (position_S < batch.end_N[:, None])
        hidden_NSE = drafter.model(input_ids=batch.ids_NS[:, :-1], use_cache=False).last_hidden_state
        entropy_R = cross_entropy(drafter.lm_head(hidden_NSE[drafted_NS]), batch.ids_NS[:, 1:][drafted_NS])
        return entropy_R.mean(), entropy_R.detach().sum()[None], drafted_NS.sum()[None]


class DraftModelTrainee:
    """See :class:`dflow_trt.training.trainee.Trainee`."""

    relays = False

    def __init__(self, plan: Plan, shape: DraftModelShape, target_model: Any) -> None:
        self._files, self._live = plan.target.tokenizer_files, plan.target.spec.live_vocab
        self._num_drafts = shape.num_drafts
        self.model = make_model(shape, target_model.config, plan.options.seed)
        self.reader, self.loss = TextAlone(target_model.device), NextTokenLoss(self.model)
        self.facts: dict[str, Any] = {}

    def rounds(self, read: ReadBatch, relay: bool) -> Play:
        """Greedy drafts, one after another; it reads the text once."""
        texts = ReadTexts(self.model, read.batch.ids_NS, self._live)
        return serial_rounds(read.batch, lambda anchors_N1: texts.draft(anchors_N1, self._num_drafts))

    def save(self, folder: Path) -> None:
        """A folder that transformers loads, with the target's tokenizer."""
        self.model.save_pretrained(folder)
        for path in self._files:
            shutil.copyfile(path, folder / path.name)


def make_model(shape: DraftModelShape, target_config: Any, seed: int) -> Any:
    """A random model whose head is its embedding."""
    config = Qwen3Config(
        **taken_over(target_config, (*STACK_KEYS, *TOKEN_KEYS)),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=True,
        use_sliding_window=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


class ReadTexts:
    """Whole texts that a draft model has read once, and its drafts after any of their tokens."""

    def __init__(self, model: Any, ids_NS: torch.Tensor, live_vocab: int) -> None:
        self._model, self._ids_NS, self._live = model, ids_NS, live_vocab
        self._argument = cache_argument(model)
        cache: Any = DynamicCache()
        self._hidden_NSE = self._run(cache, input_ids=ids_NS)
        self._keys_values = [(layer.keys, layer.values) for layer in cache.layers]

    def draft(self, anchors_N1: torch.Tensor, count: int) -> torch.Tensor:
        """The greedy drafts [N, 1, K] after the anchors."""
        length, cache = self._ids_NS.shape[1], self._cache()
        visible_N1QL = verify_mask(anchors_N1, count - 1, length)
        bias_N1QL = attention_bias(visible_N1QL, self._hidden_NSE.dtype)
        at_anchor_N1E = anchors_N1[..., None].expand(-1, -1, self._hidden_NSE.shape[-1])
        drafts = [self._choose(self._hidden_NSE.gather(1, at_anchor_N1E))]
        for step in range(1, count):
            row = {"input_ids": drafts[-1], "position_ids": anchors_N1 + step}
            seen = bias_N1QL[:, :, step - 1 : step, : length + step]
            drafts.append(self._choose(self._run(cache, **row, attention_mask=seen)))
        return torch.stack(drafts, dim=-1)

    def _choose(self, hidden_N1E: torch.Tensor) -> torch.Tensor:
        chosen_N1: torch.Tensor = self._model.lm_head(hidden_N1E)[..., : self._live].argmax(-1)
        return chosen_N1

    def _cache(self) -> Any:
        cache: Any = DynamicCache()
        for layer, (keys, values) in enumerate(self._keys_values):
            cache.update(keys, values, layer)
        return cache

    def _run(self, cache: Any, **inputs: torch.Tensor) -> torch.Tensor:
        found = self._model.model(use_cache=True, **{self._argument: cache}, **inputs)
        hidden: torch.Tensor = found.last_hidden_state
        return hidden
