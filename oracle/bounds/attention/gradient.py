"""G1 for the gradients of attention: derived bounds of dQ, dK, dV, dBias and dSinks under a contract.

P is recomputed from the saved L, or saved; D = rowsum(dO o O) from the saved O, or sum_j P dP (`Contract.delta`).
Notation as in `oracle.bounds.forward`; with |P^ - P| <= eP and |dP^ - dP| <= eD, everything after is products and sums
whose cross terms are all kept:

    s = eP (|dP - D| + y) + P y,   y = eD + dD,   |dS^ - dS| <= s with its roundings,
    |dQ^ - dQ| <= alpha sum_j (s_j + c_n (|dS_j| + s_j)) |k_j|,   dK, dV, dBias, dSinks likewise.

docs/bounds.md has the derivation and what was simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.arithmetic.ball import Ball, BallArithmetic
from oracle.block import Block, Key, Rows
from oracle.bounds.attention import output as attention
from oracle.bounds.attention.head import numbers
from oracle.bounds.attention.inner import FormErrors, Sizes, form_errors
from oracle.bounds.bounded import Bounded
from oracle.case import Case
from oracle.contract.constants import Constants, accumulation_error
from oracle.contract.contract import Contract
from oracle.enclosure import Enclosure
from oracle.formats import FORMATS, Float64Array, Format, format_of
from oracle.ops.attention import case as attention_case
from oracle.ops.attention import gradient_case as gradients
from oracle.ops.attention.options import chosen
from oracle.recent import Recent

# Roundings of the scaled gradient.
SCALE_ROUNDINGS = 3
# Errors of so many pairs, of which each form has three float64 numbers.
_LAST, _INSIDE = Recent(2**18), Recent(2**18)


def bounds(
    case: Case, block: Block, forms: Sequence[Contract], formats: Mapping[str, Format]
) -> list[dict[str, Bounded]]:
    """One dict per form with the outputs of the block's kind; see `oracle.bounds.table.Bounds`."""
    fmt = format_of(case.arrays["q"])
    kind = gradients.kind_of(block.key)
    rows = block.rows if kind == gradients.DQ else np.arange(case.arrays["q"].shape[2], dtype=np.int64)
    with np.errstate(all="ignore"):
        # The blocks of queries and of keys read the same heads.
        heads = [_kept(_LAST, case, key, rows, forms, _head) for key in _heads(case, block)]
        made = []
        sizes = {name: block.part(name).upper_abs() for name in gradients.HELD[kind]}
        products = [(head.dk.at(block.rows), head.dv.at(block.rows)) for head in heads if kind == gradients.DKV]
        for index, form in enumerate(forms):
            parts = [(head, head.forms[index]) for head in heads]
            match kind:
                case gradients.DQ:
                    found = {"dq": _dq(parts, form)}
                case gradients.DKV:
                    found = {
                        n: _shared(parts, [of[place] for of in products], form, n, formats.get(n, fmt))
                        for place, n in enumerate(("dk", "dv"))
                    }
                case gradients.DBIAS:
                    found = {"dbias": _dbias(case, parts, block.rows)}
                case _:
                    found = {"dsinks": _dsinks(case, parts, block.rows)}
            made.append(
                {
                    name: _scaled(sizes[name], sums, form, formats.get(name, fmt), parts)
                    for name, sums in found.items()
                    if name in formats or not formats
                }
            )
    return made


def _kept(recent: Recent, case: Case, key: Key, rows: Rows, forms: Sequence[Contract], make: Callable[..., Any]) -> Any:
    """``make`` of a head, or of a stack, on some rows: once."""
    size = len(rows) * case.arrays["k"].shape[2] * np.size(key[0])
    what = (*(np.asarray(i).tobytes() for i in key), rows.tobytes(), tuple(forms))
    return recent.of(case, what, size, partial(make, case, key, rows, forms))


def _heads(case: Case, block: Block) -> list[Key]:
    if gradients.kind_of(block.key) != gradients.DSINKS:
        return list(gradients.heads_of(case, block.key))
    # Only those whose sinks are asked for, head by head.
    return [(b, int(h)) for h in block.rows for b in range(case.arrays["q"].shape[0])]


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """What magnitudes a [r, n] of an exact factor, or columns of it, give with those of an exact other one [n, d].

    columns: which columns of a are the rows of the product, where they are. size [r, d]: their product. total [r, 1]:
    sums of a. Errors are told apart by identity, and some forms share theirs.
    """

    other: Float64Array
    size: Float64Array
    total: Float64Array
    columns: Rows | None = None
    _known: dict[int, tuple[Float64Array, Float64Array]] = field(default_factory=dict, init=False, repr=False)

    def at(self, rows: Rows) -> Product:
        """Of some of the columns."""
        if np.array_equal(rows, np.arange(self.size.shape[-2])):
            return self
        return replace(self, size=self.size[..., rows, :], total=self.total[..., rows, :], columns=rows)

    def error(self, error: Float64Array, unit: float, chain: float, c: Constants) -> Float64Array:
        """|sum of (a + error) (b + unit b)| away from sum a b; one chain."""
        if id(error) not in self._known:
            part = error if self.columns is None else _columns(error, self.columns)
            self._known[id(error)] = times(part, self.other), part.sum(axis=-1, keepdims=True)
        product, sums = self._known[id(error)]
        factor = (1 + unit) * (1 + chain) - 1
        found = product * (1 + factor)
        found += self.size * factor
        if np.isnan(found.sum()):
            found[np.isnan(found)] = np.inf
        found += (1 + chain) * c.omega_in * (sums + self.total)
        return found


def _of_rows(size: Float64Array, other: Float64Array) -> Product:
    return Product(other, times(size, other), size.sum(axis=-1, keepdims=True))


def _of_columns(size: Float64Array, other: Float64Array) -> Product:
    return replace(_of_rows(size.swapaxes(-1, -2), other), columns=np.arange(size.shape[-1]))


@dataclass(frozen=True, slots=True, eq=False)
class _HeadErrors:
    """One query head: magnitudes of P, dS, dX, the sink's column, of what they are multiplied by; errors by form."""

    p: Float64Array
    ds: Float64Array
    dx: Float64Array
    sink: Float64Array | None
    dq: Product
    dk: Product
    dv: Product
    alpha: float
    cap_last: bool
    forms: list[FormErrors]


def _upper(ar: BallArithmetic, value: Ball) -> Float64Array:
    return Enclosure(*ar.to_enclosure(value)).upper_abs()


def _head(case: Case, key: Key, rows: Rows, forms: Sequence[Contract]) -> _HeadErrors:
    stack, place = gradients.neighbours(case, key, rows)
    whole, errors = _kept(_INSIDE, case, stack, rows, forms, _inside)
    if place is not None:
        whole, errors = _of_head((whole, errors), place, {})
    x = attention_case.head(case, key, rows)
    return _HeadErrors(
        whole.p,
        whole.ds,
        whole.dx,
        None if whole.sink is None else whole.sink * whole.delta,
        _of_rows(whole.dx, np.abs(x.k)),
        _of_columns(whole.dx, np.abs(x.q)),
        _of_columns(whole.p, whole.do),
        whole.alpha,
        chosen(case, "softcap_order") == "after_mask" and whole.softcap is not None,
        errors,
    )


def _inside(case: Case, key: Key, rows: Rows, forms: Sequence[Contract]) -> tuple[Sizes, list[FormErrors]]:
    """Magnitudes in a head, or in those of a stack, and what each form allows there."""
    ar = BallArithmetic()
    plain = case.without_options("lse_sink") if "lse_sink" in case.options else case
    with ar.working():
        inner, x, _, _ = gradients.head_gradients(ar, plain, key, rows)
        ahead = attention_case.block_of(ar, plain, key, rows, x, inner.forward)
        sizes = {n: _upper(ar, getattr(inner, n)) for n in ("p", "dp", "delta", "centred", "ds")}
        sizes["dx"] = sizes["ds"] if inner.dx is inner.ds else _upper(ar, inner.dx)
        sink = None if inner.sink_weight is None else _upper(ar, inner.sink_weight)
        slope = None if inner.slope is None else Enclosure(*ar.to_enclosure(inner.slope))
    fmt = format_of(plain.arrays["q"])
    wide = FORMATS["fp64" if forms[0].arithmetic.compute == "fp64" else "fp32"]
    given = numbers(plain, ahead)
    allowed = attention.errors(given, ahead, forms, (fmt, wide))
    do, v = np.abs(gradients.cotangent(plain, key, rows)[0]), np.abs(x.v)
    magnitude = (do @ v.swapaxes(-1, -2)) * (1 + 2.0**-52 * (do.shape[-1] + 2))
    magnitude = np.where(x.visible, magnitude, 0.0)
    out = ahead.part("out").upper_abs()
    whole = Sizes(do, v, out, magnitude, slope, x.visible, sink, fmt, given.softcap, given.alpha, **sizes)
    asked = gradients.bias_of(plain) is not None
    return whole, [form_errors(whole, a, form, with_ds=asked) for a, form in zip(allowed, forms, strict=True)]


def _of_head(x: Any, place: Any, made: dict[int, Any]) -> Any:
    """One head's, or some heads', of what `_inside` gives for a stack. made: what was already: identity counts."""
    if id(x) in made:
        return made[id(x)]
    if isinstance(x, tuple | list):
        found: Any = [_of_head(part, place, made) for part in x]
    elif isinstance(x, (Sizes, FormErrors, Enclosure)):
        parts = {f.name: getattr(x, f.name) for f in fields(x) if f.init}
        found = type(x)(**{name: _of_head(part, place, made) for name, part in parts.items()})
    else:
        found = x[place] if isinstance(x, np.ndarray) else x
    made[id(x)] = found
    return found


Parts = Sequence[tuple[_HeadErrors, FormErrors]]
Sums = tuple[Float64Array, NDArray[np.bool_]]


def _dq(parts: Parts, form: Contract) -> Sums:
    (x, f) = parts[0]
    c, n = f.constants, x.p.shape[-1]
    b = x.dq.error(f.dx, c.u_k, accumulation_error(form, c, n), c)
    b += n * c.w_acc
    b *= x.alpha
    return b, f.broken


def times(a: Float64Array, b: Float64Array) -> Float64Array:
    """a @ b for non-negative numbers of which some may be infinite (an infinite error of a zero promises nothing)."""
    product = a @ b
    if np.isnan(product.sum()):
        product[np.isnan(product)] = np.inf
    product *= 1 + 2.0**-52 * (a.shape[-1] + 2)
    return np.asarray(product)


def _shared(parts: Parts, products: Sequence[Product], form: Contract, pick: str, fmt: Format) -> Sums:
    """Sum over the group of one KV head, [keys, d]: parts may be stored in the output's format first."""
    total, sizes = np.zeros(1), np.zeros(1)
    broken: NDArray[np.bool_] = _any_broken(parts)
    terms = len(parts) * parts[0][0].p.shape[-2]
    for (x, f), product in zip(parts, products, strict=True):
        c = f.constants
        error, unit, alpha = (f.dx, c.u_q, x.alpha) if pick == "dk" else (f.cast, c.u_v, 1.0)
        b = product.error(error, unit, accumulation_error(form, c, terms), c)
        b += terms * c.w_acc
        b *= alpha
        size = alpha * product.size
        if len(parts) > 1:
            broken = broken | (size + b >= fmt.overflow_threshold)
            b = b + c.u_o * (size + b) + c.omega_o
        total, sizes = total + b, sizes + size
    return np.asarray(total + parts[0][1].constants.g(len(parts)) * (sizes + total)), broken


def _columns(a: Float64Array, rows: Rows) -> Float64Array:
    """The columns of ``a`` at ``rows``, as rows."""
    turned = a.swapaxes(-1, -2)
    return turned if len(rows) == a.shape[-1] and bool((np.diff(rows) == 1).all()) else turned[..., rows, :]


def _any_broken(parts: Parts) -> NDArray[np.bool_]:
    return np.asarray(np.logical_or.reduce([f.broken.any(axis=(-2, -1), keepdims=True) for _, f in parts]))


def _dbias(case: Case, parts: Parts, rows: Rows) -> Sums:
    bias = gradients.bias_of(case)
    assert bias is not None
    last = parts[0][0].cap_last
    errors = [f.dx if last else f.ds for _, f in parts]
    error = np.sum([a for a in errors if a is not None], axis=0)
    size = np.sum([x.dx if last else x.ds for x, _ in parts], axis=0)
    count = len(parts)
    if bias.ndim < 2 or bias.shape[-2] == 1:
        count *= len(error)
        error, size = (a.sum(axis=0, keepdims=True) for a in (error, size))
    if bias.shape[-1] == 1:
        count *= error.shape[1]
        error, size = (a.sum(axis=1, keepdims=True) for a in (error, size))
    b = error + parts[0][1].constants.g(count) * (size + error)
    return b[rows], _any_broken(parts)


def _dsinks(case: Case, parts: Parts, rows: Rows) -> Sums:
    batch = case.arrays["q"].shape[0]
    found = []
    for place in range(len(rows)):
        own = parts[place * batch : (place + 1) * batch]
        error = sum(float(f.sink.sum()) for _, f in own if f.sink is not None)
        size = sum(float(x.sink.sum()) for x, _ in own if x.sink is not None)
        count = batch * own[0][0].p.shape[0]
        found.append([error + own[0][1].constants.g(count) * (size + error)])
    return np.array(found), _any_broken(parts)


def _scaled(size: Float64Array, sums: Sums, form: Contract, fmt: Format, parts: Parts) -> Bounded:
    """The bound with the scale's and the output's roundings."""
    (x, f), *_ = parts
    terms = x.p.shape[-2] * x.p.shape[-1]
    return settled(size, *sums, form, f.constants, fmt, terms=terms, roundings=SCALE_ROUNDINGS)


def settled(
    size: Float64Array,
    b: Float64Array,
    broken: NDArray[np.bool_],
    form: Contract,
    c: Constants,
    fmt: Format,
    *,
    terms: int = 0,
    roundings: int = 0,
) -> Bounded:
    """The bound with some roundings and then that of an output of at most ``size``.

    terms: how many numbers the error was summed from in float64.
    """
    unit, lost = max(c.u_o, fmt.unit_roundoff), max(c.omega_o, fmt.omega)
    if fmt.precision >= c.compute.precision:
        unit, lost = c.u, c.w if form.arithmetic.flush else c.compute.omega
    grow = 1 + 2.0**-50 * (max(b.shape[-2] * b.shape[-1], terms) + 512)
    before = roundings * c.u
    bound = b * (grow * (1 + before) * (1 + unit))
    bound += size * (grow * (before * (1 + unit) + unit))
    bound += grow * ((1 + unit) * roundings * (c.w if form.arithmetic.flush else 0.0) + lost)
    return Bounded(np.asarray(bound), np.asarray(broken | (size + bound >= fmt.overflow_threshold)))
