"""YAML for configuration files: nested mappings, with every other value as JSON, which is YAML too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def to_yaml(values: Mapping[str, Any], indent: str = "") -> str:
    """One key a line, mappings indented below theirs."""
    lines = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{key}:\n{to_yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{key}: {json.dumps(value, ensure_ascii=False)}\n")
    return "".join(lines)
