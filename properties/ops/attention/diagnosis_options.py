"""Counterfactuals of attention about its options: ignored, misread, or meant otherwise, as their table says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from oracle.case import Case
from oracle.ops.attention.options import CHOICES, ROWS, chosen, is_set
from properties.diagnosis.counterfactual import Counterfactual, FailingCase, of_case
from properties.ops.attention.options import MEANT, NAMES, POSITIONED, TABLE, TRIED, of_row


def options(failing: FailingCase) -> Iterator[Counterfactual]:
    case = failing.case
    held = [name for name in NAMES if is_set(case, name)]
    yield from _alignments(case)
    for name in held:
        yield of_case(f"{TRIED[name].words} were ignored", case.without_options(name))
    yield from misread(case)
    for choice, words in MEANT.items():
        if any(choice in ROWS[name].depends for name in held):
            other = next(value for value in CHOICES[choice] if value != chosen(case, choice))
            yield of_case(words[other], case.with_options(**{choice: other}))


def misread(case: Case, names: Sequence[str] = NAMES) -> Iterator[Counterfactual]:
    """The alternatives of the options that are set."""
    for row in TABLE:
        if row.name in names and any(is_set(case, name) for name in of_row(row)):
            for says, other in row.others(case):
                yield of_case(says, other)


def _alignments(case: Case) -> Iterator[Counterfactual]:
    """What a window or ALiBi shows of the alignment; `properties.ops.attention.diagnosis_masks` asks about causal
    masks."""
    if any(is_set(case, name) for name in POSITIONED) and case.arrays["q"].shape[2] != case.arrays["k"].shape[2]:
        last = chosen(case, "causal_alignment") == "bottom_right"
        says = f"queries were aligned to the {'first' if last else 'last'} key"
        yield of_case(says, case.with_options(causal_alignment="top_left" if last else "bottom_right"))
