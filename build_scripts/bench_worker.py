"""What a peer's worker process is made of. It runs inside the peer's own environment and never imports dflow_trt.

Commands are JSON lines on stdin, each answered with one JSON line on stdout: ``export`` (a Hugging Face folder to the
peer's form), ``open`` (a model under a name; gives versions), ``generate`` (one request; gives its steps).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

Commands = Mapping[str, Callable[..., dict[str, Any]]]


class Steps:
    """The steps of a request, its prefill first: seconds on the clock and on the processor, and the tokens of each."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, float]] = []
        self._tokens: list[list[int]] = []

    @property
    def count(self) -> int:
        """Of steps that have begun."""
        return len(self._marks)

    def begin(self) -> None:
        """The next one, which ends the one before."""
        self._marks.append((time.perf_counter(), time.process_time()))
        self._tokens.append([])

    def add(self, *tokens: int) -> None:
        """What the present one gave."""
        self._tokens[-1] += tokens

    def answer(self) -> dict[str, Any]:
        """All of them; the last one ends now."""
        ends = [*self._marks[1:], (time.perf_counter(), time.process_time())]
        spent = [(end[0] - start[0], end[1] - start[1]) for start, end in zip(self._marks, ends, strict=True)]
        return {"steps": [[*times, tokens] for times, tokens in zip(spent, self._tokens, strict=True)]}


def versions(*packages: str) -> dict[str, Any]:
    """The answer to ``open``."""
    return {"versions": {package: version(package) for package in packages}}


def serve(commands: Commands) -> None:
    """Answer until stdin ends. What libraries print goes to stderr: stdout is the protocol's."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = commands[asked.pop("op")](**asked)
        except Exception as error:  # the other side decides what a failure means
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
