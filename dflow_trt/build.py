"""Checkpoints in, a bundle out: read, estimate, write graphs and weights, check numerically, rename into place."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import importlib.metadata
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import onnx_ir as ir

from dflow_trt import contract as c
from dflow_trt.bundle import Bundle, DrafterEntry, FileEntry, engine_file, file_sha256, open_bundle, write_manifest
from dflow_trt.checkpoint.drafter import DrafterCheckpoint, read_drafter
from dflow_trt.checkpoint.names import EMBEDDING, HEAD
from dflow_trt.checkpoint.target import TargetCheckpoint, read_target
from dflow_trt.checkpoint.weights import Array, Weights
from dflow_trt.compile import onnxruntime as backend
from dflow_trt.errors import UserError
from dflow_trt.graphs import store
from dflow_trt.graphs.blocks import Vocabulary, dead_columns
from dflow_trt.graphs.builder import NUMPY, GraphBuilder, Lowering
from dflow_trt.graphs.context import build_context
from dflow_trt.graphs.drafter import build_drafter
from dflow_trt.graphs.relay import RELAY_LOWERING, build_relay
from dflow_trt.graphs.target import build_target
from dflow_trt.memory import show_bytes
from dflow_trt.selfcheck import run_self_check
from dflow_trt.spec import BuildSpec, DType, TargetSpec, WeightForm

DEFAULT_BATCH, DEFAULT_INPUT, DEFAULT_SEQ, DEFAULT_TOKENS = 8, 1024, 2048, 256
MAX_BATCH = 4096
DISK_MARGIN = 64 << 20


class Report(Protocol):
    """Where a build tells how far it is."""

    def stage(self, name: str, total_bytes: int | None) -> None:
        """A stage begins; ``total_bytes`` where it is known how much it will write."""
        ...

    def advance(self, num_bytes: int) -> None: ...

    def note(self, line: str) -> None:
        """Something that the user should know now."""
        ...


class Silent:
    """A report that nobody reads."""

    def stage(self, name: str, total_bytes: int | None) -> None: ...

    def advance(self, num_bytes: int) -> None: ...

    def note(self, line: str) -> None: ...


@dataclass(frozen=True)
class BuildOptions:
    """What a user may choose; None takes the default that fits the models. Names follow trtllm-build."""

    backend: str = backend.NAME
    dtype: DType = "float32"
    max_batch_size: int = DEFAULT_BATCH
    max_input_len: int | None = None
    max_seq_len: int | None = None
    max_num_tokens: int | None = None
    target_weights: WeightForm = "float"
    draft_weights: WeightForm = "int8"
    draft_logits: bool = False


@dataclass(frozen=True)
class DrafterSource:
    """A drafter folder and the name that requests give it (None: by what it is, dflash or dflow)."""

    path: Path
    name: str | None = None


def build_bundle(
    target: Path,
    drafters: Sequence[DrafterSource],
    output: Path,
    options: BuildOptions,
    *,
    force: bool = False,
    self_check: str = "layer",
    report: Report | None = None,
) -> Bundle:
    """Build a bundle into ``output``: whole, or not at all.

    Raises UserError for anything wrong with checkpoints, options, disk space or an output that exists (without
    ``force``), and when the numerical self-check fails.
    """
    report = report or Silent()
    output = _resolved(output)
    _remove_leftovers(output)
    _check_output(output, force)
    source = read_target(target)
    drafts = _read_drafters(drafters, source.spec)
    spec = _build_spec(options, source.spec, max((d.spec.block_size for d in drafts), default=1))
    backend.check(spec, source.spec)
    estimate = estimate_bytes(source, drafts, spec)
    _check_disk(output, estimate)
    with _staged(output) as folder:
        report.stage("weights", estimate)
        writer = _Writer(folder, spec, source, drafts, report)
        bundle = writer.write()
        report.stage("self-check", None)
        result = run_self_check(bundle, source, drafts, self_check, report.note)
        write_manifest(dataclasses.replace(bundle, self_check=result))
        _put_in_place(folder, output, force)
    return open_bundle(output, verify=False)


def _resolved(output: Path) -> Path:
    """The folder itself: a link is followed, not replaced."""
    try:
        str(output).encode()
        return output.resolve()
    except (OSError, RuntimeError, UnicodeEncodeError):  # a loop of links, a name that is no text
        raise UserError(f"--output: {str(output)!r} is no usable path; choose another folder") from None


def _read_drafters(sources: Sequence[DrafterSource], target: TargetSpec) -> list[DrafterCheckpoint]:
    drafts = [read_drafter(source.path, target, source.name) for source in sources]
    names = [draft.spec.name for draft in drafts]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"--drafter: two drafters are called {name!r}; name one of them, e.g. --drafter {name}-2=FOLDER"
            )
    return drafts


def _build_spec(options: BuildOptions, target: TargetSpec, block_size: int) -> BuildSpec:
    seq = min(DEFAULT_SEQ, target.max_position) if options.max_seq_len is None else options.max_seq_len
    max_input = min(DEFAULT_INPUT, seq - 1) if options.max_input_len is None else options.max_input_len
    lowest = options.max_batch_size * block_size
    tokens = max(DEFAULT_TOKENS, lowest) if options.max_num_tokens is None else options.max_num_tokens
    _check_range("--max-batch-size", options.max_batch_size, 1, MAX_BATCH)
    _check_range("--max-seq-len", seq, 2, target.max_position, "the target's max_position_embeddings")
    _check_range("--max-input-len", max_input, 1, seq - 1, "max_seq_len - 1")
    _check_range(
        "--max-num-tokens", tokens, lowest, None, f"max_batch_size {options.max_batch_size} x block {block_size}"
    )
    if options.backend != backend.NAME:
        raise UserError(f"--backend: {options.backend!r} is not offered; allowed: {backend.NAME}")
    return BuildSpec(
        backend="onnxruntime",
        dtype=options.dtype,
        max_batch_size=options.max_batch_size,
        max_input_len=max_input,
        max_seq_len=seq,
        max_num_tokens=tokens,
        target_weights=options.target_weights,
        draft_weights=options.draft_weights,
        draft_logits=options.draft_logits,
    )


def _check_range(flag: str, value: int, low: int, high: int | None, why: str = "") -> None:
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"{low} to {high}"
        raise UserError(f"{flag}: {value}; allowed: {allowed}{f' ({why})' if why else ''}")


# -- the place on disk -------------------------------------------------------------------------------------------------


def _check_output(output: Path, force: bool) -> None:
    try:
        entries = list(output.iterdir()) if output.exists() else []
    except NotADirectoryError:
        raise UserError(f"--output: {output} is a file; name a folder") from None
    except OSError as error:
        raise UserError(f"--output: {output}: {error.strerror}; choose a folder that can be read and written") from None
    if entries and not (output / c.MANIFEST).is_file():
        raise UserError(f"--output: {output} is not empty and no bundle; choose another folder")
    if entries and not force:
        raise UserError(f"--output: {output} holds a bundle already; give --force to replace it, or another folder")
    foreign = sorted(path.name for path in entries if not _of_a_bundle(path))
    if foreign:  # replacing the folder would remove it, perhaps the very checkpoints that are to be read
        raise UserError(f"--output: {output} also holds {foreign[0]!r}, no part of a bundle; move it or choose another")


def _of_a_bundle(path: Path) -> bool:
    return path.name in (c.MANIFEST, c.TOKENIZER_DIR) or path.suffix in (".onnx", ".data")


OLD = "-old"  # suffix of a replaced bundle until it is removed


def _staging_prefix(output: Path) -> str:
    return f".{output.name}.building-"


@contextlib.contextmanager
def _staged(output: Path) -> Iterator[Path]:
    """A folder beside ``output``, gone again unless it is renamed into place. Locked: the mark of a living build."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=_staging_prefix(output), dir=output.parent))
    except OSError as error:
        raise UserError(f"--output: {output}: {error.strerror}; choose a folder that can be written") from None
    try:
        with _locked(folder):
            folder.chmod(0o777 & ~_umask())  # a temporary folder starts private
            yield folder
    except OSError as error:
        raise UserError(f"--output: {error.filename or output}: {error.strerror}; nothing was built") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; BlockingIOError where another process does. It ends with its process, however."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _remove_leftovers(output: Path) -> None:
    """Clean up behind killed builds into this output; UserError while another one is running."""
    prefix = _staging_prefix(output)
    try:
        found = sorted(path for path in output.parent.iterdir() if path.name.startswith(prefix))
    except OSError:
        return  # no such folder yet, or one that the build is about to complain of
    old = [path for path in found if path.name.endswith(OLD)]
    for folder in (path for path in found if path not in old):
        try:
            with _locked(folder):
                shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            raise UserError(f"--output: another build into {output} is running; wait for it") from None
        except OSError:
            continue  # gone meanwhile
    for folder in old:
        if output.exists():
            shutil.rmtree(folder, ignore_errors=True)
        else:
            folder.rename(output)  # the build was killed between its two renames


def _put_in_place(folder: Path, output: Path, force: bool) -> None:
    """Rename; an old bundle steps aside first and is removed last."""
    old = folder.with_name(folder.name + OLD)
    try:
        if force and output.exists():
            output.rename(old)
        folder.rename(output)
    except BaseException as error:
        if old.exists() and not output.exists():
            old.rename(output)
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise UserError(f"--output: {output} was filled by another build meanwhile; nothing was replaced") from None
        raise
    shutil.rmtree(old, ignore_errors=True)


def _check_disk(output: Path, estimate: int) -> None:
    place = output.parent
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < estimate + DISK_MARGIN:
        wanted = show_bytes(estimate + DISK_MARGIN)
        raise UserError(
            f"--output: {place} has {show_bytes(free)} free, the build needs {wanted}; free some space or choose "
            "another disk"
        )


# -- its size ----------------------------------------------------------------------------------------------------------


def estimate_bytes(target: TargetCheckpoint, drafts: Sequence[DrafterCheckpoint], build: BuildSpec) -> int:
    """Bytes that a build will write, from above: every weight in its engine's form, tables, tokenizer, graphs."""
    item = {"float": NUMPY[build.dtype].itemsize, "int8": 1}
    rows = build.cache_rows(max((draft.spec.block_size for draft in drafts), default=1))
    layers = [name for name in target.weights.names() if name not in (EMBEDDING, HEAD)]
    size = _vocabulary_bytes(target.spec, build, bool(drafts))
    size += _stored(target.weights, layers, item[build.target_weights]) + _engine_bytes(target.spec, rows, 1)
    for draft in drafts:
        wide = [name for name in draft.weights.names() if name.startswith(_WIDE)]
        narrow = [name for name in draft.weights.names() if name not in wide]
        twice = [name for name in narrow if re.search(r"\.self_attn\.[kv]_", name)]  # in context and drafter
        size += _stored(draft.weights, wide, 4) + _stored(draft.weights, narrow + twice, item[build.draft_weights])
        size += _engine_bytes(dataclasses.replace(target.spec, stack=draft.spec.stack), rows, 2)
    return size + sum(path.stat().st_size for path in target.tokenizer_files)


_WIDE = ("fc.", "relay_")  # float32 in every build
GRAPH_BYTES, LAYER_GRAPH_BYTES = 32 << 10, 24 << 10  # an engine's graph, and what a layer adds to it


def _vocabulary_bytes(spec: TargetSpec, build: BuildSpec, drafted: bool) -> int:
    """The tables: embedding and head, the head in every form that some engine wants."""
    forms = {build.target_weights} | ({build.draft_weights} if drafted else set())
    columns, width = c.vocab_columns(spec.vocab_size), spec.stack.hidden_size
    float_item = NUMPY[build.dtype].itemsize
    shared = spec.tied_head and "float" in forms
    size = columns * width * (float_item if shared else NUMPY[spec.checkpoint_dtype].itemsize)
    if "float" in forms and not shared:
        size += columns * width * float_item
    if "int8" in forms:
        size += columns * (width + 4)
    return size + 4 * store.ALIGNMENT


def _engine_bytes(spec: TargetSpec, cache_rows: int, engines: int) -> int:
    """What engines hold beside weights: rotary tables, the mask of dead ids, the graphs."""
    rope = 4 * cache_rows * spec.stack.head_dim
    graph = GRAPH_BYTES + LAYER_GRAPH_BYTES * spec.stack.num_layers
    return engines * (rope + graph + 3 * store.ALIGNMENT) + 4 * c.vocab_columns(spec.vocab_size)


def _stored(weights: Weights, names: Sequence[str], item: int) -> int:
    """Bytes of tensors with ``item`` bytes an element of a matrix; vectors stay float32, scales come with int8."""
    size = 0
    for name in names:
        rows, *rest = weights.shape(name)
        size += rows * (int(np.prod(rest)) * item + 4) + store.ALIGNMENT if rest else 4 * rows + store.ALIGNMENT
    return size


# -- writing -----------------------------------------------------------------------------------------------------------


class _Writer:
    """Writes every file of one bundle but the manifest."""

    def __init__(
        self,
        folder: Path,
        build: BuildSpec,
        target: TargetCheckpoint,
        drafts: Sequence[DrafterCheckpoint],
        report: Report,
    ) -> None:
        self.folder, self.build, self.target, self.drafts, self.report = folder, build, target, drafts, report
        self.files: dict[str, FileEntry] = {}
        self.target_lowering = backend.target_lowering(build)
        self.draft_lowering = backend.draft_lowering(build)

    def write(self) -> Bundle:
        bundle = self._bundle()
        with self._data(c.VOCAB_DATA) as data:
            vocabulary = _write_vocabulary(self.target, self._forms(), self.build.dtype, data)
        taps = bundle.taps
        contracts = {(drafter, contract.engine): contract for drafter, contract in bundle.contracts()}
        graph = self._engine(contracts[None, c.TARGET], None, self.target_lowering, self.target.weights)
        with graph as g:
            build_target(g, self.target.spec, vocabulary, taps)
        for draft in self.drafts:
            self._write_drafter(draft, contracts, vocabulary, taps)
        self._copy_tokenizer()
        return dataclasses.replace(bundle, files=self.files)

    def _bundle(self) -> Bundle:
        fingerprint = self.target.fingerprint
        drafters = {d.spec.name: DrafterEntry(d.spec, d.fingerprint, fingerprint) for d in self.drafts}
        return Bundle(self.folder, self.target.spec, fingerprint, drafters, self.build, {}, _versions(), {})

    def _forms(self) -> set[WeightForm]:
        """The weight forms in which some engine wants the head."""
        return {self.build.target_weights} | ({self.build.draft_weights} if self.drafts else set())

    def _write_drafter(
        self,
        draft: DrafterCheckpoint,
        contracts: dict[tuple[str | None, str], c.EngineContract],
        vocabulary: Vocabulary,
        taps: Sequence[int],
    ) -> None:
        name, spec = draft.spec.name, draft.spec
        with self._engine(contracts[name, c.CONTEXT], name, self.draft_lowering, draft.weights) as g:
            build_context(g, spec, taps)
        with self._engine(contracts[name, c.RELAY], name, RELAY_LOWERING, draft.weights) as g:
            build_relay(g, spec, vocabulary, self.build.dtype)
        with self._engine(contracts[name, c.DRAFTER], name, self.draft_lowering, draft.weights) as g:
            build_drafter(g, spec, vocabulary)

    @contextlib.contextmanager
    def _engine(
        self, contract: c.EngineContract, drafter: str | None, lowering: Lowering, weights: Weights
    ) -> Iterator[GraphBuilder]:
        """A graph to fill: its weights go to <engine>.data as it grows, the graph to <engine>.onnx at the end."""
        path = self.folder / engine_file(contract.engine, drafter)
        with self._data(path.with_suffix(".data").name) as data:
            g = GraphBuilder(contract, lowering, weights, data)
            yield g
        g.save(path)
        self._record(path)

    @contextlib.contextmanager
    def _data(self, name: str) -> Iterator[store.WeightFile]:
        data = store.WeightFile(self.folder / name, self.report.advance)
        try:
            yield data
        finally:
            data.close()
        if data.size:
            self.files[name] = FileEntry(data.sha256, data.size)
        else:
            data.path.unlink()  # an engine of shared tables alone

    def _record(self, path: Path) -> None:
        name = str(path.relative_to(self.folder))
        self.files[name] = FileEntry(file_sha256(path), path.stat().st_size)

    def _copy_tokenizer(self) -> None:
        for source in self.target.tokenizer_files:
            copy = self.folder / c.TOKENIZER_DIR / source.name
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(source, copy)
            self._record(copy)


def _write_vocabulary(
    target: TargetCheckpoint, forms: set[WeightForm], dtype: DType, data: store.WeightFile
) -> Vocabulary:
    """The tables, once for all engines. A tied float head is the embedding table itself."""
    spec, weights = target.spec, target.weights
    columns, head_name = c.vocab_columns(spec.vocab_size), EMBEDDING if spec.tied_head else HEAD
    shared = spec.tied_head and "float" in forms
    embed = _table(weights, EMBEDDING, "embed", columns, dtype if shared else spec.checkpoint_dtype, data)
    head = embed if shared else None
    if "float" in forms and not shared:
        head = _table(weights, head_name, "head", columns, dtype, data)
    head_int8 = _int8_table(weights, head_name, columns, data) if "int8" in forms else None
    return Vocabulary(embed, head, head_int8, dead_columns(spec.live_vocab, columns))


def _table(
    weights: Weights, name: str, label: str, columns: int, dtype: DType, data: store.WeightFile
) -> ir.ExternalTensor:
    """[V,E], zero rows up to V; streamed."""
    rows, width = weights.shape(name)

    def chunks() -> Iterator[Array]:
        for _, chunk in store.row_chunks(weights, name):
            yield chunk
        yield np.zeros((columns - rows, width), NUMPY[dtype])

    return data.add_chunks(f"vocab.{label}", (columns, width), NUMPY[dtype], chunks())


def _int8_table(
    weights: Weights, name: str, columns: int, data: store.WeightFile
) -> tuple[ir.ExternalTensor, ir.ExternalTensor]:
    array, scale = store.quantised(weights, [name], padded=columns)
    return data.add("vocab.head_int8", array), data.add("vocab.head_int8_scale", scale)


def _versions() -> dict[str, str]:
    names = ("dflow-trt", "numpy", "onnx", "onnx-ir", "onnxruntime")
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {name: _version(name) for name in names} | {"date": stamp}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
