"""G1 for softmax_backward, and the bound of a whole gradient at x: derived, in closed form, for any order of the sum.

y and dy exact as stored; D = sum y dy, and w what a product can lose next to zero:

    dD  = h sum_j |y_j dy_j| + n w (1 + h),   h = g(n + 1); a sum finer than its terms: (1 + u)^2 (1 + g(n)) - 1
    E_i = |y_i| [dD + k (|dy_i| + |D| + dD)] + 3 w,   k = (1 + u)^2 - 1
    |d dx_i| <= E_i + u_o (|dx_i| + E_i) + omega_o

Both forms are covered: y (dy - D) has a difference and a product, y dy - y D two products, of which the first may be
shared with the sum, and a difference: u |y_i| ((|dy_i|) + (|D| + dD) + (|dy_i| + |D| + dD)(1 + u)). Products next to
zero lose w each, in the sum and in the result.

The gradient at x (`gradient_bounds`): what goes back starts from a computed y^ = y + b, b the bound of the forward
pass (stored or not: the rounding of a stored y is in b), so with z_i = |dy_i - D|

    dD  = sum_j b_j |dy_j| + h sum_j (y_j + b_j) |dy_j| + n w (1 + h)
    E_i = b_i z_i + (y_i + b_i) [dD + k (|dy_i| + |D| + dD)] + 3 w + M_i,   k = (1 + u)^8 - 1
    M_i = (g(n + 2) + k) sum_j (y_j + b_j) (|dy_j| + |D| + dD) + n w  where x_i is the row's maximum, else 0

k counts the roundings of a graph of single operations (exp, quotient, sum, and their derivatives); M is what such a
graph sends through the maximum, which is 0 in exact arithmetic. For log_softmax, p^ = exp of a computed ln p,
a_i = p_i (e^(b_i) (1 + e_exp) - 1) + w and G = sum dy:

    dG = h sum |dy_j|,   E_i = a_i (|G| + dG) + p_i dG + k (|dy_i| + (p_i + a_i)(|G| + dG)) + 3 w + M_i
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from oracle.arithmetic.arb import arb_arithmetic
from oracle.block import Block
from oracle.bounds.bounded import Bounded
from oracle.bounds.softmax import output as forward
from oracle.case import Case
from oracle.contract.constants import Constants, compound, constants
from oracle.contract.contract import Contract
from oracle.enclosure import Enclosure
from oracle.formats import FORMATS, Float64Array, Format, format_of
from oracle.ops.softmax.gradient_case import clean_rows, gradient_at

GRAPH_ROUNDINGS = 8
# Bits at which the exact gradient of a check is computed.
PRECISION = 256


def bounds(
    case: Case, block: Block, forms: Sequence[Contract], formats: Mapping[str, Format]
) -> list[dict[str, Bounded]]:
    """One dict of ``dx`` [r, n] per form; see `oracle.bounds.table.Bounds`."""
    input_format = format_of(case.arrays["y"])
    observed = formats.get("dx", input_format)
    y, dy = (np.abs(a) for a in clean_rows(case, block.rows)[:2])
    total, size = block.part("total").upper_abs(), block.part("dx").upper_abs()
    n = y.shape[1]
    grow = 1.0 + 2.0**-52 * (n + 512)
    results = []
    with np.errstate(all="ignore"):
        products = y * dy
        summed = products.sum(axis=1, keepdims=True)
        for form in forms:
            c = constants(form, input_format)
            h, w = _sum_error(form, c, n), _underflow(form, c)
            wrong = h * summed + n * w * (1 + h)
            if form.arithmetic.flush:
                lost = input_format.smallest_normal
                wrong = wrong + (1 + h) * lost * (y + dy + lost).sum(axis=1, keepdims=True)
            reach = dy + total + wrong
            inner = y * (wrong + compound(c.u, c.u) * reach) + 3 * w
            if form.arithmetic.flush:
                inner = inner + lost * (reach + y) * (1 + 4 * c.u)
            u_o, omega_o = _output_rounding(form, c, observed)
            bound = (inner + u_o * (size + inner) + omega_o) * grow
            limit = c.compute.max_finite / 2
            broken = (size + bound >= observed.overflow_threshold) | (y * reach >= limit) | (reach >= limit)
            broken |= summed * (1 + h) >= limit
            results.append({"dx": Bounded(bound, broken)})
    return results


def gradient_bounds(
    case: Case, dy: Float64Array, forms: Sequence[Contract], observed: Format
) -> tuple[Block, Enclosure, list[Bounded]]:
    """The forward block of a softmax or log_softmax case, its exact dx [R, n] at x, and the bound of it per form.

    dy [R, n], zero where x is -inf. Rows and entries that the forward bound exempts are exempt here.
    """
    ar = arb_arithmetic(PRECISION)
    with ar.working():
        block, turned = gradient_at(ar, case, dy)
        exact, total = (Enclosure(*ar.to_enclosure(v)) for v in (turned.dx, turned.total))
    visible, p, n = block.visible_keys(), block.part("p").upper_abs(), dy.shape[1]
    input_format = format_of(case.arrays["x"])
    x = np.where(visible, case.arrays["x"].reshape(-1, n).astype(np.float64), -np.inf)
    top = visible & (x == x.max(axis=1, keepdims=True))
    given, z = np.abs(dy), np.abs(dy - total.hi) + total.rad + np.abs(total.lo)
    found = forward.bounds(case, block, forms, {"out": input_format})
    results = []
    with np.errstate(all="ignore"):
        for form, forth in zip(forms, found, strict=True):
            c = constants(form, input_format)
            h, w = _sum_error(form, c, n), _underflow(form, c)
            k = float(np.expm1(GRAPH_ROUNDINGS * np.log1p(c.u)))
            b = np.where(visible, forth["out"].bound, 0.0)
            if case.op == "log_softmax":
                a = np.where(visible, p * (np.expm1(b) + np.exp(b) * c.e_exp) + w, 0.0)
                wrong = h * given.sum(axis=1, keepdims=True)
                whole = total.upper_abs() + wrong
                inner = a * whole + p * wrong + k * (given + (p + a) * whole) + 3 * w
                flow = given + (p + a) * whole
            else:
                wrong = (b * given).sum(axis=1, keepdims=True) + h * ((p + b) * given).sum(axis=1, keepdims=True)
                wrong = wrong + n * w * (1 + h)
                whole = given + total.upper_abs() + wrong
                inner = b * z + (p + b) * (wrong + k * whole) + 3 * w
                flow = (p + b) * whole
            through = (c.g(n + 2) + k) * np.where(visible, flow, 0.0).sum(axis=1, keepdims=True) + n * w
            inner = inner + np.where(top, through, 0.0)
            u_o, omega_o = _output_rounding(form, c, observed)
            bound = (inner + u_o * (exact.upper_abs() + inner) + omega_o) * (1 + 2.0**-52 * (n + 512))
            broken = forth["out"].may_overflow | (exact.upper_abs() + bound >= observed.overflow_threshold)
            results.append(Bounded(np.where(visible, bound, omega_o), broken))
    return block, exact, results


def _sum_error(form: Contract, c: Constants, n: int) -> float:
    if form.sums.row_sum in FORMATS and FORMATS[form.sums.row_sum].precision > c.compute.precision:
        return compound(c.u, c.g(n, u=FORMATS[form.sums.row_sum].unit_roundoff), c.u)
    return c.g(n + 1, u=max(c.u, FORMATS[form.sums.row_sum].unit_roundoff) if form.sums.row_sum in FORMATS else c.u)


def _underflow(form: Contract, c: Constants) -> float:
    # As in the forward pass: hardware may flush in 32 and 64 bits, not in 16.
    return c.w if c.compute.name in ("fp32", "fp64") or form.arithmetic.flush else c.compute.omega


def _output_rounding(form: Contract, c: Constants, observed: Format) -> tuple[float, float]:
    declared = (c.u_o, c.omega_o) if form.output.stored_as is not None else (0.0, 0.0)
    omega = observed.smallest_normal if form.arithmetic.flush else observed.omega
    return max(declared[0], observed.unit_roundoff), max(declared[1], omega)
