"""What a property is: a check on one input, a way to draw inputs, and a deterministic list of edge inputs. A row in a
table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hypothesis import strategies as st

from oracle.ops.attention.options import EXCLUDING
from properties.judge.verdict import Judgement
from properties.subject import Input, Subject

Check = Callable[[Subject, Input], Judgement]
Search = Callable[[Subject], st.SearchStrategy[object]]
Edges = Callable[[Subject], Iterable[Input]]


def no_edges(subject: Subject) -> Iterable[Input]:
    """For properties that need no list of their own."""
    return ()


@dataclass(frozen=True, slots=True)
class Property:
    """One row.

    id: as in the catalogue (P1 ... P28, G3). title: what must hold, in a few words. check: judges one input; where a
    call of the target failed it may raise `Unobserved`. search: the Hypothesis strategy of its inputs (None: only
    edges). edges: deterministic inputs, each with a record of its own.
    needs: options or outputs without which the property cannot be asked (``lse``, ``is_causal``, ``attn_mask``,
    ``scale``, ...).
    """

    id: str
    title: str
    check: Check
    search: Search | None = None
    edges: Edges = no_edges
    needs: frozenset[str] = frozenset()

    def missing(self, subject: Subject) -> str:
        """The first need that the target lacks, or an empty string."""
        have = set(subject.target.parameters)
        for need in sorted(self.needs):
            if need == "lse":
                if "return_lse" not in have:
                    return "return_lse"
            elif need == "exclusion":
                if not have & set(EXCLUDING):
                    return f"{', '.join(EXCLUDING[:-1])} or {EXCLUDING[-1]}"
            elif need not in have:
                return need
        return ""
