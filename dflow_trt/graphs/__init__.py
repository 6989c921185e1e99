"""ONNX graph builders: opset 24, built node by node, without torch and without tracing."""
