"""What is asked during a profile: prompts of a file, of the example, or random ones of given length."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from dflow_trt.errors import UserError
from dflow_trt.example import DATA
from dflow_trt.profiling.record import ALL_TASKS, WorkloadInfo
from dflow_trt.text import Tokenizer

Kind = Literal["file", "example", "random"]
NO_TASK = "none"
MAX_TASK_LENGTH = 64
EXAMPLE_PROMPTS = "prompts.jsonl"


@dataclass(frozen=True)
class Item:
    """One prompt: ``{"prompt": ...}``, ``{"messages": ...}`` or ``{"prompt_token_ids": ...}``. where: its place."""

    where: str
    task: str
    prompt: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return next(iter(self.prompt))


@dataclass(frozen=True)
class Workload:
    """Prompts in their order. source: what people know them by."""

    kind: Kind
    source: str
    items: tuple[Item, ...]

    def info(self, max_tokens: int) -> WorkloadInfo:
        """What the record says of it."""
        text = json.dumps([[item.task, item.prompt] for item in self.items] + [max_tokens], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        tasks = dict(Counter(item.task for item in self.items))
        return WorkloadInfo(
            kind=self.kind,
            source=self.source,
            digest=digest,
            prompts=len(self.items),
            tasks=dict(sorted(tasks.items())),
        )

    def as_chats(self) -> Workload:
        """Texts as one user message each."""
        return Workload(self.kind, self.source, tuple(map(_as_chat, self.items)))


Workloads = dict[int | None, Workload]


def _as_chat(item: Item) -> Item:
    if item.kind != "prompt":
        return item
    return Item(item.where, item.task, {"messages": [{"role": "user", "content": item.prompt["prompt"]}]})


def token_ids(item: Item, tokenizer: Tokenizer | None) -> list[int]:
    """A prompt as token ids; UserError naming its place where it is none."""
    value = item.prompt[item.kind]
    if item.kind == "prompt_token_ids":
        return list(value)
    if tokenizer is None:
        raise UserError(f"{item.where}: this bundle has no tokenizer; give prompt_token_ids, or --input-len")
    try:
        return tokenizer.encode_chat(value) if item.kind == "messages" else tokenizer.encode(value)
    except UserError as error:
        raise UserError(f"{item.where}: {error}") from None


# -- what the user chose -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vocabulary:
    """Token ids of a model: those below ``size`` but for ``eos``."""

    size: int
    eos: tuple[int, ...]


@dataclass(frozen=True)
class Choice:
    """Where prompts come from; without anything, the example's where texts can be encoded. chat: texts as user
    messages, None where that is possible."""

    file: Path | None = None
    example: bool = False
    input_lens: tuple[int, ...] = ()
    chat: bool | None = None

    def __post_init__(self) -> None:
        given = {"--prompts": self.file is not None, "--example": self.example, "--input-len": bool(self.input_lens)}
        chosen = [flag for flag, there in given.items() if there]
        if len(chosen) > 1:
            raise UserError(f"{' and '.join(chosen)}: prompts come from one place; leave out all but one")
        for length in self.input_lens:
            if length < 1:
                raise UserError(f"--input-len: {length}; allowed: 1 or more")

    def workloads(self, vocabulary: Vocabulary | None, takes_chats: bool, count: int, seed: int) -> Workloads:
        """By the length of random prompts, None for texts. takes_chats: messages can be encoded. count: of random
        prompts. UserError where random prompts need a bundle to know its vocabulary."""
        if self.input_lens:
            if vocabulary is None:
                raise UserError("--input-len: random tokens need a vocabulary; give the BUNDLE beside --url")
            each = dict.fromkeys(self.input_lens)
            return {length: random_workload(length, count, vocabulary, seed) for length in each}
        found = read_workload(self.file) if self.file is not None else example_workload()
        return {None: found.as_chats() if self.chat or (self.chat is None and takes_chats) else found}


def takes_chats(tokenizer: Tokenizer | None) -> bool:
    """Whether there is a chat template that takes one message of a user."""
    try:
        return tokenizer is not None and bool(tokenizer.encode_chat([{"role": "user", "content": "?"}]))
    except UserError:
        return False


# -- random ------------------------------------------------------------------------------------------------------------


def random_workload(length: int, count: int, vocabulary: Vocabulary, seed: int) -> Workload:
    """``count`` prompts of ``length`` random ids, the same for a seed."""
    rng = random.Random(f"{seed} {length}")
    ids = sorted(set(range(vocabulary.size)) - set(vocabulary.eos))
    task = f"random-{length}"
    items = [Item(f"random prompt {i}", task, {"prompt_token_ids": rng.choices(ids, k=length)}) for i in range(count)]
    return Workload("random", f"{length} random tokens", tuple(items))


# -- files -------------------------------------------------------------------------------------------------------------


def example_workload() -> Workload:
    """The prompts that ship with the example pair."""
    path = files("dflow_trt") / DATA / EXAMPLE_PROMPTS
    if not path.is_file():
        raise UserError("--example: this installation has no example data; install the dflow-trt wheel again")
    return Workload("example", "example", _items(path.read_text(encoding="utf-8"), EXAMPLE_PROMPTS))


def read_workload(path: Path, flag: str = "--prompts") -> Workload:
    """Prompts of a JSONL file, one object a line; UserError names the flag, the file, the line and its fault.

    A line's text is in ``prompt``, ``messages``, ``prompt_token_ids``, ``turns`` (the first), ``instruction`` (with
    ``input``), ``question``, ``problem`` or ``text``. Its task is in ``task``; without it, lines of the data sets in
    ``DATASETS`` are known by their fields.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"{flag}: {path}: {reason}; give a JSONL file") from None
    if not text.strip():
        raise UserError(f"{flag}: {path} holds no prompt; give one JSON object a line")
    return Workload("file", path.name, _items(text, f"{flag}: {path}"))


def _items(text: str, where: str) -> tuple[Item, ...]:
    lines = text.rstrip().split("\n")
    return tuple(_item(f"{where} line {number}", line) for number, line in enumerate(lines, 1))


def _item(where: str, line: str) -> Item:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = "empty" if not line.strip() else f"no JSON ({error})"
        raise UserError(f"{where}: {reason}; write one JSON object there, or remove the line") from None
    if not isinstance(data, dict):
        raise UserError(f"{where}: {_shown(data)}; allowed: a JSON object")
    return Item(where, _task(where, data), _prompt(where, data))


def _prompt(where: str, data: Mapping[str, Any]) -> dict[str, Any]:
    name = next((name for name in _READERS if name in data), None)
    if name is None:
        raise UserError(f"{where}: no prompt among {', '.join(sorted(data)) or 'no fields'}; allowed: {_FIELDS}")
    found = _READERS[name](data)
    if found is None:
        raise UserError(f"{where}: {name} is {_shown(data[name])}; allowed: {_ALLOWED.get(name, 'a text')}")
    return found


def _text(name: str) -> Callable[[Mapping[str, Any]], dict[str, Any] | None]:
    return lambda data: _as_prompt(data[name])


def _as_prompt(value: Any) -> dict[str, Any] | None:
    return {"prompt": value} if isinstance(value, str) and value.strip() else None


def _messages(data: Mapping[str, Any]) -> dict[str, Any] | None:
    value = data["messages"]
    fits = isinstance(value, list) and value and all(isinstance(each, dict) and "role" in each for each in value)
    return {"messages": value} if fits else None


def _ids(data: Mapping[str, Any]) -> dict[str, Any] | None:
    value = data["prompt_token_ids"]
    fits = isinstance(value, list) and value and all(type(each) is int for each in value)
    return {"prompt_token_ids": value} if fits else None


def _first_turn(data: Mapping[str, Any]) -> dict[str, Any] | None:
    value = data["turns"]
    return _as_prompt(value[0]) if isinstance(value, list) and value else None


def _instruction(data: Mapping[str, Any]) -> dict[str, Any] | None:
    parts = [data["instruction"], data.get("input") or ""]
    if not all(isinstance(part, str) for part in parts):
        return None
    return _as_prompt("\n\n".join(part for part in parts if part))


# In this order: Alpaca's lines have a ``text`` too, with the answer in it.
_READERS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any] | None]] = {
    "messages": _messages,
    "prompt_token_ids": _ids,
    "turns": _first_turn,
    "instruction": _instruction,
    "question": _text("question"),
    "problem": _text("problem"),
    "prompt": _text("prompt"),
    "text": _text("text"),
}
_FIELDS = ", ".join(_READERS)
_ALLOWED = {
    "messages": "a list of objects with role and content",
    "prompt_token_ids": "a list of token ids",
    "turns": "a list of texts",
    "instruction": "a text, with another in input or none",
}

DATASETS: dict[str, tuple[str, ...]] = {
    "mt-bench": ("turns", "category"),
    "alpaca": ("instruction", "output"),
    "gsm8k": ("question", "answer"),
    "math-500": ("problem", "answer"),
    "humaneval": ("prompt", "canonical_solution"),
    "mbpp": ("code", "test_list"),
}
"""Data sets by fields that all their lines have."""


def _task(where: str, data: Mapping[str, Any]) -> str:
    """The label of a line. ``all`` stands for every task together, so no line may be called so."""
    given = data.get("task")
    if given is None:
        return next((name for name, fields in DATASETS.items() if all(field in data for field in fields)), NO_TASK)
    if not isinstance(given, str) or not 0 < len(given) <= MAX_TASK_LENGTH or given == ALL_TASKS:
        allowed = f"a text of up to {MAX_TASK_LENGTH} characters, not {ALL_TASKS!r}"
        raise UserError(f"{where}: task is {_shown(given)}; allowed: {allowed}")
    return given


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)[:60]
