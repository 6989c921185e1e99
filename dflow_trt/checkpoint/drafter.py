"""A DFlash, Domino, DFlash 2 or DFlow drafter folder in, a spec and lazily read weights out.

Two layouts: z-lab's (Qwen3 keys at the top, ``dflash_config``; SpecForge writes Domino's head into it) and that of the
speculators project (Qwen3 keys in ``transformer_layer_config``, taps counted from the embedding output). The masks are
those of the ``dflash`` package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflow_trt.checkpoint.config import read_stack, reject_quantised, reject_unsupported
from dflow_trt.checkpoint.folder import (
    CONFIG,
    DrafterCheckpoint,
    checked_folder,
    checked_name,
    fingerprint,
    licence,
)
from dflow_trt.checkpoint.names import (
    DOMINO_NAMES,
    EMBEDDING,
    HEAD,
    PREDECESSOR,
    RELAY_NAMES,
    SUCCESSOR,
    check_tensors,
    drafter_tensors,
)
from dflow_trt.checkpoint.reader import Config, merged, read_config, refuse, show
from dflow_trt.checkpoint.safetensors import open_weights
from dflow_trt.checkpoint.target import checkpoint_dtype, read_architecture
from dflow_trt.checkpoint.weights import Weights
from dflow_trt.spec import (
    RELAY_STARTS,
    ConvSpec,
    DFlashSpec,
    DominoSpec,
    DType,
    RelaySpec,
    SelectorSpec,
    StackSpec,
    TargetSpec,
)

DFLASH2_ARCHITECTURE = "DFlash2DraftModel"
ARCHITECTURES = ("DFlashDraftModel", DFLASH2_ARCHITECTURE)
NESTED_ARCHITECTURES = ("DFlashSpeculator", "DFlashDraftModel")
NESTED = "transformer_layer_config"
DOMINO, DFLASH2 = "domino", "dflash2"
_BORROWED = (EMBEDDING, "embed_tokens.weight", HEAD, "verifier_lm_head.weight")
_MAPS = ("d2t", "t2d")
_DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_SAVED = {f"{name}.weight": name for name in (PREDECESSOR, SUCCESSOR)}  # as a model that was not loaded saves them


@dataclass(frozen=True)
class DFlashCheckpoint(DrafterCheckpoint):
    """A validated drafter. ``weights`` has exactly the tensors of ``names.drafter_tensors(spec)``."""

    spec: DFlashSpec


@dataclass(frozen=True)
class _Draft:
    """Where a drafter's keys are: ``top`` the file, ``stack`` the Qwen3 keys, ``keys`` the drafting keys."""

    top: Config
    stack: Config
    keys: Config
    nested: bool

    @property
    def is_dflash2(self) -> bool:
        return bool(self.top.get("architectures") == [DFLASH2_ARCHITECTURE])

    @property
    def is_domino(self) -> bool:
        return bool(self.keys.get("projector_type") == DOMINO)


def read_drafter(folder: Path | str, target: TargetSpec, name: str | None = None) -> DFlashCheckpoint:
    """Read and validate a drafter folder for this target.

    name: what requests call it; by default ``dflash``, ``domino`` with that head, ``dflash2`` with a selector,
    ``dflow`` with a relay, and ``domino-dflow`` or ``dflash2-dflow`` with both. UserError, in one line, for anything
    that is not supported, not whole, or does not pair with the target.
    """
    path = checked_folder(folder)
    draft = _layout(read_config(path / CONFIG))
    architecture = read_architecture(draft.top, NESTED_ARCHITECTURES if draft.nested else ARCHITECTURES)
    _reject_other_drafters(draft)
    weights = open_weights(path, lambda stored: _SAVED.get(stored, stored))
    _reject_borrowed(weights, path)
    relay = _relay(draft.top, set(weights.names()), draft.stack)
    head = _selector(draft.keys, target) if draft.is_dflash2 else _head(draft, set(weights.names()), relay)
    dtype = checkpoint_dtype(weights, "fc.weight", path)
    spec = _spec(draft, target, relay, head, _name(name, relay, head), architecture, dtype)
    check_tensors(weights, drafter_tensors(spec), path)
    return DFlashCheckpoint(path, spec, weights, fingerprint(weights, (path / CONFIG,)))


def _spec(
    draft: _Draft,
    target: TargetSpec,
    relay: RelaySpec | None,
    head: DominoSpec | SelectorSpec | None,
    name: str,
    architecture: str,
    dtype: DType,
) -> DFlashSpec:
    return DFlashSpec(
        name=name,
        stack=_paired_stack(draft, target),
        block_size=_block_size(draft.keys),
        mask_token_id=_mask_id(draft.keys, target),
        target_layer_ids=_taps(draft, target),
        target_hidden_size=target.stack.hidden_size,
        num_target_layers=target.stack.num_layers,
        vocab_size=target.vocab_size,
        input_embedding_scale=_scale(draft.keys, "input_embedding_scale"),
        output_multiplier=_scale(draft.keys, "output_multiplier", above=0),
        final_logit_softcapping=_softcap(draft.keys),
        relay=relay,
        conv=_conv(draft) if draft.is_dflash2 else None,
        head=head,
        checkpoint_dtype=dtype,
        architecture=architecture,
        licence=licence(draft.top.where.parent),
    )


def _layout(top: Config) -> _Draft:
    """Tell layouts apart, gather the drafting keys: ``dflash_config`` and top level must not differ."""
    nested = top.section(NESTED)
    if nested is not None:
        top.one_of("speculators_model_type", ("dflash",))
        return _Draft(top, nested, top, True)
    return _Draft(top, top, merged(top, "dflash_config"), False)


def _reject_other_drafters(draft: _Draft) -> None:
    """Refuse, by key, relatives of DFlash whose heads or masks are others."""
    for config in (draft.top, draft.stack):
        reject_unsupported(config)
        reject_quantised(config)
    heads = ("dflash",) if draft.nested or draft.is_dflash2 else ("dflash", DOMINO)
    draft.keys.one_of("projector_type", heads, default="dflash")
    for key in () if draft.is_dflash2 else _DFLASH2_KEYS:
        if draft.keys.get(key) is not None:
            todo = f"DFlash 2 drafters have it, of architecture [{DFLASH2_ARCHITECTURE!r}]"
            raise draft.keys.error(key, "absent", todo)
    shifts = ("sample_from_anchor",) if draft.is_domino else ("sample_from_anchor", "shift_label")
    for key in shifts:
        if draft.keys.boolean(key, False):
            raise draft.keys.error(key, "false or absent", "slot j must predict its own position")


def _reject_borrowed(weights: Weights, where: Path) -> None:
    """Refuse tensors that would replace or reorder the target's vocabulary tables."""
    for name in weights.names():
        if name in _BORROWED:
            todo = "remove the tensor if it is a copy of the target's"
            raise refuse(where, name, "in the drafter", "the target's own table only", todo)
        if name in _MAPS:
            todo = "train the drafter on the target's whole vocabulary"
            raise refuse(where, name, "a vocabulary map", "no draft vocabulary", todo)


def _relay(top: Config, names: set[str], stack: Config) -> RelaySpec | None:
    """The relay: all of its tensors and ``dflow_config.relay_start``, or neither."""
    section = top.section("dflow_config") or Config({}, top.where, "dflow_config.")
    start = section.get("relay_start")
    if not _is_whole("relay", RELAY_NAMES, names, "relay_start", start, top.where.parent):
        return None
    return RelaySpec(_relay_start(section), stack.number("rms_norm_eps", above=0))


def _is_whole(what: str, expected: Sequence[str], names: set[str], key: str, value: Any, where: Path) -> bool:
    """Whether a part of a drafter is there; UserError where its config key or a tensor is, but not every tensor."""
    have, lacking = [name for name in expected if name in names], [name for name in expected if name not in names]
    if value is None and not have:
        return False
    if lacking:
        found = f"missing, while {have[0]} is there" if have else f"missing, while {key} is {show(value)}"
        todo = f"complete the {what}, or remove it with its config key"
        raise refuse(where, lacking[0], found, f"all {what} tensors with {key}, or none", todo)
    return True


def _relay_start(section: Config) -> Any:
    if section.get("relay_start") is None:
        todo = "write the value the relay was trained with"
        raise section.error("relay_start", " or ".join(map(repr, RELAY_STARTS)), todo)
    return section.one_of("relay_start", RELAY_STARTS)


def _head(draft: _Draft, names: set[str], relay: RelaySpec | None) -> DominoSpec | None:
    """Domino's head: all of its tensors and ``projector_type``, or neither. No prefix key means 0, as in SpecForge."""
    keys, kind = draft.keys, DOMINO if draft.is_domino else None
    if not _is_whole("Domino head", DOMINO_NAMES, names, "projector_type", kind, draft.top.where.parent):
        return None
    if kind is None:
        raise keys.error("projector_type", f"{DOMINO!r}, as {DOMINO_NAMES[0]} is there", "write how it was trained")
    _reject_undefined(keys, relay)
    shifted = keys.boolean("shift_label", False)
    num_drafts = _block_size(keys) - (not shifted)
    return DominoSpec(
        prefix_length=keys.optional_integer("pure_draft_prefix_len", low=0, high=num_drafts) or 0,
        state_size=keys.integer("gru_hidden_dim"),
        rank=keys.integer("emb_dim"),
        shifted=shifted,
    )


def _conv(draft: _Draft) -> ConvSpec:
    """The convolutions of DFlash 2: no kernel is longer than the block, and groups are alike."""
    keys, hidden = draft.keys, draft.stack.integer("hidden_size")
    kernel_size = keys.integer("conv_kernel_size", high=_block_size(keys))
    group_size = keys.integer("conv_group_size", high=hidden)
    if hidden % group_size:
        raise keys.error("conv_group_size", f"a divisor of hidden_size {hidden}")
    return ConvSpec(kernel_size, group_size)


def _selector(keys: Config, target: TargetSpec) -> SelectorSpec:
    """The selector of DFlash 2."""
    top_k = keys.integer("selector_top_k", high=target.vocab_size)
    return SelectorSpec(rank=keys.integer("selector_rank"), top_k=top_k)


def _reject_undefined(keys: Config, relay: RelaySpec | None) -> None:
    """Refuse what no Domino drafter was trained with, and what would therefore have to be guessed."""
    if relay and keys.boolean("shift_label", False):
        why = "which of the shifted slots receives a state is not defined"
        raise keys.error("shift_label", "false or absent with a relay", why)
    for key in ("input_embedding_scale", "output_multiplier"):
        if _scale(keys, key) != 1.0:
            raise keys.error(key, "1 or absent with a Domino head", "what it would scale there is not defined")
    if _softcap(keys) is not None:
        why = "whether the cap comes before or after the head is not defined"
        raise keys.error("final_logit_softcapping", "0 or absent with a Domino head", why)


def _name(name: str | None, relay: RelaySpec | None, head: DominoSpec | SelectorSpec | None) -> str:
    """The drafter's name among the request strategies."""
    if name is None:
        of_head = {DominoSpec: [DOMINO], SelectorSpec: [DFLASH2]}.get(type(head), [])
        return "-".join([*of_head, *(["dflow"] if relay else [])]) or "dflash"
    return checked_name(name)


def _paired_stack(draft: _Draft, target: TargetSpec) -> StackSpec:
    """The drafter's layers. They share the target's tables: widths and vocabularies must be equal."""
    _same(draft.stack, "hidden_size", target.stack.hidden_size, "the target's hidden_size")
    _same(draft.stack, "vocab_size", target.vocab_size, "the target's vocab_size")
    for key, value in (
        ("target_hidden_size", target.stack.hidden_size),
        ("num_target_layers", target.stack.num_layers),
        ("draft_vocab_size", target.vocab_size),
    ):
        if draft.keys.get(key) is not None:
            _same(draft.keys, key, value, "as in the target")
    return read_stack(draft.stack, _causal(draft))


def _causal(draft: _Draft) -> Callable[[int | None], bool]:
    """Which layers mask later positions: those with a window, unless ``is_causal`` says it for all layers.

    The speculators layout says it for the window layers alone, with ``sliding_window_non_causal``.
    """
    if draft.nested:
        both_ways = draft.top.boolean("sliding_window_non_causal", False)
        return lambda window: window is not None and not both_ways
    said = draft.top.get("is_causal")
    everywhere = draft.top.boolean("is_causal", False)
    return lambda window: window is not None if said is None else everywhere


def _same(config: Config, key: str, value: int, whose: str) -> None:
    if config.integer(key) != value:
        raise config.error(key, f"{value}, {whose}", "use a drafter that was trained for this target")


def _mask_id(keys: Config, target: TargetSpec) -> int:
    """The mask token: a row of the embedding (padding rows included) that is neither pad nor end of text."""
    mask = keys.integer("mask_token_id", low=0, high=target.vocab_size - 1)
    if mask in target.eos_ids or mask == target.pad_id:
        taken = "an eos id" if mask in target.eos_ids else "the pad id"
        raise keys.error("mask_token_id", f"an id that is not {taken} of the target", "use the drafter's mask id")
    return mask


def _taps(draft: _Draft, target: TargetSpec) -> tuple[int, ...]:
    """The tapped layers in checkpoint order; L is the output of the target's layer L.

    The last layer is refused for now: transformers reports its output after the final norm, and
    implementations disagree about which of the two a drafter was trained on.
    """
    key, first = ("aux_hidden_state_layer_ids", 1) if draft.nested else ("target_layer_ids", 0)
    ids, last = draft.keys.integers(key), target.stack.num_layers - 2 + first
    if last + 1 in ids:
        why = "the last layer's output is ambiguous: before or after the final norm"
        raise draft.keys.error(key, f"ids from {first} to {last}", why)
    if any(not first <= layer <= last for layer in ids) or len(set(ids)) != len(ids):
        todo = f"the target has {target.stack.num_layers} layers, and its last is not supported as a tap"
        raise draft.keys.error(key, f"ids from {first} to {last}, each once", todo)
    return tuple(layer - first for layer in ids)


def _block_size(keys: Config) -> int:
    """B: the anchor and at least one mask slot."""
    return keys.integer("block_size", low=2)


def _scale(keys: Config, key: str, above: float | None = None) -> float:
    """A multiplier; absent means 1. Of logits, it must be above 0: the drafts are the best of them without it."""
    value = keys.optional_number(key, above)
    return 1.0 if value is None else value


def _softcap(keys: Config) -> float | None:
    """The cap of the draft logits; absent, 0 and negative mean none, as in the ``dflash`` package."""
    value = keys.optional_number("final_logit_softcapping")
    return value if value is not None and value > 0 else None
