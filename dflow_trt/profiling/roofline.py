"""Bytes and operations of a pass, from the specs, against what the machine can do.

Counted are weights (each read once a pass), live cache rows, products and attention. What is small beside them is left
out: embeddings, norms, activations, what chooses among a head's best ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from dflow_trt import contract as c
from dflow_trt.bundle import Bundle
from dflow_trt.checkpoint.names import EMBEDDING, HEAD, Shapes, target_tensors
from dflow_trt.graphs.builder import NUMPY
from dflow_trt.kinds import KINDS
from dflow_trt.profiling.record import PassWork, Roof, Roofline, RoundCost
from dflow_trt.spec import DrafterSpec, StackSpec, WeightForm

MILLISECONDS = 1e3


@dataclass(frozen=True)
class Work:
    """One engine pass: what it must read, and compute (a multiply-add is two operations)."""

    bytes: int
    operations: int


@dataclass(frozen=True)
class Engine:
    """A stack with its head. matrices: elements of all linear layers but the head; item: bytes of a weight; cache_item:
    of a cache element."""

    stack: StackSpec
    matrices: int
    vocab_columns: int
    item: int
    cache_item: int

    @property
    def head(self) -> int:
        """Elements."""
        return self.vocab_columns * self.stack.hidden_size

    def work(self, batch: int, rows: int, head_rows: int, context: float) -> Work:
        """A pass over ``rows`` rows of each request, ``head_rows`` of them with logits, ``context`` rows live."""
        stack = self.stack
        cached = 2 * stack.num_layers * stack.num_kv_heads * stack.head_dim * context
        attention = 4 * stack.num_layers * stack.num_heads * stack.head_dim * context
        products = 2 * (rows * self.matrices + head_rows * self.head)
        return Work(
            bytes=round((self.matrices + self.head) * self.item + batch * cached * self.cache_item),
            operations=round(batch * (products + rows * attention)),
        )


def form_of(bundle: Bundle, form: WeightForm) -> str:
    """What a product computes with: "int8", or the engine's dtype."""
    return "int8" if form == "int8" else bundle.build.dtype


def target_engine(bundle: Bundle) -> Engine:
    """The target as the bundle runs it."""
    target = bundle.target
    layers = {name: shape for name, shape in target_tensors(target).items() if name not in (EMBEDDING, HEAD)}
    return _engine(bundle, target.stack, layers, target.vocab_size, bundle.build.target_form)


def drafter_engine(bundle: Bundle, drafter: str) -> Engine | None:
    """A drafter as the bundle runs it, its head among it; None where it has no layers."""
    spec = bundle.drafters[drafter].spec
    stack = spec.decoder
    return _engine(bundle, stack, _layers(spec), spec.draft_vocab, bundle.build.draft_weights) if stack else None


def _layers(spec: DrafterSpec) -> Shapes:
    """What a drafting call reads in the form of drafters, but for the head."""
    formed: Shapes = KINDS[spec.kind].graphs_module().stored(spec)[c.DRAFTER].formed
    return {name: shape for name, shape in formed.items() if name != HEAD}


def _engine(bundle: Bundle, stack: StackSpec, layers: Shapes, vocab: int, form: WeightForm) -> Engine:
    matrices = sum(prod(shape) for shape in layers.values() if len(shape) == 2)
    cache_item = NUMPY[bundle.build.dtype].itemsize
    return Engine(stack, matrices, c.vocab_columns(vocab), 1 if form == "int8" else cache_item, cache_item)


def working_set(bundle: Bundle) -> int:
    """Bytes that a round of the largest drafter reads, but for caches."""
    engines = [target_engine(bundle), *(drafter_engine(bundle, name) for name in bundle.drafters)]
    sizes = [(engine.matrices + engine.head) * engine.item for engine in engines if engine]
    return sizes[0] + max(sizes[1:], default=0)


def roofline(bundle: Bundle, costs: Sequence[RoundCost], roof: Roof) -> Roofline:
    """Every verify and draft pass that was timed, the full length of a strategy only. Passes are the same at any
    temperature."""
    full: dict[tuple[str, int, int | None], RoundCost] = {}
    for cost in costs:  # sorted by drafts within a strategy
        full[cost.strategy, cost.batch, cost.input_len] = cost
    return Roofline(roof=roof, passes=[each for cost in full.values() for each in _passes(bundle, cost, roof)])


def _passes(bundle: Bundle, cost: RoundCost, roof: Roof) -> list[PassWork]:
    rows = cost.drafts + 1
    work = target_engine(bundle).work(cost.batch, rows, rows, cost.context)
    found = [_held(cost, "verify", form_of(bundle, bundle.build.target_form), work, roof)]
    drafting = _draft_work(bundle, cost)
    if drafting is not None:
        found.append(_held(cost, "draft", form_of(bundle, bundle.build.draft_weights), drafting, roof))
    return found


def _draft_work(bundle: Bundle, cost: RoundCost) -> Work | None:
    """All drafts of a round: one call, or one after another; None where no engine makes them."""
    drafter = bundle.strategy(cost.strategy).drafter
    engine = drafter_engine(bundle, drafter) if drafter is not None else None
    if drafter is None or engine is None:
        return None
    spec = bundle.drafters[drafter].spec
    calls, rows = spec.draft_calls(cost.drafts), spec.draft_rows
    call = engine.work(cost.batch, rows, min(rows, spec.num_drafts), cost.context)
    return Work(calls * call.bytes, calls * call.operations) if calls else None


def _held(cost: RoundCost, stage: str, form: str, work: Work, roof: Roof) -> PassWork:
    memory = work.bytes / roof.working_set_bandwidth * MILLISECONDS
    compute = work.operations / roof.operations[form] * MILLISECONDS
    least, milliseconds = max(memory, compute), cost.milliseconds[stage]
    data = {
        "strategy": cost.strategy,
        "stage": stage,
        "batch": cost.batch,
        "drafts": cost.drafts,
        "form": form,
        "bytes": work.bytes,
        "operations": work.operations,
        "milliseconds": milliseconds,
        "roof": least,
        "fraction": least / milliseconds,
        "bound": "memory" if memory >= compute else "compute",
    }
    return PassWork.model_validate(data)
