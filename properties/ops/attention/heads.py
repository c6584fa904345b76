"""P13: heads are independent. Each gives what it gives alone, with its own mask, slope and sink."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from oracle.case import Case
from oracle.ops.attention.options import taken
from properties.checks.metamorphic import agree, observe
from properties.judge.verdict import Judgement, worst_of
from properties.ops.attention.relations import agree_on
from properties.subject import Input, Subject


def heads_alone(subject: Subject, example: Input) -> Judgement:
    """P13: a head of a sequence gives what it gives alone, with its parameters; grouped KV heads are repeated ones."""
    case = example.case
    whole = observe(subject, case)
    group = case.arrays["q"].shape[1] // case.arrays["k"].shape[1]
    judged = []
    if group > 1:
        repeated = case.with_arrays(**{n: np.repeat(case.arrays[n], group, axis=1) for n in ("k", "v")})
        each = np.repeat(np.arange(case.arrays["k"].shape[1]), group)
        repeated = replace(repeated, options=taken(case.options, Hkv=each))
        again = observe(subject, repeated)
        judged.append(agree(subject, case, whole, repeated, again, what="grouped and repeated KV heads"))
    for b, h in _places(case):
        alone = _one_head(case, b, h, h // group)
        part = {name: values[b : b + 1, h : h + 1] for name, values in whole.items()}
        what = f"head {h} of sequence {b}, among others and alone"
        judged.append(agree_on(subject, alone, part, observe(subject, alone), what=what))
    return worst_of(judged)


def _places(case: Case) -> list[tuple[int, int]]:
    """At most six (sequence, head), every head of a short list and every sequence."""
    batch, heads = case.arrays["q"].shape[:2]
    chosen = np.unique(np.linspace(0, heads - 1, 6).astype(int))
    return [(i % batch, int(h)) for i, h in enumerate(chosen)] + [(b, 0) for b in range(1, batch)]


def _one_head(case: Case, b: int, h: int, kv: int) -> Case:
    arrays = {n: a[b : b + 1, [h if n == "q" else kv]] for n, a in case.arrays.items()}
    return replace(case, arrays=arrays, options=taken(case.options, B=[b], Hq=[h], Hkv=[kv]))
