"""The backward pass of attention and of multi-head latent attention in float64, by the definition but for one step.

What `properties.ops.gradients.diagnosis` compares gradients with. Latent attention is attention per head whose keys and
values are made of latents: its pass is that of attention, and the chain rule through the projections.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.case import Case
from oracle.formats import Float64Array, Format
from oracle.ops.attention import case as attention_case
from oracle.ops.attention import gradient_case as gradients
from oracle.ops.attention.options import chosen
from oracle.ops.mla import case as mla_case
from oracle.ops.table import op_named

Outputs = dict[str, Float64Array]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Pass:
    """One way to run the backward pass of a head; a default is what the definition says.

    delta: whether D is subtracted. masked: whether P is recomputed under the masks; topped: if not, hidden keys have
    the largest score of their row. slope: whether the gradient passes the soft cap. scale_q, scale_k: powers of the
    scale in dQ and dK. ones: whether dO counts as ones. keys, queries: those that are dealt with, as a mask of their
    indices; dK and dV get nothing of other queries, and their dQ is zero where ``rows`` says so. seen: [rows, keys],
    who attends to whom, on top of the masks. ds, weights: formats that dS, and P of dV, pass through. values: whether
    latents get their share through the values. head: the only head whose share what is shared gets. crossed: whether
    the gradient of W_UK takes the queries of the heads in reverse.
    """

    delta: bool = True
    masked: bool = True
    topped: bool = False
    slope: bool = True
    scale_q: int = 1
    scale_k: int = 1
    ones: bool = False
    keys: Callable[[int], Bools] | None = None
    queries: Callable[[int], Bools] | None = None
    rows: bool = False
    seen: Callable[[int, int], Bools] | None = None
    ds: Format | None = None
    weights: Format | None = None
    values: bool = True
    head: int | None = None
    crossed: bool = False


def computed(case: Case, how: Pass, *, forward: Case | None = None) -> Outputs:
    """All gradients of ``case`` in float64; of ``forward``, another case of its shapes, where the pass sees that."""
    seen = case if forward is None else forward
    return (_latent if case.op == "mla_backward" else _attention)(case, seen, how)


def _attention(case: Case, seen: Case, how: Pass) -> Outputs:
    shapes = op_named(case.op).output_shapes(case)
    found = {n: np.zeros(s) for n, s in shapes.items()}
    batch, heads, rows = case.arrays["q"].shape[:3]
    alpha, cap = attention_case.scale_float(seen), seen.options.get("softcap")
    last = chosen(seen, "softcap_order") == "after_mask"
    for b in range(batch):
        for h in range(heads):
            x = attention_case.head(seen, (b, h), np.arange(rows))
            parts = _head(x, case.arrays["do"][b, h].astype(np.float64), alpha, cap, last, how)
            kv = h // gradients.group(case)
            found["dq"][b, h] = parts["dq"]
            found["dk"][b, kv] += parts["dk"]
            found["dv"][b, kv] += parts["dv"]
            # An option that the pass does not see has no gradient.
            if "dbias" in found and gradients.bias_of(seen) is not None:
                whole = np.zeros((batch, heads, *parts["ds"].shape))
                whole[b, h] = parts["ds"]
                found["dbias"] += onto(whole, shapes["dbias"])
            if "dsinks" in found:
                found["dsinks"][h] += float(parts["dsink"])
    return found


def _latent(case: Case, seen: Case, how: Pass) -> Outputs:
    found = {n: np.zeros(s) for n, s in op_named(case.op).output_shapes(case).items()}
    batch, heads, rows, width = case.arrays["q_nope"].shape
    alpha = mla_case.scale_float(seen)
    for b in range(batch):
        for h in range(heads):
            x = mla_case.head(seen, (b, h), np.arange(rows))
            k, v = np.hstack([x.c_kv @ x.w_uk.T, x.k_pe]), x.c_kv @ x.w_uv.T
            core = attention_case.Head(np.hstack([x.q_nope, x.q_pe]), k, v, x.visible, x.undefined)
            parts = _head(core, case.arrays["do"][b, h].astype(np.float64), alpha, None, False, how)
            found["dq_nope"][b, h], found["dq_pe"][b, h] = parts["dq"][:, :width], parts["dq"][:, width:]
            dk, dk_pe, dv = parts["dk"][:, :width], parts["dk"][:, width:], parts["dv"]
            if how.head is None or how.head % heads == h:
                found["dc_kv"][b] += dk @ x.w_uk + (dv @ x.w_uv if how.values else 0.0)
                found["dk_pe"][b] += dk_pe
            of = heads - 1 - h if how.crossed else h
            found["dw_uk"][of] += seen.arrays["q_nope"][b, of].astype(np.float64).T @ (parts["dx"] @ x.c_kv) * alpha
            found["dw_uv"][h] += dv.T @ x.c_kv
    return found


def onto(whole: Float64Array, shape: tuple[int, ...]) -> Float64Array:
    """The sum of an array over what a smaller one was broadcast along."""
    lost = tuple(range(whole.ndim - len(shape)))
    summed = whole.sum(axis=lost) if lost else whole
    axes = tuple(i for i, n in enumerate(shape) if n == 1 and summed.shape[i] != 1)
    return summed.sum(axis=axes, keepdims=True) if axes else summed


def _head(
    x: attention_case.Head, do: Float64Array, alpha: float, cap: float | None, last: bool, how: Pass
) -> dict[str, Any]:
    do = np.ones_like(do) if how.ones else do
    with np.errstate(all="ignore"):
        raw, bias = x.q @ x.k.T * alpha, x.tilted()
        added = 0.0 if bias is None else bias
        scores = raw + added if cap is None or last else cap * np.tanh(raw / cap) + added
        slope: Any = 1.0
        if cap is not None:
            before = scores if last else raw
            slope = 1 - np.tanh(before / cap) ** 2 if how.slope else 1.0
            scores = cap * np.tanh(scores / cap) if last else scores
        kept = _kept(x.visible, how)
        shown = np.where(kept, scores, -np.inf)
        logits = shown if x.sink is None else np.hstack([shown, np.full((len(shown), 1), x.sink)])
        top = logits.max(axis=1, keepdims=True)
        top = np.where(np.isneginf(top), 0.0, top)
        total = np.exp(logits - top).sum(axis=1, keepdims=True)
        total = np.where(total == 0, 1.0, total)
        recomputed = shown if how.masked else np.where(kept, scores, top) if how.topped else scores
        p = np.exp(recomputed - top) / total
        dp = do @ x.v.T
        delta = (np.where(kept, p, 0.0) * dp).sum(axis=1, keepdims=True)
        ds = p * (dp - (delta if how.delta else 0.0))
        dx = ds * slope if how.ds is None else how.ds.round(ds * slope)
        sink = 0.0 if x.sink is None else -float((np.exp(x.sink - top) / total * delta).sum())
    live = np.ones((len(p), 1), dtype=bool) if how.queries is None else how.queries(len(p))[:, None]
    dq = dx @ x.k * alpha**how.scale_q
    cast = p if how.weights is None else how.weights.round(p)
    through, weights = np.where(live, dx, 0.0), np.where(live, cast, 0.0)
    keys = {"dq": np.where(live, dq, 0.0) if how.rows else dq, "dk": through.T @ x.q * alpha**how.scale_k}
    return keys | {"dv": weights.T @ do, "ds": dx if last else ds, "dx": through, "dsink": sink}


def _kept(visible: Bools, how: Pass) -> Bools:
    """Who attends to whom."""
    rows, keys = visible.shape
    seen = visible if how.seen is None else visible & how.seen(rows, keys)
    return seen if how.keys is None else seen & how.keys(keys)[None, :]
