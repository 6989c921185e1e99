"""What a bundle is made of, as frozen data: every later stage reads these and guesses nothing.

A field without a default must be read from a checkpoint or given by the user; the few defaults that exist mean
"absent in the checkpoint", never "probably this".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

RelayStart = Literal["after_rejection", "at_rejection"]
DType = Literal["float32", "float16", "bfloat16"]
WeightForm = Literal["float", "int8"]
QuantAlgo = Literal["FP8", "W8A8_SQ_PER_CHANNEL", "W8A16", "W4A16_AWQ"]
TargetWeights = Literal["float", "int8", "FP8", "W8A8_SQ_PER_CHANNEL", "W8A16", "W4A16_AWQ"]  # either of the two above
BackendName = Literal["onnxruntime", "tensorrt", "tensorrt-rtx"]
DraftPolicy = Literal["fixed", "adaptive"]
Hardware = Literal["none", "same_compute_capability", "ampere_plus"]

RELAY_STARTS: tuple[RelayStart, ...] = ("after_rejection", "at_rejection")
DTYPES: tuple[DType, ...] = ("float32", "float16", "bfloat16")
DRAFT_POLICIES: tuple[DraftPolicy, ...] = ("fixed", "adaptive")
HARDWARE: tuple[Hardware, ...] = ("none", "same_compute_capability", "ampere_plus")  # of compatibility
WEIGHT_FORMS: tuple[WeightForm, ...] = ("float", "int8")  # what a build can make of float weights
QUANT_ALGOS: tuple[QuantAlgo, ...] = ("FP8", "W8A8_SQ_PER_CHANNEL", "W8A16", "W4A16_AWQ")
PREFILL_CHUNK = 256  # rows; a CPU gains nothing from longer chunks, and every KV cache keeps this margin
CACHE_STEP = 64  # live cache lengths grow in these steps, so that call shapes repeat and vector loops have no tail
AUTOREGRESSIVE = "ar"
NO_RELAY_SUFFIX = "-norelay"


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding: angle(p, i) = p * inv_freq[i], cos and sin scaled by ``attention_factor``.

    kind: "default", "linear" or "yarn" (YaRN, arXiv 2309.00071, always active: it does not depend on the live length).
    ``factor`` belongs to linear and yarn; the rest to yarn alone.
    """

    kind: Literal["default", "linear", "yarn"]
    theta: float
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class StackSpec:
    """A Qwen3 decoder stack: what target and drafter have in common.

    ``windows[i]`` is layer i's sliding window in tokens (a key at distance >= window is masked), or None.
    ``causal[i]`` tells whether layer i masks later positions (always, for a target). ``qk_norm``: whether queries and
    keys are normed by head, as in Qwen3; Llama's are not.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    attention_bias: bool
    rope: RopeSpec
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    qk_norm: bool = True

    @property
    def heads_per_group(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class QuantSpec:
    """How a checkpoint stores its decoder's linear layers, by NVIDIA ModelOpt's names.

    algo: FP8, e4m3 weights with one scale a tensor or channel, and inputs rounded to e4m3 by a static scale;
    W8A8_SQ_PER_CHANNEL, the same in int8 with one scale a channel; W8A16, such int8 weights alone; W4A16_AWQ, int4
    weights alone, with one scale for every ``group_size`` input features of a channel (None for the others).
    kept: the linear layers that stay float, e.g. "model.layers.0.mlp.down_proj".
    """

    algo: QuantAlgo
    group_size: int | None
    kept: tuple[str, ...]

    @property
    def bits(self) -> int:
        """Of one weight."""
        return 4 if self.algo == "W4A16_AWQ" else 8

    @property
    def rounds_inputs(self) -> bool:
        return self.algo in ("FP8", "W8A8_SQ_PER_CHANNEL")


@dataclass(frozen=True)
class TargetSpec:
    """The target model.

    vocab_size: rows of the embedding table, padding included. live_vocab: ids below it exist in the tokenizer (equal to
    vocab_size where there is no tokenizer); ids from live_vocab on are never produced, with or without speculation.
    checkpoint_dtype: of what the checkpoint does not quantise.
    """

    stack: StackSpec
    vocab_size: int
    live_vocab: int
    tied_head: bool
    max_position: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    pad_id: int | None
    checkpoint_dtype: DType
    architecture: str
    licence: str | None
    quantisation: QuantSpec | None = None


@dataclass(frozen=True)
class RelaySpec:
    """The relay (DFlow, arXiv 2609.06498).

    [beta ; gamma] = MLP([E(b) ; E(y_hat) ; h]), x_j = E(mask) + beta * LN(h) + gamma.
    """

    start: RelayStart
    norm_eps: float


@dataclass(frozen=True)
class DominoSpec:
    """A causal head over a block's drafts (Domino, arXiv 2605.29707).

    logits_i = base_i + W_2 SiLU(W_1 [z_i ; s_i]), where the GRU state s_i has read the anchor and d_1..d_{i-1}.
    prefix_length: p, the first drafts, which keep their base logits. state_size: of s. rank: rows of W_1. shifted: slot
    i drafts position A + i + 1, so that the anchor's slot drafts too.
    """

    prefix_length: int
    state_size: int
    rank: int
    shifted: bool


@dataclass(frozen=True)
class ConvSpec:
    """Convolutions over the rows of a block, before and after attention and MLP of every layer (DFlash 2).

    y_t = sum over o < kernel_size of (base_o + dynamic_{t,o}) * x_{t-o}, zero before the block. base has a value for
    every channel, dynamic, which row t itself gives, one for every ``group_size`` channels.
    """

    kernel_size: int
    group_size: int


@dataclass(frozen=True)
class SelectorSpec:
    """Drafts chosen one after another among the ``top_k`` best ids of each slot (DFlash 2).

    d_i maximises logits_i[c] + <P[d_{i-1}] * W z_i, S[c]> over these ids c; d_0 is the anchor. rank: the width of the
    codebooks P and S.
    """

    rank: int
    top_k: int


@dataclass(frozen=True)
class DrafterSpec:
    """What every drafter has, whatever its kind; each kind adds what it is made of.

    kind: its entry in :mod:`dflow_trt.kinds`. serial: whether drafts are made one after another, so that more of them
    take longer. name: what requests call it.
    """

    kind: ClassVar[str]
    serial: ClassVar[bool] = False

    name: str
    licence: str | None

    @property
    def num_drafts(self) -> int:
        """K, the most drafts of a round."""
        raise NotImplementedError

    @property
    def verify_rows(self) -> int:
        """K + 1, the rows of a whole verify pass: the anchor and the drafts."""
        return self.num_drafts + 1

    @property
    def taps(self) -> tuple[int, ...]:
        """The target layers whose outputs it reads, in the order in which it reads them; L is the output of layer L."""
        return ()

    @property
    def decoder(self) -> StackSpec | None:
        """Its decoder layers; None where it has none."""
        return None

    @property
    def draft_rows(self) -> int:
        """Rows of a request in one drafting call."""
        return 1

    def draft_calls(self, drafts: int) -> int:
        """Calls of its drafting engine in a round of so many drafts, for all requests together."""
        return drafts if self.serial else 1

    @property
    def draft_vocab(self) -> int:
        """Tokens that it scores."""
        return 0

    @property
    def relays(self) -> bool:
        """Whether it takes up rejected states (DFlow)."""
        return False

    @property
    def corrects(self) -> bool:
        """Whether later drafts of a block know the earlier ones."""
        return self.serial

    @property
    def strategies(self) -> tuple[str, ...]:
        """The request strategies that it serves."""
        return (self.name, self.name + NO_RELAY_SUFFIX) if self.relays else (self.name,)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DrafterSpec:
        """The inverse of :func:`to_json`; raises TypeError or KeyError on unknown or missing fields."""
        raise NotImplementedError


@dataclass(frozen=True)
class DFlashSpec(DrafterSpec):
    """A DFlash drafter (arXiv 2602.06036); with ``relay`` a DFlow drafter, with ``head`` a Domino drafter.

    A DFlash 2 drafter has ``conv`` and a selector as its ``head``.

    block_size: B, one anchor slot and B - 1 mask slots. target_layer_ids: the taps, in checkpoint order; L means the
    output of the target's decoder layer L. target_hidden_size: the width of one tap.
    """

    kind: ClassVar[str] = "dflash"

    stack: StackSpec
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    target_hidden_size: int
    num_target_layers: int
    vocab_size: int
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None
    relay: RelaySpec | None
    conv: ConvSpec | None
    head: DominoSpec | SelectorSpec | None
    checkpoint_dtype: DType
    architecture: str

    @property
    def taps(self) -> tuple[int, ...]:
        """See :class:`DrafterSpec`."""
        return self.target_layer_ids

    @property
    def decoder(self) -> StackSpec:
        """See :class:`DrafterSpec`."""
        return self.stack

    @property
    def draft_rows(self) -> int:
        """See :class:`DrafterSpec`."""
        return self.block_size

    @property
    def draft_vocab(self) -> int:
        """See :class:`DrafterSpec`."""
        return self.vocab_size

    @property
    def relays(self) -> bool:
        """See :class:`DrafterSpec`."""
        return self.relay is not None

    @property
    def corrects(self) -> bool:
        """See :class:`DrafterSpec`."""
        return self.head is not None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DFlashSpec:
        """See :class:`DrafterSpec`."""
        relay = RelaySpec(**data["relay"]) if data["relay"] is not None else None
        conv = ConvSpec(**data["conv"]) if data["conv"] is not None else None
        head = _head(data["head"]) if data["head"] is not None else None
        stack, taps = stack_from_json(data["stack"]), tuple(data["target_layer_ids"])
        return cls(**{**data, "stack": stack, "relay": relay, "conv": conv, "head": head, "target_layer_ids": taps})

    @property
    def first_slot(self) -> int:
        """The slot of draft 1: 1, as slot j drafts its own position A + j; 0 where a head shifts that by one."""
        return 0 if isinstance(self.head, DominoSpec) and self.head.shifted else 1

    @property
    def num_drafts(self) -> int:
        """K, the drafts of a block: one a slot from ``first_slot`` on. A verify pass has at least a block's rows."""
        return self.block_size - self.first_slot

    @property
    def corrected_drafts(self) -> range:
        """The drafts, counted from 1, that the causal head corrects, or the selector chooses."""
        kept = self.num_drafts if self.head is None else 0
        if isinstance(self.head, DominoSpec):
            kept = self.head.prefix_length
        return range(kept + 1, self.num_drafts + 1)


@dataclass(frozen=True)
class Eagle3Spec(DrafterSpec):
    """An EAGLE-3 drafter (arXiv 2503.01840), which drafts a chain: one decoder layer, run once a draft.

    Row p reads [input_layernorm(E(t_{p+1})) ; hidden_norm(f_p)] and gives h_p, from which t_{p+2} is drafted. f_p is
    fc(taps of row p) where the target has been, and behind that the feature of the row before.

    drafts: K. target_layer_ids: the taps in the order of ``fc``'s columns; L means the output of the target's layer L.
    draft_vocab_size: rows of its own head. own_embedding: whether E is its own table, not the target's.
    norm_before_residual: the residual is the normed f_p. norm_before_fc, fc_norm: all taps together, or each one, are
    normed first. norm_output: the feature that a row passes on is norm(h_p), not h_p (EAGLE 3.1, arXiv 2605.09992).
    """

    kind: ClassVar[str] = "eagle3"
    serial: ClassVar[bool] = True

    drafts: int
    stack: StackSpec
    target_layer_ids: tuple[int, ...]
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    own_embedding: bool
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    checkpoint_dtype: DType
    architecture: str

    @property
    def num_drafts(self) -> int:
        """See :class:`DrafterSpec`."""
        return self.drafts

    @property
    def taps(self) -> tuple[int, ...]:
        """See :class:`DrafterSpec`."""
        return self.target_layer_ids

    @property
    def decoder(self) -> StackSpec:
        """See :class:`DrafterSpec`."""
        return self.stack

    def draft_calls(self, drafts: int) -> int:
        """See :class:`DrafterSpec`. The first draft comes with the reading of the target's pass."""
        return drafts - 1

    @property
    def draft_vocab(self) -> int:
        """See :class:`DrafterSpec`."""
        return self.draft_vocab_size

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Eagle3Spec:
        """See :class:`DrafterSpec`."""
        taps = tuple(data["target_layer_ids"])
        return cls(**{**data, "stack": stack_from_json(data["stack"]), "target_layer_ids": taps})


@dataclass(frozen=True)
class DraftModelSpec(DrafterSpec):
    """A smaller model of the target's vocabulary that drafts as it would speak (arXiv 2211.17192), greedily.

    model: what it is. drafts: K.
    """

    kind: ClassVar[str] = "draft-model"
    serial: ClassVar[bool] = True

    model: TargetSpec
    drafts: int

    @property
    def num_drafts(self) -> int:
        """See :class:`DrafterSpec`."""
        return self.drafts

    @property
    def decoder(self) -> StackSpec:
        """See :class:`DrafterSpec`."""
        return self.model.stack

    @property
    def draft_vocab(self) -> int:
        """See :class:`DrafterSpec`."""
        return self.model.vocab_size

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DraftModelSpec:
        """See :class:`DrafterSpec`."""
        return cls(**{**data, "model": target_from_json(data["model"])})


@dataclass(frozen=True)
class NgramSpec(DrafterSpec):
    """Prompt lookup: what followed the last tokens where they stood before. No weights, no engines.

    min_match, max_match: how many last tokens must be the same; longer matches are tried first. drafts: K.
    """

    kind: ClassVar[str] = "ngram"

    min_match: int
    max_match: int
    drafts: int

    @property
    def num_drafts(self) -> int:
        """See :class:`DrafterSpec`."""
        return self.drafts

    def draft_calls(self, drafts: int) -> int:
        """See :class:`DrafterSpec`. There is no such engine."""
        return 0

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> NgramSpec:
        """See :class:`DrafterSpec`."""
        return cls(**data)


@dataclass(frozen=True)
class BuildSpec:
    """The limits and choices of one build; names follow trtllm-build where they mean the same.

    target_weights: what the target's linear layers compute with; a quantised checkpoint decides that itself.
    """

    backend: BackendName
    dtype: DType
    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int
    target_weights: TargetWeights
    draft_weights: WeightForm
    draft_logits: bool

    @property
    def target_form(self) -> WeightForm:
        """What the build itself makes of the target's float weights, its head's in any case."""
        return "int8" if self.target_weights == "int8" else "float"

    @property
    def prefill_chunk(self) -> int:
        """The most prompt rows of one request in one target pass."""
        return min(self.max_num_tokens, self.max_input_len, PREFILL_CHUNK)

    def cache_rows(self, verify_rows: int) -> int:
        """L, the rows of every KV cache: room for max_seq_len and for the padding of the longest write behind it.

        TensorScatter checks write_index + S <= L for padding rows too, hence the margin.
        """
        rows = self.max_seq_len + max(self.prefill_chunk, verify_rows)
        return -(-rows // CACHE_STEP) * CACHE_STEP


def to_json(spec: Any) -> dict[str, Any]:
    """A spec as plain JSON data."""
    return dataclasses.asdict(spec)


def stack_from_json(data: Mapping[str, Any]) -> StackSpec:
    """The inverse of :func:`to_json`; raises TypeError or KeyError on unknown or missing fields."""
    rope = RopeSpec(**data["rope"])
    return StackSpec(**{**data, "rope": rope, "windows": tuple(data["windows"]), "causal": tuple(data["causal"])})


def _head(data: Mapping[str, Any]) -> DominoSpec | SelectorSpec:
    return SelectorSpec(**data) if "top_k" in data else DominoSpec(**data)


def target_from_json(data: Mapping[str, Any]) -> TargetSpec:
    """The inverse of :func:`to_json`; raises TypeError or KeyError on unknown or missing fields."""
    quantisation = _quantisation(data.get("quantisation"))
    stack, eos = stack_from_json(data["stack"]), tuple(data["eos_ids"])
    return TargetSpec(**{**data, "stack": stack, "eos_ids": eos, "quantisation": quantisation})


def _quantisation(data: Mapping[str, Any] | None) -> QuantSpec | None:
    return None if data is None else QuantSpec(**{**data, "kept": tuple(data["kept"])})


def build_from_json(data: Mapping[str, Any]) -> BuildSpec:
    """The inverse of :func:`to_json`; raises TypeError on unknown or missing fields."""
    return BuildSpec(**data)
