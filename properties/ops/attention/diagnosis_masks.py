"""Counterfactuals of attention about who sees what: the causal mask, boolean and additive masks, empty rows, leaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from oracle.block import Block
from oracle.case import Case
from oracle.formats import StoredArray, format_of
from oracle.ops.attention.case import scale_float
from properties.diagnosis.counterfactual import Change, Counterfactual, FailingCase, Predictions, changed
from properties.diagnosis.heads import TILES, Head, Heads, of_head
from properties.subject import LOG2_E

Bools = NDArray[np.bool_]


def causal(failing: FailingCase) -> Iterator[Counterfactual]:
    case = failing.case
    bare = Heads(case.without_options("is_causal"))
    for says, visible, choice in causal_rules(case):
        yield of_head(bare, says, partial(_seen, visible=visible), choice=choice)
    if case.options.get("is_causal") and case.options.get("attn_mask") is not None:
        yield of_head(
            Heads(case.without_options("attn_mask")), "the mask were ignored because is_causal is set", lambda h: h
        )


def _seen(h: Head, visible: Bools) -> Head:
    return replace(h, visible=h.visible & visible[h.rows])


def causal_rules(case: Case) -> Iterator[tuple[str, Bools, str]]:
    """(what completes "as if", who sees whom [Sq, Sk] instead of what is_causal says, choice)."""
    sq, sk = case.arrays["q"].shape[2], case.arrays["k"].shape[2]
    offset = np.arange(sk)[None, :] - np.arange(sq)[:, None]
    if not case.options.get("is_causal"):
        if sk > 1:
            yield "a causal mask were applied that nobody asked for", offset <= 0, ""
        return
    last = case.options.get("causal_alignment", "top_left") == "bottom_right"
    own, other = (sk - sq, 0) if last else (0, sk - sq)
    yield "is_causal were ignored", offset <= sk, ""
    yield f"the causal mask were aligned to the {'first' if last else 'last'} key", offset <= other, ""
    yield "the causal mask let each query see one more key", offset <= own + 1, ""
    yield "the causal mask left out the query's own key", offset < own, ""
    yield "the causal mask were inverted", offset > own, ""
    yield "the causal mask were transposed", offset >= own, ""
    for t in TILES:
        if sk > t:
            tile = np.arange(sk) // t <= (np.arange(sq)[:, None] + own) // t
            yield "the causal mask were applied to whole tiles of {} keys only", tile, str(t)
            if sk % t:
                partly = (offset <= own) & (np.arange(sk) < sk // t * t)
                yield "the causal loop ended before the last, partial tile of {} keys", partly, str(t)


def masks(failing: FailingCase) -> Iterator[Counterfactual]:
    mask = failing.case.options.get("attn_mask")
    if mask is None:
        return
    q, k = failing.case.arrays["q"], failing.case.arrays["k"]
    shape = (*q.shape[:3], k.shape[2])
    bare = Heads(failing.case.without_options("attn_mask"))
    yield of_head(bare, "attn_mask were ignored", lambda h: h)
    for says, other in other_masks(mask, shape):
        whole = np.broadcast_to(other, shape)
        yield of_head(bare, says, partial(_masked, mask=whole))
    if mask.dtype == np.bool_:
        whole = np.broadcast_to(mask, shape)
        yield of_head(
            bare,
            "the mask were added to the scores as 0 and 1",
            lambda h: replace(h, bias=whole[h.key][h.rows].astype(np.float64)),
        )
        return
    s, x = scale_float(failing.case), Heads(failing.case)
    for says, factor in additive_factors(s):
        yield of_head(x, says, partial(Head.biased, factor=factor))
    yield of_head(x, "the additive mask hid nothing", lambda h: replace(h, visible=bare.head(h.key, h.rows).visible))


def additive_factors(s: float) -> Iterator[tuple[str, float]]:
    """What the finite entries of an additive mask may be multiplied by; ``s`` is the scale."""
    yield "the additive mask were scaled", s
    yield "the additive mask only hid, and added nothing", 0.0
    yield "the additive mask were added twice", 2.0
    yield "the additive mask were subtracted", -1.0
    yield "the additive mask were in base 2", 1 / LOG2_E
    yield "the additive mask were multiplied by log2(e)", LOG2_E


def _masked(h: Head, mask: StoredArray) -> Head:
    return h.masked(mask[h.key][h.rows])


def other_masks(mask: StoredArray, shape: tuple[int, ...]) -> Iterator[tuple[str, StoredArray]]:
    """Masks read from the wrong place, or as something else."""
    whole = np.broadcast_to(mask, shape)
    batch, heads, sq, sk = shape
    full = (1,) * (4 - mask.ndim) + mask.shape
    if mask.dtype == np.bool_:
        yield "the mask's True meant hidden", np.logical_not(whole)
        yield "the mask were read as a number of visible keys", np.arange(sk) < whole.sum(axis=-1, keepdims=True)
    if heads > 1 and full[1] > 1:
        yield "all heads used the mask of head 0", whole[:, :1]
    if batch > 1 and full[0] > 1:
        yield "all batch entries used the first one's mask", whole[:1]
        if full[1] == 1 and heads > 1:
            slices = np.arange(batch * heads).reshape(batch, heads) % batch
            yield "the mask were read with one slice per head", mask.reshape(full)[slices, 0]
    if sq > 1 and full[2] > 1:
        yield "all rows used the mask of the first", whole[:, :, :1]
        if sq == sk:
            yield "the mask were transposed", whole.swapaxes(2, 3)
    j = np.arange(sk)
    open_ = np.array(True) if mask.dtype == np.bool_ else np.zeros((), dtype=mask.dtype)
    for t in (*TILES, 256, 512, 1024):
        if sk > t:
            yield f"the mask were read for the first {t} keys only", np.where(j >= t, open_, whole)
            yield f"the mask were read from key {t} on only", np.where(j < t, open_, whole)


def soft_exclusion(failing: FailingCase) -> Iterator[Counterfactual]:
    """Hidden keys whose scores are lowered and not excluded."""
    x = Heads(failing.case)

    def lowered(low: float) -> Callable[[Head], Head]:
        def make(h: Head) -> Head:
            bias = np.where(h.visible, 0.0, low) + (0.0 if h.bias is None else h.bias)
            return replace(h, bias=bias, visible=np.ones_like(h.visible))

        return make

    if not {"is_causal", "attn_mask"} & set(failing.case.options):
        return
    for low in (-1e4, -1e9):
        yield of_head(x, f"hidden keys had {low:g} added to their scores", lowered(low))

    def change(s: FailingCase, block: Block, p: Predictions) -> Predictions:
        v = x.head(block.key, block.rows).v.astype(np.float64)
        # A sum of n values, a division and the output's rounding.
        unit = (
            s.formats["out"].unit_roundoff + (len(v) + 8) * 2.0**-24 + format_of(failing.case.arrays["v"]).unit_roundoff
        )
        room = unit * np.abs(v).mean(axis=0) + s.formats["out"].omega
        there = p["out"].at(v.mean(axis=0))
        there = replace(there, bound=np.array(np.broadcast_to(room, there.bound.shape)), free=np.zeros_like(there.free))
        empty = block.empty[:, None]
        result = {**p, "out": there.where(empty, p["out"])}
        return result if "lse" not in p else {**result, "lse": p["lse"].marked("free", empty)}

    if any(judged.block.empty.any() for judged in failing.blocks):
        yield changed("rows without a key attended to every key alike (masks that add a finite number)", change)


def leaks(failing: FailingCase) -> Iterator[Counterfactual]:
    """What a NaN in a hidden key or value does to rows that may not attend to it."""
    k, v = (~np.isfinite(failing.case.arrays[n].astype(np.float64)) for n in ("k", "v"))
    x = Heads(failing.case)
    group = failing.case.arrays["q"].shape[1] // k.shape[1]

    def reached(names: Sequence[str], bad: Bools) -> Change:
        def change(s: FailingCase, block: Block, p: Predictions) -> Predictions:
            here = bad[block.key[0], block.key[1] // group].any(axis=1)
            hidden = (~x.head(block.key, block.rows).visible & here).any(axis=1, keepdims=True)
            return {n: q.marked("breaks", hidden) if n in names else q for n, q in p.items()}

        return change

    if v.any():
        yield changed("the zero weight of a hidden key were multiplied by its NaN value", reached(("out",), v))
    if k.any():
        yield changed("hidden keys had a number added to their scores (NaN stays NaN)", reached(("out", "lse"), k))
