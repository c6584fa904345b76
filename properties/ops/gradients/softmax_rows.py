"""P14 of softmax and log_softmax: the gradient at x, forward and backward pass together, against the exact one."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from oracle.bounds.softmax.gradient import gradient_bounds
from oracle.case import Case
from oracle.formats import format_of
from properties.judge.judgements import draw_of, kept
from properties.judge.verdict import Basis, Judgement, Verdict
from properties.ops.softmax import inputs as strategies
from properties.subject import Input, Subject
from targets.builtin.gradient_of_rows import gradient_at
from targets.calling.target import run


def at_x(subject: Subject, example: Input) -> Judgement:
    """P14: dx of a random cotangent within the forward pass's bound carried through the backward formula.

    An entry -inf is held fixed: its cotangent is 0, and its dx is asked to be.
    """
    if subject.op == "logsumexp":
        return Judgement(Verdict.UNSUPPORTED, Basis.EXACT, "the gradient of logsumexp is that of no stored weights")
    case = example.case
    x = case.arrays["x"]
    drawn = draw_of(case).standard_normal(x.shape) + 0.5
    dy = subject.fmt.store(np.where(np.isneginf(x.astype(np.float64)), 0.0, drawn))
    observed = run(
        gradient_at(subject.target, dy, subject.device), case, device=subject.device, seconds=subject.seconds
    )
    if observed.fault is not None:
        kind, text = observed.fault
        verdict = Verdict.UNSUPPORTED if text.startswith("NotImplementedError") else Verdict.ERROR
        return Judgement(verdict, Basis.EXACT, f"{kind}: {text}")
    dx = observed.outputs["out"]
    if dx.shape != x.shape or dx.dtype != x.dtype:
        detail = f"dx has shape {list(dx.shape)} and dtype {dx.dtype}, expected {list(x.shape)} and {x.dtype}"
        return Judgement(Verdict.FAIL, Basis.EXACT, detail)
    rows = dx.reshape(-1, x.shape[-1]).astype(np.float64)
    wide = dy.astype(np.float64).reshape(rows.shape)
    block, exact, bounds = gradient_bounds(case, wide, subject.forms, format_of(dx))
    live = ~(block.empty | block.undefined)[:, None]
    with np.errstate(all="ignore"):
        gap = np.where(live, exact.distance(rows), 0.0)
    gap = np.where(live & ~np.isfinite(rows), np.inf, gap)
    legal = [bound.may_overflow & ~np.isfinite(rows) for bound in bounds]
    rooms = [np.where(live & ~free, bound.bound + exact.rad, np.inf) for bound, free in zip(bounds, legal, strict=True)]
    if not live.any() or all(free.all() for free in legal):
        return Judgement(Verdict.EXEMPT, Basis.DERIVED, "no row to which the contract promises a gradient")
    return kept(subject, gap, rooms, what="the gradient at x", output="dx")


def searched(subject: Subject) -> st.SearchStrategy[Input]:
    return strategies.rows(subject, kinds=("plain", "peak", "ties"), sizes=(4.0, 12.0), largest=300)


def edges(subject: Subject) -> list[Input]:
    """One entry, two, equal entries, long rows, entries of -inf."""
    rng = np.random.default_rng(14)
    made = [(rng.standard_normal((2, n)), f"n = {n}") for n in (1, 2, 3, 64, 257)]
    made += [(np.zeros((2, 8)), "equal"), (np.array([[0.0, -0.75, 3.0, -np.inf]]), "-inf"), (np.eye(5) * 20, "peaks")]
    return [Input(Case(subject.op, {"x": subject.fmt.store(x)}), {"edge": what}) for x, what in made]
