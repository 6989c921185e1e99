"""JSON files of a checkpoint, read strictly: a value of the wrong kind is refused, never coerced."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflow_trt.errors import UserError

INT_MAX = 2**31 - 1
_SHOWN = 80


def refuse(where: str | Path, key: str, found: str, allowed: str, todo: str) -> UserError:
    """One line for one wrong fact: where, which key, what is found, what is allowed, what to do."""
    text = f"{where}: {key} is {found}; allowed: {allowed}; {todo}"
    return UserError("".join(char if char.isprintable() else repr(char)[1:-1] for char in text))


def show(value: Any) -> str:
    """A value as an error message prints it: Python notation, cut at 80 characters; ``missing`` for None."""
    text = "missing" if value is None else repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


@dataclass(frozen=True)
class Config:
    """A JSON object with the name of its file; ``prefix`` is the dotted path of a nested object, or empty.

    null and an absent key mean the same. Every getter raises UserError where a value is not what it says.
    """

    data: Mapping[str, Any]
    where: Path
    prefix: str = ""

    def get(self, key: str) -> Any:
        """The raw value, None when absent or null."""
        return self.data.get(key)

    def error(self, key: str, allowed: str, todo: str | None = None) -> UserError:
        """The refusal of this key's value."""
        return refuse(self.where, self.prefix + key, show(self.get(key)), allowed, todo or "correct the file")

    def integer(self, key: str, low: int = 1, high: int = INT_MAX) -> int:
        """A required whole number, low <= value <= high."""
        value = self.get(key)
        if type(value) is not int or not low <= value <= high:
            raise self.error(key, f"an integer from {low} to {high}")
        return value

    def optional_integer(self, key: str, low: int = 1, high: int = INT_MAX) -> int | None:
        """A whole number, or None when absent."""
        return None if self.get(key) is None else self.integer(key, low, high)

    def integers(self, key: str) -> tuple[int, ...]:
        """A required, non-empty list of whole numbers."""
        value = self.get(key)
        if not isinstance(value, list) or not value or any(type(item) is not int for item in value):
            raise self.error(key, "a non-empty list of integers")
        return tuple(value)

    def number(self, key: str, above: float | None = None, at_least: float | None = None) -> float:
        """A required finite number, within the bound where one is given."""
        value = self.get(key)
        bound = "" if above is None else f" above {above:g}"
        bound += "" if at_least is None else f" of at least {at_least:g}"
        if type(value) not in (int, float) or not _finite(value) or not _within(value, above, at_least):
            raise self.error(key, "a finite number" + bound)
        return float(value)

    def optional_number(self, key: str, above: float | None = None, at_least: float | None = None) -> float | None:
        """A finite number, or None when absent."""
        return None if self.get(key) is None else self.number(key, above, at_least)

    def boolean(self, key: str, default: bool) -> bool:
        """true or false; ``default`` is the meaning of an absent key."""
        value = self.get(key)
        if value is not None and type(value) is not bool:
            raise self.error(key, "true or false")
        return default if value is None else value

    def one_of(self, key: str, allowed: Sequence[str], default: str | None = None) -> str:
        """A string of a closed set; required unless ``default`` says what an absent key means."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or value not in allowed:
            raise self.error(key, " or ".join(map(repr, allowed)), "this kind is not supported")
        return value

    def section(self, key: str) -> Config | None:
        """A nested object, or None when absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "a JSON object")
        return Config(value, self.where, f"{self.prefix}{key}.")


def read_config(path: Path) -> Config:
    """The JSON object in a file; unreadable files, other JSON values and NaN or Infinity are UserErrors."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except OSError as error:
        reason = error.strerror or "unreadable"
        raise refuse(path, "the file", reason, "a readable JSON file", "check the path") from None
    except (ValueError, RecursionError) as error:
        raise refuse(path, "the content", str(error)[:200], "one JSON object", "repair the file") from None
    if not isinstance(data, dict):
        raise refuse(path, "the content", show(data), "one JSON object", "repair the file")
    return Config(data, path)


def merged(top: Config, key: str) -> Config:
    """The keys of a file and of one of its sections as one: they must not differ."""
    inner = top.section(key) or Config({}, top.where, f"{top.prefix}{key}.")
    for name, value in inner.data.items():
        if value is not None and top.get(name) not in (None, value):
            raise inner.error(name, f"the value at the top level, {show(top.get(name))}", "keep one of the two keys")
    given = {name: value for name, value in inner.data.items() if value is not None}
    return Config({**top.data, **given}, top.where, top.prefix)


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of a float
        return False


def _within(value: float, above: float | None, at_least: float | None) -> bool:
    return (above is None or value > above) and (at_least is None or value >= at_least)


def _no_constant(name: str) -> Any:
    raise ValueError(f"the number {name}, which JSON does not have")


def no_settings(folder: Path | str, settings: Mapping[str, int]) -> None:
    """UserError where settings are given to a drafter that has none."""
    for key in settings:
        raise UserError(f"--drafter: {folder}:{key}=..: this drafter has no settings; leave {key} out")


def setting(folder: Path | str, settings: Mapping[str, int], key: str, default: int, low: int, high: int) -> int:
    """An integer setting of a drafter; UserError outside ``low`` to ``high``."""
    value = settings.get(key, default)
    if not low <= value <= high:
        raise UserError(f"--drafter: {folder}:{key}={value}; allowed: {low} to {high}")
    return value


def known_settings(folder: Path | str, settings: Mapping[str, int], *names: str) -> None:
    """UserError for a setting that the drafter does not have."""
    for key in settings:
        if key not in names:
            raise UserError(f"--drafter: {folder}:{key}={settings[key]}; allowed settings: {', '.join(names)}")
