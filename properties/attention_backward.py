"""The properties of the gradients of attention: those of a function by automatic differentiation, or its own.

Inputs are those of the forward pass with a cotangent dO beside them; shapes are small, for a gradient reads everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from hypothesis import strategies as st

from oracle.case import Case
from properties import attention_edges as edges
from properties import model_gate, strategies
from properties.bench import Bench, Input
from properties.judging import all_bits, guarded, kept, structure_only, within_bound
from properties.metamorphic import full_bounds, observe
from properties.property import Check, Edges, Property
from properties.recipes import GENERAL, Logits, Mask, Recipe, array
from properties.verdict import Judgement, worst_of

COTANGENTS = ("normal", "one_signed", "outliers", "one_hot")
LARGEST = {"largest_q": 24, "largest_k": 48}


def with_cotangent(bench: Bench, given: Input, family: str = "normal") -> Input:
    """The forward input and a cotangent of its output, drawn by the same seed."""
    q, v = (given.case.arrays[n].shape for n in ("q", "v"))
    seed = int(given.features.get("seed", 0))
    do = array(Recipe(family, seed), (*q[:3], v[-1]), bench.fmt, stream=5)
    case = Case("attention_backward", {**given.case.arrays, "do": do}, given.case.options)
    return Input(case, {**given.features, "cotangent": family})


def drawn(bench: Bench, **more: Any) -> st.SearchStrategy[Input]:
    """Forward inputs, each with one of the cotangents."""

    def made(given: Input, family: str) -> Input:
        return with_cotangent(bench, given, family)

    return st.builds(made, strategies.attention(bench, **{**LARGEST, **more}), st.sampled_from(COTANGENTS))


def _general(bench: Bench) -> st.SearchStrategy[Input]:
    return drawn(bench, families=(*GENERAL, "zeros"))


def _ranges(bench: Bench) -> st.SearchStrategy[Input]:
    return drawn(bench, kinds=("offset", "peak", "ties", "sink", "ascending"), sizes=(10.0, -60.0, 300.0, 3e3))


def _grouped(bench: Bench) -> st.SearchStrategy[Input]:
    return drawn(bench, grouped=True, largest_q=8, largest_k=24)


def _made(bench: Bench, **more: Any) -> Input:
    family = more.pop("cotangent", "normal")
    return with_cotangent(bench, strategies.attention_input(bench, **more), family)


def accuracy_edges(bench: Bench) -> Iterator[Input]:
    """Plain, causal and grouped cases, equal keys (whose dq is 0), one key (whose dS is 0), a long row."""
    for sq, sk in ((1, 1), (3, 1), (1, 33), (5, 17), (16, 16), (33, 65)):
        yield _made(bench, sq=sq, sk=sk, recipe=Recipe(seed=sk), features={"edge": "shape"})
    for sq, sk in edges.causal_shapes(bench, (3, 3), (17, 17), (33, 33), (5, 9)):
        yield _made(bench, sq=sq, sk=sk, is_causal=True, features={"edge": "causal"})
    yield _made(bench, sq=4, sk=33, recipe=Recipe("zeros"), features={"edge": "equal keys"})
    yield _made(bench, sq=4, sk=33, values=Recipe("ones"), features={"edge": "constant V"})
    longest = 128 if bench.target.interpreted else min(bench.profile.large, 1024)
    yield _made(bench, sq=8, sk=longest, dims=64, features={"edge": "long"})


def model_edges(bench: Bench) -> Iterator[Input]:
    """Those of the forward pass, each with a cotangent."""
    for given in model_gate.edges(bench):
        yield with_cotangent(bench, given)


def head_edges(bench: Bench) -> Iterator[Input]:
    """Ratios of heads, square and not: the gradients of a shared key sum over its group."""
    if strategies.refuses(bench, "grouped_heads"):
        return
    for kv_heads, group in ((1, 3), (2, 2), (2, 3), (3, 2)):
        yield _made(bench, batch=2, kv_heads=kv_heads, group=group, sq=3, sk=17, features={"edge": "heads"})


def range_edges(bench: Bench) -> Iterator[Input]:
    """Scores far from 0, a sink with most of the mass, maxima that grow; cotangents near the format's limits."""
    for kind, size in (("offset", 300.0), ("offset", -1e4), ("sink", 9.0), ("ascending", 40.0), ("peak", 200.0)):
        features = {"sweep": "logits", "logit_size": size}
        yield _made(bench, sq=4, sk=40, dims=32, logits=Logits(kind, size), features=features)
    small = _made(bench, sq=3, sk=9, features={"edge": "small cotangent"})
    do = small.case.arrays["do"].astype(np.float64)
    for factor in (bench.fmt.smallest_normal * 4, 2.0**10):
        scaled = small.case.with_arrays(do=bench.fmt.store(do * factor))
        yield Input(scaled, {**small.features, "edge": f"cotangent times {factor:.3g}"})


def shape_edges(bench: Bench) -> Iterator[Input]:
    """Both sides of tile borders in queries and in keys, odd dimensions, Dv != D."""
    tiles = (32,) if bench.target.interpreted else (16, 32, 64)
    for n in (2, *(t + d for t in tiles for d in (-1, 0, 1))):
        yield _made(bench, sq=n, sk=3, dims=8, features={"edge": "queries"})
        yield _made(bench, sq=2, sk=n, dims=8, recipe=Recipe(seed=n), features={"edge": "keys"})
    for dims in (1, 3, 15, 17, 64, 96, 128):
        yield _made(bench, sq=3, sk=9, dims=dims, features={"edge": "d"})
    if not strategies.refuses(bench, "unequal_value_dim"):
        for dims, value_dims in ((16, 32), (40, 24)):
            yield _made(bench, sq=3, sk=9, dims=dims, value_dims=value_dims, features={"edge": "dv"})


def empty_edges(bench: Bench) -> Iterator[Input]:
    """Rows without a key among others, where the target says that their output is zero."""
    if bench.conventions.get("empty_row") != "zero":
        return
    for given in edges.empty_edges(bench):
        yield with_cotangent(bench, given)


def option_edges(bench: Bench) -> Iterator[Input]:
    """Every option that the target has, at values far from its default."""
    for given in edges.option_edges(bench):
        yield with_cotangent(bench, given)


def bias_edges(bench: Bench) -> Iterator[Input]:
    """Additive masks of every layout, for the gradient of the mask itself."""
    if bench.has("attn_mask"):
        for over in ("heads", "rows", "sequences", "keys"):
            yield _made(
                bench, batch=2, kv_heads=2, sq=3, sk=9, mask=Mask("additive", "some", over), features={"edge": over}
            )


def dtype_edges(bench: Bench) -> Iterator[Input]:
    yield _made(bench, sq=2, sk=3, dims=16)


def repeatable(bench: Bench, given: Input) -> Judgement:
    """P15: inputs unchanged, no output that is an input, and the same bits after a call with other content."""
    case = given.case
    first = observe(bench, case)
    observe(bench, case.with_arrays(**{n: np.ascontiguousarray(a[..., ::-1]) for n, a in case.arrays.items()}))
    again = observe(bench, case)
    return worst_of([all_bits(first[n], again[n], what=f"{n} of a second call") for n in first if n in again])


def linear(bench: Bench, given: Input) -> Judgement:
    """P25: a cotangent twice as large gives gradients twice as large, within both bounds."""
    case = given.case
    doubled = case.with_arrays(do=bench.fmt.store(2 * case.arrays["do"].astype(np.float64)))
    first, second = observe(bench, case), observe(bench, doubled)
    rooms = list(zip(full_bounds(bench, case, first), full_bounds(bench, doubled, second), strict=True))
    judged = []
    for name in first:
        gap = np.abs(first[name].astype(np.float64) - second[name].astype(np.float64) / 2)
        allowed = [one[name] + two[name] / 2 for one, two in rooms]
        judged.append(kept(bench, gap, allowed, what=f"{name} at dO and at 2 dO", output=name))
    return worst_of(judged)


def _row(id: str, title: str, check: Check, *, edges: Edges, **more: Any) -> Property:
    def asked(bench: Bench) -> Iterable[Input]:
        return edges(bench)

    return Property(id, title, "attention_backward", guarded(check), edges=asked, **more)


PROPERTIES: tuple[Property, ...] = (
    _row("P3", "rows without a key give no gradient and no NaN", within_bound, edges=empty_edges),
    _row("P9", "gradients at extreme logits and cotangents", within_bound, search=_ranges, edges=range_edges),
    _row("P13", "gradients of grouped heads sum over the group", within_bound, search=_grouped, edges=head_edges),
    _row("P14", "gradients within the contract's bound", within_bound, search=_general, edges=accuracy_edges),
    _row(
        "P14",
        "the gradient of an additive mask",
        within_bound,
        edges=bias_edges,
        needs=frozenset({"attn_mask"}),
    ),
    _row("P15", "independent calls without side effects", repeatable, edges=dtype_edges),
    _row("P17", "every option matters to the gradients", within_bound, edges=option_edges),
    _row("P18", "gradients at tile borders and odd dimensions", within_bound, edges=shape_edges),
    _row("P23", "dtype and shape of the gradients", structure_only, edges=dtype_edges),
    _row("P25", "gradients are linear in the cotangent", linear, edges=dtype_edges),
    _row("G3", "rms error of the gradients against the model kernel", model_gate.check, edges=model_edges),
)
