"""The bundle: one folder with every engine, the tokenizer and a manifest (dflow.json) that says what they are.

Compile side and serve side meet here alone. A bundle is written whole or not at all, and checked whole when opened.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from dflow_trt import contract as c
from dflow_trt.errors import UserError
from dflow_trt.kinds import KINDS
from dflow_trt.spec import (
    AUTOREGRESSIVE,
    BackendName,
    BuildSpec,
    DrafterSpec,
    TargetSpec,
    build_from_json,
    target_from_json,
    to_json,
)

HASH_BLOCK = 4 << 20


@dataclass(frozen=True)
class FileEntry:
    """One file of the bundle, by its path relative to it."""

    sha256: str
    size: int


@dataclass(frozen=True)
class EngineEntry:
    """How an engine was compiled: seconds and peak resident bytes of its builder, and the C++ plugins inside it."""

    build_seconds: float
    builder_memory: int
    plugins: tuple[str, ...]


@dataclass(frozen=True)
class DrafterEntry:
    """A drafter of the bundle, tied to the target that it was built with."""

    spec: DrafterSpec
    fingerprint: str
    target_fingerprint: str


@dataclass(frozen=True)
class Strategy:
    """How a request is decoded: plainly (drafter None), or with a drafter, its relay on or off."""

    name: str
    drafter: str | None
    relay: bool


@dataclass(frozen=True)
class Bundle:
    """A bundle on disk. ``taps`` are the layers packed in ``hidden``, the union of all drafters' taps.

    engines: how each was compiled ("compiled" in the manifest); empty where the graph files themselves are the engines.
    """

    path: Path
    target: TargetSpec
    target_fingerprint: str
    drafters: Mapping[str, DrafterEntry]
    build: BuildSpec
    files: Mapping[str, FileEntry]
    built_with: Mapping[str, str]
    self_check: Mapping[str, Any]
    engines: Mapping[str, EngineEntry] = field(default_factory=dict)

    @property
    def specs(self) -> tuple[DrafterSpec, ...]:
        return tuple(entry.spec for entry in self.drafters.values())

    @property
    def taps(self) -> tuple[int, ...]:
        return c.packed_taps(self.specs)

    @property
    def verify_rows(self) -> int:
        """The most rows of one request in a verify pass; 1 where there are no drafters."""
        return max((spec.verify_rows for spec in self.specs), default=1)

    @property
    def cache_rows(self) -> int:
        return self.build.cache_rows(self.verify_rows)

    @property
    def tokenizer_path(self) -> Path | None:
        """The folder of the tokenizer's files, or None in a bundle that takes token ids alone."""
        folder = self.path / c.TOKENIZER_DIR
        return folder if f"{c.TOKENIZER_DIR}/tokenizer.json" in self.files else None

    @property
    def strategies(self) -> dict[str, Strategy]:
        """Every strategy that a request may name."""
        found = [Strategy(AUTOREGRESSIVE, None, False)]
        for spec in self.specs:  # a drafter's own name uses all that it has
            found += [Strategy(name, spec.name, spec.relays and name == spec.name) for name in spec.strategies]
        return {strategy.name: strategy for strategy in found}

    @property
    def default_strategy(self) -> str:
        """A drafter with relay if there is one, else the first kind of the registry, else plain decoding."""
        kinds = list(KINDS)
        ranked = sorted(self.specs, key=lambda spec: (not spec.relays, kinds.index(spec.kind), not spec.corrects))
        return ranked[0].name if ranked else AUTOREGRESSIVE

    def strategy(self, name: str | None) -> Strategy:
        """The strategy of that name, or the default one; UserError if the bundle lacks it."""
        name = self.default_strategy if name is None else name
        if not isinstance(name, str) or name not in self.strategies:
            offered = ", ".join(self.strategies)
            raise UserError(f"strategy: this bundle has no {name!r}; it offers {offered}")
        return self.strategies[name]

    def contracts(self) -> Iterator[tuple[str | None, c.EngineContract]]:
        """(drafter name or None, contract) of every engine."""
        yield None, c.target_contract(self.target, self.taps, self.cache_rows)
        for name, spec in ((name, entry.spec) for name, entry in self.drafters.items()):
            engines = KINDS[spec.kind].contracts(spec, self.target, self.taps, self.cache_rows, self.build)
            yield from ((name, engine) for engine in engines)

    def graph_path(self, engine: str, drafter: str | None) -> Path:
        return self.path / engine_file(engine, drafter)

    def engine_path(self, engine: str, drafter: str | None) -> Path:
        """What the runtime loads: the graph itself on ONNX Runtime, a compiled engine elsewhere."""
        graph = self.graph_path(engine, drafter)
        return graph if self.build.backend == "onnxruntime" else graph.with_suffix(c.ENGINE_SUFFIX)


def planned(target: TargetSpec, drafters: Iterable[DrafterSpec], build: BuildSpec) -> Bundle:
    """What a build would make, as far as its engines go: specs alone, no files."""
    entries = {spec.name: DrafterEntry(spec, "", "") for spec in drafters}
    return Bundle(Path(), target, "", entries, build, {}, {}, {})


def engine_file(engine: str, drafter: str | None) -> str:
    """The file of an engine's graph; its weights lie beside it with the suffix .data."""
    return f"{drafter}.{engine}.onnx" if drafter else f"{engine}.onnx"


def check_backend(bundle: Bundle, *runs: BackendName) -> None:
    """UserError where a runtime, which runs engines of these backends, is given a bundle of another."""
    if bundle.build.backend not in runs:
        raise UserError(
            f"{bundle.path}: its engines are for {bundle.build.backend}, this runtime runs {' and '.join(runs)}; open "
            f"it with LLM(bundle), which takes the right one, or build it again with --backend {runs[0]}"
        )


def write_manifest(bundle: Bundle) -> None:
    """Write dflow.json; the last file of a bundle to appear."""
    data = {
        "format_version": c.FORMAT_VERSION,
        "built_with": dict(bundle.built_with),
        "target": {"spec": to_json(bundle.target), "fingerprint": bundle.target_fingerprint},
        "drafters": {
            name: {"kind": entry.spec.kind, **to_json(entry), "pairing": _pairing(bundle, entry)}
            for name, entry in bundle.drafters.items()
        },
        "build": to_json(bundle.build),
        "self_check": dict(bundle.self_check),
        "compiled": {name: to_json(entry) for name, entry in sorted(bundle.engines.items())},
        "files": {name: to_json(entry) for name, entry in sorted(bundle.files.items())},
    }
    text = json.dumps(data | {"seal": _seal(data)}, indent=1) + "\n"
    (bundle.path / c.MANIFEST).write_text(text, encoding="utf-8")


def _seal(data: Mapping[str, Any]) -> str:
    """A hash of the whole manifest but itself: limits and sizes that engines do not have crash them."""
    rest = {key: value for key, value in data.items() if key != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _pairing(bundle: Bundle, entry: DrafterEntry) -> str:
    """What the engines of one drafter were built for: this target, these limits, the taps of all drafters."""
    parts = [bundle.target_fingerprint, to_json(bundle.target), bundle.taps, to_json(bundle.build), to_json(entry)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def open_bundle(path: str | Path, verify: bool = True) -> Bundle:
    """Read a bundle and check it whole.

    ``verify=False`` checks names and sizes but not the hashes (about a second a gigabyte). Raises UserError in one line
    that names what does not fit.
    """
    path = Path(path)
    data = _read_manifest(path)
    bundle = _parse(path, data)
    _check_types(bundle)
    _check_drafters(bundle, {name: entry["pairing"] for name, entry in data["drafters"].items()})
    _check_files(bundle, verify)
    if data["seal"] != _seal(data):
        raise _unfit(path, "changed since the bundle was built")
    return bundle


def check_unchanged(bundle: Bundle) -> None:
    """UserError if the bundle on disk is another than the opened one: rebuilt while its engines were loaded."""
    if open_bundle(bundle.path, verify=False) != bundle:
        raise UserError(f"{bundle.path}: was replaced while it was being opened; open it again")


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest = path / c.MANIFEST
    if not manifest.is_file():
        found = "no such folder" if not path.exists() else f"not a bundle, {c.MANIFEST} is missing"
        raise UserError(f"{path}: {found}; make one with `dflow-trt build`")
    try:
        data = json.loads(manifest.read_text(encoding="utf-8"))
        version = data["format_version"]
    except OSError as error:
        raise UserError(f"{manifest}: {error.strerror}; make it readable") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{manifest}: unreadable manifest ({error}); build the bundle again") from None
    if version != c.FORMAT_VERSION:
        raise UserError(
            f"{manifest}: format_version {version!r}, this version reads {c.FORMAT_VERSION}; build the bundle again"
        )
    return dict(data)


def _parse(path: Path, data: Mapping[str, Any]) -> Bundle:
    try:
        _check_fields(data, _FIELDS, "the manifest")
        return _from_json(path, data)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise _unfit(path, f"a field is missing, unknown or malformed ({reason})") from None


def _unfit(path: Path, found: str) -> UserError:
    return UserError(f"{path / c.MANIFEST}: {found}; build the bundle again")


_FIELDS = ("format_version", "built_with", "target", "drafters", "build", "self_check", "compiled", "files", "seal")
_DRAFTER_FIELDS = ("kind", "spec", "fingerprint", "target_fingerprint", "pairing")


def _check_fields(data: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    """TypeError on a field that this version does not write; KeyError on one that is missing."""
    unknown = sorted(data.keys() - set(names))
    if unknown:
        raise TypeError(f"{where} has an unknown field {unknown[0]!r}")
    for name in names:
        data[name]


def _from_json(path: Path, data: Mapping[str, Any]) -> Bundle:
    for name, entry in data["drafters"].items():
        _check_fields(entry, _DRAFTER_FIELDS, f"drafter {name!r}")
    _check_fields(data["target"], ("spec", "fingerprint"), "the target")
    drafters = {
        name: DrafterEntry(_drafter_spec(entry), entry["fingerprint"], entry["target_fingerprint"])
        for name, entry in data["drafters"].items()
    }
    return Bundle(
        path=path,
        target=target_from_json(data["target"]["spec"]),
        target_fingerprint=data["target"]["fingerprint"],
        drafters=drafters,
        build=build_from_json(data["build"]),
        files={name: FileEntry(**entry) for name, entry in data["files"].items()},
        built_with=dict(data["built_with"]),
        self_check=dict(data["self_check"]),
        engines={name: _engine_entry(entry) for name, entry in data["compiled"].items()},
    )


def _drafter_spec(entry: Mapping[str, Any]) -> DrafterSpec:
    kind = entry["kind"]
    if kind not in KINDS:
        raise ValueError(f"a drafter of kind {kind!r}; this version knows {', '.join(KINDS)}")
    return KINDS[kind].spec.from_json(entry["spec"])


def _engine_entry(data: Mapping[str, Any]) -> EngineEntry:
    return EngineEntry(**{**data, "plugins": tuple(data["plugins"])})


def _check_types(bundle: Bundle) -> None:
    """Every value of the specs has the type of its field: JSON alone promises nothing."""
    parts: dict[str, tuple[Any, Any]] = {
        "target.spec": (bundle.target, TargetSpec),
        "target.fingerprint": (bundle.target_fingerprint, str),
        "build": (bundle.build, BuildSpec),
        **{f"drafters.{name}": (entry, DrafterEntry) for name, entry in bundle.drafters.items()},
        **{f"compiled.{name}": (entry, EngineEntry) for name, entry in bundle.engines.items()},
        **{f"files.{name}": (entry, FileEntry) for name, entry in bundle.files.items()},
    }
    for where, (value, kind) in parts.items():
        misfit = _misfit(value, kind, where)
        if misfit:
            raise _unfit(bundle.path, f"{misfit} has another type than expected")


def _misfit(value: Any, kind: Any, where: str) -> str | None:
    """The path of the first value that is not of its field's type, or None."""
    origin, inner = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind) and _is_a(value, kind):
        hints, names = get_type_hints(type(value)), [field.name for field in dataclasses.fields(value)]
        found = (_misfit(getattr(value, name), hints[name], f"{where}.{name}") for name in names)
        return next((path for path in found if path), None)
    if origin is Literal:
        fits = value in inner
    elif origin is UnionType:
        fits = any(_misfit(value, part, where) is None for part in inner)
    elif origin is tuple:
        fits = isinstance(value, tuple) and all(_misfit(item, inner[0], where) is None for item in value)
    else:
        fits = type(value) is kind or (kind is float and type(value) is int)
    return None if fits else where


def _is_a(value: Any, kind: Any) -> bool:
    """Of that very dataclass; a drafter's spec is of its kind's."""
    return isinstance(value, DrafterSpec) if kind is DrafterSpec else type(value) is kind


def _check_drafters(bundle: Bundle, pairings: Mapping[str, Any]) -> None:
    for name, entry in bundle.drafters.items():
        if entry.target_fingerprint != bundle.target_fingerprint:
            raise UserError(
                f"{bundle.path / c.MANIFEST}: drafter {name!r} was built for target {entry.target_fingerprint}, "
                f"this bundle's target is {bundle.target_fingerprint}; build the bundle again with both"
            )
        if entry.spec.name != name or pairings[name] != _pairing(bundle, entry):
            raise UserError(
                f"{bundle.path / c.MANIFEST}: drafter {name!r} was built for other limits or beside other drafters "
                "than this manifest has; build the bundle again with all of them"
            )


def _check_files(bundle: Bundle, verify: bool) -> None:
    for name in bundle.files:
        if not _inside(name) or not (bundle.path / name).resolve().is_relative_to(bundle.path.resolve()):
            raise _unfit(bundle.path, f"file {name!r} is outside the bundle")
    needed = [bundle.engine_path(contract.engine, drafter).name for drafter, contract in bundle.contracts()]
    for name in needed:
        if name not in bundle.files:
            raise _unfit(bundle.path, f"engine {name} is not listed")
    for name, entry in bundle.files.items():
        _check_size(bundle.path / name, entry)
    if verify:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda item: _check_hash(bundle.path / item[0], item[1]), bundle.files.items()))


def _inside(name: str) -> bool:
    """A plain relative path: nothing that a manifest lists may lie outside its folder."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\\" not in name


def _check_size(path: Path, entry: FileEntry) -> None:
    if not path.is_file():
        raise UserError(f"{path}: listed in {c.MANIFEST} but missing; copy the whole bundle or build it again")
    if path.stat().st_size != entry.size:
        raise UserError(f"{path}: {path.stat().st_size} bytes, {c.MANIFEST} says {entry.size}; build the bundle again")


def _check_hash(path: Path, entry: FileEntry) -> None:
    found = file_sha256(path)
    if found != entry.sha256:
        raise UserError(f"{path}: sha256 {found[:12]}, {c.MANIFEST} says {entry.sha256[:12]}; build the bundle again")


def file_sha256(path: Path) -> str:
    """Content hash, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()
