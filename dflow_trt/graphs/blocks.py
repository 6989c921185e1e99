"""The Qwen3 blocks that target and drafter share: linear, norm, rope, attention, SwiGLU, embedding, head.

The choices by backend live here, each in one function: :func:`linear` (weight form), :func:`attend` (attention form).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np
import onnx_ir as ir

from dflow_trt.contract import DEAD_LOGIT, VOCAB_BLOCK
from dflow_trt.graphs import store
from dflow_trt.graphs.builder import CONTRIB, NUMPY, GraphBuilder
from dflow_trt.graphs.quantised import alike, packed_weights, quantised_input
from dflow_trt.rope import rope_tables
from dflow_trt.spec import DFlashSpec, DType, StackSpec

U8_ZERO = np.array(128, np.uint8)
MASKED_SCORE = -1e30  # finite: a row of -inf would make NaN of garbage rows

Part = Callable[[ir.Value], ir.Value]
"""The attention or the MLP of a layer: normed rows [B,S,E] -> what they add [B,S,E]."""


def linear(g: GraphBuilder, name: str, x: ir.Value, weights: Sequence[str], bias: Sequence[str] = ()) -> ir.Value:
    """x [.., in] times the stacked weights [sum of out, in] of the checkpoint, plus their stacked biases.

    One product; more where the checkpoint treats the inputs of some weights in another way than those of others.
    """
    groups = alike(g.source, weights)
    labels = [name] if len(groups) == 1 else [f"{name}.{i}" for i in range(len(groups))]
    products = [_product(g, label, x, group) for label, group in zip(labels, groups, strict=True)]
    y = products[0] if len(groups) == 1 else g.op(name, "Concat", *products, axis=-1)
    if not bias:
        return y
    values = np.concatenate([g.source.read(part) for part in bias])
    return g.op(f"{name}.biased", "Add", y, g.stored(f"{name}.bias", values))


def _product(g: GraphBuilder, name: str, x: ir.Value, weights: Sequence[str]) -> ir.Value:
    """x times weights that share its treatment: see :func:`linear`."""
    layers = [layer for layer in map(g.source.quantised, weights) if layer is not None]
    if layers:
        x = quantised_input(g, name, x, layers[0])
    if layers and g.lowering.packed:
        return g.op(name, "MatMul", x, packed_weights(g, f"{name}.weight", layers))
    return times(g, name, x, stored_matrix(g, name, weights))


@dataclass(frozen=True)
class Matrix:
    """Linear weights as an engine has them: values [in,out], and where they are 8 bits wide a float scale [out].

    zero: what values of uint8 count from; None where they are int8.
    """

    values: ir.Value
    scale: ir.Value | None = None
    zero: ir.Value | None = None


def stored_matrix(
    g: GraphBuilder,
    name: str,
    weights: Sequence[str],
    columns: slice = slice(None),
    padded: int | None = None,
    shared: bool = False,
) -> Matrix:
    """Stacked checkpoint weights, written once: ``columns`` of their inputs, with zero channels up to ``padded``.

    shared: more than one product uses them. ONNX Runtime cannot make int8 weights of two products exact on a CPU
    without VNNI; as uint8 they are exact everywhere, on faster CPUs at a price that a product of few rows does not pay.
    """
    if g.lowering.weights == "float":
        array = store.transposed(g.source, weights, NUMPY[g.lowering.dtype], columns, padded)
        return Matrix(g.weight(g.store.add(f"{name}.weight", array)))
    array, scale = store.quantised(g.source, weights, columns, padded)
    if shared:
        array = np.bitwise_xor(array.view(np.uint8), U8_ZERO, out=array.view(np.uint8))  # q + 128
    values = g.weight(g.store.add(f"{name}.weight", array))
    return Matrix(values, g.channel_scale(f"{name}.weight_scale", scale), _zero_point(g) if shared else None)


def _zero_point(g: GraphBuilder) -> ir.Value:
    return g.constant("uint8.zero_point", U8_ZERO)


def times(g: GraphBuilder, name: str, x: ir.Value, matrix: Matrix) -> ir.Value:
    """x [.., in] -> [.., out].

    int8: per-token uint8 activations, per-channel weights. Integer sums are exact, so a row's result does not depend on
    the other rows of the call.
    """
    if matrix.scale is None:
        return g.op(name, "MatMul", x, matrix.values)
    levels, step = quantise_rows(g, name, x)
    unscaled = int8_matmul(g, f"{name}.unscaled", levels, matrix.values, matrix.scale, zero=matrix.zero)
    return g.op(name, "Mul", unscaled, step)


def quantise_rows(g: GraphBuilder, name: str, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """(uint8 levels of x [.., in] around 128, float step [.., 1]): x ~ (levels - 128) * step."""
    peak = g.op(f"{name}.peak", "ReduceMax", g.op(f"{name}.abs", "Abs", x), g.ints(-1), keepdims=1)
    safe = g.op(f"{name}.safe_peak", "Max", peak, g.scalar("tiny", 1e-20))
    step = g.op(f"{name}.step", "Div", safe, g.scalar("int8.top", 127.0))
    rounded = g.op(f"{name}.rounded", "Round", g.op(f"{name}.in_steps", "Div", x, step))
    shifted = g.op(f"{name}.shifted", "Add", rounded, g.scalar("uint8.zero", 128.0))
    return g.op(f"{name}.levels", "Cast", shifted, to=int(ir.DataType.UINT8)), step


def int8_matmul(
    g: GraphBuilder,
    name: str,
    levels: ir.Value,
    weight: ir.Value,
    scale: ir.Value,
    bias: ir.Value | None = None,
    zero: ir.Value | None = None,
) -> ir.Value:
    """(levels - 128) @ (weight - zero), times the channel scale; the row step is left to the caller."""
    inputs = (levels, weight, g.scalar("one", 1.0), scale, _zero_point(g), zero, bias)
    return g.op(name, "MatMulIntegerToFloat", *inputs, domain=CONTRIB)


def rms_norm(g: GraphBuilder, name: str, x: ir.Value, weight: str, eps: float, dtype: DType | None = None) -> ir.Value:
    """``dtype``: of x, where it is not the engine's."""
    return g.op(name, "RMSNormalization", x, g.vector(weight, dtype), axis=-1, epsilon=eps)


@dataclass(frozen=True)
class Rope:
    """The rotary tables of one engine, float32 whatever its dtype, and the positions that it rotates to."""

    cos: ir.Value
    sin: ir.Value
    position_ids: ir.Value

    @classmethod
    def of(cls, g: GraphBuilder, stack: StackSpec, position_ids: ir.Value) -> Rope:
        cos, sin = rope_tables(stack.rope, stack.head_dim, g.contract.static["L"])
        return cls(g.stored("rope.cos", cos, "float32"), g.stored("rope.sin", sin, "float32"), position_ids)

    def rotate(self, g: GraphBuilder, name: str, x: ir.Value) -> ir.Value:
        """x [B,heads,S,D] rotated in float32."""
        if g.lowering.dtype == "float32":
            return g.op(name, "RotaryEmbedding", x, self.cos, self.sin, self.position_ids)
        wide = g.cast(f"{name}.wide", x, "float32")
        rotated = g.op(f"{name}.rotated", "RotaryEmbedding", wide, self.cos, self.sin, self.position_ids)
        return g.cast(name, rotated, g.lowering.dtype)


class Visibility:
    """Which cache rows each query row may see, one mask for every (causal, window) that the layers use.

    Masks are bool: [B,1,G*S,T] in the folded form (query rows repeated for each head of a group), [B,1,S,T] for the
    Attention operator. ``end`` [B] is the first cache row that nobody may see (not needed where all layers are causal).
    """

    def __init__(
        self, g: GraphBuilder, stack: StackSpec, positions: ir.Value, kv_index: ir.Value, end: ir.Value | None = None
    ) -> None:
        self._g, self._kv, self._end = g, kv_index, end
        folded = g.lowering.attention == "fold" and stack.heads_per_group > 1
        rows = g.op("mask.rows", "Tile", positions, g.ints(1, stack.heads_per_group)) if folded else positions
        self._rows = g.op("mask.query", "Unsqueeze", rows, g.ints(1, 3))
        self._masks: dict[tuple[bool, int | None], ir.Value] = {}

    def mask(self, causal: bool, window: int | None) -> ir.Value:
        key = (causal, window)
        if key not in self._masks:
            self._masks[key] = self._build(f"mask.{'causal' if causal else 'block'}.{window or 'full'}", *key)
        return self._masks[key]

    def _build(self, name: str, causal: bool, window: int | None) -> ir.Value:
        conditions = [self._causal(name) if causal else self._before_end(name)]
        if window is not None:
            conditions.append(self._near(name, "behind", self._rows, self._kv, window))
            if not causal:
                conditions.append(self._near(name, "ahead", self._kv, self._rows, window))
        mask = conditions[0]
        for i, condition in enumerate(conditions[1:]):
            mask = self._g.op(f"{name}.and_{i}", "And", mask, condition)
        return mask

    def _causal(self, name: str) -> ir.Value:
        return self._g.op(f"{name}.past", "LessOrEqual", self._kv, self._rows)

    def _near(self, name: str, label: str, later: ir.Value, earlier: ir.Value, window: int) -> ir.Value:
        distance = self._g.op(f"{name}.{label}", "Sub", later, earlier)
        limit = self._g.constant(f"window.{window}", np.array(window, np.int64))
        return self._g.op(f"{name}.{label}.near", "Less", distance, limit)

    def _before_end(self, name: str) -> ir.Value:
        assert self._end is not None
        end = self._g.op(f"{name}.end", "Unsqueeze", self._end, self._g.ints(1, 2, 3))
        row = self._g.op(f"{name}.live", "Less", self._kv, end)
        if self._g.lowering.attention == "fold":
            return row  # [B,1,1,T] broadcasts
        ones = self._g.op(f"{name}.rows", "GreaterOrEqual", self._rows, self._g.ints(0))
        return self._g.op(f"{name}.expanded", "And", row, ones)  # the operator wants every query row


def attend(
    g: GraphBuilder, name: str, q: ir.Value, k: ir.Value, v: ir.Value, mask: ir.Value, stack: StackSpec
) -> ir.Value:
    """Scaled dot-product attention of q [B,H,S,D] over k, v [B,N,T,D]: [B,H,S,D]."""
    scale = 1.0 / math.sqrt(stack.head_dim)
    if g.lowering.attention == "op":
        return g.op(name, "Attention", q, k, v, mask, scale=scale)
    scaled = g.op(f"{name}.scaled", "Mul", q, g.scalar("attn.scale", scale))
    rows = g.op(f"{name}.folded", "Reshape", scaled, g.ints(0, stack.num_kv_heads, -1, stack.head_dim))
    scores = g.op(f"{name}.scores", "MatMul", rows, g.op(f"{name}.keys", "Transpose", k, perm=[0, 1, 3, 2]))
    visible = g.op(f"{name}.visible", "Where", mask, scores, g.scalar("attn.masked", MASKED_SCORE))
    mixed = g.op(f"{name}.mixed", "MatMul", g.op(f"{name}.weights", "Softmax", visible, axis=-1), v)
    return g.op(name, "Reshape", mixed, g.ints(0, stack.num_heads, -1, stack.head_dim))


def by_head(g: GraphBuilder, name: str, fused: ir.Value, counts: dict[str, int], head_dim: int) -> Sequence[ir.Value]:
    """Fused projections [B,S,all heads * D] -> one [B,count,S,D] for each label of ``counts``."""
    rows = g.op(f"{name}.by_head", "Reshape", fused, g.ints(0, 0, sum(counts.values()), head_dim))
    rows = g.op(f"{name}.head_rows", "Transpose", rows, perm=[0, 2, 1, 3])
    return [rows] if len(counts) == 1 else g.split(name, rows, tuple(counts.values()), tuple(counts), axis=1)


def normed_rotated(g: GraphBuilder, name: str, x: ir.Value, weight: str, rope: Rope, stack: StackSpec) -> ir.Value:
    """Queries or keys [B,heads,S,D], normed a head (not in a Llama) and rotated."""
    if stack.qk_norm:
        x = rms_norm(g, f"{name}_norm", x, weight, stack.rms_norm_eps)
    return rope.rotate(g, f"{name}_rope", x)


@dataclass(frozen=True)
class DecoderLayers:
    """The decoder layers of one engine, over its own cache. ``prefix`` is the checkpoint's, e.g. "model.".

    around(name, source, x, part): what a layer has around its attention ("<layer>.attention") and its MLP
    ("<layer>.mlp", as ``source``); None where it is the part alone.
    """

    g: GraphBuilder
    stack: StackSpec
    prefix: str
    rope: Rope
    visibility: Visibility
    write_index: ir.Value
    kv_index: ir.Value
    around: Callable[[str, str, ir.Value, Part], ir.Value] | None = None

    def layer(self, i: int, x: ir.Value) -> ir.Value:
        """x [B,S,E] -> the output of decoder layer i [B,S,E]."""
        g, name, source, eps = self.g, f"layers.{i}", f"{self.prefix}layers.{i}", self.stack.rms_norm_eps
        attention = partial(self._attention, i, f"{name}.attn", source)
        normed = rms_norm(g, f"{name}.input_norm", x, f"{source}.input_layernorm.weight", eps)
        added = self._surrounded(f"{name}.attn", f"{source}.attention", normed, attention)
        x = g.op(f"{name}.attended", "Add", x, added)
        normed = rms_norm(g, f"{name}.mlp_norm", x, f"{source}.post_attention_layernorm.weight", eps)
        mlp = partial(swiglu, g, f"{name}.mlp", source)
        return g.op(f"{name}.out", "Add", x, self._surrounded(f"{name}.mlp", f"{source}.mlp", normed, mlp))

    def _surrounded(self, name: str, source: str, x: ir.Value, part: Part) -> ir.Value:
        return part(x) if self.around is None else self.around(name, source, x, part)

    def _attention(self, i: int, name: str, source: str, x: ir.Value) -> ir.Value:
        q, k, v = self._project(name, source, x)
        return self.attend(i, q, k, v, self.rope)

    def attend(self, i: int, q: ir.Value, k: ir.Value, v: ir.Value, at: Rope) -> ir.Value:
        """Projected rows k, v [B,N,S,D] go into the cache of layer i; q [B,H,R,D], at its own positions, over its live
        part: [B,R,E]."""
        g, stack, name, source = self.g, self.stack, f"layers.{i}.attn", f"{self.prefix}layers.{i}.self_attn"
        queries = normed_rotated(g, f"{name}.q", q, f"{source}.q_norm.weight", at, stack)
        keys = normed_rotated(g, f"{name}.k", k, f"{source}.k_norm.weight", self.rope, stack)
        live = [self._live(i, name, label, rows) for label, rows in (("k", keys), ("v", v))]
        mask = self.visibility.mask(stack.causal[i], stack.windows[i])
        mixed = g.op(
            f"{name}.by_row", "Transpose", attend(g, name, queries, live[0], live[1], mask, stack), perm=[0, 2, 1, 3]
        )
        joined = g.op(f"{name}.joined", "Reshape", mixed, g.ints(0, 0, stack.num_heads * stack.head_dim))
        bias = [f"{source}.o_proj.bias"] if stack.attention_bias else []
        return linear(g, f"{name}.o_proj", joined, [f"{source}.o_proj.weight"], bias)

    def _project(self, name: str, source: str, x: ir.Value) -> Sequence[ir.Value]:
        stack = self.stack
        parts = [f"{source}.self_attn.{label}_proj" for label in "qkv"]
        bias = [f"{part}.bias" for part in parts] if stack.attention_bias else []
        qkv = linear(self.g, f"{name}.qkv_proj", x, [f"{part}.weight" for part in parts], bias)
        counts = {"q": stack.num_heads, "k": stack.num_kv_heads, "v": stack.num_kv_heads}
        return by_head(self.g, name, qkv, counts, stack.head_dim)

    def _live(self, i: int, name: str, label: str, rows: ir.Value) -> ir.Value:
        """Write rows into the cache and give its live part [B,N,T,D]."""
        g = self.g
        cache = g.update_cache(i, "k" if label == "k" else "v", rows, self.write_index)
        length = self._live_length()
        return g.op(f"{name}.live_{label}", "Slice", cache, g.ints(0), length, g.ints(2))

    def _live_length(self) -> ir.Value:
        return self.g.once("live_length", "Shape", self.kv_index)


def swiglu(g: GraphBuilder, name: str, source: str, x: ir.Value) -> ir.Value:
    """down(silu(gate(x)) * up(x))."""
    fused = [f"{source}.mlp.gate_proj.weight", f"{source}.mlp.up_proj.weight"]
    size = g.source.shape(fused[0])[0]
    gate, up = g.split(name, linear(g, f"{name}.gate_up_proj", x, fused), (size, size), ("gate", "up"))
    gated = g.op(f"{name}.gated", "Mul", silu(g, name, gate), up)
    return linear(g, f"{name}.down_proj", gated, [f"{source}.mlp.down_proj.weight"])


def silu(g: GraphBuilder, name: str, x: ir.Value) -> ir.Value:
    return g.op(f"{name}.silu", "Mul", x, g.op(f"{name}.sigmoid", "Sigmoid", x))


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary tables, written once and named by every engine that needs them.

    embed [V,E] in the checkpoint's dtype or the head's; head [V,E] in the engine dtype; head_int8 ([E,V] int8, [V]
    scale) where an engine's head is quantised; dead [V] is added to the logits where some columns are no token.
    """

    embed: ir.ExternalTensor
    head: ir.ExternalTensor | None
    head_int8: tuple[ir.ExternalTensor, ir.ExternalTensor] | None
    dead: np.ndarray | None

    @property
    def live(self) -> int | None:
        """How many ids are tokens, the first ones of all; None where every column is one."""
        return None if self.dead is None else int(np.count_nonzero(self.dead == 0))

    def embedding(self, g: GraphBuilder, name: str, ids: ir.Value) -> ir.Value:
        """ids [..] -> [..,E] in the engine's dtype; the table keeps its own."""
        rows = g.op(name, "Gather", g.weight(self.embed), ids)
        return rows if self.embed.dtype == g.engine_type else g.cast(f"{name}.cast", rows, g.lowering.dtype)

    def scores(self, g: GraphBuilder, x: ir.Value) -> Scores:
        """Final-normed rows [M,E] -> one score a row and vocabulary column."""
        bias = None if self.dead is None else g.stored("head.dead", np.maximum(self.dead, lowest(g)))
        if g.lowering.weights == "float":
            assert self.head is not None
            return Scores(g.op("head", "Gemm", x, g.weight(self.head), bias, transB=1), None)
        assert self.head_int8 is not None
        weight, scale = (g.weight(tensor) for tensor in self.head_int8)
        levels, step = quantise_rows(g, "head", x)
        return Scores(int8_matmul(g, "head", levels, weight, scale, bias), step)


@dataclass(frozen=True)
class Scores:
    """What the head gives: values [M,V], in each row in the order of the logits; logits = values * step [M,1]."""

    values: ir.Value
    step: ir.Value | None

    def logits(self, g: GraphBuilder) -> ir.Value:
        return self.values if self.step is None else g.op("head.logits", "Mul", self.values, self.step)


def output_transform(g: GraphBuilder, drafter: DFlashSpec, x: ir.Value, dtype: DType) -> ir.Value:
    """Draft logits x of that dtype, times output_multiplier, then softcapped.

    Both keep the order of logits, so an argmax goes without them.
    """
    if drafter.output_multiplier != 1.0:
        factor = g.constant("output_multiplier", np.array(drafter.output_multiplier, NUMPY[dtype]))
        x = g.op("logits.multiplied", "Mul", x, factor)
    if drafter.final_logit_softcapping:
        cap = g.constant("softcap", np.array(drafter.final_logit_softcapping, NUMPY[dtype]))
        x = g.op("logits.softcapped", "Mul", g.op("logits.tanh", "Tanh", g.op("logits.capped", "Div", x, cap)), cap)
    return x


def lowest(g: GraphBuilder) -> np.float32:
    """A number that stays finite in the engine's dtype, even below any logit: float16 ends at -65504."""
    return np.float32(ml_dtypes.finfo(NUMPY[g.lowering.dtype]).min) / 2  # type: ignore[no-untyped-call]


def dead_columns(live: int, columns: int) -> np.ndarray | None:
    """The logit bias [V] that keeps ids without a token from ever being chosen; None where every column is a token."""
    return None if live == columns else np.where(np.arange(columns) < live, 0, DEAD_LOGIT).astype(np.float32)


def argmax(g: GraphBuilder, name: str, scores: ir.Value) -> ir.Value:
    """Lowest id of the largest score: [M,V] -> [M]. Blocked: ONNX Runtime's ArgMax over a vocabulary is slow."""
    blocks = g.op(f"{name}.blocks", "Reshape", scores, g.ints(0, -1, VOCAB_BLOCK))
    peaks = g.op(f"{name}.peaks", "ReduceMax", blocks, g.ints(-1), keepdims=0)
    block = g.op(f"{name}.block", "ArgMax", peaks, axis=-1, keepdims=1)
    best = g.op(f"{name}.best_block", "GatherND", blocks, block, batch_dims=1)
    inside = g.op(f"{name}.inside", "ArgMax", best, axis=-1, keepdims=0)
    first = g.op(f"{name}.first", "Mul", g.op(f"{name}.flat", "Squeeze", block, g.ints(-1)), g.ints(VOCAB_BLOCK))
    return g.op(name, "Add", first, inside)
