"""Run in a process of its own: registry_probe.py MODULE PLUGINS.so. What a real TensorRT registry makes of the plugins.

Prints JSON. Only the registry is used: a runtime needs a GPU, and its failure takes the process along.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import numpy as np


def main(module: str, library: str) -> None:
    trt = importlib.import_module(module)
    registry = trt.get_plugin_registry()
    loaded = registry.load_library(library) is not None
    names = ("HiddenStateExtract", "RelayInject")
    creators = {name: registry.get_creator(name, "1", "dflow") for name in names}
    report = {
        "version": trt.__version__,
        "loaded": loaded,
        "fields": {name: fields_of(creator) for name, creator in creators.items()},
        "made": {name: describe(trt, make(trt, creator, {})) for name, creator in creators.items()},
        "with epsilon": describe(trt, make(trt, creators["RelayInject"], {"epsilon": 1e-5})),
        "misspelt": make(trt, creators["RelayInject"], {"epsilom": 1e-5}) is not None,
        "negative": make(trt, creators["RelayInject"], {"epsilon": -1.0}) is not None,
        "other version": registry.get_creator("RelayInject", "2", "dflow") is not None,
    }
    print(json.dumps(report))


def fields_of(creator: Any) -> dict[str, float]:
    return {field.name: float(field.data[0]) for field in creator.field_names}


def make(trt: Any, creator: Any, values: dict[str, float]) -> Any:
    arrays = {name: np.array([value], np.float32) for name, value in values.items()}
    fields = [trt.PluginField(name, array, trt.PluginFieldType.FLOAT32) for name, array in arrays.items()]
    return creator.create_plugin("layer", trt.PluginFieldCollection(fields), trt.TensorRTPhase.BUILD)


def describe(trt: Any, plugin: Any) -> list[Any]:
    """What the plugin says of itself."""
    core = plugin.get_capability_interface(trt.PluginCapabilityType.CORE)
    build = plugin.get_capability_interface(trt.PluginCapabilityType.BUILD)
    runtime = plugin.get_capability_interface(trt.PluginCapabilityType.RUNTIME)
    interfaces = [interface.interface_info.kind for interface in (core, build, runtime)]
    return [core.plugin_name, core.plugin_version, core.plugin_namespace, build.num_outputs, *interfaces]


if __name__ == "__main__":
    main(*sys.argv[1:])
