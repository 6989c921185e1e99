"""The plugins in the real plugin registries of TensorRT 11.4 and 10.16: they load with no GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import plugin_toolchain as toolchain
import pytest
from plugin_toolchain import TESTS, run

PROBE = Path(__file__).with_name("registry_probe.py")
VERSIONS = ("11.4.0.106", "10.16.1.11")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_lean_registry_takes_the_plugins(version: str) -> None:
    command = [sys.executable, PROBE, "tensorrt_lean_bindings", toolchain.plugin_library()]
    result = run(command, PYTHONPATH=str(toolchain.wheels(f"tensorrt-lean-{version}")))
    assert result.returncode == 0, result.stdout
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["version"] == version
    assert report["loaded"]
    assert report["fields"] == {"HiddenStateExtract": {}, "RelayInject": {"epsilon": pytest.approx(1e-6)}}
    interfaces = ["PLUGIN_V3ONE_CORE", "PLUGIN_V3ONE_BUILD", "PLUGIN_V3ONE_RUNTIME"]
    said = {name: [name, "1", "dflow", 1, *interfaces] for name in report["fields"]}
    assert report["made"] == said
    assert report["with epsilon"] == said["RelayInject"]
    assert not report["misspelt"]
    assert not report["negative"]
    assert not report["other version"]
    assert "unknown field 'epsilom'; the only one is 'epsilon'" in result.stdout, "without a logger: to stderr"


@pytest.mark.parametrize("kind", ["lean", "dispatch"])
def test_the_plugins_keep_to_their_contract_in_the_registry_of_10_16(kind: str) -> None:
    """In C++, so of the major version that the headers are of: 11 changed the registry's own interface."""
    folder = toolchain.wheels(f"tensorrt-{kind}-10.16.1.11")
    library = folder / f"tensorrt_{kind}_libs" / f"libnvinfer_{kind}.so.10"
    program = toolchain.cuda_program("test_plugins", [TESTS / "test_plugins.cpp"], "-ldl", "-lpthread")
    result = run([program, toolchain.plugin_library(), library])
    assert result.returncode == 0, result.stdout
