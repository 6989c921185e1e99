"""The torch drafter, its rollout and its counting, against the `dflash` package and against naive code."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch", reason="training needs torch (the extra `train`)")
pytest.importorskip("transformers", reason="training needs transformers (the extra `train`)")

from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from dflow_trt.spec import DominoSpec  # noqa: E402
from dflow_trt.training.data import Trajectory, collate  # noqa: E402
from dflow_trt.training.loop import DrafterTraining, Reader  # noqa: E402
from dflow_trt.training.model import Drafter, RelayInputs, extended, head_fields  # noqa: E402
from dflow_trt.training.recipe import DrafterSettings, OptimiserSettings, RolloutLoss  # noqa: E402
from dflow_trt.training.rollout import play_round, relay_sources, spread_anchors  # noqa: E402
from dflow_trt.training.simulate import Tally, simulate, tau_accepted, tau_emitted  # noqa: E402
from dflow_trt.training.target import FrozenTarget  # noqa: E402

VOCAB, BLOCK, MASK, PAD, STEPS = 61, 8, 3, 0, 20
TAPS = [3, 1]
ATOL = 1e-5


def tiny_target() -> Qwen3ForCausalLM:
    torch.manual_seed(1)
    return Qwen3ForCausalLM(tiny_config(num_hidden_layers=5, initializer_range=0.3)).eval()


def tiny_config(**changes: object) -> Qwen3Config:
    fields: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
    }
    return Qwen3Config(**{**fields, **changes})


def tiny_drafter(**changes: object) -> Drafter:
    torch.manual_seed(2)
    drafter = Drafter(
        tiny_config(
            block_size=BLOCK,
            num_target_layers=5,
            **{"dflash_config": {"mask_token_id": MASK, "target_layer_ids": TAPS}, "initializer_range": 0.2, **changes},
        )
    )
    for parameter in drafter.parameters():  # norms too: a weight of one everywhere would hide a swapped norm
        parameter.data += 0.1 * torch.randn_like(parameter)
    return drafter.eval()


def tiny_domino(prefix: int = 1, **changes: object) -> Drafter:
    """A drafter with a causal head whose correction is as large as its base logits."""
    head = head_fields(DominoSpec(prefix, state_size=12, rank=10, shifted=False))
    drafter = tiny_drafter(
        **{"dflash_config": {"mask_token_id": MASK, "target_layer_ids": TAPS, **head}, **changes},
    )
    for name, parameter in drafter.named_parameters():
        if name.startswith(("prefix_gru", "embed_proj")):
            torch.nn.init.normal_(parameter, std=0.5)
    return drafter


def random_trajectories(count: int) -> list[Trajectory]:
    rng = random.Random(5)

    def draw(fewest: int, most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(5, VOCAB) for _ in range(rng.randint(fewest, most)))

    return [Trajectory(draw(4, 9), draw(2, 30)) for _ in range(count)]


@torch.no_grad()
def test_drafter_without_relay_equals_the_dflash_package_over_cached_rounds(tmp_path):
    dflash = pytest.importorskip("dflash.model", reason="the oracle is the package `dflash`")
    drafter, target = tiny_drafter(), tiny_target()
    drafter.save(tmp_path)
    oracle = dflash.DFlashDraftModel.from_pretrained(tmp_path).eval()
    ids = torch.randint(5, VOCAB, (1, 40))
    sequence = Trajectory(tuple(ids[0, :4].tolist()), tuple(ids[0, 4:].tolist()))
    features = FrozenTarget(target, TAPS).read(collate([sequence], PAD)).features_NSC
    states = target(ids, output_hidden_states=True).hidden_states
    assert torch.equal(features, torch.cat([states[tap + 1] for tap in TAPS], dim=-1))

    embedding = target.get_input_embeddings().weight
    anchors = torch.tensor([[6, 7, 15, 19, 27]])
    blocks = drafter.block_embeds(embedding, ids.gather(1, anchors))
    ours = drafter(blocks, drafter.context(features), anchors)
    cache, seen = DynamicCache(config=oracle.config), 0
    cache.activate_past_recording()
    for index, anchor in enumerate(anchors[0].tolist()):
        theirs = oracle(
            target_hidden=features[:, seen:anchor],
            noise_embedding=blocks[:, index],
            position_ids=torch.arange(seen, anchor + BLOCK)[None],
            past_key_values=cache,
            use_cache=True,
        )
        cache.crop(anchor - cache.get_seq_length())
        seen = anchor
        torch.testing.assert_close(ours[:, index], theirs, atol=ATOL, rtol=0)


@torch.no_grad()
def test_zero_initialised_relay_equals_dflash_bit_by_bit():
    plain, target = tiny_drafter(), tiny_target()
    relayed = extended(plain, "at_rejection")
    embedding = target.get_input_embeddings().weight
    anchors = torch.tensor([[9, 12], [10, 11]])
    context = torch.randn(2, 20, 32)
    ids = torch.randint(5, VOCAB, (2, 2))
    on = torch.rand(2, 2, BLOCK) < 0.5
    inputs = RelayInputs(torch.randn(2, 2, BLOCK, 32) * 9, on, ids.flip(0), ids.flip(1))
    expected = plain(plain.block_embeds(embedding, ids), context, anchors)
    actual = relayed(relayed.block_embeds(embedding, ids, inputs), context, anchors)
    assert torch.equal(actual, expected)
    names = set(relayed.state_dict()) - set(plain.state_dict())
    parts = ("relay_norm", "relay_mlp.0", "relay_mlp.2")
    assert names == {f"{part}.{kind}" for part in parts for kind in ("weight", "bias")}


@torch.no_grad()
def test_zero_initialised_head_drafts_what_dflash_drafts():
    plain, target = tiny_drafter(), tiny_target()
    headed = extended(plain, head=DominoSpec(1, state_size=12, rank=10, shifted=False))
    embedding, ids = target.get_input_embeddings().weight, torch.randint(5, VOCAB, (2, 3))
    rows = torch.randn(2, 3, BLOCK - 1, 32)
    base = rows @ embedding.T
    assert torch.equal(headed.causal_head(embedding).roll_out(base, rows, ids), base.argmax(-1))
    names = set(headed.state_dict()) - set(plain.state_dict())
    assert names == {"prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight"}


@torch.no_grad()
@pytest.mark.parametrize("prefix", [0, 1, 3, BLOCK - 1])
def test_a_causal_head_rolls_out_its_own_drafts_and_is_scored_after_given_ones(prefix):
    drafter, embedding = tiny_domino(prefix), tiny_target().get_input_embeddings().weight
    head, ids, rows = drafter.causal_head(embedding), torch.randint(5, VOCAB, (2, 3)), torch.randn(2, 3, BLOCK - 1, 32)
    base = rows @ embedding.T
    drafts = head.roll_out(base, rows, ids)
    naive = [[naive_drafts(drafter, embedding, rows[n, m], int(ids[n, m])) for m in range(3)] for n in range(2)]
    assert drafts.tolist() == naive
    logits = head.logits(base, rows, ids, drafts)
    assert torch.equal(logits.argmax(-1), drafts)
    assert torch.equal(logits[:, :, :prefix], base[:, :, :prefix])
    other = torch.randint(5, VOCAB, drafts.shape)
    changed = head.logits(base, rows, ids, other)
    assert torch.equal(changed[:, :, 0], logits[:, :, 0]), "the first draft follows the anchor alone"
    assert prefix >= BLOCK - 1 or not torch.equal(changed, logits)


def test_a_causal_head_learns_from_its_base_first_and_from_its_correction_last():
    target, trajectories = FrozenTarget(tiny_target(), TAPS), learnable_trajectories()
    loss, optimiser = RolloutLoss(tiny_domino(), target, DrafterSettings(anchors=4)), OptimiserSettings(STEPS, 8e-3)
    training = DrafterTraining(loss, Reader(target, [collate(trajectories, PAD)]), optimiser, seed=0)
    before = training.drafter.embed_proj[2].weight.detach().clone()
    assert training.base_share == 1.0
    training._optimiser.zero_grad()
    training._backward(0)
    assert not training.drafter.embed_proj[2].weight.grad.any(), "at first the correction has no part in the loss"
    losses = [training.advance() for _ in range(STEPS)]
    assert training.base_share == 0.0
    assert losses[-1] < losses[0]
    assert not torch.equal(training.drafter.embed_proj[2].weight, before)
    assert len(training.slot_losses) == BLOCK - 1


def test_rounds_start_from_a_heads_own_drafts_unless_told():
    model, trajectories = tiny_target(), learnable_trajectories()
    target, drafter = FrozenTarget(model, TAPS), tiny_domino()
    read = target.read(collate(trajectories, PAD))
    anchors = read.batch.start_N[:, None]
    own, forced = (
        play_round(drafter, target, read, drafter.context(read.features_NSC), anchors, roll_out=way)
        for way in (True, False)
    )
    assert torch.equal(own.logits_NMKV, forced.logits_NMKV), "both are scored after the true tokens"
    assert torch.equal(forced.drafts_NMK, forced.logits_NMKV.argmax(-1))
    assert not torch.equal(own.drafts_NMK, forced.drafts_NMK)


def test_every_tensor_of_a_step_is_made_on_the_device_of_its_inputs():
    """With another device as the default, a tensor made without one would not meet the others."""
    target, trajectories = FrozenTarget(tiny_target(), TAPS), learnable_trajectories()
    drafter = extended(tiny_domino(), "after_rejection")
    rollout = RolloutLoss(drafter, target, DrafterSettings(anchors=4, rounds=2, relay=True))
    read = target.read(collate(trajectories, PAD))
    with torch.device("meta"):
        loss, slots, _ = rollout(read, torch.Generator(device="cpu").manual_seed(0), 0.5)
        loss.backward()
    assert (loss.device.type, slots.device.type) == ("cpu", "cpu")


# Slot -> verify row, for a = 0..7 of a block of 8 (7 drafts).
AFTER_REJECTION = [
    {2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7},
    {2: 3, 3: 4, 4: 5, 5: 6, 6: 7},
    {2: 4, 3: 5, 4: 6, 5: 7},
    {2: 5, 3: 6, 4: 7},
    {2: 6, 3: 7},
    {2: 7},
    {},
    {},
]
FIRST_SLOT_AT_REJECTION = [{1: 1}, {1: 2}, {1: 3}, {1: 4}, {1: 5}, {1: 6}, {1: 7}, {}]


@pytest.mark.parametrize("accepted", range(BLOCK))
@pytest.mark.parametrize("first_slot", [2, 1])
def test_relay_alignment_follows_the_table(first_slot, accepted):
    expected = dict(AFTER_REJECTION[accepted])
    if first_slot == 1:
        expected |= FIRST_SLOT_AT_REJECTION[accepted]
    source, on = relay_sources(torch.tensor(accepted), first_slot, BLOCK, BLOCK - 1)
    assert {slot: int(source[slot]) for slot in range(BLOCK) if on[slot]} == expected


def test_relay_stops_at_the_previous_draft_length():
    source, on = relay_sources(torch.tensor(1), 2, BLOCK, drafted=4)
    assert {slot: int(source[slot]) for slot in range(BLOCK) if on[slot]} == {2: 3, 3: 4}


def naive_drafts(drafter: Drafter, embedding: torch.Tensor, rows: torch.Tensor, anchor: int) -> list[int]:
    """The drafts of one block, one after the other, the GRU written out as equations."""
    drafts, token = [], anchor
    if drafter.head is not None:
        w_x, w_h = drafter.prefix_gru.weight_ih_l0, drafter.prefix_gru.weight_hh_l0
        state = torch.zeros(drafter.head.state_size)
    for index, z in enumerate(rows):
        logits = z @ embedding.T
        if drafter.head is not None:
            (x_r, x_z, x_n), (h_r, h_z, h_n) = ((w @ v).chunk(3) for w, v in ((w_x, embedding[token]), (w_h, state)))
            update = torch.sigmoid(x_z + h_z)
            state = (1 - update) * torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n) + update * state
            if index >= drafter.head.prefix_length:
                inner = drafter.embed_proj[0].weight @ torch.cat([z, state])
                logits = logits + drafter.embed_proj[2].weight @ (inner * torch.sigmoid(inner))
        token = int(logits.argmax())
        drafts.append(token)
    return drafts


@torch.no_grad()
def naive_tally(drafter: Drafter, model: Qwen3ForCausalLM, trajectory: Trajectory, relay: bool) -> Tally:
    """One request, one round after the other, every tensor computed afresh from token ids."""
    text = list(trajectory.prompt_ids + trajectory.response_ids)
    embedding = model.get_input_embeddings().weight
    first_slot = {"after_rejection": 2, "at_rejection": 1}[drafter.config.dflow_config["relay_start"]]

    def h(ids: list[int]) -> torch.Tensor:
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        return drafter.context(torch.cat([states[tap + 1] for tap in TAPS], dim=-1))[0]

    anchor, pending = len(trajectory.prompt_ids), {}
    rounds = emitted = accepted = 0
    while anchor < len(text) - 1:
        block = [embedding[text[anchor]]] + [embedding[MASK]] * (BLOCK - 1)
        for slot, (bonus, reject, state) in pending.items():
            joined = torch.cat([embedding[bonus], embedding[reject], state])
            beta, gamma = drafter.relay_mlp(joined).chunk(2)
            block[slot] = block[slot] + beta * drafter.relay_norm(state) + gamma
        context = h(text)[:anchor]
        hidden = drafter(torch.stack(block)[None, None], context[None], torch.tensor([[anchor]]))
        drafts = naive_drafts(drafter, embedding, hidden[0, 0, 1:], text[anchor])
        a = 0
        while a < len(drafts) and anchor + a + 1 < len(text) and drafts[a] == text[anchor + a + 1]:
            a += 1
        left = len(text) - 1 - anchor
        rounds, accepted, emitted = rounds + 1, accepted + a, emitted + min(a + 1, left)
        pending = {}
        if relay and a < left:
            rows = h(text[: anchor + 1] + drafts)[anchor:]
            for slot in range(first_slot, BLOCK - a):
                if a + slot < BLOCK:
                    pending[slot] = (text[anchor + a + 1], drafts[a], rows[a + slot])
        anchor += a + 1
    return Tally(rounds, emitted, accepted)


@pytest.mark.parametrize("relay", [False, True])
@pytest.mark.parametrize("relay_start", ["after_rejection", "at_rejection"])
@pytest.mark.parametrize("make", [tiny_drafter, tiny_domino])
def test_simulated_tau_equals_a_naive_one_by_one_simulation(make, relay_start, relay):
    model, trajectories = tiny_target(), learnable_trajectories()
    drafter = make(dflow_config={"relay_start": relay_start})
    with torch.no_grad():
        drafter.relay_mlp[2].weight.normal_(std=0.2)
    target = FrozenTarget(model, TAPS)
    fit_a_little(drafter, target, trajectories)
    simulated = simulate(drafter, target, trajectories, PAD, relay, batch_size=4)
    naive = [naive_tally(drafter, model, trajectory, relay) for trajectory in trajectories]
    assert simulated == naive
    assert 1.2 < tau_emitted(simulated) < BLOCK, "the toy must accept some drafts and reject some"
    assert tau_accepted(simulated) < tau_emitted(simulated)
    assert sum(tally.emitted for tally in simulated) == sum(len(t.response_ids) - 1 for t in trajectories)


def learnable_trajectories() -> list[Trajectory]:
    """Runs of three tokens with random ones strewn in: partly predictable."""
    rng = random.Random(6)
    responses = [
        tuple(5 + i % 3 if rng.random() < 0.8 else rng.randrange(5, VOCAB) for i in range(length))
        for length in (2, 20, 9, 14, 3)
    ]
    prompts = [trajectory.prompt_ids for trajectory in random_trajectories(len(responses))]
    return [Trajectory(*pair) for pair in zip(prompts, responses, strict=True)]


def fit_a_little(drafter: Drafter, target: FrozenTarget, trajectories: list[Trajectory]) -> None:
    relay = drafter.has_relay
    loss = RolloutLoss(drafter, target, DrafterSettings(anchors=4, rounds=2, relay=relay))
    reader = Reader(target, [collate(trajectories, PAD)])
    training = DrafterTraining(loss, reader, OptimiserSettings(STEPS, 8e-3), seed=0)
    for _ in range(STEPS):
        training.advance()


def test_training_is_deterministic_by_seed_and_moves_the_relay():
    target, trajectories = FrozenTarget(tiny_target(), TAPS), learnable_trajectories()
    trained = []
    for _ in range(2):
        drafter = extended(tiny_drafter(), "after_rejection")
        fit_a_little(drafter, target, trajectories)
        trained.append(drafter.state_dict())
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])
    assert trained[0]["relay_mlp.2.weight"].abs().max() > 0


def test_anchors_always_have_a_token_after_them():
    batch = collate(random_trajectories(6), PAD)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        anchors = spread_anchors(batch, 5, generator)
        assert (anchors >= batch.start_N[:, None]).all()
        assert (anchors < batch.end_N[:, None] - 1).all()


def test_the_last_target_layer_is_refused_as_a_tap():
    with pytest.raises(ValueError, match="target layer 4"):
        Drafter(
            tiny_config(
                block_size=BLOCK,
                num_target_layers=5,
                dflash_config={"mask_token_id": MASK, "target_layer_ids": [1, 4]},
            )
        )


def test_a_drafter_survives_saving_and_loading(tmp_path):
    drafter = extended(tiny_drafter(), "at_rejection")
    drafter.save(tmp_path)
    loaded = Drafter.load(tmp_path)
    assert loaded.first_relay_slot == 1
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in drafter.state_dict().items())
