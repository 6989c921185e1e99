"""From a graph to an engine, one module a backend."""
