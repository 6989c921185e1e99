"""Figures as people read them; tables, the report and CSV files say the same."""

from __future__ import annotations

from collections.abc import Sequence

from dflow_trt.profiling.metrics import needed
from dflow_trt.profiling.record import PERCENTILES, Advice, Distribution, Interval, Lossless, Profile, Settings
from dflow_trt.spec import DFlashSpec

NOTHING = "-"
TOO_FEW = "too few"
STAGE_ORDER = ("relay", "draft", "verify", "context", "sampling", "host")


def number(value: float | None, digits: int = 2) -> str:
    """A figure with so many digits behind the point; large ones with none."""
    if value is None:
        return NOTHING
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.{digits}f}"


def percent(share: float | None, digits: int = 0) -> str:
    return NOTHING if share is None else f"{100 * share:.{digits}f} %"


def times(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}x"


def percentile(found: Distribution, which: int) -> str:
    """A percentile in milliseconds; what is missing for it where there are too few samples."""
    value = found.percentile(which)
    return TOO_FEW if value is None else number(value)


def too_few(which: int, found: Distribution) -> str:
    """Why a percentile is missing."""
    return f"too few samples for p{which}: {found.n} of {needed(which)}"


def sample_rule() -> str:
    """How many samples each percentile needs."""
    parts = [f"p{which} {needed(which)}" for which in PERCENTILES]
    return f"{TOO_FEW}: fewer samples than a 95 % interval needs ({', '.join(parts)}, speed-ups {needed(50)} turns)"


def interval(found: Interval | None) -> str:
    """1.52x (1.48 to 1.57)."""
    if found is None:
        return NOTHING
    if found.low is None or found.high is None:
        return f"{found.value:.2f}x ({TOO_FEW} pairs: {found.pairs} of {needed(50)})"
    return f"{found.value:.2f}x ({found.low:.2f} to {found.high:.2f})"


def span(found: Interval | None) -> str:
    """1.48 to 1.57, for where the figure itself has a column."""
    if found is None:
        return NOTHING
    return TOO_FEW if found.low is None or found.high is None else f"{found.low:.2f} to {found.high:.2f}"


def lossless(found: Lossless) -> str:
    """One line."""
    if not found.compared:
        return "nothing was compared with ar"
    if found.same == found.compared:
        return f"all {found.compared} sequences are ar's, token for token"
    return f"{found.compared - found.same} of {found.compared} sequences differ from ar's; the first: {found.first}"


def where(found: Advice) -> str:
    """The load that advice is for."""
    parts = [f"{found.batch} at once", *([f"T={found.temperature:g}"] if found.temperature else [])]
    return ", ".join([*parts, *([f"context {found.input_len}"] if found.input_len is not None else [])])


def choice(found: Advice) -> str:
    """How many drafts to verify; of a drafter of blocks, their size too."""
    count = found.best_drafts
    if not count:
        return "plain decoding"
    use = f"all {count} drafts" if count == found.drafts else f"--draft-tokens {count}"
    return f"{use} (blocks of {count + 1})" if found.kind == DFlashSpec.kind else use


def asked(settings: Settings) -> str:
    """The requests of a repetition."""
    counts = sorted(set(settings.requests.values()))
    number = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    sources = ", ".join("the example" if each.kind == "example" else each.source for each in settings.workload)
    return f"{number} requests of {sources}, at most {settings.max_tokens} tokens each"


def threads(settings: Settings) -> str:
    """Behind something else."""
    count = settings.threads
    return "" if count is None else f", {count} thread{'s' if count > 1 else ''}"


def title(profile: Profile) -> str:
    subject = profile.subject
    return f"{subject.name}: {subject.backend} {subject.dtype}, target {subject.target_weights}"


def ordered(stages: Sequence[str]) -> list[str]:
    """Stages in the order of a round; those that nobody knows at the end."""
    return sorted(stages, key=lambda name: STAGE_ORDER.index(name) if name in STAGE_ORDER else len(STAGE_ORDER))
