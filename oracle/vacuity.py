"""Gate G6: does a bound also accept an output that no computation went into? Then a pass proves nothing.

A *trivial output* ignores what the op is about: zeros, the negated exact output, the mean of V over the
visible keys (attention, mla), the uniform row (softmax), the unrotated input (rope). For a whole case, all
judged elements of one output pooled, a trivial output

- is *accepted* if every element of it, rounded to the output format, would pass: distance + radius <= bound;
- is *wrong* if at least one element lies further from the exact value than one ULP of the output format at
  that value, beyond all radii.

The check is vacuous if some trivial output is accepted and wrong. One that is not wrong is simply the
answer: the mean of a constant V, V itself with a single key, zeros for V = 0, a rotation by position 0. One
rejected element is enough against vacuity, since a target that returned the trivial output would then have
failed.

Elements whose bound is inf or nan promise nothing and are left out; where a case consists of nothing else,
its bound accepts everything and each wrong trivial output is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from oracle.enclosure import Enclosure
from oracle.formats import FP64, Float64Array, Format, StoredArray

Mask = NDArray[np.bool_]
VacuityPart = tuple[Enclosure, Float64Array, Mapping[str, Enclosure]]
"""(enclosure, bound, trivial outputs by name) of the judged rows of one block, arrays of one shape."""


def vacuous(parts: Iterable[VacuityPart], fmt: Format) -> tuple[str, ...]:
    """The trivial outputs that prove the bounds of a case vacuous, in order; () if the check means something.

    ``parts``: all blocks of the case, without empty, undefined or exempt rows, each with the same names; read no
    further than to a block that rejects what those before it accept. ``fmt``: the format of the output. ValueError if
    the names differ.
    """
    seen: list[VacuityPart] = []
    names: tuple[str, ...] = ()
    with np.errstate(all="ignore"):
        for exact, bound, others in parts:
            if seen and set(others) != set(seen[0][2]):
                raise ValueError("the parts of one case must have the same trivial outputs")
            names = tuple(n for n in (names if seen else others) if _accepts(exact, bound, others[n], fmt))
            seen.append((exact, bound, others))
            if not names:
                return ()
        promised = any(np.isfinite(bound).any() for _, bound, _ in seen)
        return tuple(
            n for n in names if any(_is_wrong(e, bound, others[n], fmt, promised) for e, bound, others in seen)
        )


def _accepts(exact: Enclosure, bound: Float64Array, trivial: Enclosure, fmt: Format) -> bool:
    """Whether every judged element of a block accepts the trivial output; what promises nothing rejects nothing."""
    return bool(np.all(~np.isfinite(bound) | (exact.distance(fmt.round(trivial.hi)) + exact.rad <= bound)))


def _is_wrong(exact: Enclosure, bound: Float64Array, trivial: Enclosure, fmt: Format, promised: bool) -> bool:
    """Whether some judged element of the trivial output is wrong in a block."""
    judged = np.isfinite(bound) if promised else np.True_
    apart = np.abs((trivial.hi - exact.hi) + (trivial.lo - exact.lo))
    one_ulp = fmt.ulp(np.abs(exact.hi) + np.abs(exact.lo) + exact.rad)
    wrong = apart * (1 - 2.0**-50) - exact.rad - trivial.rad > one_ulp
    return bool(np.any(wrong & judged))


def trivial_outputs(exact: Enclosure, others: Mapping[str, Enclosure] | None = None) -> dict[str, Enclosure]:
    """``others`` (the op's own trivial outputs), zeros and the negated exact output."""
    zero = np.zeros_like(exact.hi)
    return {
        "zeros": Enclosure(zero, zero, zero),
        "negated": Enclosure(-exact.hi, -exact.lo, exact.rad),
        **(others or {}),
    }


def mean_of_visible(visible: Mask, values: StoredArray) -> Enclosure:
    """Per row the mean of the values it may see: visible [r, n], values [n, c] -> [r, c]; 0 for an empty row.

    Values that are not finite count as 0: a row that sees one is undefined and not judged. The radius is that
    of the float64 sums, Higham's gamma_n (Accuracy and Stability, section 3.1).
    """
    v = np.asarray(values, dtype=np.float64)
    v = np.where(np.isfinite(v), v, 0.0)
    count = np.maximum(visible.sum(axis=1, keepdims=True), 1)
    weights = visible.astype(np.float64)
    mean = weights @ v / count
    spread = weights @ np.abs(v) / count * ((v.shape[0] + 4) * 2 * FP64.unit_roundoff) + FP64.smallest_normal
    return Enclosure(mean, np.zeros_like(mean), spread)


def uniform_rows(visible: Mask) -> Enclosure:
    """Per row 1/n at each of its n visible entries, 0 elsewhere; visible [r, n]."""
    share = visible / np.maximum(visible.sum(axis=1, keepdims=True), 1)
    return Enclosure(share, np.zeros_like(share), share * FP64.unit_roundoff)


def exactly(values: StoredArray) -> Enclosure:
    """StoredArray numbers as an enclosure of radius zero, such as the unrotated input of rope."""
    wide = np.asarray(values, dtype=np.float64)
    return Enclosure(wide, np.zeros_like(wide), np.zeros_like(wide))
