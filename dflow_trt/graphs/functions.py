"""The dflow:: local functions: what the C++ plugins compute, in ONNX operators.

ONNX Runtime inlines them; TensorRT takes the plugin of the same name instead.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from dflow_trt.contract import (
    HIDDEN_STATE_EXTRACT,
    PLUGIN_DOMAIN,
    RELAY_INJECT,
    RELAY_INJECT_EPSILON,
    RELAY_INJECT_EPSILON_DEFAULT,
)
from dflow_trt.graphs.builder import OPSET


def _function(
    name: str, inputs: list[ir.Value], tape: Tape, output: ir.Value, attributes: list[ir.Attr]
) -> ir.Function:
    graph = ir.Graph(inputs, [output], nodes=tape.nodes, opset_imports={"": OPSET}, name=name)
    return ir.Function(PLUGIN_DOMAIN, name, graph=graph, attributes=attributes)


def _ints(tape: Tape, *values: int) -> ir.Value:
    return tape.op("Constant", [], {"value": ir.tensor(np.array(values, np.int64))})


def _scalar(tape: Tape, value: int) -> ir.Value:
    return tape.op("Constant", [], {"value": ir.tensor(np.array(value, np.int64))})


def hidden_state_extract(taps: int) -> ir.Function:
    """(tap_0 .. tap_{n-1} [B,S,E], row_count [B]) -> hidden [B,S,n*E]: packed, rows from row_count on are zero.

    Zeros come from a selection, never from a product: a garbage row may hold values whose product with 0 is NaN.
    """
    tape = Tape()
    inputs = [ir.val(f"tap_{i}") for i in range(taps)] + [ir.val("row_count")]
    packed = tape.op("Concat", inputs[:-1], {"axis": -1})
    length = tape.op("Squeeze", [tape.op("Shape", [packed], {"start": 1, "end": 2}), _ints(tape, 0)])
    rows = tape.op("Range", [_scalar(tape, 0), length, _scalar(tape, 1)])
    live = tape.op("Less", [rows, tape.op("Unsqueeze", [inputs[-1], _ints(tape, 1)])])
    zero = tape.op("CastLike", [_scalar(tape, 0), packed])
    hidden = tape.op("Where", [tape.op("Unsqueeze", [live, _ints(tape, 2)]), packed, zero])
    return _function(HIDDEN_STATE_EXTRACT, inputs, tape, hidden, [])


def relay_inject() -> ir.Function:
    """(x [B,J,E], h [B,J,E], beta_gamma [B,J,2E], norm_weight [E], norm_bias [E], relay_on [B,J]) -> x' [B,J,E].

    x' = x + beta * LN(h) + gamma where relay_on, else x to the bit (DFlow, arXiv 2609.06498). relay_on is int64 and not
    bool because TensorRT's plugins take no bool.
    """
    tape = Tape()
    inputs = [ir.val(name) for name in ("x", "h", "beta_gamma", "norm_weight", "norm_bias", "relay_on")]
    x, h, beta_gamma, weight, bias, on = inputs
    beta, gamma = tape.op_multi_out("Split", [beta_gamma], {"axis": -1, "num_outputs": 2}, num_outputs=2)
    epsilon = ir.RefAttr("epsilon", RELAY_INJECT_EPSILON, ir.AttributeType.FLOAT)
    normed = tape.op("LayerNormalization", [h, weight, bias], {"axis": -1, "epsilon": epsilon})
    term = tape.op("Add", [tape.op("Mul", [beta, normed]), gamma])
    relayed = tape.op("Cast", [tape.op("Unsqueeze", [on, _ints(tape, 2)])], {"to": ir.DataType.BOOL})
    chosen = tape.op("Where", [relayed, tape.op("Add", [x, term]), x])
    default = ir.AttrFloat32(RELAY_INJECT_EPSILON, RELAY_INJECT_EPSILON_DEFAULT)
    return _function(RELAY_INJECT, inputs, tape, chosen, [default])
