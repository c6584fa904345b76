"""P13: heads are independent. Each gives what it gives alone, with its own mask, slope and sink."""

from __future__ import annotations

import numpy as np

from oracle.case import Case
from properties.attention_options import factors_by_head
from properties.attention_relations import agree_on
from properties.bench import Bench, Input
from properties.metamorphic import agree, observe
from properties.verdict import Judgement, worst_of


def heads_alone(bench: Bench, given: Input) -> Judgement:
    """P13: a head of a sequence gives what it gives alone, with its parameters; grouped KV heads are repeated ones."""
    case = given.case
    whole = observe(bench, case)
    group = case.arrays["q"].shape[1] // case.arrays["k"].shape[1]
    judged = []
    if group > 1:
        repeated = case.with_arrays(**{n: np.repeat(case.arrays[n], group, axis=1) for n in ("k", "v")})
        factors = {n: np.repeat(a, group, axis=1) for n, a in factors_by_head(case).items()}
        repeated = repeated.with_options(**factors)
        again = observe(bench, repeated)
        judged.append(agree(bench, case, whole, repeated, again, what="grouped and repeated KV heads"))
    for b, h in _places(case):
        alone = _one_head(case, b, h, h // group)
        part = {name: values[b : b + 1, h : h + 1] for name, values in whole.items()}
        what = f"head {h} of sequence {b}, among others and alone"
        judged.append(agree_on(bench, alone, part, observe(bench, alone), what=what))
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
