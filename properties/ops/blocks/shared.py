"""What the tables of whole blocks share: weights and tables as they are stored, and relations between calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from oracle.case import Case
from oracle.formats import Float64Array, Format, StoredArray
from properties.checks.metamorphic import full_bounds, observe, same_bits
from properties.inputs.recipes import Recipe, array
from properties.judge.judgements import draw_of, kept, purity
from properties.judge.verdict import Judgement
from properties.subject import Input, Subject


def weight(recipe: Recipe, shape: tuple[int, ...], fmt: Format, stream: int, *, gain: float = 1.0) -> StoredArray:
    """A projection's normal weights [out, in], scaled so that outputs are as large as inputs."""
    drawn = Recipe("normal", recipe.seed, gain / float(np.sqrt(shape[-1])))
    return array(drawn, shape, fmt, stream=stream)


def tables(length: int, pairs: int, fmt: Format, *, start: int = 0) -> dict[str, StoredArray]:
    """cos and sin [length, pairs] of positions from ``start``, base 10000."""
    angle = (start + np.arange(length))[:, None] * 10000.0 ** (-np.arange(pairs) / pairs)
    return {"cos": fmt.store(np.cos(angle)), "sin": fmt.store(np.sin(angle))}


def pure(subject: Subject, example: Input) -> Judgement:
    """P15: see `purity`; the other call has its rows backwards in x, the larger one both as a batch."""
    case = example.case
    other = np.ascontiguousarray(case.arrays["x"][:, :, ::-1])
    both = np.concatenate([other, case.arrays["x"]])
    return purity(subject, case, case.with_arrays(x=other), case.with_arrays(x=both), lambda out: out[: len(out) // 2])


def causal(subject: Subject, example: Input) -> Judgement:
    """P4: another row j of x changes no row before it, bit for bit."""
    case = example.case
    x = case.arrays["x"]
    j = int(draw_of(case).integers(x.shape[1]))
    changed = x.copy()
    changed[:, j] = subject.fmt.store(draw_of(case).standard_normal(changed[:, j].shape) + 1.0)
    before, after = (observe(subject, c)["out"] for c in (case, case.with_arrays(x=changed)))
    earlier = (np.arange(x.shape[1]) < j)[None, :, None]
    return same_bits(before, after, earlier, what=f"rows before a changed row {j}")


def within_both(
    subject: Subject, case: Case, other: Case, *, what: str, rows: slice = slice(None), of_other: Any = None
) -> Judgement:
    """Outputs that are equal in exact arithmetic differ by at most the sum of their bounds, on ``rows``.

    ``of_other`` is applied to arrays of the other case's output shape.
    """
    pick = of_other if of_other is not None else (lambda a: a)
    first, second = observe(subject, case), observe(subject, other)
    a = first["out"].astype(np.float64)[:, rows]
    b = pick(second["out"].astype(np.float64))
    rooms = [
        one["out"][:, rows] + pick(two["out"])
        for one, two in zip(full_bounds(subject, case, first), full_bounds(subject, other, second), strict=True)
    ]
    return kept(subject, _gap(a, b), rooms, what=what)


def _gap(a: Float64Array, b: Float64Array) -> Float64Array:
    with np.errstate(all="ignore"):
        return np.where(a == b, 0.0, np.abs(a - b))


def permuted_channels(subject: Subject, example: Input, *, reading: Sequence[str]) -> Judgement:
    """P25: the channels of x in another order, and with them the columns of the weights that read x."""
    case = example.case
    order = draw_of(case).permutation(case.arrays["x"].shape[-1])
    moved = {n: np.ascontiguousarray(case.arrays[n][..., order]) for n in ("x", *reading)}
    return within_both(subject, case, replace(case, arrays={**case.arrays, **moved}), what="channels in another order")
