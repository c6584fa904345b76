"""G1 for rope, rope_backward and rope_apply: derived bounds, in closed form, and the relative-position property's.

One pair (x_1, x_2) at position m, frequency theta, magnitude A, exact numbers; C = A cos, S = A sin of m theta.
Errors by stage, with u and omega of that stage's format:

    e_w, e_A   relative errors of the frequency and of the magnitude (`oracle.bounds.rope.frequency`)
    dth = |m theta| ((1 + e_w)(1 + u)(1 + u_m) - 1) + |m| omega + omega
    dc  = min(A + |C|, A dth) + A e_trig,  dc <- dc (1 + e_m) + |C| e_m,  dc <- dc + u_tab (|C| + dc) + omega_tab
    B_1 = |x_1| dc + |x_2| ds + k_r (|x_1| (|C| + dc) + |x_2| (|S| + ds)) + 2 omega_r
    |dy_1| <= B_1 + u_o (|y_1| + B_1) + omega_o;   B_2 with sin and cos exchanged; ds as dc

- dth, the angle: the product, u_m = u where |m| > 2^p and the position itself is rounded, and omega where a
  narrow format has subnormal frequencies.
- e_trig = 4 u of the compute format, absolute: sin and cos to about one ulp, or of an angle that was reduced
  in more precision and then rounded.
- e_m = (1 + e_A)(1 + u) - 1, the magnitude and one product with it, of the table or of anything it multiplies; 0
  where there is none.
- k_r = (1 + u_r)^2 - 1, a product and a sum. Where the rotation runs in the output's own format the sum is
  the output, and k_r = u_r (x cos + rotate_half(x) sin, call by call in bfloat16).
- The way back turns by -m: the same magnitudes, the same bound.

Above dth of about 2 the bound says no more than that |out| is about |x|: vacuous, for fp32 angles at base
1e4 beyond positions of about 1e6. Entries that do not turn are copies: their bound is 0.

rope_apply takes its tables as exact: dc = 0, or u_tab |cos| + omega_tab if the contract's table is narrower
than what was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log1p
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from oracle.block import Block
from oracle.bounds.bounded import Bounded
from oracle.bounds.rope.frequency import frequencies_upper, frequency_error, magnitude_of
from oracle.case import Case
from oracle.contract.constants import Constants, constants, dot_error
from oracle.contract.contract import Contract
from oracle.formats import FORMATS, Float64Array, Format, format_of
from oracle.ops.rope import case as rope_case
from oracle.ops.rope.scaling import PLAIN, Scaling

T = TypeVar("T", bound=np.generic)

# Error of sin and cos in units of u.
TRIG_UNITS = 4
# sqrt 2, rounded up: from errors of the components to the length of a pair's error.
ROOT2 = 1.4143
SCORE_ROUNDINGS = 6


@dataclass(frozen=True, slots=True)
class _Stages:
    """The formats of the four stages of one contract for one input format."""

    angle: Format
    table: Format
    rotate: Format
    output: Format
    c: Constants
    flush: bool

    def omega(self, fmt: Format) -> float:
        return fmt.smallest_normal if self.flush else fmt.omega

    @property
    def output_unit(self) -> float:
        return self.output.unit_roundoff

    @property
    def turn_error(self) -> float:
        u = self.rotate.unit_roundoff
        return u if self.rotate.precision == self.output.precision else u * (2 + u)


def _stages(form: Contract, input_format: Format, observed: Format) -> _Stages:
    c = constants(form, input_format)

    def named(name: str | None) -> Format:
        return c.compute if name is None else input_format if name == "input" else FORMATS[name]

    # The observed format rounds in any case; a coarser one counts where the contract declares it.
    output = observed
    if form.output.stored_as is not None and named(form.output.stored_as).precision < observed.precision:
        output = named(form.output.stored_as)
    rope = form.rope
    return _Stages(named(rope.angle), named(rope.table), named(rope.rotate), output, c, form.arithmetic.flush)


def bounds(
    case: Case, block: Block, forms: Sequence[Contract], formats: Mapping[str, Format]
) -> list[dict[str, Bounded]]:
    """One dict of ``out`` (or ``dx``) [r, D] per form; see `oracle.bounds.table.Bounds`."""
    input_format = format_of(rope_case.turned_array(case))
    name = rope_case.output_name(case)
    observed = formats.get(name, input_format)
    x, _ = rope_case.clean_head(case, block.key, block.rows)
    how = rope_case.rotation(case)
    first, second = (np.abs(part) for part in _pairs(x, how))
    cos, sin = (block.part(part).upper_abs() for part in ("cos", "sin"))
    size = block.part(name).upper_abs()
    grow = 1.0 + 2.0**-52 * 512
    magnitude = magnitude_of(how.scaling, 0.0)[0]
    results = []
    with np.errstate(all="ignore"):
        for form in forms:
            stages = _stages(form, input_format, observed)
            dc, ds, lost = _table_error(case, block, form, stages, cos, sin)
            lost_input = input_format.smallest_normal if form.arithmetic.flush else 0.0
            left = _turned(first, second, cos, sin, dc, ds, stages) + lost_input * (cos + sin + dc + ds)
            right = _turned(first, second, sin, cos, ds, dc, stages) + lost_input * (cos + sin + dc + ds)
            inner = np.zeros(x.shape)
            for part, found in zip(_pairs(inner, how), (left, right), strict=True):
                part[:] = found
            bound = inner + stages.output_unit * (size + inner) + stages.omega(stages.output)
            bound[:, how.rotary_dim :] = 0.0
            broken = (size + inner) * grow >= min(stages.output.overflow_threshold, stages.c.compute.overflow_threshold)
            # A magnitude may come before the rotation or after it, so that one step overflows and the whole does not.
            steps = size / min(1.0, magnitude)
            for part in _pairs(steps, how):
                part[:] = np.maximum(part, np.maximum(first, second) * max(1.0, magnitude))
            broken |= steps * grow >= min(stages.rotate.overflow_threshold, stages.c.compute.overflow_threshold)
            if lost is not None:
                for overflowed in _pairs(broken, how):
                    overflowed |= lost
            broken[:, how.rotary_dim :] = False
            results.append({name: Bounded(bound * grow, broken)})
    return results


def _pairs(x: NDArray[T], how: rope_case.Rotation) -> tuple[NDArray[T], NDArray[T]]:
    """Views of the first and second entries of all pairs."""
    if how.layout == "half":
        half = how.rotary_dim // 2
        return x[:, :half], x[:, half : how.rotary_dim]
    return x[:, : how.rotary_dim : 2], x[:, 1 : how.rotary_dim : 2]


def _turned(
    a: Float64Array,
    b: Float64Array,
    cos: Float64Array,
    sin: Float64Array,
    dc: Float64Array,
    ds: Float64Array,
    stages: _Stages,
) -> Float64Array:
    """B of a cos -+ b sin, from magnitudes."""
    products = a * (cos + dc) + b * (sin + ds)
    return np.asarray(a * dc + b * ds + stages.turn_error * products + 2 * stages.omega(stages.rotate))


def _table_error(
    case: Case, block: Block, form: Contract, stages: _Stages, cos: Float64Array, sin: Float64Array
) -> tuple[Float64Array, Float64Array, NDArray[np.bool_] | None]:
    """dc, ds [r, d/2], and where the angle's format cannot hold the position or the angle (None: nowhere)."""
    u, omega = stages.table.unit_roundoff, stages.omega(stages.table)
    if case.op == "rope_apply":
        narrowed = stages.table.precision < format_of(case.arrays["cos"]).precision
        dc, ds = ((u * part + omega) if narrowed else np.zeros(part.shape) for part in (cos, sin))
        return dc, ds, None
    how, length = rope_case.rotation(case), rope_case.sequence_length(case, block.key)
    positions = rope_case.pair_positions(case, block.key, block.rows)
    theta = frequencies_upper(how.base, how.rotary_dim, how.scaling, length)
    dth = angle_error(positions, theta, how, length, form, stages.angle)
    size, wrong = magnitude_of(how.scaling, stages.c.u)
    kept = Stored(size, wrong, stages.c.u, stages.table.unit_roundoff, stages.omega(stages.table))
    dc, ds = (table_error(part, dth, kept) for part in (cos, sin))
    return dc, ds, out_of_range(positions, theta, stages.angle)


@dataclass(frozen=True, slots=True)
class Stored:
    """How a table is made: A and e_A, u of the compute format, u and omega of the table's."""

    size: float
    wrong: float
    u: float
    unit: float
    omega: float


def table_error(entry: Float64Array, dth: Float64Array, how: Stored) -> Float64Array:
    """dc or ds, from |C| or |S| and the error of the angle."""
    error = np.minimum(how.size + entry, how.size * dth) + how.size * TRIG_UNITS * how.u
    if how.wrong:
        turned = how.wrong + how.u * (1 + how.wrong)
        error = error * (1 + turned) + entry * turned
    return np.asarray(error + how.unit * (entry + error) + how.omega)


def out_of_range(positions: NDArray[np.int64], theta: Float64Array, angle: Format) -> NDArray[np.bool_]:
    """Where the angle's format cannot hold the position or the angle."""
    far = np.abs(positions.astype(np.float64))
    return np.asarray(np.maximum(far, far * theta) >= angle.overflow_threshold)


def angle_error(
    positions: NDArray[np.int64],
    theta: Float64Array,
    how: rope_case.Rotation,
    length: int,
    form: Contract,
    angle: Format,
) -> Float64Array:
    """dth [S, d/2] in radians: what frequency, position and their product lose in the angle's format.

    positions: [S, 1] or [S, d/2]. theta: upper bounds [1, d/2]. length: of the sequence, where a frequency depends
    on it.
    """
    u, omega = angle.unit_roundoff, (angle.smallest_normal if form.arithmetic.flush else angle.omega)
    e_w = frequency_error(how.base, how.rotary_dim, how.scaling, length, angle)
    far = np.abs(positions.astype(np.float64))
    rounded = np.where(far > 2.0**angle.precision, u, 0.0)
    # ((1 + e_w)(1 + u)(1 + u_m) - 1), from parts that do not cancel.
    relative = e_w + (1 + e_w) * (u + rounded + u * rounded)
    exact = (np.arange(how.rotary_dim // 2) == 0) & (how.scaling.kind == "default")
    subnormal = np.where(exact, 0.0, far * omega * (1 + relative)) + omega
    with np.errstate(invalid="ignore"):
        found = np.where(far == 0, omega, far * theta * relative + subnormal)
    return np.asarray(found * (1 + 2.0**-48))


def relative_bound(
    q: Float64Array,
    k: Float64Array,
    positions_q: NDArray[np.int64],
    positions_k: NDArray[np.int64],
    shift: int,
    form: Contract,
    input_format: Format,
    *,
    base: float = 10000.0,
    rotary_dim: int | None = None,
    layout: str = "half",
    scale: float = 1.0,
    scaling: Scaling = PLAIN,
    length: int = 0,
) -> Float64Array:
    """[Sq, Sk]: the largest legal |S(m + t, n + t) - S(m, n)|, t = ``shift``, for scores S = scale <R_m q,
    R_n k>; with a magnitude A, of A R q and A R k. ``length`` must be the same in both calls.

    q [Sq, D] and k [Sk, D] before rotation, as stored; rotated by a kernel of ``form`` (output in the input's
    format unless declared) and multiplied by a dot product of the same contract; a score that is then stored
    in a narrow format adds that rounding. A rotated pair errs, as a vector, by at most
    A |x| ((1 + dth + sqrt2 e_trig)(1 + e_m)(1 + u_tab)(1 + sqrt2 k_r)(1 + u_o) - 1) and underflow; both sides' factors
    and the dot product's 1 + c_d are multiplied out, at both places.
    """
    dim = q.shape[1]
    how = rope_case.Rotation(dim, dim if rotary_dim is None else rotary_dim, layout, base, scaling)
    stages = _stages(form, input_format, input_format)
    c_d = dot_error(form, stages.c, dim)
    size, wrong = magnitude_of(scaling, stages.c.u)
    q_size, k_size = (_norms(side, how, size) for side in (q, k))
    total = np.zeros((len(q), len(k)))
    for t in (0, shift):
        dq, dk = (
            _side_error(side, np.asarray(at) + t, how, length, wrong, form, stages)
            for side, at in ((q_size, positions_q), (k_size, positions_k))
        )
        moved = dq @ (k_size + dk).T + q_size @ dk.T
        whole = (q_size + dq) @ (k_size + dk).T
        roundings = c_d + SCORE_ROUNDINGS * stages.c.u * (1 + c_d)
        total += moved + roundings * whole + dim * stages.c.w
    return np.asarray(abs(scale) * total * (1 + 2.0**-52 * (dim + 512)) + 2 * stages.c.w)


def _norms(side: Float64Array, how: rope_case.Rotation, size: float) -> Float64Array:
    """Lengths of the pairs times the magnitude [S, d/2], and magnitudes of the entries beyond them."""
    first, second = _pairs(side, how)
    lengths = size * np.hypot(first, second) * (1 + 2.0**-50)
    return np.concatenate([lengths, np.abs(side[:, how.rotary_dim :])], axis=1)


def _side_error(
    size: Float64Array,
    positions: NDArray[np.int64],
    how: rope_case.Rotation,
    length: int,
    wrong: float,
    form: Contract,
    stages: _Stages,
) -> Float64Array:
    """Vector errors of one side's rotated pairs; zero for the entries that do not turn."""
    pairs = how.rotary_dim // 2
    theta = frequencies_upper(how.base, how.rotary_dim, how.scaling, length)
    dth = angle_error(positions[:, None], theta, how, length, form, stages.angle)
    u_r = stages.rotate.unit_roundoff
    table = np.minimum(2.0, dth) + ROOT2 * (TRIG_UNITS * stages.c.u + 2 * stages.omega(stages.table))
    turned = ROOT2 * u_r * (2 + u_r)
    sized = log1p(wrong) + log1p(stages.c.u) if wrong else 0.0
    others = np.expm1(sized + log1p(stages.table.unit_roundoff) + log1p(turned) + log1p(stages.output_unit))
    lost = (1 + stages.output_unit) * 2 * stages.omega(stages.rotate) + stages.omega(stages.output)
    result = np.zeros(size.shape)
    result[:, :pairs] = size[:, :pairs] * (table + (1 + table) * others) + ROOT2 * lost
    return result
