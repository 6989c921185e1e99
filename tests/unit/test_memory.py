"""The memory plan: from specs alone as from a bundle, against real data files and the buffers of the CPU runtime."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tiny import make_drafter, make_eagle3, make_target

from dflow_trt import contract as c
from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.bundle import Bundle, FileEntry
from dflow_trt.checkpoint.names import drafter_tensors, eagle3_tensors, target_tensors
from dflow_trt.errors import UserError
from dflow_trt.graphs.store import ALIGNMENT
from dflow_trt.memory import drafter_memory, plan_memory, unbuilt
from dflow_trt.plan import Plan, make_plan, parse_size
from dflow_trt.runtime.ort import OrtRuntime
from dflow_trt.spec import DFlashSpec, DrafterSpec, DraftModelSpec, DType, Eagle3Spec

Config = dict[str, Any]
LIMITS: Config = {"max_batch_size": 4, "max_input_len": 60, "max_seq_len": 96, "max_num_tokens": 48}
FLASH: Config = {"block_size": 5, "taps": (1, 0), "seed": 3}
FLOW: Config = {"block_size": 8, "relay": True}
SMALL: Config = {"hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 1, "seed": 5}
TIED: Config = {"hidden_size": 96, "num_hidden_layers": 1, "tied": True, "seed": 6}
LOOKUP: Config = {"drafts": 9}
MODELS = ("small", "tied")
CHAIN: Config = {"seed": 7}
WIDE_CHAIN: Config = {
    **dict.fromkeys(("own_embedding", "norm_before_fc", "fc_norm", "attention_bias", "qk_norm"), True),
    "seed": 8,
}
CHAINS = ("chain", "wide")
# target settings, drafters (of MODELS as targets are made, of CHAINS as EAGLE-3, ngram by its settings), build options
CASES: dict[str, tuple[Config, dict[str, Config], Config]] = {
    "defaults": ({}, {"flow": FLOW}, {}),
    "no drafter": ({}, {}, {}),
    "two drafters": ({"tied": True}, {"flow": FLOW, "flash": FLASH}, {"draft_logits": True}),
    "float drafters": ({"tied": True}, {"flow": FLOW, "flash": FLASH}, {"draft_weights": "float"}),
    "int8 target": ({"tied": True}, {"flow": FLOW}, {"target_weights": "int8"}),
    "dead ids": ({"tokenizer": 250, "vocab_size": 300}, {"flow": FLOW}, {}),
    "biases, bfloat16": ({"attention_bias": True, "dtype": "bfloat16"}, {"flash": {**FLASH, "dtype": "bfloat16"}}, {}),
    "causal heads": ({}, {"turn": {"domino": {}}, "both": {**FLOW, "domino": {"pure_draft_prefix_len": 1}}}, {}),
    "convolutions and selectors": (
        {},
        {"second": {"dflash2": {}}, "both": {**FLOW, "dflash2": {"selector_rank": 40}}},
        {},
    ),
    "float convolutions, dead ids": (
        {"tokenizer": 250, "vocab_size": 300, "dtype": "bfloat16"},
        {"second": {"dflash2": {"conv_kernel_size": 5, "conv_group_size": 2}, "dtype": "bfloat16"}},
        {"draft_weights": "float"},
    ),
    "draft models": ({}, {"flow": FLOW, "small": SMALL, "tied": TIED, "ngram": LOOKUP}, {"max_num_tokens": 96}),
    "float draft models": ({}, {"small": SMALL, "tied": TIED}, {"draft_weights": "float"}),
    "draft models of dead ids": (
        {"tokenizer": 250, "vocab_size": 300},
        {"small": {**SMALL, "tokenizer": 250, "vocab_size": 400}, "tied": {**TIED, "tokenizer": 250}},
        {"draft_weights": "float", "target_weights": "int8"},
    ),
    "a bfloat16 draft model": ({}, {"tied": {**TIED, "dtype": "bfloat16"}}, {}),
    "lookup alone": ({}, {"ngram": LOOKUP}, {}),
    "chains": ({}, {"flow": FLOW, "chain": CHAIN, "wide": WIDE_CHAIN}, {"max_num_tokens": 96}),
    "float chains, dead ids": (
        {"tokenizer": 250, "vocab_size": 300, "dtype": "bfloat16"},
        {"chain": CHAIN, "wide": {**WIDE_CHAIN, "dtype": "bfloat16", "draft_vocab_size": 300, "maps": False}},
        {"draft_weights": "float", "draft_logits": True},
    ),
    "scales in the data file": ({"hidden_size": 32, "intermediate_size": 16400}, {"flow": FLOW}, {}),
}


@dataclasses.dataclass(frozen=True)
class Built:
    """A tiny bundle, its checkpoints, and the options that it was built with."""

    bundle: Bundle
    folder: Path
    drafters: tuple[str, ...]
    options: BuildOptions

    def plan(self, **given: Any) -> Plan:
        return make_plan(self.folder / "target", sources(self.folder, self.drafters), self.options, **given)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    """The cases, each built once."""
    found: dict[str, Built] = {}

    def get(name: str) -> Built:
        if name not in found:
            found[name] = build(tmp_path_factory.mktemp("pair"), *CASES[name])
        return found[name]

    return get


def sources(folder: Path, names: Iterable[str]) -> list[DrafterSource]:
    return [
        DrafterSource(Path(name), settings=LOOKUP) if name == "ngram" else DrafterSource(folder / name, name)
        for name in names
    ]


def build(folder: Path, target: Mapping[str, Any], drafters: Mapping[str, Config], options: Config) -> Built:
    config = make_target(folder / "target", **target)
    for name, keys in drafters.items():
        if name in MODELS:
            make_target(folder / name, **keys)
        elif name in CHAINS:
            make_eagle3(folder / name, config, **keys)
        elif name != "ngram":
            make_drafter(folder / name, config, **keys)
    chosen = BuildOptions(**{**LIMITS, **options})
    made = sources(folder, drafters)
    bundle = build_bundle(folder / "target", made, folder / "bundle", chosen, self_check="off")
    return Built(bundle, folder, tuple(drafters), chosen)


def data_files(bundle: Bundle) -> dict[str, int]:
    return {name: entry.size for name, entry in bundle.files.items() if name.endswith(".data")}


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_data_files_are_planned_within_a_page_a_tensor(built: Callable[[str], Built], case: str) -> None:
    bundle = built(case).bundle
    planned = unbuilt(bundle.target, {spec.name: spec for spec in bundle.specs}, bundle.build)
    wanted, found = data_files(bundle), data_files(planned)
    assert found.keys() == wanted.keys()
    shapes = [target_tensors(bundle.target), *map(tensors_of, bundle.specs)]
    tensors = {name for each in shapes for name in each}
    for name, size in wanted.items():
        assert size <= found[name] <= size + ALIGNMENT * (len(tensors) + 8), name


def tensors_of(spec: DrafterSpec) -> Mapping[str, Any]:
    """Of a drafter's checkpoint."""
    if isinstance(spec, DraftModelSpec):
        return target_tensors(spec.model)
    if isinstance(spec, Eagle3Spec):
        return eagle3_tensors(spec)
    return drafter_tensors(spec) if isinstance(spec, DFlashSpec) else {}


@pytest.mark.parametrize("keys", [FLOW, {"dflash2": {"selector_rank": 200, "conv_group_size": 1}}])
@pytest.mark.parametrize("form", ["int8", "float"])
def test_a_plan_of_a_larger_pair_is_within_a_hundredth(tmp_path: Path, keys: Config, form: str) -> None:
    wide = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 4000}
    target_form = "float" if form == "int8" else "int8"  # another one, so that no head is packed twice
    forms = {"target_weights": target_form, "draft_weights": form}
    pair = build(tmp_path, wide, {"draft": {**keys, "num_hidden_layers": 1}}, forms)
    written = sum(data_files(pair.bundle).values())
    assert written <= pair.plan().memory.weights <= 1.01 * written


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("form", ["int8", "float"])
def test_a_plan_of_a_larger_draft_model_is_within_a_hundredth(tmp_path: Path, tied: bool, form: str) -> None:
    wide = {"hidden_size": 384, "intermediate_size": 1024, "vocab_size": 4000}
    pair = build(tmp_path, {"vocab_size": 4000}, {"small": {**wide, "tied": tied}}, {"draft_weights": form})
    written = sum(data_files(pair.bundle).values())
    assert written <= pair.plan().memory.weights <= 1.01 * written
    assert plan_memory(pair.bundle).weights == written


@pytest.mark.parametrize("case", CASES)
def test_tensorrt_has_every_table_that_an_engine_reads(built: Callable[[str], Built], case: str) -> None:
    """Counted from the graphs: an initializer in the file of the tables is a copy in an engine of its own."""
    bundle = built(case).bundle
    copies = [size for path in bundle.path.glob("*.onnx") for size in table_initializers(path)]
    planned = plan_memory(as_tensorrt(bundle)).vocabulary
    assert sum(copies) <= planned <= sum(copies) + ALIGNMENT * len(copies)
    assert planned >= data_files(bundle)[c.VOCAB_DATA]


def as_tensorrt(bundle: Bundle, dtype: DType = "float32") -> Bundle:
    """The same build for TensorRT, whose graphs read the same tables."""
    return dataclasses.replace(bundle, build=dataclasses.replace(bundle.build, backend="tensorrt", dtype=dtype))


def table_initializers(path: Path) -> list[int]:
    """Bytes of the vocabulary tables that one graph names."""
    return [size for file, size in initializers(path) if file == c.VOCAB_DATA]


def initializers(path: Path) -> list[tuple[str, int]]:
    """(data file, bytes) of every tensor in one that a graph names."""
    graph = onnx.load(str(path), load_external_data=False).graph
    places = [{entry.key: entry.value for entry in tensor.external_data} for tensor in graph.initializer]
    return [(place["location"], int(place["length"])) for place in places if place]


@pytest.mark.parametrize("case", ["two drafters", "draft models", "chains", "float chains, dead ids"])
def test_tensorrt_has_what_engines_share_in_each(built: Callable[[str], Built], case: str) -> None:
    """Counted from the graphs: what each names outside of the target's tables."""
    bundle = built(case).bundle
    planned = drafter_memory(as_tensorrt(bundle), 1)
    for spec in bundle.specs:
        paths = bundle.path.glob(f"{spec.name}.*.onnx")
        copies = [size for path in paths for file, size in initializers(path) if file != c.VOCAB_DATA]
        assert sum(copies) <= planned[spec.name].weights <= sum(copies) + ALIGNMENT * (len(copies) + 8), spec.name


def test_onnxruntime_shares_one_table_but_packs_heads(built: Callable[[str], Built]) -> None:
    """The first of a form instead of the mapping: float here, and one of two int8 heads; three float heads."""
    for case, extra, bytes_each in (("two drafters", 1, 1), ("float drafters", 2, 4)):
        bundle = built(case).bundle
        columns = c.vocab_columns(bundle.target.vocab_size)
        table = columns * bundle.target.stack.hidden_size * bytes_each
        packed = plan_memory(bundle).vocabulary - data_files(bundle)[c.VOCAB_DATA]
        assert extra * table <= packed <= extra * (table + ALIGNMENT)


@pytest.mark.parametrize("case", ["chains", "float chains, dead ids"])
def test_onnxruntime_packs_the_matrices_of_a_chain_twice(built: Callable[[str], Built], case: str) -> None:
    """Counted from the drafter's graph: layer and head of its own; the context has the same ones in the file."""
    bundle = built(case).bundle
    planned = drafter_memory(bundle, 1)
    for name in CHAINS:
        graph = onnx.load(str(bundle.path / f"{name}.drafter.onnx"), load_external_data=False).graph
        products = [node.input for node in graph.node if node.op_type in ("MatMul", "MatMulIntegerToFloat", "Gemm")]
        read = {value for inputs in products for value in inputs}
        sizes = [product_bytes(tensor) for tensor in graph.initializer if tensor.name in read and len(tensor.dims) > 1]
        assert len(sizes) == 6  # q, k and v, o, gate and up, down, head
        extra = planned[name].weights - data_files(bundle)[f"{name}.context.data"]
        assert sum(sizes) <= extra <= sum(sizes) + ALIGNMENT * 20


def product_bytes(tensor: onnx.TensorProto) -> int:
    return int(np.prod(tensor.dims)) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


# -- what the runtime allocates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", ["defaults", "no drafter", "two drafters", "causal heads", "draft models", "lookup alone", "chains"]
)
def test_buffers_are_those_of_the_cpu_runtime(built: Callable[[str], Built], case: str) -> None:
    bundle = built(case).bundle
    plan, runtime = plan_memory(bundle, 3), OrtRuntime(bundle, threads=1, slots=3)
    largest_calls(bundle, runtime, 3)
    caches = {key: sum(map(nbytes, arrays)) for key, arrays in runtime.caches.items()}
    assert plan.target_cache == caches[c.TARGET, None]
    assert plan.drafter_cache == sum(size for (engine, _), size in caches.items() if engine == c.DRAFTER)
    assert plan.relay_state == sum(map(nbytes, runtime.pending.values()))
    assert plan.outputs == sum(map(nbytes, runtime._scratch.values()))
    runtime.close()


def nbytes(array: np.ndarray) -> int:
    return array.nbytes


def largest_calls(bundle: Bundle, runtime: OrtRuntime, slots: int) -> None:
    """One call of every engine at the limits of the build, every output fetched."""
    rows = bundle.build.max_num_tokens // slots
    for name, contract in bundle.contracts():
        sizes = {"B": slots, "S": rows, "R": bundle.verify_rows, "T": bundle.cache_rows, **contract.static}
        inputs = [spec for spec in contract.inputs if spec.home == "host"]
        feeds = {s.name: np.zeros([sizes[dim] for dim in s.dims], "?" if s.kind == "bool" else "q") for s in inputs}
        fetch = [spec.name for spec in contract.outputs if spec.home == "host"]
        runtime.run(contract.engine, name, range(slots), feeds, fetch)


@pytest.mark.parametrize("case", ["causal heads", "draft models", "draft models of dead ids", "chains"])
def test_a_plan_from_the_checkpoints_is_that_of_the_bundle(built: Callable[[str], Built], case: str) -> None:
    pair = built(case)
    planned, found = dataclasses.asdict(pair.plan().memory), dataclasses.asdict(plan_memory(pair.bundle))
    weights = {"target_weights", "draft_weights", "vocabulary"}
    assert {k: v for k, v in planned.items() if k not in weights} == {
        k: v for k, v in found.items() if k not in weights
    }
    assert all(planned[name] >= found[name] for name in weights)


def test_shares_of_a_request_and_of_a_token(built: Callable[[str], Built]) -> None:
    plan = built("defaults").plan().memory
    assert plan.per_token(plan.target_cache) == 2 * 3 * 2 * 32 * 4  # k,v x layers x kv heads x size x bytes
    assert plan.per_slot(plan.target_cache) == plan.cache_rows * plan.per_token(plan.target_cache)
    assert plan.per_slot(plan.relay_state) == 8 * 64 * 4
    assert plan.figures()["cache_per_token"] == plan.per_token(plan.target_cache) + plan.per_token(plan.drafter_cache)
    assert (
        plan.figures()["total"]
        == plan.total
        == sum((plan.weights, plan.target_cache, plan.drafter_cache, plan.relay_state, plan.outputs, plan.workspace))
    )


def test_half_precision_halves_what_the_engines_compute_in(built: Callable[[str], Built]) -> None:
    bundle = built("defaults").bundle
    wide, narrow = plan_memory(as_tensorrt(bundle)), plan_memory(as_tensorrt(bundle, "bfloat16"))
    assert (2 * narrow.target_cache, 2 * narrow.drafter_cache) == (wide.target_cache, wide.drafter_cache)
    assert narrow.relay_state == wide.relay_state  # float32 in every build


# -- what fits ---------------------------------------------------------------------------------------------------------


def test_the_largest_batch_and_the_longest_sequence_are_the_last_that_fit(built: Callable[[str], Built]) -> None:
    pair = dataclasses.replace(built("defaults"), options=BuildOptions(max_batch_size=4, max_seq_len=200))
    budget = pair.plan().memory.total * 3 // 2
    fit = pair.plan(memory=budget, memory_fraction=1.0).fit
    assert fit is not None
    assert 4 < fit.max_batch_size < 32
    assert 200 < fit.max_seq_len <= 512

    def total(**limits: int) -> int:
        return dataclasses.replace(pair, options=dataclasses.replace(pair.options, **limits)).plan().memory.total

    assert total(max_batch_size=fit.max_batch_size) <= budget < total(max_batch_size=fit.max_batch_size + 1)
    assert total(max_seq_len=fit.max_seq_len) <= budget
    assert fit.max_seq_len == 512 or total(max_seq_len=fit.max_seq_len + 1) > budget
    assert [row[0].max_batch_size for row in fit.table] == [1, 2, 4]
    assert [cell.max_seq_len for cell in fit.table[0]] == [200, 512]
    for cell in (cell for row in fit.table for cell in row):
        assert cell.total == total(max_batch_size=cell.max_batch_size, max_seq_len=cell.max_seq_len)
        assert cell.fits == (cell.total <= budget)


def test_a_given_number_of_tokens_bounds_the_batch(built: Callable[[str], Built]) -> None:
    options = BuildOptions(max_batch_size=2, max_seq_len=96, max_num_tokens=40, max_input_len=90)
    fit = dataclasses.replace(built("defaults"), options=options).plan(memory=10**12).fit
    assert fit is not None
    assert fit.max_batch_size == 5  # 40 tokens, 8 rows of a verify pass
    assert fit.max_seq_len == 512  # the target's own
    limits = [(cell.max_batch_size, cell.max_seq_len) for row in fit.table for cell in row]
    assert limits == [(batch, length) for batch in (1, 2, 4) for length in (96, 512)]


def test_where_no_request_fits_beside_the_weights_nothing_is_offered(built: Callable[[str], Built]) -> None:
    pair = built("defaults")
    fit = pair.plan(memory=pair.plan().memory.weights + 1, memory_fraction=1.0).fit
    assert fit is not None
    assert (fit.max_batch_size, fit.max_seq_len, fit.table) == (0, 0, ())


def test_weights_that_do_not_fit_are_refused_with_what_is_missing(built: Callable[[str], Built]) -> None:
    with pytest.raises(UserError) as caught:
        built("defaults").plan(memory=1_000_000, memory_fraction=0.5)
    message = str(caught.value)
    assert message.startswith("--gpu-memory: weights alone take 1.2 MB, 7")
    assert "kB more than the 500.0 kB that --memory-fraction leaves of 1.0 MB; take --target-weights int8, " in message
    assert message.endswith("use a smaller model, or more memory")


def test_a_plan_refuses_what_a_build_would(built: Callable[[str], Built]) -> None:
    pair = built("defaults")
    for options, reason in (
        (BuildOptions(max_seq_len=513), "--max-seq-len: 513; allowed: 2 to 512"),
        (BuildOptions(max_num_tokens=7), "--max-num-tokens: 7; allowed: 64 to 1048576"),
        (BuildOptions(dtype="bfloat16"), "--dtype: bfloat16 does not run on onnxruntime"),
        (BuildOptions(backend="tensorflow"), "--backend: 'tensorflow' is not offered; allowed: onnxruntime, "),
    ):
        with pytest.raises(UserError, match=reason):
            dataclasses.replace(pair, options=options).plan()
    for fraction in (0.0, 1.5, float("nan")):
        with pytest.raises(UserError, match=r"--memory-fraction: .*; allowed: above 0, at most 1"):
            pair.plan(memory=10**9, memory_fraction=fraction)


def test_a_backend_is_planned_where_it_is_not_installed(built: Callable[[str], Built]) -> None:
    pair = dataclasses.replace(built("defaults"), options=BuildOptions(backend="tensorrt"))
    build = pair.plan().build
    assert (build.backend, build.dtype, build.draft_weights) == ("tensorrt", "bfloat16", "float")


def test_compiled_engines_are_planned_by_what_went_into_them(built: Callable[[str], Built]) -> None:
    bundle = as_tensorrt(built("defaults").bundle)
    compiled = dataclasses.replace(bundle, files={f"target{c.ENGINE_SUFFIX}": FileEntry("", 700)})
    assert plan_memory(compiled) == plan_memory(bundle)
    assert plan_memory(compiled).target_weights > 0


def test_sizes_are_read_with_their_units() -> None:
    for text, size in (
        ("80GiB", 80 << 30),
        ("24 gb", 24_000_000_000),
        ("1.5TB", 1_500_000_000_000),
        ("512MiB", 512 << 20),
        ("85899345920", 80 << 30),
        ("7B", 7),
    ):
        assert parse_size("--gpu-memory", text) == size
    for text in ("80G", "eighty", "-1GB", "0", "", "1e3", "GiB", "1..5GB"):
        with pytest.raises(UserError, match=r"--gpu-memory: .*; allowed: bytes, or a number with its unit"):
            parse_size("--gpu-memory", text)


# -- a model of real size ----------------------------------------------------------------------------------------------

QWEN3_8B: Config = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
}


def sparse_checkpoint(folder: Path, config: Config) -> int:
    """A target folder whose tensors are holes in a file; the bytes that they would take."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    size, heads, groups = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    shapes = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for i in range(config["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj": (heads * size, hidden),
            "self_attn.k_proj": (groups * size, hidden),
            "self_attn.v_proj": (groups * size, hidden),
            "self_attn.o_proj": (hidden, heads * size),
            "self_attn.q_norm": (size,),
            "self_attn.k_norm": (size,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    entries, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    return end


def test_qwen3_8b_on_a_card_of_80_gib(tmp_path: Path) -> None:
    """Nothing is loaded: the 16 GB of weights are a hole in a file. The sums are those of the model's own card."""
    stored = sparse_checkpoint(tmp_path / "target", QWEN3_8B)
    assert stored == 2 * 8_190_735_360  # parameters of Qwen3-8B
    options = BuildOptions(backend="tensorrt", max_batch_size=16, max_seq_len=4096)
    plan = make_plan(tmp_path / "target", [], options, parse_size("--gpu-memory", "80GiB"))
    assert plan.memory.per_token(plan.memory.target_cache) == 2 * 36 * 8 * 128 * 2
    assert stored < plan.memory.weights < 1.001 * stored
    assert plan.fit is not None
    assert plan.fit.budget == int(0.9 * (80 << 30))
    assert 85 <= plan.fit.max_batch_size <= 95  # 61 GB for slots of 4352 rows, 147 kB each
    assert plan.fit.max_seq_len > 20_000
