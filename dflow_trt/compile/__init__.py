"""Graphs in, engines out: one module a backend, all behind :class:`dflow_trt.compile.base.Backend`."""
