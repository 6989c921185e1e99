"""``dflow-trt doctor``: what this machine has, what is missing, and the command that fixes it.

examine.py   looks: needs the standard library alone, for it has to work where everything else is missing
selftest.py  tries: the example pair on the CPU, and on a GPU beside the CPU
show.py      the table
"""

from __future__ import annotations
