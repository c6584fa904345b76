"""Counterfactuals of the gradients of attention and of multi-head latent attention: one step of the pass changed.

A prediction is the whole backward pass in float64 with that step changed (`properties.ops.gradients.backward_pass`),
with the room of the exact gradient and of the rounding of what the defect adds to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.block import Block
from oracle.case import Case
from oracle.formats import FORMATS, Float64Array, format_of
from oracle.ops.attention import case as attention_case
from oracle.ops.attention import gradient_case as gradients
from oracle.ops.attention.options import EXCLUDING, taken
from oracle.ops.mla import case as mla_case
from oracle.ops.table import op_named
from properties.diagnosis.counterfactual import (
    Counterfactual,
    FailingCase,
    Hypothesis,
    Predictions,
    Table,
    changed,
    exact_outputs,
)
from properties.diagnosis.heads import TILES, last_missing
from properties.diagnosis.outputs import times
from properties.ops.attention import diagnosis as diagnose_attention
from properties.ops.attention import diagnosis_options as diagnose_options
from properties.ops.attention.diagnosis_masks import additive_factors, causal_rules, other_masks
from properties.ops.gradients.backward_pass import Outputs, Pass, computed
from properties.ops.mla import diagnosis as diagnose_mla

# Of what a defect adds to a gradient, in unit roundoffs of the input: its own stages round too.
ROUNDINGS = 16


def of_pass(
    says: str, made: Callable[[Case], Outputs], *, roundings: int = ROUNDINGS, **more: object
) -> Counterfactual:
    """The target computed other gradients, ``made`` of the case."""
    held: list[Any] = []

    def change(s: FailingCase, block: Block, p: Predictions) -> Predictions:
        if not held or held[0] is not s:
            held[:] = [s, made(s.case), exact_outputs(s)]
        unit = format_of(next(iter(s.case.arrays.values()))).unit_roundoff
        found = {}
        for name, q in p.items():
            there, added = held[1][name], np.abs(held[1][name] - held[2][name])
            added = np.where(np.isfinite(added), added, 0.0)
            room: Float64Array = roundings * unit * (added + added.max(initial=0.0) / 4)
            value = block.take(name, there)
            lost = ~np.isfinite(value)
            moved = q.at(np.where(lost, 0.0, value)).marked("breaks", lost)
            found[name] = replace(moved, bound=q.bound + block.take(name, room))
        return found

    return changed(says, change, **more)


def by(says: str, **changes: Any) -> Counterfactual:
    """The pass with some steps changed."""
    return of_pass(says, lambda case: computed(case, Pass(**changes)))


def seeing(says: str, how: Pass | None = None, **options: object) -> Counterfactual:
    """The pass under other options; None takes one away."""
    gone = [name for name, value in options.items() if value is None]
    held = {name: value for name, value in options.items() if value is not None}

    def made(case: Case) -> Outputs:
        return computed(case, how or Pass(), forward=case.without_options(*gone).with_options(**held))

    return of_pass(says, made)


def _of_cases(found: Iterable[Counterfactual]) -> Iterator[Counterfactual]:
    """Counterfactuals that are the case with other options."""
    for c in found:
        if c.source is not None:
            options = c.source((0, 0), np.arange(1))[0].options
            yield of_pass(c.sentence, partial(_under, options=options))


def _under(case: Case, options: Any) -> Outputs:
    return computed(case, Pass(), forward=replace(case, options=options))


def row_sums(failing: FailingCase) -> Iterator[Counterfactual]:
    yield by("the row sums D were left out of dS", delta=False)


# --- what is shared ---


def groups(failing: FailingCase) -> Iterator[Counterfactual]:
    if gradients.group(failing.case) > 1:
        for says, pick in (("first", 0), ("last", -1)):
            what = f"dk and dv held the share of the {says} query head of each group only"
            yield of_pass(what, partial(_one_of_group, pick=pick))


def _one_of_group(case: Case, pick: int) -> Outputs:
    size = gradients.group(case)
    heads = np.arange(case.arrays["q"].shape[1]).reshape(-1, size)[:, pick]
    arrays = {n: case.arrays[n][:, heads] if n in ("q", "do") else case.arrays[n] for n in case.arrays}
    one = computed(replace(case, arrays=arrays, options=taken(case.options, Hq=heads)), Pass())
    return computed(case, Pass()) | {n: one[n] for n in ("dk", "dv")}


def latent_shares(failing: FailingCase) -> Iterator[Counterfactual]:
    """mla_backward: what latents and the shared key get of the heads, and of the values."""
    if failing.case.arrays["q_nope"].shape[1] > 1:
        yield by("what all heads share had the gradient of the first head only", head=0)
        yield by("what all heads share had the gradient of the last head only", head=-1)
        yield by("dw_uk met the queries of the heads in reverse order", crossed=True)
    yield by("the latents had no gradient through the values", values=False)


# --- who sees whom ---


def causal(failing: FailingCase) -> Iterator[Counterfactual]:
    for says, visible, choice in causal_rules(failing.case):
        how = Pass(seen=lambda rows, keys, visible=visible: visible)  # type: ignore[misc]
        yield seeing(says.format(choice), how, is_causal=None)


def options(failing: FailingCase) -> Iterator[Counterfactual]:
    given = set(failing.case.options)
    yield from _of_cases(diagnose_options.options(failing))
    if "softcap" in given:
        yield by("the gradient passed the soft cap unchanged", slope=False)
    if given & set(EXCLUDING):
        says = "P were recomputed without the masks"
        yield by(says, masked=False)
        yield by(f"{says}, hidden keys with the largest score of their row", masked=False, topped=True)


def masks(failing: FailingCase) -> Iterator[Counterfactual]:
    case = failing.case
    mask = case.options.get("attn_mask")
    if mask is None:
        return
    yield seeing("attn_mask were ignored", attn_mask=None)
    shape = (*case.arrays["q"].shape[:3], case.arrays["k"].shape[2])
    for says, other in other_masks(mask, shape):
        yield seeing(says, attn_mask=np.ascontiguousarray(np.broadcast_to(other, shape)))
    if mask.dtype != np.bool_:
        wide = mask.astype(np.float64)
        for says, factor in additive_factors(attention_case.scale_float(case)):
            scaled = np.where(np.isfinite(wide), factor * np.where(np.isfinite(wide), wide, 0.0), wide)
            yield seeing(says, attn_mask=scaled)


def missing(failing: FailingCase) -> Iterator[Counterfactual]:
    """Keys or queries that are not dealt with."""
    arrays, latent = failing.case.arrays, failing.case.op == "mla_backward"
    rows, keys = arrays["q_nope" if latent else "q"].shape[2], arrays["c_kv" if latent else "k"].shape[-2]
    for what, count in last_missing(keys, "key", "keys"):
        if count < keys:
            yield by(f"{what} missing", keys=partial(_below, count=count))
    if keys > 1:
        yield by("the first key was missing", keys=lambda n: np.arange(n) > 0)
    for t in TILES:
        if keys >= t:
            yield by(f"the last key of every full tile of {t} were missing", keys=partial(_inside, tile=t))
    shared = "neither what the keys nor what the values are made of" if latent else "neither dk nor dv"
    for what, count in last_missing(rows, "query", "queries"):
        if count < rows or rows == 1:
            reached = f"the last {'query' if count == 1 else f'{count} queries'} reached {shared}"
            yield by(reached, queries=partial(_below, count=count))
            yield by(f"{what} missing", queries=partial(_below, count=count), rows=True)


def _below(n: int, count: int) -> NDArray[np.bool_]:
    return np.arange(n) < n - count


def _inside(n: int, tile: int) -> NDArray[np.bool_]:
    return np.asarray(np.arange(n) % tile != tile - 1)


# --- numbers ---


def scales(failing: FailingCase) -> Iterator[Counterfactual]:
    case, latent = failing.case, failing.case.op == "mla_backward"
    dq, dk = ("dq_nope and dq_pe", "what keys are made of") if latent else ("dq", "dk")
    yield by(f"{dq} were not multiplied by the scale", scale_q=0)
    yield by(f"{dk} were not multiplied by the scale", scale_k=0)
    yield by(f"{dq} and {dk} were not multiplied by the scale", scale_q=0, scale_k=0)
    yield by(f"{dq} were multiplied by the scale twice", scale_q=2)
    yield by(f"{dk} were multiplied by the scale twice", scale_k=2)
    given = case.options.get("scale")
    if latent:
        (_, d_h, d_c), d_r, d_v = case.arrays["w_uk"].shape, case.arrays["q_pe"].shape[3], case.arrays["w_uv"].shape[1]
        choices = diagnose_mla.scale_choices(mla_case.scale_float(case), given, d_h, d_r, d_c, d_v)
    else:
        (_, heads, _, d), d_v = case.arrays["q"].shape, case.arrays["v"].shape[3]
        choices = diagnose_attention.scale_choices(attention_case.scale_float(case), given, d, d_v, heads)
    for says, value in choices:
        yield seeing(says, scale=value)


def cotangents(failing: FailingCase) -> Iterator[Counterfactual]:
    yield by("dO were all ones", ones=True)


def whole_outputs(failing: FailingCase) -> Iterator[Counterfactual]:
    case = failing.case
    alpha = (mla_case if case.op == "mla_backward" else attention_case).scale_float(case)
    for name in op_named(case.op).output_shapes(case):
        yield changed(f"{name} were zero", times(name, 0.0))
        yield changed(f"{name} had the wrong sign", times(name, -1.0))
        if name in ("dw_uk", "dw_uv"):
            yield of_pass(f"{name} were that of the heads in reverse order", partial(_reversed, name=name))
        if name in ("dbias", "dsinks", "dv", "dw_uv"):
            yield changed(f"{name} were multiplied by the scale", times(name, alpha))


def _reversed(case: Case, name: str) -> Outputs:
    exact = computed(case, Pass())
    return exact | {name: exact[name][::-1]}


def stages(failing: FailingCase) -> Iterator[Counterfactual]:
    """What passes through a narrower format than the inputs'; roundings need not agree one by one."""
    own = format_of(next(iter(failing.case.arrays.values())))
    dv = "dW_UV" if failing.case.op == "mla_backward" else "dv"
    for name in ("fp16", "bf16", "e4m3", "e5m2"):
        fmt = FORMATS[name]
        # A format may be too narrow by its range alone.
        if fmt.precision < own.precision or fmt.emax < own.emax:
            for says, how in (
                (f"dS were stored in {name}", Pass(ds=fmt)),
                (f"P were cast to {name} for {dv}", Pass(weights=fmt)),
            ):
                yield of_pass(says, partial(computed, how=how), roundings=0, contract={})


_NUMBERS = (
    Hypothesis("missing", missing),
    Hypothesis("scale", scales),
    Hypothesis("cotangent", cotangents),
    Hypothesis("whole outputs", whole_outputs),
    Hypothesis("stages", stages),
)


def _latent_causal(failing: FailingCase) -> Iterator[Counterfactual]:
    return _of_cases(diagnose_mla.causal(failing))


_SUMS = Hypothesis("row sums", row_sums)

TABLES = {
    "attention_backward": Table(
        (
            _SUMS,
            Hypothesis("groups", groups),
            Hypothesis("causal", causal),
            Hypothesis("options", options),
            Hypothesis("masks", masks),
            *_NUMBERS,
        )
    ),
    "mla_backward": Table(
        (_SUMS, Hypothesis("shares", latent_shares), Hypothesis("causal", _latent_causal), *_NUMBERS)
    ),
}
