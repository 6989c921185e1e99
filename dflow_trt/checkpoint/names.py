"""Which tensors a checkpoint must have, from its spec alone, and the check that it has exactly those."""

from __future__ import annotations

from pathlib import Path

from dflow_trt.checkpoint.reader import refuse
from dflow_trt.checkpoint.weights import Weights
from dflow_trt.spec import ConvSpec, DFlashSpec, DominoSpec, Eagle3Spec, SelectorSpec, StackSpec, TargetSpec

Shapes = dict[str, tuple[int, ...]]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
DRAFT_EMBEDDING = "embed_tokens.weight"
RELAY_NAMES = tuple(f"relay_{part}.{kind}" for part in ("norm", "mlp.0", "mlp.2") for kind in ("weight", "bias"))
PREDECESSOR, SUCCESSOR = (f"candidate_selector.{side}_codebook" for side in ("predecessor", "successor"))
SELECTOR_HIDDEN = "candidate_selector.hidden_projection.weight"
DOMINO_NAMES = ("prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight")


def target_tensors(spec: TargetSpec) -> Shapes:
    """Name -> shape of a target's tensors, Hugging Face names; ``lm_head.weight`` only if untied."""
    table = (spec.vocab_size, spec.stack.hidden_size)
    head: Shapes = {} if spec.tied_head else {HEAD: table}
    return {EMBEDDING: table} | _stack(spec.stack, "model.") | head


def linear_layers(stack: StackSpec, prefix: str) -> dict[str, tuple[int, int]]:
    """Name -> (outputs, input features) of the linear layers of a stack: what a checkpoint may quantise."""
    matrices = {name: shape for name, shape in _stack(stack, prefix).items() if len(shape) == 2}
    return {name.removesuffix(".weight"): (shape[0], shape[1]) for name, shape in matrices.items()}


def drafter_tensors(spec: DFlashSpec) -> Shapes:
    """Name -> shape of a drafter's tensors, z-lab's names, with those of its other parts where the spec has them."""
    hidden = spec.stack.hidden_size
    width = len(spec.target_layer_ids) * spec.target_hidden_size
    shapes: Shapes = {"fc.weight": (hidden, width), "hidden_norm.weight": (hidden,)} | _stack(spec.stack, "")
    if spec.relay:
        shapes |= relay_tensors(hidden)
    if spec.conv:
        shapes |= conv_tensors(spec.conv, spec.stack)
    if isinstance(spec.head, DominoSpec):
        shapes |= domino_tensors(spec.head, hidden, spec.vocab_size)
    if isinstance(spec.head, SelectorSpec):
        shapes |= selector_tensors(spec.head, hidden, spec.vocab_size)
    return shapes


def relay_tensors(hidden: int) -> Shapes:
    """Name -> shape of the relay: a LayerNorm, and an MLP from [E(b) ; E(y_hat) ; h] to [beta ; gamma]."""
    shapes = (
        (hidden,),
        (hidden,),
        (2 * hidden, 3 * hidden),
        (2 * hidden,),
        (2 * hidden, 2 * hidden),
        (2 * hidden,),
    )
    return dict(zip(RELAY_NAMES, shapes, strict=True))


def domino_tensors(head: DominoSpec, hidden: int, vocab: int) -> Shapes:
    """Name -> shape of Domino's head: a GRU (gates r, z, n; no biases), and the two layers from [z ; s] to logits."""
    gates, state = 3 * head.state_size, head.state_size
    shapes = ((gates, hidden), (gates, state), (head.rank, hidden + state), (vocab, head.rank))
    return dict(zip(DOMINO_NAMES, shapes, strict=True))


def conv_tensors(conv: ConvSpec, stack: StackSpec) -> Shapes:
    """Name -> shape of DFlash 2's convolutions: the base of both kernels of each, and what makes their dynamic part."""
    hidden, rows = stack.hidden_size, 2 * conv.kernel_size
    shapes: Shapes = {
        "base_kernel": (2, conv.kernel_size, hidden),
        "kernel_projection.weight": (rows * hidden // conv.group_size, hidden),
    }
    places = [f"layers.{i}.{part}_conv" for i in range(stack.num_layers) for part in ("attention", "mlp")]
    return {f"{place}.{name}": shape for place in places for name, shape in shapes.items()}


def selector_tensors(selector: SelectorSpec, hidden: int, vocab: int) -> Shapes:
    """Name -> shape of DFlash 2's selector: two codebooks of the vocabulary, and the layer that makes z a query."""
    codebook = (vocab, selector.rank)
    return {PREDECESSOR: codebook, SUCCESSOR: codebook, SELECTOR_HIDDEN: (selector.rank, hidden)}


def eagle3_tensors(spec: Eagle3Spec) -> Shapes:
    """Name -> shape of an EAGLE-3 drafter's tensors but its vocabulary maps, its layer called layers.0.

    The projections to queries, keys and values read two rows' width: a token's embedding and a feature.
    """
    hidden, width = spec.stack.hidden_size, len(spec.target_layer_ids) * spec.target_hidden_size
    shapes: Shapes = {"fc.weight": (hidden, width)} | _stack(spec.stack, "")
    for name in (f"layers.0.self_attn.{label}_proj.weight" for label in "qkv"):
        shapes[name] = (shapes[name][0], 2 * hidden)
    shapes |= {"layers.0.hidden_norm.weight": (hidden,), HEAD: (spec.draft_vocab_size, hidden)}
    if spec.own_embedding:
        shapes[DRAFT_EMBEDDING] = (spec.vocab_size, hidden)
    if spec.norm_before_fc:
        shapes["input_norm.weight"] = (width,)
    if spec.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (spec.target_hidden_size,) for i in range(len(spec.target_layer_ids))}
    return shapes


def check_tensors(weights: Weights, expected: Shapes, where: Path) -> None:
    """UserError unless the tensors are exactly the expected ones, with their shapes and a float dtype."""
    found = set(weights.names())
    missing = [name for name in expected if name not in found]
    if missing:
        shape = list(expected[missing[0]])
        raise refuse(where, missing[0], "missing" + _more(missing), f"a tensor of shape {shape}", "complete the folder")
    left = sorted(found - expected.keys())
    if left:
        todo = "use a supported architecture, or remove it"
        raise refuse(where, left[0], "left over" + _more(left), "the tensors of config.json's model", todo)
    for name, shape_wanted in expected.items():
        weights.dtype(name)
        if weights.shape(name) != shape_wanted:
            got, want = list(weights.shape(name)), list(shape_wanted)
            raise refuse(
                where,
                name,
                f"of shape {got}",
                f"{want}, as config.json says",
                "correct config.json or weights",
            )


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _stack(stack: StackSpec, prefix: str) -> Shapes:
    layer = _layer(stack)
    shapes = {f"{prefix}layers.{i}.{name}": shape for i in range(stack.num_layers) for name, shape in layer.items()}
    return shapes | {f"{prefix}norm.weight": (stack.hidden_size,)}


def _layer(stack: StackSpec) -> Shapes:
    hidden, inner, head_dim = stack.hidden_size, stack.intermediate_size, stack.head_dim
    q, kv = stack.num_heads * head_dim, stack.num_kv_heads * head_dim
    attention: Shapes = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    mlp: Shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    shapes = {f"self_attn.{name}_proj.weight": shape for name, shape in attention.items()}
    if stack.attention_bias:
        shapes |= {f"self_attn.{name}_proj.bias": shape[:1] for name, shape in attention.items()}
    if stack.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
    shapes |= {f"mlp.{name}_proj.weight": shape for name, shape in mlp.items()}
    return shapes | {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
