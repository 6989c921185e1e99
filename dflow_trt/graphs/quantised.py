"""Linear layers that the checkpoint quantised, in ONNX's QuantizeLinear and DequantizeLinear.

An engine computes in its own dtype between them; TensorRT recognises the pairs and computes in few bits. Scales of
8-bit layers are float32 in every build: TensorRT-RTX multiplies sums of unscaled products by them in the dtype of the
scales, and float16 would overflow there. Scales of 4-bit groups have the engine's dtype, which it wants there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from dflow_trt.checkpoint.weights import QuantisedLinear, Weights
from dflow_trt.graphs import store
from dflow_trt.graphs.builder import GraphBuilder
from dflow_trt.spec import QuantAlgo

LEVELS: dict[QuantAlgo, ir.DataType] = {
    "FP8": ir.DataType.FLOAT8E4M3FN,
    "W8A8_SQ_PER_CHANNEL": ir.DataType.INT8,
}
"""What inputs are rounded to."""


def alike(source: Weights, weights: Sequence[str]) -> list[list[str]]:
    """The weights in runs whose inputs are treated alike: one product can serve each run."""
    groups: list[list[str]] = []
    last: object = None
    for name in weights:
        treatment = _treatment(source.quantised(name))
        if not groups or treatment != last:
            groups.append([])
        groups[-1].append(name)
        last = treatment
    return groups


def _treatment(layer: QuantisedLinear | None) -> tuple[bool, list[bytes | None]]:
    """What must be equal in layers of one product: both scales of the inputs."""
    if layer is None:
        return False, []
    scales = (layer.pre_quant_scale(), layer.input_scale())
    return True, [None if scale is None else scale.tobytes() for scale in scales]


def quantised_input(g: GraphBuilder, name: str, x: ir.Value, layer: QuantisedLinear) -> ir.Value:
    """x [.., in] as the layer takes it: smoothed, and rounded to its 8-bit type, where it says so.

    Element by element with constant scales, so that a row's result does not depend on the other rows of a call.
    """
    smoothing, scale = layer.pre_quant_scale(), layer.input_scale()
    if smoothing is not None:
        x = g.op(f"{name}.smoothed", "Mul", x, g.stored(f"{name}.pre_quant_scale", smoothing))
    if scale is None:
        return x
    step, levels = g.constant(f"{name}.input_scale", scale), int(LEVELS[layer.spec.algo])
    rounded = g.op(f"{name}.input_levels", "QuantizeLinear", x, step, output_dtype=levels)
    return g.op(f"{name}.input", "DequantizeLinear", rounded, step, output_dtype=int(g.engine_type))


def packed_weights(g: GraphBuilder, name: str, layers: Sequence[QuantisedLinear]) -> ir.Value:
    """The stacked weights [in, sum of out], stored in their few bits and widened by the engine."""
    levels, group_size = store.packed(layers), layers[0].spec.group_size
    if group_size is None:
        values, scale = g.weight(g.store.add(f"{name}_levels", levels)), stacked_scale(layers)
        axis = 1 if scale.ndim else None
        scales = g.channel_scale(f"{name}_scale", scale)
        return g.op(name, "DequantizeLinear", values, scales, axis=axis, output_dtype=int(g.engine_type))
    values = g.weight(g.store.add_int4(f"{name}_levels", levels))
    scales = g.stored(f"{name}_scale", np.concatenate([layer.scale() for layer in layers]).T)
    return g.op(name, "DequantizeLinear", values, scales, axis=0, block_size=group_size)


def stacked_scale(layers: Sequence[QuantisedLinear]) -> np.ndarray:
    """float32 [sum of out], or [] where all weights of all layers share one scale."""
    scales = [layer.scale() for layer in layers]
    if all(scale.ndim == 0 and scale == scales[0] for scale in scales):
        return scales[0]
    return np.concatenate(
        [np.broadcast_to(scale, layer.shape[:1]) for scale, layer in zip(scales, layers, strict=True)]
    )
