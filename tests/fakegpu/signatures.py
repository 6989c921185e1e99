"""Holds calls of a fake against the signatures of the real thing."""

from __future__ import annotations

import functools
import inspect
import json
import re
from pathlib import Path
from typing import Any

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("signatures.json").read_text(encoding="utf-8"))
CUDA = "cuda-bindings 13.5.0"
KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "tuple": (tuple,),
    "Dims": (tuple,),
    "list": (list,),
    "SupportsInt": (int,),
    "Buffer": (bytes, bytearray, memoryview),
}
"""Types that pybind11 takes; any other name is a class of the fake, by that name."""


@functools.cache
def parameters(signature: str) -> list[tuple[str, str, bool]]:
    """(name, type, whether it may be left out) of each parameter of "(name: type = default, ...) -> type"."""
    inside = signature[1 : _closing(signature)]
    found = []
    for part in filter(None, _split(inside)):
        name, _, rest = part.partition(": ")
        kind, equals, _ = rest.partition(" = ")
        found.append((name, kind, bool(equals)))
    return found


def _closing(signature: str) -> int:
    depth = 0
    for i, char in enumerate(signature):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return i
    raise ValueError(signature)


def _split(text: str) -> list[str]:
    return [part.strip() for part in re.split(r",\s*(?![^\[<(]*[\]>)])", text)]


def accepts(signature: str, arguments: tuple[Any, ...]) -> bool:
    """Whether positional arguments fit a recorded signature of TensorRT's."""
    wanted = parameters(signature)
    least = sum(not optional for _, _, optional in wanted)
    if not least <= len(arguments) <= len(wanted):
        return False
    return all(_is(value, kind) for value, (_, kind, _) in zip(arguments, wanted, strict=False))


def _is(value: Any, kind: str) -> bool:
    if kind in KINDS:
        return isinstance(value, KINDS[kind]) and (kind == "bool" or not isinstance(value, bool))
    return kind in {cls.__name__ for cls in type(value).__mro__}


def checked(cls: Any, members: dict[str, str]) -> Any:
    """The class with every public method held against the recorded ones; a member that is not recorded is refused."""
    for name, member in list(vars(cls).items()):
        if name.startswith("_") and name != "__init__":
            continue
        recorded = members.get(name)
        assert recorded is not None, f"the real {cls.__name__} has no {name}"
        if inspect.isfunction(member) and recorded != "untyped":
            setattr(cls, name, _guarded(cls.__name__, name, member, recorded.split(" | ")))
        elif isinstance(member, property):
            assert recorded == "property", f"the real {cls.__name__}.{name} is a method"
    return cls


def _guarded(cls: str, name: str, method: Any, signatures: list[str]) -> Any:
    @functools.wraps(method)
    def call(self: Any, *arguments: Any) -> Any:
        fits = any(accepts(signature, arguments) for signature in signatures)
        shown = ", ".join(f"{type(value).__name__} {value!r:.40}" for value in arguments)
        assert fits, f"{cls}.{name}({shown}); the real one takes {' or '.join(signatures)}"
        return method(self, *arguments)

    return call


def check_cuda(name: str, arguments: tuple[Any, ...]) -> None:
    """AssertionError where a call of cuda-bindings has other arguments than the real one takes."""
    wanted = _cuda_parameters(name)
    assert len(arguments) == len(wanted), f"{name} got {len(arguments)} arguments; the real one takes {len(wanted)}"
    for value, (parameter, kind) in zip(arguments, wanted, strict=True):
        assert kind in (None, type(value).__name__), f"{name}: {parameter} is {value!r}"
        assert kind != "int" or value >= 0 or parameter.startswith("int "), f"{name}: {parameter} is {value}"


@functools.cache
def _cuda_parameters(name: str) -> list[tuple[str, str | None]]:
    """(parameter as declared, the type it must have or None) of "(size_t size, stream, kind: cudaMemcpyKind)"."""
    found: list[tuple[str, str | None]] = []
    for parameter in filter(None, _split(RECORDED[CUDA]["calls"][name][1:-1])):
        kind = None
        if re.match(r"(size_t|int|unsigned int|unsigned long long) ", parameter):
            kind = "int"
        elif ": " in parameter:
            kind = parameter.rpartition(": ")[2].removeprefix("Optional[").removesuffix("]")
        found.append((parameter, kind))
    return found
