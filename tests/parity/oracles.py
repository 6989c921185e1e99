"""Independent references: transformers' Qwen3, the ``dflash`` package's drafters, torch's GRU and linear layers for
Domino's head, and the relay in float64 numpy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

Array = np.ndarray[Any, np.dtype[Any]]
DEAD = -1e30  # the score of an id that is no candidate


class TargetOracle:
    """transformers' Qwen3ForCausalLM in float32; whole sequences, no cache."""

    def __init__(self, folder: Path) -> None:
        torch = pytest.importorskip("torch", reason="the reference is torch code")
        transformers = pytest.importorskip("transformers", reason="the reference is transformers' Qwen3")
        torch.set_num_threads(1)  # tiny models: more threads only wait for each other
        model = transformers.Qwen3ForCausalLM
        self.model = model.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    def __call__(self, tokens: Sequence[int]) -> tuple[Array, list[Array]]:
        """(logits [N,V], hidden states: the embedding output, then each layer's [N,E])."""
        import torch

        with torch.inference_mode():
            out = self.model(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False)
        return out.logits[0].numpy(), [state[0].numpy() for state in out.hidden_states]


class DrafterOracle:
    """dflash's DFlashDraftModel in float32 with its own cache, driven as ``dflash_generate`` does; one request."""

    architecture = "DFlashDraftModel"

    def __init__(self, folder: Path, target: TargetOracle, tap_offset: int = 1) -> None:
        torch = pytest.importorskip("torch", reason="the reference is torch code")
        self.dflash = pytest.importorskip("dflash.model", reason="the reference is the dflash package")
        model = getattr(self.dflash, self.architecture)
        self.model = model.from_pretrained(folder, dtype=torch.float32).eval()
        self.target, self.tap_offset = target.model, tap_offset

    def features(self, hidden_states: Sequence[Array]) -> Array:
        """The taps [N, taps*E]; ``tap_offset`` 1 is right, since index 0 is the embedding output."""
        return np.concatenate([hidden_states[i + self.tap_offset] for i in self.model.target_layer_ids], -1)

    def h(self, features: Array) -> Array:
        import torch

        with torch.inference_mode():
            return self.model.hidden_norm(self.model.fc(torch.tensor(features))).numpy()

    def cache(self) -> Any:
        return self.dflash._make_cache(self.model.config)

    def draft(
        self,
        cache: Any,
        features: Array,
        anchor: int,
        position: int,
        drafts: Sequence[int],
        block_JE: Array | None = None,
    ) -> Array:
        """Logits [K,V] of the block at ``position``; ``features`` are the context rows since the last draft.

        drafts: what was drafted, for a head that reads it. block_JE: the block's embeddings where a relay changed them.
        """
        import torch

        model, first = self.model, position - len(features)
        with torch.inference_mode():
            hidden = model(
                target_hidden=torch.tensor(features)[None],
                noise_embedding=self._block(anchor) if block_JE is None else torch.tensor(block_JE)[None],
                position_ids=torch.arange(first, position + model.block_size)[None],
                past_key_values=cache,
                use_cache=True,
            )
            self.dflash._crop_to(cache, position)
            return self.logits(hidden[0], anchor, drafts).numpy()

    def _block(self, anchor: int) -> Any:
        """The embeddings of the anchor and of masks, [1,J,E]."""
        import torch

        model = self.model
        ids = torch.full((1, model.block_size), model.mask_token_id)
        ids[0, 0] = anchor
        scale = float(self.dflash._draft_value(model.config, "input_embedding_scale", 1.0))
        return self.dflash._raw_input_embeddings(self.target, ids, scale)

    def logits(self, hidden: Any, anchor: int, drafts: Sequence[int]) -> Any:
        """Final-normed slots [J,E] -> logits [K,V]."""
        return self.base(hidden[1:])

    def base(self, hidden: Any) -> Any:
        """The target's head over final-normed slots."""
        return self.model.compute_logits(hidden[None], self.dflash._output_head(self.target))[0]


class DominoOracle(DrafterOracle):
    """The same with Domino's head: torch's own GRU over whole prefixes, and linear layers of the tensors' sizes."""

    def __init__(self, folder: Path, target: TargetOracle, tap_offset: int = 1) -> None:
        super().__init__(folder, target, tap_offset)
        from torch import nn

        keys = json.loads((folder / "config.json").read_text())["dflash_config"]
        self.first, self.prefix = 0 if keys["shift_label"] else 1, keys["pure_draft_prefix_len"]
        hidden, vocab = self.model.config.hidden_size, self.model.config.vocab_size
        state, rank = keys["gru_hidden_dim"], keys["emb_dim"]
        self.head = nn.Module()
        self.head.prefix_gru = nn.GRU(hidden, state, bias=False, batch_first=True)
        layers = nn.Linear(hidden + state, rank, bias=False), nn.SiLU(), nn.Linear(rank, vocab, bias=False)
        self.head.embed_proj = nn.Sequential(*layers)
        missing, _ = self.head.load_state_dict(_torch(folder), strict=False)
        assert not missing

    def logits(self, hidden: Any, anchor: int, drafts: Sequence[int]) -> Any:
        """Base logits, corrected behind the prefix by what the GRU has read: the anchor and the drafts before."""
        import torch

        z, rows = hidden[self.first :], []
        for i, base in enumerate(self.base(z)):
            read = self.target.get_input_embeddings()(torch.tensor([[anchor, *drafts[:i]]]))
            state = self.head.prefix_gru(read)[0][0, -1]
            corrected = base + self.head.embed_proj(torch.cat([z[i], state]))
            rows.append(corrected if i >= self.prefix else base)
        return torch.stack(rows)


class DFlash2Oracle(DrafterOracle):
    """dflash's DFlash2DraftModel: its convolutions, its selector.

    Of the last block: path_K, what the package itself drafts; gap_K, how far the last candidate of each slot is from
    the best id that is none.
    """

    architecture = "DFlash2DraftModel"

    def logits(self, hidden: Any, anchor: int, drafts: Sequence[int]) -> Any:
        """The scores of each slot's candidates behind these drafts, [K,V]; DEAD elsewhere."""
        import torch

        z, ids, selector = hidden[1:], torch.tensor([anchor, *drafts[:-1]]), self.model.candidate_selector
        head = self.dflash._output_head(self.target)
        self.path_K = self.model.propose(z[None], ids[:1], head, 0.0)[0][0].numpy()
        base = self.base(z)
        ranked = base.sort(dim=-1, descending=True)
        self.gap_K = self._gap(ranked.values, selector.top_k)
        best = ranked.indices[:, : selector.top_k]
        query = selector.predecessor_codebook(ids) * selector.hidden_projection(z)
        follows = (selector.successor_codebook(best) @ query[:, :, None])[:, :, 0]
        return torch.full_like(base, DEAD).scatter(-1, best, ranked.values[:, : selector.top_k] + follows)

    def _gap(self, ranked: Any, top_k: int) -> Array:
        if top_k == ranked.shape[1]:
            return np.full(len(ranked), np.inf)
        return (ranked[:, top_k - 1] - ranked[:, top_k]).numpy()


def oracle_of(head: Any) -> type[DrafterOracle]:
    """The reference of a drafter with that head."""
    return {"NoneType": DrafterOracle, "DominoSpec": DominoOracle, "SelectorSpec": DFlash2Oracle}[type(head).__name__]


class RelayOracle:
    """[beta ; gamma] = W2 silu(W1 [E(b) ; E(y_hat) ; h] + b1) + b2, x = E(mask) + beta * LN(h) + gamma, in float64."""

    def __init__(self, target: Path, drafter: Path, eps: float, scale: float = 1.0) -> None:
        self.weights = {key: value.astype(np.float64) for key, value in _load(drafter).items()}
        self.table = _load(target)["model.embed_tokens.weight"].astype(np.float64) * scale
        self.eps = eps

    def slot(self, token: int, h: Array, bonus: int, reject: int) -> Array:
        """One relayed block slot [E]."""
        w, state = self.weights, h.astype(np.float64)
        joined = np.concatenate([self.table[bonus], self.table[reject], state])
        inner = w["relay_mlp.0.weight"] @ joined + w["relay_mlp.0.bias"]
        inner = inner * np.exp(-np.logaddexp(0, -inner))
        beta, gamma = np.split(w["relay_mlp.2.weight"] @ inner + w["relay_mlp.2.bias"], 2)
        centred = state - state.mean()
        normed = centred / np.sqrt((centred**2).mean() + self.eps)
        return self.table[token] + beta * (normed * w["relay_norm.weight"] + w["relay_norm.bias"]) + gamma


def _torch(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}


def _load(folder: Path) -> dict[str, Array]:
    return load_file(folder / "model.safetensors")
