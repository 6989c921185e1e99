"""Runtimes: engines behind one protocol, with the slot KV caches that they work on."""
