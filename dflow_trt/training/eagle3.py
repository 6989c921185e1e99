"""An EAGLE-3 head (arXiv 2503.01840) in torch: its layer, its drafts, and its training on its own features.

Row p stands at position p and carries (g_p, E(t_{p+1})): what W_c makes of the target's taps there, and the token after
it; it drafts t_{p+2}. A chain goes on from such a row: the next row carries the layer's output, as the feature of the
position that the target has not computed yet, and the token that was drafted. Shape suffixes are those of `data.py`;
here M chains of a sequence, one from each anchor, R rows, J heads of a key/value head, W ids of the draft vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dflow_trt.training.data import Trajectory
from dflow_trt.training.model import DrafterMLP, rotate
from dflow_trt.training.plan import Plan
from dflow_trt.training.recipe import DrafterLoss, cross_entropy, decayed_mean
from dflow_trt.training.rollout import trajectory_after
from dflow_trt.training.shapes import Eagle3Shape
from dflow_trt.training.simulate import Play, serial_rounds
from dflow_trt.training.target import FrozenTarget, ReadBatch
from dflow_trt.training.trainee import STACK_KEYS, TOKEN_KEYS, taken_over

ARCHITECTURE = "LlamaForCausalLMEagle3"
TAPS = "eagle_aux_hidden_state_layer_ids"

Rotary = tuple[torch.Tensor, torch.Tensor]
KeysValues = tuple[torch.Tensor, torch.Tensor]
"""Keys and values [N, H, R, D] of the key/value heads."""


class Eagle3Attention(nn.Module):
    """Llama's attention, whose inputs are twice as wide as its output."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim, self.kv_heads = config.head_dim, config.num_key_value_heads
        query_size, kv_size = config.num_attention_heads * config.head_dim, self.kv_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)

    def keys_values(self, x_NRE: torch.Tensor, rotary: Rotary) -> KeysValues:
        """Of any rows, at the positions that `rotary` is of."""
        keys_NHRD = rotate(self._heads(self.k_proj(x_NRE)), rotary, x_NRE.shape[1])
        return keys_NHRD, self._heads(self.v_proj(x_NRE))

    def forward(
        self,
        x_NME: torch.Tensor,
        rotary: Rotary,
        text: KeysValues,
        visible_NMS: torch.Tensor,
        chain: Sequence[KeysValues],
    ) -> torch.Tensor:
        """Every chain's newest row sees the text's rows that are `visible_NMS`, and the chain's own rows."""
        queries_NHMD = rotate(self._heads(self.q_proj(x_NME)), rotary, x_NME.shape[1])
        batch, _, length, _ = queries_NHMD.shape
        queries_NHJMD = queries_NHMD.view(batch, self.kv_heads, -1, length, self.head_dim) * self.head_dim**-0.5
        keys_NH1SD, values_NH1SD = (tensor[:, :, None] for tensor in text)
        scores = (queries_NHJMD @ keys_NH1SD.transpose(-1, -2)).masked_fill(~visible_NMS[:, None, None], -torch.inf)
        own = [(queries_NHJMD * keys[:, :, None]).sum(-1, keepdim=True) for keys, _ in chain]
        weights = torch.cat([scores, *own], dim=-1).softmax(-1)
        attended_NHJMD = weights[..., : scores.shape[-1]] @ values_NH1SD
        for index, (_, values) in enumerate(chain, scores.shape[-1]):
            attended_NHJMD = attended_NHJMD + weights[..., index : index + 1] * values[:, :, None]
        output_NME: torch.Tensor = self.o_proj(attended_NHJMD.flatten(1, 2).transpose(1, 2).flatten(2))
        return output_NME

    def _heads(self, projected_NRX: torch.Tensor) -> torch.Tensor:
        batch, length, _ = projected_NRX.shape
        return projected_NRX.view(batch, length, -1, self.head_dim).transpose(1, 2)


class Eagle3Layer(nn.Module):
    """A pre-norm layer over [embedding ; feature], each behind a norm of its own; the feature is the residual."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = Eagle3Attention(config)
        self.mlp = DrafterMLP(config)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def joined(self, embeds_NRE: torch.Tensor, features_NRE: torch.Tensor) -> torch.Tensor:
        """What attention reads: [N, R, 2E]."""
        return torch.cat([self.input_layernorm(embeds_NRE), self.hidden_norm(features_NRE)], dim=-1)


class Eagle3Head(nn.Module):
    """The head; parameter names are those of released checkpoints. The embedding is the target's.

    d2t: what to add to a draft id to have the target's id. t2d: which of the target's ids can be drafted.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.fc = nn.Linear(len(config.eagle_config[TAPS]) * width, width, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self._rotary = LlamaRotaryEmbedding(config)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)

    def set_vocabulary(self, ids: Sequence[int]) -> None:
        """Draft these ids of the target, in ascending order."""
        ids_W = torch.tensor(sorted(ids), device=self.d2t.device)
        self.d2t.copy_(ids_W - torch.arange(len(ids_W), device=ids_W.device))
        self.t2d.zero_()[ids_W] = True

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Ids of the draft vocabulary as the target's."""
        return draft_ids + self.d2t[draft_ids]

    def draft_ids(self, target_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's ids as those of the draft vocabulary, and which of them it has; others are arbitrary ids."""
        rank_V = (self.t2d.cumsum(0) - 1).clamp(min=0)
        return rank_V[target_ids], self.t2d[target_ids]

    def angles(self, x: torch.Tensor, positions_NR: torch.Tensor) -> Rotary:
        """cos and sin [N, R, D] in the dtype of `x`."""
        cos_NRD, sin_NRD = self._rotary(x, positions_NR)
        return cos_NRD, sin_NRD

    def save(self, folder: Path) -> None:
        """Write `config.json` and `model.safetensors` in the layout of released EAGLE-3 heads."""
        self.config.architectures = [ARCHITECTURE]
        self.config.save_pretrained(folder)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@dataclass(frozen=True)
class TextRows:
    """The rows of whole texts: features g, and the keys and values that chains look at."""

    head: Eagle3Head
    embedding_VE: torch.Tensor
    ids_NS: torch.Tensor
    features_NSE: torch.Tensor
    keys_values: KeysValues

    @classmethod
    def read(cls, head: Eagle3Head, embedding_VE: torch.Tensor, read: ReadBatch) -> TextRows:
        """What the target read, as the head's rows. The last row of a text has no token after it; nothing sees it."""
        ids_NS, features_NSE = read.batch.ids_NS, head.fc(read.features_NSC)
        position_NS = torch.arange(ids_NS.shape[1], device=ids_NS.device).expand_as(ids_NS)
        x_NSE = head.midlayer.joined(embedding_VE[ids_NS.roll(-1, dims=1)].to(features_NSE.dtype), features_NSE)
        keys_values = head.midlayer.self_attn.keys_values(x_NSE, head.angles(x_NSE, position_NS))
        return cls(head, embedding_VE, ids_NS, features_NSE, keys_values)

    def draft(self, anchors_NM: torch.Tensor, count: int) -> torch.Tensor:
        """The greedy drafts [N, M, K] after the anchors, as ids of the target."""
        chains, token_NM, drafts = Chains(self, anchors_NM), self.ids_NS.gather(1, anchors_NM), list[torch.Tensor]()
        for _ in range(count):
            token_NM = self.head.target_ids(chains.step(token_NM).argmax(-1))
            drafts.append(token_NM)
        return torch.stack(drafts, dim=-1)


class Chains:
    """Chains that go on from the row before each anchor, the last whose features are the target's."""

    def __init__(self, rows: TextRows, anchors_NM: torch.Tensor) -> None:
        self._rows, self._own = rows, list[KeysValues]()
        length, width = rows.ids_NS.shape[1], rows.features_NSE.shape[-1]
        self._positions_NM = (anchors_NM - 1).clamp(max=length - 1)
        self._visible_NMS = torch.arange(length, device=anchors_NM.device) <= self._positions_NM[..., None]
        self._features_NME = rows.features_NSE.gather(1, self._positions_NM[..., None].expand(-1, -1, width))
        self._steps = 0

    def step(self, token_NM: torch.Tensor) -> torch.Tensor:
        """One row more of every chain, which carries this token; its logits [N, M, W] are of the token after that."""
        head, layer, features_NME = self._rows.head, self._rows.head.midlayer, self._features_NME
        x_NME = layer.joined(self._rows.embedding_VE[token_NM].to(features_NME.dtype), features_NME)
        rotary = head.angles(x_NME, self._positions_NM + self._steps)
        if self._steps:  # the first row is one of the text's
            self._own.append(layer.self_attn.keys_values(x_NME, rotary))
        attended = layer.self_attn(x_NME, rotary, self._rows.keys_values, self._visible_NMS, self._own)
        features_NME = features_NME + attended
        self._features_NME = features_NME + layer.mlp(layer.post_attention_layernorm(features_NME))
        self._steps += 1
        logits_NMW: torch.Tensor = head.lm_head(head.norm(self._features_NME))
        return logits_NMW


class UnrolledLoss(DrafterLoss):
    """The training-time test (arXiv 2503.01840): chains from every anchor, on true tokens and on their own features.

    Every step counts, the j-th draft exp(-(j - 1) / decay); tokens that the draft vocabulary lacks do not.
    """

    def __init__(self, head: Eagle3Head, target: FrozenTarget, steps: int, decay: float) -> None:
        super().__init__()
        self.drafter: Eagle3Head = head
        self._target, self._steps, self._decay = target, steps, decay

    def forward(
        self, read: ReadBatch, generator: torch.Generator, base_share: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See :class:`DrafterLoss`."""
        head, batch = self.drafter, read.batch
        most = int((batch.end_N - batch.start_N).max()) - 1
        anchors_NM = batch.start_N[:, None] + torch.arange(most, device=batch.ids_NS.device)
        truth_NMK, valid_NMK = trajectory_after(batch, anchors_NM, self._steps)
        anchor_ids_NM, _ = trajectory_after(batch, anchors_NM - 1, 1)
        fed_NMK = torch.cat([anchor_ids_NM, truth_NMK[..., :-1]], dim=-1)
        labels_NMK, known_NMK = head.draft_ids(truth_NMK)
        chains = Chains(TextRows.read(head, self._target.embedding_VE, read), anchors_NM)
        pairs = zip(fed_NMK.unbind(-1), labels_NMK.unbind(-1), strict=True)
        entropy_NMK = torch.stack([cross_entropy(chains.step(fed_NM), label_NM) for fed_NM, label_NM in pairs], dim=-1)
        valid_NMK = valid_NMK & known_NMK
        loss = decayed_mean(entropy_NMK, valid_NMK, self._decay)
        return loss, (entropy_NMK.detach() * valid_NMK).sum((0, 1)), valid_NMK.sum((0, 1))


class Eagle3Trainee:
    """See :class:`dflow_trt.training.trainee.Trainee`."""

    relays = False

    def __init__(self, plan: Plan, shape: Eagle3Shape, model: Any, trajectories: Sequence[Trajectory]) -> None:
        self.reader, self._num_drafts = FrozenTarget(model, shape.taps), shape.num_drafts
        ids, share = frequent_ids(trajectories, shape.draft_vocab, plan.target.spec.live_vocab)
        self.head = make_head(shape, model.config, self.reader, ids, plan.options.seed)
        assert plan.options.decay is not None, "settled by the plan"
        self.loss = UnrolledLoss(self.head, self.reader, shape.num_drafts, plan.options.decay)
        self.facts = {"draft_vocab_share": round(share, 4)}

    def rounds(self, read: ReadBatch, relay: bool) -> Play:
        """Greedy chains."""
        rows = TextRows.read(self.head, self.reader.embedding_VE, read)
        return serial_rounds(read.batch, lambda anchors_N1: rows.draft(anchors_N1, self._num_drafts))

    def save(self, folder: Path) -> None:
        """The layout of released EAGLE-3 heads."""
        self.head.save(folder)


def frequent_ids(trajectories: Sequence[Trajectory], count: int, live_vocab: int) -> tuple[list[int], float]:
    """The ids that responses have most often, the lowest of equally frequent ones, and their share of all tokens."""
    found = Counter(token for trajectory in trajectories for token in trajectory.response_ids)
    ids = sorted(range(live_vocab), key=lambda token: (-found[token], token))[:count]
    return ids, sum(found[token] for token in ids) / found.total()


def written_taps(taps: Sequence[int]) -> list[int]:
    """Taps as config.json has them: readers take a list that begins with 1 for outputs of layers, others for inputs."""
    return list(taps) if taps[0] == 1 else [tap + 1 for tap in taps]


def make_head(
    shape: Eagle3Shape, target_config: Any, target: FrozenTarget, ids: Sequence[int], seed: int
) -> Eagle3Head:
    """A new head, whose output starts as the target's own head and norm."""
    config: Any = LlamaConfig  # which takes any further keys
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = Eagle3Head(
            config(
                **taken_over(target_config, (*STACK_KEYS, *TOKEN_KEYS, "hidden_size")),
                intermediate_size=shape.intermediate_size,
                num_hidden_layers=1,
                num_attention_heads=shape.heads,
                num_key_value_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                tie_word_embeddings=False,
                draft_vocab_size=shape.draft_vocab,
                eagle_config={TAPS: written_taps(shape.taps), "use_aux_hidden_state": True},
            )
        )
    head.set_vocabulary(ids)
    head.lm_head.weight.data.copy_(target.head_VE[sorted(ids)])
    head.norm.weight.data.copy_(target.final_norm_E)
    return head
