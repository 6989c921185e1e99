"""A drafter in the layout that TensorRT-LLM's DFlash reads, with the files that serve it there.

What its reader does, and what therefore cannot be handed over (tensorrt_llm/_torch/speculative/dflash.py and
_torch/models/modeling_dflash.py): it sorts the taps, reads ``block_size`` at the top of config.json and the rest from
``dflash_config``, drafts from slots 1..K, scales no embedding, and masks a layer exactly where it has a window.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflow_trt.checkpoint.config import read_config
from dflow_trt.checkpoint.drafter import NESTED, DFlashCheckpoint, read_drafter
from dflow_trt.checkpoint.folder import CONFIG
from dflow_trt.checkpoint.names import DOMINO_NAMES, RELAY_NAMES
from dflow_trt.checkpoint.safetensors import SINGLE
from dflow_trt.checkpoint.target import TargetCheckpoint, read_target
from dflow_trt.errors import UserError
from dflow_trt.files import staged_folder
from dflow_trt.spec import DFlashSpec, DominoSpec, DType, RopeSpec, TargetSpec
from dflow_trt.trtllm import readme
from dflow_trt.trtllm.schema import DEFAULT_VERSION, Version, find_version
from dflow_trt.trtllm.tensors import write_tensors
from dflow_trt.trtllm.yaml import to_yaml

DRAFTER, RELAY, HEAD, SERVE = "drafter", "relay", "head", "trtllm-serve.yaml"
MODEL_YAML = "triton/tensorrt_llm/1/model.yaml"
OWN = (DRAFTER, RELAY, HEAD, SERVE, "triton", readme.NAME)
HALF: tuple[DType, ...] = ("bfloat16", "float16")


@dataclass(frozen=True)
class Limits:
    """Limits of the server, named as in a build; None leaves TensorRT-LLM's own default."""

    max_batch_size: int | None = None
    max_input_len: int | None = None
    max_seq_len: int | None = None
    max_num_tokens: int | None = None

    def given(self) -> dict[str, int]:
        """Those that are set; UserError for one below 1."""
        found: dict[str, int] = {name: value for name, value in vars(self).items() if value is not None}
        for name, value in found.items():
            if value < 1:
                raise UserError(f"--{name.replace('_', '-')}: {value}; allowed: at least 1")
        return found


@dataclass(frozen=True)
class Export:
    """What was written: the folder, its files, and what a user should know, a line each."""

    path: Path
    files: tuple[str, ...]
    notes: tuple[str, ...]


def export_trtllm(
    target: Path,
    drafter: Path,
    output: Path,
    *,
    version: str = DEFAULT_VERSION,
    dtype: DType | None = None,
    limits: Limits | None = None,
    force: bool = False,
) -> Export:
    """Write ``output``: whole, or not at all; ``force`` replaces an export that is there.

    dtype: of the drafter's tensors, by default the target's, bfloat16 for float32. UserError for a pair that is not
    supported, a version without DFlash, and a drafter that TensorRT-LLM would read as another one.
    """
    schema, server = find_version(version), (limits or Limits()).given()
    if dtype not in (None, *HALF):
        raise UserError(f"--dtype: {dtype}; allowed: {', '.join(HALF)} (its attention takes half precision alone)")
    output, target, drafter = (_resolved(path) for path in (output, target, drafter))
    _check_output(output, force, (target, drafter))
    pair = _Pair.read(target, drafter, dtype)
    _check_expressible(pair.draft.spec)
    with staged_folder(output, force) as folder:
        _write(folder, pair, output, schema, server)
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return Export(output, tuple(files), tuple(_notes(pair)))


@dataclass(frozen=True)
class _Pair:
    """The checkpoints, the dtype in which the drafter is written, and the positions that it was made for."""

    target: TargetCheckpoint
    draft: DFlashCheckpoint
    dtype: DType
    max_position: int

    @classmethod
    def read(cls, target: Path, drafter: Path, dtype: DType | None) -> _Pair:
        source = read_target(target)
        draft = read_drafter(drafter, source.spec)
        stored = source.spec.checkpoint_dtype  # the drafter shares its embedding and head
        chosen = dtype or (stored if stored in HALF else HALF[0])
        return cls(source, draft, chosen, _max_position(draft, source.spec))

    @property
    def target_dtype(self) -> dict[str, DType]:
        """What LLM is told where the target is not stored as it must be loaded."""
        return {} if self.target.spec.checkpoint_dtype == self.dtype else {"dtype": self.dtype}


def _max_position(draft: DFlashCheckpoint, target: TargetSpec) -> int:
    """max_position_embeddings of the drafter, in whichever layout; the target's where it names none."""
    top = read_config(draft.path / CONFIG)
    keys = top.section(NESTED) or top
    return keys.optional_integer("max_position_embeddings") or target.max_position


def _resolved(path: Path) -> Path:
    """Absolute, as both YAML files name it."""
    try:
        str(path).encode()
        return path.resolve()
    except (OSError, RuntimeError, UnicodeEncodeError):  # a loop of links, a name that is no text
        raise UserError(f"{str(path)!r} is no path that a YAML file can name; choose another folder") from None


def _check_output(output: Path, force: bool, sources: Sequence[Path]) -> None:
    for source in sources:
        if output == source or output in source.parents:
            raise UserError(f"--output: {output} holds the checkpoint {source}; choose another folder")
    if output.exists() and not output.is_dir():
        raise UserError(f"--output: {output} is a file; name a folder")
    entries = sorted(path.name for path in output.iterdir()) if output.exists() else []
    foreign = [name for name in entries if name not in OWN]
    if entries and (SERVE not in entries or foreign):
        raise UserError(f"--output: {output} holds {(foreign or entries)[0]!r}, no export's; choose another folder")
    if entries and not force:
        raise UserError(f"--output: {output} holds an export already; give --force to replace it, or another folder")


# -- what TensorRT-LLM would read otherwise ----------------------------------------------------------------------------


def _check_expressible(spec: DFlashSpec) -> None:
    """UserError for a drafter that would load there without a complaint, and draft something else."""
    misread = next(_misreadings(spec), None)
    if misread is not None:
        found, allowed, why = misread
        raise UserError(f"drafter: {found}; allowed for TensorRT-LLM: {allowed}; {why}")


def _misreadings(spec: DFlashSpec) -> Iterator[tuple[str, str, str]]:
    if spec.conv is not None:
        why = "its DFlash has neither convolutions nor a selector; use this drafter here"
        yield f"architectures is [{spec.architecture!r}]", "DFlash, Domino and DFlow drafters", why
    taps = list(spec.target_layer_ids)
    if taps != sorted(taps):
        why = "it sorts them, and fc would read the layers in another order; train with ascending taps"
        yield f"target_layer_ids {taps}", f"ascending ids, as {sorted(taps)}", why
    if isinstance(spec.head, DominoSpec) and spec.head.shifted:
        yield "shift_label is true", "false", "its DFlash drafts from slots 1 on; use this drafter here"
    if spec.input_embedding_scale != 1.0:
        why = "it does not scale embeddings; use this drafter here"
        yield f"input_embedding_scale {spec.input_embedding_scale:g}", "1", why
    for layer, (causal, window) in enumerate(zip(spec.stack.causal, spec.stack.windows, strict=True)):
        if causal != (window is not None):
            found = f"layer {layer} is {'causal without' if causal else 'not causal, with'} a window"
            why = "a window alone decides it there; use this drafter here"
            yield found, "causal with a window, else not", why


def _notes(pair: _Pair) -> Iterator[str]:
    spec = pair.draft.spec
    if spec.relay is not None:
        same = "" if spec.head else f"; DFlash there is what {spec.strategies[-1]} is here"
        yield f"{RELAY}/: TensorRT-LLM has no relay{same}"
    if spec.head is not None:
        yield f"{HEAD}/: TensorRT-LLM's DFlash has no Domino head; it drafts there from the base logits"
    if spec.checkpoint_dtype != pair.dtype:
        yield f"{DRAFTER}/: {spec.checkpoint_dtype} is written as {pair.dtype}, in which the target runs there"
    if pair.target_dtype:
        yield f"dtype: the target is stored in {pair.target.spec.checkpoint_dtype}, and loaded in {pair.dtype}"
    if pair.dtype == "float16":
        yield f"{DRAFTER}/: fc runs in float16 there, which target states above 65504 overflow; bfloat16 is safe"
    if spec.output_multiplier != 1.0 or spec.final_logit_softcapping:
        yield f"{DRAFTER}/: output_multiplier and softcapping are left out; greedy drafts do not depend on them"


# -- writing -----------------------------------------------------------------------------------------------------------


def _write(folder: Path, pair: _Pair, output: Path, schema: Version, limits: Mapping[str, int]) -> None:
    spec, weights = pair.draft.spec, pair.draft.weights
    names = [name for name in weights.names() if name not in (*RELAY_NAMES, *DOMINO_NAMES)]
    _write_part(folder / DRAFTER, _drafter_config(pair), pair, names, pair.dtype)
    if spec.relay is not None:
        _write_part(folder / RELAY, {"dflow_config": {"relay_start": spec.relay.start}}, pair, RELAY_NAMES)
    if isinstance(spec.head, DominoSpec):
        _write_part(folder / HEAD, {"dflash_config": _head_config(spec.head)}, pair, DOMINO_NAMES)
    speculative = schema.checked("dflash", _speculative_config(spec, output / DRAFTER))
    common = {**limits, **pair.target_dtype, "speculative_config": speculative}
    _write_text(folder / SERVE, to_yaml(schema.checked("llm_args", common)))
    _write_text(folder / MODEL_YAML, to_yaml(_model_yaml(pair, common, schema)))
    places = readme.Places(pair.target.path, pair.draft.path, output)
    _write_text(folder / readme.NAME, readme.text(spec, schema.name, places, tuple(_notes(pair))))


def _write_part(
    folder: Path, config: Mapping[str, Any], pair: _Pair, names: Sequence[str], dtype: DType | None = None
) -> None:
    """A folder of config.json and model.safetensors."""
    folder.mkdir()
    _write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    write_tensors(folder / SINGLE, pair.draft.weights, names, dtype)


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _drafter_config(pair: _Pair) -> dict[str, Any]:
    """config.json with the keys of transformers 4, which 5 reads too: whichever TensorRT-LLM brings along."""
    spec, stack = pair.draft.spec, pair.draft.spec.stack
    window = next((window for window in stack.windows if window is not None), None)
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",  # its reader has no class of the architecture's name, and goes by this
        "hidden_size": stack.hidden_size,
        "num_hidden_layers": stack.num_layers,
        "num_attention_heads": stack.num_heads,
        "num_key_value_heads": stack.num_kv_heads,
        "head_dim": stack.head_dim,
        "intermediate_size": stack.intermediate_size,
        "vocab_size": spec.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": stack.rms_norm_eps,
        "attention_bias": stack.attention_bias,
        "max_position_embeddings": pair.max_position,
        "rope_theta": stack.rope.theta,
        "rope_scaling": _rope_scaling(stack.rope),
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in stack.windows],
        "tie_word_embeddings": False,
        "torch_dtype": pair.dtype,
        "num_target_layers": spec.num_target_layers,
        "block_size": spec.block_size,
        "dflash_config": {"mask_token_id": spec.mask_token_id, "target_layer_ids": list(spec.target_layer_ids)},
    }


def _rope_scaling(rope: RopeSpec) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "yarn":
        scaling["original_max_position_embeddings"] = rope.original_max_position
        scaling |= {name: getattr(rope, name) for name in ("beta_fast", "beta_slow", "attention_factor", "truncate")}
    return scaling


def _head_config(head: DominoSpec) -> dict[str, Any]:
    """The keys that make the drafter's config.json whole again."""
    return {
        "projector_type": "domino",
        "emb_dim": head.rank,
        "gru_hidden_dim": head.state_size,
        "pure_draft_prefix_len": head.prefix_length,
        "shift_label": head.shifted,
    }


def _speculative_config(spec: DFlashSpec, drafter: Path) -> dict[str, Any]:
    """DFlashDecodingConfig. Its reader would find the ids itself; here they are in sight."""
    return {
        "decoding_type": "DFlash",
        "max_draft_len": spec.num_drafts,
        "speculative_model": str(drafter),
        "mask_token_id": spec.mask_token_id,
        "target_layer_ids": list(spec.target_layer_ids),
    }


def _model_yaml(pair: _Pair, common: Mapping[str, Any], schema: Version) -> dict[str, Any]:
    """model.yaml of the Triton model ``llmapi``: arguments of LLM, and what Triton itself is told."""
    parallel = {"backend": "pytorch", "tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    args = schema.checked("llm_args", {"model": str(pair.target.path), **parallel, **common})
    return {**args, "triton_config": schema.checked("triton", {"max_batch_size": 0, "decoupled": False})}
