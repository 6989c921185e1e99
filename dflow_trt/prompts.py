"""Prompt files: one JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflow_trt.errors import UserError

KINDS = ("prompt", "messages", "prompt_token_ids")


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The prompts of a JSONL file: ``{"prompt": ...}``, ``{"messages": [...]}`` or ``{"prompt_token_ids": [...]}``.

    Blank lines are skipped; other fields (id, task, ...) are left out. UserError names the file, line and fault.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"--prompts: {path}: {reason}; give a JSONL file") from None
    prompts = [_prompt(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise UserError(f"--prompts: {path} holds no prompt; give one JSON object a line")
    return prompts


def _prompt(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise UserError(f"--prompts: {path} line {number}: no JSON ({error})") from None
    given = [kind for kind in KINDS if isinstance(data, dict) and kind in data]
    if len(given) != 1:
        raise UserError(f"--prompts: {path} line {number}: needs exactly one of {', '.join(KINDS)}")
    return {given[0]: data[given[0]]}
