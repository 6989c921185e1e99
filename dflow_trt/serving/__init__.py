"""Serving: the Triton model repository, the loop behind it, and the OpenAI endpoint."""
