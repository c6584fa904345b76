"""Scaled dot-product attention (Vaswani et al. 2017, arXiv 1706.03762, equation 1), one head.

    S = cap(scale q k^T) + bias,  L_i = ln(sum_j exp S_ij + exp s),  O = exp(S - L) v,  sums over the visible keys of
    each row;  cap(x) = c tanh(x / c) where there is a soft cap (Gemma 2, arXiv 2408.00118);  s the head's sink, one
    more logit that has no value (gpt-oss, arXiv 2508.10925); without one exp s is 0.

Shapes, one head: q [Sq, D], k [Sk, D], v [Sk, Dv], visible bool [Sq, Sk], bias [Sq, Sk] or None, sink [1, 1] or None;
S [Sq, Sk], L [Sq, 1], O [Sq, Dv]. Exclusion is a boolean, never an added -inf. A row without visible keys (an *empty
row*) has S, O and L that mean nothing; its value is a convention of the target, judged apart.

`attention` is the definition; `attention_tiled` the online-softmax recurrence (Milakov and Gimelshein 2018, arXiv
1805.02867; Dao et al. 2022, arXiv 2205.14135, algorithm 1) and `attention_split` its merge by LSE (flash decoding).
All three are the
same real function: the `mp` arithmetic shows it to the last digits.

Why the enclosures are rigorous: any exact number may be subtracted from every exponent of a row without changing O or
L, so the shift taken from midpoints is exact; every other step is an inclusion-preserving operation of the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from oracle.arithmetic.base import Arithmetic, V

Visible = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Scoring(Generic[V]):
    """How q k^T becomes scores: scale and soft cap [1, 1], bias [Sq, Sk].

    cap_last: the soft cap is applied after the bias, as some kernels do; published as before it.
    """

    scale: V
    bias: V | None = None
    softcap: V | None = None
    cap_last: bool = False

    def of_keys(self, ar: Arithmetic[V], start: int, stop: int) -> Scoring[V]:
        """The same for a range of the keys."""
        return self if self.bias is None else replace(self, bias=ar.columns(self.bias, start, stop))


@dataclass(frozen=True, slots=True)
class Attended(Generic[V]):
    """What one head gives: scores S, shift m, weights exp(S - m), row sum l, output O and log-sum-exp L.

    uncapped: what the soft cap was applied to, where there is one.
    """

    scores: V
    shift: V
    weights: V
    total: V
    out: V
    lse: V
    uncapped: V | None = None


def default_scale(ar: Arithmetic[V], head_dim: int) -> V:
    """1 / sqrt(head_dim), exactly."""
    return ar.div(ar.rational(1, 1), ar.sqrt(ar.rational(head_dim, 1)))


def attention(
    ar: Arithmetic[V],
    q: V,
    k: V,
    v: V,
    *,
    scoring: Scoring[V],
    visible: Visible,
    sink: V | None = None,
    normalise_first: bool = False,
    output_stage: str = "output",
) -> Attended[V]:
    """The definition. ``normalise_first`` rounds p = exp(S - m) / l instead of exp(S - m) before the product with v.

    ``output_stage`` names the rounding of O: a split kernel keeps partial outputs wider than its result.
    """
    uncapped, scores = scores_of(ar, q, k, scoring)
    done = attend(ar, scores, v, visible=visible, sink=sink, normalise_first=normalise_first, output_stage=output_stage)
    return replace(done, uncapped=uncapped)


def scores_of(ar: Arithmetic[V], q: V, k: V, scoring: Scoring[V]) -> tuple[V | None, V]:
    """(what is capped, S), both [Sq, Sk]; the first is None without a soft cap."""
    raw = ar.round(ar.matmul(q, ar.transpose(k), "scores_accumulator"), "raw_scores")
    scores = ar.round(ar.mul(raw, scoring.scale), "scores")
    if scoring.softcap is not None and not scoring.cap_last:
        scores, uncapped = capped(ar, scores, scoring.softcap), scores
    if scoring.bias is not None:
        scores = ar.round(ar.add(scores, scoring.bias), "scores")
    if scoring.softcap is None:
        return None, scores
    if scoring.cap_last:
        scores, uncapped = capped(ar, scores, scoring.softcap), scores
    return uncapped, scores


def capped(ar: Arithmetic[V], scores: V, cap: V) -> V:
    """c tanh(S / c)."""
    share = ar.round(ar.tanh(ar.round(ar.div(scores, cap), "scores")), "scores")
    return ar.round(ar.mul(share, cap), "scores")


def attend(
    ar: Arithmetic[V],
    scores: V,
    v: V,
    *,
    visible: Visible,
    sink: V | None = None,
    normalise_first: bool = False,
    output_stage: str = "output",
) -> Attended[V]:
    """softmax(scores) v and the log-sum-exp, rows over visible keys and the sink."""
    shift = _with_sink(ar, ar.row_max(scores, visible), visible, sink)
    weights = ar.where(visible, ar.exp(ar.where(visible, ar.round(ar.sub(scores, shift), "shifted"))))
    cast = ar.round(weights, "weights")
    total = ar.row_sum(ar.round(weights, "row_sum_terms"), "row_sum")
    if sink is not None:
        total = ar.add(total, ar.exp(ar.round(ar.sub(sink, shift), "shifted")))
    if normalise_first:
        out = ar.matmul(ar.round(ar.div(weights, total), "weights"), v, "accumulator")
    else:
        out = ar.div(ar.matmul(cast, v, "accumulator"), total)
    lse = ar.add(shift, ar.log(total))
    return Attended(scores, shift, weights, total, ar.round(out, output_stage), ar.round(lse, "lse"))


def log_sum(ar: Arithmetic[V], scores: V, visible: Visible) -> V:
    """ln sum exp S over visible keys alone [Sq, 1], about their own maximum: L without a sink."""
    shift = ar.row_max(scores, visible)
    weights = ar.where(visible, ar.exp(ar.where(visible, ar.sub(scores, shift))))
    return ar.add(shift, ar.log(ar.row_sum(weights, "row_sum")))


def _with_sink(ar: Arithmetic[V], shift: V, visible: Visible, sink: V | None) -> V:
    """The larger of the shift and the sink; in a row without keys, whose shift is that of no score, the sink."""
    return (
        shift
        if sink is None
        else ar.select(np.asarray(visible.any(axis=-1, keepdims=True)), ar.maximum(shift, sink), sink)
    )


def attention_tiled(
    ar: Arithmetic[V],
    q: V,
    k: V,
    v: V,
    *,
    scoring: Scoring[V],
    visible: Visible,
    tile: int,
    sink: V | None = None,
) -> tuple[V, V]:
    """(O, L) by the online-softmax recurrence over tiles of ``tile`` keys: running max, row sum and output."""
    shift = total = acc = None
    seen = np.zeros((*visible.shape[:-1], 1), dtype=bool)
    for start in range(0, visible.shape[-1], tile):
        stop = min(start + tile, visible.shape[-1])
        part = visible[..., start:stop]
        _, scores = scores_of(ar, q, ar.rows(k, start, stop), scoring.of_keys(ar, start, stop))
        top = ar.row_max(scores, part)
        here = part.any(axis=-1, keepdims=True)
        if shift is None or total is None or acc is None:
            new = top
        else:
            # A row that has seen nothing takes the tile's maximum as it is; one that sees nothing here keeps its own.
            new = ar.select(seen & here, ar.maximum(shift, top), ar.select(seen, shift, top))
        weights = ar.where(part, ar.exp(ar.where(part, ar.sub(scores, new))))
        tile_total = ar.row_sum(ar.round(weights, "row_sum_terms"), "row_sum")
        tile_acc = ar.matmul(ar.round(weights, "weights"), ar.rows(v, start, stop), "accumulator")
        if shift is None or total is None or acc is None:
            total, acc = tile_total, tile_acc
        else:
            rescale = ar.exp(ar.where(seen, ar.sub(shift, new)))
            total = ar.round(ar.add(ar.mul(total, rescale), tile_total), "row_sum")
            acc = ar.round(ar.add(ar.mul(acc, rescale), tile_acc), "accumulator")
        shift, seen = new, seen | here
    if shift is None or total is None or acc is None:
        raise ValueError("attention over no keys at all has no value")
    if sink is not None:
        new = _with_sink(ar, shift, seen, sink)
        rescale = ar.where(seen, ar.exp(ar.where(seen, ar.sub(shift, new))))
        total = ar.add(ar.mul(total, rescale), ar.exp(ar.sub(sink, new)))
        shift, acc = new, ar.mul(acc, rescale)
    lse = ar.round(ar.add(shift, ar.log(total)), "lse")
    return ar.round(ar.div(acc, total), "output"), lse


def attention_split(
    ar: Arithmetic[V],
    q: V,
    k: V,
    v: V,
    *,
    scoring: Scoring[V],
    visible: Visible,
    splits: int,
    sink: V | None = None,
) -> tuple[V, V]:
    """(O, L) by evaluating ``splits`` ranges of keys apart and merging them by their LSEs (split-KV, flash
    decoding)."""
    edges = np.linspace(0, visible.shape[-1], splits + 1).astype(int)
    parts = []
    for start, stop in pairwise(edges):
        if start == stop:
            continue
        part, own = visible[..., start:stop], scoring.of_keys(ar, int(start), int(stop))
        keys, values = ar.rows(k, int(start), int(stop)), ar.rows(v, int(start), int(stop))
        piece = attention(ar, q, keys, values, scoring=own, visible=part, output_stage="partial")
        parts.append((np.asarray(part.any(axis=-1, keepdims=True)), piece.out, piece.lse))
    return merge(ar, parts, sink=sink)


def merge(ar: Arithmetic[V], parts: list[tuple[Visible, V, V]], *, sink: V | None = None) -> tuple[V, V]:
    """Merge (rows that saw a key, O, L) of disjoint key ranges: O = sum_s e^(L_s - L) O_s, L = ln sum_s e^(L_s).

    A sink joins once, as one more part whose O is 0.
    """
    lses = ar.hstack([ar.where(seen, lse) for seen, _, lse in parts])
    alive = np.concatenate([seen for seen, _, _ in parts], axis=-1)
    shift = _with_sink(ar, ar.row_max(lses, alive), alive, sink)
    weights = ar.where(alive, ar.exp(ar.where(alive, ar.sub(lses, shift))))
    total = ar.row_sum(weights, "merge")
    if sink is not None:
        total = ar.add(total, ar.exp(ar.sub(sink, shift)))
    shares = enumerate(parts)
    out = reduce(ar.add, (ar.mul(ar.where(seen, o), ar.columns(weights, i, i + 1)) for i, (seen, o, _) in shares))
    lse = ar.round(ar.add(shift, ar.log(total)), "lse")
    return ar.round(ar.div(out, total), "output"), lse
