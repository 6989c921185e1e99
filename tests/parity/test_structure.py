"""What every graph file of a bundle looks like: valid, readable, and ready for a plugin backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from harness import Pair, build_pair

from dflow_trt import contract as c

DOMAINS = {"", "com.microsoft", c.PLUGIN_DOMAIN}
ENGINES = (
    "target",
    "flow.context",
    "flow.relay",
    "flow.drafter",
    "plain.context",
    "plain.relay",
    "plain.drafter",
    "turn.context",
    "turn.relay",
    "turn.drafter",
    "second.context",
    "second.relay",
    "second.drafter",
)
FORMS = ("float", "int8")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    window = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1, "is_causal": False}
    drafters: dict[str, dict[str, Any]] = {
        "flow": {"relay": True, "taps": (1, 0), **window},
        "plain": {"taps": (2,), "final_logit_softcapping": 5.0},
        "turn": {"taps": (2,), "domino": {"shift_label": True, "pure_draft_prefix_len": 1}, "block_size": 16},
        "second": {"taps": (2,), "dflash2": {"selector_top_k": 4}, "output_multiplier": 0.5},
    }
    target = {"num_hidden_layers": 4, "vocab_size": 300, "attention_bias": True}
    drafters = {name: {**keys, "attention_bias": True} for name, keys in drafters.items()}
    return {
        form: build_pair(tmp_path_factory.mktemp(form), target, drafters, target_weights=form, draft_weights=form)
        for form in FORMS
    }


@pytest.fixture(params=[(form, engine) for form in FORMS for engine in ENGINES], ids="-".join)
def path(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Path:
    form, engine = request.param
    return pairs[form].bundle.path / f"{engine}.onnx"


@pytest.fixture
def model(path: Path) -> onnx.ModelProto:
    return onnx.load(path, load_external_data=False)


def _contract(pair: Pair, path: Path) -> c.EngineContract:
    found = {
        f"{name}.{contract.engine}" if name else contract.engine: contract for name, contract in pair.bundle.contracts()
    }
    return found[path.stem]


def test_the_bundle_has_these_engines_and_no_other(pairs: dict[str, Pair]) -> None:
    for pair in pairs.values():
        assert {path.stem for path in pair.bundle.path.glob("*.onnx")} == set(ENGINES)


def test_the_checker_accepts_the_file(path: Path) -> None:
    onnx.checker.check_model(str(path), full_check=False)


def test_opset_and_domains(model: onnx.ModelProto) -> None:
    assert {entry.domain for entry in model.opset_import} <= DOMAINS
    assert next(entry.version for entry in model.opset_import if entry.domain == "") == 24
    for function in model.functions:
        assert [(entry.domain, entry.version) for entry in function.opset_import] == [("", 24)]
    assert {node.domain for node in model.graph.node} <= DOMAINS


def test_inputs_and_outputs_are_those_of_the_contract(pairs: dict[str, Pair], path: Path) -> None:
    model = onnx.load(path, load_external_data=False)
    contract = _contract(pairs["float"], path)
    size = contract.static
    caches = [(t, layer) for layer in range(contract.cache_layers) for t in c.CACHE_TENSORS]
    cache_shape = ["B", size.get("N"), size.get("L"), size.get("D")]
    for side, specs, named in (
        (model.graph.input, contract.inputs, c.past),
        (model.graph.output, contract.outputs, c.present),
    ):
        expected = {spec.name: list(contract.shape(spec)) for spec in specs}
        expected |= {named(tensor, layer): cache_shape for tensor, layer in caches}
        found = {
            value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in side
        }
        assert found == expected
        assert all(dim for shape in found.values() for dim in shape)


def test_types_are_int64_bool_and_float32(model: onnx.ModelProto) -> None:
    integers = {spec.name: spec.kind for spec in (*_all_specs(),) if spec.kind in ("int64", "bool")}
    kinds = {"int64": onnx.TensorProto.INT64, "bool": onnx.TensorProto.BOOL}
    for value in (*model.graph.input, *model.graph.output):
        expected = kinds[integers[value.name]] if value.name in integers else onnx.TensorProto.FLOAT
        assert value.type.tensor_type.elem_type == expected, value.name


def _all_specs() -> Iterator[c.TensorSpec]:
    return (value for value in vars(c).values() if isinstance(value, c.TensorSpec))


def test_every_node_and_value_has_a_readable_name_of_its_own(model: onnx.ModelProto) -> None:
    names = [node.name for node in model.graph.node]
    assert all(names)
    assert len(set(names)) == len(names)
    values = [output for node in model.graph.node for output in node.output]
    assert len(set(values)) == len(values)
    for node in model.graph.node:
        prefix = node.name.removesuffix(".split")
        assert all(_same_place(output, prefix, node) for output in node.output), (
            node.name,
            list(node.output),
        )
    assert not [value for value in values if value.startswith(("val_", "anonymous", "node_")) or value.isdigit()]


def _same_place(output: str, prefix: str, node: onnx.NodeProto) -> bool:
    """A value is called like its node, unless it is an engine output, which the contract names."""
    outputs = {spec.name for spec in _all_specs()}
    return output == node.name or (node.op_type in ("Split", "TopK") and output.startswith(prefix)) or output in outputs


def test_caches_are_read_once_by_their_own_scatter(model: onnx.ModelProto) -> None:
    pasts = [value.name for value in model.graph.input if value.name.startswith("past_")]
    uses = Counter(name for node in model.graph.node for name in node.input)
    scatters = {node.input[0]: node for node in model.graph.node if node.op_type == "TensorScatter"}
    assert set(scatters) == set(pasts)
    for name in pasts:
        assert uses[name] == 1
        assert list(scatters[name].output) == [name.replace("past_", "present_")]
    assert not [name for function in model.functions for node in function.node for name in node.input if name in pasts]


def test_plugin_nodes_carry_what_a_plugin_backend_needs(path: Path, model: onnx.ModelProto) -> None:
    expected = {"target": [c.HIDDEN_STATE_EXTRACT], "flow.relay": [c.RELAY_INJECT]}.get(path.stem, [])
    nodes = [node for node in model.graph.node if node.domain == c.PLUGIN_DOMAIN]
    assert [node.op_type for node in nodes] == expected
    assert [(function.domain, function.name) for function in model.functions] == [
        (c.PLUGIN_DOMAIN, kind) for kind in expected
    ]
    for node in nodes:
        attributes = {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}
        assert attributes.pop("plugin_namespace") == c.PLUGIN_DOMAIN.encode()
        assert attributes.pop("plugin_version") == c.PLUGIN_VERSION.encode()
        extra = {c.RELAY_INJECT_EPSILON: pytest.approx(1e-6)} if node.op_type == c.RELAY_INJECT else {}
        assert attributes == extra
    used = {entry.domain for entry in model.opset_import}
    assert (c.PLUGIN_DOMAIN in used) == bool(expected)


def test_nothing_computes_attention_by_an_operator_on_this_backend(model: onnx.ModelProto) -> None:
    """The Attention operator takes other code at one row than at many: results would depend on the call's shape."""
    assert "Attention" not in {node.op_type for node in model.graph.node}


def test_weights_lie_in_data_files_of_the_bundle(path: Path, model: onnx.ModelProto) -> None:
    own = {f"{path.stem}.data", c.VOCAB_DATA}
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            assert entries["location"] in own
            assert int(entries["offset"]) % 4096 == 0
    assert path.stat().st_size < 1 << 20


def test_every_initializer_is_read(model: onnx.ModelProto) -> None:
    used = {name for node in model.graph.node for name in node.input}
    assert [tensor.name for tensor in model.graph.initializer if tensor.name not in used] == []
