"""Drafters that make one draft after another, in training: against naive code, and on texts that can be learned."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training needs torch (the extra `train`)")
pytest.importorskip("transformers", reason="training needs transformers (the extra `train`)")

from transformers import LlamaConfig, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from dflow_trt.training.data import Batch, Trajectory, collate  # noqa: E402
from dflow_trt.training.draft_model import NextTokenLoss, ReadTexts, make_model  # noqa: E402
from dflow_trt.training.eagle3 import (  # noqa: E402
    Chains,
    Eagle3Head,
    TextRows,
    UnrolledLoss,
    frequent_ids,
    make_head,
    written_taps,
)
from dflow_trt.training.loop import DrafterTraining, Reader  # noqa: E402
from dflow_trt.training.recipe import DrafterLoss, OptimiserSettings  # noqa: E402
from dflow_trt.training.shapes import DraftModelShape, Eagle3Shape  # noqa: E402
from dflow_trt.training.simulate import Tally, play, serial_rounds, tau_accepted  # noqa: E402
from dflow_trt.training.target import FrozenTarget, TextAlone  # noqa: E402

VOCAB, WIDTH, PAD, DRAFTS = 61, 32, 0, 4
TAPS = (1, 2, 3)
DRAFTED = (3, *range(5, 59))  # the ids that a head drafts: some at both ends are missing


def tiny_config(**changes: object) -> dict[str, Any]:
    fields: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.3,
    }
    return {**fields, **changes}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny_target() -> Any:
    torch.manual_seed(1)
    return Qwen3ForCausalLM(Qwen3Config(**tiny_config(), tie_word_embeddings=True)).eval()


def tiny_head() -> Eagle3Head:
    """A head whose every tensor matters."""
    torch.manual_seed(2)
    config = LlamaConfig(**tiny_config(num_hidden_layers=1, initializer_range=0.2), tie_word_embeddings=False)
    config.draft_vocab_size, config.eagle_config = len(DRAFTED), {"eagle_aux_hidden_state_layer_ids": list(TAPS)}
    head = Eagle3Head(config)
    for parameter in head.parameters():  # norms too: a weight of one everywhere would hide a swapped norm
        parameter.data += 0.1 * torch.randn_like(parameter)
    head.set_vocabulary(DRAFTED)
    return head.eval()


def tiny_draft_model() -> Any:
    torch.manual_seed(3)
    return Qwen3ForCausalLM(Qwen3Config(**tiny_config(hidden_size=24), tie_word_embeddings=True)).eval()


def random_texts(count: int) -> list[Trajectory]:
    rng = random.Random(5)

    def draw(fewest: int, most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(5, VOCAB) for _ in range(rng.randint(fewest, most)))

    return [Trajectory(draw(2, 9), draw(2, 14)) for _ in range(count)]


class NaiveEagle3:
    """One text of EAGLE-3 in numpy and float64, row after row with a cache, from the tensors' public names."""

    def __init__(self, head: Eagle3Head, model: Any, text: list[int]) -> None:
        self._w = {name: tensor.double().numpy() for name, tensor in head.state_dict().items() if name != "t2d"}
        self._embedding = model.get_input_embeddings().weight.detach().double().numpy()
        states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        taps = torch.cat([states[tap + 1][0] for tap in TAPS], dim=-1).double().numpy()
        self._g = taps @ self._w["fc.weight"].T
        self._text, self._cache = text, list[tuple[np.ndarray, np.ndarray]]()

    def chain(self, anchor: int, feed: Callable[[int, int], int], count: int) -> tuple[list[int], np.ndarray]:
        """The drafts after an anchor, and their logits; `feed(j, d_j)` is the token that goes on from draft j."""
        self._cache, drafts, logits = [], list[int](), []
        for row in range(anchor):
            feature = self._row(row, self._g[row], self._text[row + 1])
        for step in range(count):
            logits.append(self._w["lm_head.weight"] @ self._norm(feature, "norm"))
            best = int(logits[-1].argmax())
            drafts.append(best + int(self._w["d2t"][best]))
            feature = self._row(anchor + step, feature, feed(step, drafts[-1]))
        return drafts, np.array(logits)

    def _row(self, position: int, feature: np.ndarray, token: int) -> np.ndarray:
        layer = {name.removeprefix("midlayer."): w for name, w in self._w.items() if name.startswith("midlayer.")}
        normed = self._norm(self._embedding[token], "midlayer.input_layernorm")
        x = np.concatenate([normed, self._norm(feature, "midlayer.hidden_norm")])
        q, k, v = ((layer[f"self_attn.{name}_proj.weight"] @ x).reshape(-1, 16) for name in "qkv")
        self._cache.append((self._turn(k, position), v))
        keys, values = (np.repeat(np.stack(rows), 2, axis=1) for rows in zip(*self._cache, strict=True))
        scores = np.einsum("hd,rhd->hr", self._turn(q, position), keys) / 4.0
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("hr,rhd->hd", weights / weights.sum(-1, keepdims=True), values)
        h = feature + layer["self_attn.o_proj.weight"] @ attended.reshape(-1)
        inner = self._norm(h, "midlayer.post_attention_layernorm")
        gate, up = (layer[f"mlp.{name}_proj.weight"] @ inner for name in ("gate", "up"))
        return h + layer["mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean() + 1e-6) * self._w[f"{name}.weight"]

    @staticmethod
    def _turn(heads: np.ndarray, position: int) -> np.ndarray:
        angle = position * 10000.0 ** (-np.arange(8) / 8)
        a, b = heads[:, :8], heads[:, 8:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=1)


def read_rows(head: Eagle3Head, model: Any, texts: list[Trajectory]) -> tuple[Batch, TextRows]:
    read = FrozenTarget(model, TAPS).read(collate(texts, PAD))
    return read.batch, TextRows.read(head, model.get_input_embeddings().weight, read)


@torch.no_grad()
def test_chains_of_a_head_draft_what_cached_steps_in_float64_draft() -> None:
    head, model, texts = tiny_head().double(), tiny_target().double(), random_texts(3)
    batch, rows = read_rows(head, model, texts)
    anchors = torch.stack([batch.start_N, batch.end_N - 2, batch.end_N - 1], dim=1)
    drafts = rows.draft(anchors, DRAFTS)
    for index, text in enumerate(texts):
        naive = NaiveEagle3(head, model, list(text.prompt_ids + text.response_ids))
        for place, anchor in enumerate(anchors[index].tolist()):
            expected, _ = naive.chain(anchor, lambda _, draft: draft, DRAFTS)
            assert drafts[index, place].tolist() == expected
    assert len(set(drafts.flatten().tolist())) > DRAFTS, "the toy must not draft one token always"


@torch.no_grad()
def test_unrolled_training_computes_what_cached_steps_compute_after_true_tokens() -> None:
    head, model, texts = tiny_head().double(), tiny_target().double(), random_texts(2)
    batch, rows = read_rows(head, model, texts)
    anchors = torch.stack([batch.start_N, batch.start_N + 1], dim=1)[:, :1]
    chains, ids = Chains(rows, anchors), batch.ids_NS
    logits = [chains.step(ids.gather(1, (anchors + step).clamp(max=ids.shape[1] - 1))) for step in range(DRAFTS)]
    for index, text in enumerate(texts):
        padded = [*text.prompt_ids, *text.response_ids, *[PAD] * DRAFTS]
        naive = NaiveEagle3(head, model, list(text.prompt_ids + text.response_ids))
        anchor = int(anchors[index, 0])
        _, expected = naive.chain(anchor, lambda step, _, at=anchor, ids=padded: ids[at + step + 1], DRAFTS)
        inside = min(DRAFTS, len(text.response_ids))
        actual = torch.stack(logits, dim=2)[index, 0].numpy()
        np.testing.assert_allclose(actual[:inside], expected[:inside], atol=1e-5, rtol=0)


@torch.no_grad()
def test_unrolled_loss_is_that_of_every_draft_that_exists_and_that_the_head_can_make() -> None:
    head, model, texts = tiny_head().double(), tiny_target().double(), random_texts(4)
    target, decay = FrozenTarget(model, TAPS), 2.0
    loss, sums, counts = UnrolledLoss(head, target, DRAFTS, decay)(target.read(collate(texts, PAD)), None, 0.0)
    total, weight, expected_sums, expected_counts = 0.0, 0.0, np.zeros(DRAFTS), np.zeros(DRAFTS, int)
    for text in texts:
        ids, start = list(text.prompt_ids + text.response_ids), len(text.prompt_ids)
        naive = NaiveEagle3(head, model, ids)
        padded = [*ids, *[PAD] * DRAFTS]
        for anchor in range(start, len(ids) - 1):
            _, logits = naive.chain(anchor, lambda step, _, at=anchor, ids=padded: ids[at + step + 1], DRAFTS)
            for step, row in enumerate(logits):
                if anchor + step + 1 >= len(ids) or ids[anchor + step + 1] not in DRAFTED:
                    continue
                entropy = np.log(np.exp(row).sum()) - row[DRAFTED.index(ids[anchor + step + 1])]
                total, weight = total + entropy * np.exp(-step / decay), weight + np.exp(-step / decay)
                expected_sums[step] += entropy
                expected_counts[step] += 1
    assert counts.tolist() == expected_counts.tolist()
    assert 0 < counts[-1] < counts[0]
    assert float(loss) == pytest.approx(total / weight, abs=1e-5)
    np.testing.assert_allclose(sums.numpy(), expected_sums, atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_draft_model_drafts_what_it_would_generate() -> None:
    model, texts = tiny_draft_model(), random_texts(3)
    batch = collate(texts, PAD)
    read = ReadTexts(model, batch.ids_NS, live_vocab=VOCAB)
    for anchors in (batch.start_N, batch.end_N - 1, batch.start_N + 1):
        drafts = read.draft(anchors[:, None], DRAFTS)
        for index in range(len(texts)):
            prefix = batch.ids_NS[index : index + 1, : int(anchors[index]) + 1]
            greedy = {"do_sample": False, "max_new_tokens": DRAFTS, "pad_token_id": PAD, "eos_token_id": None}
            whole = model.generate(prefix, attention_mask=torch.ones_like(prefix), **greedy)
            assert drafts[index, 0].tolist() == whole[0, prefix.shape[1] :].tolist()


@torch.no_grad()
def test_ids_that_no_tokenizer_knows_are_not_drafted() -> None:
    model, batch = tiny_draft_model(), collate(random_texts(3), PAD)
    anchors, most = batch.start_N[:, None], 7
    assert ReadTexts(model, batch.ids_NS, VOCAB).draft(anchors, DRAFTS).max() >= most
    assert ReadTexts(model, batch.ids_NS, most).draft(anchors, DRAFTS).max() < most


@torch.no_grad()
def test_counted_rounds_are_those_of_a_naive_simulation() -> None:
    head, model, texts = tiny_head().double(), tiny_target().double(), random_texts(5)
    target = FrozenTarget(model, TAPS)
    texts = [Trajectory(text.prompt_ids, agreeing(head, model, text)) for text in texts]

    def start(read: Any) -> Any:
        rows = TextRows.read(head, target.embedding_VE, read)
        return serial_rounds(read.batch, lambda anchors: rows.draft(anchors, DRAFTS))

    counted = play(target, start, texts, PAD, batch_size=2)
    assert counted == [naive_tally(head, model, text) for text in texts]
    assert 0.5 < tau_accepted(counted) < DRAFTS, "the toy must accept some drafts and reject some"


def agreeing(head: Eagle3Head, model: Any, text: Trajectory) -> tuple[int, ...]:
    """A response that now and then follows the head's drafts."""
    response = list(text.response_ids[:2])
    for kept in (3, 1, DRAFTS, 0):
        ids = list(text.prompt_ids) + response
        drafts, _ = NaiveEagle3(head, model, ids).chain(len(ids) - 1, lambda _, draft: draft, DRAFTS)
        response += [*drafts[:kept], 5 + kept]
    return tuple(response)


def naive_tally(head: Eagle3Head, model: Any, text: Trajectory) -> Tally:
    ids, anchor = list(text.prompt_ids + text.response_ids), len(text.prompt_ids)
    naive, rounds, emitted, accepted = NaiveEagle3(head, model, ids), 0, 0, 0
    while anchor < len(ids) - 1:
        drafts, _ = naive.chain(anchor, lambda _, draft: draft, DRAFTS)
        a = 0
        while a < DRAFTS and anchor + a + 1 < len(ids) and drafts[a] == ids[anchor + a + 1]:
            a += 1
        rounds, accepted, emitted = rounds + 1, accepted + a, emitted + min(a + 1, len(ids) - 1 - anchor)
        anchor += a + 1
    return Tally(rounds, emitted, accepted)


def cyclic_texts(count: int, seed: int) -> list[Trajectory]:
    """Texts in which every token decides the next: a permutation of 40 ids, in one cycle."""
    order = random.Random(7).sample(range(5, 45), 40)
    rng = random.Random(seed)
    starts = [rng.randrange(40) for _ in range(count)]
    rows = [[order[(start + step) % 40] for step in range(24)] for start in starts]
    return [Trajectory(tuple(row[:6]), tuple(row[6:])) for row in rows]


def learned(loss: DrafterLoss, reader: Any, steps: int) -> list[float]:
    batches = [collate(cyclic_texts(8, seed), PAD) for seed in range(8)]
    training = DrafterTraining(loss, Reader(reader, batches), OptimiserSettings(steps, 1e-2, warmup_steps=5), seed=0)
    return [training.advance() for _ in range(steps)]


def test_a_head_learns_a_text_whose_every_token_decides_the_next() -> None:
    target = FrozenTarget(tiny_target(), TAPS)
    ids, share = frequent_ids(cyclic_texts(8, 0), 40, VOCAB)
    assert share == 1.0
    head = make_head(Eagle3Shape(4, 2, 16, TAPS, 48, 40, DRAFTS), Qwen3Config(**tiny_config()), target, ids, seed=0)
    losses = learned(UnrolledLoss(head, target, DRAFTS, 4.0), target, steps=200)
    assert losses[-1] < 0.1 * losses[0]

    def start(read: Any) -> Any:
        rows = TextRows.read(head, target.embedding_VE, read)
        return serial_rounds(read.batch, lambda anchors: rows.draft(anchors, DRAFTS))

    assert accepts_nearly_all(play(target, start, cyclic_texts(12, 99), PAD))


def test_a_draft_model_learns_a_text_whose_every_token_decides_the_next() -> None:
    model = make_model(DraftModelShape(2, 1, 16, 24, 2, 32, DRAFTS), Qwen3Config(**tiny_config()), seed=0)
    reader = TextAlone(torch.device("cpu"))
    losses = learned(NextTokenLoss(model), reader, steps=200)
    assert losses[-1] < 0.1 * losses[0]

    def start(read: Any) -> Any:
        texts = ReadTexts(model.eval(), read.batch.ids_NS, VOCAB)
        return serial_rounds(read.batch, lambda anchors: texts.draft(anchors, DRAFTS))

    assert accepts_nearly_all(play(reader, start, cyclic_texts(12, 99), PAD))


def accepts_nearly_all(tallies: list[Tally]) -> bool:
    """17 drafted tokens a text, 4 drafts and a bonus token a round: at best 4 rounds, 14 of the tokens drafts."""
    rounds, emitted, accepted = (sum(getattr(tally, name) for tally in tallies) for name in Tally.__annotations__)
    assert emitted == 17 * len(tallies)
    return rounds <= 4.3 * len(tallies) and accepted >= 13 * len(tallies)


def test_the_draft_vocabulary_is_the_most_frequent_ids_and_its_maps_are_inverse() -> None:
    texts = [Trajectory((9, 9, 9), (7, 7, 3)), Trajectory((9,), (7, 5, 3, 60))]
    assert frequent_ids(texts, 3, VOCAB) == ([7, 3, 5], 6 / 7)
    assert frequent_ids(texts, 5, 10) == ([7, 3, 5, 0, 1], 6 / 7), "the lowest of equals; no id beyond the tokenizer"
    head = tiny_head()
    target_ids = torch.arange(VOCAB)
    draft_ids, known = head.draft_ids(target_ids)
    assert target_ids[known].tolist() == list(DRAFTED)
    assert head.target_ids(draft_ids[known]).tolist() == list(DRAFTED)
    assert head.d2t.tolist() == [target - draft for draft, target in enumerate(DRAFTED)]


def test_taps_are_written_as_readers_take_them() -> None:
    """A list that begins with 1 means outputs of layers, any other the inputs of the layers after."""
    assert written_taps((1, 3, 4)) == [1, 3, 4]
    assert written_taps((2, 3, 4)) == [3, 4, 5]
