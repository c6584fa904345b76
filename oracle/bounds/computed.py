"""Attention of operands that were themselves computed, and the projections before and after it.

A projection z = W x of K terms, x off by dx and W exact as stored, with c_K of its chain (operands of tf32 included):

    dz = |W| dx + c_K |W| (|x| + dx) + K w,   stored: dz <- dz + u (|z| + dz) + omega

A rotation of a computed pair by exact cos and sin, in a format with u_r (k_r = u_r if its sum is what is stored):

    dy_1 = |cos| dz_1 + |sin| dz_2 + k_r (|cos| (|z_1| + dz_1) + |sin| (|z_2| + dz_2)) + 2 omega_r,  then stored

Attention of q + dq, k + dk, v + dv: a kernel keeps its contract for the operands that it has, so its scores err by

    eps = alpha [(|q| + dq) dk + dq |k|] + [the scores' own error with A = alpha (|q| + dq)(|k| + dk)]

and, its weights being those of scores off by eps, O is off by what `oracle.bounds.forward` says of the exact v, with
|v| + dv where magnitudes of the stored v count, and dv itself:

    E = W + kP Z + (1 + kP) min(G sum T_j dv_j, max dv) + U

Each is the exact difference, not its first order. Errors of different stages are added, which they reach together only
if all of them point the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.block import Block
from oracle.bounds import forward
from oracle.bounds.landscape import Landscape, inflation, landscape
from oracle.bounds.spread import Spread, spread, values_of
from oracle.contract.constants import Constants, compound, dot_error
from oracle.contract.contract import Contract
from oracle.enclosure import Enclosure
from oracle.formats import FORMATS, Float64Array, Format

# Of float64 products and their sums of magnitudes, per term.
SLACK = 2.0**-51


@dataclass(frozen=True, slots=True)
class Store:
    """How a stage is stored: relative and absolute rounding (those of the compute format if kept there), its limit."""

    unit: float
    omega: float
    limit: float


def store_of(name: str | None, input_format: Format, contract: Contract, c: Constants) -> Store:
    """Of ``name`` (None: kept in the compute format, ``input``: the input's)."""
    fmt = c.compute if name is None else input_format if name == "input" else FORMATS[name]
    if fmt.precision >= c.compute.precision:
        # Half the range: partial sums may be that much larger than their total.
        return Store(0.0, 0.0, c.compute.max_finite / 2)
    return Store(
        fmt.unit_roundoff, fmt.smallest_normal if contract.arithmetic.flush else fmt.omega, fmt.overflow_threshold
    )


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """Rows of exact numbers as midpoints with radius, and how far a kernel's are from the exact ones; all [n, d].

    envelope: the sum of the magnitudes of the products that they are made of.
    """

    mid: Float64Array
    rad: Float64Array
    wrong: Float64Array
    envelope: Float64Array

    @property
    def size(self) -> Float64Array:
        """Upper bounds of exact magnitudes."""
        return np.asarray(np.abs(self.mid) + self.rad)

    @property
    def reach(self) -> Float64Array:
        """Upper bounds of a kernel's magnitudes."""
        return np.asarray(self.size + self.wrong)

    def times(self, factor: float) -> Computed:
        """All of it, with its errors, that many times as large."""
        return Computed(*(part * factor for part in (self.mid, self.rad, self.wrong, self.envelope)))

    def off_by(self, relative: float) -> Computed:
        """A kernel's numbers with one more relative error."""
        return replace(self, wrong=self.wrong + relative * self.reach)

    def columns(self, start: int, stop: int) -> Computed:
        return self.at((slice(None), slice(start, stop)))

    def rows(self, index: NDArray[np.int64]) -> Computed:
        return self.at(index)

    def at(self, index: Any) -> Computed:
        parts = (self.mid, self.rad, self.wrong, self.envelope)
        return Computed(*(part[index] for part in parts))

    def beside(self, other: Computed) -> Computed:
        """Both in one row."""
        pairs = zip(
            (self.mid, self.rad, self.wrong, self.envelope),
            (other.mid, other.rad, other.wrong, other.envelope),
            strict=True,
        )
        return Computed(*(np.hstack(pair) for pair in pairs))


def exact(x: Float64Array) -> Computed:
    """Numbers that a kernel reads as they are."""
    nothing = np.zeros(x.shape)
    return Computed(x, nothing, nothing, np.abs(x))


def product_error(contract: Contract, c: Constants, terms: int) -> float:
    """c_K of a projection, both operands cut to tf32 first where the contract says so."""
    return compound(dot_error(contract, c, terms), c.u_v, c.u_v)


def projected(x: Computed, weight: Float64Array, contract: Contract, c: Constants, store: Store) -> Computed:
    """x W^T, stored."""
    across, terms = np.abs(weight).T, weight.shape[1]
    size, reach = x.size @ across, x.reach @ across
    mid = x.mid @ weight.T
    rad = x.rad @ across + SLACK * (terms + 2) * size
    wrong = x.wrong @ across + product_error(contract, c, terms) * reach + 2 * terms * c.w
    # Entries next to zero that are flushed, or cut to tf32.
    beside = x.reach.sum(axis=1, keepdims=True) + across.sum(axis=0)[None, :] + terms * c.omega_v
    wrong = wrong + c.omega_v * beside
    return stored(Computed(mid, rad, wrong * (1 + SLACK * (terms + 8)), reach), store)


def stored(x: Computed, store: Store) -> Computed:
    """x rounded to a format once."""
    return replace(x, wrong=x.wrong + store.unit * x.reach + store.omega)


@dataclass(frozen=True, slots=True)
class Turning:
    """The rotation's format; where its sum is what is stored, the storage is the rounding of that sum."""

    unit: float
    omega: float
    store: Store

    @property
    def relative(self) -> float:
        return self.unit if self.store.unit == self.unit else self.unit * (2 + self.unit)


def turning_of(name: str | None, input_format: Format, contract: Contract, c: Constants, store: Store) -> Turning:
    fmt = c.compute if name is None else input_format if name == "input" else FORMATS[name]
    return Turning(fmt.unit_roundoff, fmt.smallest_normal if contract.arithmetic.flush else fmt.omega, store)


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """cos and sin [S, d/2] as float64 with radius, and how far a kernel's are off."""

    cos: Float64Array
    sin: Float64Array
    rad: Float64Array | float = 0.0
    wrong_cos: Float64Array | float = 0.0
    wrong_sin: Float64Array | float = 0.0


def turned(x: Computed, table: Table, how: Turning, layout: str = "half") -> Computed:
    """Every pair of x [S, d] turned by the table, and stored."""
    pairs = x.mid.shape[1] // 2
    places = (slice(0, pairs), slice(pairs, None)) if layout == "half" else (slice(0, None, 2), slice(1, None, 2))
    a, b = (x.at((slice(None), place)) for place in places)
    made = Computed(*(np.zeros(x.mid.shape) for _ in range(4)))
    rounding, cut = 2.0**-50, how.relative
    for place, (cos, sin, d_cos, d_sin, sign) in zip(
        places,
        (
            (table.cos, table.sin, table.wrong_cos, table.wrong_sin, -1.0),
            (table.sin, table.cos, table.wrong_sin, table.wrong_cos, 1.0),
        ),
        strict=True,
    ):
        c_size, s_size = np.abs(cos) + table.rad, np.abs(sin) + table.rad
        here = (slice(None), place)
        size, reach = a.size * c_size + b.size * s_size, a.reach * (c_size + d_cos) + b.reach * (s_size + d_sin)
        made.mid[here] = a.mid * cos + sign * b.mid * sin
        made.rad[here] = a.rad * c_size + b.rad * s_size + table.rad * (a.size + b.size) + rounding * size
        wrong = a.wrong * c_size + b.wrong * s_size + a.reach * d_cos + b.reach * d_sin
        made.wrong[here] = (wrong + cut * reach + 2 * how.omega) * (1 + rounding)
        made.envelope[here] = reach
    return stored(made, how.store)


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """What attention of computed operands may be off by: O [r, d_v], and rows [r, 1] that may legally overflow."""

    wrong: Float64Array
    broken: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Weighed:
    """The weights of attention of computed q and k: their landscape, eps, rho and the exponents' error [r, n], and
    reach, the |q||k|."""

    land: Landscape
    eps: Float64Array
    exponent: Float64Array
    rho: Float64Array
    tilted: forward.Tilted
    reach: Float64Array


@dataclass(frozen=True, slots=True, eq=False)
class HeadBlock:
    """One head's exact numbers, as the bounds of all forms read them: its O and its landscape."""

    out: Enclosure
    land: Landscape


def head_of(block: Block) -> HeadBlock:
    """From the block of one head, which has parts scores, shift, total, lse and out."""
    return HeadBlock(block.part("out"), landscape(block))


def weighed(q: Computed, k: Computed, alpha: float, land: Landscape, contract: Contract, c: Constants) -> Weighed:
    dims = q.mid.shape[1]
    moved = q.reach @ k.wrong.T + q.wrong @ k.size.T
    reach = q.reach @ k.reach.T
    dot = dot_error(contract, c, dims)
    operands = q.reach.sum(axis=1, keepdims=True) + k.reach.sum(axis=1)
    eps = forward.dot_scores_error(alpha * reach, alpha, dims, dot, c, with_bias=False, operands=operands)
    eps = forward.stored_scores_error(alpha * moved + eps, land.size, alpha, contract, c)
    exponent = forward.exponent_error(eps, land, c)
    rho = forward.weight_error(eps, exponent, land, contract, c)
    return Weighed(land, eps, exponent, rho, forward.tilt(rho, land), reach)


def spread_of(v: Computed, out: Enclosure, w: Weighed) -> Spread:
    """Sums over the exact v, which is known to within its radius only.

    The widest radius of each column widens all distances |v - O|.
    """
    vague = v.rad.max(axis=0, initial=0.0)
    near = Enclosure(out.hi, out.lo, out.rad + vague)
    found = spread(values_of(v.mid, out.hi), near, [w.tilted.moved], w.land.visible)
    return replace(found, largest=found.largest + vague, size=found.size + w.land.keys * vague)


def attended(
    q: Computed, k: Computed, v: Computed, alpha: float, head: HeadBlock, contract: Contract, c: Constants, heads: Store
) -> Attended:
    """One head, whose O is stored by ``heads``."""
    w, out = weighed(q, k, alpha, head.land, contract, c), head.out
    land, tilted, found = w.land, w.tilted, spread_of(v, out, w)
    k_p = forward.cast_error(land, contract, c)
    inner = forward.weights_part(tilted, found.weighted[0], found.farthest)
    inner = inner + k_p * forward.cast_part(tilted, v.size, found.largest)
    of_v = forward.cast_part(tilted, v.wrong, largest_seen(v.wrong, land.visible))
    inner = inner + (1 + k_p) * of_v
    all_wrong = land.visible.astype(np.float64) @ v.wrong
    reached = replace(found, distance=found.distance + all_wrong, size=found.size + all_wrong)
    inner = inner + forward.underflow_part(tilted, land, reached, contract, c) + c.omega_v * (1 + k_p)
    apart = forward.sweeps_apart(w.exponent, w.tilted, land, contract, c)
    kept = replace(c, u_o=max(heads.unit, c.u), omega_o=max(heads.omega, c.compute.omega))
    wrong = forward.out_bound(inner, out, land, contract, kept, apart=apart)
    wrong = wrong * inflation(land, q.mid.shape[1])
    heavy = np.exp(contract.sums.lag) * (found.largest + of_v) / land.total_inverse
    broken = scores_broken(w, alpha, contract, c) | (heavy >= c.compute.max_finite / 2).any(axis=1, keepdims=True)
    broken |= (out.upper_abs() + wrong >= heads.limit).any(axis=1, keepdims=True)
    return Attended(wrong, broken)


def scores_broken(w: Weighed, alpha: float, contract: Contract, c: Constants) -> NDArray[np.bool_]:
    """[r, 1]: rows in which a dot product or a stored score, raw or scaled, may legally overflow."""
    limit, land = c.compute.max_finite / 2, w.land
    seen = np.where(land.visible, w.reach, 0.0).max(axis=1, keepdims=True, initial=0.0)
    broken = (seen * max(alpha, 1.0) >= limit) | (land.max_size >= limit)
    if contract.scores.stores:
        scaled = np.where(land.visible, land.size + w.eps, 0.0).max(axis=1, keepdims=True, initial=0.0)
        broken |= np.maximum(seen, scaled) >= c.scores.overflow_threshold
    return np.asarray(broken)


def normed(x: Computed, gain: Float64Array, eps: float, c: Constants, store: Store) -> Computed:
    """RMSNorm of every row, stored before and after its gain.

    s(c) = sqrt(mean c^2 + eps) is a norm of (c / sqrt d, sqrt eps), so s moves by at most ds = |dc|_2 / sqrt d, and

        |c'_i / s' - c_i / s| <= (dc_i + |c_i| ds / s) / (s - ds),  at most sqrt d + |c_i| / s

    The sum of squares, its mean and eps are of one sign: relative errors g(d + 4), and root and quotient on top.
    """
    d = x.mid.shape[1]
    grow = 1 + SLACK * (d + 8)

    def root_mean_square(by: Float64Array) -> Float64Array:
        return np.asarray(np.sqrt((by**2).mean(axis=1, keepdims=True)) * grow)

    def moved(by: Float64Array, s: Float64Array) -> Float64Array:
        ds = root_mean_square(by)
        found = (by + x.size * ds / s) / (s - ds)
        most = np.sqrt(d) + x.size / s
        return np.where((ds < s) & (found < most), found, most)

    root = np.sqrt((x.mid**2).mean(axis=1, keepdims=True) + eps)
    # The root of the exact row lies within that of the midpoints and that of the radii.
    low = np.maximum(root / grow - root_mean_square(x.rad), np.sqrt(eps) / grow)
    mid = x.mid / root
    rad = moved(x.rad, low) + SLACK * (d + 8) * np.abs(mid)
    squares = c.g(d + 4) + d * c.w / eps
    relative = compound(squares / (1 - squares), 4 * c.u, 4 * c.u) if squares < 0.5 else np.inf
    wrong = moved(x.wrong, low)
    reach = np.abs(mid) + rad + wrong
    bare = stored(Computed(mid, rad, wrong + relative * reach + c.w, reach), store)
    size = np.abs(gain)[None, :]
    scaled = bare.wrong * size + c.u * size * bare.reach + c.w
    return stored(Computed(mid * gain, rad * size + SLACK * np.abs(mid) * size, scaled, size * bare.reach), store)


def cached(x: Computed, fmt: Format, c: Constants) -> Computed:
    """Every row divided by largest / max_finite, rounded to ``fmt`` and multiplied by that again."""
    factor = x.reach.max(axis=1, keepdims=True, initial=0.0) / fmt.max_finite * (1 + 8 * c.u)
    unit = compound(fmt.unit_roundoff, 3 * c.u)
    return replace(x, wrong=x.wrong + unit * x.reach + fmt.omega * factor + fmt.max_finite * c.w)


def too_large(x: Computed, store: Store, c: Constants) -> NDArray[np.bool_]:
    """[n]: rows of computed numbers that may overflow, in their sums or where they are stored."""
    return np.asarray(((x.reach >= store.limit) | (x.envelope >= c.compute.max_finite / 2)).any(axis=1))


def largest_seen(magnitude: Float64Array, visible: NDArray[np.bool_]) -> Float64Array:
    """[r, columns]: the largest entry of each column over the row's visible keys."""
    if bool(visible.all()):
        return np.broadcast_to(magnitude.max(axis=0, initial=0.0), (len(visible), magnitude.shape[1]))
    return np.stack([magnitude[seen].max(axis=0, initial=0.0) for seen in visible])
