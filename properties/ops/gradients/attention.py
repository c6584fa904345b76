"""The properties of the gradients of attention: those of a function by automatic differentiation, or its own.

Inputs are those of the forward pass with a cotangent dO beside them; shapes are small, for a gradient reads everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from oracle.case import Case
from properties.checks import model_gate
from properties.checks.metamorphic import Outputs, differing, full_bounds, observe
from properties.inputs import strategies
from properties.inputs.recipes import GENERAL, Logits, Mask, Recipe, array
from properties.judge.judgements import all_bits, kept, structure_only, within_bound
from properties.judge.remembered import judged
from properties.judge.verdict import Judgement, worst_of
from properties.ops.attention import edges
from properties.property import Property
from properties.subject import Input, Subject

COTANGENTS = ("normal", "one_signed", "outliers", "one_hot")
LARGEST = {"largest_q": 24, "largest_k": 48}


def with_cotangent(subject: Subject, example: Input, family: str = "normal") -> Input:
    """The forward input and a cotangent of its output, drawn by the same seed."""
    q, v = (example.case.arrays[n].shape for n in ("q", "v"))
    seed = int(example.features.get("seed", 0))
    do = array(Recipe(family, seed), (*q[:3], v[-1]), subject.fmt, stream=5)
    case = Case("attention_backward", {**example.case.arrays, "do": do}, example.case.options)
    return Input(case, {**example.features, "cotangent": family})


def drawn(subject: Subject, **more: Any) -> st.SearchStrategy[Input]:
    """Forward inputs, each with one of the cotangents."""

    def made(example: Input, family: str) -> Input:
        return with_cotangent(subject, example, family)

    return st.builds(made, strategies.attention(subject, **{**LARGEST, **more}), st.sampled_from(COTANGENTS))


def _general(subject: Subject) -> st.SearchStrategy[Input]:
    return drawn(subject, families=(*GENERAL, "zeros"))


def _ranges(subject: Subject) -> st.SearchStrategy[Input]:
    return drawn(subject, kinds=("offset", "peak", "ties", "sink", "ascending"), sizes=(10.0, -60.0, 300.0, 3e3))


def _grouped(subject: Subject) -> st.SearchStrategy[Input]:
    return drawn(subject, grouped=True, largest_q=8, largest_k=24)


def _made(subject: Subject, **more: Any) -> Input:
    family = more.pop("cotangent", "normal")
    return with_cotangent(subject, strategies.attention_input(subject, **more), family)


def accuracy_edges(subject: Subject) -> Iterator[Input]:
    """Plain, causal and grouped cases, equal keys (whose dq is 0), one key (whose dS is 0), a long row."""
    for sq, sk in ((1, 1), (3, 1), (1, 33), (5, 17), (16, 16), (33, 65)):
        yield _made(subject, sq=sq, sk=sk, recipe=Recipe(seed=sk), features={"edge": "shape"})
    for sq, sk in edges.causal_shapes(subject, (3, 3), (17, 17), (33, 33), (5, 9)):
        yield _made(subject, sq=sq, sk=sk, is_causal=True, features={"edge": "causal"})
    yield _made(subject, sq=4, sk=33, recipe=Recipe("zeros"), features={"edge": "equal keys"})
    yield _made(subject, sq=4, sk=33, values=Recipe("ones"), features={"edge": "constant V"})
    longest = 128 if subject.target.interpreted else min(subject.profile.large, 1024)
    yield _made(subject, sq=8, sk=longest, dims=64, features={"edge": "long"})


def model_edges(subject: Subject) -> Iterator[Input]:
    """Those of the forward pass, each with a cotangent."""
    for example in model_gate.edges(subject):
        yield with_cotangent(subject, example)


def head_edges(subject: Subject) -> Iterator[Input]:
    """Ratios of heads, square and not: the gradients of a shared key sum over its group."""
    if strategies.refuses(subject, "grouped_heads"):
        return
    for kv_heads, group in ((1, 3), (2, 2), (2, 3), (3, 2)):
        yield _made(subject, batch=2, kv_heads=kv_heads, group=group, sq=3, sk=17, features={"edge": "heads"})


def range_edges(subject: Subject) -> Iterator[Input]:
    """Scores far from 0, a sink with most of the mass, maxima that grow; cotangents near the format's limits."""
    for kind, size in (("offset", 300.0), ("offset", -1e4), ("sink", 9.0), ("ascending", 40.0), ("peak", 200.0)):
        features = {"sweep": "logits", "logit_size": size}
        yield _made(subject, sq=4, sk=40, dims=32, logits=Logits(kind, size), features=features)
    small = _made(subject, sq=3, sk=9, features={"edge": "small cotangent"})
    do = small.case.arrays["do"].astype(np.float64)
    for factor in (subject.fmt.smallest_normal * 4, 2.0**10):
        scaled = small.case.with_arrays(do=subject.fmt.store(do * factor))
        yield Input(scaled, {**small.features, "edge": f"cotangent times {factor:.3g}"})


def shape_edges(subject: Subject) -> Iterator[Input]:
    """Both sides of tile borders in queries and in keys, odd dimensions, Dv != D."""
    tiles = (32,) if subject.target.interpreted else (16, 32, 64)
    for n in (2, *(t + d for t in tiles for d in (-1, 0, 1))):
        yield _made(subject, sq=n, sk=3, dims=8, features={"edge": "queries"})
        yield _made(subject, sq=2, sk=n, dims=8, recipe=Recipe(seed=n), features={"edge": "keys"})
    for dims in (1, 3, 15, 17, 64, 96, 128):
        yield _made(subject, sq=3, sk=9, dims=dims, features={"edge": "d"})
    if not strategies.refuses(subject, "unequal_value_dim"):
        for dims, value_dims in ((16, 32), (40, 24)):
            yield _made(subject, sq=3, sk=9, dims=dims, value_dims=value_dims, features={"edge": "dv"})


def empty_edges(subject: Subject) -> Iterator[Input]:
    """Rows without a key among others, where the target says that their output is zero."""
    if subject.conventions.get("empty_row") != "zero":
        return
    for example in edges.empty_edges(subject):
        yield with_cotangent(subject, example)


def option_edges(subject: Subject) -> Iterator[Input]:
    """Every option that the target has, at values far from its default."""
    for example in edges.option_edges(subject):
        yield with_cotangent(subject, example)


def bias_edges(subject: Subject) -> Iterator[Input]:
    """Additive masks of every layout, for the gradient of the mask itself."""
    if subject.has("attn_mask"):
        for over in ("heads", "rows", "sequences", "keys"):
            yield _made(
                subject, batch=2, kv_heads=2, sq=3, sk=9, mask=Mask("additive", "some", over), features={"edge": over}
            )


def dtype_edges(subject: Subject) -> Iterator[Input]:
    yield _made(subject, sq=2, sk=3, dims=16)


def repeatable(subject: Subject, example: Input) -> Judgement:
    """P15: inputs unchanged, no output that is an input, and the same bits after a call with other content."""
    case = example.case
    first = observe(subject, case)
    observe(subject, case.with_arrays(**{n: np.ascontiguousarray(a[..., ::-1]) for n, a in case.arrays.items()}))
    again = observe(subject, case)
    return worst_of([all_bits(first[n], again[n], what=f"{n} of a second call") for n in first if n in again])


def linear(subject: Subject, example: Input) -> Judgement:
    """P25: a cotangent twice as large gives gradients twice as large, within both bounds."""
    case = example.case
    doubled = case.with_arrays(do=subject.fmt.store(2 * case.arrays["do"].astype(np.float64)))
    seen = [(c, observe(subject, c)) for c in (case, doubled)]
    return judged("linear", subject, seen, lambda: _doubled(subject, seen))


def _doubled(subject: Subject, seen: Sequence[tuple[Case, Outputs]]) -> Judgement:
    (_, first), (_, second) = seen
    where = differing(first, {n: a.astype(np.float64) / 2 for n, a in second.items()})
    rooms = list(zip(*(full_bounds(subject, case, outputs, where=where) for case, outputs in seen), strict=True))
    found = []
    for name in first:
        gap = np.abs(first[name].astype(np.float64) - second[name].astype(np.float64) / 2)
        allowed = [one[name] + two[name] / 2 for one, two in rooms]
        found.append(kept(subject, gap, allowed, what=f"{name} at dO and at 2 dO", output=name))
    return worst_of(found)


PROPERTIES: tuple[Property, ...] = (
    Property("P3", "rows without a key give no gradient and no NaN", within_bound, edges=empty_edges),
    Property("P9", "gradients at extreme logits and cotangents", within_bound, search=_ranges, edges=range_edges),
    Property("P13", "gradients of grouped heads sum over the group", within_bound, search=_grouped, edges=head_edges),
    Property("P14", "gradients within the contract's bound", within_bound, search=_general, edges=accuracy_edges),
    Property(
        "P14",
        "the gradient of an additive mask",
        within_bound,
        edges=bias_edges,
        needs=frozenset({"attn_mask"}),
    ),
    Property("P15", "independent calls without side effects", repeatable, edges=dtype_edges),
    Property("P17", "every option matters to the gradients", within_bound, edges=option_edges),
    Property("P18", "gradients at tile borders and odd dimensions", within_bound, edges=shape_edges),
    Property("P23", "dtype and shape of the gradients", structure_only, edges=dtype_edges),
    Property("P25", "gradients are linear in the cotangent", linear, edges=dtype_edges),
    Property("G3", "rms error of the gradients against the model kernel", model_gate.check, edges=model_edges),
)
