"""A bundle as a Triton model repository: four models that a stock tritonserver with the Python backend loads.

The repository stands alone: the bundle lies inside (hard links where they can be, so that it takes no space), and the
model.py files are those of ``triton_repo/``. Each config.pbtxt is written from :mod:`dflow_trt.serving.tensors`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import dflow_trt
from dflow_trt import contract as c
from dflow_trt.bundle import Bundle, open_bundle
from dflow_trt.errors import UserError
from dflow_trt.files import staged_folder
from dflow_trt.method.policy import check_policy
from dflow_trt.serving import tensors as t
from dflow_trt.serving.options import StrategyChooser
from dflow_trt.spec import DraftPolicy

VERSION = "1"
MAX_INPUT_LEN = "max_input_len"  # parameter of those that encode text
BUNDLE_DIR = "bundle"  # in the version folder of dflow
TEMPLATES = "triton_repo"
_TOKENIZER_USERS = (t.PREPROCESSING, t.DFLOW_BLS)


@dataclass(frozen=True)
class PackageOptions:
    """How the served model behaves; kept as parameters of dflow's config.pbtxt.

    max_queue: sequences that may wait. timeout: seconds a request may take, queue included; None is no limit.
    draft_policy: "fixed" or "adaptive". strategy: of requests that name none, by default the bundle's best. shares: of
    those requests, the share that another strategy gets. threads: of the CPU runtime, by default all cores.
    """

    max_queue: int = 128
    timeout: float | None = None
    draft_policy: DraftPolicy = "fixed"
    strategy: str | None = None
    shares: Mapping[str, float] = field(default_factory=dict)
    threads: int | None = None

    def check(self, bundle: Bundle) -> None:
        """UserError for what this bundle cannot do."""
        if self.max_queue < 0:
            raise UserError(f"max_queue: {self.max_queue}; allowed: 0 or more")
        if self.timeout is not None and not self.timeout > 0:
            raise UserError(f"timeout: {self.timeout:g}; allowed: more than 0 seconds")
        check_policy(self.draft_policy)
        StrategyChooser(bundle, self.strategy, self.shares)

    def parameters(self) -> dict[str, str]:
        """As texts, for config.pbtxt; what is not set is left out."""
        shares = ",".join(f"{name}={share!r}" for name, share in self.shares.items())
        values = {
            "max_queue": self.max_queue,
            "timeout": self.timeout,
            "draft_policy": self.draft_policy,
            "strategy": self.strategy,
            "shares": shares or None,
            "threads": self.threads,
        }
        return {name: str(value) for name, value in values.items() if value is not None}

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> Self:
        """The inverse of :meth:`parameters`. UserError names a parameter that an editor has made unreadable."""
        readers: dict[str, Any] = {
            "max_queue": int,
            "timeout": float,
            "draft_policy": str,
            "strategy": str,
            "shares": lambda text: dict(map(read_share, text.split(","))),
            "threads": int,
        }
        values: dict[str, Any] = {}
        for name, read in readers.items():
            try:
                values |= {name: read(parameters[name])} if name in parameters else {}
            except ValueError as error:
                raise UserError(f"config.pbtxt: parameter {name} is {parameters[name]!r} ({error})") from None
        return cls(**values)


def read_share(text: str) -> tuple[str, float]:
    """NAME=SHARE as a pair; UserError for anything else."""
    name, _, share = text.partition("=")
    try:
        return name, float(share)
    except ValueError:
        raise UserError(f"strategy share: {text!r}; allowed: NAME=SHARE, e.g. dflow=0.05") from None


@dataclass(frozen=True)
class Package:
    """What was written."""

    path: Path
    models: tuple[str, ...]


def package_bundle(
    bundle: str | Path,
    output: str | Path,
    options: PackageOptions | None = None,
    force: bool = False,
    symlinks: bool = False,
) -> Package:
    """Write the model repository of a bundle.

    A bundle without a tokenizer gets the model dflow alone, which takes token ids. force: replace a folder that is
    there. symlinks: point at the bundle, for a repository that is gone before it. UserError for a bundle or option that
    does not fit, and for an output that exists.
    """
    opened, output, options = open_bundle(bundle), Path(output), options or PackageOptions()
    options.check(opened)
    if output.exists() and not force:
        raise UserError(f"--output: {output} exists; choose another, or replace it with --force")
    models = t.MODELS if opened.tokenizer_path else (t.DFLOW,)
    with staged_folder(output, replace=force) as folder:
        for model in models:
            _write_model(model, opened, options, folder / model.name, symlinks)
    return Package(output, tuple(model.name for model in models))


def _write_model(model: t.Model, bundle: Bundle, options: PackageOptions, folder: Path, symlinks: bool) -> None:
    version = folder / VERSION
    version.mkdir(parents=True)
    config = config_text(model, options, bundle.build.max_input_len)
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    if model is not t.ENSEMBLE:
        shutil.copyfile(_templates() / model.name / VERSION / "model.py", version / "model.py")
    if model is t.DFLOW:
        _place(bundle.path, version / BUNDLE_DIR, (*bundle.files, c.MANIFEST), symlinks)
    if model in _TOKENIZER_USERS:
        prefix = f"{c.TOKENIZER_DIR}/"
        inside = [name.removeprefix(prefix) for name in bundle.files if name.startswith(prefix)]
        _place(bundle.path / c.TOKENIZER_DIR, version / c.TOKENIZER_DIR, inside, symlinks)


def _place(source: Path, target: Path, names: Iterable[str], symlink: bool) -> None:
    """Files of a folder: hard links, or copies where another file system takes none; or one link to it all."""
    if symlink:
        target.symlink_to(source.resolve(), target_is_directory=True)
        return
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link((source / name).resolve(), target / name)
        except OSError:
            shutil.copyfile(source / name, target / name)


def _templates() -> Path:
    """The model.py files: inside an installed package, beside it in a checkout."""
    package = Path(dflow_trt.__file__).resolve().parent
    inside = package / TEMPLATES
    return inside if inside.is_dir() else package.parent / TEMPLATES


# -- config.pbtxt ------------------------------------------------------------------------------------------------------


def config_text(model: t.Model, options: PackageOptions, max_input_len: int) -> str:
    """A model's config.pbtxt, in protobuf's text form. max_input_len: tokens of the longest prompt."""
    lines = ["# Written by dflow-trt package.", *_lines(model_config(model, options, max_input_len))]
    return "\n".join(lines) + "\n"


def model_config(model: t.Model, options: PackageOptions, max_input_len: int) -> dict[str, Any]:
    """The fields of a model's ModelConfig message; a list is a repeated field, and an Enum value is a bare word."""
    config: dict[str, Any] = {"name": model.name, "max_batch_size": 1}
    config |= {"input": [_input(tensor) for tensor in model.inputs]}
    config |= {"output": [_tensor(tensor) for tensor in model.outputs]}
    if model is t.ENSEMBLE:
        return {"platform": "ensemble", **config, "ensemble_scheduling": {"step": _ensemble_steps()}}
    config |= {"backend": "python", "model_transaction_policy": {"decoupled": model.decoupled}}
    # Several instances would put the responses of a stream out of order, and dflow has one set of engines.
    config["instance_group"] = [{"count": 1, "kind": Word("KIND_MODEL" if model is t.DFLOW else "KIND_CPU")}]
    parameters = options.parameters() if model is t.DFLOW else {MAX_INPUT_LEN: str(max_input_len)}
    config["parameters"] = [{"key": name, "value": {"string_value": value}} for name, value in parameters.items()]
    return config


class Word(str):
    """A value of an enumeration: written without quotes."""


def _tensor(tensor: t.Tensor) -> dict[str, Any]:
    return {"name": tensor.name, "data_type": Word(f"TYPE_{tensor.type}"), "dims": list(tensor.dims)}


def _input(tensor: t.Tensor) -> dict[str, Any]:
    return _tensor(tensor) | ({"optional": True} if tensor.optional else {})


def _ensemble_steps() -> list[dict[str, Any]]:
    """preprocessing -> dflow, whose outputs are the ensemble's.

    No step follows: tritonserver (2.51) runs none once it has got SIGTERM, and the streams in flight would hang.
    """
    inner = {tensor.name: f"_{tensor.name}" for tensor in t.PREPROCESSING.outputs}
    return [_step(t.PREPROCESSING, {}, inner), _step(t.DFLOW, inner, {})]


def _step(model: t.Model, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> dict[str, Any]:
    """One step; a tensor goes by its own name unless it is renamed."""

    def mapped(tensors: Iterable[t.Tensor], names: Mapping[str, str]) -> list[dict[str, str]]:
        return [{"key": tensor.name, "value": names.get(tensor.name, tensor.name)} for tensor in tensors]

    step: dict[str, Any] = {"model_name": model.name, "model_version": -1}
    return step | {"input_map": mapped(model.inputs, inputs), "output_map": mapped(model.outputs, outputs)}


def _lines(fields: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in fields.items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                yield f"{indent}{name} {{"
                yield from _lines(item, indent + "  ")
                yield f"{indent}}}"
            else:
                yield f"{indent}{name}: {_literal(item)}"


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | Word):
        return str(value)
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
