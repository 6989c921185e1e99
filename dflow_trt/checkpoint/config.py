"""What the keys of a Qwen3 config mean: rotary embedding, sliding windows and sizes, in transformers 4 and 5
layouts.

The rules are those of transformers 5.24 (``modeling_rope_utils``, ``configuration_qwen3``). Where
transformers would only warn, or would crash later, the value is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dflow_trt.checkpoint.reader import Config, read_config, show
from dflow_trt.spec import DTYPES, RopeSpec, StackSpec

__all__ = ["Config", "read_config", "read_layers", "read_rope", "read_stack", "reject_quantised", "reject_unsupported"]

LAYER_TYPES = ("full_attention", "sliding_attention")
MAX_LAYERS = 1024
_SCALED = {"factor"}
_YARN = {
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
}
_ROPE_KEYS = {"default": set[str](), "linear": _SCALED, "yarn": _SCALED | _YARN | {"truncate"}}
_UNSUPPORTED = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "per_layer_config",
)


def reject_unsupported(config: Config) -> None:
    """Refuse, by key, models whose tensors look like Qwen3 but whose arithmetic is another."""
    for key in _UNSUPPORTED:
        if config.get(key) not in (None, 0):
            raise config.error(key, "absent", "use a dense checkpoint")
    config.one_of("hidden_act", ("silu",), default="silu")
    if not config.boolean("use_qk_norm", True):
        raise config.error("use_qk_norm", "true or absent", "use a Qwen3 model with q_norm and k_norm")
    for key in ("dtype", "torch_dtype"):
        config.one_of(key, DTYPES, default=DTYPES[0])
    if config.get("dtype") and config.get("torch_dtype") not in (None, config.get("dtype")):
        raise config.error("torch_dtype", f"the value of dtype, {config.get('dtype')!r}", "keep one of the two keys")


def reject_quantised(config: Config) -> None:
    """Refuse a checkpoint that says that its weights are quantised."""
    if config.get("quantization_config") is not None:
        raise config.error("quantization_config", "absent", "use an unquantised checkpoint")


def read_rope(config: Config, head_dim: int) -> RopeSpec:
    """The rotary embedding for this ``head_dim``; other kinds than default, linear, yarn are refused."""
    if head_dim % 2:
        raise config.error("head_dim", "an even number", "rotary embedding pairs the halves of a head")
    rope = _rope_section(config)
    kind = _rope_kind(rope)
    unknown = sorted(key for key, value in rope.data.items() if value is not None and key not in _known(kind))
    if unknown:
        raise rope.error(unknown[0], f"absent for rope_type {kind!r}", "remove it, or name the rope type it is for")
    theta = rope.number("rope_theta", above=1)
    if kind == "default":
        return RopeSpec("default", theta)
    factor = rope.number("factor", at_least=1)
    return RopeSpec("linear", theta, factor) if kind == "linear" else _yarn(rope, config, theta, factor)


def _rope_section(config: Config) -> Config:
    """The rope parameters as one section, ``rope_theta`` inside, whatever the layout."""
    old, new = config.section("rope_scaling"), config.section("rope_parameters")
    if old and new and old.data and new.data and old.data != new.data:
        raise config.error("rope_scaling", "absent where rope_parameters is given", "keep one of the two keys")
    rope = old if old and old.data else new or Config({}, config.where)
    for key in LAYER_TYPES:
        if rope.get(key) is not None:
            raise rope.error(key, "absent", "one rotary embedding a layer type is not supported")
    for source in (config, rope):
        if source.optional_number("partial_rotary_factor") not in (None, 1.0):
            raise source.error("partial_rotary_factor", "absent or 1.0", "partial rotary is not supported")
    inner, outer = rope.get("rope_theta"), config.get("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        raise config.error("rope_theta", f"{rope.prefix}rope_theta, {show(inner)}", "keep one of the two keys")
    if inner is None:
        config.number("rope_theta", above=1)
    return Config({**rope.data, "rope_theta": outer if inner is None else inner}, rope.where, rope.prefix)


def _rope_kind(rope: Config) -> str:
    """``rope_type``, or its older name ``type``; absent means default."""
    key = "rope_type" if rope.get("rope_type") is not None else "type"
    if rope.get("type") is not None and rope.get("type") != rope.get(key):
        raise rope.error("type", f"the value of rope_type, {show(rope.get(key))}", "keep one of the two keys")
    return rope.one_of(key, tuple(_ROPE_KEYS), default="default")


def _known(kind: str) -> set[str]:
    return {"rope_type", "type", "rope_theta", "partial_rotary_factor"} | _ROPE_KEYS[kind]


def _yarn(rope: Config, config: Config, theta: float, factor: float) -> RopeSpec:
    """YaRN as transformers' ``_compute_yarn_parameters`` reads it.

    The original length is the top-level key, else the section's, else ``max_position_embeddings``; 0 and null
    of the betas mean 32 and 1.
    """
    key = "original_max_position_embeddings"
    holder = config if config.get(key) is not None else rope
    original = holder.optional_integer(key) or config.integer("max_position_embeddings")
    fast = rope.optional_number("beta_fast", at_least=0) or 32.0
    slow = rope.optional_number("beta_slow", at_least=0) or 1.0
    if slow > fast:
        raise rope.error("beta_slow", f"at most beta_fast, {fast:g}")
    return RopeSpec(
        "yarn",
        theta,
        factor,
        original,
        fast,
        slow,
        _attention_factor(rope, factor),
        rope.boolean("truncate", True),
    )


def _attention_factor(rope: Config, factor: float) -> float:
    """YaRN's scale of cos and sin: as given, else 0.1 * ln(factor) + 1, or a quotient by the mscales."""
    given = rope.optional_number("attention_factor", above=0)
    if given is not None:
        return given
    log = math.log(factor)
    mscale, mscale_all_dim = (rope.optional_number(key, at_least=0) for key in ("mscale", "mscale_all_dim"))
    if mscale and mscale_all_dim:
        return (0.1 * mscale * log + 1.0) / (0.1 * mscale_all_dim * log + 1.0)
    return 0.1 * log + 1.0


def read_layers(config: Config, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window in tokens, or None.

    transformers' rule: ``sliding_window`` counts only with ``use_sliding_window``; layers from
    ``max_window_layers`` on slide, unless ``layer_types`` says it layer by layer. A sliding layer without a
    window is refused (transformers cannot run it).
    """
    types = config.get("layer_types")
    window = config.optional_integer("sliding_window") if config.boolean("use_sliding_window", False) else None
    if types is None:
        first = num_layers if window is None else config.integer("max_window_layers", low=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers or any(item not in LAYER_TYPES for item in types):
        raise config.error("layer_types", f"a list of {num_layers} of " + " or ".join(map(repr, LAYER_TYPES)))
    if LAYER_TYPES[1] in types and window is None:
        allowed = "a positive integer together with use_sliding_window true, as layer_types has sliding_attention"
        raise config.error("sliding_window", allowed)
    return tuple(window if item == LAYER_TYPES[1] else None for item in types)


def read_stack(config: Config, causal: Callable[[int | None], bool] = lambda window: True) -> StackSpec:
    """The decoder stack. ``causal``: whether a layer with this window masks later positions; a target's all do."""
    heads, groups = config.integer("num_attention_heads"), config.integer("num_key_value_heads")
    if heads % groups:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
    layers, head_dim = config.integer("num_hidden_layers", high=MAX_LAYERS), config.integer("head_dim")
    windows = read_layers(config, layers)
    return StackSpec(
        hidden_size=config.integer("hidden_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size"),
        rms_norm_eps=config.number("rms_norm_eps", above=0),
        attention_bias=config.boolean("attention_bias", False),
        rope=read_rope(config, head_dim),
        windows=windows,
        causal=tuple(map(causal, windows)),
    )
