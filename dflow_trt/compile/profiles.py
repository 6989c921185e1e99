"""Optimisation profiles: which shapes an engine accepts, and for which it is tuned. From the contract and the limits.

One profile serves decoding (a verify pass, a plain step), one prefill chunks; engines without token rows have the first
alone. Dimensions are the letters of :mod:`dflow_trt.contract`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dflow_trt import contract as c
from dflow_trt.bundle import Bundle
from dflow_trt.errors import UserError
from dflow_trt.spec import CACHE_STEP

CACHE_DIMS = "BNLD"


@dataclass(frozen=True)
class Range:
    """The least, the best (what kernels are tuned for) and the most of a dimension."""

    least: int
    best: int
    most: int


Ranges = Mapping[str, Range]
Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
Profile = dict[str, Shapes]
"""Input -> its least, best and most shape."""


def phases(bundle: Bundle) -> dict[str, Ranges]:
    """The ranges of every dynamic dimension while decoding and in prefill.

    Kernels are tuned for half of the largest batch, whole verify passes and a half-full cache; prefill for one prompt
    at a time in whole chunks. The decoder pads some targets to two rows, and asks logits of one row of a prefill chunk.
    """
    build, rows = bundle.build, max(bundle.verify_rows, 2)
    batch, half = build.max_batch_size, bundle.cache_rows // 2 // CACHE_STEP * CACHE_STEP
    live = Range(CACHE_STEP, max(CACHE_STEP, half), bundle.cache_rows)
    verify, chunk = Range(1, rows, rows), Range(1, build.prefill_chunk, build.prefill_chunk)
    return {
        "decode": {"B": Range(1, -(-batch // 2), batch), "S": verify, "R": verify, "T": live},
        "prefill": {"B": Range(1, 1, batch), "S": chunk, "R": Range(1, 1, 1), "T": live},
    }


def profiles(bundle: Bundle, contract: c.EngineContract) -> list[Profile]:
    """The profiles of one engine, checked."""
    found = phases(bundle)
    names = list(found) if any("S" in spec.dims for spec in contract.inputs) else ["decode"]
    made = [make_profile(contract, found[name]) for name in names]
    for profile in made:
        check_profile(contract, profile)
    return made


def input_dims(contract: c.EngineContract) -> dict[str, str]:
    """Every input of an engine with the letters of its dimensions, caches included."""
    caches = {c.past(tensor, i): CACHE_DIMS for i in range(contract.cache_layers) for tensor in c.CACHE_TENSORS}
    return {spec.name: spec.dims for spec in contract.inputs} | caches


def make_profile(contract: c.EngineContract, ranges: Ranges) -> Profile:
    """The shapes of every input, those that are static too: the builder takes them as they are."""
    known = {dim: Range(size, size, size) for dim, size in contract.static.items()}
    sizes = {**ranges, **known}
    return {name: _shapes([sizes[dim] for dim in dims]) for name, dims in input_dims(contract).items()}


def _shapes(sizes: list[Range]) -> Shapes:
    return tuple(s.least for s in sizes), tuple(s.best for s in sizes), tuple(s.most for s in sizes)


def check_profile(contract: c.EngineContract, profile: Profile) -> None:
    """UserError for what the builder does not see, or sees too late.

    An input that is missing, sizes out of order, a letter that means different sizes in different inputs, a live length
    beyond the cache.
    """
    seen: dict[str, tuple[str, Range]] = {}
    for name, dim, found in _sizes(contract, profile):
        where = f"engine {contract.engine}, {name}, dimension {dim}: {found.least}..{found.best}..{found.most}"
        first, wanted = seen.setdefault(dim, (name, found))
        if not 1 <= found.least <= found.best <= found.most:
            raise UserError(f"{where}; allowed: 1 <= least <= best <= most")
        if dim in contract.static and found != Range(*[contract.static[dim]] * 3):
            raise UserError(f"{where}; allowed: {contract.static[dim]}, which is static")
        if found != wanted:
            raise UserError(f"{where}; allowed: {wanted.least}..{wanted.best}..{wanted.most}, as in {first}")
        if dim == "T" and found.most > contract.static["L"]:
            raise UserError(f"{where}; allowed: up to {contract.static['L']}, the rows of a cache")


def _sizes(contract: c.EngineContract, profile: Profile) -> Iterator[tuple[str, str, Range]]:
    """(input, letter, range) of every dimension in a profile."""
    for name, dims in input_dims(contract).items():
        if name not in profile or any(len(shape) != len(dims) for shape in profile[name]):
            raise UserError(f"engine {contract.engine}: the profile has no {name} of rank {len(dims)}")
        for i, dim in enumerate(dims):
            yield name, dim, Range(*(shape[i] for shape in profile[name]))
