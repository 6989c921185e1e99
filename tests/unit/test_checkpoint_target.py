"""Target folders: what is accepted and what it means, and what is refused, by key and value."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tiny import DELETE, edit_config, edit_tensors, make_target, make_tokenizer

from dflow_trt.checkpoint.names import target_tensors
from dflow_trt.checkpoint.target import read_target
from dflow_trt.errors import UserError
from dflow_trt.spec import RopeSpec, target_from_json, to_json

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def test_the_default_folder(tmp_path: Path) -> None:
    make_target(tmp_path)
    target = read_target(tmp_path)
    spec, stack = target.spec, target.spec.stack
    assert (spec.vocab_size, spec.live_vocab, spec.max_position, spec.tied_head) == (256, 256, 512, False)
    assert (spec.eos_ids, spec.bos_id, spec.pad_id) == ((1,), 0, None)
    assert (spec.architecture, spec.checkpoint_dtype, spec.licence) == ("Qwen3ForCausalLM", "float32", None)
    assert (stack.hidden_size, stack.num_layers, stack.num_heads, stack.num_kv_heads) == (64, 3, 4, 2)
    assert (stack.head_dim, stack.intermediate_size, stack.rms_norm_eps) == (32, 96, 1e-6)
    assert (stack.windows, stack.causal) == ((None,) * 3, (True,) * 3)
    assert stack.rope == RopeSpec("default", 10000.0)
    assert (target.path, target.tokenizer_files) == (tmp_path, ())
    assert {name: target.weights.shape(name) for name in target.weights.names()} == target_tensors(spec)
    assert target_from_json(json.loads(json.dumps(to_json(spec)))) == spec


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shards", [1, 2])
def test_the_dtype_is_that_of_the_tensors(tmp_path: Path, dtype: str, shards: int) -> None:
    make_target(tmp_path, dtype=dtype, shards=shards)
    edit_config(tmp_path, dtype="float16")
    target = read_target(tmp_path)
    assert target.spec.checkpoint_dtype == dtype
    assert target.weights.read("lm_head.weight").dtype.name == dtype


@pytest.mark.parametrize("rope", [None, {"rope_type": "linear", "factor": 2.0}, YARN])
def test_layouts_4_and_5_give_the_same_model(tmp_path: Path, rope: dict[str, Any] | None) -> None:
    make_target(tmp_path / "4", layout=4, rope=rope, dtype="bfloat16")
    make_target(tmp_path / "5", layout=5, rope=rope, dtype="bfloat16")
    assert read_target(tmp_path / "4").spec == read_target(tmp_path / "5").spec


def test_the_older_name_of_rope_type(tmp_path: Path) -> None:
    make_target(tmp_path, layout=4, rope={"type": "linear", "factor": 2})
    assert read_target(tmp_path).spec.stack.rope == RopeSpec("linear", 10000.0, 2.0)


def test_yarn_fields(tmp_path: Path) -> None:
    make_target(tmp_path, rope={**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False})
    rope = read_target(tmp_path).spec.stack.rope
    assert rope == RopeSpec("yarn", 10000.0, 4.0, 128, 16.0, 2.0, 0.1 * math.log(4.0) + 1.0, False)
    edit_config(tmp_path, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4})
    assert read_target(tmp_path).spec.stack.rope.original_max_position == 512
    edit_config(tmp_path, original_max_position_embeddings=64)
    assert read_target(tmp_path).spec.stack.rope.original_max_position == 64


def test_a_tied_head_has_no_lm_head(tmp_path: Path) -> None:
    make_target(tmp_path, tied=True)
    target = read_target(tmp_path)
    assert target.spec.tied_head
    assert "lm_head.weight" not in set(target.weights.names())


def test_a_tied_head_may_be_an_identical_copy(tmp_path: Path) -> None:
    make_target(tmp_path, tied=True, dtype="bfloat16")
    table = read_target(tmp_path).weights.read("model.embed_tokens.weight")
    edit_tensors(tmp_path, {"lm_head.weight": table.copy()})
    assert "lm_head.weight" not in set(read_target(tmp_path).weights.names())


def test_attention_bias_adds_its_tensors(tmp_path: Path) -> None:
    make_target(tmp_path, attention_bias=True)
    target = read_target(tmp_path)
    assert target.spec.stack.attention_bias
    assert target.weights.shape("model.layers.2.self_attn.k_proj.bias") == (64,)


SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 16}


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({"sliding_window": 16, "max_window_layers": 0}, (None, None, None)),
        ({**SLIDING, "max_window_layers": 1}, (None, 16, 16)),
        ({**SLIDING, "max_window_layers": 9}, (None, None, None)),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (None, None, None)),
        (
            {
                **SLIDING,
                "max_window_layers": 0,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            },
            (16, None, None),
        ),
    ],
)
def test_windows_follow_the_rule_of_transformers(
    tmp_path: Path, keys: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    make_target(tmp_path, **keys)
    assert read_target(tmp_path).spec.stack.windows == windows


def test_windows_equal_those_of_the_transformers_config(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference is transformers' Qwen3Config")
    for first in range(4):
        make_target(tmp_path, **SLIDING, max_window_layers=first)
        config = transformers.Qwen3Config.from_pretrained(tmp_path)
        theirs = [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]
        assert list(read_target(tmp_path).spec.stack.windows) == theirs


def test_a_folder_saved_by_transformers_is_read(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="transformers needs it to save a model")
    transformers = pytest.importorskip("transformers", reason="the folder is written by it")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.Qwen3Config(
        vocab_size=50, head_dim=16, intermediate_size=24, tie_word_embeddings=True, eos_token_id=3, **sizes
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path, max_shard_size="10KB")
    target = read_target(tmp_path)
    assert (target.spec.tied_head, target.spec.eos_ids, target.spec.stack.num_layers) == (True, (3,), 2)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1


def test_a_padded_vocabulary_ends_at_the_highest_token(tmp_path: Path) -> None:
    make_target(tmp_path, tokenizer=100)
    assert read_target(tmp_path).spec.live_vocab == 100
    make_tokenizer(tmp_path, 100, added=["<|end|>"])
    target = read_target(tmp_path)
    assert (target.spec.live_vocab, target.spec.vocab_size) == (101, 256)
    assert target.tokenizer_files == (tmp_path / "tokenizer.json",)


def test_eos_lists_are_joined(tmp_path: Path) -> None:
    make_target(tmp_path, eos=[7, 1, 9], pad_token_id=3)
    target = read_target(tmp_path)
    assert (target.spec.eos_ids, target.spec.pad_id) == ((1, 7, 9), 3)
    assert target.tokenizer_files == (tmp_path / "generation_config.json",)
    edit_config(tmp_path, eos_token_id=DELETE)
    assert read_target(tmp_path).spec.eos_ids == (7, 1, 9)


@pytest.mark.parametrize(
    ("readme", "expected"),
    [
        ("---\nlanguage: en\nlicense: apache-2.0\n---\n# Model\n", "apache-2.0"),
        ("---\nlicense: 'mit' # free\n---\n", "mit"),
        ("---\nlicense:\n  - cc-by-4.0\n---\n", "cc-by-4.0"),
        ("# Model\nlicense: none of the front matter\n", "LICENSE.txt"),
        ("---\ntags: x\n---\nlicense: later\n", "LICENSE.txt"),
    ],
)
def test_the_licence(tmp_path: Path, readme: str, expected: str) -> None:
    make_target(tmp_path)
    (tmp_path / "LICENSE.txt").write_text("terms")
    assert read_target(tmp_path).spec.licence == "LICENSE.txt"
    (tmp_path / "README.md").write_text(readme)
    assert read_target(tmp_path).spec.licence == expected


def test_the_fingerprint_follows_content_and_not_place(tmp_path: Path) -> None:
    make_target(tmp_path / "a")
    make_target(tmp_path / "b")
    first = read_target(tmp_path / "a").fingerprint
    assert (len(first), read_target(tmp_path / "b").fingerprint) == (64, first)
    make_target(tmp_path / "c", seed=1)
    make_target(tmp_path / "d", dtype="float16")
    make_target(tmp_path / "e", eos=[2])
    edit_config(tmp_path / "b", rms_norm_eps=1e-5)
    found = {first} | {read_target(tmp_path / name).fingerprint for name in "bcde"}
    assert len(found) == 5


def _config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, **changes)


def _tensors(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, {name.replace("__", "."): value for name, value in changes.items()})


def _text(name: str, text: str | bytes) -> Callable[[Path], None]:
    data = text.encode() if isinstance(text, str) else text

    def apply(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return apply


def _rope(**keys: Any) -> Callable[[Path], None]:
    return _config(rope_parameters={"rope_theta": 1e4, **keys})


def _tied_but_different(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=True)


def _eos_beyond_the_tokenizer(folder: Path) -> None:
    make_tokenizer(folder, 100)
    edit_config(folder, eos_token_id=100)


def _bin_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _replaced(**keys: str) -> Callable[[Path], None]:
    """Change the text of config.json, for numbers that JSON cannot write."""

    def apply(folder: Path) -> None:
        edit_config(folder, **dict.fromkeys(keys, "@@"))
        text = (folder / "config.json").read_text()
        (folder / "config.json").write_text(text.replace('"@@"', next(iter(keys.values()))))

    return apply


EMBED = "model.embed_tokens.weight"
REFUSED: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "no config": (
        lambda f: (f / "config.json").unlink(),
        ("config.json is missing", "Hugging Face"),
    ),
    "unreadable JSON": (_text("config.json", "{"), ("config.json: the content is", "one JSON object")),
    "JSON list": (_text("config.json", "[1]"), ("config.json: the content is [1]", "one JSON object")),
    "not UTF-8": (_text("config.json", b"\xff"), ("config.json: the content is", "one JSON object")),
    "deep JSON": (_text("config.json", "[" * 100_000), ("config.json: the content is", "one JSON object")),
    "NaN": (_replaced(rms_norm_eps="NaN"), ("the number NaN", "one JSON object")),
    "Infinity": (_replaced(rms_norm_eps="Infinity"), ("the number Infinity", "one JSON object")),
    "overflow": (_replaced(rms_norm_eps="1e999"), ("rms_norm_eps is inf", "a finite number above 0")),
    "huge integer": (
        _replaced(rms_norm_eps="1" + "0" * 400),
        ("rms_norm_eps is 1000", "a finite number above 0"),
    ),
    "zero eps": (_config(rms_norm_eps=0), ("rms_norm_eps is 0", "a finite number above 0")),
    "string for integer": (
        _config(hidden_size="64"),
        ("hidden_size is '64'", "an integer from 1 to 2147483647"),
    ),
    "bool for integer": (
        _config(num_hidden_layers=True),
        ("num_hidden_layers is True", "an integer from 1 to 1024"),
    ),
    "float for integer": (_config(head_dim=32.0), ("head_dim is 32.0", "an integer from 1")),
    "zero": (_config(intermediate_size=0), ("intermediate_size is 0", "an integer from 1")),
    "too many layers": (
        _config(num_hidden_layers=10**9),
        ("num_hidden_layers is 1000000000", "from 1 to 1024"),
    ),
    "string for bool": (_config(attention_bias="no"), ("attention_bias is 'no'", "true or false")),
    "integer for bool": (_config(tie_word_embeddings=0), ("tie_word_embeddings is 0", "true or false")),
    "missing head_dim": (_config(head_dim=DELETE), ("head_dim is missing", "an integer from 1")),
    "missing vocab_size": (_config(vocab_size=DELETE), ("vocab_size is missing", "an integer from 1")),
    "missing position limit": (
        _config(max_position_embeddings=None),
        ("max_position_embeddings is missing",),
    ),
    "architecture": (
        _config(architectures=["Qwen3MoeForCausalLM"]),
        ("architectures is ['Qwen3MoeForCausalLM']", "['Qwen3ForCausalLM']"),
    ),
    "no architecture": (_config(architectures=DELETE), ("architectures is missing", "['Qwen3ForCausalLM']")),
    "model type": (_config(model_type="llama"), ("model_type is 'llama'", "'qwen3'")),
    "MoE": (_config(num_experts=8), ("num_experts is 8", "allowed: absent", "dense")),
    "quantised": (
        _config(quantization_config={"quant_method": "fp8"}),
        ("quantization_config.quant_method is 'fp8'", "allowed: 'modelopt'", "unquantised"),
    ),
    "activation": (_config(hidden_act="gelu"), ("hidden_act is 'gelu'", "'silu'")),
    "no qk norm": (_config(use_qk_norm=False), ("use_qk_norm is False", "true or absent")),
    "dtype name": (_config(dtype="float8"), ("dtype is 'float8'", "'float32' or 'float16' or 'bfloat16'")),
    "two dtypes": (
        _config(torch_dtype="float16"),
        ("torch_dtype is 'float16'", "the value of dtype, 'float32'"),
    ),
    "heads do not divide": (
        _config(num_key_value_heads=3),
        ("num_key_value_heads is 3", "a divisor of num_attention_heads, 4"),
    ),
    "odd head_dim": (_config(head_dim=31), ("head_dim is 31", "an even number")),
    "rope dynamic": (
        _rope(rope_type="dynamic", factor=2.0),
        ("rope_parameters.rope_type is 'dynamic'", "'default' or 'linear' or 'yarn'"),
    ),
    "rope longrope": (
        _rope(rope_type="longrope"),
        ("rope_type is 'longrope'", "'default' or 'linear' or 'yarn'"),
    ),
    "rope llama3": (_rope(rope_type="llama3"), ("rope_type is 'llama3'", "'default' or 'linear' or 'yarn'")),
    "rope type not text": (
        _rope(rope_type=["yarn"]),
        ("rope_type is ['yarn']", "'default' or 'linear' or 'yarn'"),
    ),
    "rope two types": (
        _rope(rope_type="default", type="mrope"),
        ("rope_parameters.type is 'mrope'", "'default'"),
    ),
    "rope partial": (_config(partial_rotary_factor=0.5), ("partial_rotary_factor is 0.5", "absent or 1.0")),
    "rope partial inside": (
        _rope(rope_type="default", partial_rotary_factor=0.25),
        ("rope_parameters.partial_rotary_factor is 0.25", "absent or 1.0"),
    ),
    "rope by layer type": (
        _rope(full_attention={"rope_type": "default"}),
        ("rope_parameters.full_attention is {'rope_type': 'default'}", "allowed: absent"),
    ),
    "rope unknown key": (
        _rope(rope_type="default", mrope_section=[1]),
        ("rope_parameters.mrope_section is [1]", "absent for rope_type 'default'"),
    ),
    "rope no factor": (_rope(rope_type="linear"), ("rope_parameters.factor is missing", "of at least 1")),
    "rope small factor": (
        _rope(rope_type="yarn", factor=0.5),
        ("factor is 0.5", "a finite number of at least 1"),
    ),
    "rope attention_factor": (
        _rope(rope_type="yarn", factor=2.0, attention_factor=0),
        ("rope_parameters.attention_factor is 0", "a finite number above 0"),
    ),
    "rope betas": (
        _rope(rope_type="yarn", factor=2.0, beta_fast=1, beta_slow=2),
        ("rope_parameters.beta_slow is 2", "at most beta_fast, 1"),
    ),
    "rope truncate": (_rope(rope_type="yarn", factor=2.0, truncate=1), ("truncate is 1", "true or false")),
    "rope original length": (
        _rope(rope_type="yarn", factor=2.0, original_max_position_embeddings="128"),
        ("rope_parameters.original_max_position_embeddings is '128'", "an integer from 1"),
    ),
    "no theta": (_config(rope_parameters=None), ("rope_theta is missing", "a finite number above 1")),
    "two thetas": (
        _config(rope_theta=5e5),
        ("rope_theta is 500000.0", "rope_parameters.rope_theta, 10000.0"),
    ),
    "two ropes": (
        _config(rope_scaling={"rope_type": "linear", "factor": 2.0}),
        ("rope_scaling is {'rope_type': 'linear', 'factor': 2.0}", "absent where rope_parameters is given"),
    ),
    "rope not an object": (_config(rope_parameters=[1]), ("rope_parameters is [1]", "a JSON object")),
    "layer types length": (
        _config(layer_types=["full_attention"]),
        ("layer_types is ['full_attention']", "a list of 3 of 'full_attention' or 'sliding_attention'"),
    ),
    "layer type": (
        _config(layer_types=["full_attention", "linear_attention", "full_attention"]),
        ("'linear_attention'", "a list of 3 of 'full_attention' or 'sliding_attention'"),
    ),
    "sliding layer without window": (
        _config(layer_types=["sliding_attention"] * 3, sliding_window=8),
        ("sliding_window is 8", "together with use_sliding_window true"),
    ),
    "no max_window_layers": (
        _config(use_sliding_window=True, sliding_window=8, max_window_layers=DELETE),
        ("max_window_layers is missing", "an integer from 0"),
    ),
    "window zero": (
        _config(use_sliding_window=True, sliding_window=0),
        ("sliding_window is 0", "an integer from 1"),
    ),
    "eos outside": (
        _config(eos_token_id=256),
        ("eos_token_id is 256", "from 0 to 255, inside the vocabulary"),
    ),
    "eos list": (_config(eos_token_id=[1, -1]), ("eos_token_id is [1, -1]", "inside the vocabulary")),
    "eos bool": (_config(eos_token_id=True), ("eos_token_id is True", "an id, or a list of ids")),
    "eos of generation": (
        _text("generation_config.json", '{"eos_token_id": [300]}'),
        ("generation_config.json: eos_token_id is [300]", "from 0 to 255"),
    ),
    "eos beyond the tokenizer": (
        _eos_beyond_the_tokenizer,
        ("eos_token_id is 100", "from 0 to 99, inside the vocabulary"),
    ),
    "pad outside": (_config(pad_token_id=256), ("pad_token_id is 256", "an integer from 0 to 255")),
    "tokenizer too large": (
        lambda folder: make_tokenizer(folder, 257),
        ("tokenizer.json: the highest token id is 256", "an id from 0 to 255, as vocab_size says"),
    ),
    "tokenizer unreadable": (
        _text("tokenizer.json", "{}"),
        ("tokenizer.json: the content is", "tokenizers JSON"),
    ),
    "tied but different": (
        _tied_but_different,
        ("tie_word_embeddings is True, but lm_head.weight differs", "False, or an identical copy"),
    ),
    "untied without head": (
        _tensors(lm_head__weight=DELETE),
        ("tie_word_embeddings is False, but lm_head.weight is missing", "True, or lm_head.weight"),
    ),
    "missing tensor": (
        _tensors(model__layers__1__mlp__up_proj__weight=DELETE),
        ("model.layers.1.mlp.up_proj.weight is missing", "a tensor of shape [96, 64]"),
    ),
    "no embedding": (_tensors(**{EMBED: DELETE}), (f"{EMBED} is missing", "a tensor of this name")),
    "fewer layers": (
        _config(num_hidden_layers=4),
        ("model.layers.3.self_attn.q_proj.weight is missing (and 10 more)",),
    ),
    "left-over tensor": (
        _tensors(model__extra=np.zeros(1, np.float32)),
        ("model.extra is left over", "the tensors of config.json's model"),
    ),
    "left-over bias": (
        _tensors(model__layers__0__self_attn__q_proj__bias=np.zeros(128, np.float32)),
        ("model.layers.0.self_attn.q_proj.bias is left over", "the tensors of config.json's model"),
    ),
    "more layers": (
        _config(num_hidden_layers=2),
        ("model.layers.2.input_layernorm.weight is left over (and 10 more)",),
    ),
    "shape": (
        _config(intermediate_size=95),
        ("model.layers.0.mlp.gate_proj.weight is of shape [96, 64]", "[95, 64]"),
    ),
    "vocabulary": (
        _config(vocab_size=257),
        (f"{EMBED} is of shape [256, 64]", "[257, 64], as config.json says"),
    ),
    "int tensor": (
        _tensors(model__norm__weight=np.zeros(64, np.int32)),
        ("model.norm.weight is of dtype I32", "F32 or F16 or BF16"),
    ),
    "F8 tensor": (
        _tensors(model__norm__weight=np.zeros(64, ml_dtypes.float8_e4m3fn)),
        ("model.norm.weight is of dtype F8_E4M3", "F32 or F16 or BF16"),
    ),
    "bin only": (
        _bin_only,
        ("model.safetensors is missing (the folder has pytorch_model.bin)", "convert the weights"),
    ),
    "corrupt file": (_text("model.safetensors", "garbage"), ("model.safetensors: the header length is",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_key_value_and_allowed_values(tmp_path: Path, name: str) -> None:
    damage, words = REFUSED[name]
    make_target(tmp_path)
    read_target(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError) as caught:
        read_target(tmp_path)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.startswith(str(tmp_path))
    assert "; allowed: " in message
    assert [word for word in words if word not in message] == [], message


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        read_target(tmp_path / "absent")


# VmHWM, not ru_maxrss: the latter starts at the peak of the process that forked this one.
READ_ALL = """
import sys
from dflow_trt.checkpoint.target import read_target

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

before = peak()
weights = read_target(sys.argv[1]).weights
for start in range(0, 400_000, 10_000):
    weights.read("model.embed_tokens.weight", slice(start, start + 10_000))
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak resident memory as Linux reports it")
def test_reading_keeps_no_shard_resident(tmp_path: Path) -> None:
    make_target(tmp_path, vocab_size=400_000, tied=True)
    size = (tmp_path / "model.safetensors").stat().st_size
    run = subprocess.run([sys.executable, "-c", READ_ALL, tmp_path], check=True, capture_output=True, text=True)
    shutil.rmtree(tmp_path)
    assert 0 < int(run.stdout) < size / 4
