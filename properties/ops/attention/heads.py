"""P13: heads are independent. Each gives what it gives alone, with its own mask, slope and sink."""

from __future__ import annotations

import numpy as np

from oracle.case import Case
from properties.checks.metamorphic import agree, observe
from properties.judge.verdict import Judgement, worst_of
from properties.ops.attention.options import factors_by_head
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
        factors = {n: np.repeat(a, group, axis=1) for n, a in factors_by_head(case).items()}
        repeated = repeated.with_options(**factors)
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
    q, k, v = (case.arrays[n][b : b + 1] for n in ("q", "k", "v"))
    alone = case.with_arrays(q=q[:, h : h + 1], k=k[:, kv : kv + 1], v=v[:, kv : kv + 1])
    sinks, slopes = case.options.get("sinks"), case.options.get("alibi_slopes")
    if sinks is not None:
        alone = alone.with_options(sinks=sinks[h : h + 1])
    if slopes is not None:
        alone = alone.with_options(alibi_slopes=slopes[..., h : h + 1] if slopes.ndim == 1 else slopes[b, h : h + 1])
    alone = alone.with_options(**{n: a[b : b + 1, kv : kv + 1] for n, a in factors_by_head(case).items()})
    mask = case.options.get("attn_mask")
    if mask is None or mask.ndim < 4:
        return alone
    own = mask[b : b + 1] if mask.shape[0] > 1 else mask
    return alone.with_options(attn_mask=own[:, h : h + 1] if own.shape[1] > 1 else own)
