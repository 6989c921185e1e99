"""An independent forward pass in numpy, straight from the checkpoint: what a build is checked against.

It shares no code with the graphs but the rotary tables, reads one matrix at a time, and knows no cache: a drafter's
context is simply given whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from dflow_trt.checkpoint.names import EMBEDDING, HEAD, PREDECESSOR, SELECTOR_HIDDEN, SUCCESSOR
from dflow_trt.checkpoint.weights import Array, QuantisedLinear, Weights
from dflow_trt.rope import rope_tables
from dflow_trt.spec import ConvSpec, DFlashSpec, DominoSpec, Eagle3Spec, StackSpec, TargetSpec, WeightForm

HEAD_ROWS = 4096  # vocabulary rows at a time
Linear = Callable[[Array, Array], Array]
INT8_LEVELS, FP8_LEVELS = (-128, 127), (-448, 448)  # the ends of the types that inputs are rounded to


def float_linear(x: Array, weight: Array) -> Array:
    """x [S,in] @ weight [out,in]^T."""
    return x @ weight.T


def int8_linear(x: Array, weight: Array) -> Array:
    """The same with int8 weights a channel and int8 activations a row, rounded to the nearest level."""
    channel = np.maximum(np.abs(weight).max(axis=1), 1e-20) / 127
    step = np.maximum(np.abs(x).max(axis=-1, keepdims=True), 1e-20) / 127
    levels = np.rint(x / step) @ np.rint(weight / channel[:, None]).T
    return np.asarray(levels * step * channel, np.float32)


LINEAR: dict[WeightForm, Linear] = {"float": float_linear, "int8": int8_linear}


def layer_input(x: Array, layer: QuantisedLinear | None, rounded: bool = True) -> Array:
    """x [S,in] as a quantised layer takes it; without ``rounded`` only multiplied."""
    smoothing, scale = (None, None) if layer is None else (layer.pre_quant_scale(), layer.input_scale())
    if smoothing is not None:
        x = x * smoothing
    if layer is None or scale is None or not rounded:
        return x
    levels = x / scale
    if layer.spec.algo == "FP8":
        return np.clip(levels, *FP8_LEVELS).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    return np.asarray(np.clip(np.rint(levels), *INT8_LEVELS) * scale, np.float32)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight, np.float32)


def convolved(x: Array, kernel: Array) -> Array:
    """y_t = sum over o of kernel_{t,o} * x_{t-o}, nothing before row 0: x [S,E] under kernel [S,kernel size,E]."""
    y = np.zeros_like(x)
    for offset in range(kernel.shape[1]):
        y[offset:] += kernel[offset:, offset] * x[: len(x) - offset]
    return y


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    return np.asarray(centred / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + eps) * weight + bias)


def silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


@dataclass(frozen=True)
class ReferenceStack:
    """The decoder layers of one checkpoint. rounded: whether inputs of quantised layers are, as it says.

    conv: what is around attention and MLP, where something is.
    """

    weights: Weights
    stack: StackSpec
    prefix: str
    linear: Linear = float_linear
    rounded: bool = True
    conv: ConvSpec | None = None

    def read(self, name: str) -> Array:
        return self.weights.read(name).astype(np.float32)

    def project(self, name: str, x: Array) -> Array:
        """One linear layer with its bias, if it has one."""
        x = layer_input(x, self.weights.quantised(f"{name}.weight"), self.rounded)
        y = self.linear(x, self.read(f"{name}.weight"))
        return y + self.read(f"{name}.bias") if f"{name}.bias" in set(self.weights.names()) else y

    def rotate(self, x: Array, positions: Array) -> Array:
        """x [heads,S,D]: the half-split rotation at absolute positions."""
        tables = rope_tables(self.stack.rope, self.stack.head_dim, int(positions.max()) + 1)
        cos, sin = (table[positions] for table in tables)
        left, right = np.split(x, 2, axis=-1)
        return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)

    def heads(self, i: int, label: str, x: Array, positions: Array) -> Array:
        """[S,E] -> normed (not in a Llama), rotated q or k, or plain v: [heads,S,D]."""
        name = f"{self.prefix}layers.{i}.self_attn.{label}"
        y = self.project(f"{name}_proj", x).reshape(len(x), -1, self.stack.head_dim).swapaxes(0, 1)
        if label == "v":
            return y
        if self.stack.qk_norm:
            y = rms_norm(y, self.read(f"{name}_norm.weight"), self.stack.rms_norm_eps)
        return self.rotate(y, positions)

    def visible(self, i: int, queries: Array, keys: Array) -> Array:
        """[S,T] bool: the mask of layer i."""
        distance = queries[:, None] - keys[None, :]
        mask = distance >= 0 if self.stack.causal[i] else np.ones_like(distance, bool)
        window = self.stack.windows[i]
        return mask if window is None else mask & (np.abs(distance) < window)

    def layer(self, i: int, x: Array, positions: Array, context: Array | None = None) -> Array:
        """x [S,E] through decoder layer i. ``context`` [C,E] comes before the rows, at positions 0..C-1, un-normed."""
        name, eps = f"{self.prefix}layers.{i}", self.stack.rms_norm_eps
        normed = rms_norm(x, self.read(f"{name}.input_layernorm.weight"), eps)
        attention = partial(self.attention, i, positions, context)
        x = x + self._surrounded(f"{name}.attention_conv", normed, attention)
        normed = rms_norm(x, self.read(f"{name}.post_attention_layernorm.weight"), eps)
        return x + self._surrounded(f"{name}.mlp_conv", normed, partial(self.mlp, i))

    def attention(self, i: int, positions: Array, context: Array | None, normed: Array) -> Array:
        """What layer i's attention makes of normed rows [S,..]; for ``context`` see :meth:`layer`."""
        source, at = normed, positions
        if context is not None:
            source, at = np.concatenate([context, normed]), np.concatenate([np.arange(len(context)), positions])
        q = self.heads(i, "q", normed, positions)
        k, v = (np.repeat(self.heads(i, label, source, at), self.stack.heads_per_group, axis=0) for label in "kv")
        scores = q @ k.swapaxes(1, 2) / np.sqrt(self.stack.head_dim)
        scores = np.where(self.visible(i, positions, at), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = (weights / weights.sum(axis=-1, keepdims=True)) @ v
        rows = mixed.swapaxes(0, 1).reshape(len(normed), -1).astype(np.float32)
        return self.project(f"{self.prefix}layers.{i}.self_attn.o_proj", rows)

    def mlp(self, i: int, normed: Array) -> Array:
        """What layer i's MLP makes of normed rows [S,E]."""
        name = f"{self.prefix}layers.{i}.mlp"
        gated = silu(self.project(f"{name}.gate_proj", normed)) * self.project(f"{name}.up_proj", normed)
        return self.project(f"{name}.down_proj", gated.astype(np.float32))

    def _surrounded(self, name: str, x: Array, part: Callable[[Array], Array]) -> Array:
        """Attention or MLP of normed rows x [S,E], between its two convolutions where there are any."""
        if self.conv is None:
            return part(x)
        kernels = self.read(f"{name}.base_kernel") + self.dynamic_kernels(name, x)
        return convolved(part(convolved(x, kernels[:, 0])), kernels[:, 1])

    def dynamic_kernels(self, name: str, x: Array) -> Array:
        """What normed rows x [S,E] add to the base of both kernels of a convolution: [S,2,kernel size,E]."""
        return self.by_channel(self.project(f"{name}.kernel_projection", x))

    def by_channel(self, dynamic: Array) -> Array:
        """[S,2 * kernel size * groups] -> [S,2,kernel size,E]: every channel has what its group has."""
        assert self.conv is not None
        shape = (len(dynamic), 2, self.conv.kernel_size, -1)
        return np.repeat(dynamic.reshape(shape), self.conv.group_size, axis=-1)


@dataclass(frozen=True)
class ReferenceHead:
    """Embedding and head of the target, which its drafters share."""

    weights: Weights
    spec: TargetSpec
    linear: Linear = float_linear

    def embed(self, ids: Sequence[int]) -> Array:
        return np.concatenate([self.weights.read(EMBEDDING, slice(i, i + 1)) for i in ids]).astype(np.float32)

    def logits(self, x: Array) -> Array:
        """Final-normed x [S,E] -> logits over the live vocabulary."""
        name = EMBEDDING if self.spec.tied_head else HEAD
        parts = [self.linear(x, part) for part in self._rows(name)]
        return np.concatenate(parts, axis=-1)

    def _rows(self, name: str) -> Iterator[Array]:
        for start in range(0, self.spec.live_vocab, HEAD_ROWS):
            rows = slice(start, min(start + HEAD_ROWS, self.spec.live_vocab))
            yield self.weights.read(name, rows).astype(np.float32)


@dataclass(frozen=True)
class ReferenceEagle3:
    """An EAGLE-3 drafter (arXiv 2503.01840), its rows given with their whole past."""

    weights: Weights
    spec: Eagle3Spec
    linear: Linear = float_linear

    @property
    def stack(self) -> ReferenceStack:
        return ReferenceStack(self.weights, self.spec.stack, "", self.linear)

    def normed(self, name: str, x: Array) -> Array:
        return rms_norm(x, self.stack.read(f"{name}.weight"), self.spec.stack.rms_norm_eps)

    def features(self, taps: Array) -> Array:
        """f [S,E] of this drafter's own taps [S,m*E]."""
        x = self.normed("input_norm", taps) if self.spec.norm_before_fc else taps
        if self.spec.fc_norm:
            parts = np.split(x, len(self.spec.taps), axis=1)
            x = np.concatenate([self.normed(f"fc_norm.{i}", part) for i, part in enumerate(parts)], axis=1)
        return np.asarray(x @ self.stack.read("fc.weight").T)

    def inputs(self, embeds: Array, features: Array) -> Array:
        """What queries, keys and values are projected from [S,2E]: the tokens' embeddings and the features, normed."""
        parts = self.normed("layers.0.input_layernorm", embeds), self.normed("layers.0.hidden_norm", features)
        return np.concatenate(parts, axis=1)

    def residual(self, embeds: Array, features: Array) -> Array:
        """What the layer adds to [S,E]."""
        return self.inputs(embeds, features)[:, embeds.shape[1] :] if self.spec.norm_before_residual else features

    def layer(self, embeds: Array, features: Array, positions: Array, past: Array | None = None) -> Array:
        """h [S,E], before the final norm. ``past`` [C,2E]: the inputs of the rows at positions 0..C-1."""
        attended = self.stack.attention(0, positions, past, self.inputs(embeds, features))
        x = self.residual(embeds, features) + attended
        return x + self.stack.mlp(0, self.normed("layers.0.post_attention_layernorm", x))

    def passed_on(self, h: Array) -> Array:
        """The features of the rows behind."""
        return self.normed("norm", h) if self.spec.norm_output else h

    def logits(self, h: Array) -> Array:
        """[S,draft vocabulary]."""
        return self.linear(self.normed("norm", h), self.stack.read(HEAD))


def target_forward(
    weights: Weights, spec: TargetSpec, ids: Sequence[int], linear: Linear = float_linear, rounded: bool = True
) -> tuple[Array, list[Array]]:
    """A whole pass over ``ids``: (logits [S,live vocabulary], the output of every layer [S,E])."""
    stack, head = ReferenceStack(weights, spec.stack, "model.", linear, rounded), ReferenceHead(weights, spec, linear)
    x, positions, outputs = head.embed(ids), np.arange(len(ids)), []
    for i in range(spec.stack.num_layers):
        x = stack.layer(i, x, positions)
        outputs.append(x)
    return head.logits(rms_norm(x, stack.read("model.norm.weight"), spec.stack.rms_norm_eps)), outputs


def context_states(weights: Weights, spec: DFlashSpec, taps: Array) -> Array:
    """h [S,E] of this drafter's packed taps [S,m*E]."""
    projected = taps @ weights.read("fc.weight").astype(np.float32).T
    return rms_norm(projected, weights.read("hidden_norm.weight").astype(np.float32), spec.stack.rms_norm_eps)


def relay_term(weights: Weights, spec: DFlashSpec, bonus: Array, reject: Array, h: Array) -> Array:
    """beta * LN(h) + gamma for rows h [J,E] and the embeddings of the token pair [E]."""
    assert spec.relay is not None
    read: dict[str, Any] = {name: weights.read(name).astype(np.float32) for name in _RELAY}
    pair = np.broadcast_to(np.concatenate([bonus, reject]), (len(h), 2 * h.shape[1]))
    hidden = np.concatenate([pair, h], axis=1) @ read["relay_mlp.0.weight"].T + read["relay_mlp.0.bias"]
    beta, gamma = np.split(silu(hidden) @ read["relay_mlp.2.weight"].T + read["relay_mlp.2.bias"], 2, axis=1)
    normed = layer_norm(h, read["relay_norm.weight"], read["relay_norm.bias"], spec.relay.norm_eps)
    return np.asarray(beta * normed + gamma)


def domino_corrections(
    weights: Weights, spec: DFlashSpec, z: Array, read: Array, linear: Linear = float_linear
) -> Array:
    """What the causal head adds to the base logits of final-normed slots z [K,E]: [K,vocabulary], zero in the prefix.

    read [K,E]: the embeddings of the anchor and of all drafts but the last.
    """
    assert isinstance(spec.head, DominoSpec)
    split, state, corrections = spec.stack.hidden_size, np.zeros((1, spec.head.state_size), np.float32), []
    down, up = (weights.read(f"embed_proj.{layer}.weight").astype(np.float32) for layer in (0, 2))
    gates = [weights.read(f"prefix_gru.weight_{label}_l0").astype(np.float32) for label in ("ih", "hh")]
    for i in range(len(z)):
        state = _gru_step(linear(read[i : i + 1], gates[0]), linear(state, gates[1]), state)
        inner = linear(z[i : i + 1], down[:, :split]) + linear(state, down[:, split:])
        corrections.append(linear(silu(inner), up)[0] if i >= spec.head.prefix_length else np.zeros(len(up)))
    return np.asarray(corrections, np.float32)


def selector_scores(
    weights: Weights, spec: DFlashSpec, z: Array, previous: Array, candidates: Array, linear: Linear = float_linear
) -> Array:
    """How well candidates [K,k] follow the tokens before, ``previous`` [K], at final-normed slots z [K,E]: [K,k]."""
    hidden = linear(z, weights.read(SELECTOR_HIDDEN).astype(np.float32))
    before = hidden * _rows(weights, PREDECESSOR, previous)
    after = _rows(weights, SUCCESSOR, candidates.reshape(-1)).reshape(*candidates.shape, -1)
    return np.asarray(np.einsum("ir,ijr->ij", before, after))


def _rows(weights: Weights, name: str, ids: Array) -> Array:
    """Rows of a table, [N,width]."""
    parts = [weights.read(name, slice(i, i + 1)) for i in ids.tolist()]
    return np.concatenate(parts).astype(np.float32)


def _gru_step(from_input: Array, from_state: Array, state: Array) -> Array:
    """torch.nn.GRU's cell without biases: [1,3G] of the input and of the state, gates in the order r, z, n."""
    in_r, in_z, in_n = np.split(from_input, 3, axis=1)
    state_r, state_z, state_n = np.split(from_state, 3, axis=1)
    reset, keep = (1 / (1 + np.exp(-gate)) for gate in (in_r + state_r, in_z + state_z))
    new = np.tanh(in_n + reset * state_n)
    return np.asarray((1 - keep) * new + keep * state, np.float32)


_RELAY = (
    "relay_mlp.0.weight",
    "relay_mlp.0.bias",
    "relay_mlp.2.weight",
    "relay_mlp.2.bias",
    "relay_norm.weight",
    "relay_norm.bias",
)
