"""An EAGLE-3 drafter folder in, a spec and lazily read weights out (arXiv 2503.01840).

Two layouts: the original's (SafeAILab/EAGLE; SpecForge and AngelSlim write it too: Llama keys at the top, an optional
``eagle_config``, the layer called ``midlayer``), and that of the speculators project (Llama or Qwen3 keys in
``transformer_layer_config``, the layer called ``layers.0``). Of EAGLE 3.1 (arXiv 2605.09992) ``fc_norm``,
``norm_before_fc`` and ``norm_output`` are read, as vLLM and SGLang read them.

``d2t[i]`` is target id - draft id of draft id i; ``t2d`` marks the target ids that have a draft id.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflow_trt.checkpoint.config import read_stack, reject_quantised, reject_unsupported
from dflow_trt.checkpoint.folder import (
    CONFIG,
    DrafterCheckpoint,
    checked_folder,
    checked_name,
    fingerprint,
    licence,
)
from dflow_trt.checkpoint.names import DRAFT_EMBEDDING, EMBEDDING, check_tensors, eagle3_tensors
from dflow_trt.checkpoint.reader import Config, known_settings, merged, read_config, refuse, setting, show
from dflow_trt.checkpoint.safetensors import SafetensorsWeights, open_weights
from dflow_trt.checkpoint.target import TargetCheckpoint, checkpoint_dtype, read_architecture
from dflow_trt.checkpoint.weights import Array, Weights
from dflow_trt.spec import Eagle3Spec, StackSpec, TargetSpec

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
NESTED_ARCHITECTURES = ("Eagle3Speculator", "Eagle3DraftModel")
NESTED = "transformer_layer_config"
DEFAULT_NAME = "eagle3"
DEFAULT_DRAFTS, MAX_DRAFTS = 5, 15
LLAMA_THETA = 10000.0  # what an absent key means in transformers' LlamaConfig
_FIRST_LAYER = ("midlayer.", "layers.0.")
_Q_NORM = "layers.0.self_attn.q_norm.weight"
_MAPS = ("d2t", "t2d")
_FROZEN = "verifier_"  # the target's own tensors, which a trainer keeps for its loss
_TAPS = "eagle_aux_hidden_state_layer_ids"
_ALWAYS = {  # variants that compute something else
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "mlp_bias": False,
    "is_causal": True,
}
_NEUTRAL = {"scale_emb": 1, "logit_scale": 1, "residual_multiplier": 1, "final_logit_softcapping": 0}
_ROWS = 4096  # of a table at a time


@dataclass(frozen=True)
class Eagle3Checkpoint(DrafterCheckpoint):
    """A validated drafter. ``weights`` has exactly the tensors of ``names.eagle3_tensors(spec)``.

    target_ids: int64 [draft_vocab_size], the target's id of each draft id.
    """

    spec: Eagle3Spec
    target_ids: Array


@dataclass(frozen=True)
class _Draft:
    """Where a drafter's keys are: ``top`` the file, ``stack`` the layer's keys, ``keys`` the drafting keys."""

    top: Config
    stack: Config
    keys: Config
    nested: bool


def read_eagle3(
    folder: Path | str, target: TargetSpec, name: str | None = None, settings: Mapping[str, int] | None = None
) -> Eagle3Checkpoint:
    """Read and validate an EAGLE-3 folder for this target.

    name: what requests call it, by default ``eagle3``. settings: ``drafts``, K. UserError, in one line, for anything
    that is not supported, not whole, or does not pair with the target.
    """
    path, settings = checked_folder(folder), settings or {}
    known_settings(path, settings, "drafts")
    draft = _layout(read_config(path / CONFIG))
    architecture = read_architecture(draft.top, NESTED_ARCHITECTURES if draft.nested else ARCHITECTURES)
    _reject_others(draft)
    stored = open_weights(path, _canonical)
    weights = _own_tensors(stored)
    spec = Eagle3Spec(
        name=DEFAULT_NAME if name is None else checked_name(name),
        licence=licence(path),
        drafts=setting(path, settings, "drafts", DEFAULT_DRAFTS, 1, MAX_DRAFTS),
        stack=_stack(draft, weights, target),
        target_layer_ids=_taps(draft.keys, target),
        target_hidden_size=_tapped_width(draft, target),
        vocab_size=_vocab_size(draft.stack, target),
        draft_vocab_size=_draft_vocab_size(draft.keys, target),
        own_embedding=weights.has(DRAFT_EMBEDDING),
        norm_before_residual=_norm_before_residual(draft),
        norm_before_fc=draft.keys.boolean("norm_before_fc", False),
        fc_norm=draft.keys.boolean("fc_norm", False),
        norm_output=draft.keys.boolean("norm_output", False),
        checkpoint_dtype=checkpoint_dtype(weights, "fc.weight", path),
        architecture=architecture,
    )
    check_tensors(weights, eagle3_tensors(spec), path)
    ids = _target_ids(stored, spec, target, path)
    return Eagle3Checkpoint(path, spec, weights, fingerprint(stored, (path / CONFIG,)), ids)


def without_copied_embedding(draft: Eagle3Checkpoint, target: TargetCheckpoint) -> Eagle3Checkpoint:
    """The same drafter, which borrows the target's embedding where its own has the same values."""
    spec, weights = draft.spec, draft.weights
    if not spec.own_embedding or not _same_tables(weights, DRAFT_EMBEDDING, target.weights, EMBEDDING):
        return draft
    assert isinstance(weights, SafetensorsWeights)
    spec = dataclasses.replace(spec, own_embedding=False)
    return dataclasses.replace(draft, spec=spec, weights=weights.without(DRAFT_EMBEDDING))


def _same_tables(a: Weights, first: str, b: Weights, second: str) -> bool:
    """Whether two tables hold the same numbers, whatever their dtypes; read in blocks of rows."""
    if a.shape(first) != b.shape(second):
        return False
    blocks = (slice(start, start + _ROWS) for start in range(0, a.shape(first)[0], _ROWS))
    return all(
        np.array_equal(a.read(first, rows).astype(np.float32), b.read(second, rows).astype(np.float32))
        for rows in blocks
    )


# -- the layout --------------------------------------------------------------------------------------------------------


def _layout(top: Config) -> _Draft:
    """Tell layouts apart, gather the drafting keys: ``eagle_config`` and top level must not differ."""
    nested = top.section(NESTED)
    if nested is not None:
        top.one_of("speculators_model_type", ("eagle3",))
        return _Draft(top, _with_llama_defaults(nested), top, True)
    return _Draft(top, _with_llama_defaults(top), merged(top, "eagle_config"), False)


def _with_llama_defaults(stack: Config) -> Config:
    """The keys of the layer, with what their absence means in a Llama."""
    if stack.one_of("model_type", ("llama", "qwen3"), default="llama") != "llama":
        return stack
    heads = stack.integer("num_attention_heads")
    defaults: dict[str, float] = {"num_key_value_heads": heads, "head_dim": stack.integer("hidden_size") // heads}
    ropes = (stack, stack.section("rope_parameters"), stack.section("rope_scaling"))
    if all(rope is None or rope.get("rope_theta") is None for rope in ropes):
        defaults["rope_theta"] = LLAMA_THETA
    given = {key: value for key, value in stack.data.items() if value is not None}
    return Config({**defaults, **given}, stack.where, stack.prefix)


def _canonical(stored: str) -> str:
    """A tensor's name without a leading ``model.``, its layer called layers.0."""
    name = stored.removeprefix("model.")
    first, canonical = _FIRST_LAYER
    return canonical + name.removeprefix(first) if name.startswith(first) else name


def _own_tensors(stored: SafetensorsWeights) -> SafetensorsWeights:
    """The weights that engines compute with."""
    for name in list(stored.names()):
        if name in _MAPS or name.startswith(_FROZEN):
            stored = stored.without(name)
    return stored


def _reject_others(draft: _Draft) -> None:
    """Refuse, by key, relatives of EAGLE-3 that compute something else."""
    for config in (draft.top, draft.stack):
        reject_unsupported(config)
        reject_quantised(config)
    for key, value in _ALWAYS.items():
        if draft.keys.boolean(key, value) != value:
            raise draft.keys.error(key, f"{str(value).lower()} or absent", "this variant is not supported")
    for key, neutral in _NEUTRAL.items():
        if draft.keys.get(key) not in (None, neutral):
            raise draft.keys.error(key, f"{neutral} or absent", "this variant is not supported")
    if draft.keys.get("parallel_draft_step") not in (None, 1):
        raise draft.keys.error("parallel_draft_step", "1 or absent", "parallel drafting is not supported")


# -- the layer ---------------------------------------------------------------------------------------------------------


def _stack(draft: _Draft, weights: SafetensorsWeights, target: TargetSpec) -> StackSpec:
    """One causal layer without a window. Its heads are normed where the tensors say so: a Llama's are not."""
    config = draft.stack
    if config.integer("num_hidden_layers") != 1:
        raise config.error("num_hidden_layers", "1", "drafters of more layers are not supported")
    stack = dataclasses.replace(read_stack(config), qk_norm=weights.has(_Q_NORM))
    if stack.windows != (None,):
        raise config.error("sliding_window", "absent", "windows of EAGLE-3 drafters are not supported")
    if stack.hidden_size != target.stack.hidden_size and not weights.has(DRAFT_EMBEDDING):
        todo = f"use a drafter of this target, or one with {DRAFT_EMBEDDING}"
        raise config.error("hidden_size", f"{target.stack.hidden_size}, the width of the target's embedding", todo)
    return stack


def _norm_before_residual(draft: _Draft) -> bool:
    """Absent, the original's: not. Where speculators wrote the folder, readers disagree about what absence means."""
    key = "norm_before_residual"
    if draft.nested and draft.keys.get(key) is None:
        raise draft.keys.error(key, "true or false", "write the value the drafter was trained with")
    return draft.keys.boolean(key, False)


# -- what pairs it with the target -------------------------------------------------------------------------------------


def _taps(keys: Config, target: TargetSpec) -> tuple[int, ...]:
    """The tapped layers, in our convention: L is the output of the target's layer L.

    Absent, those of the paper's code, which reads the inputs of layers 2, n // 2 and n - 3. Ids are written in two
    conventions: a list that begins with 1 means outputs (ModelOpt, SpecForge), any other the inputs of these layers
    (vLLM, speculators); so SGLang tells them apart. All readers concatenate in the order of the layers.
    """
    last = target.stack.num_layers - 2  # of the last layer's output, readers disagree whether it is normed
    if keys.get(_TAPS) is None:
        return _default_taps(keys, target)
    ids = keys.integers(_TAPS)
    first = 0 if ids[0] == 1 else 1
    taps = tuple(layer - first for layer in ids)
    if list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] > last:
        why = "" if first else ", as the list begins with 1"
        allowed = f"ids from 1 to {last + first} in rising order{why}"
        raise keys.error(_TAPS, allowed, f"the target has {target.stack.num_layers} layers; its last is no tap")
    return taps


def _default_taps(keys: Config, target: TargetSpec) -> tuple[int, ...]:
    layers = target.stack.num_layers
    taps = (1, layers // 2 - 1, layers - 4)
    if not taps[0] < taps[1] < taps[2]:
        raise keys.error(_TAPS, f"a list of ids, as the target has only {layers} layers", "write the taps")
    return taps


def _tapped_width(draft: _Draft, target: TargetSpec) -> int:
    """The width of one tap, ``target_hidden_size`` or else the drafter's own: it must be the target's."""
    config, key, wanted = draft.keys, "target_hidden_size", target.stack.hidden_size
    if config.get(key) is None:
        config, key = draft.stack, "hidden_size"
    if config.integer(key) != wanted:
        raise config.error(key, f"{wanted}, the target's hidden_size", _PAIR)
    return wanted


_PAIR = "use a drafter that was trained for this target"


def _vocab_size(stack: Config, target: TargetSpec) -> int:
    if stack.integer("vocab_size") != target.vocab_size:
        raise stack.error("vocab_size", f"{target.vocab_size}, the target's vocab_size", _PAIR)
    return target.vocab_size


def _draft_vocab_size(keys: Config, target: TargetSpec) -> int:
    """Absent, the whole vocabulary."""
    found = keys.optional_integer("draft_vocab_size")
    if found is not None and found > target.vocab_size:
        raise keys.error("draft_vocab_size", f"at most {target.vocab_size}, the target's vocab_size", _PAIR)
    return target.vocab_size if found is None else found


def _target_ids(stored: SafetensorsWeights, spec: Eagle3Spec, target: TargetSpec, where: Path) -> Array:
    """The target's id of each draft id, from ``d2t``; no two are alike, and ``t2d`` must agree."""
    ids = np.arange(spec.draft_vocab_size)
    if stored.has("d2t"):
        ids = ids + _read_map(stored, "d2t", ("I64", "I32"), spec.draft_vocab_size, where)
    elif spec.draft_vocab_size != spec.vocab_size:
        allowed = f"the offsets of {spec.draft_vocab_size} draft ids, as draft_vocab_size says"
        raise refuse(where, "d2t", "missing", allowed, "complete the folder")
    out = np.flatnonzero((ids < 0) | (ids >= spec.vocab_size))
    if len(out):
        found = f"{ids[out[0]] - out[0]} at draft id {out[0]}, target id {ids[out[0]]}"
        raise refuse(where, "d2t", found, f"target ids from 0 to {spec.vocab_size - 1}", _PAIR)
    has_draft = np.zeros(spec.vocab_size, np.bool_)
    has_draft[ids] = True
    if has_draft.sum() != len(ids):
        raise refuse(where, "d2t", "the same target id for two draft ids", "one draft id each", "export it again")
    if not (ids < target.live_vocab).any():
        raise refuse(where, "d2t", "a map to ids that no tokenizer knows", f"ids below {target.live_vocab}", _PAIR)
    if stored.has("t2d"):
        _check_inverse(_read_map(stored, "t2d", ("BOOL",), spec.vocab_size, where), has_draft, where)
    return ids


def _read_map(stored: SafetensorsWeights, name: str, kinds: Sequence[str], size: int, where: Path) -> Array:
    if stored.shape(name) != (size,):
        raise refuse(where, name, f"of shape {list(stored.shape(name))}", f"{[size]}, as config.json says", _PAIR)
    return stored.read_map(name, kinds)


def _check_inverse(t2d: Array, has_draft: Array, where: Path) -> None:
    differ = np.flatnonzero(t2d != has_draft)
    if len(differ):
        found, wanted = (show(bool(each[differ[0]])) for each in (t2d, has_draft))
        raise refuse(where, "t2d", f"{found} at target id {differ[0]}", f"{wanted}, as d2t says", "export it again")
