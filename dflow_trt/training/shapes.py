"""What a drafter is built to: its sizes, from the flags, from the target, or from the drafter to go on from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

from dflow_trt.errors import UserError
from dflow_trt.spec import DFlashSpec, DominoSpec
from dflow_trt.training.options import RECORD, DrafterSource, Options, TargetSource, flag

MASK_NAMES = ("<|mask|>", "<|MASK|>", "<mask>", "[MASK]")
DEFAULT_BLOCK, DEFAULT_LAYERS, DEFAULT_START = 16, 5, "after_rejection"
DEFAULT_HEAD_STATE, DEFAULT_HEAD_RANK, DEFAULT_HEAD_PREFIX = 1024, 256, 1  # those of released Domino drafters
DEFAULT_CHAIN, DEFAULT_DRAFTS, DEFAULT_DRAFT_VOCAB = 5, 4, 32000
EAGLE3_TAPS = 3


@dataclass(frozen=True)
class BlockShape:
    """A DFlash, DFlow or Domino drafter."""

    block_size: int
    taps: tuple[int, ...]
    layers: int
    intermediate_size: int
    mask_token_id: int
    relay_start: str | None
    head: DominoSpec | None

    @property
    def num_drafts(self) -> int:
        """K, the drafts of a round."""
        return self.block_size - 1


@dataclass(frozen=True)
class Heads:
    """The attention heads of a drafter that has its own."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class DraftModelShape(Heads):
    """A smaller language model. num_drafts: K, the drafts of a round that it is measured with."""

    hidden_size: int
    layers: int
    intermediate_size: int
    num_drafts: int


@dataclass(frozen=True)
class Eagle3Shape(Heads):
    """An EAGLE-3 head. draft_vocab: ids that it can draft. num_drafts: K, also the steps that it is unrolled over."""

    taps: tuple[int, ...]
    intermediate_size: int
    draft_vocab: int
    num_drafts: int


Shape = BlockShape | DraftModelShape | Eagle3Shape


def make_shape(target: TargetSource, source: DrafterSource | None, options: Options) -> Shape:
    """The shape that the mode asks for; UserError, in one line, for sizes that do not fit."""
    if options.mode == "draft-model":
        return _draft_model(target, options)
    if options.mode == "eagle3":
        return _eagle3(target, options)
    shape = _new_block(target, options) if source is None else _continued(source, target, options)
    _check_head(shape, options)
    return shape


def _draft_model(target: TargetSource, options: Options) -> DraftModelShape:
    """By default half as wide as the target and a third as deep."""
    stack = target.spec.stack
    return DraftModelShape(
        *_heads(options, max(1, stack.num_heads // 2), max(1, stack.num_kv_heads // 2), stack.head_dim),
        options.hidden_size or max(1, stack.hidden_size // 2),
        options.layers or max(1, stack.num_layers // 3),
        options.intermediate_size or max(1, stack.intermediate_size // 2),
        options.drafts or DEFAULT_DRAFTS,
    )


def _eagle3(target: TargetSource, options: Options) -> Eagle3Shape:
    """By default with the target's heads and width, and with three layers read."""
    stack, live = target.spec.stack, target.spec.live_vocab
    taps = eagle3_taps(stack.num_layers) if options.taps is None else options.taps
    rising = list(taps) == sorted(set(taps)) and all(0 < tap < stack.num_layers - 1 for tap in taps)
    if len(taps) != EAGLE3_TAPS or not rising:
        allowed = f"{EAGLE3_TAPS} layers from 1 to {stack.num_layers - 2} in rising order, for an EAGLE-3 head"
        raise UserError(f"--taps: {','.join(map(str, taps)) or 'none'}; allowed: {allowed}")
    vocab = min(DEFAULT_DRAFT_VOCAB, live) if options.draft_vocab is None else options.draft_vocab
    if vocab > live:
        raise UserError(f"--draft-vocab: {vocab}; allowed: up to {live}, the target's vocabulary")
    return Eagle3Shape(
        *_heads(options, stack.num_heads, stack.num_kv_heads, stack.head_dim),
        taps,
        options.intermediate_size or stack.intermediate_size,
        vocab,
        options.drafts or DEFAULT_CHAIN,
    )


def eagle3_taps(target_layers: int) -> tuple[int, int, int]:
    """A low, a middle and a high layer: those of the paper's code where it has three different ones."""
    return 1, max(2, target_layers // 2 - 1), max(3, target_layers - 4)


def _heads(options: Options, heads: int, kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Attention heads as given, or these; unless given, no more key/value heads than divide the heads."""
    heads, head_dim = options.heads or heads, options.head_dim or head_dim
    kv_heads = options.kv_heads or gcd(heads, kv_heads)
    if heads % kv_heads:
        raise UserError(f"--kv-heads: {kv_heads}; allowed: a divisor of the {heads} heads")
    if head_dim % 2:
        raise UserError(f"--head-dim: {head_dim}; allowed: an even number, as rotary embedding pairs its halves")
    return heads, kv_heads, head_dim


def _check_head(shape: BlockShape, options: Options) -> None:
    """Flags of the causal head need one, and its own drafts are a matter of the rounds after the first."""
    for name in ("head_state", "head_rank", "head_prefix", "rollout"):
        if shape.head is None and getattr(options, name) is not None:
            raise UserError(f"{flag(name)}: the drafter has no causal head; allowed: with --head domino")
    if shape.head is not None and shape.head.prefix_length >= shape.block_size:
        found, most = shape.head.prefix_length, shape.block_size - 1
        raise UserError(f"--head-prefix: {found}; allowed: 0 to {most}, the drafts of a block")
    if options.rollout is not None and options.conditioned_rounds == 0:
        raise UserError("--rollout: mode dflash has no round after drafts; allowed: with self-conditioned or dflow")


def _new_block(target: TargetSource, options: Options) -> BlockShape:
    """The shape of a new drafter."""
    layers = DEFAULT_LAYERS if options.layers is None else options.layers
    taps = spread_taps(target.spec.stack.num_layers, layers) if options.taps is None else options.taps
    _check_taps(taps, target.spec.stack.num_layers)
    block = DEFAULT_BLOCK if options.block_size is None else options.block_size
    start = (options.relay_start or DEFAULT_START) if options.mode == "dflow" else None
    inner = options.intermediate_size or target.spec.stack.intermediate_size
    return BlockShape(block, taps, layers, inner, _mask_token(target, options.mask_token_id), start, _new_head(options))


def _new_head(options: Options) -> DominoSpec | None:
    """The causal head that the flags ask for."""
    if options.head is None:
        return None
    state = DEFAULT_HEAD_STATE if options.head_state is None else options.head_state
    rank = DEFAULT_HEAD_RANK if options.head_rank is None else options.head_rank
    prefix = DEFAULT_HEAD_PREFIX if options.head_prefix is None else options.head_prefix
    return DominoSpec(prefix_length=prefix, state_size=state, rank=rank, shifted=False)


def spread_taps(target_layers: int, count: int) -> tuple[int, ...]:
    """Up to `count` layers spread evenly from the second to the last but two, as DFlash's released drafters have it."""
    first, last = min(1, target_layers - 2), max(target_layers - 3, min(1, target_layers - 2))
    if count == 1:
        return ((first + last) // 2,)
    return tuple(sorted({round(first + index * (last - first) / (count - 1)) for index in range(count)}))


def _check_taps(taps: Sequence[int], target_layers: int) -> None:
    allowed = f"0 to {target_layers - 2}, each once"
    if target_layers - 1 in taps:
        raise UserError(f"--taps: {target_layers - 1} is the target's last layer, no tap; allowed: {allowed}")
    if not taps or any(not 0 <= tap < target_layers for tap in taps) or len(set(taps)) != len(taps):
        raise UserError(f"--taps: {','.join(map(str, taps)) or 'none'}; allowed: {allowed}")


def _mask_token(target: TargetSource, given: int | None) -> int:
    """The mask token: as given, else the first row past the tokenizer's ids, else a token of that name."""
    spec = target.spec
    if given is not None:
        if not 0 <= given < spec.vocab_size or given in (*spec.eos_ids, spec.pad_id):
            allowed = f"0 to {spec.vocab_size - 1}, neither pad nor end of text"
            raise UserError(f"--mask-token-id: {given}; allowed: {allowed}")
        return given
    if spec.live_vocab < spec.vocab_size:
        return spec.live_vocab
    named = _named_mask(target.path / "tokenizer.json")
    if named is None or named in (*spec.eos_ids, spec.pad_id):
        raise UserError("--mask-token-id: the target has neither a spare row nor a mask token; name an unused id")
    return named


def _named_mask(tokenizer: Path) -> int | None:
    if not tokenizer.is_file():
        return None
    from tokenizers import Tokenizer

    ids = map(Tokenizer.from_file(str(tokenizer)).token_to_id, MASK_NAMES)
    return next((token for token in ids if token is not None), None)


def _continued(source: DrafterSource, target: TargetSource, options: Options) -> BlockShape:
    """The shape of the drafter to go on from, which flags may repeat but not change."""
    spec = source.spec
    _check_source(source, target)
    relay_start: str | None = spec.relay.start if spec.relay else None
    for name, has in _fixed(spec).items():
        if getattr(options, name) not in (None, has):
            raise UserError(f"{flag(name)}: the drafter of --from has {has}; leave the flag out")
    if relay_start is not None and options.mode != "dflow":
        raise UserError(f"--mode: the drafter of --from has a relay; allowed: dflow, not {options.mode}")
    if options.mode == "dflow":
        relay_start = relay_start or options.relay_start or DEFAULT_START
    stack = spec.stack
    return BlockShape(
        spec.block_size,
        spec.target_layer_ids,
        stack.num_layers,
        stack.intermediate_size,
        spec.mask_token_id,
        relay_start,
        spec.head if isinstance(spec.head, DominoSpec) else _new_head(options),
    )


def _fixed(spec: DFlashSpec) -> dict[str, Any]:
    """What a drafter to go on from has settled, by the flag."""
    fixed: dict[str, Any] = {
        "block_size": spec.block_size,
        "taps": spec.target_layer_ids,
        "layers": spec.stack.num_layers,
    }
    fixed |= {"intermediate_size": spec.stack.intermediate_size, "mask_token_id": spec.mask_token_id}
    relay = {"relay_start": spec.relay.start} if spec.relay else {}
    return fixed | relay | (_head_flags(spec.head) if isinstance(spec.head, DominoSpec) else {})


def _head_flags(head: DominoSpec) -> dict[str, int]:
    return {"head_state": head.state_size, "head_rank": head.rank, "head_prefix": head.prefix_length}


def _check_source(source: DrafterSource, target: TargetSource) -> None:
    """Training knows the plain drafter; what it cannot represent is refused by name."""
    spec, stack = source.spec, source.spec.stack
    for refused, what in (
        ("transformer_layer_config" in _json(source.path / "config.json"), "the layout of the speculators project"),
        (any(window is not None for window in stack.windows), "sliding-window layers"),
        (any(stack.causal), "causal layers"),
        (stack.attention_bias, "attention_bias"),
        (spec.input_embedding_scale != 1.0, "input_embedding_scale"),
        (spec.output_multiplier != 1.0, "output_multiplier"),
        (spec.final_logit_softcapping is not None, "final_logit_softcapping"),
        (isinstance(spec.head, DominoSpec) and spec.head.shifted, "shift_label"),
        (spec.conv is not None, "the convolutions of DFlash 2"),
    ):
        if refused:
            raise UserError(f"--from: {source.path} has {what}, which training does not support")
    trained_for = _json(source.path / RECORD).get("target_fingerprint", target.fingerprint)
    if trained_for != target.fingerprint:
        todo = f"use a drafter of this target, or remove its {RECORD} if the weights are the same"
        raise UserError(f"--from: {source.path} was trained for another target than {target.path}; {todo}")


def _json(path: Path) -> dict[str, Any]:
    """A JSON object; {} where there is no such file or it holds something else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
