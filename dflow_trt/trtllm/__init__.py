"""The way over to TensorRT-LLM: a drafter as its DFlash reads it, and the configuration to serve the same pair there.

Nothing here imports ``tensorrt_llm``.
"""
