"""The export to TensorRT-LLM: read back by its documented rules, refused where it would be read as another drafter."""

from __future__ import annotations

import dataclasses
import json
import re
import tracemalloc
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import click
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file
from tiny import DELETE, DTYPES, Config, edit_config, make_drafter, make_target

import dflow_trt
from dflow_trt.checkpoint.drafter import read_drafter
from dflow_trt.checkpoint.target import read_target
from dflow_trt.cli import cli
from dflow_trt.errors import UserError
from dflow_trt.spec import DFlashSpec
from dflow_trt.trtllm import export as exporting
from dflow_trt.trtllm.export import Export, Limits, export_trtllm
from dflow_trt.trtllm.schema import VERSIONS, find_version
from dflow_trt.trtllm.yaml import to_yaml

MoeBackend = Literal[
    "AUTO", "CUTLASS", "CUTEDSL", "CUTEDSL_FC12", "TRTLLM", "DEEPGEMM", "DENSEGEMM", "VANILLA", "TRITON", "MARLIN",
    "MEGAMOE_DEEPGEMM", "MEGAMOE_CUTEDSL",
]  # fmt: skip


@dataclasses.dataclass
class DFlashDecodingConfig:
    """https://nvidia.github.io/TensorRT-LLM/1.4.0rc1/llm-api/reference/DFlashDecodingConfig.html, field by field.

    AdvancedSamplingMode is an enumeration of strings. The model forbids other keys.
    """

    max_draft_len: int | None = None
    max_total_draft_tokens: int | None = None
    speculative_model: str | None = None
    moe_backend: MoeBackend | None = None
    max_concurrency: int | None = None
    draft_len_schedule: dict[int, int] | None = None
    load_format: str | None = None
    acceptance_rate_window_size: int | None = None
    acceptance_rate_threshold: float | None = None
    use_rejection_sampling: bool = False
    allow_advanced_sampling: bool = False
    advanced_sampling_mode: Literal["full", "no_topk", "no_topp", "no_topk_no_topp"] = "full"
    enable_penalty: bool = False
    spec_dec_variant: int | None = None
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    context_recompute_tail: int | None = 0
    decoding_type: Literal["DFlash"] = "DFlash"
    attention_backend: Literal["VANILLA", "TRTLLM", "FA4"] = "VANILLA"
    skip_ctx_buffer_budget_check: bool = False


@dataclasses.dataclass
class LlmArgs:
    """https://nvidia.github.io/TensorRT-LLM/1.4.0rc4/llm-api/reference/TorchLlmArgs.html, those fields that an export
    may write; types as in tensorrt_llm/llmapi/llm_args.py. The model forbids other keys."""

    model: str
    speculative_config: DFlashDecodingConfig | None = None
    backend: str | None = None
    dtype: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_batch_size: int | None = 2048
    max_input_len: int | None = 1024
    max_seq_len: int | None = None
    max_num_tokens: int | None = 8192


@dataclasses.dataclass
class TritonConfig:
    """What triton_backend/all_models/llmapi/tensorrt_llm/1/model.py reads of ``triton_config``."""

    max_batch_size: int
    decoupled: bool
    cancellation_check_period_ms: int = 100


def parse(kind: Any, values: Mapping[str, Any]) -> Any:
    """An instance of the mirror, of values of its fields' types alone."""
    hints = get_type_hints(kind)
    assert set(values) <= set(hints), set(values) - set(hints)
    parts = {name: parse_value(hints[name], value, f"{kind.__name__}.{name}") for name, value in values.items()}
    return kind(**parts)


def parse_value(kind: Any, value: Any, where: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        kinds = [part for part in inner if part is not type(None)]
        return None if value is None else parse_value(kinds[0], value, where)
    if dataclasses.is_dataclass(kind):
        return parse(kind, value)
    if origin is Literal:
        assert value in inner, where
    elif origin is list:
        assert type(value) is list, where
        assert all(type(item) is inner[0] for item in value), where
    else:
        assert type(value) is kind, where
    return value


Pair = tuple[Path, Path]


def make_pair(folder: Path, target: Config | None = None, **drafter: Any) -> Pair:
    config = make_target(folder / "target", **{"dtype": "bfloat16", "num_hidden_layers": 4, **(target or {})})
    make_drafter(folder / "draft", config, **{"dtype": "bfloat16", **drafter})
    return folder / "target", folder / "draft"


def spec_of(target: Path, drafter: Path, name: str | None = None) -> DFlashSpec:
    return read_drafter(drafter, read_target(target).spec, name).spec


def tensors(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def same(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert found[name].tobytes() == value.tobytes(), name


# -- what is written ---------------------------------------------------------------------------------------------------


def test_yaml_parses_as_the_documented_schema(tmp_path: Path) -> None:
    target, drafter = make_pair(tmp_path, relay=True, block_size=6, taps=(0, 2), mask_token_id=77)
    limits = Limits(max_batch_size=4, max_seq_len=512, max_num_tokens=2048)
    made = export_trtllm(target, drafter, tmp_path / "out [x]: é", limits=limits)
    serve = yaml.safe_load((made.path / "trtllm-serve.yaml").read_text(encoding="utf-8"))
    model = yaml.safe_load((made.path / "triton/tensorrt_llm/1/model.yaml").read_text(encoding="utf-8"))
    triton = parse(TritonConfig, model.pop("triton_config"))
    assert (triton.max_batch_size, triton.decoupled) == (0, False)
    args = parse(LlmArgs, model)
    assert args.model == str(target)
    assert args == parse(LlmArgs, {"model": str(target), **serve, "backend": "pytorch"})
    assert (args.max_batch_size, args.max_input_len, args.max_seq_len, args.max_num_tokens) == (4, 1024, 512, 2048)
    assert args.speculative_config == DFlashDecodingConfig(
        max_draft_len=5,
        speculative_model=str(made.path / "drafter"),
        mask_token_id=77,
        target_layer_ids=[0, 2],
    )


def test_the_data_module_has_the_documented_fields() -> None:
    latest = VERSIONS["1.4"]
    assert latest.dflash == {field.name for field in dataclasses.fields(DFlashDecodingConfig)}
    assert latest.llm_args == {field.name for field in dataclasses.fields(LlmArgs)}
    assert latest.triton == {field.name for field in dataclasses.fields(TritonConfig)}
    with pytest.raises(UserError, match=r"1\.4 has no 'tree_width'; allowed: acceptance_rate_threshold, "):
        latest.checked("dflash", {"tree_width": 3})


def test_the_drafter_reads_back_and_what_is_apart_makes_it_whole(tmp_path: Path) -> None:
    """Tensors to the bit; with those of relay/ and head/ and their config keys, the drafter is the old one."""
    target, drafter = make_pair(tmp_path, relay=True, domino={"pure_draft_prefix_len": 2}, relay_start="at_rejection")
    made = export_trtllm(target, drafter, tmp_path / "out")
    before, parts = tensors(drafter), [tensors(made.path / part) for part in ("drafter", "relay", "head")]
    same({name: value for part in parts for name, value in part.items()}, before)
    assert [len(part) for part in parts[1:]] == [6, 4]
    whole = spec_of(target, drafter)
    plain = spec_of(target, made.path / "drafter", whole.name)
    assert plain == dataclasses.replace(whole, relay=None, head=None)
    restored = made.path / "drafter"
    save_file({name: value for part in parts for name, value in part.items()}, restored / "model.safetensors")
    config, relay, head = (json.loads((made.path / part / "config.json").read_text()) for part in exporting.OWN[:3])
    edit_config(restored, **relay, dflash_config={**config["dflash_config"], **head["dflash_config"]})
    assert spec_of(target, restored) == whole


def test_what_is_apart_is_said_in_notes_and_readme(tmp_path: Path) -> None:
    made = export_trtllm(*make_pair(tmp_path, relay=True), tmp_path / "out")
    assert made.notes == ("relay/: TensorRT-LLM has no relay; DFlash there is what dflow-norelay is here",)
    readme = (made.path / "README.md").read_text(encoding="utf-8")
    assert made.notes[0] in readme
    assert f"trtllm-serve {tmp_path / 'target'} --config {made.path}/trtllm-serve.yaml" in readme
    assert "--strategy dflow-norelay" in readme
    assert set(made.files) == {str(path.relative_to(made.path)) for path in made.path.rglob("*") if path.is_file()}


def test_a_plain_drafter_has_nothing_apart(tmp_path: Path) -> None:
    made = export_trtllm(*make_pair(tmp_path), tmp_path / "out")
    assert made.notes == ()
    assert sorted(path.name for path in made.path.iterdir()) == ["README.md", "drafter", "triton", "trtllm-serve.yaml"]


def test_a_head_is_said_to_be_missing_there(tmp_path: Path) -> None:
    made = export_trtllm(*make_pair(tmp_path, domino={}), tmp_path / "out")
    assert made.notes == ("head/: TensorRT-LLM's DFlash has no Domino head; it drafts there from the base logits",)
    assert "tokens are comparable, not drafts" in (made.path / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("layout", [{"layout": 4}, {"layout": 5}, {"top_level": True}, {"speculators": True}])
def test_every_layout_becomes_the_one_that_is_read_there(tmp_path: Path, layout: Config) -> None:
    """block_size at the top, mask and taps inside dflash_config, sizes at the top, and a model_type to go by."""
    target, drafter = make_pair(tmp_path, block_size=6, taps=(0, 1), **layout)
    made = export_trtllm(target, drafter, tmp_path / "out")
    config = json.loads((made.path / "drafter" / "config.json").read_text())
    assert config["block_size"] == 6
    assert config["dflash_config"] == {"mask_token_id": 255, "target_layer_ids": [0, 1]}
    assert (config["model_type"], config["hidden_size"]) == ("qwen3", 64)
    assert config["max_position_embeddings"] == 512
    found, wanted = spec_of(target, made.path / "drafter"), spec_of(target, drafter)
    assert found == dataclasses.replace(wanted, architecture="DFlashDraftModel")


ROPES: dict[str, Config | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0},
    "yarn, untruncated": {"rope_type": "yarn", "factor": 2.0, "truncate": False, "attention_factor": 1.5},
}


@pytest.mark.parametrize("rope", ROPES)
def test_transformers_reads_the_same_rotary_embedding(tmp_path: Path, rope: str) -> None:
    from transformers import AutoConfig

    target, drafter = make_pair(tmp_path, rope=ROPES[rope], theta=5e4)
    made = export_trtllm(target, drafter, tmp_path / "out")
    assert spec_of(target, made.path / "drafter").stack.rope == spec_of(target, drafter).stack.rope
    found, wanted = (AutoConfig.from_pretrained(folder) for folder in (made.path / "drafter", drafter))
    for key, value in wanted.rope_parameters.items():
        assert found.rope_parameters[key] == value, key


def test_windows_are_written_layer_by_layer(tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    target, drafter = make_pair(tmp_path, **window)
    made = export_trtllm(target, drafter, tmp_path / "out")
    config = json.loads((made.path / "drafter" / "config.json").read_text())
    assert config["layer_types"] == ["full_attention", "sliding_attention"]
    assert (config["use_sliding_window"], config["sliding_window"]) == (True, 24)
    assert spec_of(target, made.path / "drafter").stack == spec_of(target, drafter).stack


def test_an_embedding_and_its_drafter_have_one_dtype(tmp_path: Path) -> None:
    """float32 does not run there: the target is loaded in bfloat16 then, and the drafter written so."""
    for stored, target, wanted, notes in (
        ("float32", "float32", "bfloat16", 2),
        ("float32", "float16", "float16", 2),
        ("bfloat16", "float16", "float16", 2),
        ("bfloat16", "bfloat16", "bfloat16", 0),
    ):
        folder = tmp_path / f"{stored}-{target}"
        pair = make_pair(folder, {"dtype": target}, dtype=stored)
        made = export_trtllm(*pair, folder / "out")
        cast = {name: value.astype(DTYPES[wanted]) for name, value in tensors(pair[1]).items()}
        same(tensors(made.path / "drafter"), cast)
        assert json.loads((made.path / "drafter" / "config.json").read_text())["torch_dtype"] == wanted
        serve = yaml.safe_load((made.path / "trtllm-serve.yaml").read_text())
        assert serve.get("dtype") == (None if target == wanted else wanted)
        assert len(made.notes) == notes, made.notes
        assert any("overflow" in note for note in made.notes) == (wanted == "float16")


def test_a_dtype_may_be_chosen_of_half_precision(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    made = export_trtllm(*pair, tmp_path / "out", dtype="float16")
    assert {value.dtype for value in tensors(made.path / "drafter").values()} == {np.dtype("f2")}
    assert yaml.safe_load((made.path / "trtllm-serve.yaml").read_text())["dtype"] == "float16"
    with pytest.raises(UserError, match=r"--dtype: float32; allowed: bfloat16, float16"):
        export_trtllm(*pair, tmp_path / "other", dtype="float32")


def test_memory_is_a_chunk_however_large_the_tensor(tmp_path: Path) -> None:
    target, drafter = make_pair(
        tmp_path, {"hidden_size": 512, "num_hidden_layers": 2}, taps=(0,), intermediate_size=65536, num_hidden_layers=1
    )
    tracemalloc.start()
    try:
        export_trtllm(target, drafter, tmp_path / "out", dtype="float16")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert max(value.nbytes for value in tensors(drafter).values()) == 65536 * 512 * 2
    assert peak < 48_000_000, peak


def test_sharded_drafters_become_one_file(tmp_path: Path) -> None:
    target, drafter = make_pair(tmp_path, shards=3)
    made = export_trtllm(target, drafter, tmp_path / "out")
    shards = [load_file(path) for path in sorted(drafter.glob("model-*.safetensors"))]
    same(tensors(made.path / "drafter"), {name: value for shard in shards for name, value in shard.items()})


def test_yaml_text_is_quoted() -> None:
    values = {"a": {"b": ["x: y", 'q"', "é"], "c": None}, "d": "- no", "e": True, "f": "1.0"}
    assert yaml.safe_load(to_yaml(values)) == values


# -- what is refused ---------------------------------------------------------------------------------------------------


def refusal(target: Path, drafter: Path, output: Path, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        export_trtllm(target, drafter, output, **settings)
    assert not output.exists()
    message = str(caught.value)
    assert "\n" not in message
    return message


MISREAD: dict[str, tuple[Config, str]] = {
    "taps that sorting permutes": (
        {"taps": (2, 0, 1)},
        "drafter: target_layer_ids [2, 0, 1]; allowed for TensorRT-LLM: ascending ids, as [0, 1, 2]; it sorts them, "
        "and fc would read the layers in another order; train with ascending taps",
    ),
    "shifted slots": (
        {"domino": {"shift_label": True}},
        "drafter: shift_label is true; allowed for TensorRT-LLM: false; its DFlash drafts from slots 1 on; "
        "use this drafter here",
    ),
    "DFlash 2": (
        {"dflash2": {}},
        "drafter: architectures is ['DFlash2DraftModel']; allowed for TensorRT-LLM: DFlash, Domino and DFlow drafters; "
        "its DFlash has neither convolutions nor a selector; use this drafter here",
    ),
    "an embedding scale": (
        {"input_embedding_scale": 8.0},
        "drafter: input_embedding_scale 8; allowed for TensorRT-LLM: 1; it does not scale embeddings; "
        "use this drafter here",
    ),
    "causal without a window": (
        {"is_causal": True},
        "drafter: layer 0 is causal without a window; allowed for TensorRT-LLM: causal with a window, else not; "
        "a window alone decides it there; use this drafter here",
    ),
    "a window that looks ahead": (
        {"is_causal": False, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        "drafter: layer 1 is not causal, with a window; allowed for TensorRT-LLM: causal with a window, else not; "
        "a window alone decides it there; use this drafter here",
    ),
}


@pytest.mark.parametrize("case", MISREAD)
def test_what_would_be_read_as_another_drafter_is_refused(tmp_path: Path, case: str) -> None:
    settings, message = MISREAD[case]
    assert refusal(*make_pair(tmp_path, **settings), tmp_path / "out") == message


def test_what_keeps_the_order_of_logits_is_left_out_and_said(tmp_path: Path) -> None:
    target, drafter = make_pair(tmp_path, output_multiplier=0.5, final_logit_softcapping=30.0)
    made = export_trtllm(target, drafter, tmp_path / "out")
    assert "output_multiplier and softcapping are left out" in made.notes[0]
    assert "final_logit_softcapping" not in (made.path / "drafter" / "config.json").read_text()


def test_versions_without_dflash_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    absent = refusal(*pair, tmp_path / "out", version="1.2.1")
    assert absent == "--trtllm-version: 1.2.1 has no DFlash, it came with 1.3; allowed: 1.4"
    for name in ("1.2", "1.40", "2.0", ""):
        assert refusal(*pair, tmp_path / "out", version=name).endswith("is not known; allowed: 1.4")
    assert find_version("1.4.0rc4") is VERSIONS["1.4"]


def test_limits_are_positive(tmp_path: Path) -> None:
    message = refusal(*make_pair(tmp_path), tmp_path / "out", limits=Limits(max_seq_len=0))
    assert message == "--max-seq-len: 0; allowed: at least 1"


def test_a_folder_that_is_no_export_is_left_alone(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years")
    (tmp_path / "file").write_text("x")
    for output, reason in (
        (tmp_path / "mine", r"holds 'thesis\.tex', no export's; choose another folder$"),
        (tmp_path / "file", "is a file; name a folder$"),
        (pair[1], "holds the checkpoint .*draft; choose another folder$"),
        (tmp_path, "holds the checkpoint .*target; choose another folder$"),
    ):
        with pytest.raises(UserError, match=reason):
            export_trtllm(*pair, output, force=True)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years"
    assert spec_of(*pair).name == "dflash"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_export_is_replaced_on_request_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = make_pair(tmp_path, relay=True)
    make_drafter(tmp_path / "plain", json.loads((target / "config.json").read_text()), dtype="bfloat16")
    first = export_trtllm(target, drafter, tmp_path / "out")
    before = contents(first.path)
    with pytest.raises(UserError, match="holds an export already; give --force to replace it, or another folder"):
        export_trtllm(target, tmp_path / "plain", tmp_path / "out")

    def fails(*_: Any) -> str:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(exporting, "to_yaml", fails)
        with pytest.raises(OSError, match="No space left"):
            export_trtllm(target, tmp_path / "plain", tmp_path / "out", force=True)
    assert contents(tmp_path / "out") == before
    second: Export = export_trtllm(target, tmp_path / "plain", tmp_path / "out", force=True)
    assert "relay/config.json" not in second.files
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "out", "plain", "target"]


def test_a_pair_that_is_no_pair_is_refused_by_the_intake(tmp_path: Path) -> None:
    target, drafter = make_pair(tmp_path)
    edit_config(drafter, num_target_layers=9, dflash_config=DELETE, block_size=8, mask_token_id=1, target_layer_ids=[0])
    assert "num_target_layers is 9" in refusal(target, drafter, tmp_path / "out")


# -- the migration table -----------------------------------------------------------------------------------------------

DOC = Path(dflow_trt.__file__).resolve().parents[1] / "docs" / "trtllm.md"


def own_names() -> list[str]:
    """What stands in backquotes in the second column of every table, and what else names our command."""
    lines = [line for line in DOC.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    columns = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if not set(line) <= set("| -")]
    assert all(len(row) == 3 for row in columns), "three columns"
    own = [name for row in columns for name in re.findall(r"`([^`]+)`", row[1])]
    return own + [name for row in columns for name in re.findall(r"`(dflow-trt [^`]+)`", row[2])]


@pytest.mark.skipif(not DOC.is_file(), reason="docs are part of the checkout, not of the installed package")
def test_every_flag_and_name_of_the_migration_table_exists() -> None:
    names = own_names()
    assert len(names) > 50
    for name in names:
        if name.startswith("dflow-trt "):
            _, command, *flags = name.split()
            options = {flag for param in cli.commands[command].params for flag in param.opts}
            assert set(flags) <= options, name
        else:
            owner, *rest = name.removeprefix("dflow_trt.").split(".")
            found = getattr(dflow_trt, owner)
            for attribute in rest:
                assert attribute in attributes(found), name


def attributes(owner: type) -> set[str]:
    """Attributes, fields, and the arguments of the constructor."""
    return {*dir(owner), *get_type_hints(owner), *owner.__init__.__code__.co_varnames}


def test_every_command_of_the_document_exists() -> None:
    text = DOC.read_text(encoding="utf-8")
    block = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    lines = [line.split() for line in block.splitlines() if line.startswith("dflow-trt ")]
    assert lines
    for _, command, *words in lines:
        options = {
            flag for param in cli.commands[command].params if isinstance(param, click.Option) for flag in param.opts
        }
        assert {word for word in words if word.startswith("--")} <= options
