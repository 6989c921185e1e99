"""EAGLE-3's graphs in half precision: valid, and sound where features would overflow it; weights are written once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from safetensors.numpy import load_file
from tiny import Config, edit_tensors, make_eagle3, make_target

from dflow_trt import contract as c
from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.checkpoint.eagle3 import Eagle3Checkpoint
from dflow_trt.checkpoint.target import TargetCheckpoint, read_target
from dflow_trt.checkpoint.weights import Array
from dflow_trt.graphs import eagle3, store
from dflow_trt.graphs.blocks import Vocabulary, dead_columns
from dflow_trt.graphs.builder import NUMPY, GraphBuilder, Lowering
from dflow_trt.reference import ReferenceEagle3, ReferenceHead
from dflow_trt.spec import DType, Eagle3Spec

ROWS, ROW, CACHE_ROWS, WIDTH = 6, 4, 128, 64
EVERYTHING: Config = {
    **dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual"), True),
    **dict.fromkeys(("own_embedding", "qk_norm", "attention_bias"), True),
}


class Place:
    """The part of a bundle's writer that this kind uses, as TensorRT gets its graphs."""

    def __init__(self, folder: Path, dtype: DType, target: TargetCheckpoint) -> None:
        self.folder, self.lowering, self.taps = folder, Lowering(dtype, "float", "op"), (1, 3, 4)
        data = store.WeightFile(folder / "vocab.data", lambda count: None)
        table = store.table(data, target.weights, "model.embed_tokens.weight", "vocab.embed", 256, NUMPY["float32"])
        data.close()
        self.vocabulary = Vocabulary(table, None, None, dead_columns(256, 256))

    @contextlib.contextmanager
    def engine(self, contract: c.EngineContract, drafter: str, weights: Any) -> Iterator[GraphBuilder]:
        data = store.WeightFile(self.folder / f"{contract.engine}.data", lambda count: None)
        g = GraphBuilder(contract, self.lowering, weights, data)
        yield g
        data.close()
        g.save(self.folder / f"{contract.engine}.onnx")


def write(folder: Path, dtype: DType, keys: Config) -> tuple[TargetCheckpoint, Eagle3Checkpoint]:
    config = make_target(folder / "target", num_hidden_layers=8)
    make_eagle3(folder / "drafter", config, taps=(1, 3, 4), **keys)
    return written(folder, dtype)


def written(folder: Path, dtype: DType) -> tuple[TargetCheckpoint, Eagle3Checkpoint]:
    """Both graphs of the folders that are there."""
    target = read_target(folder / "target")
    draft = eagle3.read(folder / "drafter", target, None, {})
    contracts = (
        c.eagle3_context_contract(draft.spec, (1, 3, 4), CACHE_ROWS, True),
        c.eagle3_step_contract(draft.spec, CACHE_ROWS, True),
    )
    place: Any = Place(folder, dtype, target)
    eagle3.write(place, draft, {contract.engine: contract for contract in contracts})
    return target, draft


@pytest.mark.parametrize("keys", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_checker_accepts_both_graphs(tmp_path: Path, dtype: DType, keys: Config) -> None:
    """Types and shapes too, so that no operator mixes dtypes."""
    write(tmp_path, dtype, keys)
    for engine in (c.CONTEXT, c.DRAFTER):
        onnx.checker.check_model(str(tmp_path / f"{engine}.onnx"), full_check=True)


def test_the_drafter_has_no_weights_but_those_of_the_context(tmp_path: Path) -> None:
    write(tmp_path, "float32", EVERYTHING)
    files = {
        entry.value
        for tensor in onnx.load(tmp_path / f"{c.DRAFTER}.onnx", load_external_data=False).graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    assert files == {f"{c.CONTEXT}.data"}
    assert (tmp_path / f"{c.DRAFTER}.data").stat().st_size == 0


@pytest.mark.parametrize("norm_output", [False, True])
def test_float16_holds_features_beyond_its_range(tmp_path: Path, norm_output: bool) -> None:
    """Tapped values of 3e4, features and residuals of 1e6: projected taps, norms and residuals are float32."""
    write(tmp_path, "float16", {"norm_output": norm_output})
    fc = load_file(tmp_path / "drafter" / "model.safetensors")["fc.weight"]
    edit_tensors(tmp_path / "drafter", {"fc.weight": 30 * fc})
    target, draft = written(tmp_path, "float16")
    rng = np.random.default_rng(0)
    taps = (1e4 * rng.standard_normal((ROWS, 3 * WIDTH))).clip(-3e4, 3e4).astype(np.float16)
    ids, wanted = rng.integers(0, 256, ROWS), _Wanted(target, draft)
    feeds: dict[str, Any] = {
        c.HIDDEN.name: taps[None],
        c.NEXT_INPUT_IDS.name: ids[None],
        c.POSITION_IDS.name: np.arange(ROWS)[None],
        c.LOGIT_ROWS.name: np.array([[ROW]]),
    }
    found = _run(tmp_path / f"{c.CONTEXT}.onnx", draft, feeds, 0)
    features = wanted.reference.features(taps.astype(np.float32))
    assert np.abs(features).max() > 5e5
    wanted.check(found, *wanted.row(ids[: ROW + 1], features[: ROW + 1]))
    pending = found[c.FEATURE.name][0]
    feeds = {
        c.PENDING_H.name: pending[None],
        c.STEP_IDS.name: np.array([[9]]),
        c.BLOCK_POSITION_IDS.name: np.array([[ROW + 1]]),
        **{c.past(tensor, 0): found[c.present(tensor, 0)] for tensor in c.CACHE_TENSORS},
    }
    found = _run(tmp_path / f"{c.DRAFTER}.onnx", draft, feeds, ROW + 1)
    passed = np.concatenate([features[: ROW + 1], pending])
    wanted.check(found, *wanted.row(np.append(ids[: ROW + 1], 9), passed))


class _Wanted:
    """The float32 reference, and how near half precision is to it."""

    def __init__(self, target: TargetCheckpoint, draft: Eagle3Checkpoint) -> None:
        self.reference = ReferenceEagle3(draft.weights, draft.spec)
        self.embedding = ReferenceHead(target.weights, target.spec)

    def row(self, ids: Array, features: Array) -> tuple[Array, Array]:
        """What the last row passes on [1,E] and its logits [1,draft vocabulary]."""
        h = self.reference.layer(self.embedding.embed(ids.tolist()), features, np.arange(len(ids)))[-1:]
        return self.reference.passed_on(h), self.reference.logits(h)

    def check(self, found: dict[str, Array], passed: Array, logits: Array) -> None:
        assert found[c.FEATURE.name].dtype == np.float32
        np.testing.assert_allclose(found[c.FEATURE.name][0], passed, atol=1e-2 * np.abs(passed).max())
        shown = found[c.DRAFT_LOGITS.name][0, :, : logits.shape[1]].astype(np.float32)
        np.testing.assert_allclose(shown, logits, atol=2e-2 * np.abs(logits).max())


def _run(path: Path, draft: Eagle3Checkpoint, feeds: dict[str, Any], start: int) -> dict[str, Array]:
    stack = draft.spec.stack
    shape = (1, stack.num_kv_heads, CACHE_ROWS, stack.head_dim)
    for tensor in c.CACHE_TENSORS:
        feeds.setdefault(c.past(tensor, 0), np.zeros(shape, np.float16))
    feeds |= {c.WRITE_INDEX.name: np.array([start]), c.KV_INDEX.name: np.arange(64)}
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def test_a_bundle_keeps_a_table_in_the_checkpoints_dtype(tmp_path: Path) -> None:
    """An embedding of its own, in bfloat16 beside a float32 engine; a copy of the target's is left out."""
    config = make_target(tmp_path / "target", num_hidden_layers=8, dtype="bfloat16")
    make_eagle3(tmp_path / "drafter", config, taps=(1, 3, 4), dtype="bfloat16", own_embedding=True)
    sizes = []
    for name in ("own", "copied"):
        if name == "copied":
            table = load_file(tmp_path / "target" / "model.safetensors")["model.embed_tokens.weight"]
            edit_tensors(tmp_path / "drafter", {"embed_tokens.weight": table})
        source = DrafterSource(tmp_path / "drafter")
        bundle = build_bundle(
            tmp_path / "target", [source], tmp_path / name, BuildOptions(max_seq_len=128), self_check="off"
        )
        spec = bundle.drafters["eagle3"].spec
        sizes.append(bundle.files["eagle3.context.data"].size)
        assert isinstance(spec, Eagle3Spec)
        assert spec.own_embedding == (name == "own")
    assert sizes[0] - sizes[1] == 256 * WIDTH * np.dtype(ml_dtypes.bfloat16).itemsize
