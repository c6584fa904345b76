"""What the bounds of attention read of the case of one head."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from oracle.block import Block, Rows
from oracle.case import Case
from oracle.formats import Float64Array, Format, format_of
from oracle.ops.attention import case as attention_case
from oracle.ops.attention.case import query_positions, scale_float
from oracle.ops.attention.options import DESCALES, chosen


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """One head's numbers: q [r, D], k [n, D], v [n, Dv], the magnitudes of the last two, |bias| [r, n] or None.

    With a sink the last key is its. common [r, 1] or None: how much larger a kernel's scores may be, a whole row alike.
    descaled: whether q, k, v are stored numbers times factors. joins: how many additive terms there are. v_largest: of
    all magnitudes of v [1, 1]. Of a stack of heads all have a leading axis.
    """

    q: Float64Array
    k: Float64Array
    v: Float64Array
    k_magnitude: Float64Array
    v_magnitude: Float64Array
    bias: Float64Array | None
    alpha: float
    input_format: Format
    softcap: float | None = None
    cap_last: bool = False
    has_sink: bool = False
    common: Float64Array | None = None
    descaled: bool = False
    joins: int = 0
    v_largest: Float64Array | float = 0.0

    def of_rows(self, rows: slice) -> Head:
        bias, common = (None if a is None else a[..., rows, :] for a in (self.bias, self.common))
        return replace(self, q=self.q[..., rows, :], bias=bias, common=common)


def numbers(case: Case, block: Block) -> Head:
    """What the bounds read of the case of one block of attention."""
    x = attention_case.head(case, block.key, block.rows)
    (bias, common), k, v = _offsets(case, x, block.rows), x.k, x.v
    if x.sink is not None:
        # The sink's key: its raw score is 0, its value too.
        k, v = (np.concatenate([a, np.zeros_like(a[..., :1, :])], axis=-2) for a in (k, v))
        bias = None if bias is None else with_zero(bias)
    cap, v_magnitude = case.options.get("softcap"), np.abs(v)
    return Head(
        x.q,
        k,
        v,
        np.abs(k),
        v_magnitude,
        bias,
        abs(scale_float(case)) * (1 + 2.0**-50),
        format_of(case.arrays["q"]),
        None if cap is None else float(cap),
        _capped_last(case),
        x.sink is not None,
        common,
        any(case.options.get(name) is not None for name in DESCALES),
        (x.bias is not None) + (x.slope is not None),
        v_magnitude.max(axis=(-2, -1), keepdims=True, initial=0.0),
    )


def with_zero(a: Float64Array) -> Float64Array:
    """[r, n + 1]: with a zero for the sink's key, the last one."""
    return np.concatenate([a, np.zeros_like(a[..., :1])], axis=-1)


def _capped_last(case: Case) -> bool:
    return case.options.get("softcap") is not None and chosen(case, "softcap_order") == "after_mask"


def _offsets(case: Case, x: attention_case.Head, rows: Rows) -> tuple[Float64Array | None, Float64Array | None]:
    """(|additive mask| + |ALiBi| [r, n], how much larger a whole row of scores may be [r, 1]); None: neither.

    Roundings of a bias follow the first. Kernels that add slope j instead of -slope |distance| give the same O where
    no key comes later than the query, from scores that all differ by slope times the query's position, unless they meet
    a sink or a cap afterwards: where the case does not say which it is, both are covered.
    """
    if x.slope is None or x.reach is None:
        return None if x.bias is None else np.abs(x.bias), None
    reach, common = np.abs(x.reach), None
    if "alibi_bias" not in case.options and x.sink is None and not _capped_last(case):
        at, j = query_positions(case, rows), np.arange(reach.shape[-1])[None, :]
        earlier = ~(x.visible & (j > at)).any(axis=-1, keepdims=True)
        reach = np.where(earlier, np.maximum(reach, j), reach)
        common = np.abs(x.slope) * np.where(earlier, np.abs(at), 0).astype(np.float64)
    alibi = np.abs(x.slope) * reach
    return np.asarray(alibi if x.bias is None else alibi + np.abs(x.bias)), common
