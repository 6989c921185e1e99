"""Whole quantised targets: the numbers of ModelOpt's own simulation, in every batch and chunk, under every strategy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from conftest import Measure
from harness import Engines
from modelopt_copies import ALGOS, FOLDERS, target_config
from tiny import make_drafter

from dflow_trt.api import LLM, SamplingParams
from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.bundle import Bundle, open_bundle

VOCAB = 32
LIMITS = {"max_batch_size": 4, "max_input_len": 40, "max_seq_len": 96}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bundle]:
    """A quantised target with a random DFlow drafter, by the folder's name; each built once, and checked whole."""
    found: dict[str, Bundle] = {}

    def get(name: str) -> Bundle:
        if name not in found:
            place = tmp_path_factory.mktemp(name)
            make_drafter(place / "flow", target_config(FOLDERS / name), relay=True, taps=(0,), block_size=5)
            sources = [DrafterSource(place / "flow", "dflow")]
            options = BuildOptions(**LIMITS)
            found[name] = build_bundle(FOLDERS / name, sources, place / "bundle", options, self_check="full")
        return found[name]

    return get


def expected(name: str) -> tuple[list[int], np.ndarray]:
    """Token ids and their logits by ModelOpt."""
    with np.load(FOLDERS / name / "expected.npz") as data:
        return data["ids"].tolist(), data["logits"]


@pytest.mark.parametrize("name", ALGOS)
def test_logits_are_those_of_modelopt(built: Callable[[str], Bundle], name: str, measure: Measure) -> None:
    ids, wanted = expected(name)
    found = Engines(built(name)).target(range(1), [ids], [0]).logits_BSV[0, :, :VOCAB]
    error = float(np.abs(found - wanted).max())
    measure("logits", error)
    assert wanted.std() > 1
    assert error < 3e-5


@pytest.mark.parametrize("name", ALGOS)
def test_a_row_does_not_depend_on_batch_or_chunk(built: Callable[[str], Bundle], name: str) -> None:
    """Bit for bit: static scales round element by element."""
    ids, _ = expected(name)
    engines = Engines(built(name))
    whole = engines.target(range(1), [ids], [0]).logits_BSV[0].copy()
    batch = engines.target(range(3), [ids[3:], ids, ids[5:]], [0, 0, 0]).logits_BSV[1]
    np.testing.assert_array_equal(batch, whole)
    parts = [engines.target(range(1), [ids[i : i + 3]], [i]).logits_BSV[0, :3] for i in range(0, len(ids), 3)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("name", ALGOS)
def test_speculation_changes_no_token(built: Callable[[str], Bundle], name: str) -> None:
    llm = LLM(built(name).path)
    prompts = [{"prompt_token_ids": expected(name)[0][:length]} for length in (3, 7, 12)]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    plain, drafted = (llm.generate(prompts, params, strategy=strategy) for strategy in ("ar", "dflow"))
    assert [out.outputs[0].token_ids for out in drafted] == [out.outputs[0].token_ids for out in plain]


@pytest.mark.parametrize("name", ALGOS)
def test_the_bundle_says_what_its_target_is(built: Callable[[str], Bundle], name: str) -> None:
    bundle = open_bundle(built(name).path)
    assert bundle.target.quantisation is not None
    assert bundle.build.target_weights == bundle.target.quantisation.algo == ALGOS[name]
    assert "agreement" not in bundle.self_check
    assert max(bundle.self_check["errors"].values()) < 1e-2
