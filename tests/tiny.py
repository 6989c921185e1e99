"""Tiny random checkpoints: Qwen3 targets and DFlash / DFlow drafters, written with numpy and safetensors
alone.

Deterministic by ``seed``. The weights are scaled so that hidden states have RMS about 1 and logits a standard
deviation of about 2: a random pair then has clear argmaxes, and drafts that differ from slot to slot.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

Config = dict[str, Any]
Tensors = dict[str, np.ndarray[Any, np.dtype[Any]]]

DTYPES = {"float32": np.dtype("f4"), "float16": np.dtype("f2"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
DELETE = object()
"""Value for :func:`edit_config`: remove the key."""

TARGET_DEFAULTS: Config = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 3,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

DOMINO_DEFAULTS: Config = {
    "projector_type": "domino",
    "emb_dim": 20,
    "gru_hidden_dim": 24,
    "pure_draft_prefix_len": 0,
    "shift_label": False,
}

DFLASH2_DEFAULTS: Config = {
    "conv_kernel_size": 3,
    "conv_group_size": 16,
    "selector_rank": 12,
    "selector_top_k": 6,
}


def make_target(
    folder: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    layout: int = 5,
    rope: Mapping[str, Any] | None = None,
    theta: float = 10000.0,
    tied: bool = False,
    tokenizer: int | None = None,
    eos: int | list[int] | None = None,
    **config_overrides: Any,
) -> Config:
    """Write a random target folder and return its config.

    rope: ``{"rope_type": "yarn", "factor": 4.0, ...}`` or None for the default type. tokenizer: size of a
    word-level tokenizer to write, or None. eos: written to ``generation_config.json``. layout: 4 or 5, the
    transformers version whose keys are used. The shapes of the tensors follow ``config_overrides``.
    """
    config = {
        **TARGET_DEFAULTS,
        "tie_word_embeddings": tied,
        **_layout(layout, dtype, rope, theta),
        **config_overrides,
    }
    rng = np.random.default_rng(seed)
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    tensors = {"model.embed_tokens.weight": _normal(rng, (vocab, hidden), 0.25)}
    tensors |= {f"model.{name}": value for name, value in _stack(rng, config).items()}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = _normal(rng, (vocab, hidden), 2 / hidden**0.5)
    _write(folder, config, tensors, dtype, shards)
    if tokenizer is not None:
        make_tokenizer(folder, tokenizer)
    if eos is not None:
        _dump(folder / "generation_config.json", {"eos_token_id": eos})
    return config


def make_drafter(
    folder: Path,
    target_config: Config,
    *,
    relay: bool = False,
    relay_start: str = "after_rejection",
    relay_scale: float = 0.5,
    domino: Mapping[str, Any] | None = None,
    domino_scale: float = 1.0,
    dflash2: Mapping[str, Any] | None = None,
    seed: int = 1,
    dtype: str = "float32",
    shards: int = 1,
    layout: int = 5,
    rope: Mapping[str, Any] | None = None,
    theta: float = 10000.0,
    taps: Iterable[int] = (0, 1),
    block_size: int = 8,
    mask_token_id: int | None = None,
    top_level: bool = False,
    speculators: bool = False,
    **overrides: Any,
) -> Config:
    """Write a random drafter folder for a target config and return the drafter's config.

    relay_scale: standard deviation gain of the relay MLP's last layer; 0.0 makes the relay a no-op.
    domino: keys of Domino's head over those of ``DOMINO_DEFAULTS``, or None for a drafter without it. domino_scale: as
    relay_scale, of the head. dflash2: keys of DFlash 2 over those of ``DFLASH2_DEFAULTS``, or None.
    mask_token_id: the last id of the vocabulary when None. top_level: ``block_size``, ``mask_token_id`` and
    ``target_layer_ids`` beside the Qwen3 keys instead of inside ``dflash_config``. speculators: that
    project's nested layout.
    """
    base = {key: target_config[key] for key in TARGET_DEFAULTS if key not in ("eos_token_id", "tie_word_embeddings")}
    base |= {"architectures": ["DFlashDraftModel"], "num_hidden_layers": 2, "num_target_layers": None}
    base["num_target_layers"] = target_config["num_hidden_layers"]
    config: Config = {**base, **_layout(layout, dtype, rope, theta), **overrides}
    taps = list(taps)
    mask = target_config["vocab_size"] - 1 if mask_token_id is None else mask_token_id
    rng = np.random.default_rng(seed)
    tensors = drafter_tensors(rng, config, len(taps), target_config["hidden_size"])
    if relay:
        tensors |= relay_tensors(rng, config["hidden_size"], relay_scale)
    draft: Config = {"block_size": block_size, "mask_token_id": mask, "target_layer_ids": taps}
    if domino is not None:
        draft |= {**DOMINO_DEFAULTS, **domino}
        tensors |= domino_tensors(rng, config["hidden_size"], config["vocab_size"], draft, domino_scale)
    if dflash2 is not None:
        draft |= {**DFLASH2_DEFAULTS, **dflash2}
        config["architectures"] = ["DFlash2DraftModel"]
        tensors |= dflash2_tensors(rng, config, draft)
    config = _nested(config, draft) if speculators else {**config, **(draft if top_level else {"dflash_config": draft})}
    if relay:
        config["dflow_config"] = {"relay_start": relay_start}
    _write(folder, config, tensors, dtype, shards)
    return config


def drafter_tensors(rng: np.random.Generator, config: Config, taps: int, target_hidden: int) -> Tensors:
    """The tensors of a DFlash drafter under z-lab's names."""
    hidden, width = config["hidden_size"], taps * target_hidden
    tensors = {
        "fc.weight": _normal(rng, (hidden, width), width**-0.5),
        "hidden_norm.weight": _norm(rng, hidden),
    }
    return tensors | _stack(rng, config)


def relay_tensors(rng: np.random.Generator, hidden: int, scale: float) -> Tensors:
    """The tensors of a relay; its last layer has the gain ``scale``."""
    wide, out = 3 * hidden, 2 * hidden
    return {
        "relay_norm.weight": _norm(rng, hidden),
        "relay_norm.bias": _normal(rng, (hidden,), 0.1),
        "relay_mlp.0.weight": _normal(rng, (out, wide), wide**-0.5),
        "relay_mlp.0.bias": _normal(rng, (out,), 0.1),
        "relay_mlp.2.weight": _normal(rng, (out, out), scale * out**-0.5),
        "relay_mlp.2.bias": _normal(rng, (out,), 0.1 * scale),
    }


def domino_tensors(rng: np.random.Generator, hidden: int, vocab: int, draft: Config, scale: float) -> Tensors:
    """The tensors of Domino's head. What it makes of the state outweighs what it makes of the slot."""
    state, rank = draft["gru_hidden_dim"], draft["emb_dim"]
    down = _normal(rng, (rank, hidden + state), (hidden + state) ** -0.5)
    down[:, hidden:] *= 4
    return {
        "prefix_gru.weight_ih_l0": _normal(rng, (3 * state, hidden), 4 * hidden**-0.5),
        "prefix_gru.weight_hh_l0": _normal(rng, (3 * state, state), 2 * state**-0.5),
        "embed_proj.0.weight": down,
        "embed_proj.2.weight": _normal(rng, (vocab, rank), 4 * scale * rank**-0.5),
    }


def dflash2_tensors(rng: np.random.Generator, config: Config, draft: Config) -> Tensors:
    """The tensors of DFlash 2. Kernels shift and mix clearly; what the selector adds is as large as the logits."""
    hidden, vocab, rank = config["hidden_size"], config["vocab_size"], draft["selector_rank"]
    rows = 2 * draft["conv_kernel_size"]
    tensors: Tensors = {}
    for i in range(config["num_hidden_layers"]):
        for part in ("attention", "mlp"):
            base = _normal(rng, (2, rows // 2, hidden), 0.4)
            base[:, 0] += 1
            groups = hidden // draft["conv_group_size"]
            projection = _normal(rng, (rows * groups, hidden), 0.3 * hidden**-0.5)
            place = f"layers.{i}.{part}_conv"
            tensors |= {f"{place}.base_kernel": base, f"{place}.kernel_projection.weight": projection}
    names = [f"candidate_selector.{side}_codebook" for side in ("predecessor", "successor")]
    tensors |= {name: _normal(rng, (vocab, rank), 1.0) for name in names}
    query = _normal(rng, (rank, hidden), 2 * (rank * hidden) ** -0.5)
    return tensors | {"candidate_selector.hidden_projection.weight": query}


def make_eagle3(
    folder: Path,
    target_config: Config,
    *,
    seed: int = 3,
    dtype: str = "float32",
    shards: int = 1,
    layout: int = 4,
    rope: Mapping[str, Any] | None = None,
    theta: float = 10000.0,
    taps: Iterable[int] | None = (1,),
    draft_vocab_size: int = 100,
    maps: bool = True,
    own_embedding: bool = False,
    qk_norm: bool = False,
    speculators: bool = False,
    **overrides: Any,
) -> Config:
    """Write a random EAGLE-3 folder for a target config and return the drafter's config.

    taps: the target's layers whose outputs are read, written as ids in the convention that their list shows; None
    writes none. maps: ``d2t`` and ``t2d``, to random ids of the target. speculators: that project's nested layout.
    """
    names = ("attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "num_attention_heads")
    base = {key: target_config[key] for key in (*names, "num_key_value_heads", "rms_norm_eps", "vocab_size")}
    base |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    config: Config = {**base, **_layout(layout, dtype, rope, theta), "draft_vocab_size": draft_vocab_size, **overrides}
    count, ids = 3, None
    if taps is not None:
        taps = list(taps)
        count, ids = len(taps), [tap + (taps[0] != 1) for tap in taps]
    rng = np.random.default_rng(seed)
    width = (target_config["hidden_size"], count)
    tensors = eagle3_tensors(rng, config, width, own_embedding=own_embedding, qk_norm=qk_norm)
    if maps:
        tensors |= vocabulary_maps(rng, config["vocab_size"], draft_vocab_size)
    if speculators:
        config = _nested_eagle3(config, ids)
    else:
        tensors = {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    _write(folder, config, tensors, dtype, shards)
    return config


def eagle3_tensors(
    rng: np.random.Generator, config: Config, taps: tuple[int, int], *, own_embedding: bool, qk_norm: bool
) -> Tensors:
    """The tensors of an EAGLE-3 drafter under speculators' names. taps: width and number."""
    hidden, width = config["hidden_size"], taps[0] * taps[1]
    layer = _layer(rng, config)
    for name in [name for name in layer if name.endswith(("q_norm.weight", "k_norm.weight")) and not qk_norm]:
        del layer[name]
    for label, gain in (("q", 2), ("k", 2), ("v", 1)):
        rows = layer[f"self_attn.{label}_proj.weight"].shape[0]
        layer[f"self_attn.{label}_proj.weight"] = _normal(rng, (rows, 2 * hidden), gain * (2 * hidden) ** -0.5)
    tensors = {f"layers.0.{name}": value for name, value in layer.items()}
    tensors |= {"fc.weight": _normal(rng, (hidden, width), width**-0.5), "norm.weight": _norm(rng, hidden)}
    tensors |= {"layers.0.hidden_norm.weight": _norm(rng, hidden)}
    tensors["lm_head.weight"] = _normal(rng, (config["draft_vocab_size"], hidden), 2 / hidden**0.5)
    if own_embedding:
        tensors["embed_tokens.weight"] = _normal(rng, (config["vocab_size"], hidden), 0.25)
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = _norm(rng, width)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": _norm(rng, taps[0]) for i in range(taps[1])}
    return tensors


def vocabulary_maps(rng: np.random.Generator, vocab: int, draft_vocab: int) -> Tensors:
    """``d2t`` and ``t2d`` of random target ids, in rising order."""
    ids = np.sort(rng.permutation(vocab)[:draft_vocab])
    has_draft = np.zeros(vocab, np.bool_)
    has_draft[ids] = True
    return {"d2t": ids - np.arange(draft_vocab), "t2d": has_draft}


def make_tokenizer(folder: Path, size: int, added: Iterable[str] = ()) -> None:
    """Write a word-level ``tokenizer.json`` of ``size`` words (``w0`` ...), then ``added`` special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(added))
    tokenizer.save(str(folder / "tokenizer.json"))


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of ``config.json`` without touching the tensors; :data:`DELETE` removes a key."""
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    _dump(folder / "config.json", {key: value for key, value in config.items() if value is not DELETE})


def edit_tensors(folder: Path, changes: Mapping[str, Any]) -> None:
    """Replace, add or (with :data:`DELETE`) remove tensors of a one-file checkpoint."""
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: value for name, value in tensors.items() if value is not DELETE}, path)


def _layout(layout: int, dtype: str, rope: Mapping[str, Any] | None, theta: float) -> Config:
    """The keys in which transformers 4 and 5 differ."""
    if layout == 4:
        return {"rope_theta": theta, "rope_scaling": dict(rope) if rope else None, "torch_dtype": dtype}
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **(rope or {})}, "dtype": dtype}


def _nested(config: Config, draft: Config) -> Config:
    """The layout of the speculators project: Qwen3 keys nested, tap ids counted from the embedding output."""
    layer = {key: value for key, value in config.items() if key not in ("architectures", "num_target_layers")}
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": layer,
        "draft_vocab_size": config["vocab_size"],
        "block_size": draft["block_size"],
        "mask_token_id": draft["mask_token_id"],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in draft["target_layer_ids"]],
    }


def _nested_eagle3(config: Config, ids: list[int] | None) -> Config:
    """The layout of the speculators project: the layer's keys nested, drafting keys at the top."""
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    top = {key: config[key] for key in (*flags, "draft_vocab_size", "target_hidden_size") if key in config}
    layer = {key: value for key, value in config.items() if key not in top and key != "architectures"}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "eagle_aux_hidden_state_layer_ids": ids,
        "norm_before_residual": False,
        **top,
    }


def _stack(rng: np.random.Generator, config: Config) -> Tensors:
    """Decoder layers and the final norm."""
    tensors: Tensors = {}
    for i in range(config["num_hidden_layers"]):
        tensors |= {f"layers.{i}.{name}": value for name, value in _layer(rng, config).items()}
    return tensors | {"norm.weight": _norm(rng, config["hidden_size"])}


def _layer(rng: np.random.Generator, config: Config) -> Tensors:
    """One decoder layer. Q and K norms are doubled: attention is peaked, so positions and slots differ."""
    hidden, head_dim, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    tensors: Tensors = {}
    for name, shape in shapes.items():
        gain = 2 if name == "o" else 1
        tensors[f"self_attn.{name}_proj.weight"] = _normal(rng, shape, gain * shape[1] ** -0.5)
        if config["attention_bias"]:
            tensors[f"self_attn.{name}_proj.bias"] = _normal(rng, shape[:1], 0.1)
    for name, shape in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
        tensors[f"mlp.{name}_proj.weight"] = _normal(rng, shape, shape[1] ** -0.5)
    tensors |= {f"self_attn.{name}_norm.weight": 2 * _norm(rng, head_dim) for name in "qk"}
    return tensors | {f"{name}_layernorm.weight": _norm(rng, hidden) for name in ("input", "post_attention")}


def _normal(rng: np.random.Generator, shape: tuple[int, ...], std: float) -> Any:
    return (std * rng.standard_normal(shape)).astype(np.float32)


def _norm(rng: np.random.Generator, size: int) -> Any:
    return (1 + 0.1 * rng.standard_normal(size)).astype(np.float32)


def _write(folder: Path, config: Config, tensors: Tensors, dtype: str, shards: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _dump(folder / "config.json", config)
    tensors = {n: value.astype(DTYPES[dtype]) if value.dtype.kind == "f" else value for n, value in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names = list(tensors)
    index: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[number::shards]}
        save_file(part, folder / file)
        index |= dict.fromkeys(part, file)
    total = sum(value.nbytes for value in tensors.values())
    _dump(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})


def _dump(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n")
