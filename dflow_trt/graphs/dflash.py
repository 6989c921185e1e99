"""The DFlash family for a build: three engines a drafter, on the target's vocabulary tables (:mod:`.kind`)."""

from __future__ import annotations

import re

from dflow_trt import contract as c
from dflow_trt.checkpoint.drafter import DFlashCheckpoint, read_drafter
from dflow_trt.checkpoint.names import DOMINO_NAMES, PREDECESSOR, SUCCESSOR, Shapes, drafter_tensors
from dflow_trt.checkpoint.reader import no_settings
from dflow_trt.checkpoint.target import TargetCheckpoint
from dflow_trt.graphs.context import build_context
from dflow_trt.graphs.drafter import build_drafter
from dflow_trt.graphs.kind import Engines, Kept, Settings, Stored, Tables, Writer, describe_stack
from dflow_trt.graphs.relay import RELAY_LOWERING, build_relay
from dflow_trt.spec import ConvSpec, DFlashSpec, DominoSpec, SelectorSpec

_FUSED_CONTEXT = re.compile(r"\.self_attn\.[kv]_")  # in the context engine as well as in the drafter
_WIDE = ("fc.weight", "hidden_norm.weight")  # float32 in every build


def read(folder: str, target: TargetCheckpoint, name: str | None, settings: Settings) -> DFlashCheckpoint:
    """A DFlash, Domino, DFlash 2 or DFlow folder."""
    no_settings(folder, settings)
    return read_drafter(folder, target.spec, name)


def write(writer: Writer, draft: DFlashCheckpoint, engines: Engines) -> None:
    """context, relay and drafter."""
    spec = draft.spec
    with writer.engine(engines[c.CONTEXT], spec.name, draft.weights) as g:
        build_context(g, spec, writer.taps)
    with writer.engine(engines[c.RELAY], spec.name, draft.weights, RELAY_LOWERING) as g:
        build_relay(g, spec, writer.vocabulary, writer.build.dtype)
    with writer.engine(engines[c.DRAFTER], spec.name, draft.weights) as g:
        build_drafter(g, spec, writer.vocabulary)


def stored(spec: DFlashSpec) -> dict[str, Stored]:
    """The tensors of each engine; keys and values of the layers are in two of them."""
    shapes = _shapes(spec)
    relay = {name: shape for name, shape in shapes.items() if name.startswith("relay_")}
    wide = {name: shapes[name] for name in _WIDE}
    codebooks = {name: shapes[name] for name in (PREDECESSOR, SUCCESSOR) if name in shapes}
    kernels = {name: shape for name, shape in shapes.items() if name.endswith(".base_kernel")}
    others = relay.keys() | wide.keys() | codebooks.keys() | kernels.keys()
    rest = {name: shape for name, shape in shapes.items() if name not in others}
    context = {name: shape for name, shape in rest.items() if _FUSED_CONTEXT.search(name)}
    kept: list[Kept] = [(kernels, None), (codebooks, spec.checkpoint_dtype)]
    return {
        c.CONTEXT: Stored(wide, context, rope=spec.stack),
        c.RELAY: Stored(wide=relay),
        c.DRAFTER: Stored(formed=rest, kept=kept, rope=spec.stack, head=True),
    }


def _shapes(spec: DFlashSpec) -> Shapes:
    """The checkpoint's, but as they are stored."""
    shapes = drafter_tensors(spec)
    if isinstance(spec.head, DominoSpec):
        # its rows cover every column of the head, and its first matrix is split by input
        down, up = DOMINO_NAMES[2:]
        width = spec.stack.hidden_size
        shapes |= {up: (c.vocab_columns(spec.vocab_size), spec.head.rank), down: (spec.head.rank, width)}
        shapes[f"{down}.state"] = (spec.head.rank, spec.head.state_size)
    return shapes


def borrowed(spec: DFlashSpec) -> list[Tables]:
    """The relay embeds the block; the drafter has the head, and embeds its drafts where a causal head reads them."""
    reads_drafts = isinstance(spec.head, DominoSpec) and spec.corrected_drafts
    head: Tables = frozenset({"head", "embed"}) if reads_drafts else frozenset({"head"})
    return [frozenset({"embed"}), head]


def describe(spec: DFlashSpec) -> str:
    """A line for people."""
    relay = f"relay {spec.relay.start}" if spec.relay else "no relay"
    taps = ", ".join(map(str, spec.target_layer_ids))
    conv = f", {_conv_label(spec.conv)}" if spec.conv else ""
    head = f", {_head_label(spec.head)}" if spec.head else ""
    return f"{describe_stack(spec.stack, spec.vocab_size)}; block {spec.block_size}, taps {taps}, {relay}{conv}{head}"


def _conv_label(conv: ConvSpec) -> str:
    return f"convolutions over {conv.kernel_size} rows (groups of {conv.group_size})"


def _head_label(head: DominoSpec | SelectorSpec) -> str:
    if isinstance(head, SelectorSpec):
        return f"selector among {head.top_k} (rank {head.rank})"
    slots = ", shifted slots" if head.shifted else ""
    first = head.prefix_length + 1
    return f"Domino head from draft {first} on (state {head.state_size}, rank {head.rank}{slots})"
