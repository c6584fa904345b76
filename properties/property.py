"""What a property is: a check on one input, a way to draw inputs, and a deterministic list of edge inputs. A row in a
table."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from properties.bench import Bench, Input
from properties.verdict import Judgement

Check = Callable[[Bench, Input], Judgement]
Search = Callable[[Bench], st.SearchStrategy[Any]]
Edges = Callable[[Bench], Iterable[Input]]


def no_edges(bench: Bench) -> Iterable[Input]:
    """For properties that need no list of their own."""
    return ()


@dataclass(frozen=True, slots=True)
class Property:
    """One row.

    id: as in the catalogue (P1 ... P28, G3). title: what must hold, in a few words. op: the op it is about. check:
    judges one input.
    search: the Hypothesis strategy of its inputs (None: only edges). edges: deterministic inputs, each with a record
    of its own.
    needs: options or outputs without which the property cannot be asked (``lse``, ``is_causal``, ``attn_mask``,
    ``scale``, ...).
    """

    id: str
    title: str
    op: str
    check: Check
    search: Search | None = None
    edges: Edges = no_edges
    needs: frozenset[str] = frozenset()

    def missing(self, bench: Bench) -> str:
        """The first need that the target lacks, or an empty string."""
        have = set(bench.target.parameters)
        for need in sorted(self.needs):
            if need == "lse":
                if "return_lse" not in have:
                    return "return_lse"
            elif need == "exclusion":
                if not {"is_causal", "attn_mask", "window_size"} & have:
                    return "is_causal, attn_mask or window_size"
            elif need not in have:
                return need
        return ""


_TABLES = {
    "attention": ("properties.attention", "PROPERTIES"),
    "attention_backward": ("properties.attention_backward", "PROPERTIES"),
    "attention_varlen": ("properties.attention_layouts", "VARLEN_PROPERTIES"),
    "attention_paged": ("properties.attention_layouts", "PAGED_PROPERTIES"),
    "mla": ("properties.mla", "PROPERTIES"),
    "gqa_block": ("properties.gqa_block", "PROPERTIES"),
    "mla_block": ("properties.mla_block", "PROPERTIES"),
    "mla_backward": ("properties.mla_backward", "PROPERTIES"),
    "rope": ("properties.rope", "PROPERTIES"),
    "rope_backward": ("properties.rope", "BACKWARD_PROPERTIES"),
    "rope_apply": ("properties.rope", "APPLY_PROPERTIES"),
    "softmax": ("properties.softmax", "PROPERTIES"),
    "softmax_backward": ("properties.softmax_backward", "PROPERTIES"),
    "log_softmax": ("properties.softmax", "PROPERTIES"),
    "logsumexp": ("properties.softmax", "PROPERTIES"),
}


def properties_for(op: str) -> tuple[Property, ...]:
    """The rows of one op, in catalogue order; none for an op without a table."""
    if op not in _TABLES:
        return ()
    module, name = _TABLES[op]
    table: tuple[Property, ...] = getattr(importlib.import_module(module), name)
    return table
