"""Attention as a case: shapes, visibility (causal, window, boolean mask), options, and the evaluation of one head.

Options: `oracle.ops.attention.options`. Query head h reads KV head h // (Hq / Hkv).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.arithmetic.base import Arithmetic, V
from oracle.arithmetic.rounded import RoundedArithmetic
from oracle.block import Block, Key, Rows
from oracle.case import Case
from oracle.contract.contract import Contract
from oracle.formats import FORMATS, Float64Array, Format, StoredArray, format_of
from oracle.ops.attention import formula as attention
from oracle.ops.attention.options import DESCALES, Sizes, check_options, chosen, defaults

OPTIONS = defaults()


def check(case: Case) -> None:
    """ValueError, naming the argument and its value, unless shapes and options fit together."""
    q, k, v = (case.arrays[n] for n in ("q", "k", "v"))
    for name, a in (("q", q), ("k", k), ("v", v)):
        if a.ndim != 4:
            raise ValueError(f"{name} must be [B, H, S, D], got shape {list(a.shape)}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k differ in head dimension: {q.shape[-1]} and {k.shape[-1]}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v differ in [B, H, S]: {list(k.shape[:3])} and {list(v.shape[:3])}")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k differ in batch: {q.shape[0]} and {k.shape[0]}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of {k.shape[1]} KV heads")
    sizes = {"B": q.shape[0], "Hq": q.shape[1], "Hkv": k.shape[1], "Sq": q.shape[2], "Sk": k.shape[2]}
    check_options(case.options, OPTIONS, Sizes(sizes, format_of(q)))


def _descaled(a: Float64Array, name: str, case: Case, place: Key) -> Float64Array:
    """a times its factor, exact in float64."""
    factor = case.options.get(name)
    if factor is None:
        return a
    return np.asarray(a * (_number(factor[place]) if np.ndim(factor) else float(factor)))


def query_positions(case: Case, rows: Rows) -> NDArray[np.int64]:
    """[r, 1]: where each query stands among the keys, by the causal alignment."""
    sq, sk = case.arrays["q"].shape[2], case.arrays["k"].shape[2]
    shift = sk - sq if chosen(case, "causal_alignment") == "bottom_right" else 0
    return np.asarray(np.asarray(rows, dtype=np.int64)[:, None] + shift)


def visibility(case: Case, key: Key, rows: Rows) -> NDArray[np.bool_]:
    """[r, Sk]: which keys each row may attend to (causal rule, window and boolean mask); of a stack's [n, r, Sk]."""
    sk = case.arrays["k"].shape[2]
    visible = np.ones((*np.shape(key[0]), len(rows), sk), dtype=bool)
    j, at = np.arange(sk)[None, :], query_positions(case, rows)
    if case.options.get("is_causal"):
        visible &= j <= at
    window = case.options.get("window_size")
    if window is not None:
        left, right = window
        if left >= 0:
            visible &= j >= at - left + (chosen(case, "window_left") == "excluded")
        if right >= 0:
            visible &= j <= at + right
    mask = case.options.get("attn_mask")
    if mask is not None and mask.dtype == np.bool_:
        visible &= _head_of(mask, case, key, rows)
    elif mask is not None:
        visible &= ~np.isneginf(_head_of(mask, case, key, rows).astype(np.float64))
    return visible


def _head_of(mask: StoredArray, case: Case, key: Key, rows: Rows) -> StoredArray:
    q, k = case.arrays["q"], case.arrays["k"]
    return np.asarray(np.broadcast_to(mask, (*q.shape[:3], k.shape[2]))[key][..., rows, :])


def scale_value(ar: Arithmetic[V], case: Case) -> V:
    scale = case.options.get("scale")
    return attention.default_scale(ar, case.arrays["q"].shape[-1]) if scale is None else ar.const(np.array([[scale]]))


def scale_float(case: Case) -> float:
    """The scale as the nearest float64."""
    scale = case.options.get("scale")
    return float(scale) if scale is not None else 1.0 / float(np.sqrt(case.arrays["q"].shape[-1]))


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """One query head's numbers as float64, everything non-finite set to zero; of a stack's heads with a leading axis.

    q [r, D], k [n, D], v [n, Dv], bias [r, n] or None (the additive mask). slope and reach [r, n]: ALiBi adds slope
    times reach. sink: the head's, or None. visible [r, n]. undefined [r]: rows that read something non-finite.
    Slopes and sinks of a stack are [heads, 1, 1].
    """

    q: Float64Array
    k: Float64Array
    v: Float64Array
    visible: NDArray[np.bool_]
    undefined: NDArray[np.bool_]
    bias: Float64Array | None = None
    slope: float | Float64Array | None = None
    reach: Float64Array | None = None
    sink: float | Float64Array | None = None

    def tilted(self) -> Float64Array | None:
        """Additive mask and ALiBi together [r, n], nearest float64; None without either."""
        if self.slope is None or self.reach is None:
            return self.bias
        alibi = np.asarray(self.slope * self.reach)
        return alibi if self.bias is None else alibi + self.bias

    def bias_value(self, ar: Arithmetic[V]) -> V | None:
        """The exact sum of additive mask and ALiBi, as a value of ``ar``."""
        given = None if self.bias is None else ar.const(self.bias)
        if self.slope is None or self.reach is None:
            return given
        alibi = ar.mul(ar.const(self.reach), ar.const(self.slope))
        return alibi if given is None else ar.add(alibi, given)


def head(case: Case, key: Key, rows: Rows) -> Head:
    """One query head of a case, or those of a stack, on some of its rows."""
    b, h = key
    q, k, v = (case.arrays[n] for n in ("q", "k", "v"))
    kv = h // (q.shape[1] // k.shape[1])
    mask = case.options.get("attn_mask")
    bias = None
    if mask is not None and mask.dtype != np.bool_:
        bias = _head_of(mask, case, key, rows).astype(np.float64)
    every = len(rows) == q.shape[2] and np.array_equal(rows, np.arange(len(rows)))
    taken = q[b, h] if every else q[b, h][..., rows, :]
    wide = [
        _descaled(a.astype(np.float64, copy=False), name, case, (b, kv))
        for a, name in zip((taken, k[b, kv], v[b, kv]), DESCALES, strict=True)
    ]
    visible = visibility(case, key, rows)
    undefined = np.zeros(visible.shape[:-1], dtype=bool)
    if not all(_all_finite(a) for a in wide):
        clean = [np.asarray(np.isfinite(a).all(axis=-1)) for a in wide]
        undefined |= ~clean[0] & visible.any(axis=-1)
        undefined |= (visible & ~(clean[1] & clean[2])[..., None, :]).any(axis=-1)
        wide = [np.where(np.isfinite(a), a, 0.0) for a in wide]
    if bias is not None:
        undefined |= (visible & ~np.isfinite(bias)).any(axis=-1)
        bias = np.where(np.isfinite(bias) & visible, bias, 0.0)
    slope, reach = _alibi(case, key, rows)
    sinks = case.options.get("sinks")
    # A sink of -inf adds nothing to the denominator.
    sink = None if sinks is None or np.all(np.isneginf(sinks[h])) else _number(sinks[h])
    for of_head in (slope, sink):
        if of_head is not None and not np.all(np.isfinite(of_head)):
            undefined |= visible.any(axis=-1) & ~np.isfinite(np.reshape(of_head, np.shape(h)))[..., None]
    slope, sink = (None if x is None else np.where(np.isfinite(x), x, 0.0)[()] for x in (slope, sink))
    return Head(wide[0], wide[1], wide[2], visible, undefined, bias, slope, reach, sink)


def _number(of_heads: Any) -> Any:
    """A head's number as a float; those of a stack as float64 [heads, 1, 1]."""
    return np.asarray(of_heads, dtype=np.float64)[:, None, None] if np.ndim(of_heads) else float(of_heads)


def _alibi(case: Case, key: Key, rows: Rows) -> tuple[float | Float64Array | None, Float64Array | None]:
    slopes = case.options.get("alibi_slopes")
    if slopes is None:
        return None, None
    slope = _number(slopes[key[1]] if slopes.ndim == 1 else slopes[key])
    j = np.arange(case.arrays["k"].shape[2])[None, :]
    reach = j if chosen(case, "alibi_bias") == "key_index" else -np.abs(query_positions(case, rows) - j)
    return slope, np.broadcast_to(reach.astype(np.float64), (*np.shape(key[1]), len(rows), j.shape[1]))


def clean_head(
    case: Case, key: Key, rows: Rows
) -> tuple[Float64Array, Float64Array, Float64Array, Float64Array | None, NDArray[np.bool_], NDArray[np.bool_]]:
    """(q, k, v, bias with ALiBi, visible, undefined) of `head`."""
    x = head(case, key, rows)
    return x.q, x.k, x.v, x.tilted(), x.visible, x.undefined


def _all_finite(a: StoredArray) -> bool:
    # One pass without a temporary decides nearly every case: a finite sum has finite terms.
    with np.errstate(all="ignore"):
        return bool(np.isfinite(a.sum())) or bool(np.isfinite(a).all())


def together(case: Case, key: tuple[int, ...]) -> Hashable:
    """Heads that may be evaluated at once: all but those whose sink is none among others that have one."""
    sinks = case.options.get("sinks")
    return sinks is not None and bool(np.isneginf(sinks[key[1]]))


def evaluate(ar: Arithmetic[V], case: Case, key: Key, rows: Rows) -> Block:
    x = head(case, key, rows)
    done = attention.attention(
        ar,
        ar.const(x.q),
        ar.const(x.k),
        ar.const(x.v),
        scoring=scoring(ar, case, x),
        visible=x.visible,
        sink=sink_value(ar, x),
    )
    return block_of(ar, case, key, rows, x, done)


def block_of(ar: Arithmetic[V], case: Case, key: Key, rows: Rows, x: Head, done: attention.Attended[V]) -> Block:
    """One head's results as a block, or a stack's."""
    values = {"scores": done.scores, "shift": done.shift, "total": done.total, "out": done.out, "lse": done.lse}
    if done.uncapped is not None:
        values["uncapped"] = done.uncapped
    if x.sink is not None:
        values["sink"] = ar.const(np.broadcast_to(x.sink, (*x.visible.shape[:-1], 1)))
        if chosen(case, "lse_sink") == "excluded":
            values["lse"] = attention.log_sum(ar, done.scores, x.visible)
            values["whole_lse"] = done.lse
    return Block(key, rows, ar, values, np.asarray(~x.visible.any(axis=-1)), x.undefined, x.visible)


def scoring(ar: Arithmetic[V], case: Case, x: Head) -> attention.Scoring[V]:
    """How the scores of one head are made, in ``ar``."""
    softcap = case.options.get("softcap")
    return attention.Scoring(
        scale_value(ar, case),
        x.bias_value(ar),
        None if softcap is None else ar.const(np.array([[softcap]])),
        chosen(case, "softcap_order") == "after_mask",
    )


def sink_value(ar: Arithmetic[V], x: Head) -> V | None:
    return None if x.sink is None else ar.const(x.sink)


def stages(contract: Contract, input_format: Format) -> dict[str, Format]:
    """The formats of the named stages that ``contract`` gives for inputs of this format."""

    def named(name: str | None) -> Format:
        return input_format if name is None or name == "input" else FORMATS[name]

    weights, (_, power) = named(contract.weights.cast_to), np.frexp(contract.weights.scale)
    # P times 2^k, rounded and divided by 2^k again, is P in a format whose exponents lie k lower.
    lower = replace(weights, emin=weights.emin - int(power) + 1, emax=weights.emax - int(power) + 1)
    result = {"weights": weights if power == 1 else lower, "output": named(contract.output.stored_as)}
    if contract.scores.stores:
        result["raw_scores"] = result["scores"] = named(contract.scores.stored_as)
    if contract.scores.shifted is not None:
        result["shifted"] = named(contract.scores.shifted)
    if contract.sums.row_sum == "rounded":
        result["row_sum_terms"] = result["weights"]
    elif contract.sums.row_sum != "unrounded":
        result["row_sum"] = named(contract.sums.row_sum)
    if contract.sums.accumulator is not None:
        result["accumulator"] = named(contract.sums.accumulator)
    return result


def modelled(contract: Contract, input_format: Format) -> Hashable:
    """What `model` reads of a contract."""
    order = (contract.sums.splits, contract.sums.tile, contract.weights.normalised)
    return (contract.arithmetic.compute, order, *stages(contract, input_format).items())


def model(case: Case, key: Key, rows: Rows, contract: Contract) -> dict[str, Float64Array]:
    """O [r, Dv] and L [r, 1] of an honest kernel of this contract: sequential sums, tiles or splits if declared."""
    fmt = format_of(case.arrays["q"])
    compute = FORMATS["fp64" if contract.arithmetic.compute == "fp64" else "fp32"]
    ar = RoundedArithmetic(compute, stages(contract, fmt))
    x = head(case, key, rows)
    with ar.working():
        out, lse = _modelled(ar, case, x, contract, sink_value(ar, x))
        if x.sink is not None and chosen(case, "lse_sink") == "excluded":
            _, lse = _modelled(ar, case, x, contract, None)
        return {"out": ar.to_enclosure(out)[0], "lse": ar.to_enclosure(lse)[0]}


def _modelled(ar: Arithmetic[V], case: Case, x: Head, contract: Contract, sink: V | None) -> tuple[V, V]:
    values = [ar.const(a) for a in (x.q, x.k, x.v)]
    more: dict[str, Any] = {"scoring": scoring(ar, case, x), "visible": x.visible, "sink": sink}
    if contract.sums.splits > 1:
        return attention.attention_split(ar, *values, splits=contract.sums.splits, **more)
    if contract.sums.tile is not None and not contract.weights.normalised:
        return attention.attention_tiled(ar, *values, tile=contract.sums.tile, **more)
    done = attention.attention(ar, *values, normalise_first=contract.weights.normalised, **more)
    return done.out, done.lse


def blocks(case: Case) -> list[tuple[int, ...]]:
    check(case)
    b, h = case.arrays["q"].shape[:2]
    return [(i, j) for i in range(b) for j in range(h)]


def output_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    b, h, sq = case.arrays["q"].shape[:3]
    return {"out": (b, h, sq, case.arrays["v"].shape[-1]), "lse": (b, h, sq)}
