"""The numerical check at the end of a build: engines against the numpy reference, section by section.

``layer`` runs the embedding, the first and last block and the head of target and drafters, and every context and relay,
each cut out of its engine: memory stays near that of one section. Blocks run twice, at the first positions and far out
behind a full cache, so that windows and slow rotations show. ``full`` runs whole engines too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from dflow_trt import contract as c
from dflow_trt import reference as ref
from dflow_trt.bundle import Bundle
from dflow_trt.checkpoint.drafter import DFlashCheckpoint
from dflow_trt.checkpoint.folder import DrafterCheckpoint
from dflow_trt.checkpoint.target import TargetCheckpoint
from dflow_trt.checkpoint.weights import Array
from dflow_trt.errors import UserError
from dflow_trt.graphs.draft_model import DraftModelCheckpoint
from dflow_trt.memory import plan_memory, show_bytes
from dflow_trt.runtime.ort import exact_int8
from dflow_trt.spec import CACHE_STEP, ConvSpec, DFlashSpec, DType, SelectorSpec, WeightForm

# (root mean square, largest) difference allowed, relative to the root mean square of the reference. An int8 activation
# that rounds the other way moves single results by a level; a wrong weight, layout or mask moves many by about 1.
TOLERANCE: dict[WeightForm, tuple[float, float]] = {"float": (1e-3, 1e-3), "int8": (3e-2, 2e-1)}
# The same of float weights that were rounded to the engine's dtype; the arithmetic of the check stays float32.
ROUNDED: dict[DType, tuple[float, float]] = {"float32": (0, 0), "float16": (5e-3, 2e-2), "bfloat16": (3e-2, 1.5e-1)}
NOISE, MOST = (2.0, 12.0), (0.5, 3.0)  # the same relative to the quantisation noise, and the limit of all that
WHOLE_ENGINE = 5  # rounding adds up over the layers of a whole engine
ROWS, CONTEXT_ROWS, SAMPLE_ROWS = 4, 5, 128
REACH = 2112  # the farthest position checked: behind the usual windows, where slow rotations have turned too
SAMPLE_TEXT = (
    "The quick brown fox jumps over the lazy dog. Speculative decoding drafts several tokens and verifies them in one "
    "pass of the target model, so that the output stays exactly the target's own.\ndef add(a, b):\n    return a + b\n"
)

HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
DEAD_BELOW = -3e4  # where the logits of ids that are none lie, in every dtype
# values of a drafter's graph, where the sections of a causal head and of a selector begin
Z, BASE, SCORES, STEP = "final_norm", "domino.base", "head", "head.step"
CANDIDATES, UNARY = "selector.candidates", "selector.unary"
# the convolutions around a part of a layer: how their values begin, and what goes into the first and into the second
SIDES = ("in", "out")
CONVOLVED = {"attention": ("attn", "input_norm", "attn.o_proj"), "mlp": ("mlp", "mlp_norm", "mlp.down_proj")}

Say = Callable[[str], None]


def run_self_check(
    bundle: Bundle,
    target: TargetCheckpoint,
    drafts: Sequence[DrafterCheckpoint],
    mode: str,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Run the check; {"mode", "errors": {section: relative error}} and, for a quantised target, its "agreement".

    Graphs that are yet to be compiled run on ONNX Runtime in float32, with their weights as rounded; what a compiler
    makes of them does not run here: then "engines" says so.
    Raises UserError naming the section that differs.
    """
    result: dict[str, Any] = {"mode": mode}
    if mode != "off":
        if mode == "full":
            say(f"full self-check: needs about {show_bytes(2 * plan_memory(bundle, 1).weights)} of memory")
        check = _FullCheck(bundle, target, drafts) if mode == "full" else _LayerCheck(bundle, target, drafts)
        result["errors"] = check.run()
        if bundle.build.backend != "onnxruntime":
            result["engines"] = "not run"
        if bundle.build.target_form != "float":
            result["agreement"] = quantised_agreement(bundle, target)
    return result


class _Check:
    """What both modes share: the parts, random rows, and the comparison."""

    def __init__(self, bundle: Bundle, target: TargetCheckpoint, drafts: Sequence[DrafterCheckpoint]) -> None:
        self.bundle, self.target, self.drafts = bundle, target, drafts
        self.errors: dict[str, float] = {}
        self._random = np.random.default_rng(0)

    @property
    def dflash_drafts(self) -> list[DFlashCheckpoint]:
        return [draft for draft in self.drafts if isinstance(draft, DFlashCheckpoint)]

    @property
    def draft_models(self) -> list[DraftModelCheckpoint]:
        return [draft for draft in self.drafts if isinstance(draft, DraftModelCheckpoint)]

    @property
    def target_form(self) -> WeightForm:
        """How near the target's layers must be: where inputs are rounded, as near as int8 weights' are."""
        quantisation = self.bundle.target.quantisation
        rounded = quantisation is not None and quantisation.rounds_inputs
        return "int8" if rounded else self.bundle.build.target_form

    def rows(self, count: int, width: int) -> Array:
        return self._random.standard_normal((count, width), np.float32)

    def ids(self, count: int) -> Array:
        return self._random.integers(0, self.bundle.target.live_vocab, count)

    def compare(
        self,
        section: str,
        found: Array,
        wanted: Array,
        form: WeightForm = "float",
        *,
        noise: float = 0.0,
        whole: bool = False,
    ) -> None:
        """Record the error of one section; UserError where it is too large.

        noise: root mean square of what quantisation itself does to ``wanted``. Roundings that fall the other way add up
        to about as much over a few layers, so a difference of that size proves nothing. whole: of a whole engine.
        """
        scale = _rms(wanted) + 1e-20
        difference = found.astype(np.float64) - wanted
        errors = _rms(difference) / scale, float(np.abs(difference).max()) / scale
        self.errors[section] = errors[0]
        factor = WHOLE_ENGINE if whole else 1
        rounded = ROUNDED[self.bundle.build.dtype]
        for error, tolerance, least, noises, most in zip(errors, TOLERANCE[form], rounded, NOISE, MOST, strict=True):
            allowed = min(max(factor * tolerance, least, noises * noise / scale), most)
            if not error <= allowed:
                raise _difference(section, f"by {error:.1e} of its size; allowed: {allowed:.0e}")

    def compare_best(
        self, section: str, chosen: Array, wanted: Array, form: WeightForm, *, whole: bool = False
    ) -> None:
        """The chosen ids [M] must score as high as the reference's best [M,live vocabulary]."""
        self.check_live(section, chosen)
        best = np.take_along_axis(wanted, chosen[:, None], axis=1)[:, 0]
        self.compare(section, best, wanted.max(axis=1), form, whole=whole)

    def check_ids(self, section: str, found: Array, wanted: Array) -> None:
        """UserError unless they are equal."""
        if not np.array_equal(found, wanted):
            raise _difference(section, f"in {np.count_nonzero(found != wanted)} of {wanted.size} ids")
        self.errors[section] = 0.0

    def check_live(self, section: str, chosen: Array) -> None:
        """UserError if an id is chosen that is no token."""
        live = self.bundle.target.live_vocab
        if chosen.min() < 0 or chosen.max() >= live:
            raise _difference(section, f"with id {chosen.max()}; allowed: ids below {live}")

    def stack(self, draft: DFlashCheckpoint) -> ref.ReferenceStack:
        linear = ref.LINEAR[self.bundle.build.draft_weights]
        return ref.ReferenceStack(draft.weights, draft.spec.stack, "", linear, conv=draft.spec.conv)

    def head(self, form: WeightForm) -> ref.ReferenceHead:
        return ref.ReferenceHead(self.target.weights, self.target.spec, ref.LINEAR[form])


def model_stack(model: TargetCheckpoint, form: WeightForm) -> ref.ReferenceStack:
    return ref.ReferenceStack(model.weights, model.spec.stack, "model.", ref.LINEAR[form])


def _rms(values: Array) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def _difference(section: str, how: str) -> UserError:
    advice = "the bundle was not kept, please report this with the model's config.json"
    return UserError(f"self-check: {section} differs from the reference {how}; {advice}")


class _LayerCheck(_Check):
    """Sections cut out of the engines."""

    def run(self) -> dict[str, float]:
        self._check_target()
        for model in self.draft_models:
            self._check_draft_model(model)
        for draft in self.dflash_drafts:
            self._check_context(draft)
            self._check_relay(draft)
            self._check_drafter(draft)
        return self.errors

    def _check_target(self) -> None:
        engine, form = _Engine(self.bundle, c.TARGET, None), self.bundle.build.target_form
        self._check_model("target", engine, self.target, form, self.target_form)

    def _check_draft_model(self, draft: DraftModelCheckpoint) -> None:
        engine, form = _Engine(self.bundle, c.DRAFTER, draft.spec.name), self.bundle.build.draft_weights
        self._check_model(draft.spec.name, engine, draft.model, form, form)

    def _check_model(
        self, label: str, engine: _Engine, model: TargetCheckpoint, form: WeightForm, block_form: WeightForm
    ) -> None:
        """A target's graph, or a draft model's: embedding, first and last block, final norm and head."""
        stack, ids = model_stack(model, form), self.ids(ROWS)
        self.compare(
            f"{label}.embed", engine.embed(ids), ref.ReferenceHead(model.weights, model.spec).embed(ids.tolist())
        )
        last = stack.stack.num_layers - 1
        for i in sorted({0, last}):
            self._check_block(label, engine, stack, i, ROWS, block_form)
        x = self.rows(ROWS, stack.stack.hidden_size)
        outputs = [spec.name for spec in (c.NEXT_IDS, c.LOGITS) if engine.gives(spec)]
        found = engine.section({f"layers.{last}.out": x[None], c.LOGIT_ROWS.name: np.arange(ROWS)[None]}, outputs)
        z = ref.rms_norm(x, stack.read("model.norm.weight"), stack.stack.rms_norm_eps)
        wanted = ref.ReferenceHead(model.weights, model.spec, ref.LINEAR[form]).logits(z)
        self.compare_best(f"{label}.head", found[c.NEXT_IDS.name][0], wanted, form)
        if c.LOGITS.name in found:
            self.compare(f"{label}.head.logits", found[c.LOGITS.name][0, :, : wanted.shape[1]], wanted, form)

    def _check_block(
        self, label: str, engine: _Engine, stack: ref.ReferenceStack, i: int, rows: int, form: WeightForm
    ) -> None:
        """One layer twice: alone at the first positions, and far out, behind a full cache."""
        x = self.rows(rows, stack.stack.hidden_size)
        self._compare_update(f"{label}.layers.{i}", engine.block(i, x), stack, i, x, np.arange(rows), None, form)
        start = min(self.bundle.build.max_seq_len, REACH) - rows
        if start <= 0:
            return
        # many random values average out; the factor keeps what the cache contributes as large as the rest
        context = self.rows(start, stack.stack.hidden_size) * np.float32(start**0.5)
        cached = [stack.heads(i, part, context, np.arange(start)) for part in c.CACHE_TENSORS]
        found, positions = engine.block(i, x, cached), start + np.arange(rows)
        self._compare_update(f"{label}.layers.{i}.far", found, stack, i, x, positions, context, form)

    def _compare_update(
        self,
        section: str,
        found: Array,
        stack: ref.ReferenceStack,
        i: int,
        x: Array,
        positions: Array,
        context: Array | None,
        form: WeightForm,
    ) -> None:
        """What a layer adds to its input: beside that, an error in a small update would not show."""
        wanted, noise = stack.layer(i, x, positions, context), 0.0
        if form != "float":
            plain = dataclasses.replace(stack, linear=ref.LINEAR["float"], rounded=False)
            noise = _rms(plain.layer(i, x, positions, context) - wanted)
        self.compare(section, found - x, wanted - x, form, noise=noise)

    def _check_head(self, engine: _Engine, draft: DFlashCheckpoint, last: int, form: WeightForm) -> None:
        """Final norm, head and argmax; the logits too, where the engine gives them."""
        spec, stack = draft.spec, self.stack(draft)
        x = self.rows(spec.block_size, spec.stack.hidden_size)
        outputs = [tensor.name for tensor in (c.DRAFT_IDS, c.DRAFT_LOGITS) if engine.gives(tensor)]
        found = engine.section({f"layers.{last}.out": x[None]}, outputs)
        z = ref.rms_norm(x[spec.first_slot :], stack.read("norm.weight"), spec.stack.rms_norm_eps)
        wanted = self.head(form).logits(z)
        self.compare_best(f"{spec.name}.head", found[c.DRAFT_IDS.name][0], wanted, form)
        if c.DRAFT_LOGITS.name in found:
            live = found[c.DRAFT_LOGITS.name][0, :, : wanted.shape[1]]
            self.compare(f"{spec.name}.head.logits", live, _shown(draft, wanted), form)

    def _check_context(self, draft: DFlashCheckpoint) -> None:
        taps = self.bundle.taps
        width = draft.spec.target_hidden_size
        packed = self.rows(CONTEXT_ROWS, len(taps) * width)
        starts = [taps.index(tap) * width for tap in draft.spec.target_layer_ids]
        own = np.concatenate([packed[:, start : start + width] for start in starts], axis=1)
        wanted = ref.context_states(draft.weights, draft.spec, own)
        engine, stack = _Engine(self.bundle, c.CONTEXT, draft.spec.name), self.stack(draft)
        start = max(0, min(self.bundle.build.max_seq_len, REACH) - CONTEXT_ROWS)
        positions, layers = start + np.arange(CONTEXT_ROWS), sorted({0, draft.spec.stack.num_layers - 1})
        feeds = {
            c.HIDDEN.name: packed[None],
            c.POSITION_IDS.name: positions[None],
            c.WRITE_INDEX.name: np.array([start]),
        }
        caches = [(i, tensor) for i in layers for tensor in c.CACHE_TENSORS]
        found = engine.whole(feeds, [c.H.name, *(c.present(tensor, i) for i, tensor in caches)])
        label, form = f"{draft.spec.name}.context", self.bundle.build.draft_weights
        self.compare(f"{label}.h", found[c.H.name][0], wanted)
        for i, tensor in caches:
            rows = stack.heads(i, tensor, wanted, positions)
            written = found[c.present(tensor, i)][0, :, start : start + CONTEXT_ROWS]
            self.compare(f"{label}.layers.{i}.{tensor}", written, rows, form)

    def _check_relay(self, draft: DFlashCheckpoint) -> None:
        spec, head = draft.spec, self.head("float")
        ids, scale = self.ids(spec.block_size), spec.input_embedding_scale
        wanted, feeds = head.embed(ids.tolist()) * scale, {c.BLOCK_IDS.name: ids[None]}
        if spec.relay:
            bonus, reject = self.ids(2)
            h = self.rows(spec.block_size, spec.stack.hidden_size)
            pair = head.embed([bonus, reject]) * scale
            on = np.arange(spec.block_size) % 2 == 1
            source = np.arange(spec.block_size)[::-1].copy()
            wanted = wanted + np.where(on[:, None], ref.relay_term(draft.weights, spec, pair[0], pair[1], h[source]), 0)
            feeds |= {c.PENDING_H.name: h[None], c.RELAY_SRC.name: source[None], c.RELAY_ON.name: on[None]}
            feeds |= {c.BONUS_ID.name: np.array([bonus]), c.REJECT_ID.name: np.array([reject])}
        found = _Engine(self.bundle, c.RELAY, spec.name).whole(feeds, [c.BLOCK_EMBEDS.name])
        self.compare(f"{spec.name}.relay", found[c.BLOCK_EMBEDS.name][0], wanted)

    def _check_drafter(self, draft: DFlashCheckpoint) -> None:
        engine, stack, size = _Engine(self.bundle, c.DRAFTER, draft.spec.name), self.stack(draft), draft.spec.block_size
        form, last = self.bundle.build.draft_weights, draft.spec.stack.num_layers - 1
        for i in sorted({0, last}):
            if draft.spec.conv:
                self._check_convolutions(engine, draft, draft.spec.conv, i, form)
            self._check_block(draft.spec.name, engine, stack, i, size, form)
        if isinstance(draft.spec.head, SelectorSpec):
            self._check_base(engine, draft, last, form)
            self._check_selector(engine, draft, draft.spec.head, form)
        elif draft.spec.corrected_drafts:
            self._check_base(engine, draft, last, form)
            self._check_domino(engine, draft, form)
        else:
            self._check_head(engine, draft, last, form)

    def _check_base(self, engine: _Engine, draft: DFlashCheckpoint, last: int, form: WeightForm) -> None:
        """Final norm and head of a drafter whose drafts do not hang on them alone: the base logits themselves."""
        spec, stack = draft.spec, self.stack(draft)
        x = self.rows(spec.block_size, spec.stack.hidden_size)
        found = _base_logits(engine, spec, {f"layers.{last}.out": x[None]}, form)
        z = ref.rms_norm(x[spec.first_slot :], stack.read("norm.weight"), spec.stack.rms_norm_eps)
        wanted = self.head(form).logits(z)
        self.compare_best(f"{spec.name}.head", found.argmax(axis=1), wanted, form)
        self.compare(f"{spec.name}.head.logits", found[:, : wanted.shape[1]], wanted, form)

    def _check_domino(self, engine: _Engine, draft: DFlashCheckpoint, form: WeightForm) -> None:
        """The causal head alone: its corrections after the engine's own drafts, and those drafts.

        The base logits are given, no larger than the corrections: beside large ones, a wrong correction changes no id.
        """
        spec, label, live = draft.spec, f"{draft.spec.name}.correction", self.bundle.target.live_vocab
        z, anchor = self.rows(spec.num_drafts, spec.stack.hidden_size), self.ids(1)
        base, block = self._small_base(draft, z), self.head("float").embed(anchor.tolist())
        names = [f"domino.{i}.correction" for i in spec.corrected_drafts]
        outputs = [tensor.name for tensor in (c.DRAFT_IDS, c.DRAFT_LOGITS) if engine.gives(tensor)]
        found = engine.section({Z: z[None], BASE: base[None], c.BLOCK_EMBEDS.name: block[None]}, [*outputs, *names])
        ids = found[c.DRAFT_IDS.name][0]
        self.check_live(label, ids)
        read = np.concatenate([anchor, ids[:-1]])
        wanted, plain = self._corrections(draft, z, read, form), self._corrections(draft, z, read, "float")
        corrections, noise = np.concatenate([found[name][0] for name in names])[:, :live], _rms(wanted - plain)
        self.compare(label, corrections, wanted[spec.corrected_drafts[0] - 1 :], form, noise=noise)
        self.compare_best(f"{label}.ids", ids, base[:, :live] + wanted, form)
        if c.DRAFT_LOGITS.name in found:
            logits = found[c.DRAFT_LOGITS.name][0, :, :live]
            self.compare(f"{label}.logits", logits, base[:, :live] + wanted, form, noise=noise)

    def _small_base(self, draft: DFlashCheckpoint, z: Array) -> Array:
        """Random base logits [K,V] of the size of the corrections; what is no token is as dead as behind the head."""
        size = _rms(self._corrections(draft, z, self.ids(len(z)), "float"))
        base = np.float32(size) * self.rows(len(z), c.vocab_columns(draft.spec.vocab_size))
        base[:, self.bundle.target.live_vocab :] = c.DEAD_LOGIT
        return base

    def _corrections(self, draft: DFlashCheckpoint, z: Array, read: Array, form: WeightForm) -> Array:
        """The reference's corrections [K,live vocabulary]; ``read`` [K] are the anchor and all drafts but the last."""
        embeds = self.head("float").embed(read.tolist())
        found = ref.domino_corrections(draft.weights, draft.spec, z, embeds, ref.LINEAR[form])
        return found[:, : self.bundle.target.live_vocab]

    def _check_convolutions(
        self, engine: _Engine, draft: DFlashCheckpoint, conv: ConvSpec, i: int, form: WeightForm
    ) -> None:
        """The convolutions around attention and MLP: their kernels, then what given kernels make of rows.

        Each beside its own size: in a whole layer, a wrong small kernel would not show.
        """
        stack, biased = self.stack(draft), ".biased" if draft.spec.stack.attention_bias else ""
        x = self.rows(draft.spec.block_size, draft.spec.stack.hidden_size)
        given = self.rows(2 * conv.kernel_size * len(x), x.shape[1]).reshape(len(x), 2, conv.kernel_size, -1)
        for part, (short, first, second) in CONVOLVED.items():
            label, layer = f"{draft.spec.name}.layers.{i}.{part}_conv", f"layers.{i}"
            found = _Convolution(engine, conv, f"{layer}.{short}.conv")
            self._check_kernels(label, found, stack, f"{layer}.{part}_conv", f"{layer}.{first}", x, form)
            second += biased if part == "attention" else ""
            for side, name in enumerate((first, second)):
                rows = found.rows(side, f"{layer}.{name}", x, given[:, side])
                self.compare(f"{label}.rows", rows, ref.convolved(x, given[:, side]))

    def _check_kernels(
        self,
        label: str,
        found: _Convolution,
        stack: ref.ReferenceStack,
        source: str,
        normed: str,
        x: Array,
        form: WeightForm,
    ) -> None:
        """What rows x [J,E] make of the kernels, and what these are without that."""
        dynamic, kernels = found.kernels(normed, x)
        plain = dataclasses.replace(stack, linear=ref.LINEAR["float"])
        wanted, unrounded = (each.project(f"{source}.kernel_projection", x) for each in (stack, plain))
        self.compare(f"{label}.dynamic", dynamic, wanted, form, noise=_rms(unrounded - wanted))
        base = np.broadcast_to(stack.read(f"{source}.base_kernel"), kernels.shape)
        self.compare(f"{label}.base", kernels - stack.by_channel(dynamic), base)

    def _check_selector(self, engine: _Engine, draft: DFlashCheckpoint, head: SelectorSpec, form: WeightForm) -> None:
        """The selector alone: its candidates and their logits, what it adds to these behind its own drafts, the drafts.

        The base logits are given: as large as a softcap, then no larger than what is added to them.
        """
        spec, label, live = draft.spec, f"{draft.spec.name}.selector", self.bundle.target.live_vocab
        z, anchor, count = self.rows(spec.num_drafts, spec.stack.hidden_size), self.ids(1), min(head.top_k, live)
        logits = self._random_logits(draft, spec.final_logit_softcapping or 1.0)
        found = _Selected.run(engine, spec, z, logits, anchor, form)
        best = np.argsort(-logits[:, :live], axis=1, kind="stable")[:, :count]
        self.check_ids(f"{label}.candidates", np.sort(found.candidates), np.sort(best))
        self.compare(f"{label}.unary", found.unary, found.of_candidates(_shown(draft, logits)))
        logits = self._random_logits(draft, self._follow_size(draft, z, count))
        found = _Selected.run(engine, spec, z, logits, anchor, form)
        previous = np.concatenate([anchor, found.ids[:-1]])
        follows, plain = (
            ref.selector_scores(draft.weights, spec, z, previous, found.candidates, ref.LINEAR[each])
            for each in (form, "float")
        )
        self.compare(label, found.totals - found.unary, follows, form, noise=_rms(follows - plain))
        self.check_ids(f"{label}.ids", found.ids, found.lowest_best(live))
        if found.logits is not None:
            given = np.zeros(logits.shape, bool)
            np.put_along_axis(given, found.candidates, True, axis=1)
            self.check_ids(f"{label}.logits", found.logits > DEAD_BELOW, given)
            self.compare(f"{label}.logits", found.of_candidates(found.logits), found.totals)

    def _follow_size(self, draft: DFlashCheckpoint, z: Array, count: int) -> float:
        """The size of what a selector adds to logits; less where a softcap would cut off logits of that size."""
        candidates = self.ids(len(z) * count).reshape(len(z), count)
        size = _rms(ref.selector_scores(draft.weights, draft.spec, z, self.ids(len(z)), candidates)) or 1.0
        return min(size, (draft.spec.final_logit_softcapping or np.inf) / 4)

    def _random_logits(self, draft: DFlashCheckpoint, size: float) -> Array:
        """Random base logits [K,V], of that size once they are multiplied; what is no token is dead."""
        spec = draft.spec
        scale = np.float32(size / spec.output_multiplier)
        logits = scale * self.rows(spec.num_drafts, c.vocab_columns(spec.vocab_size))
        logits[:, self.bundle.target.live_vocab :] = c.DEAD_LOGIT
        return logits


def _base_logits(engine: _Engine, spec: DFlashSpec, feeds: dict[str, Array], form: WeightForm) -> Array:
    """The base logits [K,V] that follow from ``feeds``."""
    if not isinstance(spec.head, SelectorSpec):
        return np.asarray(engine.section(feeds, [BASE])[BASE][0])
    found = engine.section(feeds, [SCORES] if form == "float" else [SCORES, STEP])
    return found[SCORES] * found.get(STEP, np.float32(1))


def _shown(draft: DFlashCheckpoint, logits: Array) -> Array:
    """The draft logits as an engine gives them: multiplied, then softcapped."""
    scaled, cap = logits * draft.spec.output_multiplier, draft.spec.final_logit_softcapping
    return np.asarray(np.tanh(scaled / cap) * cap if cap else scaled)


class _Engine:
    """One engine's graph, and the running of sections cut out of it."""

    def __init__(self, bundle: Bundle, engine: str, drafter: str | None) -> None:
        self._path = bundle.graph_path(engine, drafter)
        self._model, self._dtype = ir.load(self._path), bundle.build.dtype
        self._contract = next(k for name, k in bundle.contracts() if (name, k.engine) == (drafter, engine))

    def gives(self, spec: c.TensorSpec) -> bool:
        return spec in self._contract.outputs

    @property
    def _embed_name(self) -> str:
        """The embedding's value: cast where the table has another dtype than the engine."""
        names = {node.outputs[0].name for node in self._model.graph}
        return "embed.cast" if "embed.cast" in names else "embed"

    def embed(self, ids: Array) -> Array:
        """The embeddings [S,E] of ids [S]."""
        result: Array = self.section({c.INPUT_IDS.name: ids[None]}, [self._embed_name])[self._embed_name][0]
        return result

    def block(self, i: int, x: Array, cached: Sequence[Array] = ()) -> Array:
        """Rows x [S,E] through decoder layer i alone, behind the cached keys and values [N,C,D] (or none)."""
        rows, start = len(x), cached[0].shape[1] if cached else 0
        source = f"layers.{i - 1}.out" if i else (c.BLOCK_EMBEDS.name if self._takes_embeds else self._embed_name)
        caches = self._caches(i)
        for tensor, array in zip(c.CACHE_TENSORS, cached, strict=False):
            caches[c.past(tensor, i)][0, :, :start] = array
        feeds = {
            source: x[None],
            c.POSITION_IDS.name: start + np.arange(rows)[None],
            c.WRITE_INDEX.name: np.array([start]),
            c.KV_INDEX.name: np.arange(-(-(start + rows) // CACHE_STEP) * CACHE_STEP),
            **caches,
        }
        result: Array = self.section(feeds, [f"layers.{i}.out"])[f"layers.{i}.out"][0]
        return result

    @property
    def _takes_embeds(self) -> bool:
        return c.BLOCK_EMBEDS in self._contract.inputs

    def _caches(self, layer: int) -> dict[str, Array]:
        size = self._contract.static
        shape = (1, size["N"], size["L"], size["D"])
        return {c.past(tensor, layer): np.zeros(shape, np.float32) for tensor in c.CACHE_TENSORS}

    def section(self, feeds: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        """Run the part of the graph between ``feeds`` and ``outputs``; only its own weights are loaded."""
        graph = ir.convenience.extract(self._model.graph, list(feeds), list(outputs))
        for value in graph.inputs:
            array = feeds[str(value.name)]
            value.type, value.shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), ir.Shape(array.shape)
        for value in graph.outputs:
            value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
        cut, data = self._path.with_suffix(".check.onnx"), self._path.with_suffix(".check.data")
        functions = tuple(self._model.functions.values())
        model = ir.Model(graph, ir_version=self._model.ir_version, functions=functions)
        if self._dtype == "float32":
            ir.save(model, cut)
        else:
            ir.save(_widened(model), cut, external_data=data.name)
        try:
            return _run(cut, feeds, outputs)
        finally:
            cut.unlink()
            data.unlink(missing_ok=True)

    def whole(self, feeds: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        """Run the whole engine, its caches zeroed."""
        for layer in range(self._contract.cache_layers):
            feeds |= self._caches(layer)
        return self.section(feeds, outputs)


@dataclass(frozen=True)
class _Selected:
    """What the selector of an engine made of given slots: ids [K]; candidates, their logits and scores [K,k]; [K,V]."""

    ids: Array
    candidates: Array
    unary: Array
    totals: Array
    logits: Array | None

    @classmethod
    def run(
        cls, engine: _Engine, spec: DFlashSpec, z: Array, logits: Array, anchor: Array, form: WeightForm
    ) -> _Selected:
        """For final-normed slots z [K,E] with these base logits [K,V] behind the anchor [1]."""
        feeds = {Z: z[None], SCORES: logits, c.ANCHOR_ID.name: anchor}
        feeds |= {} if form == "float" else {STEP: np.ones((len(z), 1), np.float32)}
        names = [f"selector.{i}.totals" for i in range(1, spec.num_drafts + 1)]
        outputs = [tensor.name for tensor in (c.DRAFT_IDS, c.DRAFT_LOGITS) if engine.gives(tensor)]
        found = engine.section(feeds, [CANDIDATES, UNARY, *outputs, *names])
        shown = found[c.DRAFT_LOGITS.name][0] if c.DRAFT_LOGITS.name in found else None
        totals = np.concatenate([found[name][0] for name in names])
        return cls(found[c.DRAFT_IDS.name][0], found[CANDIDATES][0], found[UNARY][0], totals, shown)

    def of_candidates(self, logits: Array) -> Array:
        """[K,V] -> [K,k]."""
        return np.take_along_axis(logits, self.candidates, axis=1)

    def lowest_best(self, above: int) -> Array:
        """The drafts that follow from the scores: [K]. above: more than any id."""
        is_best = self.totals == self.totals.max(axis=1, keepdims=True)
        return np.asarray(np.where(is_best, self.candidates, above).min(axis=1))


@dataclass(frozen=True)
class _Convolution:
    """Both convolutions around one part of a layer, in an engine's graph; ``place`` is how their values begin."""

    engine: _Engine
    conv: ConvSpec
    place: str

    def _names(self, side: int) -> list[str]:
        return [f"{self.place}.kernel.{SIDES[side]}.{offset}" for offset in range(self.conv.kernel_size)]

    def kernels(self, source: str, x: Array) -> tuple[Array, Array]:
        """What follows from normed rows x [J,E]: the dynamic parts as projected, the kernels [J,2,kernel size,E]."""
        names, dynamic = [*self._names(0), *self._names(1)], f"{self.place}.dynamic"
        found = self.engine.section({source: x[None]}, [dynamic, *names])
        kernels = np.stack([found[name][0] for name in names], axis=1)
        return found[dynamic][0], kernels.reshape(len(x), 2, self.conv.kernel_size, -1)

    def rows(self, side: int, source: str, x: Array, kernel: Array) -> Array:
        """Rows x [J,E] under a given kernel [J,kernel size,E]."""
        shape, output = (1, len(x), -1, self.conv.group_size), f"{self.place}.{SIDES[side]}"
        feeds = {name: kernel[:, i].reshape(shape) for i, name in enumerate(self._names(side))}
        result: Array = self.engine.section({source: x[None], **feeds}, [output])[output][0]
        return result


def _widened(model: ir.Model) -> ir.Model:
    """The same with every half-precision value in float32, weights as they were rounded: what a CPU can run."""
    for value in model.graph.initializers.values():
        if value.const_value is not None and value.const_value.dtype in HALF:
            value.const_value = ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)
    for node in model.graph:
        for key in ("to", "output_dtype"):  # of Cast, of DequantizeLinear
            if key in node.attributes and node.attributes[key].value in HALF:
                node.attributes[key] = ir.AttrInt64(key, int(ir.DataType.FLOAT))
        for each in (*node.inputs, *node.outputs):
            if each is not None and each.dtype in HALF:
                each.type = ir.TensorType(ir.DataType.FLOAT)
    return model


def _run(path: Path, feeds: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_prepacking", "1")  # a packed copy would double the memory
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # one call: nothing to wait for
    options.add_session_config_entry("session.disable_quant_qdq", "1")  # quantised layers as written, not fused
    exact_int8(options)
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return dict(zip(outputs, session.run(list(outputs), feeds), strict=True))


class _FullCheck(_LayerCheck):
    """All sections, then whole engines through the runtime: a prompt's logits and taps, context, relay and draft."""

    def run(self) -> dict[str, float]:
        from dflow_trt.runtime.ort import OrtRuntime

        super().run()
        self._runtime = OrtRuntime(self.bundle, slots=1)
        ids = self.ids(2 * ROWS)
        linear = ref.LINEAR[self.bundle.build.target_form]
        logits, outputs = ref.target_forward(self.target.weights, self.target.spec, ids.tolist(), linear)
        found = target_pass(self._runtime, ids)
        form, noise = self.target_form, 0.0
        if form != "float":
            plain = ref.target_forward(self.target.weights, self.target.spec, ids.tolist(), rounded=False)[0]
            noise = _rms(plain - logits)
        live = found[:, : self.target.spec.live_vocab]
        self.compare("target.logits", live, logits, form, noise=noise, whole=True)
        for draft in self.dflash_drafts:
            taps = np.concatenate([outputs[tap] for tap in draft.spec.target_layer_ids], axis=1)
            self._check_draft(draft, ids, ref.context_states(draft.weights, draft.spec, taps))
        self._runtime.close()
        return self.errors

    def _check_draft(self, draft: DFlashCheckpoint, ids: Array, context: Array) -> None:
        """One draft without relay after the prompt: its tokens must score as high as the reference's best."""
        spec, length = draft.spec, len(ids)
        positions = np.arange(length)
        feeds = {c.POSITION_IDS.name: positions[None], c.WRITE_INDEX.name: np.zeros(1, np.int64)}
        self._runtime.run(c.CONTEXT, spec.name, range(1), feeds)
        block = [int(ids[-1]), *[spec.mask_token_id] * (spec.block_size - 1)]
        x = self.head("float").embed(block) * spec.input_embedding_scale
        chosen = self._draft(spec, block, length)
        stack, at = self.stack(draft), length + np.arange(spec.block_size)
        for i in range(spec.stack.num_layers):
            x = stack.layer(i, x, at, context)
        form = self.bundle.build.draft_weights
        z = ref.rms_norm(x[spec.first_slot :], stack.read("norm.weight"), spec.stack.rms_norm_eps)
        wanted = self.head(form).logits(z)
        self.check_live(f"{spec.name}.draft", chosen)
        if isinstance(spec.head, SelectorSpec):
            self._check_selected(draft, spec.head, z, wanted, np.array([block[0], *chosen]))
            return
        if spec.corrected_drafts:
            wanted = wanted + self._corrections(draft, z, np.array([block[0], *chosen[:-1]]), form)
        self.compare_best(f"{spec.name}.draft", chosen, wanted, form, whole=True)

    def _check_selected(
        self, draft: DFlashCheckpoint, head: SelectorSpec, z: Array, logits: Array, path: Array
    ) -> None:
        """Drafts path[1:] behind the anchor path[0] must score as high as the reference's best.

        Which ids are candidates hangs on rounding where logits are near that of the last: those may be chosen, but need
        not be.
        """
        section, form, count = (
            f"{draft.spec.name}.draft",
            self.bundle.build.draft_weights,
            min(head.top_k, logits.shape[1]),
        )
        margin = WHOLE_ENGINE * max(TOLERANCE[form][0], ROUNDED[self.bundle.build.dtype][0]) * _rms(logits)
        order = np.argsort(-logits, axis=1)[:, : 2 * count]
        values, chosen = np.take_along_axis(logits, order, axis=1), order == path[1:, None]
        last = values[:, count - 1 : count]
        if not (chosen & (values >= last - margin)).any(axis=1).all():
            raise _difference(section, f"with an id that is none of the {count} best of its slot")
        follows = ref.selector_scores(draft.weights, draft.spec, z, path[:-1], order, ref.LINEAR[form])
        totals, sure = _shown(draft, values) + follows, (values > last + margin) | chosen
        best = np.where(sure, totals, -np.inf).max(axis=1)
        self.compare(section, totals[chosen], best, form, whole=True)

    def _draft(self, spec: DFlashSpec, block: list[int], length: int) -> Array:
        name = spec.name
        feeds: dict[str, Array] = {c.BLOCK_IDS.name: np.array([block])}
        if spec.relay:
            none = np.zeros((1, spec.block_size), np.int64)
            pair = np.zeros(1, np.int64)
            feeds |= {c.RELAY_SRC.name: none, c.RELAY_ON.name: none.astype(bool)}
            feeds |= {c.BONUS_ID.name: pair, c.REJECT_ID.name: pair}
        self._runtime.run(c.RELAY, name, range(1), feeds)
        feeds = {
            c.BLOCK_POSITION_IDS.name: length + np.arange(spec.block_size)[None],
            c.BLOCK_WRITE_INDEX.name: np.array([length]),
            c.KV_INDEX.name: np.arange(-(-(length + spec.block_size) // CACHE_STEP) * CACHE_STEP),
        }
        if isinstance(spec.head, SelectorSpec):
            feeds[c.ANCHOR_ID.name] = np.array(block[:1])
        ids: Array = self._runtime.run(c.DRAFTER, name, range(1), feeds, [c.DRAFT_IDS.name])[0][0]
        return ids


def target_pass(runtime: Any, ids: Array) -> Array:
    """One prompt through a runtime's target, alone in slot 0: logits [S,V]."""
    rows = np.arange(len(ids))
    feeds = {
        c.INPUT_IDS.name: ids[None],
        c.POSITION_IDS.name: rows[None],
        c.ROW_COUNT.name: np.array([len(ids)]),
        c.LOGIT_ROWS.name: rows[None],
        c.WRITE_INDEX.name: np.zeros(1, np.int64),
        c.KV_INDEX.name: np.arange(-(-len(ids) // CACHE_STEP) * CACHE_STEP),
    }
    logits: Array = runtime.run(c.TARGET, None, range(1), feeds, [c.LOGITS.name])[0][0]
    return logits


def quantised_agreement(bundle: Bundle, target: TargetCheckpoint) -> float:
    """Share of positions of a sample text where the quantised target's best next token is the float model's.

    Layer by layer: the memory stays that of one layer.
    """
    ids, engine = _sample_ids(bundle), _Engine(bundle, c.TARGET, None)
    x = engine.embed(ids)
    for i in range(bundle.target.stack.num_layers):
        x = engine.block(i, x)
    feeds = {f"layers.{bundle.target.stack.num_layers - 1}.out": x[None], c.LOGIT_ROWS.name: np.arange(len(ids))[None]}
    found = engine.section(feeds, [c.NEXT_IDS.name])[c.NEXT_IDS.name][0]
    wanted, _ = ref.target_forward(target.weights, target.spec, ids.tolist())
    return float(np.mean(found == wanted.argmax(axis=1)))


def _sample_ids(bundle: Bundle) -> Array:
    """Tokens of the sample text; without a tokenizer, random ids."""
    limit = min(SAMPLE_ROWS, bundle.build.prefill_chunk)
    if bundle.tokenizer_path is None:
        return np.random.default_rng(0).integers(0, bundle.target.live_vocab, limit)
    from dflow_trt.text import Tokenizer

    return np.array(Tokenizer.from_folder(bundle.tokenizer_path).encode(SAMPLE_TEXT)[:limit])
