"""DFlash 2 engines against the ``dflash`` package over cached rounds, and what convolutions and selector may not do."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import TOLERANCE, Array, Config, Engines, Pair, build_pair, random_tokens
from oracles import DFlash2Oracle, TargetOracle
from safetensors.numpy import load_file
from test_drafter import Chain, Drafted
from tiny import DELETE, edit_tensors, make_drafter, make_target

from dflow_trt.build import BuildOptions, DrafterSource, build_bundle
from dflow_trt.decode import Decoder
from dflow_trt.method.relay import RelayState
from dflow_trt.method.sampling import SamplingParams
from dflow_trt.request import Request
from dflow_trt.runtime.ort import OrtRuntime

PROMPTS, ANCHORS = (21, 9, 14), (3, 77, 130)
NO_CANDIDATE = -1e29  # ids that are none score less
WINDOW: Config = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}
CASES: dict[str, Config] = {
    "plain": {},
    "kernel of one row": {"dflash2": {"conv_kernel_size": 1}},
    "kernel of two rows, channels of their own": {"dflash2": {"conv_kernel_size": 2, "conv_group_size": 1}},
    "kernel as long as the block, one group": {"dflash2": {"conv_kernel_size": 8, "conv_group_size": 64}},
    "one candidate": {"dflash2": {"selector_top_k": 1}},
    "every id a candidate, rank 1": {"dflash2": {"selector_top_k": 256, "selector_rank": 1}},
    "block of 2": {"block_size": 2, "dflash2": {"conv_kernel_size": 2}},
    "block of 16": {"block_size": 16, "dflash2": {"conv_kernel_size": 4, "selector_top_k": 9}},
    "windows": WINDOW,
    "windows, not causal": {**WINDOW, "is_causal": False},
    "multiplier and softcap": {"output_multiplier": 1.25, "final_logit_softcapping": 3.0},
    "multiplier alone": {"output_multiplier": 0.25, "input_embedding_scale": 2.0},
    "biases, one layer": {"attention_bias": True, "num_hidden_layers": 1},
    "bfloat16": {"dtype": "bfloat16"},
    "a relay that rests": {"relay": True},
    "keys at the top level": {"top_level": True},
}


@pytest.fixture(params=["float", "int8"])
def form(request: pytest.FixtureRequest) -> Any:
    return request.param


def _pair(folder: Path, keys: Config, **options: Any) -> Pair:
    drafter = {"taps": (0, 2), "sharpness": 0.3, "dflash2": {}, **keys}
    target = {"num_hidden_layers": 4, "dtype": keys.get("dtype", "float32")}
    return build_pair(folder, target, {"draft": drafter}, **options)


def _differences(drafted: Drafted, oracle: DFlash2Oracle) -> tuple[float, int]:
    """(largest difference of a score, slots where rounding decides); everything else of one block must be equal."""
    tolerance = 2 * TOLERANCE["draft logits"]
    ours_KV, theirs_KV = drafted.ours_KV > NO_CANDIDATE, drafted.theirs_KV > NO_CANDIDATE
    ranked = np.sort(drafted.theirs_KV, axis=-1)
    clear = (oracle.gap_K > tolerance) & (ranked[:, -1] - ranked[:, -2] > tolerance)
    np.testing.assert_array_equal(ours_KV[clear], theirs_KV[clear], err_msg="candidates")
    np.testing.assert_array_equal(drafted.ids_K[clear], drafted.theirs_KV.argmax(-1)[clear], err_msg="drafts")
    if clear.all():
        np.testing.assert_array_equal(drafted.ids_K, oracle.path_K, err_msg="the package's own drafts")
    np.testing.assert_array_equal(drafted.ids_K, drafted.ours_KV.argmax(-1))
    both = ours_KV & theirs_KV
    return float(np.abs(drafted.ours_KV - drafted.theirs_KV)[both].max()), int((~clear).sum())


@pytest.mark.parametrize("keys", CASES.values(), ids=CASES.keys())
def test_chained_rounds_equal_the_package(tmp_path: Path, keys: Config, measure: Any) -> None:
    pair = _pair(tmp_path, keys)
    chain = Chain(pair, Engines(pair.bundle))
    oracle: Any = chain.oracles["draft"]
    found, slots = [], 0
    for drafted in chain.run():
        found.append(_differences(drafted, oracle))
        slots += len(drafted.ids_K)
    worst, unclear = max(worst for worst, _ in found), sum(count for _, count in found)
    measure("draft scores", worst)
    assert len(found) >= 3 * 4
    assert unclear <= 0.05 * slots
    assert chain.worst_h <= TOLERANCE["context h"]
    assert worst <= TOLERANCE["draft logits"]


def test_relayed_blocks_equal_the_package(tmp_path: Path, measure: Any) -> None:
    """What the relay engine made of rejected states goes through the convolutions like any other row."""
    pair = _pair(tmp_path, {"relay": True})
    chain = Chain(pair, Engines(pair.bundle))
    chain._prefill()
    engines, oracle = chain.engines, chain.oracles["draft"]
    pending = engines.runtime.pending["draft"]
    pending[:] = np.random.default_rng(3).standard_normal(pending.shape)
    slots, states = range(3), [RelayState(0, 7, 11, 12), RelayState(3, 6, 40, 7), None]
    block_BJE = engines.embeds("draft", slots, ANCHORS, states)
    plain_BJE = engines.embeds("draft", slots, ANCHORS)
    assert (block_BJE != plain_BJE).any(axis=(1, 2)).tolist() == [True, True, False]
    engines.embeds("draft", slots, ANCHORS, states)
    ids_BK, scores_BKV = engines.draft("draft", slots, chain.at)
    for i in slots:
        features = chain.features["draft"][i][: chain.at[i]]
        theirs = oracle.draft(oracle.cache(), features, ANCHORS[i], chain.at[i], ids_BK[i].tolist(), block_BJE[i])
        worst, unclear = _differences(Drafted("draft", ids_BK[i], scores_BKV[i], theirs), oracle)  # type: ignore[arg-type]
        measure("draft scores", worst)
        assert worst <= TOLERANCE["draft logits"]
        assert unclear == 0


@pytest.mark.parametrize("spelling", ["", ".weight"], ids=["as loaded", "as saved"])
def test_both_spellings_of_the_codebooks_are_one_drafter(tmp_path: Path, spelling: str) -> None:
    """A model that was loaded saves codebooks without ``.weight``, one that was not with it; the package reads both."""
    config = make_target(tmp_path / "target")
    make_drafter(tmp_path / "draft", config, dflash2={})
    codebooks = {k: v for k, v in load_file(tmp_path / "draft" / "model.safetensors").items() if "codebook" in k}
    spelt = {name + spelling: table for name, table in codebooks.items()}
    edit_tensors(tmp_path / "draft", dict.fromkeys(codebooks, DELETE) | spelt)
    pair = _built(tmp_path, config, "float")
    chain = Chain(pair, Engines(pair.bundle))
    oracle: Any = chain.oracles["draft"]
    worst = [_differences(drafted, oracle)[0] for drafted in chain.run()]
    assert max(worst) <= TOLERANCE["draft logits"]


INT8: dict[str, Config] = {"plain": {}, "block of 16": {"block_size": 16, "dflash2": {"conv_kernel_size": 4}}}


@pytest.mark.parametrize("keys", INT8.values(), ids=INT8.keys())
def test_an_int8_drafter_agrees_with_the_float_one(tmp_path: Path, keys: Config, measure: Any) -> None:
    """The scores are the package's but for rounding, so that nine in ten drafts are; behind the drafts of its own."""
    pair = _pair(tmp_path, keys, draft_weights="int8")
    same, total, errors = 0, 0, []
    for drafted in Chain(pair, Engines(pair.bundle)).run():
        same += int((drafted.ids_K == drafted.theirs_KV.argmax(-1)).sum())
        total += len(drafted.ids_K)
        both = (drafted.ours_KV > NO_CANDIDATE) & (drafted.theirs_KV > NO_CANDIDATE)
        errors.append(np.std((drafted.ours_KV - drafted.theirs_KV)[both]) / np.std(drafted.theirs_KV[both]))
        np.testing.assert_array_equal(drafted.ids_K, drafted.ours_KV.argmax(-1))
    measure("agreement", same / total)
    measure("relative error", float(np.mean(errors)))
    assert 0.8 < same / total < 1
    assert np.mean(errors) < 0.1


# -- what they may not do ----------------------------------------------------------------------------------------------


def _built(folder: Path, config: Config, form: str) -> Pair:
    """``target`` and ``draft`` of the folder, as they are on disk."""
    options = BuildOptions(max_seq_len=256, draft_weights="int8" if form == "int8" else "float", draft_logits=True)
    source = DrafterSource(folder / "draft", "draft")
    bundle = build_bundle(folder / "target", [source], folder / "bundle", options, self_check="off")
    return Pair(bundle, folder / "target", {"draft": source.path}, config)


def _prompted(pair: Pair) -> Engines:
    """Three prompts, in the target's caches and in the context of every drafter."""
    engines, rng, starts = Engines(pair.bundle), np.random.default_rng(5), [0, 0, 0]
    vocab = pair.bundle.target.live_vocab
    engines.target(range(3), [random_tokens(rng, length, vocab) for length in PROMPTS], starts)
    for name in pair.drafters:
        engines.context(name, range(3), starts, max(PROMPTS))
    return engines


def _drafted(pair: Pair, name: str = "draft") -> tuple[Array, Array]:
    """(ids [B,K], scores [B,K,V]) of the blocks behind the three prompts."""
    engines = _prompted(pair)
    engines.embeds(name, range(3), ANCHORS)
    return engines.draft(name, range(3), PROMPTS)


def _silenced(folder: Path, *parts: str) -> None:
    """Tensors of the drafter that add nothing: kernels that pass rows on as they are, zeros elsewhere."""
    tensors = {key: value for key, value in load_file(folder / "model.safetensors").items() if key.endswith(parts)}
    for name, tensor in tensors.items():
        tensor[:] = 0
        if name.endswith("base_kernel"):
            tensor[:, 0] = 1
    edit_tensors(folder, tensors)


def test_parts_that_add_nothing_draft_as_dflash(tmp_path: Path, form: str) -> None:
    config = make_target(tmp_path / "target")
    make_drafter(tmp_path / "plain", config)
    make_drafter(tmp_path / "draft", config, dflash2={})
    _silenced(tmp_path / "draft", "base_kernel", "kernel_projection.weight", "hidden_projection.weight")
    sources = [DrafterSource(tmp_path / name, name) for name in ("plain", "draft")]
    options = BuildOptions(max_seq_len=256, draft_weights="int8" if form == "int8" else "float", draft_logits=True)
    bundle = build_bundle(tmp_path / "target", sources, tmp_path / "bundle", options, self_check="off")
    pair = Pair(bundle, tmp_path / "target", {source.name or "": source.path for source in sources}, config)
    ids_BK, logits_BKV = _drafted(pair, "plain")
    found_BK, scores_BKV = _drafted(pair, "draft")
    np.testing.assert_array_equal(found_BK, ids_BK)
    candidates = scores_BKV > NO_CANDIDATE
    assert (candidates.sum(axis=-1) == 6).all()
    np.testing.assert_array_equal(scores_BKV[candidates], logits_BKV[candidates])
    assert logits_BKV[~candidates].max() < logits_BKV.max()


@pytest.mark.parametrize("changed", [0, 2, 5])
def test_a_row_reaches_the_rows_behind_it_as_far_as_its_kernels(tmp_path: Path, changed: int) -> None:
    """Without attention: both convolutions of a kernel of 3 rows reach 4 rows on, and none goes back."""
    config = make_target(tmp_path / "target")
    keys: Config = {"conv_kernel_size": 3, "selector_top_k": 256}
    make_drafter(tmp_path / "draft", config, relay=True, relay_start="at_rejection", num_hidden_layers=1, dflash2=keys)
    _silenced(tmp_path / "draft", "o_proj.weight", "hidden_projection.weight")
    engines = _prompted(_built(tmp_path, config, "float"))
    pending, state = engines.runtime.pending["draft"], [RelayState(0, 7, 11, 12)]
    scores = []
    for step in (0, 1):
        pending[0] = np.random.default_rng(3).standard_normal(pending[0].shape)
        pending[0, changed] += step
        engines.embeds("draft", range(1), [ANCHORS[0] + step * (changed == 0)], state)
        scores.append(engines.draft("draft", range(1), PROMPTS[:1])[1][0])
    found = {slot for slot in range(1, 8) if (scores[0][slot - 1] != scores[1][slot - 1]).any()}
    assert found == {slot for slot in range(changed, changed + 5) if 1 <= slot < 8}


def test_scores_depend_on_the_draft_before_alone(tmp_path: Path, form: str) -> None:
    """The same block behind other anchors: from the slot on where both draft the same, all is the same."""
    engines = _prompted(build_pair(tmp_path, {}, {"draft": {"dflash2": {}}}, draft_weights=form))
    runs = []
    for shift in (0, 1, 2, 3):
        engines.embeds("draft", range(3), ANCHORS)
        engines.anchors["draft"] = engines.anchors["draft"] + shift
        runs.append(engines.draft("draft", range(3), PROMPTS))
    (ids_BK, scores_BKV), changed = runs[0], 0
    for other_ids_BK, other_BKV in runs[1:]:
        differ = (other_BKV != scores_BKV).any(axis=-1)
        assert differ[:, 0].all(), "the anchor is what draft 1 follows"
        np.testing.assert_array_equal(differ[:, 1:], (other_ids_BK != ids_BK)[:, :-1])
        np.testing.assert_array_equal(other_BKV > NO_CANDIDATE, scores_BKV > NO_CANDIDATE)
        changed += int(differ[:, 1:].sum())
    assert changed


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("top_k", [6, 280])
def test_ids_without_a_token_are_never_candidates(tmp_path: Path, form: str, top_k: int, softcap: float | None) -> None:
    """However well they would follow: 200 tokens, a table of 300 rows, and more candidates than there are tokens."""
    config = make_target(tmp_path / "target", vocab_size=300, tokenizer=200)
    make_drafter(tmp_path / "draft", config, dflash2={"selector_top_k": top_k}, final_logit_softcapping=softcap)
    codebooks = {k: v for k, v in load_file(tmp_path / "draft" / "model.safetensors").items() if "codebook" in k}
    for table in codebooks.values():
        table[200:] *= 1000
    edit_tensors(tmp_path / "draft", codebooks)
    ids_BK, scores_BKV = _drafted(_built(tmp_path, config, form))
    assert scores_BKV.shape == (3, 7, 384)
    assert (ids_BK < 200).all()
    assert (scores_BKV[..., 200:] < NO_CANDIDATE).all()
    assert ((scores_BKV > NO_CANDIDATE).sum(axis=-1) == min(top_k, 200)).all()
    np.testing.assert_array_equal(ids_BK, scores_BKV.argmax(axis=-1))


@pytest.mark.parametrize("top_k", [1, 6, 7])
def test_the_lowest_id_wins_a_tie(tmp_path: Path, form: str, top_k: int) -> None:
    """A vocabulary whose second half repeats the first, in the head and in both codebooks."""
    config = make_target(tmp_path / "target")
    make_drafter(tmp_path / "draft", config, dflash2={"selector_top_k": top_k})
    names = ["candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"]
    for folder, name in (("target", "lm_head.weight"), *(("draft", name) for name in names)):
        table = load_file(tmp_path / folder / "model.safetensors")[name]
        edit_tensors(tmp_path / folder, {name: np.concatenate([table[:128], table[:128]])})
    ids_BK, scores_BKV = _drafted(_built(tmp_path, config, form))
    first, second = scores_BKV[..., :128] > NO_CANDIDATE, scores_BKV[..., 128:] > NO_CANDIDATE
    assert (ids_BK < 128).all()
    assert not (second & ~first).any(), "of two equal ids, the lower one is a candidate first"
    np.testing.assert_array_equal(first.sum(axis=-1) - second.sum(axis=-1), top_k % 2)
    np.testing.assert_array_equal(scores_BKV[..., :128][second], scores_BKV[..., 128:][second])


# -- the whole loop ----------------------------------------------------------------------------------------------------


def _package_rounds(
    pair: Pair, prompt: list[int], count: int, patch: pytest.MonkeyPatch
) -> tuple[list[int], list[int]]:
    """(tokens, emitted tokens of each round) of the package's own loop."""
    import torch

    target = TargetOracle(pair.target)
    oracle: Any = DFlash2Oracle(pair.drafters["draft"], target)
    patch.setattr(oracle.dflash, "_cuda_time", time.perf_counter)  # its statistics ask a GPU for the time
    ids = torch.tensor([prompt])
    run = oracle.dflash.dflash_generate(oracle.model, target.model, ids, count, None, return_stats=True)
    return run.output_ids[0, len(prompt) :].tolist(), run.acceptance_lengths


def _decoder_rounds(pair: Pair, prompt: list[int], count: int) -> tuple[list[int], list[int]]:
    """The same of the decoder."""
    runtime = OrtRuntime(pair.bundle, threads=1)
    decoder = Decoder(pair.bundle, runtime)
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    decoder.submit(Request("one", prompt, params, pair.bundle.strategy("draft"), 0))
    emitted = []
    while not decoder.idle:
        emitted += [list(emission.tokens) for emission in decoder.step().emissions]
    runtime.close()
    return [token for tokens in emitted for token in tokens], [len(tokens) for tokens in emitted[1:]]


def test_the_decoder_accepts_what_the_package_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round by round, over a vocabulary so small that chance drafts are right now and then."""
    keys: Config = {"dflash2": {"selector_top_k": 4}, "sharpness": 0.3}
    pair = build_pair(tmp_path, {"vocab_size": 6}, {"draft": keys})
    rng, accepted = np.random.default_rng(4), 0
    for length in (3, 17, 40):
        prompt = random_tokens(rng, length, 6)
        wanted, lengths = _package_rounds(pair, prompt, 80, monkeypatch)
        found, ours = _decoder_rounds(pair, prompt, 80)
        assert found == wanted
        whole = [end for end in np.cumsum(lengths) if end <= 80 - 8]  # the package shortens its last blocks
        assert ours[: len(whole)] == lengths[: len(whole)]
        accepted += sum(lengths[: len(whole)]) - len(whole)
    assert accepted > 10
