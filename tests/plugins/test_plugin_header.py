"""The contract that plugins/contract.h is generated from, and the ONNX nodes that must agree with it."""

from __future__ import annotations

import re
import sys

import onnx_ir as ir
import pytest
from plugin_toolchain import PLUGINS, ROOT, run

from dflow_trt import contract
from dflow_trt.graphs.functions import hidden_state_extract, relay_inject

EXTRACT, INJECT = contract.PLUGINS
GENERATOR = ROOT / "build_scripts" / "gen_contract_header.py"


def test_the_header_is_not_stale() -> None:
    result = run([sys.executable, GENERATOR, "--check"])
    assert result.returncode == 0, result.stdout


def test_names_come_from_the_header_alone() -> None:
    names = {contract.PLUGIN_DOMAIN}
    for spec in contract.PLUGINS:
        names |= {spec.name, spec.output.name, *(tensor.name for tensor in spec.inputs), *spec.fields}
    quoted = re.compile(f"[\"'](?:{'|'.join(names)})[\"']")
    for source in [*PLUGINS.glob("*.cpp"), *PLUGINS.glob("*.h")]:
        code = re.sub(r"//.*", "", source.read_text())
        assert source.name == "contract.h" or quoted.findall(code) == [], source.name


def input_names(function: ir.Function) -> list[str | None]:
    return [value.name for value in function.inputs]


@pytest.mark.parametrize("taps", [1, 5])
def test_hidden_state_extract_has_the_contracts_inputs(taps: int) -> None:
    tap, row_count = EXTRACT.inputs
    function = hidden_state_extract(taps)
    assert function.name == EXTRACT.name
    assert input_names(function) == [f"{tap.name}_{i}" for i in range(taps)] + [row_count.name]
    assert dict(function.attributes) == EXTRACT.fields == {}


def test_relay_inject_has_the_contracts_inputs_and_fields() -> None:
    function = relay_inject()
    assert function.name == INJECT.name
    assert input_names(function) == [tensor.name for tensor in INJECT.inputs]
    defaults = {name: attribute.as_float() for name, attribute in function.attributes.items()}
    assert defaults == pytest.approx(INJECT.fields)
