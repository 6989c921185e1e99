"""The numerical self-check: it passes on every kind of model, and no faulty engine gets past it.

Faults are put into the engines while they are built: weights out of order, wrong scales, norms, rotations, windows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from tiny import make_drafter, make_target

from dflow_trt import build, contract, rope, selfcheck
from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.bundle import Bundle
from dflow_trt.errors import UserError
from dflow_trt.graphs import blocks, context, dflash, domino, drafter, relay, store, target
from dflow_trt.graphs.builder import GraphBuilder
from dflow_trt.selfcheck import dflash as dflash_check

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
FORMS = [("float", "float"), ("int8", "int8")]
FORM_IDS = ["float", "int8"]


@dataclass
class Model:
    """What to build: settings of tiny target, tiny drafter and build."""

    target: dict[str, Any] = field(default_factory=dict)
    drafter: dict[str, Any] | None = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        config = make_target(folder / "target", **self.target)
        if self.drafter is not None:
            make_drafter(folder / "drafter", config, **{"relay": True, **self.drafter})

    def build(self, folder: Path, output: Path, mode: str, **options: Any) -> Bundle:
        drafters = [] if self.drafter is None else [DrafterSource(folder / "drafter")]
        chosen = BuildOptions(**{**self.options, **options})
        return build_bundle(folder / "target", drafters, output, chosen, self_check=mode)


# -- sound models ------------------------------------------------------------------------------------------------------

SHIFTED = {"shift_label": True, "pure_draft_prefix_len": 1}
WINDOWS = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
MODELS = {
    "plain": Model(),
    "tied": Model({"tied": True}),
    "tied bf16 with padded vocabulary": Model(
        {"tied": True, "dtype": "bfloat16", "tokenizer": 130}, {"dtype": "bfloat16"}
    ),
    "fp16": Model({"dtype": "float16"}, {"dtype": "float16"}),
    "bias": Model({"attention_bias": True}, {"attention_bias": True}),
    "windows": Model(WINDOWS, {**WINDOWS, "max_window_layers": 1}),
    "yarn": Model({"rope": YARN}, {"rope": YARN}),
    "linear rope": Model({"rope": {"rope_type": "linear", "factor": 2.0}}),
    "one query head a key head": Model({"num_key_value_heads": 4}, {"num_key_value_heads": 4}),
    "block of 2": Model({}, {"block_size": 2}),
    "block of 16": Model({}, {"block_size": 16}),
    "no relay": Model({}, {"relay": False}),
    "no drafter": Model({"num_hidden_layers": 1}, None),
    "odd sizes": Model({"hidden_size": 40, "intermediate_size": 56, "vocab_size": 131, "head_dim": 16}, {}),
    "scaled and capped": Model(
        {},
        {"input_embedding_scale": 8.0, "output_multiplier": 0.5, "final_logit_softcapping": 3.0},
        {"draft_logits": True},
    ),
    "domino": Model({}, {"relay": False, "domino": {"pure_draft_prefix_len": 1}}),
    "domino, shifted": Model({"tokenizer": 200}, {"relay": False, "domino": SHIFTED}, {"draft_logits": True}),
    "domino with a relay": Model({"tied": True}, {"domino": {}, "dtype": "bfloat16"}),
    "domino, block of 2": Model({}, {"domino": {}, "block_size": 2}),
    "domino behind all drafts": Model({}, {"relay": False, "domino": {**SHIFTED, "pure_draft_prefix_len": 8}}),
    "domino that adds nothing": Model({}, {"domino": {}, "domino_scale": 0.0}),
    "short": Model({}, {}, {"max_seq_len": 12, "max_batch_size": 1}),
    "one token": Model({}, {"block_size": 2}, {"max_seq_len": 2, "max_batch_size": 1}),
}


@pytest.mark.parametrize(("target_weights", "draft_weights"), FORMS, ids=FORM_IDS)
@pytest.mark.parametrize("name", MODELS)
def test_sound_engines_pass(tmp_path: Path, name: str, target_weights: str, draft_weights: str) -> None:
    model = MODELS[name]
    model.write(tmp_path)
    bundle = model.build(
        tmp_path, tmp_path / "bundle", "full", target_weights=target_weights, draft_weights=draft_weights
    )
    errors = bundle.self_check["errors"]
    assert max(errors.values()) < (2e-5 if target_weights == "float" else 1e-2), errors
    assert ("agreement" in bundle.self_check) == (target_weights == "int8")
    sections = {"target.embed", "target.layers.0", "target.head", "target.head.logits", "target.logits"}
    if model.drafter is not None:
        of = next(iter(bundle.drafters))
        sections |= {
            f"{of}.{part}" for part in ("context.h", "context.layers.1.k", "relay", "layers.1", "head", "draft")
        }
    assert sections <= errors.keys()
    assert not list((tmp_path / "bundle").glob("*.check*"))


def test_off_checks_nothing(tmp_path: Path) -> None:
    MODELS["plain"].write(tmp_path)
    bundle = MODELS["plain"].build(tmp_path, tmp_path / "bundle", "off", target_weights="int8")
    assert bundle.self_check == {"mode": "off"}


def test_quantised_target_reports_how_often_it_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The share is that of whole engines, though it is found layer by layer."""
    MODELS["plain"].write(tmp_path)
    bundle = MODELS["plain"].build(tmp_path, tmp_path / "bundle", "layer", target_weights="int8")
    from dflow_trt import reference as ref
    from dflow_trt.checkpoint.target import read_target
    from dflow_trt.runtime.ort import OrtRuntime

    ids = np.random.default_rng(0).integers(0, 256, 128)
    runtime = OrtRuntime(bundle, slots=1, engines=("target",))
    found = selfcheck.target_pass(runtime, ids).argmax(axis=1)
    checkpoint = read_target(tmp_path / "target")
    wanted = ref.target_forward(checkpoint.weights, checkpoint.spec, ids.tolist())[0].argmax(axis=1)
    assert 0.5 < bundle.self_check["agreement"] < 1.0
    assert bundle.self_check["agreement"] == np.mean(found == wanted)


# -- faults ------------------------------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]


def alter_linear(of: str, change: Callable[[Any, Any], tuple[Any, Any]]) -> Fault:
    """Change the stored [in,out] matrix (and the int8 scale) of every linear layer with ``of`` among its weights."""

    def fault(patch: Patch) -> None:
        transposed, quantised = store.transposed, store.quantised

        def plain(weights: Any, names: Any, *rest: Any) -> Any:
            array = transposed(weights, names, *rest)
            return change(array, None)[0] if any(of in name for name in names) else array

        def narrow(weights: Any, names: Any, *rest: Any, **more: Any) -> Any:
            array, scale = quantised(weights, names, *rest, **more)
            return change(array, scale) if any(of in name for name in names) else (array, scale)

        patch.setattr(store, "transposed", plain)
        patch.setattr(store, "quantised", narrow)

    return fault


def permuted(array: Any, scale: Any) -> Any:
    return np.roll(array, 1, axis=1), scale


def turned(array: Any, scale: Any) -> Any:
    """As it lies in the checkpoint: [out,in]."""
    return np.ascontiguousarray(array.T).reshape(array.shape), scale


def rescaled(array: Any, scale: Any) -> Any:
    return (array * np.float32(1.2), None) if scale is None else (array, scale * np.float32(1.2))


def one_channel(array: Any, scale: Any) -> Any:
    """A single output channel has twice its size."""
    factor = np.ones(array.shape[1], np.float32)
    factor[5] = 2
    return (array * factor, None) if scale is None else (array, scale * factor)


def other_order(first: str, second: str) -> Fault:
    """Two matrices of one fused linear layer change places."""

    def fault(patch: Patch) -> None:
        original = blocks.linear

        def linear(g: Any, name: str, x: Any, weights: Any, bias: Any = ()) -> Any:
            swap = [weight.replace(first, "?").replace(second, first).replace("?", second) for weight in weights]
            return original(g, name, x, swap, bias)

        for module in (blocks, context):
            patch.setattr(module, "linear", linear)

    return fault


def alter_vector(of: str) -> Fault:
    """The norm weights with that name are those of the neighbouring channels."""

    def fault(patch: Patch) -> None:
        original = GraphBuilder.vector

        def vector(g: Any, name: str, dtype: Any = None) -> Any:
            rolled = np.roll(g.source.read(name), 1)
            return g.stored(name, rolled, dtype) if of in name else original(g, name, dtype)

        patch.setattr(GraphBuilder, "vector", vector)

    return fault


def alter_rope(**changes: Any) -> Fault:
    def fault(patch: Patch) -> None:
        patch.setattr(
            blocks, "rope_tables", lambda spec, *rest: rope.rope_tables(dataclasses.replace(spec, **changes), *rest)
        )

    return fault


def alter_mask(change: Callable[[bool, int | None], tuple[bool, int | None]]) -> Fault:
    def fault(patch: Patch) -> None:
        original = blocks.Visibility.mask
        patch.setattr(blocks.Visibility, "mask", lambda self, *key: original(self, *change(*key)))

    return fault


def shifted_write(patch: Patch) -> None:
    """Keys and values go one row too far."""
    original = GraphBuilder.update_cache

    def update(g: Any, layer: int, tensor: Any, rows: Any, index: Any) -> Any:
        return original(g, layer, tensor, rows, g.once("shifted", "Add", index, g.ints(1)))

    patch.setattr(GraphBuilder, "update_cache", update)


def other_pair(patch: Patch) -> None:
    """Bonus and rejected token change places before the relay MLP."""
    patch.setattr(relay, "_PAIR", (("bonus", contract.REJECT_ID), ("reject", contract.BONUS_ID)))


def other_columns(patch: Patch) -> None:
    """The relay MLP's input columns in another order: h before the pair."""
    original = relay._columns

    def columns(g: Any, name: str, x: Any, part: slice) -> Any:
        size = g.contract.static["E"]
        return original(g, name, x, slice(part.start - 2 * size, size) if part.start else slice(size, 3 * size))

    patch.setattr(relay, "_columns", columns)


def other_halves(patch: Patch) -> None:
    """gamma before beta."""
    alter_linear("relay_mlp.2", lambda array, scale: (np.roll(array, array.shape[1] // 2, axis=1), scale))(patch)


def other_taps(patch: Patch) -> None:
    """The packed taps are read in the wrong order."""
    original = context.own_columns
    patch.setattr(context, "own_columns", lambda g, d, taps: original(g, d, list(reversed(taps))))


def other_extract(patch: Patch) -> None:
    """The target packs its taps in the wrong order."""
    original = target._extract
    patch.setattr(target, "_extract", lambda g, taps: original(g, list(reversed(taps))))


def unscaled_embeddings(patch: Patch) -> None:
    original = relay._Embedding.rows

    def rows(self: Any, *rest: Any) -> Any:
        self._scale = 1.0
        return original(self, *rest)

    patch.setattr(relay._Embedding, "rows", rows)


def no_softcap(patch: Patch) -> None:
    patch.setattr(drafter, "output_transform", lambda g, spec, x, dtype: x)


def live_padding(patch: Patch) -> None:
    """Ids that no tokenizer knows can win."""
    patch.setattr(build, "dead_columns", lambda live, columns: None)


def other_head_rows(patch: Patch) -> None:
    """Vocabulary rows one off, in every form of the head."""
    rolled_table("vocab.head")(patch)
    rolled_table("vocab.head_int8", "int8_table")(patch)


def other_embedding_rows(patch: Patch) -> None:
    rolled_table("vocab.embed")(patch)


def rolled_table(wanted: str, function: str = "table") -> Fault:
    """The rows of a vocabulary table are one off."""

    def fault(patch: Patch) -> None:
        original = getattr(store, function)

        def table(data: Any, weights: Any, name: str, label: str, *rest: Any) -> Any:
            return original(data, Rolled(weights) if label == wanted else weights, name, label, *rest)

        patch.setattr(store, function, table)

    return fault


def other_final_norm(patch: Patch) -> None:
    original = drafter.rms_norm
    patch.setattr(drafter, "rms_norm", lambda g, name, x, weight, eps: original(g, name, x, "hidden_norm.weight", eps))


def other_gates(of: str) -> Fault:
    """The GRU's gates in another order: n, r, z."""
    return alter_linear(of, lambda array, scale: (np.roll(array, len(array.T) // 3, axis=1), rolled_scale(scale)))


def rolled_scale(scale: Any) -> Any:
    return None if scale is None else np.roll(scale, len(scale) // 3)


def turned_gate(array: Any, scale: Any) -> Any:
    """z and 1 - z change places: what was kept is renewed."""
    size = array.shape[1] // 3
    array[:, size : 2 * size] *= -1
    return array, scale


def other_parts(patch: Patch) -> None:
    """[s ; z] instead of [z ; s]; both are of one size."""
    original = domino.stored_matrix

    def stored(g: Any, name: str, weights: Any, columns: slice = slice(None), **rest: Any) -> Any:
        if columns != slice(None):
            columns = slice(columns.stop, None) if columns.start is None else slice(columns.start)
        return original(g, name, weights, columns, **rest)

    patch.setattr(domino, "stored_matrix", stored)


def no_prefix(patch: Patch) -> None:
    """The first draft is corrected too."""
    original = dflash.build_drafter

    def faulty(g: Any, spec: Any, vocabulary: Any) -> None:
        original(g, dataclasses.replace(spec, head=dataclasses.replace(spec.head, prefix_length=0)), vocabulary)

    patch.setattr(dflash, "build_drafter", faulty)


def other_slots(patch: Patch) -> None:
    """Each draft is corrected by what the slot before it says."""
    original = domino._by_draft
    patch.setattr(domino, "_by_draft", lambda g, name, *rest: np.roll(original(g, name, *rest), "down" in name))


def other_tokens(patch: Patch) -> None:
    """The GRU reads the tokens that stand before the drafts in the vocabulary."""
    original = blocks.Vocabulary.embedding

    def embedding(self: Any, g: Any, name: str, ids: Any) -> Any:
        return original(self, g, name, g.op(f"{name}.other", "Sub", ids, g.ints(1)))

    patch.setattr(blocks.Vocabulary, "embedding", embedding)


def forgetful(patch: Patch) -> None:
    """The GRU knows the newest token alone."""
    original = domino._Gru.step

    def step(self: Any, name: str, x: Any, state: Any) -> Any:
        self.first = getattr(self, "first", state)
        return original(self, name, x, self.first)

    patch.setattr(domino._Gru, "step", step)


class Rolled:
    """Weights whose rows are one off."""

    def __init__(self, weights: Any) -> None:
        self._weights = weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weights, name)

    def read(self, name: str, rows: slice | None = None) -> Any:
        whole = np.roll(self._weights.read(name), 1, axis=0)
        return whole if rows is None else whole[rows]


def only_in(engine: str, fault: Fault) -> Fault:
    """The fault, while that one engine is built."""

    def limited(patch: Patch) -> None:
        name, place = f"build_{engine}", build if engine == "target" else dflash
        original = getattr(place, name)

        def faulty(*arguments: Any) -> None:
            with pytest.MonkeyPatch.context() as inner:
                fault(inner)
                original(*arguments)

        patch.setattr(place, name, faulty)

    return limited


STACK_FAULTS = {
    "permuted q": (alter_linear("q_proj", permuted), "layers.0"),
    "turned o": (alter_linear("o_proj", turned), "layers.0"),
    "turned gate": (alter_linear("gate_proj", turned), "layers.0"),
    "permuted down": (alter_linear("down_proj", permuted), "layers.0"),
    "scale of qkv": (alter_linear("v_proj", rescaled), "layers.0"),
    "scale of down": (alter_linear("down_proj", rescaled), "layers.0"),
    "one channel of down": (alter_linear("down_proj", one_channel), "layers.0"),
    "q and k swapped": (other_order("q_proj", "k_proj"), "layers.0"),
    "k and v swapped": (other_order("k_proj", "v_proj"), "layers.0"),
    "gate and up swapped": (other_order("gate_proj", "up_proj"), "layers.0"),
    "q norm": (alter_vector("q_norm"), "layers.0"),
    "k norm": (alter_vector("k_norm"), "layers.0"),
    "input norm": (alter_vector("input_layernorm"), "layers.0"),
    "mlp norm": (alter_vector("post_attention_layernorm"), "layers.0"),
    "last layer alone": (alter_linear("layers.1.mlp.down_proj", permuted), "layers.1"),
    "rope theta": (alter_rope(theta=2e4), "layers.0"),
    "yarn factor": (alter_rope(factor=8.0), "layers.0"),
    "window": (alter_mask(lambda causal, window: (causal, window and window + 4)), "layers.1.far"),
    "no window": (alter_mask(lambda causal, window: (causal, None)), "layers.1.far"),
    "cache row": (shifted_write, "layers.0"),
    "final norm": (alter_vector("norm.weight"), "layers.0"),
}
OTHER_FAULTS = {
    "head rows": (other_head_rows, "head"),
    "embedding rows": (other_embedding_rows, "embed"),
    "padding ids": (live_padding, "head"),
    "h weights": (only_in("context", alter_linear("fc.", permuted)), "context.h"),
    "h norm": (only_in("context", alter_vector("hidden_norm")), "context.h"),
    "tap order": (only_in("context", other_taps), "context.h"),
    "context k": (only_in("context", alter_linear("k_proj", permuted)), "context.layers.0"),
    "context scale": (only_in("context", alter_linear("k_proj", rescaled)), "context.layers.0.v"),
    "context k and v": (only_in("context", other_order("k_proj", "v_proj")), "context.layers.0.k"),
    "context k norm": (only_in("context", alter_vector("k_norm")), "context.layers.0.k"),
    "context theta": (only_in("context", alter_rope(theta=2e4)), "context.layers.0.k"),
    "context row": (only_in("context", shifted_write), "context.layers.0.k"),
    "context last layer": (only_in("context", alter_linear("layers.1.", permuted)), "context.layers.1"),
    "relay pair": (only_in("relay", other_pair), "relay"),
    "relay columns": (only_in("relay", other_columns), "relay"),
    "relay halves": (only_in("relay", other_halves), "relay"),
    "relay scale": (only_in("relay", alter_linear("relay_mlp.2", rescaled)), "relay"),
    "relay norm": (only_in("relay", alter_vector("relay_norm.weight")), "relay"),
    "relay bias": (only_in("relay", alter_vector("relay_mlp.0.bias")), "relay"),
    "embedding scale": (only_in("relay", unscaled_embeddings), "relay"),
    "mask direction": (only_in("drafter", alter_mask(lambda causal, window: (not causal, window))), "layers.0"),
    "softcap": (only_in("drafter", no_softcap), "head.logits"),
    "drafter final norm": (only_in("drafter", alter_vector("norm.weight")), ""),
}


DOMINO_FAULTS = {
    "gates of the input": (other_gates("weight_ih"), "correction"),
    "gates of the state": (other_gates("weight_hh"), "correction"),
    "turned gate": (alter_linear("prefix_gru", turned_gate), "correction"),
    "forgetful": (forgetful, "correction"),
    "other tokens": (only_in("drafter", other_tokens), "correction"),
    "[s ; z]": (other_parts, "correction"),
    "no prefix": (no_prefix, "correction.ids"),
    "slots": (other_slots, "correction"),
    "down": (alter_linear("embed_proj.0", rescaled), "correction"),
    "up": (alter_linear("embed_proj.2", permuted), "correction"),
    "one channel of up": (alter_linear("embed_proj.2", one_channel), "correction"),
    "base logits": (other_head_rows, "head"),
    "padding ids": (live_padding, "head"),
    "final norm": (other_final_norm, "head.logits"),
}


@pytest.fixture(scope="module")
def faultless(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path]:
    """A model in which every fault has a consequence: equal heads, square matrices, windows, yarn, padding, scales."""
    shape = {"num_key_value_heads": 4, "head_dim": 16, "num_hidden_layers": 2, "intermediate_size": 64}
    windows = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1}
    common = {**shape, **windows, "rope": YARN}
    drafting = {"input_embedding_scale": 2.0, "final_logit_softcapping": 3.0, "is_causal": False}
    model = Model(
        {**common, "num_hidden_layers": 3, "layer_types": None, "tokenizer": 150},
        {**common, **drafting},
        {"draft_logits": True, "max_seq_len": 300},
    )
    del model.target["layer_types"]
    folder = tmp_path_factory.mktemp("model")
    model.write(folder)
    return model, folder


def refusal(model: Model, folder: Path, output: Path, form: str, mode: str = "layer") -> str:
    with pytest.raises(UserError, match="self-check") as caught:
        model.build(folder, output, mode, target_weights=form, draft_weights=form)
    assert not output.exists()
    assert not list(output.parent.iterdir())
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("form", ["float", "int8"])
def test_the_model_of_the_faults_passes_without_them(faultless: tuple[Model, Path], tmp_path: Path, form: str) -> None:
    model, folder = faultless
    bundle = model.build(folder, tmp_path / "bundle", "full", target_weights=form, draft_weights=form)
    assert max(bundle.self_check["errors"].values()) < 1e-2


@pytest.mark.parametrize("form", ["float", "int8"])
@pytest.mark.parametrize("engine", ["target", "drafter"])
@pytest.mark.parametrize("fault", STACK_FAULTS)
def test_faulty_layers_are_refused(
    faultless: tuple[Model, Path], tmp_path: Path, monkeypatch: Patch, fault: str, engine: str, form: str
) -> None:
    model, folder = faultless
    breakage, section = STACK_FAULTS[fault]
    if engine == "target":  # its last layer and its windows are in layer 2
        section = section.replace("layers.1", "layers.2")
        if fault == "last layer alone":
            breakage = alter_linear("layers.2.mlp.down_proj", permuted)
    only_in(engine, breakage)(monkeypatch)
    message = refusal(model, folder, tmp_path / "bundle", form)
    label = "target" if engine == "target" else "dflow"
    assert message.startswith(f"self-check: {label}.{section}"), message


@pytest.mark.parametrize("form", ["float", "int8"])
@pytest.mark.parametrize("fault", OTHER_FAULTS)
def test_other_faults_are_refused(
    faultless: tuple[Model, Path], tmp_path: Path, monkeypatch: Patch, fault: str, form: str
) -> None:
    model, folder = faultless
    breakage, section = OTHER_FAULTS[fault]
    breakage(monkeypatch)
    message = refusal(model, folder, tmp_path / "bundle", form)
    assert message.startswith(("self-check: target." + section, "self-check: dflow." + section)), message


# Every fault has a consequence: state and hidden size are equal, and some ids are no token.
HEAD = {"gru_hidden_dim": 64, "pure_draft_prefix_len": 1}
DOMINO = Model(
    {"tokenizer": 150, "num_hidden_layers": 2},
    {"relay": False, "num_hidden_layers": 1, "taps": (0,), "domino": HEAD},
)


@pytest.fixture(scope="module")
def weak_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corrections so small that they hardly ever change a draft."""
    folder = tmp_path_factory.mktemp("weak")
    dataclasses.replace(DOMINO, drafter={**(DOMINO.drafter or {}), "domino_scale": 0.01}).write(folder)
    return folder


@pytest.mark.parametrize("form", ["float", "int8"])
@pytest.mark.parametrize("fault", DOMINO_FAULTS)
def test_faulty_causal_heads_are_refused(
    weak_head: Path, tmp_path: Path, monkeypatch: Patch, fault: str, form: str
) -> None:
    breakage, section = DOMINO_FAULTS[fault]
    breakage(monkeypatch)
    message = refusal(DOMINO, weak_head, tmp_path / "bundle", form)
    assert message.startswith((f"self-check: target.{section} ", f"self-check: domino.{section} ")), message


@pytest.mark.parametrize("fault", ["gates of the state", "[s ; z]", "no prefix", "other tokens"])
def test_the_full_check_alone_sees_faulty_causal_heads(tmp_path: Path, monkeypatch: Patch, fault: str) -> None:
    DOMINO.write(tmp_path / "models")
    monkeypatch.setattr(dflash_check, "check_domino", lambda *rest: None)
    DOMINO_FAULTS[fault][0](monkeypatch)
    (tmp_path / "out").mkdir()
    assert "domino.draft" in refusal(DOMINO, tmp_path / "models", tmp_path / "out" / "bundle", "float", "full")


@pytest.mark.parametrize("form", ["float", "int8"])
def test_packed_taps_in_the_wrong_order_need_the_full_check(
    faultless: tuple[Model, Path], tmp_path: Path, monkeypatch: Patch, form: str
) -> None:
    model, folder = faultless
    other_extract(monkeypatch)
    assert "dflow.draft" in refusal(model, folder, tmp_path / "bundle", form, "full")


@pytest.mark.parametrize("form", ["float", "int8"])
@pytest.mark.parametrize("file", ["vocab", "target", "dflow.context", "dflow.relay", "dflow.drafter"])
def test_damaged_data_files_are_refused(
    faultless: tuple[Model, Path], tmp_path: Path, monkeypatch: Patch, file: str, form: str
) -> None:
    """A file whose second half moved by a page, as after a lost write."""
    model, folder = faultless
    original = build.run_self_check

    def damaged(bundle: Bundle, *rest: Any) -> Any:
        path = bundle.path / f"{file}.data"
        content = path.read_bytes()
        half = len(content) // 8192 * 4096
        path.write_bytes(content[:half] + content[half + 4096 :] + content[half : half + 4096])
        return original(bundle, *rest)

    monkeypatch.setattr(build, "run_self_check", damaged)
    refusal(model, folder, tmp_path / "bundle", form, "full")


def test_not_a_number_is_refused(faultless: tuple[Model, Path], tmp_path: Path, monkeypatch: Patch) -> None:
    model, folder = faultless

    def spoilt(array: Any, scale: Any) -> Any:
        return np.full_like(array, np.nan), scale

    only_in("drafter", alter_linear("up_proj", spoilt))(monkeypatch)
    assert "by nan" in refusal(model, folder, tmp_path / "bundle", "float")


def test_the_check_reads_the_files_not_the_graph_in_memory(faultless: tuple[Model, Path], tmp_path: Path) -> None:
    """Every weight of a finished engine lies in a file of the bundle that the manifest lists."""
    model, folder = faultless
    bundle = model.build(folder, tmp_path / "bundle", "layer")
    for name in (name for name in bundle.files if name.endswith(".onnx")):
        for value in ir.load(bundle.path / name).graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                assert str(value.const_value.location) in bundle.files
