"""What every check uses: random rows, and the comparison with the numpy reference, within tolerances."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflow_trt import reference as ref
from dflow_trt.bundle import Bundle
from dflow_trt.checkpoint.target import TargetCheckpoint
from dflow_trt.checkpoint.weights import Array
from dflow_trt.errors import UserError
from dflow_trt.spec import DType, WeightForm

# (root mean square, largest) difference allowed, relative to the root mean square of the reference. An int8 activation
# that rounds the other way moves single results by a level; a wrong weight, layout or mask moves many by about 1.
TOLERANCE: dict[WeightForm, tuple[float, float]] = {"float": (1e-3, 1e-3), "int8": (3e-2, 2e-1)}
# The same of float weights that were rounded to the engine's dtype; the arithmetic of the check stays float32.
ROUNDED: dict[DType, tuple[float, float]] = {"float32": (0, 0), "float16": (5e-3, 2e-2), "bfloat16": (3e-2, 1.5e-1)}
NOISE, MOST = (2.0, 12.0), (0.5, 3.0)  # the same relative to the quantisation noise, and the limit of all that
WHOLE_ENGINE = 5  # rounding adds up over the layers of a whole engine
REACH = 2112  # the farthest position checked: behind the usual windows, where slow rotations have turned too


class Checks:
    """The checks of one bundle. errors: the relative error of every section so far."""

    def __init__(self, bundle: Bundle, target: TargetCheckpoint) -> None:
        self.bundle, self.target = bundle, target
        self.errors: dict[str, float] = {}
        self._random = np.random.default_rng(0)

    @property
    def live_vocab(self) -> int:
        return self.bundle.target.live_vocab

    @property
    def draft_form(self) -> WeightForm:
        return self.bundle.build.draft_weights

    @property
    def target_form(self) -> WeightForm:
        """How near the target's layers must be: where inputs are rounded, as near as int8 weights' are."""
        quantisation = self.bundle.target.quantisation
        rounded = quantisation is not None and quantisation.rounds_inputs
        return "int8" if rounded else self.bundle.build.target_form

    def rows(self, count: int, width: int) -> Array:
        return self._random.standard_normal((count, width), np.float32)

    def past_rows(self, count: int, width: int) -> Array:
        """Rows of a context: many random values average out, so as large that it contributes as much as the rest."""
        return self.rows(count, width) * np.float32(count**0.5)

    def ids(self, count: int) -> Array:
        return self._random.integers(0, self.live_vocab, count)

    def taps(self, count: int, own: Sequence[int]) -> tuple[Array, Array]:
        """Random outputs of layers as the target packs them for all drafters [S,X]; the same of the layers ``own``."""
        packed, width = self.bundle.taps, self.bundle.target.stack.hidden_size
        x = self.rows(count, len(packed) * width)
        return x, np.concatenate([x[:, packed.index(tap) * width :][:, :width] for tap in own], axis=1)

    def far(self, rows: int) -> int:
        """The first position of the last rows that are checked, with a full cache before them; 0 without room."""
        return max(0, min(self.bundle.build.max_seq_len, REACH) - rows)

    def head(self, form: WeightForm) -> ref.ReferenceHead:
        """The target's embedding and head."""
        return ref.ReferenceHead(self.target.weights, self.target.spec, ref.LINEAR[form])

    def compare(
        self,
        section: str,
        found: Array,
        wanted: Array,
        form: WeightForm = "float",
        *,
        noise: float = 0.0,
        whole: bool = False,
    ) -> None:
        """Record the error of one section; UserError where it is too large.

        noise: root mean square of what quantisation itself does to ``wanted``. Roundings that fall the other way add up
        to about as much over a few layers, so a difference of that size proves nothing. whole: of a whole engine.
        """
        scale = rms(wanted) + 1e-20
        difference = found.astype(np.float64) - wanted
        errors = rms(difference) / scale, float(np.abs(difference).max()) / scale
        self.errors[section] = errors[0]
        factor = WHOLE_ENGINE if whole else 1
        rounded = ROUNDED[self.bundle.build.dtype]
        for error, tolerance, least, noises, most in zip(errors, TOLERANCE[form], rounded, NOISE, MOST, strict=True):
            allowed = min(max(factor * tolerance, least, noises * noise / scale), most)
            if not error <= allowed:
                raise differs(section, f"by {error:.1e} of its size; allowed: {allowed:.0e}")

    def compare_best(
        self, section: str, chosen: Array, wanted: Array, form: WeightForm, *, whole: bool = False
    ) -> None:
        """The chosen ids [M] must score as high as the reference's best [M,live vocabulary]."""
        self.check_live(section, chosen)
        best = np.take_along_axis(wanted, chosen[:, None], axis=1)[:, 0]
        self.compare(section, best, wanted.max(axis=1), form, whole=whole)

    def check_ids(self, section: str, found: Array, wanted: Array) -> None:
        """UserError unless they are equal."""
        if not np.array_equal(found, wanted):
            raise differs(section, f"in {np.count_nonzero(found != wanted)} of {wanted.size} ids")
        self.errors[section] = 0.0

    def check_live(self, section: str, chosen: Array) -> None:
        """UserError if an id is chosen that is no token."""
        if chosen.min() < 0 or chosen.max() >= self.live_vocab:
            raise differs(section, f"with id {chosen.max()}; allowed: ids below {self.live_vocab}")


def rms(values: Array) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def differs(section: str, how: str) -> UserError:
    """The refusal of a section."""
    advice = "the bundle was not kept, please report this with the model's config.json"
    return UserError(f"self-check: {section} differs from the reference {how}; {advice}")
