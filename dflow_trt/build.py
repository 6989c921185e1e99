"""Checkpoints in, a bundle out: read, estimate, write graphs and weights, check numerically, rename into place."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import importlib.metadata
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dflow_trt import contract as c
from dflow_trt.bundle import Bundle, DrafterEntry, FileEntry, engine_file, file_sha256, open_bundle, write_manifest
from dflow_trt.checkpoint.folder import DrafterCheckpoint
from dflow_trt.checkpoint.names import EMBEDDING, HEAD
from dflow_trt.checkpoint.target import TargetCheckpoint, read_target
from dflow_trt.checkpoint.weights import Weights
from dflow_trt.compile import onnxruntime
from dflow_trt.compile.backends import choose_backend
from dflow_trt.compile.base import Backend, EngineOptions
from dflow_trt.errors import UserError
from dflow_trt.graphs import store
from dflow_trt.graphs.blocks import Vocabulary, dead_columns
from dflow_trt.graphs.builder import NUMPY, GraphBuilder, Lowering
from dflow_trt.graphs.intake import read_any_drafter
from dflow_trt.graphs.target import build_target
from dflow_trt.kinds import KINDS
from dflow_trt.memory import head_forms, plan_memory, show_bytes, unbuilt
from dflow_trt.selfcheck import run_self_check
from dflow_trt.spec import BuildSpec, DFlashSpec, DType, TargetSpec, TargetWeights, WeightForm

DEFAULT_BATCH, DEFAULT_INPUT, DEFAULT_SEQ, DEFAULT_TOKENS = 8, 1024, 2048, 256
MAX_BATCH, MAX_TOKENS = 4096, 1 << 20
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
    """What a user may choose; None takes the default that fits the models or the backend. Names follow trtllm-build."""

    backend: str = onnxruntime.NAME
    dtype: DType | None = None
    max_batch_size: int = DEFAULT_BATCH
    max_input_len: int | None = None
    max_seq_len: int | None = None
    max_num_tokens: int | None = None
    target_weights: WeightForm = "float"
    draft_weights: WeightForm | None = None
    draft_logits: bool = False
    engine: EngineOptions = field(default_factory=EngineOptions)


@dataclass(frozen=True)
class DrafterSource:
    """A drafter folder and the name that requests give it (None: by what it is, e.g. dflash or dflow).

    settings: what its folder does not say, e.g. {"drafts": 5}. ngram, which has no folder, is a path of that name.
    """

    path: Path
    name: str | None = None
    settings: Mapping[str, int] = field(default_factory=dict)


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
    source = read_target(target, quantised=True)
    drafts = read_drafters(drafters, source)
    backend = choose_backend(options.backend, options.engine)
    spec = build_spec(options, backend, source.spec, max((d.spec.verify_rows for d in drafts), default=1))
    _check_mode(backend, self_check)
    backend.check(spec, source.spec, [draft.spec for draft in drafts])
    backend.check_machine(spec, [draft.spec for draft in drafts])
    estimate = estimate_bytes(source, drafts, spec)
    _check_disk(output, estimate + _compiled_bytes(source.spec, drafts, spec))
    with _staged(output) as folder:
        report.stage("weights", estimate)
        writer = _Writer(folder, spec, backend, source, drafts, report)
        bundle = writer.write()
        report.stage("self-check", None)
        result = run_self_check(bundle, source, drafts, self_check, report.note)
        if backend.name != onnxruntime.NAME:
            report.stage(f"{backend.name} engines", None)
        bundle = backend.compile(bundle, report.note)
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


def read_drafters(sources: Sequence[DrafterSource], target: TargetCheckpoint) -> list[DrafterCheckpoint]:
    drafts = [read_any_drafter(source.path, target, source.name, source.settings) for source in sources]
    names = [draft.spec.name for draft in drafts]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"--drafter: two drafters are called {name!r}; name one of them, e.g. --drafter {name}-2=FOLDER"
            )
    return drafts


def build_spec(options: BuildOptions, backend: Backend, target: TargetSpec, verify_rows: int) -> BuildSpec:
    seq = min(DEFAULT_SEQ, target.max_position) if options.max_seq_len is None else options.max_seq_len
    max_input = min(DEFAULT_INPUT, seq - 1) if options.max_input_len is None else options.max_input_len
    lowest = options.max_batch_size * verify_rows
    tokens = max(DEFAULT_TOKENS, lowest) if options.max_num_tokens is None else options.max_num_tokens
    _check_range("--max-batch-size", options.max_batch_size, 1, MAX_BATCH)
    _check_range("--max-seq-len", seq, 2, target.max_position, "the target's max_position_embeddings")
    _check_range("--max-input-len", max_input, 1, seq - 1, "max_seq_len - 1")
    why = f"max_batch_size {options.max_batch_size} x {verify_rows} rows of a verify pass"
    _check_range("--max-num-tokens", tokens, lowest, max(lowest, MAX_TOKENS), why)
    return BuildSpec(
        backend=backend.name,
        dtype=options.dtype or backend.dtype,
        max_batch_size=options.max_batch_size,
        max_input_len=max_input,
        max_seq_len=seq,
        max_num_tokens=tokens,
        target_weights=_target_weights(options, target),
        draft_weights=options.draft_weights or backend.draft_weights,
        draft_logits=options.draft_logits,
    )


def _target_weights(options: BuildOptions, target: TargetSpec) -> TargetWeights:
    """As the user wants them; a quantised checkpoint's are what they are."""
    if target.quantisation is None:
        return options.target_weights
    algo = target.quantisation.algo
    if options.target_weights != "float":
        raise UserError(f"--target-weights: {options.target_weights}; the target's are {algo} already; leave it out")
    return algo


def _check_mode(backend: Backend, self_check: str) -> None:
    if self_check == "full" and backend.name != onnxruntime.NAME:
        raise UserError(
            f"--self-check: full runs whole engines, those of {onnxruntime.NAME} alone; allowed on {backend.name}: "
            "layer, off"
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


BUNDLE_SUFFIXES = (".onnx", ".data", c.ENGINE_SUFFIX, c.PLUGIN_SUFFIX)


def _of_a_bundle(path: Path) -> bool:
    return path.name in (c.MANIFEST, c.TOKENIZER_DIR) or path.suffix in BUNDLE_SUFFIXES


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
    """Bytes that a build will write before anything is compiled, from above: data files, graphs and the tokenizer."""
    bundle = unbuilt(target.spec, {draft.spec.name: draft.spec for draft in drafts}, build)
    size = sum(entry.size for entry in bundle.files.values())
    size += sum(_graph_bytes(contract, bundle.drafters.get(name or "")) for name, contract in bundle.contracts())
    return size + sum(path.stat().st_size for path in target.tokenizer_files)


def _graph_bytes(contract: c.EngineContract, entry: DrafterEntry | None) -> int:
    """An engine's graph: it grows by the layer, by the rows of a kernel in it, and by the draft where the next is
    chosen behind it."""
    spec = entry.spec if entry is not None and contract.engine == c.DRAFTER else None
    drafts = contract.static.get("K", 0) if spec is not None and spec.corrects else 0
    rows = spec.conv.kernel_size if isinstance(spec, DFlashSpec) and spec.conv else 0
    layer = LAYER_GRAPH_BYTES + ROW_GRAPH_BYTES * rows
    return GRAPH_BYTES + layer * contract.cache_layers + DRAFT_GRAPH_BYTES * drafts


def _compiled_bytes(target: TargetSpec, drafts: Sequence[DrafterCheckpoint], build: BuildSpec) -> int:
    """Bytes of the engines that are compiled from the graphs, while those are still there; each holds its weights."""
    if build.backend == onnxruntime.NAME:
        return 0
    bundle = unbuilt(target, {draft.spec.name: draft.spec for draft in drafts}, build)
    return plan_memory(bundle).weights + ENGINE_CODE_BYTES * len(list(bundle.contracts()))


ENGINE_CODE_BYTES = 16 << 20  # kernels, about
GRAPH_BYTES, LAYER_GRAPH_BYTES = 32 << 10, 24 << 10  # an engine's graph, and what a layer adds to it
DRAFT_GRAPH_BYTES = 8 << 10  # what a draft of a causal head adds
ROW_GRAPH_BYTES = 3 << 10  # what a row of the kernels of a layer adds


# -- writing -----------------------------------------------------------------------------------------------------------


class _Writer:
    """Writes every file of one bundle but the manifest; see :class:`dflow_trt.graphs.kind.Writer`."""

    def __init__(
        self,
        folder: Path,
        build: BuildSpec,
        backend: Backend,
        target: TargetCheckpoint,
        drafts: Sequence[DrafterCheckpoint],
        report: Report,
    ) -> None:
        self.folder, self.build, self.target, self.drafts, self.report = folder, build, target, drafts, report
        self.files: dict[str, FileEntry] = {}
        self.target_lowering = backend.target_lowering(build)
        self.lowering = backend.draft_lowering(build)
        self.taps = c.packed_taps(tuple(draft.spec for draft in drafts))

    def write(self) -> Bundle:
        bundle = self._bundle()
        with self._data(c.VOCAB_DATA) as data:
            forms = head_forms(self.build, bundle.specs)
            self.vocabulary = _write_vocabulary(self.target, forms, self.build.dtype, data)
        contracts = {(drafter, contract.engine): contract for drafter, contract in bundle.contracts()}
        graph = self._engine(contracts[None, c.TARGET], None, self.target_lowering, self.target.weights)
        with graph as g:
            build_target(g, self.target.spec, self.vocabulary, self.taps)
        for draft in self.drafts:
            engines = {engine: contract for (name, engine), contract in contracts.items() if name == draft.spec.name}
            KINDS[draft.spec.kind].graphs_module().write(self, draft, engines)
        self._copy_tokenizer()
        return dataclasses.replace(bundle, files=self.files)

    def _bundle(self) -> Bundle:
        fingerprint = self.target.fingerprint
        drafters = {d.spec.name: DrafterEntry(d.spec, d.fingerprint, fingerprint) for d in self.drafts}
        return Bundle(self.folder, self.target.spec, fingerprint, drafters, self.build, {}, _versions(), {})

    def engine(
        self, contract: c.EngineContract, drafter: str, weights: Weights, lowering: Lowering | None = None
    ) -> contextlib.AbstractContextManager[GraphBuilder]:
        """See :class:`dflow_trt.graphs.kind.Writer`."""
        return self._engine(contract, drafter, lowering or self.lowering, weights)

    def tables(self, drafter: str, source: TargetCheckpoint) -> Vocabulary:
        """See :class:`dflow_trt.graphs.kind.Writer`."""
        with self._data(f"{drafter}.{c.VOCAB_DATA}") as data:
            return _write_vocabulary(source, {self.build.draft_weights}, self.build.dtype, data)

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
    embed_dtype = NUMPY[dtype if shared else spec.checkpoint_dtype]
    embed = store.table(data, weights, EMBEDDING, "vocab.embed", columns, embed_dtype)
    head, head_int8 = embed if shared else None, None
    if "float" in forms and not shared:
        head = store.table(data, weights, head_name, "vocab.head", columns, NUMPY[dtype])
    if "int8" in forms:
        head_int8 = store.int8_table(data, weights, head_name, "vocab.head_int8", columns)
    return Vocabulary(embed, head, head_int8, dead_columns(spec.live_vocab, columns))


def _versions() -> dict[str, str]:
    names = ("dflow-trt", "numpy", "onnx", "onnx-ir", "onnxruntime")
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {name: _version(name) for name in names} | {"date": stamp}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
