"""What wrong gradients look like: which single defect of a backward pass explains every element of them.

Each hypothesis is the whole backward pass in float64 with one step changed. One is claimed if it fits every output of
the failing case and of a case of fresh numbers, within the contract's own bound and the rounding of what the defect
adds. Where none fits, the outputs and rows that are wrong are named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.bounds.table import bounds_of
from oracle.case import Case
from oracle.enclosure import enclose
from oracle.formats import Float64Array, format_of
from oracle.ops import attention_backward_case as gradients
from oracle.ops import attention_case
from properties.bench import Bench

LARGEST_CASE = 2**18
# Of what a defect adds to a gradient, in unit roundoffs of the output: its own stages round too.
ROUNDINGS = 16


@dataclass(frozen=True, slots=True)
class Pass:
    """One way to run the backward pass of a head; a default is what the definition says.

    delta: whether D is subtracted. masked: whether P is recomputed under the masks. slope: whether the gradient passes
    the soft cap. scale_q, scale_k: powers of the scale in dQ and dK. ones: whether dO counts as ones.
    """

    delta: bool = True
    masked: bool = True
    slope: bool = True
    scale_q: int = 1
    scale_k: int = 1
    ones: bool = False


Outputs = dict[str, Float64Array]


def explain(bench: Bench, case: Case, *, seconds: float = 4.0) -> str:
    """One line: "as if ...", else where the gradients are wrong; empty if they are within their bounds."""
    if not case.arrays or _size(case) > LARGEST_CASE:
        return ""
    deadline = time.process_time() + seconds
    scene = _scene(bench, case)
    if scene is None or not any(mask.any() for mask in scene.wrong.values()):
        return ""
    scenes = [s for s in (scene, _scene(bench, _fresh(bench, case))) if s is not None]
    for says, made in _hypotheses(case):
        if time.process_time() > deadline:
            break
        if all(_fits(s, made(s.case)) for s in scenes):
            return f"as if {says}"
    return _where(scene.wrong)


@dataclass(frozen=True, slots=True, eq=False)
class _Scene:
    """A case, what was observed of it, the exact gradients in float64, and per output the wrong elements and bounds."""

    case: Case
    seen: Outputs
    exact: Outputs
    wrong: Mapping[str, NDArray[np.bool_]]
    rooms: Outputs


def _scene(bench: Bench, case: Case) -> _Scene | None:
    seen = _observed(bench, case)
    return None if seen is None else _Scene(case, seen, computed(case, Pass()), *_wrong(bench, case, seen))


def _size(case: Case) -> int:
    return int(np.prod(case.arrays["q"].shape[:3])) * int(case.arrays["k"].shape[2])


def _observed(bench: Bench, case: Case) -> Outputs | None:
    observed = bench.call(case)
    if observed.fault is not None:
        return None
    shapes = gradients.output_shapes(case)
    given = {n: v for n, v in observed.outputs.items() if v.shape == shapes.get(n)}
    return {n: v.astype(np.float64) for n, v in given.items()} or None


def _fresh(bench: Bench, case: Case) -> Case:
    rng = np.random.default_rng(int(case.digest(), 16))
    return case.with_arrays(**{n: bench.fmt.store(rng.standard_normal(a.shape)) for n, a in case.arrays.items()})


def _wrong(bench: Bench, case: Case, seen: Outputs) -> tuple[dict[str, NDArray[np.bool_]], Outputs]:
    """Per output: which elements break every form of the contract, and the widest bound."""
    rooms = {n: np.zeros(v.shape) for n, v in seen.items()}
    masks = {n: np.zeros(v.shape, dtype=bool) for n, v in seen.items()}
    for block in enclose(case):
        held = [n for n in seen if block.holds(n)]
        if not held:
            continue
        bounded = bounds_of(case.op)(case, block, bench.forms, dict.fromkeys(held, bench.fmt))
        for name in held:
            exact, y = block.part(name), block.take(name, seen[name])
            room = np.max([b[name].bound for b in bounded], axis=0)
            with np.errstate(all="ignore"):
                bad = ~(exact.distance(y) - exact.rad <= room) & ~(block.empty | block.undefined)[:, None]
            for array, values in ((rooms[name], room), (masks[name], bad)):
                whole = block.whole(name, array)
                whole[block.rows] = np.broadcast_to(values, whole[block.rows].shape)
    return masks, rooms


def _fits(scene: _Scene, predicted: Mapping[str, Float64Array]) -> bool:
    """Whether the prediction explains every output that was seen."""
    unit = format_of(scene.case.arrays["q"]).unit_roundoff
    for name, seen in scene.seen.items():
        there = predicted.get(name)
        if there is None:
            return False
        moved = np.abs(there - scene.exact[name])
        slack = scene.rooms[name] + ROUNDINGS * unit * (moved + moved.max(initial=0.0) / 4)
        with np.errstate(all="ignore"):
            if not np.all(np.abs(seen - there) <= slack):
                return False
    return True


def computed(case: Case, how: Pass) -> Outputs:
    """All gradients in float64, by the definition but for what ``how`` changes."""
    shapes = gradients.output_shapes(case)
    found = {n: np.zeros(s) for n, s in shapes.items()}
    batch, heads, rows = case.arrays["q"].shape[:3]
    alpha, cap = attention_case.scale_float(case), case.options.get("softcap")
    last = attention_case.chosen(case, "softcap_order") == "after_mask"
    for b in range(batch):
        for h in range(heads):
            x = attention_case.head(case, (b, h), np.arange(rows))
            do = case.arrays["do"][b, h].astype(np.float64)
            do = np.ones_like(do) if how.ones else do
            parts = _head(x, do, alpha, cap, last, how)
            kv = h // gradients.group(case)
            found["dq"][b, h] = parts["dq"]
            found["dk"][b, kv] += parts["dk"]
            found["dv"][b, kv] += parts["dv"]
            if "dbias" in found:
                whole = np.zeros((batch, heads, *parts["ds"].shape))
                whole[b, h] = parts["ds"]
                found["dbias"] += _onto(whole, shapes["dbias"])
            if "dsinks" in found:
                found["dsinks"][h] += float(parts["dsink"])
    return found


def _onto(whole: Float64Array, shape: tuple[int, ...]) -> Float64Array:
    """The sum of an array over what a smaller one was broadcast along."""
    lost = tuple(range(whole.ndim - len(shape)))
    summed = whole.sum(axis=lost) if lost else whole
    axes = tuple(i for i, n in enumerate(shape) if n == 1 and summed.shape[i] != 1)
    return summed.sum(axis=axes, keepdims=True) if axes else summed


def _head(
    x: attention_case.Head, do: Float64Array, alpha: float, cap: float | None, last: bool, how: Pass
) -> dict[str, Any]:
    with np.errstate(all="ignore"):
        raw, bias = x.q @ x.k.T * alpha, x.tilted()
        added = 0.0 if bias is None else bias
        scores = raw + added if cap is None or last else cap * np.tanh(raw / cap) + added
        slope: Any = 1.0
        if cap is not None:
            before = scores if last else raw
            slope = 1 - np.tanh(before / cap) ** 2 if how.slope else 1.0
            scores = cap * np.tanh(scores / cap) if last else scores
        shown = np.where(x.visible, scores, -np.inf)
        logits = shown if x.sink is None else np.hstack([shown, np.full((len(shown), 1), x.sink)])
        top = logits.max(axis=1, keepdims=True)
        top = np.where(np.isneginf(top), 0.0, top)
        total = np.exp(logits - top).sum(axis=1, keepdims=True)
        total = np.where(total == 0, 1.0, total)
        p = np.exp((shown if how.masked else scores) - top) / total
        dp = do @ x.v.T
        delta = (np.where(x.visible, p, 0.0) * dp).sum(axis=1, keepdims=True)
        ds = p * (dp - (delta if how.delta else 0.0))
        dx = ds * slope
        sink = 0.0 if x.sink is None else -float((np.exp(x.sink - top) / total * delta).sum())
    keys = {"dq": dx @ x.k * alpha**how.scale_q, "dk": dx.T @ x.q * alpha**how.scale_k, "dv": p.T @ do}
    return keys | {"ds": dx if last else ds, "dsink": sink}


Made = Callable[[Case], Outputs]


def _hypotheses(case: Case) -> Iterator[tuple[str, Made]]:
    """(what completes "as if", the gradients that the defect gives)."""

    def by(**changes: Any) -> Made:
        return lambda given: computed(given, replace(Pass(), **changes))

    def without(*names: str) -> Made:
        return lambda given: {**_zeros(given), **computed(given.without_options(*names), Pass())}

    yield "the row sums D were left out of dS", by(delta=False)
    if gradients.group(case) > 1:
        for says, pick in (("first", 0), ("last", -1)):
            what = f"dk and dv held the share of the {says} query head of each group only"
            yield what, partial(_one_of_group, pick=pick)
    if case.options.get("is_causal") and case.arrays["q"].shape[2] != case.arrays["k"].shape[2]:
        other = {"top_left": "bottom_right", "bottom_right": "top_left"}
        now = attention_case.chosen(case, "causal_alignment")
        yield (
            f"the causal mask were aligned {other[now]}",
            lambda given: computed(given.with_options(causal_alignment=other[now]), Pass()),
        )
    yield "P were recomputed without the masks", by(masked=False)
    for name in ("is_causal", "window_size", "softcap", "alibi_slopes", "sinks", "scale", "attn_mask"):
        if name in case.options:
            yield f"{name} were ignored", without(name)
    if "softcap" in case.options:
        yield "the gradient passed the soft cap unchanged", by(slope=False)
    yield "dq were not multiplied by the scale", by(scale_q=0)
    yield "dk were not multiplied by the scale", by(scale_k=0)
    yield "dq and dk were not multiplied by the scale", by(scale_q=0, scale_k=0)
    yield "dq were multiplied by the scale twice", by(scale_q=2)
    yield "dk were multiplied by the scale twice", by(scale_k=2)
    yield "dO were all ones", by(ones=True)
    alpha = attention_case.scale_float(case)
    for name in gradients.output_shapes(case):
        yield f"{name} were zero", partial(_changed, name=name, factor=0.0)
        yield f"{name} had the wrong sign", partial(_changed, name=name, factor=-1.0)
        if name in ("dbias", "dsinks", "dv"):
            yield f"{name} were multiplied by the scale", partial(_changed, name=name, factor=alpha)


def _zeros(case: Case) -> Outputs:
    return {n: np.zeros(s) for n, s in gradients.output_shapes(case).items()}


def _changed(case: Case, name: str, factor: float) -> Outputs:
    exact = computed(case, Pass())
    return exact | {name: factor * exact[name]}


def _one_of_group(case: Case, pick: int) -> Outputs:
    size = gradients.group(case)
    heads = np.arange(case.arrays["q"].shape[1]).reshape(-1, size)[:, pick]
    arrays = {n: case.arrays[n][:, heads] if n in ("q", "do") else case.arrays[n] for n in case.arrays}
    options = dict(case.options)
    for name in ("alibi_slopes", "sinks"):
        if name in options:
            options[name] = options[name][..., heads]
    mask = options.get("attn_mask")
    if mask is not None and mask.ndim == 4 and mask.shape[1] > 1:
        options["attn_mask"] = mask[:, heads]
    one = computed(replace(case, arrays=arrays, options=options), Pass())
    return computed(case, Pass()) | {n: one[n] for n in ("dk", "dv")}


def _where(wrong: Mapping[str, NDArray[np.bool_]]) -> str:
    """Which outputs are wrong, and in which rows where that is not all of them."""
    said = []
    for name, mask in wrong.items():
        if not mask.any():
            continue
        rows = mask.any(axis=-1) if mask.ndim > 1 else mask
        rows = rows.reshape(-1, rows.shape[-1]).any(axis=0)
        places = np.flatnonzero(rows)
        share = "all rows" if rows.all() else f"rows {places[0]} to {places[-1]}"
        said.append(f"{name} ({share if len(places) > 1 or rows.all() else f'row {places[0]}'})")
    right = [name for name, mask in wrong.items() if not mask.any()]
    return f"wrong in {', '.join(said)}" + (f"; right in {', '.join(right)}" if right else "")
