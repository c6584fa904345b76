"""Defects of the backward passes of attention and of multi-head latent attention, as changes of one step of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.case import Case
from oracle.formats import FORMATS, format_of
from oracle.ops.attention import case as attention_case
from oracle.ops.attention import gradient_case as gradients
from oracle.ops.mla import case as mla_case
from oracle.ops.table import op_named
from properties.diagnosis.counterfactual import Counterfactual, FailingCase
from properties.diagnosis.heads import TILES, last_missing
from properties.ops.attention import diagnosis as diagnose_attention
from properties.ops.attention import diagnosis_options as diagnose_options
from properties.ops.attention.diagnosis_masks import additive_factors, causal_rules, other_masks
from properties.ops.gradients.backward_pass import Outputs, Pass, computed
from properties.ops.mla import diagnosis as diagnose_mla
from properties.subject import Subject

Made = Callable[[Case], Outputs]
Hypotheses = Iterator[tuple[str, Made]]


def hypotheses(subject: Subject, case: Case) -> Hypotheses:
    """(what completes "as if", the gradients that the defect gives); the likely and the cheap ones first."""
    failing = FailingCase(subject, case, {})
    latent = case.op == "mla_backward"
    yield "the row sums D were left out of dS", by(delta=False)
    yield from _latent_shares(case) if latent else _groups(case)
    yield from _of_cases(diagnose_mla.causal(failing)) if latent else _causal(case)
    if not latent:
        yield from _options(failing)
        yield from _masks(case)
    yield from _missing(case)
    yield from _scales(case)
    yield "dO were all ones", by(ones=True)
    yield from _whole_outputs(case)


def by(**changes: Any) -> Made:
    return lambda given: computed(given, replace(Pass(), **changes))


def seeing(**options: Any) -> Made:
    """The pass under other options; None takes one away."""

    def made(given: Case) -> Outputs:
        gone = [name for name, value in options.items() if value is None]
        other = given.without_options(*gone).with_options(**{n: v for n, v in options.items() if v is not None})
        return computed(given, Pass(), forward=other)

    return made


def _of_cases(found: Iterator[Counterfactual]) -> Hypotheses:
    """Counterfactuals that are the case with other options."""
    for c in found:
        if c.source is not None:
            options = c.source((0, 0), np.arange(1))[0].options
            yield c.sentence, partial(_under, options=options)


def _under(given: Case, options: Any) -> Outputs:
    return computed(given, Pass(), forward=replace(given, options=options))


# --- what is shared ---


def _groups(case: Case) -> Hypotheses:
    if gradients.group(case) > 1:
        for says, pick in (("first", 0), ("last", -1)):
            what = f"dk and dv held the share of the {says} query head of each group only"
            yield what, partial(_one_of_group, pick=pick)


def _one_of_group(case: Case, pick: int) -> Outputs:
    size = gradients.group(case)
    heads = np.arange(case.arrays["q"].shape[1]).reshape(-1, size)[:, pick]
    arrays = {n: case.arrays[n][:, heads] if n in ("q", "do") else case.arrays[n] for n in case.arrays}
    options = dict(case.options)
    for name in ("alibi_slopes", "sinks"):
        if options.get(name) is not None:
            options[name] = options[name][..., heads]
    mask = options.get("attn_mask")
    if mask is not None and mask.ndim >= 3 and mask.shape[-3] > 1:
        options["attn_mask"] = mask[..., heads, :, :]
    one = computed(replace(case, arrays=arrays, options=options), Pass())
    return computed(case, Pass()) | {n: one[n] for n in ("dk", "dv")}


def _latent_shares(case: Case) -> Hypotheses:
    """mla_backward: what latents and the shared key get of the heads, and of the values."""
    if case.arrays["q_nope"].shape[1] > 1:
        yield "what all heads share had the gradient of the first head only", by(head=0)
        yield "what all heads share had the gradient of the last head only", by(head=-1)
        yield "dw_uk met the queries of the heads in reverse order", by(crossed=True)
    yield "the latents had no gradient through the values", by(values=False)


# --- who sees whom ---


def _causal(case: Case) -> Hypotheses:
    for says, visible, choice in causal_rules(case):

        def made(given: Case, visible: NDArray[np.bool_] = visible) -> Outputs:
            how = Pass(seen=lambda rows, keys: visible)
            return computed(given, how, forward=given.without_options("is_causal"))

        yield says.format(choice), made


def _options(failing: FailingCase) -> Hypotheses:
    case = failing.case
    yield from _of_cases(diagnose_options.options(failing))
    if "softcap" in case.options:
        yield "the gradient passed the soft cap unchanged", by(slope=False)
    hides = {"is_causal", "attn_mask", "window_size"} & set(case.options)
    if hides:
        yield "P were recomputed without the masks", by(masked=False)
        says = "P were recomputed without the masks, hidden keys with the largest score of their row"
        yield says, by(masked=False, topped=True)


def _masks(case: Case) -> Hypotheses:
    mask = case.options.get("attn_mask")
    if mask is None:
        return
    yield "attn_mask were ignored", seeing(attn_mask=None)
    q, k = case.arrays["q"], case.arrays["k"]
    for says, other in other_masks(mask, (*q.shape[:3], k.shape[2])):
        yield says, seeing(attn_mask=np.ascontiguousarray(np.broadcast_to(other, (*q.shape[:3], k.shape[2]))))
    if mask.dtype != np.bool_:
        wide = mask.astype(np.float64)
        for says, factor in additive_factors(attention_case.scale_float(case)):
            times = np.where(np.isfinite(wide), factor * np.where(np.isfinite(wide), wide, 0.0), wide)
            yield says, seeing(attn_mask=times)


def _missing(case: Case) -> Hypotheses:
    """Keys or queries that are not dealt with."""
    latent = case.op == "mla_backward"
    rows, keys = case.arrays["q_nope" if latent else "q"].shape[2], case.arrays["c_kv" if latent else "k"].shape[-2]
    for what, count in last_missing(keys, "key", "keys"):
        if count < keys:
            yield f"{what} missing", by(keys=partial(_below, count=count))
    if keys > 1:
        yield "the first key was missing", by(keys=lambda n: np.arange(n) > 0)
    for t in TILES:
        if keys >= t:
            yield f"the last key of every full tile of {t} were missing", by(keys=partial(_inside, tile=t))
    shared = "neither what the keys nor what the values are made of" if latent else "neither dk nor dv"
    for what, count in last_missing(rows, "query", "queries"):
        if count < rows or rows == 1:
            reached = f"the last {'query' if count == 1 else f'{count} queries'} reached {shared}"
            yield reached, by(queries=partial(_below, count=count))
            yield f"{what} missing", by(queries=partial(_below, count=count), rows=True)


def _below(n: int, count: int) -> NDArray[np.bool_]:
    return np.arange(n) < n - count


def _inside(n: int, tile: int) -> NDArray[np.bool_]:
    return np.asarray(np.arange(n) % tile != tile - 1)


# --- numbers ---


def _scales(case: Case) -> Hypotheses:
    latent = case.op == "mla_backward"
    dq, dk = ("dq_nope and dq_pe", "what keys are made of") if latent else ("dq", "dk")
    yield f"{dq} were not multiplied by the scale", by(scale_q=0)
    yield f"{dk} were not multiplied by the scale", by(scale_k=0)
    yield f"{dq} and {dk} were not multiplied by the scale", by(scale_q=0, scale_k=0)
    yield f"{dq} were multiplied by the scale twice", by(scale_q=2)
    yield f"{dk} were multiplied by the scale twice", by(scale_k=2)
    given = case.options.get("scale")
    if latent:
        (_, d_h, d_c), d_r, d_v = case.arrays["w_uk"].shape, case.arrays["q_pe"].shape[3], case.arrays["w_uv"].shape[1]
        choices = diagnose_mla.scale_choices(mla_case.scale_float(case), given, d_h, d_r, d_c, d_v)
    else:
        (_, heads, _, d), d_v = case.arrays["q"].shape, case.arrays["v"].shape[3]
        choices = diagnose_attention.scale_choices(attention_case.scale_float(case), given, d, d_v, heads)
    for says, value in choices:
        yield says, seeing(scale=value)


def stages(case: Case) -> Hypotheses:
    """What passes through a narrower format than the inputs'; roundings need not agree one by one."""
    own = format_of(next(iter(case.arrays.values())))
    for name in ("fp16", "bf16", "e4m3", "e5m2"):
        fmt = FORMATS[name]
        # A format may be too narrow by its range alone.
        if fmt.precision < own.precision or fmt.emax < own.emax:
            yield f"dS were stored in {name}", by(ds=fmt)
            yield f"P were cast to {name} for {'dW_UV' if case.op == 'mla_backward' else 'dv'}", by(weights=fmt)


def _whole_outputs(case: Case) -> Hypotheses:
    latent = case.op == "mla_backward"
    alpha = (mla_case if latent else attention_case).scale_float(case)
    for name in op_named(case.op).output_shapes(case):
        yield f"{name} were zero", partial(_changed, name=name, factor=0.0)
        yield f"{name} had the wrong sign", partial(_changed, name=name, factor=-1.0)
        if name in ("dw_uk", "dw_uv"):
            yield f"{name} were that of the heads in reverse order", partial(_reversed, name=name)
        if name in ("dbias", "dsinks", "dv", "dw_uv"):
            yield f"{name} were multiplied by the scale", partial(_changed, name=name, factor=alpha)


def _reversed(case: Case, name: str) -> Outputs:
    exact = computed(case, Pass())
    return exact | {name: exact[name][::-1]}


def _changed(case: Case, name: str, factor: float) -> Outputs:
    exact = computed(case, Pass())
    return exact | {name: factor * exact[name]}
