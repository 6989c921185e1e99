"""A running server instead of a bundle: the same workload and figures, seen from its client.

base.py (what a channel to a server gives), openai.py and triton.py (the two channels), counters.py (the server's own
metrics), run.py (the profile).
"""
