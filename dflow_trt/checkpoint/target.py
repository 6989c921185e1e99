"""A Qwen3 target folder in, a spec and lazily read weights out."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from dflow_trt.checkpoint.config import read_stack, reject_unsupported
from dflow_trt.checkpoint.folder import CONFIG, checked_folder, fingerprint, licence
from dflow_trt.checkpoint.names import EMBEDDING, HEAD, check_tensors, linear_layers, target_tensors
from dflow_trt.checkpoint.quantised import QUANT_CONFIG, open_quantised, read_description
from dflow_trt.checkpoint.reader import Config, read_config, refuse
from dflow_trt.checkpoint.safetensors import SafetensorsWeights, open_weights, same_bytes
from dflow_trt.checkpoint.weights import Weights
from dflow_trt.spec import DTYPES, DType, TargetSpec

ARCHITECTURES = ("Qwen3ForCausalLM",)
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    GENERATION,
)


@dataclass(frozen=True)
class TargetCheckpoint:
    """A validated target. ``weights`` has exactly the tensors of ``names.target_tensors(spec)``."""

    path: Path
    spec: TargetSpec
    weights: Weights
    fingerprint: str
    tokenizer_files: tuple[Path, ...]


def read_target(folder: Path | str, quantised: bool = False) -> TargetCheckpoint:
    """Read and validate a target folder; UserError, in one line, for anything not supported or not whole.

    quantised: whether the caller can use quantised linear layers; otherwise they are refused.
    """
    path = checked_folder(folder)
    config = read_config(path / CONFIG)
    architecture = read_architecture(config, ARCHITECTURES)
    config.one_of("model_type", ("qwen3",), default="qwen3")
    reject_unsupported(config)
    said = read_description(path, config)
    if said is not None and not quantised:
        raise refuse(
            path, "quant_algo", repr(said.algo), "float weights in this use", "take the unquantised checkpoint"
        )
    tied = config.boolean("tie_word_embeddings", False)
    stored = _one_head(open_weights(path), tied, path)
    spec = _spec(path, config, architecture, tied, checkpoint_dtype(stored, EMBEDDING, path))
    weights: Weights = stored
    if said is not None:
        weights, quantisation = open_quantised(stored, said, linear_layers(spec.stack, "model."), path)
        spec = dataclasses.replace(spec, quantisation=quantisation)
    check_tensors(weights, target_tensors(spec), path)
    files = tuple(path / name for name in TOKENIZER_FILES if (path / name).is_file())
    described = [path / name for name in (CONFIG, QUANT_CONFIG) if (path / name).is_file()]
    return TargetCheckpoint(path, spec, weights, fingerprint(stored, (*described, *files)), files)


def read_architecture(config: Config, allowed: tuple[str, ...]) -> str:
    """The single entry of ``architectures``, which must be an allowed one."""
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in allowed:
        wanted = " or ".join(f"[{name!r}]" for name in allowed)
        raise config.error("architectures", wanted, "use a checkpoint of a supported architecture")
    return str(names[0])


def checkpoint_dtype(weights: Weights, name: str, where: Path) -> DType:
    """The dtype in which weights are stored: that of the main tensor (config.json may say another)."""
    if name not in set(weights.names()):
        raise refuse(where, name, "missing", "a tensor of this name", "complete the folder")
    stored = weights.dtype(name).name
    return next(dtype for dtype in DTYPES if dtype == stored)


def _one_head(weights: SafetensorsWeights, tied: bool, where: Path) -> SafetensorsWeights:
    """The weights without a redundant head: a tied model may carry an identical copy of its embedding."""
    names = set(weights.names())
    if HEAD not in names and not tied:
        todo = f"add {HEAD}, or set tie_word_embeddings to true"
        raise refuse(where / CONFIG, "tie_word_embeddings", f"False, but {HEAD} is missing", f"True, or {HEAD}", todo)
    if not tied or HEAD not in names or EMBEDDING not in names:
        return weights
    if not same_bytes(weights, HEAD, EMBEDDING):
        found, allowed = f"True, but {HEAD} differs from {EMBEDDING}", "False, or an identical copy"
        raise refuse(where / CONFIG, "tie_word_embeddings", found, allowed, "set it to false, or remove the head")
    return weights.without(HEAD)


def _spec(path: Path, config: Config, architecture: str, tied: bool, dtype: DType) -> TargetSpec:
    vocab = config.integer("vocab_size")
    live = _live_vocab(path / TOKENIZER, vocab)
    generation = read_config(path / GENERATION) if (path / GENERATION).is_file() else None
    sources = [config] if generation is None else [config, generation]
    eos = [token for source in sources for token in _token_ids(source, "eos_token_id", live)]
    return TargetSpec(
        stack=read_stack(config),
        vocab_size=vocab,
        live_vocab=live,
        tied_head=tied,
        max_position=config.integer("max_position_embeddings"),
        eos_ids=tuple(dict.fromkeys(eos)),
        bos_id=_first_id(sources, "bos_token_id", vocab),
        pad_id=_first_id(sources, "pad_token_id", vocab),
        checkpoint_dtype=dtype,
        architecture=architecture,
        licence=licence(path),
    )


def _live_vocab(tokenizer: Path, vocab: int) -> int:
    """The padded-vocabulary rule: ids from the tokenizer's highest id + 1 on (added tokens count) do not
    exist.

    Without a ``tokenizer.json`` every row of the embedding is live.
    """
    if not tokenizer.is_file():
        return vocab
    from tokenizers import Tokenizer

    try:
        ids = Tokenizer.from_file(str(tokenizer)).get_vocab(with_added_tokens=True).values()
    except Exception as error:  # the library raises nothing more specific
        todo = "fetch the file again"
        raise refuse(tokenizer, "the content", str(error)[:200], "a tokenizers JSON file", todo) from None
    live = max(ids, default=-1) + 1
    if not 0 < live <= vocab:
        allowed = f"an id from 0 to {vocab - 1}, as vocab_size says"
        raise refuse(tokenizer, "the highest token id", str(live - 1), allowed, "use the model's own tokenizer")
    return live


def _token_ids(config: Config, key: str, vocab: int) -> tuple[int, ...]:
    """An id or a list of ids, each below ``vocab``; empty when absent."""
    value = config.get(key)
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list) else (value,)
    if any(type(token) is not int or not 0 <= token < vocab for token in ids):
        raise config.error(key, f"an id, or a list of ids, from 0 to {vocab - 1}, inside the vocabulary")
    return ids


def _first_id(sources: list[Config], key: str, vocab: int) -> int | None:
    """The id in the first file that has one."""
    found = (source.optional_integer(key, low=0, high=vocab - 1) for source in sources)
    return next((token for token in found if token is not None), None)
