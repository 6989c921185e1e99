"""How often a quantised target says the same as the float model: reported, not judged."""

from __future__ import annotations

import numpy as np

from dflow_trt import contract as c
from dflow_trt import reference as ref
from dflow_trt.bundle import Bundle
from dflow_trt.checkpoint.target import TargetCheckpoint
from dflow_trt.checkpoint.weights import Array
from dflow_trt.selfcheck.engine import Engine

SAMPLE_ROWS = 128
SAMPLE_TEXT = (
    "The quick brown fox jumps over the lazy dog. Speculative decoding drafts several tokens and verifies them in one "
    "pass of the target model, so that the output stays exactly the target's own.\ndef add(a, b):\n    return a + b\n"
)


def quantised_agreement(bundle: Bundle, target: TargetCheckpoint) -> float:
    """Share of positions of a sample text where the quantised target's best next token is the float model's.

    Layer by layer: the memory stays that of one layer.
    """
    ids, engine = _sample_ids(bundle), Engine(bundle, c.TARGET, None)
    x = engine.embed(ids)
    for i in range(bundle.target.stack.num_layers):
        x = engine.block(i, x)
    feeds = {f"layers.{bundle.target.stack.num_layers - 1}.out": x[None], c.LOGIT_ROWS.name: np.arange(len(ids))[None]}
    found = engine.section(feeds, [c.NEXT_IDS.name])[c.NEXT_IDS.name][0]
    wanted, _ = ref.target_forward(target.weights, target.spec, ids.tolist())
    return float(np.mean(found == wanted.argmax(axis=1)))


def _sample_ids(bundle: Bundle) -> Array:
    """Tokens of the sample text; without a tokenizer, random ids."""
    limit = min(SAMPLE_ROWS, bundle.build.prefill_chunk)
    if bundle.tokenizer_path is None:
        return np.random.default_rng(0).integers(0, bundle.target.live_vocab, limit)
    from dflow_trt.text import Tokenizer

    return np.array(Tokenizer.from_folder(bundle.tokenizer_path).encode(SAMPLE_TEXT)[:limit])
