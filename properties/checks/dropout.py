"""P22: weights dropped with probability p, the others divided by 1 - p: the mean stays, seeds repeat, calls renew.

Asked of targets with the parameter ``dropout_p``; further with ``seed`` and ``training`` where they have those. What
is dropped after the softmax keeps its denominator: a row whose only key is dropped gives 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from oracle.case import Case
from oracle.formats import Float64Array
from properties.checks.invariance import equal_bits, with_parameters
from properties.checks.metamorphic import Outputs, full_bounds, observe
from properties.inputs import strategies
from properties.inputs.recipes import Recipe
from properties.judge.verdict import Basis, Judgement, Verdict
from properties.subject import Input, Subject

RATES = (0.25, 0.5)
CALLS = 24
# Of a mean of thousands of independent terms: one honest run in 10^9 is further off.
SIGMAS = 6.0


def dropout(subject: Subject, example: Input) -> Judgement:
    """Every statement about dropout that the target's parameters allow to be asked."""
    case = example.case
    plain = observe(subject, case)
    bounds = np.max([b["out"] for b in full_bounds(subject, case, {"out": plain["out"]})], axis=0)
    off = equal_bits(plain, observe(with_parameters(subject, dropout_p=0.0, seed=7), case), what="dropout_p = 0")
    if off.verdict is not Verdict.PASS:
        return off
    judged = off
    for rate in RATES:
        for judged in _asked(subject, case, plain, bounds, rate):
            if judged.verdict is not Verdict.PASS:
                return judged
    return judged


def _asked(subject: Subject, case: Case, plain: Outputs, bounds: Float64Array, rate: float) -> Iterator[Judgement]:
    seeded = "seed" in subject.target.parameters
    calls = [
        observe(with_parameters(subject, dropout_p=rate, seed=n), case)["out"].astype(np.float64) for n in range(CALLS)
    ]
    if not all(np.isfinite(out).all() for out in calls):
        yield _broken(f"dropout_p = {rate} gives an output that is not finite")
    if seeded:
        again = observe(with_parameters(subject, dropout_p=rate, seed=0), case)["out"].astype(np.float64)
        yield equal_bits({"out": calls[0]}, {"out": again}, what=f"a second call with dropout_p = {rate} and its seed")
    if any(np.array_equal(calls[0], other) for other in calls[1:]):
        yield _broken(f"two calls with dropout_p = {rate}{' and other seeds' if seeded else ''} drop the same weights")
    if "training" in subject.target.parameters:
        resting = observe(with_parameters(subject, dropout_p=rate, training=False, seed=0), case)
        yield equal_bits(plain, resting, what=f"dropout_p = {rate} outside of training")
    yield _mean_kept(case, plain["out"].astype(np.float64), np.stack(calls), bounds, rate)


def _mean_kept(case: Case, plain: Float64Array, calls: Float64Array, bounds: Float64Array, rate: float) -> Judgement:
    """The mean over calls, rows and heads of V = 1 is 1; each weight is 1/n, so that its variance is known."""
    keys = case.arrays["k"].shape[2]
    # One column of V = 1 holds the sum of a row's weights.
    sums, room = calls[..., 0], float(bounds.max()) / (1 - rate)
    spread = np.sqrt(rate / (1 - rate) / keys)
    allowed = SIGMAS * spread / np.sqrt(sums.size) + room
    off = float(sums.mean() - plain[..., 0].mean())
    if abs(off) > allowed:
        return _broken(
            f"dropout_p = {rate} changes the mean of V = 1 by {off:.3g}; chance and roundings: {allowed:.3g}"
        )
    # As many are dropped as should be: the spread is that of the rate. Fourth moments make its own error 2 / sqrt(n).
    seen, largest = float(sums.std()), spread * (1 + 2 * SIGMAS / np.sqrt(sums.size)) + 2 * room
    least = spread * (1 - 2 * SIGMAS / np.sqrt(sums.size)) - 2 * room
    if not least <= seen <= largest:
        return _broken(f"sums of a row's weights spread by {seen:.3g} under dropout_p = {rate}, not by {spread:.3g}")
    return Judgement(
        Verdict.PASS, Basis.CALIBRATED, f"mean kept to {off:.2g} over {sums.size} rows", abs(off) / allowed
    )


def _broken(detail: str) -> Judgement:
    return Judgement(Verdict.FAIL, Basis.CALIBRATED, detail)


def edges(subject: Subject) -> Iterator[Input]:
    """Equal weights and V = 1, over one key and over many, in many rows."""
    for sq, sk in ((48, 1), (16, 37)):
        yield strategies.attention_input(
            subject,
            kv_heads=4,
            sq=sq,
            sk=sk,
            recipe=Recipe("zeros"),
            values=Recipe("ones"),
            features={"edge": "dropout"},
        )
