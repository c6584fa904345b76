"""The properties of packed and of paged attention: what is checked, on which inputs. One table for each layout."""

from __future__ import annotations

from functools import partial

from hypothesis import strategies as st

from oracle.ops.layouts.case import PAGED, VARLEN
from properties.checks import model_gate
from properties.judge.judgements import options_matter, structure_only, within_bound
from properties.ops.attention import views
from properties.ops.attention.table import lse_within_bound
from properties.ops.layouts import edges, parts, relations
from properties.ops.layouts.inputs import layout_input, layouts
from properties.property import Property
from properties.subject import Input, Subject


def _general(subject: Subject) -> st.SearchStrategy[Input]:
    return layouts(subject)


def _several(subject: Subject) -> st.SearchStrategy[Input]:
    return layouts(subject, several=True)


def _ranges(subject: Subject) -> st.SearchStrategy[Input]:
    kinds = ("offset", "ascending", "descending", "peak", "needle")
    return layouts(subject, kinds=kinds, sizes=(10.0, -60.0, 100.0, 1e3, -1e4, 1e5))


def _optional(subject: Subject) -> st.SearchStrategy[Input]:
    return layouts(subject, one=True)


def _plain_edge(subject: Subject) -> list[Input]:
    return [layout_input(subject, [(2, 5), (2, 3)])]


def _table(op: str) -> tuple[Property, ...]:
    lse = frozenset({"lse"})
    strided = "how inputs lie in memory does not matter"
    steps = Property(
        "P10", "query by query as all at once", relations.decode, edges=edges.steps, needs=frozenset({"is_causal"})
    )
    pages = Property(
        "P12", "where pages lie does not matter", relations.permuted_pages, search=_general, edges=edges.hidden
    )
    paged = (pages, Property("P12", strided, partial(views.through, ways=views.PAGES), edges=edges.hidden))
    packed = (Property("P12", strided, partial(views.through, ways=views.PACKED), edges=edges.hidden),)
    return (
        Property("P1", "error within the contract's bound", within_bound, search=_general, edges=edges.accuracy),
        Property(
            "P2",
            "nothing but a sequence's own keys reaches its rows; a used NaN does",
            relations.irrelevant_content,
            search=_several,
            edges=edges.hidden,
        ),
        Property(
            "P3", "sequences and rows without a key follow the stated convention", within_bound, edges=edges.empty
        ),
        Property(
            "P7",
            "parts of every sequence merged by LSE equal the whole",
            parts.split_merge,
            edges=edges.parts,
            needs=lse,
        ),
        Property("P8", "LSE within its bound", lse_within_bound, search=_general, edges=edges.sums, needs=lse),
        Property("P9", "logits from -1e4 to 1e5", within_bound, search=_ranges, edges=edges.ranges),
        *((steps,) if op == PAGED else ()),
        Property(
            "P11",
            "a sequence gives the same alone and among others",
            relations.neighbours,
            search=_several,
            edges=edges.hidden,
        ),
        *(paged if op == PAGED else packed),
        Property(
            "P13",
            "heads are independent: each gives what it gives alone, grouped KV heads equal repeated ones",
            parts.heads_alone,
            edges=edges.heads,
        ),
        Property(
            "P15",
            "no side effects, no influence of the memory around, independent calls",
            relations.purity,
            search=_general,
            edges=edges.hidden,
        ),
        Property(
            "P17",
            "every option matters and matches the oracle",
            options_matter,
            search=_optional,
            edges=edges.options,
        ),
        Property("P18", "lengths at borders of tiles and pages, 0 and 1", within_bound, edges=edges.shapes),
        Property("P23", "dtype, shape and device of the outputs", structure_only, edges=_plain_edge),
        Property("G3", "rms error against the model kernel of the contract", model_gate.check, edges=edges.model),
    )


VARLEN_PROPERTIES: tuple[Property, ...] = _table(VARLEN)
PAGED_PROPERTIES: tuple[Property, ...] = _table(PAGED)
