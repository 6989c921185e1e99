"""Run in a process of its own: rtx_probe.py MODEL.onnx [PLUGINS.so]. Parses and builds one model with TensorRT-RTX,
ahead of time, without a GPU. Prints JSON: the layers, whether an engine came out, and what was logged.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tensorrt_rtx_bindings as trt


class Log(trt.ILogger):
    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.messages: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        if severity <= trt.ILogger.Severity.ERROR:
            self.messages.append(message)


def main(model: str, library: str = "") -> None:
    log = Log()
    if library:
        trt.get_plugin_registry().load_library(library)
    builder = trt.Builder(log)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, log)
    parsed = parser.parse(Path(model).read_bytes())
    layers = [str(network.get_layer(i).type).split(".")[-1] for i in range(network.num_layers)]
    outputs = [list(network.get_output(i).shape) for i in range(network.num_outputs)] if parsed else []
    engine = build(builder, network) if parsed else None
    report = {"parsed": parsed, "layers": layers, "outputs": outputs, "bytes": engine.nbytes if engine else 0}
    print(json.dumps(report | {"log": log.messages}))


def build(builder: Any, network: Any) -> Any:
    """Open sizes are from 1 to 16, 8 at best."""
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        shapes = [tuple(size if size > 0 else open_size for size in tensor.shape) for open_size in (1, 8, 16)]
        profile.set_shape(tensor.name, *shapes)
    config.add_optimization_profile(profile)
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    return builder.build_serialized_network(network, config)


if __name__ == "__main__":
    main(*sys.argv[1:])
