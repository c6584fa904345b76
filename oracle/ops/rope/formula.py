"""Rotary position embedding of one head (Su et al. 2021, "RoFormer", arXiv 2104.09864, equations 14, 15, 34).

    theta_i = base^(-2i/d), i = 0 .. d/2 - 1,  d = rotary_dim
    (x_a, x_b)  ->  (x_a cos(m theta_i) - x_b sin(m theta_i),  x_a sin(m theta_i) + x_b cos(m theta_i))

for the i-th pair of a row at position m; frequencies may be scaled, cos and sin multiplied by a magnitude, and pairs
turned by three positions (`oracle.ops.rope.scaling`). Layout ``half`` pairs entries (i, i + d/2) (GPT-NeoX, Llama in
transformers), ``interleaved`` (2i, 2i + 1) (the paper, GPT-J). Entries from d on pass unchanged.

Shapes: x [S, D], positions int64 [S] ([3, S] with sections), cos and sin [S, d/2], out [S, D]. m theta_i is the real
product in radians: no angle is ever rounded to a format. The backward form is the transposed map, which is the
rotation by -m with the same magnitude: dx = A R_(-m) dy.

`rotate` is the definition. `rotate_by_matrix` multiplies each row by the block-diagonal matrix R_m, and
`rotate_by_powers` multiplies the complex number x_a + i x_b by (e^(i theta))^m, the power taken by repeated
squaring: the same real function three times. `score_rotated`, `score_relative` and `score_complex` are the
inner product <R_m q, R_n k>, as it stands, as q^T R_(n-m) k, and as Re(sum q conj(k) e^(i (m-n) theta)):
equal, so a score depends on n - m alone. The `mp` arithmetic shows all of these equalities to its last
digits.

Why the enclosures are rigorous: frequencies are evaluated in `angles` (arb, 160 bits or more, for balls),
where m theta is known to far below 2^-53 for every int64 position; the rest are inclusion-preserving
operations.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oracle.arithmetic.base import Arithmetic, V
from oracle.ops.rope.scaling import PLAIN, Scaling, axes, magnitude, scaled

LAYOUTS = ("half", "interleaved")


def frequencies(ar: Arithmetic[V], base: float, rotary_dim: int, *, scaling: Scaling = PLAIN, length: int = 0) -> V:
    """theta [1, d/2] in the arithmetic ``ar`` (pass ``ar.angles``); ``length``: of the sequence, where it matters."""
    theta = ar.power(base, -2 * np.arange(rotary_dim // 2), rotary_dim)
    return ar.round(scaled(ar, theta, base, rotary_dim, scaling, length), "angle")


def table(
    ar: Arithmetic[V],
    positions: NDArray[np.int64],
    base: float,
    rotary_dim: int,
    *,
    scaling: Scaling = PLAIN,
    length: int = 0,
) -> tuple[V, V]:
    """A cos and A sin of m theta_i, [S, d/2] each, A the magnitude; positions [S], or [3, S] with sections."""
    exact = ar.angles
    with exact.working():
        theta = frequencies(exact, base, rotary_dim, scaling=scaling, length=length)
    cos, sin = ar.cos_sin(positions if positions.ndim == 1 else positions[0], theta)
    if positions.ndim == 2:
        axis = axes(scaling, rotary_dim // 2)[None, :]
        for other in (1, 2):
            here = ar.cos_sin(positions[other], theta)
            cos, sin = (ar.select(axis == other, new, old) for new, old in zip(here, (cos, sin), strict=True))
    size = magnitude(ar, scaling)
    if size is not None:
        cos, sin = ar.mul(cos, size), ar.mul(sin, size)
    return ar.round(cos, "table"), ar.round(sin, "table")


def split_pairs(ar: Arithmetic[V], x: V, rotary_dim: int, layout: str) -> tuple[V, V]:
    """The first and the second entries of all pairs, [S, d/2] each."""
    if layout == "half":
        return ar.columns(x, 0, rotary_dim // 2), ar.columns(x, rotary_dim // 2, rotary_dim)
    return ar.columns(x, 0, rotary_dim, 2), ar.columns(x, 1, rotary_dim, 2)


def join_pairs(ar: Arithmetic[V], first: V, second: V, pairs: int, layout: str) -> V:
    """The inverse of `split_pairs`, [S, d]."""
    if layout == "half":
        return ar.hstack([first, second])
    return ar.hstack([ar.columns(part, i, i + 1) for i in range(pairs) for part in (first, second)])


def turn(ar: Arithmetic[V], first: V, second: V, cos: V, sin: V) -> tuple[V, V]:
    """The rotation of every pair."""

    def times(a: V, b: V) -> V:
        return ar.round(ar.mul(a, b), "rotate")

    left = ar.round(ar.sub(times(first, cos), times(second, sin)), "rotate")
    right = ar.round(ar.add(times(first, sin), times(second, cos)), "rotate")
    return left, right


def rotate(ar: Arithmetic[V], x: V, cos: V, sin: V, *, dim: int, rotary_dim: int, layout: str, back: bool = False) -> V:
    """x [S, D] rotated by the table, or ``back`` by it, the entries beyond ``rotary_dim`` unchanged."""
    first, second = split_pairs(ar, x, rotary_dim, layout)
    if back:
        # With both entries of each pair exchanged, before and after, the same rotation turns the other way.
        second, first = turn(ar, second, first, cos, sin)
    else:
        first, second = turn(ar, first, second, cos, sin)
    turned = join_pairs(ar, first, second, rotary_dim // 2, layout)
    whole = turned if rotary_dim == dim else ar.hstack([turned, ar.columns(x, rotary_dim, dim)])
    return ar.round(whole, "output")


def rotation_matrix(ar: Arithmetic[V], cos: V, sin: V, *, rotary_dim: int, layout: str) -> V:
    """R_m [d, d] of one position (cos and sin [1, d/2]), equation 15: R_m x is the rotated column x."""
    pairs = rotary_dim // 2
    half = layout == "half"
    nothing = ar.rational(0, 1)
    columns = []
    for j in range(rotary_dim):
        # Column j holds the image of the j-th unit vector: (cos, sin) for a first entry, (-sin, cos) for a
        # second.
        pair, second = (j % pairs, j >= pairs) if half else divmod(j, 2)
        at_first, at_second = (pair, pair + pairs) if half else (2 * pair, 2 * pair + 1)
        c, s = ar.columns(cos, pair, pair + 1), ar.columns(sin, pair, pair + 1)
        image = (ar.sub(nothing, s), c) if second else (c, s)
        column = [nothing] * rotary_dim
        column[at_first], column[at_second] = image
        columns.append(ar.transpose(ar.hstack(column)))
    return ar.hstack(columns)


def rotate_by_matrix(ar: Arithmetic[V], x: V, cos: V, sin: V, *, count: int, rotary_dim: int, layout: str) -> list[V]:
    """The ``count`` rows of x [S, d] as R_m x, one matrix for each position; a list of [1, d]."""
    rows = []
    for m in range(count):
        matrix = rotation_matrix(
            ar, ar.rows(cos, m, m + 1), ar.rows(sin, m, m + 1), rotary_dim=rotary_dim, layout=layout
        )
        rows.append(ar.transpose(ar.matmul(matrix, ar.transpose(ar.rows(x, m, m + 1)), "rotate")))
    return rows


Complex = tuple[V, V]


def complex_product(ar: Arithmetic[V], a: Complex[V], b: Complex[V]) -> Complex[V]:
    """(a_r + i a_i)(b_r + i b_i), entry by entry."""
    return (
        ar.sub(ar.mul(a[0], b[0]), ar.mul(a[1], b[1])),
        ar.add(ar.mul(a[0], b[1]), ar.mul(a[1], b[0])),
    )


def conjugate(ar: Arithmetic[V], a: Complex[V]) -> Complex[V]:
    return a[0], ar.sub(ar.rational(0, 1), a[1])


def unit_power(ar: Arithmetic[V], theta: V, position: int) -> Complex[V]:
    """(e^(i theta))^position by repeated squaring, [1, d/2] each; a negative position conjugates."""
    square: Complex[V] = ar.cos_sin(np.array([1], dtype=np.int64), theta)
    result: Complex[V] = ar.cos_sin(np.array([0], dtype=np.int64), theta)
    for bit in reversed(bin(abs(position))[2:]):
        if bit == "1":
            result = complex_product(ar, result, square)
        square = complex_product(ar, square, square)
    return result if position >= 0 else conjugate(ar, result)


def rotate_by_powers(ar: Arithmetic[V], x: V, theta: V, position: int, *, rotary_dim: int, layout: str) -> V:
    """One row x [1, d] at one position as (x_a + i x_b) (e^(i theta))^position."""
    pair = split_pairs(ar, x, rotary_dim, layout)
    turned = complex_product(ar, pair, unit_power(ar, theta, position))
    return join_pairs(ar, *turned, rotary_dim // 2, layout)


def score_rotated(ar: Arithmetic[V], q: V, k: V, theta: V, m: int, n: int, *, rotary_dim: int, layout: str) -> V:
    """<R_m q, R_n k> for one q and one k [1, d]."""
    sides = []
    for row, position in ((q, m), (k, n)):
        cos, sin = ar.cos_sin(np.array([position], dtype=np.int64), theta)
        sides.append(rotate(ar, row, cos, sin, dim=rotary_dim, rotary_dim=rotary_dim, layout=layout))
    return ar.matmul(sides[0], ar.transpose(sides[1]), "scores")


def score_relative(ar: Arithmetic[V], q: V, k: V, theta: V, m: int, n: int, *, rotary_dim: int, layout: str) -> V:
    """q^T R_(n-m) k."""
    cos, sin = ar.cos_sin(np.array([n - m], dtype=np.int64), theta)
    matrix = rotation_matrix(ar, cos, sin, rotary_dim=rotary_dim, layout=layout)
    return ar.matmul(q, ar.matmul(matrix, ar.transpose(k), "rotate"), "scores")


def score_complex(ar: Arithmetic[V], q: V, k: V, theta: V, m: int, n: int, *, rotary_dim: int, layout: str) -> V:
    """Re(sum over pairs of q conj(k) e^(i (m-n) theta))."""
    left, right = (split_pairs(ar, row, rotary_dim, layout) for row in (q, k))
    product = complex_product(ar, left, conjugate(ar, right))
    whole = complex_product(ar, product, ar.cos_sin(np.array([m - n], dtype=np.int64), theta))
    return ar.row_sum(whole[0], "scores")
