"""The target's own answers on disk, in pieces that are whole or absent: an interrupted job goes on where it was.

A piece holds the answers to a fixed number of prompts. Its folder is named after what the answers depend on besides the
prompts (target, limits, sampling), its file after the prompts, so nothing stale can be read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dflow_trt.files import staged_file
from dflow_trt.training.data import Trajectory

Ids = tuple[int, ...]
PIECE = 64
"""Prompts of one piece: they are answered in one batch."""


@dataclass(frozen=True)
class AnswerSettings:
    """What answers depend on besides their prompts. Greedy answers (temperature 0) do not depend on the seed."""

    target: str
    max_new_tokens: int
    temperature: float
    seed: int
    piece: int = PIECE

    @property
    def key(self) -> str:
        return digest(asdict(self) | ({} if self.temperature else {"seed": 0}))


Answer = Callable[[Sequence[Ids], AnswerSettings, int], list[Trajectory]]
"""(prompts, settings, seed of this piece) -> one trajectory a prompt, in their order."""


def digest(data: Any) -> str:
    """A short name for JSON data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:20]


def answered(
    folder: Path,
    prompts: Sequence[Ids],
    settings: AnswerSettings,
    answer: Answer,
    on_piece: Callable[[int], None] = lambda done: None,
    share: tuple[int, int] = (0, 1),
) -> list[Trajectory]:
    """The answers to the prompts, in their order; pieces that are not in the cache yet are made and kept.

    `on_piece` is told the number of prompts done. `share` (i, n) does every n-th piece from the i-th alone.
    """
    place, found = folder / "answers" / settings.key, list[Trajectory]()
    for piece in list(_pieces(prompts, settings.piece))[share[0] :: share[1]]:
        path = place / f"{digest(piece)}.safetensors"
        kept = _read(path, piece)
        if kept is None:
            kept = answer(piece, settings, int(digest([settings.seed, *piece])[:12], 16))
            _write(path, kept, settings)
        found += kept
        on_piece(len(found))
    return found


def _pieces(prompts: Sequence[Ids], size: int) -> Iterator[Sequence[Ids]]:
    return (prompts[at : at + size] for at in range(0, len(prompts), size))


def _read(path: Path, prompts: Sequence[Ids]) -> list[Trajectory] | None:
    """The answers of a piece; None if it is not there, or is damaged."""
    try:
        tensors = load_file(path)
        ids, lengths = tensors["ids"], tensors["lengths"]
    except (OSError, SafetensorError, KeyError):
        return None
    if len(lengths) != len(prompts) or int(lengths.sum()) != len(ids):
        return None
    responses = np.split(ids, np.cumsum(lengths)[:-1])
    return [Trajectory(prompt, tuple(row.tolist())) for prompt, row in zip(prompts, responses, strict=True)]


def _write(path: Path, trajectories: Sequence[Trajectory], settings: AnswerSettings) -> None:
    """One piece, and beside the pieces the settings they were made with, for people."""
    responses = [np.array(trajectory.response_ids, np.int32) for trajectory in trajectories]
    lengths = np.array([len(row) for row in responses], np.int32)
    with staged_file(path) as partial:
        save_file({"ids": np.concatenate(responses), "lengths": lengths}, partial)
    with staged_file(path.with_name("settings.json")) as partial:
        partial.write_text(json.dumps(asdict(settings), indent=2) + "\n", encoding="utf-8")
