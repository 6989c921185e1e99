"""The tensors of the four engines. The only place that spells a tensor name, a plugin or a plugin field.

Dimensions (symbolic unless an engine makes them static):

    B  batch rows: slots of one call          S  token rows of a target pass
    R  rows that get logits                   T  live cache length, a multiple of CACHE_STEP
    J  block slots, 1 in a chain              K  drafts of a call: J - 1, or J where a causal head shifts or in a chain
    L  cache rows                             N  key/value heads
    D  head size                              E  hidden size of this engine
    X  packed taps: taps x target hidden      V  vocabulary columns, padded to VOCAB_BLOCK
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dflow_trt.spec import (
    BuildSpec,
    DFlashSpec,
    DrafterSpec,
    DraftModelSpec,
    Eagle3Spec,
    NgramSpec,
    SelectorSpec,
    StackSpec,
    TargetSpec,
)

FORMAT_VERSION = 3
VOCAB_BLOCK = 128  # the blocked argmax works on rows of this many logits
DEAD_LOGIT = -1e30  # the logit of ids that no tokenizer knows; finite, because masked rows still enter arithmetic

MANIFEST = "dflow.json"
TOKENIZER_DIR = "tokenizer"
VOCAB_DATA = "vocab.data"
ENGINE_SUFFIX, PLUGIN_SUFFIX = ".engine", ".so"

PLUGIN_DOMAIN = "dflow"
PLUGIN_VERSION = "1"
HIDDEN_STATE_EXTRACT = "HiddenStateExtract"
RELAY_INJECT = "RelayInject"
RELAY_INJECT_EPSILON = "epsilon"
RELAY_INJECT_EPSILON_DEFAULT = 1e-6  # of a node without the attribute

TARGET, CONTEXT, RELAY, DRAFTER = "target", "context", "relay", "drafter"
DRAFT_ENGINES = (CONTEXT, RELAY, DRAFTER)

Home = Literal["host", "device"]
Kind = Literal["int64", "bool", "float32", "engine"]


@dataclass(frozen=True)
class TensorSpec:
    """One engine input or output. ``home`` says where it lives between calls: only small integers (and logits on
    request) cross to the host. kind "engine" is the dtype that the engine computes in."""

    name: str
    kind: Kind
    dims: str
    home: Home
    meaning: str


INPUT_IDS = TensorSpec(
    "input_ids", "int64", "BS", "host", "token ids of this pass; rows past row_count are any valid id"
)
POSITION_IDS = TensorSpec("position_ids", "int64", "BS", "host", "absolute positions, write_index + 0..S-1")
ROW_COUNT = TensorSpec("row_count", "int64", "B", "host", "live rows of each request, 0..S")
LOGIT_ROWS = TensorSpec("logit_rows", "int64", "BR", "host", "rows of the pass that get logits")
WRITE_INDEX = TensorSpec("write_index", "int64", "B", "host", "cache row of the first token row; equals its position")
KV_INDEX = TensorSpec("kv_index", "int64", "T", "host", "0..T-1, the live part of every cache")
NEXT_IDS = TensorSpec("next_ids", "int64", "BR", "host", "greedy next token after each logit row, lowest id on ties")
LOGITS = TensorSpec("logits", "engine", "BRV", "host", "logits of each logit row; fetched only on request")
HIDDEN = TensorSpec("hidden", "engine", "BSX", "device", "packed outputs of the tapped layers, zero past row_count")
H = TensorSpec("h", "float32", "BSE", "device", "projected taps: hidden_norm(fc(hidden))")
PENDING_H = TensorSpec(
    "pending_h",
    "float32",
    "BJE",
    "device",
    "h kept of each request: of its last verify pass (J = K + 1), of a chain's last row",
)
RELAY_SRC = TensorSpec("relay_src", "int64", "BJ", "host", "row of pending_h that each block slot receives")
RELAY_ON = TensorSpec("relay_on", "bool", "BJ", "host", "whether a block slot receives a relay term")
BLOCK_IDS = TensorSpec("block_ids", "int64", "BJ", "host", "anchor id, then the mask id")
BONUS_ID = TensorSpec("bonus_id", "int64", "B", "host", "b, the token that replaced the first rejected draft")
REJECT_ID = TensorSpec("reject_id", "int64", "B", "host", "y_hat, the first rejected draft")
ANCHOR_ID = TensorSpec("anchor_id", "int64", "B", "host", "the anchor, which a selector's first draft follows")
BLOCK_EMBEDS = TensorSpec("block_embeds", "engine", "BJE", "device", "drafter input embeddings of the block")
BLOCK_POSITION_IDS = TensorSpec("position_ids", "int64", "BJ", "host", "absolute positions A..A+J-1 of the block")
BLOCK_WRITE_INDEX = TensorSpec(
    "write_index", "int64", "B", "host", "A, the context length: first cache row of the block"
)
DRAFT_IDS = TensorSpec("draft_ids", "int64", "BK", "host", "the drafts, greedy, lowest id on ties")
DRAFT_LOGITS = TensorSpec(
    "draft_logits", "engine", "BKV", "host", "logits of the drafts; only in builds that ask for them"
)
NEXT_INPUT_IDS = TensorSpec(
    "input_ids", "int64", "BS", "host", "the token behind each row, t_{p+1}; of rows that are never read any valid id"
)
FEATURE = TensorSpec("h", "float32", "BJE", "device", "what the next row of a chain reads of the last one (J = 1)")
STEP_IDS = TensorSpec("input_ids", "int64", "BJ", "host", "the draft just made")

CacheTensor = Literal["k", "v"]
CACHE_TENSORS: tuple[CacheTensor, CacheTensor] = ("k", "v")


def past(tensor: CacheTensor, layer: int) -> str:
    """The cache input of one layer."""
    return f"past_{tensor}_{layer}"


def present(tensor: CacheTensor, layer: int) -> str:
    """The cache output of one layer: the same buffer as :func:`past`, updated in place."""
    return f"present_{tensor}_{layer}"


@dataclass(frozen=True)
class EngineContract:
    """What one engine takes and gives, its caches and the sizes of its static dimensions."""

    engine: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    cache_layers: int
    static: dict[str, int]

    @property
    def plugins(self) -> tuple[str, ...]:
        """The dflow:: nodes of its graph, one of each."""
        nodes = {HIDDEN_STATE_EXTRACT: HIDDEN in self.outputs, RELAY_INJECT: RELAY_ON in self.inputs}
        return tuple(name for name, there in nodes.items() if there)

    def tensor(self, name: str) -> TensorSpec:
        """The input or output of that name; KeyError if the engine has none."""
        for spec in (*self.inputs, *self.outputs):
            if spec.name == name:
                return spec
        raise KeyError(f"engine {self.engine} has no tensor {name}")

    def shape(self, spec: TensorSpec) -> tuple[int | str, ...]:
        """Static sizes where they are known, dimension letters elsewhere."""
        return tuple(self.static.get(dim, dim) for dim in spec.dims)


def vocab_columns(vocab_size: int) -> int:
    """V, the vocabulary rounded up to whole argmax blocks."""
    return -(-vocab_size // VOCAB_BLOCK) * VOCAB_BLOCK


def packed_taps(drafters: tuple[DrafterSpec, ...]) -> tuple[int, ...]:
    """The union of the drafters' taps in order of first use: the layers that ``hidden`` packs."""
    return tuple(dict.fromkeys(tap for drafter in drafters for tap in drafter.taps))


def _cache_dims(stack: StackSpec, cache_rows: int) -> dict[str, int]:
    return {"N": stack.num_kv_heads, "L": cache_rows, "D": stack.head_dim}


def target_contract(target: TargetSpec, taps: tuple[int, ...], cache_rows: int) -> EngineContract:
    """The target: one pass over S token rows a request, causal, with its KV cache."""
    stack = target.stack
    static = {"E": stack.hidden_size, "V": vocab_columns(target.vocab_size), "X": len(taps) * stack.hidden_size}
    return EngineContract(
        TARGET,
        (INPUT_IDS, POSITION_IDS, ROW_COUNT, LOGIT_ROWS, WRITE_INDEX, KV_INDEX),
        (NEXT_IDS, LOGITS, HIDDEN) if taps else (NEXT_IDS, LOGITS),
        stack.num_layers,
        static | _cache_dims(stack, cache_rows),
    )


def draft_model_contracts(
    drafter: DraftModelSpec, target: TargetSpec, taps: tuple[int, ...], cache_rows: int, build: BuildSpec
) -> tuple[EngineContract, ...]:
    """The one engine of a draft model: a target's, greedy alone and without taps."""
    model = target_contract(drafter.model, (), cache_rows)
    inputs = tuple(spec for spec in model.inputs if spec != ROW_COUNT)  # which rows are live matters to taps alone
    return (EngineContract(DRAFTER, inputs, (NEXT_IDS,), model.cache_layers, model.static),)


def ngram_contracts(
    drafter: NgramSpec, target: TargetSpec, taps: tuple[int, ...], cache_rows: int, build: BuildSpec
) -> tuple[EngineContract, ...]:
    """No engines."""
    return ()


def dflash_contracts(
    drafter: DFlashSpec, target: TargetSpec, taps: tuple[int, ...], cache_rows: int, build: BuildSpec
) -> tuple[EngineContract, ...]:
    """The three engines of a DFlash drafter."""
    return (
        context_contract(drafter, taps, cache_rows),
        relay_contract(drafter),
        drafter_contract(drafter, cache_rows, build.draft_logits),
    )


def context_contract(drafter: DFlashSpec, taps: tuple[int, ...], cache_rows: int) -> EngineContract:
    """The context: taps of any target pass in, h and the drafter's context keys and values out."""
    static = {"E": drafter.stack.hidden_size, "X": len(taps) * drafter.target_hidden_size}
    return EngineContract(
        CONTEXT,
        (HIDDEN, POSITION_IDS, WRITE_INDEX),
        (H,),
        drafter.stack.num_layers,
        static | _cache_dims(drafter.stack, cache_rows),
    )


def relay_contract(drafter: DFlashSpec) -> EngineContract:
    """The relay: block embeddings, plus the relay term where there is one. A drafter without relay only embeds."""
    relay = (PENDING_H, RELAY_SRC, RELAY_ON, BONUS_ID, REJECT_ID) if drafter.relay else ()
    static = {"E": drafter.stack.hidden_size, "J": drafter.block_size}
    return EngineContract(RELAY, (BLOCK_IDS, *relay), (BLOCK_EMBEDS,), 0, static)


def drafter_contract(drafter: DFlashSpec, cache_rows: int, draft_logits: bool) -> EngineContract:
    """The drafter: one pass over the block, its keys and values written behind the context and never kept.

    A causal head or a selector is part of it: the drafts that it gives are already those chosen one after another.
    """
    anchor = (ANCHOR_ID,) if isinstance(drafter.head, SelectorSpec) else ()
    static = {"E": drafter.stack.hidden_size, "J": drafter.block_size, "K": drafter.num_drafts}
    return EngineContract(
        DRAFTER,
        (BLOCK_EMBEDS, BLOCK_POSITION_IDS, BLOCK_WRITE_INDEX, KV_INDEX, *anchor),
        (DRAFT_IDS, DRAFT_LOGITS) if draft_logits else (DRAFT_IDS,),
        drafter.stack.num_layers,
        static | {"V": vocab_columns(drafter.vocab_size)} | _cache_dims(drafter.stack, cache_rows),
    )


def eagle3_contracts(
    drafter: Eagle3Spec, target: TargetSpec, taps: tuple[int, ...], cache_rows: int, build: BuildSpec
) -> tuple[EngineContract, ...]:
    """The two engines of an EAGLE-3 drafter, on one cache."""
    return (
        eagle3_context_contract(drafter, taps, cache_rows, build.draft_logits),
        eagle3_step_contract(drafter, cache_rows, build.draft_logits),
    )


def eagle3_context_contract(
    drafter: Eagle3Spec, taps: tuple[int, ...], cache_rows: int, draft_logits: bool
) -> EngineContract:
    """The context: keys and values of all rows of a target pass; of one row (R = 1) the first draft and its feature."""
    static = {"X": len(taps) * drafter.target_hidden_size, "R": 1}
    return EngineContract(
        CONTEXT,
        (HIDDEN, NEXT_INPUT_IDS, POSITION_IDS, LOGIT_ROWS, WRITE_INDEX, KV_INDEX),
        _chain_outputs(draft_logits),
        drafter.stack.num_layers,
        static | _chain_dims(drafter, cache_rows),
    )


def eagle3_step_contract(drafter: Eagle3Spec, cache_rows: int, draft_logits: bool) -> EngineContract:
    """The drafter: one row behind the last one, from its feature and the draft it gave; the next draft and feature."""
    return EngineContract(
        DRAFTER,
        (PENDING_H, STEP_IDS, BLOCK_POSITION_IDS, BLOCK_WRITE_INDEX, KV_INDEX),
        _chain_outputs(draft_logits),
        drafter.stack.num_layers,
        _chain_dims(drafter, cache_rows),
    )


def _chain_outputs(draft_logits: bool) -> tuple[TensorSpec, ...]:
    """Draft ids are the target's; the columns of the logits are the drafter's own vocabulary."""
    return (FEATURE, DRAFT_IDS, DRAFT_LOGITS) if draft_logits else (FEATURE, DRAFT_IDS)


def _chain_dims(drafter: Eagle3Spec, cache_rows: int) -> dict[str, int]:
    width = {"E": drafter.stack.hidden_size, "V": vocab_columns(drafter.draft_vocab_size)}
    return width | {"J": 1, "K": 1} | _cache_dims(drafter.stack, cache_rows)


@dataclass(frozen=True)
class PluginTensor:
    """An input or the output of a plugin node. kind "float" is float32, float16 or bfloat16, one for the whole node.

    There is no bool: TensorRT's headers say of PluginTensorDesc::type that it is not supported.
    dims are letters, with a factor where the size is a multiple ("2E"); n is the number of repeated inputs.
    """

    name: str
    kind: Literal["float", "int64"]
    dims: tuple[str, ...]
    repeated: bool = False  # NAME_0 .. NAME_{n-1}


@dataclass(frozen=True)
class PluginSpec:
    """A dflow:: node as the C++ plugin sees it; ``plugins/contract.h`` is generated from this."""

    name: str
    inputs: tuple[PluginTensor, ...]
    output: PluginTensor
    fields: dict[str, float]  # float32 fields and their defaults


PLUGINS = (
    PluginSpec(
        HIDDEN_STATE_EXTRACT,
        (PluginTensor("tap", "float", ("B", "S", "E"), repeated=True), PluginTensor("row_count", "int64", ("B",))),
        PluginTensor("hidden", "float", ("B", "S", "nE")),
        {},
    ),
    PluginSpec(
        RELAY_INJECT,
        (
            PluginTensor("x", "float", ("B", "J", "E")),
            PluginTensor("h", "float", ("B", "J", "E")),
            PluginTensor("beta_gamma", "float", ("B", "J", "2E")),
            PluginTensor("norm_weight", "float", ("E",)),
            PluginTensor("norm_bias", "float", ("E",)),
            PluginTensor("relay_on", "int64", ("B", "J")),  # 0 is off
        ),
        PluginTensor("relayed", "float", ("B", "J", "E")),
        {RELAY_INJECT_EPSILON: RELAY_INJECT_EPSILON_DEFAULT},
    ),
)
