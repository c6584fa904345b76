"""Counterfactuals that any op may have: outputs that are zero, scaled, truncated, out of place; row sums, log-sum-exps.

Each function is the second column of a row in the table of an op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from oracle.block import Block, Rows
from oracle.case import Case
from oracle.formats import FORMATS, Float64Array, Format
from properties.diagnosis.counterfactual import (
    Change,
    Counterfactual,
    FailingCase,
    Hypothesis,
    JudgedBlock,
    Key,
    Predictions,
    Source,
    changed,
    of_rows,
)
from properties.subject import LOG2_E

BORDERS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# Fitted factors come from elements that are at least this many bounds away from zero.
WEIGHTY = 8.0


def only_out(says: str, factor: Callable[[FailingCase, Block], ArrayLike]) -> Counterfactual:
    """The output, not the LSE, times a factor that may depend on the block ([r, c] or broadcast)."""
    return changed(says, lambda s, block, p: times(s.main, factor(s, block))(s, block, p))


def times(name: str, factor: ArrayLike) -> Change:
    """One output times ``factor``, in the blocks that hold it."""
    return lambda s, block, p: {**p, name: p[name].scaled(factor)} if name in p else p


def zeros(failing: FailingCase) -> Iterator[Counterfactual]:
    """Outputs that were never written, or only in part."""
    rows = failing.blocks[0].block.rows
    last, width = int(rows[-1]), failing.blocks[0].values[failing.main].shape[1]
    yield only_out("the output were zeros", lambda s, b: 0.0)
    if last > 0:
        yield only_out("the last row were zeros", lambda s, b: (b.rows != last)[:, None])
    for n in BORDERS:
        if n <= last and n > 1:
            yield only_out(f"rows from {n} on were zeros", _rows_below(n))
    for n in sorted({*BORDERS, failing.case.arrays[next(iter(failing.case.arrays))].shape[-1]}):
        if n < width:
            yield only_out(f"columns of the output from {n} on were zeros", _columns_below(n, width))


def _rows_below(n: int) -> Callable[[FailingCase, Block], ArrayLike]:
    return lambda s, b: (b.rows < n)[:, None]


def _columns_below(n: int, width: int) -> Callable[[FailingCase, Block], ArrayLike]:
    return lambda s, b: np.arange(width) < n


def signs(failing: FailingCase) -> Iterator[Counterfactual]:
    yield only_out("the output were negated", lambda s, b: -1.0)


def other_places(failing: FailingCase) -> Iterator[Counterfactual]:
    """Whole blocks or rows of the output at another's place."""
    keys = [judged.block.key for judged in failing.blocks]
    axes = {0: "batch entry", 1: "head"}
    for axis in range(len(keys[0])):
        size = 1 + max(key[axis] for key in keys)
        word = axes[axis]
        for says, index in (
            (f"every {word} gave what belongs to the first", np.zeros(size, dtype=int)),
            (f"the order of {'batch entries' if axis == 0 else 'heads'} were reversed", np.arange(size)[::-1]),
            (f"every {word} gave what belongs to the next", np.roll(np.arange(size), -1)),
        ):
            if size > 1:
                yield Counterfactual(says, _moved(failing.case, axis, index))
    count = 1 + int(max(judged.block.rows[-1] for judged in failing.blocks))
    for says, order in (
        ("every row gave what belongs to the next", np.roll(np.arange(count), -1)),
        ("every row gave what belongs to the one before", np.roll(np.arange(count), 1)),
        ("the order of rows were reversed", np.arange(count)[::-1]),
        ("every row gave what belongs to the first", np.zeros(count, dtype=int)),
    ):
        if count > 1:
            yield Counterfactual(says, _in_order(failing.case, order))


def _in_order(case: Case, order: NDArray[np.int64]) -> Source:
    return lambda key, rows: (case, key, order[rows])


def _moved(case: Case, axis: int, index: Any) -> Source:
    def source(key: Key, rows: Rows) -> tuple[Case, Key, Rows]:
        moved = list(key)
        moved[axis] = int(index[key[axis]])
        return case, tuple(moved), rows

    return source


def interleaved_heads(failing: FailingCase) -> Iterator[Counterfactual]:
    """[B, S, H, D] written where [B, H, S, D] is expected."""
    keys = [judged.block.key for judged in failing.blocks]
    heads, count = 1 + max(key[1] for key in keys), len(failing.blocks[0].block.rows)
    main = failing.main
    if heads == 1 or count == 1 or failing.outputs[main].shape[2] != count:
        return

    def change(s: FailingCase, block: Block, p: Predictions) -> Predictions:
        whole = {judged.block.key: judged.truth[0][main] for judged in s.blocks}
        flat = block.key[1] * count + block.rows
        return {**p, main: of_rows([(whole[block.key[0], int(f % heads)], int(f // heads)) for f in flat])}

    yield changed("the output were laid out [B, S, H, D]", change)


def rounded_output(failing: FailingCase) -> Iterator[Counterfactual]:
    """The result passed through a narrower format, or was cut off instead of rounded."""
    main = failing.main
    own = failing.formats[main]
    for name in ("tf32", "fp16", "bf16"):
        fmt = FORMATS[name]
        if fmt.precision < own.precision:
            yield changed(f"the output were rounded through {name}", through(main, fmt), contract={"output": name})
        if "lse" in failing.outputs and fmt.precision < failing.formats["lse"].precision:
            yield changed(f"the LSE were rounded through {name}", through("lse", fmt))

    def cut(s: FailingCase, block: Block, p: Predictions) -> Predictions:
        hi = p[main].value.hi
        size = np.abs(own.round(hi))
        inward = np.where(size > np.abs(hi), own.next_down(size), size)
        return {**p, main: p[main].at(np.copysign(inward, hi))}

    yield changed("the output were truncated instead of rounded", cut)


def through(name: str, fmt: Format) -> Change:
    """One output rounded to ``fmt``."""

    def change(failing: FailingCase, block: Block, p: Predictions) -> Predictions:
        return {**p, name: p[name].at(fmt.round(p[name].value.hi))}

    return change


# --- row sums and log-sum-exps ---


def log_sum_exps(failing: FailingCase) -> Iterator[Counterfactual]:
    """Other things that go by the name of LSE; ``out`` of logsumexp, ``lse`` elsewhere."""
    name = "out" if failing.subject.op == "logsumexp" else "lse"
    if name not in failing.outputs:
        return
    base_two = failing.subject.conventions.get("lse_base") == "2"
    unit, wrong_base = (1.0 / LOG2_E, "in base e") if base_two else (LOG2_E, "in base 2")

    def formed(make: Callable[[Float64Array, Float64Array], ArrayLike]) -> Change:
        def change(s: FailingCase, block: Block, p: Predictions) -> Predictions:
            m, total = block.part("shift").hi, block.part("total").hi
            with np.errstate(all="ignore"):
                return {**p, name: p[name].where(block.empty[:, None], p[name].at(make(m, np.log(total))))}

        return change

    yield changed(f"the LSE were {wrong_base}", times(name, unit))
    yield changed("the LSE were negated", times(name, -1.0))
    yield changed("the LSE left the maximum out", formed(lambda m, log: log))
    yield changed("the LSE were the maximum alone", formed(lambda m, log: m))
    yield changed("the LSE were the sum, without its logarithm", formed(lambda m, log: np.exp(m + log)))
    yield changed("the LSE were m - ln l instead of m + ln l", formed(lambda m, log: m - log))
    yield changed("the LSE added a base-2 logarithm to m in nats", formed(lambda m, log: m + log * LOG2_E))
    yield changed("the LSE added ln l to m in base 2", formed(lambda m, log: m * LOG2_E + log))


def empty_rows(failing: FailingCase) -> Iterator[Counterfactual]:
    """What an empty row gives, other than the convention says."""
    if not any(judged.block.empty.any() for judged in failing.blocks):
        return

    def there(name: str, value: float) -> Change:
        def change(s: FailingCase, block: Block, p: Predictions) -> Predictions:
            special = p[name].marked("breaks", True) if np.isnan(value) else p[name].at(value)
            special = replace(special, free=np.zeros_like(special.free), bound=np.zeros_like(special.bound))
            return {**p, name: special.where(block.empty[:, None], p[name])}

        return change

    yield changed("an empty row divided 0 by 0", there("out", float("nan")))
    yield changed("an empty row gave zeros", there("out", 0.0))
    for value in (0.0, float("inf"), float("-inf")):
        if "lse" in failing.outputs:
            yield changed(f"the LSE of an empty row were {value:g}", there("lse", value))


def off_row_sums(failing: FailingCase) -> Iterator[Counterfactual]:
    """Errors that are one factor a row, or one for all: read off the output, and then asked of every element."""
    if failing.blocks[0].values["out"].shape[1] < 2 and len(failing.blocks[0].block.rows) < 2:
        return
    yield from _narrow_row_sum(failing)
    yield from _consistent_row_sum(failing)
    both = [_row_factors(judged) for judged in failing.blocks]
    weight = np.concatenate([w for _, w in both])
    factors = np.concatenate([f for f, _ in both])
    total = np.concatenate([judged.block.part("total").hi[:, 0] for judged in failing.blocks])
    if not (weight > 0).any():
        return
    known = weight > 0
    mean = float(np.average(factors[known], weights=weight[known]))
    says = f"the output were {100 * abs(mean - 1):.2g}% too {'large' if mean > 1 else 'small'}"
    yield _anywhere(only_out(says, lambda s, b: mean))
    added = (1 / factors[known] - 1) * total[known]
    e = float(np.average(added, weights=weight[known])) if np.isfinite(added).all() else -1.0
    if e > 0:
        says = f"{e:.1g} were added to the row sum"
        yield _anywhere(only_out(says, lambda s, b: b.part("total").hi / (b.part("total").hi + e)))
    by_key = {judged.block.key: (judged.block.rows, f) for judged, (f, _) in zip(failing.blocks, both, strict=True)}
    worst = float(np.max(np.abs(factors[known] - 1)))
    width = failing.blocks[0].values["out"].shape[1]
    if width >= 4 and worst < 1:

        def own(b: Block) -> Float64Array:
            rows, f = by_key[b.key]
            return f[np.searchsorted(rows, b.rows)][:, None]

        says = "each row were divided by a row sum that is off, by up to {} of itself"
        yield replace(only_out(says, lambda s, b: own(b)), fitted=True, choice=f"{worst:.1e}")


def _anywhere(c: Counterfactual) -> Counterfactual:
    """What it says of one case holds for any other as it stands."""
    return replace(c, elsewhere=lambda failing: c)


def _consistent_row_sum(failing: FailingCase) -> Iterator[Counterfactual]:
    """Row sums read off the LSE, which the output has to follow; it must be wrong, too, for that to mean anything."""
    blocks = failing.blocks
    if "lse" not in failing.outputs or not any(judged.wrong["out"].any() for judged in blocks):
        return
    unit = failing.subject.nat()
    factors = {}
    for judged in blocks:
        with np.errstate(all="ignore"):
            f = np.exp((judged.truth[0]["lse"].value.hi - judged.values["lse"]) / unit)
        factors[judged.block.key] = judged.block.rows, np.where(np.isfinite(f) & (f > 0), f, 1.0)
    worst = max(float(np.abs(1 / f - 1).max()) for _, f in factors.values())

    def change(s: FailingCase, block: Block, p: Predictions) -> Predictions:
        rows, f = factors[block.key]
        f = f[np.searchsorted(rows, block.rows)]
        return {"out": p["out"].scaled(f), "lse": p["lse"].at(p["lse"].value.hi - unit * np.log(f))}

    says = "the row sum were off, in the output and in the LSE alike, by up to {} of itself"
    yield Counterfactual(says, None, change, fitted=True, choice=f"{worst:.1e}")


def _row_factors(judged: JudgedBlock) -> tuple[Float64Array, Float64Array]:
    """(f, weight) [r]: the factor by which each row of the output is off, by least squares; weight 0 where unknown."""
    truth, y = judged.truth[0]["out"], judged.values["out"]
    with np.errstate(all="ignore"):
        t = truth.value.hi
        known = np.isfinite(y) & ~truth.free & (np.abs(t) > WEIGHTY * truth.bound)
        w = np.where(known, 1 / truth.bound**2, 0.0)
        size = np.where(known, w * t * t, 0.0).sum(axis=1)
        f = np.where(size > 0, np.where(known, w * t * y, 0.0).sum(axis=1) / size, 1.0)
    return f, size


def _narrow_row_sum(failing: FailingCase) -> Iterator[Counterfactual]:
    """Row sums e^(L - m) of the observed LSE that are all numbers of a narrow format though the exact ones are not."""
    if "lse" not in failing.outputs or failing.subject.nat() != 1:
        return
    for fmt in (FORMATS["bf16"], FORMATS["fp16"]):
        chance, factors = 1.0, {}
        for judged in failing.blocks:
            m, exact = judged.block.part("shift").hi, judged.block.part("total").hi
            live = ~(judged.block.empty | judged.block.undefined)[:, None]
            lse = judged.values["lse"]
            with np.errstate(all="ignore"):
                seen = np.exp(lse - m)
                near = fmt.round(seen)
                room = seen * (2.0**-21 * (1 + np.abs(m) + np.abs(lse)) + 2.0**-20)
                on_grid = np.abs(seen - near) <= room
                off_grid = live & (np.abs(exact - fmt.round(exact)) > 4 * room)
                chance *= float(np.prod(np.where(off_grid, np.minimum(1.0, 2 * room / fmt.ulp(near)), 1.0)))
                factors[judged.block.key] = (judged.block.rows, np.where(live, exact / near, 1.0))
            if not (on_grid | ~live).all():
                break
        else:
            if chance < 1e-3:

                def change(
                    s: FailingCase, block: Block, p: Predictions, held: Mapping[Key, Any] = dict(factors)
                ) -> Predictions:
                    rows, f = held[block.key]
                    f = f[np.searchsorted(rows, block.rows)]
                    with np.errstate(all="ignore"):
                        lse = p["lse"].value.hi - np.log(f)
                    return {"out": p["out"].scaled(f), "lse": p["lse"].at(lse)}

                yield Counterfactual(f"the row sum were kept in {fmt.name}", None, change, fitted=True)


# What may befall the whole output of any op.
WHOLE = (Hypothesis("zeros", zeros), Hypothesis("sign", signs), Hypothesis("places", other_places))
