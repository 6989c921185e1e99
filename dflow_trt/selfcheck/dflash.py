"""The DFlash family: context, relay, and the drafter with whatever head it has."""

from __future__ import annotations

import numpy as np

from dflow_trt import contract as c
from dflow_trt import reference as ref
from dflow_trt.checkpoint.drafter import DFlashCheckpoint
from dflow_trt.checkpoint.weights import Array
from dflow_trt.feeds import kv_index
from dflow_trt.selfcheck.base import Checks
from dflow_trt.selfcheck.dflash2 import check_convolutions, check_path, check_selector
from dflow_trt.selfcheck.domino import check_domino, corrections
from dflow_trt.selfcheck.drafter import Drafter, check_base, check_head
from dflow_trt.selfcheck.engine import Engine
from dflow_trt.selfcheck.full import Prompt
from dflow_trt.selfcheck.model import Blocks
from dflow_trt.spec import DFlashSpec, SelectorSpec

ROWS = 5  # of a context call


def check(checks: Checks, draft: DFlashCheckpoint) -> None:
    """See :mod:`dflow_trt.selfcheck`."""
    drafter = Drafter(checks, draft)
    _check_context(drafter)
    _check_relay(drafter)
    _check_drafter(drafter)


def _check_context(drafter: Drafter) -> None:
    """h of all rows, and keys and values of the first and the last layer, at the last positions."""
    checks, spec, start = drafter.checks, drafter.spec, drafter.checks.far(ROWS)
    packed, own = checks.taps(ROWS, spec.taps)
    positions, layers = start + np.arange(ROWS), sorted({0, spec.stack.num_layers - 1})
    feeds = {
        c.HIDDEN.name: packed[None],
        c.POSITION_IDS.name: positions[None],
        c.WRITE_INDEX.name: np.array([start]),
    }
    caches = [(i, tensor) for i in layers for tensor in c.CACHE_TENSORS]
    outputs = [c.H.name, *(c.present(tensor, i) for i, tensor in caches)]
    found = Engine(checks.bundle, c.CONTEXT, spec.name).whole(feeds, outputs)
    label, wanted = f"{spec.name}.context", ref.context_states(drafter.draft.weights, spec, own)
    checks.compare(f"{label}.h", found[c.H.name][0], wanted)
    for i, tensor in caches:
        rows = drafter.stack.heads(i, tensor, wanted, positions)
        written = found[c.present(tensor, i)][0, :, start : start + ROWS]
        checks.compare(f"{label}.layers.{i}.{tensor}", written, rows, drafter.form)


def _check_relay(drafter: Drafter) -> None:
    """The block's embeddings; where there is a relay, with rejected states in every other slot."""
    checks, spec, head = drafter.checks, drafter.spec, drafter.checks.head("float")
    ids, scale = checks.ids(spec.block_size), spec.input_embedding_scale
    wanted, feeds = head.embed(ids.tolist()) * scale, {c.BLOCK_IDS.name: ids[None]}
    if spec.relay:
        bonus, reject = checks.ids(2)
        h, pair = drafter.block(), head.embed([bonus, reject]) * scale
        on = np.arange(spec.block_size) % 2 == 1
        source = np.arange(spec.block_size)[::-1].copy()
        term = ref.relay_term(drafter.draft.weights, spec, pair[0], pair[1], h[source])
        wanted = wanted + np.where(on[:, None], term, 0)
        feeds |= {c.PENDING_H.name: h[None], c.RELAY_SRC.name: source[None], c.RELAY_ON.name: on[None]}
        feeds |= {c.BONUS_ID.name: np.array([bonus]), c.REJECT_ID.name: np.array([reject])}
    found = Engine(checks.bundle, c.RELAY, spec.name).whole(feeds, [c.BLOCK_EMBEDS.name])
    checks.compare(f"{spec.name}.relay", found[c.BLOCK_EMBEDS.name][0], wanted)


def _check_drafter(drafter: Drafter) -> None:
    """The first and the last layer, then the head."""
    spec = drafter.spec
    blocks = Blocks(drafter.checks, spec.name, drafter.engine, drafter.stack, drafter.form)
    for i in sorted({0, spec.stack.num_layers - 1}):
        if spec.conv:
            check_convolutions(drafter, spec.conv, i)
        blocks.check(i, spec.block_size)
    if not spec.corrected_drafts:
        check_head(drafter)
        return
    check_base(drafter)
    if isinstance(spec.head, SelectorSpec):
        check_selector(drafter, spec.head)
    else:
        check_domino(drafter)


# -- whole engines -----------------------------------------------------------------------------------------------------


def check_whole(checks: Checks, prompt: Prompt, draft: DFlashCheckpoint) -> None:
    """One draft without relay after the prompt: its tokens must score as high as the reference's best."""
    drafter, spec = Drafter(checks, draft), draft.spec
    block = [int(prompt.ids[-1]), *[spec.mask_token_id] * (spec.block_size - 1)]
    path = np.array([block[0], *_drafts(prompt, spec, block)])
    checks.check_live(f"{spec.name}.draft", path[1:])
    z = _slots(drafter, prompt, block)
    if isinstance(spec.head, SelectorSpec):
        check_path(drafter, spec.head, z, path)
        return
    wanted = drafter.logits(z)
    if spec.corrected_drafts:
        wanted = wanted + corrections(drafter, z, path[:-1], drafter.form)
    checks.compare_best(f"{spec.name}.draft", path[1:], wanted, drafter.form, whole=True)


def _drafts(prompt: Prompt, spec: DFlashSpec, block: list[int]) -> Array:
    """Context, relay and drafter: the drafts [K]."""
    length = len(prompt.ids)
    feeds = {c.POSITION_IDS.name: np.arange(length)[None], c.WRITE_INDEX.name: np.zeros(1, np.int64)}
    prompt.run(c.CONTEXT, spec.name, feeds)
    prompt.run(c.RELAY, spec.name, _relay_feeds(spec, block))
    feeds = {
        c.BLOCK_POSITION_IDS.name: length + np.arange(spec.block_size)[None],
        c.BLOCK_WRITE_INDEX.name: np.array([length]),
        c.KV_INDEX.name: kv_index(length + spec.block_size),
    }
    if isinstance(spec.head, SelectorSpec):
        feeds[c.ANCHOR_ID.name] = np.array(block[:1])
    ids: Array = prompt.run(c.DRAFTER, spec.name, feeds, [c.DRAFT_IDS.name])[0][0]
    return ids


def _relay_feeds(spec: DFlashSpec, block: list[int]) -> dict[str, Array]:
    """Nothing is relayed."""
    feeds: dict[str, Array] = {c.BLOCK_IDS.name: np.array([block])}
    if spec.relay:
        none, pair = np.zeros((1, spec.block_size), np.int64), np.zeros(1, np.int64)
        feeds |= {c.RELAY_SRC.name: none, c.RELAY_ON.name: none.astype(bool)}
        feeds |= {c.BONUS_ID.name: pair, c.REJECT_ID.name: pair}
    return feeds


def _slots(drafter: Drafter, prompt: Prompt, block: list[int]) -> Array:
    """The reference's final-normed slots of that block, [K,E]."""
    spec, draft = drafter.spec, drafter.draft
    context = ref.context_states(draft.weights, spec, prompt.taps(spec))
    x = drafter.checks.head("float").embed(block) * spec.input_embedding_scale
    for i in range(spec.stack.num_layers):
        x = drafter.stack.layer(i, x, len(prompt.ids) + np.arange(spec.block_size), context)
    return drafter.final_normed(x)
