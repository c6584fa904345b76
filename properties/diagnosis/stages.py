"""Counterfactuals of attention inside the kernel: maxima, rescaling, narrow stages, a scale read off the output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from oracle.arithmetic.rounded import RoundedArithmetic
from oracle.block import Block
from oracle.formats import FORMATS, Float64Array, FloatArray, Format
from oracle.ops.attention import formula as attention
from oracle.ops.attention.case import clean_head, head, scale_float, scoring, sink_value
from properties.diagnosis.counterfactual import (
    Change,
    Counterfactual,
    FailingCase,
    Mask,
    Predictions,
    changed,
)
from properties.diagnosis.heads import TILES, Head, Heads, of_head

USUAL_LAG = 8 * float(np.log(2.0))
# exp overflows float32 above the first number and gives zero below the third; between the others nothing is certain.
OVERFLOWS, SAFE, UNDERFLOWS, FADES = 89.0, 87.0, -104.0, -80.0
NARROW = (FORMATS["fp16"], FORMATS["bf16"])
# A fitted scale must explain at least this many numbers.
LEAST_FITTED = 6


def scores_of(block: Block) -> Float64Array:
    """[r, n] midpoints, -inf where hidden."""
    return np.where(block.visible_keys(), block.part("scores").hi, -np.inf)


def _everywhere(p: Predictions, name: str, where: Mask) -> Predictions:
    return {n: q.marked(name, where) for n, q in p.items()}


def maxima(failing: FailingCase) -> Iterator[Counterfactual]:
    """Exponentials of something else than score minus running maximum: range, where the real function is the same."""

    def without(s: FailingCase, block: Block, p: Predictions) -> Predictions:
        top = scores_of(block).max(axis=1, keepdims=True, initial=-np.inf)
        lse = block.part("lse").hi
        p = _everywhere(p, "breaks", (top > OVERFLOWS) & ~block.empty[:, None])
        p = _everywhere(p, "lost", (lse < UNDERFLOWS) & ~block.empty[:, None])
        unsure = ((lse > SAFE) & (top <= OVERFLOWS)) | ((top < FADES) & (lse >= UNDERFLOWS))
        return _everywhere(p, "free", unsure & ~block.empty[:, None])

    yield changed("exponentials were taken without subtracting a maximum", without)
    for t in TILES:
        for says, change in (
            ("the maximum of each tile of {} keys replaced the running one", _of_tile(t)),
            ("a first tile of {} keys that is wholly hidden gave NaN", _hidden_tile(t)),
            ("a wholly hidden tile of {} keys set the maximum to 0", _zero_after_hidden(t)),
        ):
            yield changed(says, change, choice=str(t))
    for start in (0.0, -1e4, -5e4, -65504.0):
        yield changed(f"the running maximum started at {start:g} instead of -inf", _started_at(start))


def _started_at(start: float) -> Change:
    def change(s: FailingCase, block: Block, p: Predictions) -> Predictions:
        top = scores_of(block).max(axis=1, keepdims=True, initial=-np.inf)
        live = ~block.empty[:, None]
        lost = live & (top - start < UNDERFLOWS - 10)
        return _everywhere(_everywhere(p, "lost", lost), "free", live & (top - start < FADES) & ~lost)

    return change


def tile_maxima(scores: Float64Array, tile: int) -> Float64Array:
    """[r, T]: maximum of each tile of scores [r, n], -inf where it is wholly hidden."""
    edges = range(0, scores.shape[1], tile)
    return np.stack([scores[:, a : a + tile].max(axis=1) for a in edges], axis=1)


def _of_tile(tile: int) -> Change:
    def change(s: FailingCase, block: Block, p: Predictions) -> Predictions:
        tops = tile_maxima(scores_of(block), tile)
        fall = np.full((len(tops), 1), -np.inf)
        for t in range(1, tops.shape[1]):
            before = tops[:, :t].max(axis=1)
            with np.errstate(invalid="ignore"):
                drop = np.where(np.isfinite(tops[:, t]) & np.isfinite(before), before - tops[:, t], -np.inf)
            fall = np.maximum(fall, drop[:, None])
        p = _everywhere(p, "breaks", fall > OVERFLOWS)
        return _everywhere(p, "free", (fall > SAFE - 10) & (fall <= OVERFLOWS))

    return change


def _hidden_tile(tile: int) -> Change:
    def change(s: FailingCase, block: Block, p: Predictions) -> Predictions:
        first = ~block.visible_keys()[:, :tile].any(axis=1, keepdims=True)
        return _everywhere(p, "breaks", first & ~block.empty[:, None])

    return change


def _zero_after_hidden(tile: int) -> Change:
    def change(s: FailingCase, block: Block, p: Predictions) -> Predictions:
        tops = tile_maxima(scores_of(block), tile)
        top = tops.max(axis=1, keepdims=True)
        hidden = np.isneginf(tops).any(axis=1, keepdims=True) & ~block.empty[:, None]
        lost = hidden & (top < UNDERFLOWS - 10)
        return _everywhere(_everywhere(p, "lost", lost), "free", hidden & (top < FADES) & ~lost)

    return change


def rescaling(failing: FailingCase) -> Iterator[Counterfactual]:
    """Sums of earlier tiles that do not follow the maximum: the same as a bias of minus the maximum that was used."""
    x = Heads(failing.case)
    lag = max(form.sums.lag for form in failing.subject.forms) or USUAL_LAG
    for tile in TILES:
        if x.keys <= tile:
            continue
        for says, most in (
            ("earlier tiles were not rescaled when the maximum grew (tiles of {} keys)", None),
            ("the weights used a new maximum that the sums do not follow (tiles of {} keys)", float("inf")),
            ("the weights used a new maximum, the sums one that lags behind it (tiles of {} keys)", lag),
        ):

            def make(h: Head, tile: int = tile, most: float | None = most) -> Head:
                own, used = _used_maxima(h.scores(), tile, most)
                with np.errstate(invalid="ignore"):
                    shift = np.where(np.isfinite(own) & np.isfinite(used), used - own, 0.0)
                bias = np.repeat(shift, tile, axis=1)[:, : x.keys]
                return replace(h, bias=bias if h.bias is None else h.bias + bias)

            yield of_head(x, says, make, choice=str(tile))


def _used_maxima(scores: Float64Array, tile: int, lag: float | None) -> tuple[Float64Array, Float64Array]:
    """(maximum that the weights of each tile use, maximum that the sums use by then), [r, T] each.

    lag None: the sums keep the weights of each tile as they are, and the LSE takes the last maximum; else the sums move
    to a new maximum once it exceeds theirs by more than ``lag``.
    """
    tops = tile_maxima(scores, tile)
    if lag is None:
        running = np.maximum.accumulate(tops, axis=1)
        return running, np.repeat(running[:, -1:], running.shape[1], axis=1)
    used = tops.copy()
    for t in range(1, tops.shape[1]):
        with np.errstate(invalid="ignore"):
            used[:, t] = np.where(~(tops[:, t] - used[:, t - 1] <= lag), tops[:, t], used[:, t - 1])
    return np.maximum(used, tops), used


# --- stages ---


def rounded_stages(failing: FailingCase) -> Iterator[Counterfactual]:
    """One stage in a narrow format, everything else exact."""
    own = failing.formats["out"]
    for fmt in NARROW:
        # Where the scale is a power of two, the two may be the same.
        for stage, which in (("scores", "scaled scores"), ("raw_scores", "scores not yet scaled")):
            stored = {"scores": fmt.name, "score_stores": 1}
            yield changed(f"{{}} were stored in {fmt.name}", _stage(stage, fmt), contract=stored, choice=which)
        for stage, says, allowed in (
            ("row_sum", f"the row sum were kept in {fmt.name}", {"row_sum": fmt.name}),
            ("accumulator", f"P V were accumulated in {fmt.name}", {"accumulator": fmt.name}),
        ):
            yield changed(says, _stage(stage, fmt), contract=allowed)
        for tile in TILES:
            says = f"the accumulator passed through {fmt.name} after each tile of {{}} keys"
            yield changed(says, _online(tile, accumulator=fmt), contract={"accumulator": fmt.name}, choice=str(tile))
    for fmt in (*NARROW, FORMATS["e4m3"], FORMATS["e5m2"]):
        if fmt.precision < own.precision:
            allowed = {"weights": fmt.name}
            yield changed(f"P were cast to {fmt.name}", _stage("weights", fmt), contract=allowed)
            for tile in TILES:
                says = f"P were cast to {fmt.name}, relative to the maximum so far, in tiles of {{}} keys"
                yield changed(says, _online(tile, weights=fmt), contract=allowed, choice=str(tile))


def simulated(failing: FailingCase, block: Block, rounded: dict[str, Format]) -> dict[str, FloatArray]:
    """O and L in float64 with the named stages rounded; `block` belongs to the case that failed."""
    x = head(failing.case, block.key, block.rows)
    ar = RoundedArithmetic(FORMATS["fp64"], rounded)
    with ar.working():
        values = [ar.const(a) for a in (x.q, x.k, x.v)]
        how, sink = scoring(ar, failing.case, x), sink_value(ar, x)
        done = attention.attention(ar, *values, scoring=how, visible=x.visible, sink=sink)
    return {"out": done.out, "lse": done.lse}


def _stage(stage: str, fmt: Format) -> Change:
    return _simulation(lambda s, block: simulated(s, block, {stage: fmt}))


def _simulation(run: Callable[[FailingCase, Block], dict[str, FloatArray]]) -> Change:
    """Predictions at simulated numbers; the last block's are kept, for they are asked for once a form."""
    held: list[Any] = []

    def change(s: FailingCase, block: Block, p: Predictions) -> Predictions:
        if not held or held[0] is not block:
            held[:] = [block, run(s, block)]
        return _at(s, p, block, held[1])

    return change


def _at(s: FailingCase, p: Predictions, block: Block, found: dict[str, FloatArray]) -> Predictions:
    """The predictions moved to simulated numbers; what overflowed there is inf or NaN here."""
    result = {}
    empty = block.empty[:, None]
    for name, q in p.items():
        if name not in found:
            result[name] = q
            continue
        value = found[name] * s.subject.nat(name)
        moved = q.at(np.where(np.isfinite(value), value, 0.0)).marked("breaks", ~np.isfinite(value))
        result[name] = q.where(empty, moved)
    return result


def _online(tile: int, *, weights: Format | None = None, accumulator: Format | None = None) -> Change:
    """Online softmax in float64 whose weights or accumulator are rounded in each tile; O only."""

    def run(s: FailingCase, block: Block) -> dict[str, FloatArray]:
        _, _, v, _, _, _ = clean_head(s.case, block.key, block.rows)
        scores = scores_of(block)
        top = np.full((len(scores), 1), -np.inf)
        acc, total = np.zeros((len(scores), v.shape[1])), np.zeros((len(scores), 1))
        with np.errstate(all="ignore"):
            for a in range(0, scores.shape[1], tile):
                part = scores[:, a : a + tile]
                new = np.maximum(top, part.max(axis=1, keepdims=True))
                base = np.where(np.isneginf(new), 0.0, new)
                w, down = np.exp(part - base), np.exp(top - base)
                acc = acc * down + (w if weights is None else weights.round(w)) @ v[a : a + tile]
                acc = acc if accumulator is None else accumulator.round(acc)
                total, top = total * down + w.sum(axis=1, keepdims=True), new
            return {"out": acc / total}

    return _simulation(run)


# --- a scale read off the output ---


def other_scale(failing: FailingCase) -> Iterator[Counterfactual]:
    """The factor on the scores that explains the worst row best, if there is one; asked of every element after that."""
    factor = _best_factor(failing)
    if factor is not None and not _biased(failing):
        yield _times(failing, factor)


def _times(failing: FailingCase, factor: float) -> Counterfactual:
    scale = scale_float(failing.case) * factor
    says = f"the scale were {factor:.6g} times what it should be"
    made = of_head(Heads(failing.case), says, lambda h: replace(h, scale=scale))
    return replace(made, elsewhere=lambda other: _times(other, factor))


def _biased(failing: FailingCase) -> bool:
    mask = failing.case.options.get("attn_mask")
    return mask is not None and mask.dtype != np.bool_


def _best_factor(failing: FailingCase) -> float | None:
    place, row = failing.worst
    judged = failing.blocks[place]
    scores = scores_of(judged.block)[row]
    _, _, v, _, _, _ = clean_head(failing.case, judged.block.key, judged.block.rows)
    seen = np.isfinite(scores)
    number = sum(y.size for judged in failing.blocks for y in judged.values.values())
    if number < LEAST_FITTED or not seen.any() or not np.isfinite(failing.outputs["out"].astype(np.float64)).all():
        return None

    def misfit(f: float) -> float:
        x = f * scores[seen]
        w = np.exp(x - x.max())
        pairs = {"out": w @ v[seen] / w.sum(), "lse": np.array([x.max() + np.log(w.sum())])}
        return float(
            sum(
                np.sum(((judged.values[n][row] - pairs[n]) / judged.truth[0][n].bound[row]) ** 2)
                for n in judged.values
                if np.isfinite(judged.truth[0][n].bound[row]).all()
            )
        )

    with np.errstate(all="ignore"):
        grid = np.exp2(np.linspace(-8, 8, 129))
        best = float(min(grid, key=misfit))
        low, high = best * 2**-0.125, best * 2**0.125
        for _ in range(60):
            a, b = low + 0.382 * (high - low), low + 0.618 * (high - low)
            low, high = (low, b) if misfit(a) < misfit(b) else (a, high)
    return (low + high) / 2
