"""Prompt files: one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflow_trt.errors import UserError

KINDS = ("prompt", "messages", "prompt_token_ids")


def read_prompts(path: Path, flag: str = "--prompts") -> list[dict[str, Any]]:
    """The prompts of a JSONL file: ``{"prompt": ...}``, ``{"messages": [...]}`` or ``{"prompt_token_ids": [...]}``.

    Prompt i stands on line i + 1; other fields (id, task, ...) are left out. UserError names the ``flag`` that gave the
    file, the file, the line and its fault; an empty line before the last prompt is one.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").rstrip().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"{flag}: {path}: {reason}; give a JSONL file") from None
    if lines == [""]:
        raise UserError(f"{flag}: {path} holds no prompt; give one JSON object a line")
    return [_prompt(f"{flag}: {path} line {number}", line) for number, line in enumerate(lines, 1)]


def _prompt(where: str, line: str) -> dict[str, Any]:
    if not line.strip():
        raise UserError(f"{where}: empty; remove the line, or write a prompt there")
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: no JSON ({error})") from None
    given = [kind for kind in KINDS if isinstance(data, dict) and kind in data]
    if len(given) != 1:
        raise UserError(f"{where}: needs exactly one of {', '.join(KINDS)}")
    kind, value = given[0], data[given[0]]
    if not _FITS[kind](value):
        raise UserError(f"{where}: {kind} is {json.dumps(value)[:60]}; allowed: {_ALLOWED[kind]}")
    return {kind: value}


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _list_of(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and bool(value) and all(map(fits, value))


_FITS: dict[str, Callable[[Any], bool]] = {
    "prompt": lambda value: isinstance(value, str),
    "messages": lambda value: _list_of(value, _is_message),
    "prompt_token_ids": lambda value: _list_of(value, lambda item: type(item) is int),
}
_ALLOWED = {
    "prompt": "a text",
    "messages": "a list of objects with role and content",
    "prompt_token_ids": "a list of token ids",
}
