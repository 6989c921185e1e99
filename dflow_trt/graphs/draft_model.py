"""A draft model for a build: the target's own graph over its own tables (:mod:`.kind`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflow_trt import contract as c
from dflow_trt.checkpoint.folder import DrafterCheckpoint, checked_name
from dflow_trt.checkpoint.names import EMBEDDING, HEAD, target_tensors
from dflow_trt.checkpoint.reader import known_settings, refuse, setting
from dflow_trt.checkpoint.target import TOKENIZER, TargetCheckpoint, read_target
from dflow_trt.graphs.kind import Engines, Settings, Stored, Tables, Writer, describe_stack
from dflow_trt.graphs.target import build_target
from dflow_trt.spec import DraftModelSpec

DRAFTS, MOST_DRAFTS = 4, 31
SHOWN = 3  # of the ids that differ


@dataclass(frozen=True)
class DraftModelCheckpoint(DrafterCheckpoint):
    """A validated draft model. ``weights`` are those of ``model``."""

    spec: DraftModelSpec
    model: TargetCheckpoint


def read(folder: Path, target: TargetCheckpoint, name: str | None, settings: Settings) -> DraftModelCheckpoint:
    """A Qwen3 folder of the target's vocabulary; setting: drafts."""
    known_settings(folder, settings, "drafts")
    drafts = setting(folder, settings, "drafts", DRAFTS, 1, MOST_DRAFTS)
    model = read_target(folder)
    _check_vocabulary(model, target)
    spec = DraftModelSpec(checked_name(name or DraftModelSpec.kind), model.spec.licence, model.spec, drafts)
    return DraftModelCheckpoint(model.path, spec, model.weights, model.fingerprint, model)


def _check_vocabulary(model: TargetCheckpoint, target: TargetCheckpoint) -> None:
    """UserError unless every id means the same to both; rows of padding may differ."""
    ours, theirs = _tokens(model), _tokens(target)
    if bool(ours) != bool(theirs):
        lacking, other = (target, model) if ours else (model, target)
        raise refuse(lacking.path, TOKENIZER, "missing", f"one, as {other.path} has", "complete the folder")
    sizes = [checkpoint.spec.live_vocab for checkpoint in (model, target)]
    differ = [i for i in sorted(ours.keys() | theirs.keys()) if ours.get(i) != theirs.get(i)]
    if sizes[0] == sizes[1] and not differ:
        return
    found = f"of {sizes[0]} tokens"
    if differ:
        pairs = (f"{i} is {ours.get(i)!r} here and {theirs.get(i)!r} there" for i in differ[:SHOWN])
        found += f"; the first ids that differ: {', '.join(pairs)}"
    where = model.path / TOKENIZER if ours else model.path
    raise refuse(where, "the vocabulary", found, f"the target's, of {sizes[1]} tokens", "use a model of its family")


def _tokens(checkpoint: TargetCheckpoint) -> dict[int, str]:
    """Token by id; empty without a tokenizer."""
    path = checkpoint.path / TOKENIZER
    if not path.is_file():
        return {}
    from tokenizers import Tokenizer

    return {i: token for token, i in Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True).items()}


def write(writer: Writer, draft: DraftModelCheckpoint, engines: Engines) -> None:
    """One engine and its tables."""
    vocabulary = writer.tables(draft.spec.name, draft.model)
    with writer.engine(engines[c.DRAFTER], draft.spec.name, draft.weights) as g:
        build_target(g, draft.spec.model, vocabulary, ())


def stored(spec: DraftModelSpec) -> dict[str, Stored]:
    """The layers, and the tables in a file of their own."""
    shapes = {name: shape for name, shape in target_tensors(spec.model).items() if name not in (EMBEDDING, HEAD)}
    return {c.DRAFTER: Stored(formed=shapes, rope=spec.model.stack, tables=spec.model)}


def borrowed(spec: DraftModelSpec) -> list[Tables]:
    """None: a smaller model has tables of its own width."""
    return []


def describe(spec: DraftModelSpec) -> str:
    """A line for people."""
    return f"draft model of {describe_stack(spec.model.stack, spec.model.vocab_size)}, {spec.drafts} drafts"
