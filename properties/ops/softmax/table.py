"""The properties of softmax, log_softmax and logsumexp: what is checked, on which inputs.

One table for the three; the subject's op tells which it is about.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from hypothesis import strategies as st

from oracle.case import Case
from properties.inputs.real_input import captured_layers, load_layer
from properties.inputs.recipes import Logits, Recipe
from properties.judge.judgements import structure_only
from properties.judge.verdict import Basis, Judgement, Verdict
from properties.ops.gradients import softmax_rows as softmax_gradient
from properties.ops.softmax import inputs as strategies
from properties.ops.softmax import relations
from properties.ops.softmax.inputs import softmax_input
from properties.property import Property
from properties.subject import Input, Subject


def lse_alone(subject: Subject, example: Input) -> Judgement:
    """P8: logsumexp as natural logarithm, without the last axis. The other two ops return no log-sum-exp."""
    if subject.op != "logsumexp":
        return Judgement(Verdict.UNSUPPORTED, Basis.EXACT, f"{subject.op} returns no log-sum-exp")
    return relations.certified(subject, example)


# --- edge inputs -----------------------------------------------------------------------------------------------------


def row_length_sweep(subject: Subject) -> Iterator[Input]:
    """Ever longer rows, to the profile's largest: plain, and with one entry that takes half of the mass."""
    longest = 512 if subject.target.interpreted else subject.profile.large
    n = 64
    while n <= longest:
        for kind, size in (("plain", 0.0), ("peak", float(np.log(n)))):
            features = {"sweep": "context", "sk": n}
            yield softmax_input(
                subject, lead=(4,), n=n, recipe=Recipe(seed=n), logits=Logits(kind, size), features=features
            )
        n *= 4


def captured(subject: Subject) -> Iterator[Input]:
    """Score rows of a trained model: causal, so that all but the last row have entries of -inf."""
    heads = 1 if subject.profile.name == "quick" else 3
    for name in captured_layers():
        layer = load_layer(name)
        group = layer.q.shape[0] // layer.k.shape[0]
        length = layer.q.shape[1]
        chosen = np.unique(np.linspace(0, length - 1, 12).astype(np.int64))
        rows = []
        for head in range(heads):
            # D = 64: the scale is 1/8 exactly.
            scores = layer.q[head].astype(np.float64)[chosen] @ layer.k[head // group].astype(np.float64).T / 8.0
            rows.append(np.where(np.arange(length)[None] <= chosen[:, None], scores, -np.inf))
        x = subject.fmt.store(np.concatenate(rows))
        yield Input(Case(subject.op, {"x": x}), {"real": name, "n": length, "recipe": "captured"})


def accuracy_edges(subject: Subject) -> Iterator[Input]:
    yield from row_length_sweep(subject)
    yield from captured(subject)


def sum_edges(subject: Subject) -> Iterator[Input]:
    """Long flat rows, where a narrow running sum sticks, and every number of dimensions."""
    for lead, n in (((2,), 512), ((1, 1), 2), ((2, 3), 5), ((2, 1, 3), 4), ((3,), 257)):
        yield softmax_input(subject, lead=lead, n=n, recipe=Recipe("zeros"), features={"edge": "flat"})
        yield softmax_input(subject, lead=lead, n=n, recipe=Recipe(seed=n), features={"edge": "dimensions"})


LOGIT_SIZES = (1.0, 10.0, 30.0, 88.0, 100.0, 300.0, 1e3, 3e3, 1e4, 3e4, 1e5, 1e6, 1e7)


def logit_sweep(subject: Subject) -> Iterator[Input]:
    """Common offsets of both signs, one peak, rising and falling rows, all of growing size."""
    sizes = LOGIT_SIZES if subject.profile.name != "quick" else LOGIT_SIZES[::3]
    for kind in ("offset", "ascending", "descending", "peak"):
        for size in sizes:
            for sign in (1.0, -1.0) if kind == "offset" else (1.0,):
                yield softmax_input(
                    subject,
                    lead=(3,),
                    n=96,
                    recipe=Recipe(seed=int(size) % 997),
                    logits=Logits(kind, sign * size),
                    features={"sweep": "logits", "logit_size": sign * size},
                )


def near_limits(subject: Subject) -> Iterator[Input]:
    """The largest and smallest numbers of the dtype, three logits far from zero, and rows of -inf beside others."""
    fmt = subject.fmt
    top = fmt.max_finite
    rows = {
        "largest": [[top, top, -top], [top, top / 2, 0.0], [-top, -top, -top]],
        "subnormal": [[fmt.smallest_subnormal, 0.0, -fmt.smallest_normal]],
        "one entry": [[1000.0, -np.inf, -np.inf], [-1000.0, -np.inf, -np.inf]],
        "underflow": [[0.0, -200.0, -800.0]],
        "far": [[-1e7, -1e7 + 1.0, -1e7 - 2.0], [1e7, 1e7 - 1.0, 1e7 + 4.0]],
        "empty row": [[-np.inf, -np.inf, -np.inf], [1.0, 2.0, -np.inf], [0.5, 0.25, -1.0]],
    }
    for edge, values in rows.items():
        x = np.array(values)
        x = np.where(np.isfinite(x), np.clip(x, -top, top), x)
        yield Input(Case(subject.op, {"x": fmt.store(x)}), {"edge": edge, "n": 3})


def range_edges(subject: Subject) -> Iterator[Input]:
    yield from logit_sweep(subject)
    yield from near_limits(subject)


def shape_edges(subject: Subject) -> Iterator[Input]:
    """Rows of 1, 2, 3 entries, both sides of tile borders, odd; numbers of rows likewise; up to four dimensions."""
    tiles = (16, 32, 64, 128, 256, 1024) if not subject.target.interpreted else (32, 64)
    for n in [1, 2, 3, 5, 77] + [t + d for t in tiles for d in (-1, 0, 1)]:
        yield softmax_input(subject, lead=(2,), n=n, recipe=Recipe(seed=n), features={"edge": "n"})
    for count in (1, 3, 31, 33, 65):
        yield softmax_input(subject, lead=(count,), n=19, recipe=Recipe(seed=count), features={"edge": "rows"})
    for lead in ((1, 1), (2, 3), (3, 1, 2), (1, 2, 1, 2)):
        yield softmax_input(subject, lead=lead, n=7, recipe=Recipe(seed=len(lead)), features={"edge": "dimensions"})


def dtype_edges(subject: Subject) -> Iterator[Input]:
    yield softmax_input(subject, lead=(2,), n=5)
    yield softmax_input(subject, lead=(2, 3), n=5)


def excluded_edges(subject: Subject) -> Iterator[Input]:
    """One visible entry at either end; all but one entry of a tile hidden."""
    for n, seen in ((2, [0]), (2, [1]), (33, [32]), (65, [3, 64]), (129, list(range(64)))):
        x = np.full((3, n), -np.inf)
        x[:, seen] = np.random.default_rng(n).standard_normal((3, len(seen)))
        yield Input(Case(subject.op, {"x": subject.fmt.store(x)}), {"edge": "mostly -inf", "n": n})


def equal_edges(subject: Subject) -> Iterator[Input]:
    """2^k zeros, alone and between entries of -inf."""
    for n in (1, 2, 4, 16, 64, 256, 1024):
        yield softmax_input(subject, lead=(2,), n=n, recipe=Recipe("zeros"), features={"edge": "equal"})
    for n, seen in ((5, 4), (48, 16), (100, 64)):
        x = np.where(np.random.default_rng(n).permutation(n) < seen, 0.0, -np.inf)[None]
        yield Input(Case(subject.op, {"x": subject.fmt.store(x)}), {"edge": "equal", "n": n})


# --- searches --------------------------------------------------------------------------------------------------------


def _general(subject: Subject) -> st.SearchStrategy[Input]:
    return strategies.rows(subject, kinds=("plain", "plain", "peak", "ties"), sizes=(4.0, 12.0))


def _with_holes(subject: Subject) -> st.SearchStrategy[Input]:
    return strategies.rows(subject, holes=True, least=3, largest=300, several=True, shifts=(0.0, 5.0, -30.0))


def _ranges(subject: Subject) -> st.SearchStrategy[Input]:
    kinds = ("offset", "ascending", "descending", "peak", "ties")
    return strategies.rows(subject, kinds=kinds, sizes=(10.0, -60.0, 100.0, 1e3, -1e4, 1e5, 1e6, -1e7), largest=300)


def _near(subject: Subject) -> st.SearchStrategy[Input]:
    return strategies.rows(subject, shifts=(0.0, 5.0), largest=300)


PROPERTIES: tuple[Property, ...] = (
    Property("P1", "error within the contract's bound", relations.certified, search=_general, edges=accuracy_edges),
    Property(
        "P2",
        "an entry -inf weighs nothing; a NaN fills its row and no other",
        relations.excluded,
        search=_with_holes,
        edges=excluded_edges,
    ),
    Property(
        "P5",
        "weights sum to 1; a log-sum-exp is at least the maximum",
        relations.sums,
        search=_general,
        edges=sum_edges,
    ),
    Property("P8", "logsumexp within its bound, in nats", lse_alone, search=_general),
    Property(
        "P9",
        "logits to 1e7, common offsets, the dtype's limits, empty rows",
        relations.certified,
        search=_ranges,
        edges=range_edges,
    ),
    Property(
        "P14",
        "the gradient at x, forward and backward pass together",
        softmax_gradient.at_x,
        search=softmax_gradient.searched,
        edges=softmax_gradient.edges,
    ),
    Property("P15", "no side effects, calls independent of each other", relations.pure, search=_general),
    Property(
        "P18",
        "row lengths and counts around tile borders, odd, up to four dimensions",
        relations.certified,
        edges=shape_edges,
    ),
    Property("P23", "dtype, shape and device of the output", structure_only, edges=dtype_edges),
    Property("P25", "order of entries, a common shift, every entry twice", relations.symmetries, search=_near),
    Property("P28", "2^k equal logits give exactly 2^-k", relations.equal_logits, edges=equal_edges),
)
