"""The properties of the gradients of mla's core. Inputs are those of the forward pass and a cotangent of its output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import strategies as st

from oracle.case import Case
from properties.checks import model_gate
from properties.checks.metamorphic import observe, same_bits
from properties.inputs.recipes import Recipe, array
from properties.inputs.strategies import SEEDS
from properties.judge.empty_rows import unpromised
from properties.judge.judgements import all_bits, structure_only, within_bound
from properties.judge.verdict import Basis, Judgement, Verdict, worst_of
from properties.ops.mla import table as mla
from properties.ops.mla.inputs import latents, mla_input
from properties.property import Property
from properties.subject import Input, Subject

COTANGENTS = ("normal", "one_signed", "outliers", "one_hot")
WIDTHS = (8, 4, 12, 6)


def with_cotangent(subject: Subject, example: Input, family: str = "normal", seed: int = 0) -> Input:
    """The forward input as one of this op, with a cotangent dO of its output."""
    q, w_uv = example.case.arrays["q_nope"].shape, example.case.arrays["w_uv"].shape
    do = array(Recipe(family, seed), (*q[:3], w_uv[1]), subject.fmt, stream=9)
    case = Case("mla_backward", {**example.case.arrays, "do": do}, example.case.options)
    return Input(case, {**example.features, "cotangent": family})


def drawn(subject: Subject, **more: Any) -> st.SearchStrategy[Input]:
    def made(example: Input, family: str, seed: int) -> Input:
        return with_cotangent(subject, example, family, seed)

    sizes = {"largest_q": 12, "largest_k": 24}
    return st.builds(made, latents(subject, **{**sizes, **more}), st.sampled_from(COTANGENTS), SEEDS)


def one(subject: Subject, **more: Any) -> Input:
    return with_cotangent(subject, mla_input(subject, **{"heads": 2, "widths": WIDTHS, **more}))


def model_edges(subject: Subject) -> Iterator[Input]:
    """Those of the forward pass, each with a cotangent."""
    for example in mla.model_edges(subject):
        yield with_cotangent(subject, example)


def accuracy_edges(subject: Subject) -> Iterator[Input]:
    for sk in (16, 64):
        for causal in (False, True):
            yield one(subject, sq=8, sk=sk, recipe=Recipe(seed=sk), is_causal=causal, features={"sweep": "context"})


def range_edges(subject: Subject) -> Iterator[Input]:
    """Cotangents and latents of every size, common parts of dO that cancel in dP - D."""
    fmt = subject.fmt
    for gain in (fmt.smallest_normal * 16, 1e-3, 100.0, min(fmt.max_finite / 1024, 1e10)):
        made = one(subject, sq=4, sk=9, recipe=Recipe(seed=3))
        do = made.case.arrays["do"].astype(np.float64) * gain
        stored = fmt.store(np.clip(do, -fmt.max_finite, fmt.max_finite))
        yield Input(made.case.with_arrays(do=stored), {**made.features, "edge": "magnitude", "gain": gain})
    made = one(subject, sq=4, sk=9, recipe=Recipe(seed=4))
    constant = made.case.with_arrays(do=fmt.store(made.case.arrays["do"].astype(np.float64) + 30))
    yield Input(constant, {**made.features, "edge": "offset"})


def shape_edges(subject: Subject) -> Iterator[Input]:
    for n in (1, 2, 3, 15, 16, 17, 31, 33):
        yield one(subject, sq=3, sk=n, recipe=Recipe(seed=n), features={"edge": "keys"})
    for sq, sk in ((1, 1), (5, 5), (9, 20)):
        yield one(subject, sq=sq, sk=sk, is_causal=True, recipe=Recipe(seed=sq), features={"edge": "queries"})
    for batch, heads in ((2, 1), (3, 3), (1, 5)):
        yield one(subject, batch=batch, heads=heads, sq=4, sk=7, recipe=Recipe(seed=heads), features={"edge": "heads"})
    for widths in ((1, 1, 1, 1), (5, 2, 7, 3), (16, 4, 33, 17)):
        yield one(subject, widths=widths, sq=4, sk=9, recipe=Recipe(seed=sum(widths)), features={"edge": "widths"})


def option_edges(subject: Subject) -> Iterator[Input]:
    for more in ({"scale": 1.0}, {"scale": 0.05}, {"is_causal": True}, {"scale": 0.7, "is_causal": True}):
        if all(subject.has(name) for name in more):
            yield one(subject, sq=6, sk=6, recipe=Recipe(seed=5), **more)


def dtype_edges(subject: Subject) -> Iterator[Input]:
    yield one(subject, sq=2, sk=3)


def linear(subject: Subject, example: Input) -> Judgement:
    """P25: -dO gives minus every gradient, bit for bit, and dO = 0 gives zeros."""
    case = example.case
    outputs = observe(subject, case)
    negated = observe(subject, case.with_arrays(do=-case.arrays["do"]))
    nothing = observe(subject, case.with_arrays(do=np.zeros_like(case.arrays["do"])))
    judged = [all_bits(outputs[n], np.negative(negated[n]), what=f"{n} of the cotangent negated") for n in outputs]
    # 0 times the NaN of an empty row is NaN.
    lost = any(unpromised(subject, case, key) for key in subject.target.row.blocks(case))
    for name, given in nothing.items():
        where = np.isfinite(given.astype(np.float64)) if lost else np.ones(given.shape, dtype=bool)
        judged.append(same_bits(np.zeros_like(given), given, where, what=f"{name} of a cotangent of 0"))
    return worst_of(judged)


def pure(subject: Subject, example: Input) -> Judgement:
    """P15: a second call, after one with other content, gives the same bits; inputs are watched in every call."""
    case = example.case
    first = observe(subject, case)
    observe(subject, case.with_arrays(do=np.ascontiguousarray(case.arrays["do"][..., ::-1])))
    again = observe(subject, case)
    judged = [all_bits(first[n], again[n], what=f"{n} of a second call") for n in first]
    bad = [j for j in judged if j.verdict is not Verdict.PASS]
    return bad[0] if bad else Judgement(Verdict.PASS, Basis.EXACT, "calls leave no trace")


def _general(subject: Subject) -> st.SearchStrategy[Input]:
    return drawn(subject)


def _ranges(subject: Subject) -> st.SearchStrategy[Input]:
    kinds = ("offset", "ascending", "peak", "ties", "needle")
    return drawn(subject, kinds=kinds, sizes=(10.0, -60.0, 300.0))


PROPERTIES: tuple[Property, ...] = (
    Property("P1", "gradients within the contract's bound", within_bound, search=_general, edges=accuracy_edges),
    Property("P9", "scores and cotangents of every size", within_bound, search=_ranges, edges=range_edges),
    Property("P15", "no side effects, calls independent of each other", pure, search=_general),
    Property("P17", "every option matches the oracle", within_bound, edges=option_edges),
    Property("P18", "lengths around tile borders, odd and unequal dimensions", within_bound, edges=shape_edges),
    Property("P23", "dtype, shape and device of the outputs", structure_only, edges=dtype_edges),
    Property("P25", "linear in the cotangent", linear, search=_general),
    Property("G3", "rms error of the gradients against the model kernel", model_gate.check, edges=model_edges),
)
