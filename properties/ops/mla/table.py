"""The properties of multi-head latent attention: what is checked, on which inputs. One row each in `PROPERTIES`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from hypothesis import strategies as st

from oracle.ops.mla.formula import DEEPSEEK_V3
from properties.checks import model_gate
from properties.inputs.recipes import Logits, Recipe
from properties.judge.judgements import options_matter, structure_only, within_bound
from properties.ops.mla import relations
from properties.ops.mla.inputs import latents, mla_input
from properties.property import Property
from properties.subject import Input, Subject

# --- edge inputs -----------------------------------------------------------------------------------------------------


def model_edges(subject: Subject) -> Iterator[Input]:
    """Enough values of every output, and no more, for what the rms error of a model kernel shows."""
    heads = 1 if subject.target.interpreted else 2
    for sk, widths, causal in ((64, (16, 8, 32, 16), True), (256, (32, 16, 64, 24), False)):
        yield mla_input(
            subject,
            heads=heads,
            sq=48,
            sk=sk,
            widths=widths,
            recipe=Recipe("normal", sk),
            is_causal=causal,
            features={"sweep": "model"},
        )


def context_sweep(subject: Subject) -> Iterator[Input]:
    """Few queries against ever more keys, to the profile's largest; plain, and with a needle."""
    longest = 512 if subject.target.interpreted else subject.profile.large
    sk = 64
    while sk <= longest:
        for kind, size in (("plain", 0.0), ("needle", float(np.log(sk)))):
            yield mla_input(
                subject,
                heads=2,
                sq=4,
                sk=sk,
                widths=(32, 8, 48, 24),
                recipe=Recipe(seed=sk),
                logits=Logits(kind, size),
                features={"sweep": "context"},
            )
        sk *= 4


def published_dimensions(subject: Subject) -> Iterator[Input]:
    """DeepSeek-V3's head, rotary, latent and value widths with two of its heads; only in the deep profile."""
    if subject.profile.name != "deep":
        return
    widths = (DEEPSEEK_V3.head, DEEPSEEK_V3.rope, DEEPSEEK_V3.latent, DEEPSEEK_V3.value)
    for sk in (257, 4096):
        yield mla_input(
            subject,
            heads=2,
            sq=2,
            sk=sk,
            widths=widths,
            recipe=Recipe(seed=sk),
            features={"real": "DeepSeek-V3 dimensions"},
        )


def accuracy_edges(subject: Subject) -> Iterator[Input]:
    yield from context_sweep(subject)
    yield from published_dimensions(subject)


LOGIT_SIZES = (1.0, 10.0, 30.0, 88.0, 100.0, 300.0, 1e3, 3e3, 1e4, 1e5, 1e6)


def range_edges(subject: Subject) -> Iterator[Input]:
    """Scores of growing size along the shared rotary key, and latents near the limits of the dtype."""
    sizes = LOGIT_SIZES if subject.profile.name != "quick" else LOGIT_SIZES[::3]
    for kind in ("offset", "ascending", "descending", "peak"):
        for size in sizes:
            for sign in (1.0, -1.0) if kind == "offset" else (1.0,):
                yield mla_input(
                    subject,
                    heads=2,
                    sq=3,
                    sk=65,
                    recipe=Recipe(seed=int(size) % 997),
                    logits=Logits(kind, sign * size),
                    features={"sweep": "logits", "logit_size": sign * size},
                )
    fmt = subject.fmt
    for gain in (fmt.max_finite / 64, fmt.smallest_normal, 1e3):
        made = mla_input(subject, heads=2, sq=2, sk=5, recipe=Recipe("tiny", 1), features={"edge": "magnitude"})
        c_kv = made.case.arrays["c_kv"].astype(np.float64) * gain
        yield Input(
            made.case.with_arrays(c_kv=fmt.store(np.clip(c_kv, -fmt.max_finite, fmt.max_finite))), made.features
        )


def shape_edges(subject: Subject) -> Iterator[Input]:
    """Both sides of tile borders, odd and single widths, Sq != Sk both ways, many heads."""
    for n in [1, 2, 3] + [t + d for t in (16, 32, 64, 128) for d in (-1, 0, 1)]:
        yield mla_input(subject, heads=2, sq=1, sk=n, recipe=Recipe(seed=n), features={"edge": "keys"})
    for n in (2, 17, 33, 65):
        yield mla_input(
            subject, heads=2, sq=n, sk=n, recipe=Recipe(seed=n), is_causal=True, features={"edge": "square"}
        )
    for sq, sk in ((3, 64), (33, 65), (2, 1), (20, 7)):
        yield mla_input(subject, heads=2, sq=sq, sk=sk, is_causal=True, features={"edge": "sq != sk"})
    for widths in ((1, 1, 1, 1), (2, 2, 3, 5), (15, 6, 17, 33), (64, 16, 20, 64), (8, 8, 96, 1), (5, 2, 65, 7)):
        yield mla_input(
            subject, heads=2, sq=3, sk=19, widths=widths, recipe=Recipe(seed=sum(widths)), features={"edge": "widths"}
        )
    for batch, heads in ((1, 1), (3, 1), (1, 5), (2, 8)):
        yield mla_input(
            subject, batch=batch, heads=heads, sq=2, sk=9, recipe=Recipe(seed=heads), features={"edge": "heads"}
        )


def option_edges(subject: Subject) -> Iterator[Input]:
    """Scales far from the default, causal masks, and both."""
    common: dict[str, Any] = {"heads": 2, "sq": 9, "sk": 21, "widths": (16, 8, 24, 16)}
    for scale in (1.0, 0.01):
        yield mla_input(subject, scale=scale, **common)
        yield mla_input(subject, scale=scale, is_causal=True, **common)
    yield mla_input(subject, is_causal=True, **common)


def dtype_edges(subject: Subject) -> Iterator[Input]:
    yield mla_input(subject, heads=2, sq=2, sk=3)


def exact_edges(subject: Subject) -> Iterator[Input]:
    """Zero queries, and integers of at most 3 in latents and W_UV: every intermediate is an exact number of 8 bits."""
    for sk in (1, 2, 4, 16, 64):
        zeros, integers = Recipe("zeros"), Recipe("integers", sk)
        yield mla_input(subject, heads=2, sq=3, sk=sk, recipe=zeros, latents=integers, features={"edge": "exact"})


# --- searches --------------------------------------------------------------------------------------------------------


def _general(subject: Subject) -> st.SearchStrategy[Input]:
    return latents(subject, gains=(1.0, 3.0), kinds=("plain", "plain", "needle", "sink"), sizes=(2.0, 5.0))


def _ranges(subject: Subject) -> st.SearchStrategy[Input]:
    kinds = ("offset", "ascending", "descending", "peak", "ties", "needle")
    return latents(subject, kinds=kinds, sizes=(10.0, -60.0, 100.0, 1e3, -1e4, 1e5), largest_q=8)


def _causal(subject: Subject) -> st.SearchStrategy[Input]:
    return latents(subject, causal=True, scale=False)


def _plain(subject: Subject) -> st.SearchStrategy[Input]:
    return latents(subject, causal=False, largest_q=8, largest_k=48)


def _optional(subject: Subject) -> st.SearchStrategy[Input]:
    return latents(subject, scale=subject.has("scale"), largest_q=16, largest_k=48)


PROPERTIES: tuple[Property, ...] = (
    Property("P1", "error within the contract's bound", within_bound, search=_general, edges=accuracy_edges),
    Property(
        "P4",
        "a key changes exactly the rows that may attend to it",
        relations.reachability,
        search=_causal,
        needs=frozenset({"is_causal"}),
    ),
    Property("P5", "weights are convex: v = 1 gives 1, O stays in the hull of v", relations.convexity, search=_general),
    Property("P8", "LSE within its bound", relations.lse_within_bound, search=_general, needs=frozenset({"lse"})),
    Property("P9", "logits to 1e6, latents near the dtype's limits", within_bound, search=_ranges, edges=range_edges),
    Property("P15", "no side effects, calls independent of each other", relations.pure, search=_general),
    Property(
        "P17",
        "every option matters and matches the oracle",
        partial(options_matter, widest=True),
        search=_optional,
        edges=option_edges,
    ),
    Property("P18", "shapes around tile borders, odd and unequal dimensions", within_bound, edges=shape_edges),
    Property("P23", "dtype, shape and device of the outputs", structure_only, edges=dtype_edges),
    Property("P25", "permuted and duplicated keys, scaling by powers of two", relations.symmetries, search=_plain),
    Property(
        "P26",
        "absorbed and materialised agree, and no bit depends on the scale of c",
        relations.forms_agree,
        search=_general,
    ),
    Property("G3", "rms error against the model kernel of the contract", model_gate.check, edges=model_edges),
    Property("P28", "exactly representable inputs give exact results", relations.exact_arithmetic, edges=exact_edges),
)
