"""How one counterfactual fares on one failing case: does it fit, and does anything tell it from the exact result?"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from oracle.block import Rows
from oracle.formats import Float64Array
from properties.diagnosis.counterfactual import (
    Counterfactual,
    FailingCase,
    JudgedBlock,
    Prediction,
    Predictions,
    predict,
)

# Bits that agree: at least this share with the counterfactual, at most that with the exact result, of at least so many.
SAME_BITS, OTHER_BITS, LEAST_BITS = 0.95, 0.75, 6
# Errors that follow a simulated rounding: correlation, slope, least number; on the worst row alone, less will do.
LEAST_CORRELATION, SLOPES, LEAST_ERRORS = 0.9, (0.7, 1.4), 8
ONE_SIZE = 2.5
HINT_CORRELATION, HINT_SLOPES = 0.5, (0.3, 3.0)


@dataclass(slots=True)
class Match:
    """fits: per form, all is explained. tells: per form, it differs somewhere by more than both bounds.

    judged, same, exact: how many elements there are, how many are the rounded prediction to the bit, and how many the
    rounded exact result. residual: sum of squares of error / bound. errors: output, observed minus exact, predicted
    minus exact, the exact result's bound, and what is wrong. odd: whether something is a number, or none, against the
    prediction.
    """

    fits: NDArray[np.bool_]
    tells: NDArray[np.bool_]
    judged: int = 0
    same: int = 0
    exact: int = 0
    residual: float = 0.0
    odd: bool = False
    errors: list[tuple[str, object, object, object, object]] = field(default_factory=list)

    def convinces(self) -> NDArray[np.bool_]:
        """Per form, whether it tells, by a difference or by the bits."""
        n = self.judged
        bits = n >= LEAST_BITS and self.same >= SAME_BITS * n and self.exact <= OTHER_BITS * n
        return self.tells | bits

    def errors_of(self, name: str) -> tuple[Float64Array, ...]:
        """(observed, predicted error, bound, wrong) of one output, where both errors are numbers."""
        parts = [row[1:] for row in self.errors if row[0] == name] or [
            (np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0, dtype=bool))
        ]
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        ok = np.isfinite(columns[0]) & np.isfinite(columns[1])
        return tuple(column[ok] for column in columns)

    def names(self) -> set[str]:
        return {row[0] for row in self.errors}

    def in_reach(self) -> bool:
        """Whether nothing is further from the exact result than its bound and twice the largest predicted error."""
        if self.odd:
            return False
        for observed, predicted, bound, _ in map(self.errors_of, self.names()):
            if (np.abs(observed) > bound + 2 * np.abs(predicted).max(initial=0.0)).any():
                return False
        return True

    def of_one_size(self) -> bool:
        """Whether observed and predicted errors are alike in size, whatever their order."""
        for name in self.names():
            sizes = [float(np.linalg.norm(a)) for a in self.errors_of(name)[:2]]
            if sizes[1] > 0 and not 1 / ONE_SIZE <= sizes[0] / sizes[1] <= ONE_SIZE:
                return False
        return True


def _blank(failing: FailingCase) -> Match:
    forms = len(failing.subject.forms)
    return Match(np.ones(forms, dtype=bool), np.zeros(forms, dtype=bool))


def match(failing: FailingCase, c: Counterfactual, *, quick: bool = True) -> Match:
    """``quick``: first on the worst row alone, which settles nearly all, then on everything."""
    if quick:
        place, row = failing.worst
        first = _blank(failing)
        _add(failing, c, failing.blocks[place], np.array([row]), first)
        if not first.fits.any():
            if c.contract is None or not _alike(failing, c, first, 1, HINT_CORRELATION, HINT_SLOPES):
                return first
    whole = _blank(failing)
    for judged in failing.blocks:
        _add(failing, c, judged, np.arange(len(judged.block.rows)), whole)
        if not whole.fits.any() and c.contract is None:
            return whole
    if not whole.fits.any() and c.contract is not None:
        if _alike(failing, c, whole, LEAST_ERRORS, LEAST_CORRELATION, SLOPES) and allowed(failing, c, whole):
            whole.fits[:] = whole.tells[:] = True
    return whole


def allowed(failing: FailingCase, c: Counterfactual, fares: Match) -> bool:
    """Whether a contract that allows the defect would be kept; where none can say so, whether errors are in reach."""
    if not c.contract:
        return fares.in_reach()
    forms = tuple(dict.fromkeys(form.with_fields(**c.contract) for form in failing.subject.forms))
    kept = np.ones(len(forms), dtype=bool)
    for judged in failing.blocks:
        loose = predict(failing, Counterfactual(c.says), judged.block.key, judged.block.rows, forms)
        kept &= [all(p[n].fits(y).all() for n, y in judged.values.items()) for p in loose]
    return bool(kept.any())


def _add(failing: FailingCase, c: Counterfactual, judged: JudgedBlock, which: Rows, found: Match) -> None:
    predicted = predict(failing, c, judged.block.key, judged.block.rows[which], failing.subject.forms)
    for form, predictions in enumerate(predicted):
        for name, values in judged.values.items():
            p, y = predictions[name], values[which]
            if p.value.hi.shape != y.shape:
                found.fits[:] = False
                return
            found.fits[form] &= bool(p.fits(y).all())
            found.tells[form] |= _tells(judged, which, name, p, judged.truth[form][name])
    _weigh(failing, judged, which, predicted[int(np.argmax(found.fits))], found)


def _tells(judged: JudgedBlock, which: Rows, name: str, p: Prediction, truth: Prediction) -> bool:
    """Whether the prediction differs, where the output is wrong, from the exact result by more than both bounds."""
    hi, lo, rad, bound = (a[which] for a in (truth.value.hi, truth.value.lo, truth.value.rad, truth.bound))
    with np.errstate(all="ignore"):
        apart = np.abs((p.value.hi - hi) + (p.value.lo - lo))
        differs = ~(apart <= bound + p.bound + rad + p.value.rad) | p.breaks | p.lost
    return bool((judged.wrong[name][which] & differs & ~p.free).any())


def _weigh(failing: FailingCase, judged: JudgedBlock, which: Rows, predictions: Predictions, found: Match) -> None:
    """The evidence beyond the fit, of some rows of one block."""
    for name, values in judged.values.items():
        p, y, t = predictions[name], values[which], judged.truth[0][name]
        hi, lo = t.value.hi[which], t.value.lo[which]
        with np.errstate(all="ignore"):
            spoken = ~(p.free | p.lost | t.free[which])
            use = spoken & ~p.breaks & np.isfinite(y)
            found.odd |= bool((spoken & ~p.may_break & (np.isfinite(y) == p.breaks)).any())
            fmt = failing.formats[name]
            found.residual += float((p.ratio(y)[use] ** 2).sum())
            found.judged += int(use.sum())
            found.same += int((use & (fmt.round(p.value.hi) == y)).sum())
            found.exact += int((use & (fmt.round(hi) == y)).sum())
            found.errors.append(
                (
                    name,
                    ((y - hi) - lo)[use],
                    ((p.value.hi - hi) - lo)[use],
                    t.bound[which][use],
                    judged.wrong[name][which][use],
                )
            )


def _alike(
    failing: FailingCase,
    c: Counterfactual,
    found: Match,
    least: int,
    correlation: float,
    slopes: tuple[float, float],
) -> bool:
    """Whether the errors of every wrong output follow those of the simulated one; where no contract says how large
    others may be, those that are beyond the bound."""
    wrong = {n for judged in failing.blocks for n, mask in judged.wrong.items() if mask.any()}
    for name in wrong:
        observed, simulated, _, beyond = found.errors_of(name)
        if not c.contract:
            observed, simulated = observed[beyond], simulated[beyond]
        if (simulated != 0).sum() < least or not observed.any():
            return False
        both = float(observed @ simulated)
        if both < correlation * float(np.linalg.norm(observed) * np.linalg.norm(simulated)):
            return False
        if not slopes[0] <= both / float(simulated @ simulated) <= slopes[1]:
            return False
    return bool(wrong)
