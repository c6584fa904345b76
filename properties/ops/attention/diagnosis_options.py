"""Counterfactuals of attention about windows, soft caps, ALiBi and sinks: ignored, misread, or meant otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from oracle.case import Case
from oracle.ops.attention.case import scale_float
from oracle.ops.attention.options import CHOICES, DESCALES, chosen
from properties.diagnosis.counterfactual import Counterfactual, FailingCase, of_case
from properties.ops.attention.options import CHOICES_OF, NAMES, factors_by_head

WORDS = {
    "window_size": "the window",
    "softcap": "the soft cap",
    "alibi_slopes": "ALiBi",
    "sinks": "the sink",
    "k_descale": "the factor of k",
}
MEANT = {
    "window_left": {
        "included": "the key at the window's left end were inside",
        "excluded": "the key at the window's left end were outside",
    },
    "softcap_order": {
        "before_mask": "the soft cap were applied before bias and ALiBi",
        "after_mask": "the soft cap were applied after bias and ALiBi",
    },
    "alibi_bias": {
        "distance": "ALiBi were the slope times the distance",
        "key_index": "ALiBi were the slope times the key's index",
    },
    "lse_sink": {"included": "the LSE included the sink", "excluded": "the LSE left the sink out"},
}


def options(failing: FailingCase) -> Iterator[Counterfactual]:
    case = failing.case
    held = [name for name in NAMES if case.options.get(name) is not None]
    yield from _alignments(case)
    for name in held:
        yield of_case(f"{WORDS[name]} were ignored", case.without_options(name))
    yield from _windows(case)
    yield from slopes(case)
    yield from _sinks(case)
    yield from _descales(case)
    for choice, words in MEANT.items():
        if any(choice in CHOICES_OF[name] for name in held):
            other = next(value for value in CHOICES[choice] if value != chosen(case, choice))
            yield of_case(words[other], case.with_options(**{choice: other}))


def _alignments(case: Case) -> Iterator[Counterfactual]:
    """What a window or ALiBi shows of the alignment; `properties.ops.attention.diagnosis_masks` asks about causal
    masks."""
    if case.options.get("window_size") is None and case.options.get("alibi_slopes") is None:
        return
    if case.arrays["q"].shape[2] != case.arrays["k"].shape[2]:
        last = chosen(case, "causal_alignment") == "bottom_right"
        says = f"queries were aligned to the {'first' if last else 'last'} key"
        yield of_case(says, case.with_options(causal_alignment="top_left" if last else "bottom_right"))


def _windows(case: Case) -> Iterator[Counterfactual]:
    window = case.options.get("window_size")
    if window is None:
        return
    left, right = window
    ends = {
        "the window had no left end": (-1, right),
        "the window had no right end": (left, -1),
        "the window reached one key further to the left": (left + 1, right),
        "the window reached one key further to the right": (left, right + 1),
        "the window ended one key early on the left": (left - 1, right),
        "the window ended one key early on the right": (left, right - 1),
        "the ends of the window had changed places": (right, left),
    }
    for says, other in ends.items():
        sides = [(-1 if given == -1 else new) for given, new in zip(window, other, strict=True)]
        if "places" in says:
            sides = list(other)
        if min(other) >= -1 and tuple(sides) != tuple(window):
            yield of_case(says, case.with_options(window_size=tuple(sides)))


def slopes(case: Case) -> Iterator[Counterfactual]:
    """ALiBi negated, or of other heads and sequences."""
    given = case.options.get("alibi_slopes")
    if given is None:
        return
    yield of_case("ALiBi had the wrong sign", case.with_options(alibi_slopes=-given))
    if given.shape[-1] > 1:
        first = np.broadcast_to(given[..., :1], given.shape)
        yield of_case("all heads used the ALiBi slope of head 0", case.with_options(alibi_slopes=first))
        yield of_case("ALiBi slopes were in reverse order", case.with_options(alibi_slopes=given[..., ::-1]))
    if given.ndim == 2 and len(given) > 1:
        first = np.broadcast_to(given[:1], given.shape)
        yield of_case("all sequences used the ALiBi slopes of the first", case.with_options(alibi_slopes=first))


def _descales(case: Case) -> Iterator[Counterfactual]:
    """Factors of 8-bit storage left out, alone or together, or those of the first head for all."""
    given = {name: case.options[name] for name in DESCALES if case.options.get(name) is not None}
    for name in given:
        if name != "k_descale":
            yield of_case(f"the factor of {name[0]} were ignored", case.without_options(name))
    if len(given) > 1:
        yield of_case("the factors of q, k and v were ignored", case.without_options(*given))
    if {"k_descale", "v_descale"} <= set(given):
        yield of_case("the factors of k and v were ignored", case.without_options("k_descale", "v_descale"))
    each = factors_by_head(case)
    if any(a.shape[1] > 1 for a in each.values()):
        first = {name: np.broadcast_to(a[:, :1], a.shape) for name, a in each.items()}
        yield of_case("all heads used the factors of head 0", case.with_options(**first))
    if any(len(a) > 1 for a in each.values()):
        first = {name: np.broadcast_to(a[:1], a.shape) for name, a in each.items()}
        yield of_case("all sequences used the factors of the first", case.with_options(**first))


def _sinks(case: Case) -> Iterator[Counterfactual]:
    sinks = case.options.get("sinks")
    if sinks is None:
        return
    wide = sinks.astype(np.float64)
    if len(sinks) > 1:
        yield of_case("all heads used the sink of head 0", case.with_options(sinks=np.full_like(sinks, sinks[0])))
    yield of_case("the sink were scaled as scores are", case.with_options(sinks=wide * scale_float(case)))
    for count in (2, 3, 4, 8):
        says = f"the sink were counted {count} times"
        yield of_case(says, case.with_options(sinks=wide + np.log(count)))
