"""The numbers that follow from a contract: unit roundoffs, errors of sums and products, of rescales."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, expm1, frexp, log1p

from oracle.contract.contract import Contract, resolved
from oracle.formats import FORMATS, Format, format_named

# Truncating matrix engines: products a step, fraction bits kept, bits of the running result.
_ENGINE_STEPS = {"h100": (16, 25, 23), "a100": (8, 24, 23), "hopper_fp8": (32, 13, 13)}


@dataclass(frozen=True, slots=True)
class Constants:
    """The numbers that one contract gives for one input format.

    u, w: unit roundoff and smallest normal of the compute format. e_exp, e_b, e_log: relative errors of exp, of exp
    in rescales and of log; e_ln: absolute error of log; e_tanh, e_tanh_abs:
    errors of tanh. u_X, omega_X: relative and absolute rounding of X (div:
    division, o:
    output, P: the
    cast weights, S: stored scores, D: stored differences S - m, q, k, v: operands of a product). omega_in: absolute
    error of an entry of q or k, scaled or not, next to zero. w_acc: what one step of the P.V accumulator can lose next
    to zero.
    """

    u: float
    w: float
    e_exp: float
    e_b: float
    e_log: float
    e_ln: float
    e_tanh: float
    e_tanh_abs: float
    u_div: float
    u_o: float
    omega_o: float
    u_P: float
    omega_P: float
    u_S: float
    omega_S: float
    u_D: float
    omega_D: float
    u_q: float
    u_k: float
    u_v: float
    omega_in: float
    omega_v: float
    w_acc: float
    compute: Format
    scores: Format
    weights: Format

    def g(self, n: float, *, u: float | None = None) -> float:
        """n u / (1 - n u), inf once n u reaches 1 (Higham's gamma)."""
        unit = self.u if u is None else u
        return n * unit / (1 - n * unit) if n * unit < 1 else float("inf")


def _omega(fmt: Format, flush: bool) -> float:
    return fmt.smallest_normal if flush else fmt.omega


@lru_cache(maxsize=1024)
def constants(contract: Contract, input_format: Format) -> Constants:
    """The numbers of ``contract`` for inputs of ``input_format``."""
    unit, held, flush = contract.arithmetic, contract.scores, contract.arithmetic.flush
    compute = resolved(unit.compute, input_format)
    u = compute.unit_roundoff
    weights = resolved(contract.weights.cast_to, input_format)
    scores = compute if held.stored_as is None else resolved(held.stored_as, input_format)
    output, shifted = resolved(contract.output.stored_as, input_format), resolved(held.shifted, input_format)
    cast = weights.precision < compute.precision
    tf32 = unit.operands == "tf32" and input_format.precision > FORMATS["tf32"].precision
    operand = FORMATS["tf32"].unit_roundoff if tf32 else 0.0
    prescale = {"none": 0.0, "compute": u, "input": max(u, input_format.unit_roundoff)}[held.prescale]
    e_exp = unit.exp if unit.exp is not None else 4 * u
    # Inputs that are flushed or cut to tf32 lose an absolute amount next to zero, and so does a scale multiplied into
    # q.
    lost = input_format.smallest_normal if flush else 0.0
    lost += _omega(FORMATS["tf32"], flush) if tf32 else 0.0
    stored = {"none": 0.0, "compute": 0.0, "input": _omega(input_format, flush)}[held.prescale]
    accumulator = compute if contract.sums.accumulator is None else resolved(contract.sums.accumulator, input_format)
    return Constants(
        u=u,
        w=compute.smallest_normal,
        e_exp=e_exp,
        e_b=e_exp,
        e_log=4 * u,
        e_ln=2.0**2.6 * u,
        e_tanh=unit.tanh if unit.tanh is not None else 4 * u,
        # That of 1 - 2 / (e^2x + 1), as kernels without a tanh compute it: exp 2u, sum u, division 4u, argument u.
        e_tanh_abs=unit.tanh_abs if unit.tanh_abs is not None else 8 * u,
        u_div=4 * u,
        u_o=output.unit_roundoff,
        omega_o=_omega(output, flush),
        u_P=_cast_unit(contract, max(weights.unit_roundoff if cast else 0.0, operand), u),
        omega_P=_cast_omega(contract, weights, cast, tf32),
        u_S=scores.unit_roundoff if held.stores else 0.0,
        omega_S=_omega(scores, flush) if held.stores else 0.0,
        u_D=0.0 if held.shifted is None else shifted.unit_roundoff,
        omega_D=0.0 if held.shifted is None else _omega(shifted, flush),
        u_q=operand + prescale * (1 + operand),
        u_k=operand + prescale * (1 + operand),
        u_v=operand,
        omega_in=lost + stored + _omega(compute, flush),
        omega_v=lost,
        w_acc=max(compute.smallest_normal, _omega(accumulator, flush)),
        compute=compute,
        scores=scores,
        weights=weights if cast else compute,
    )


def compound(*errors: float) -> float:
    """(1 + a)(1 + b)... - 1 without the cancellation of that form, which would swallow errors near 2^-53."""
    return float(expm1(sum(log1p(e) for e in errors)))


def _cast_unit(contract: Contract, unit: float, u: float) -> float:
    # A factor that is no power of two is rounded into P before the cast and out of the sum after it.
    return unit if frexp(contract.weights.scale)[0] == 0.5 else compound(unit, u, u)


def _cast_omega(contract: Contract, weights: Format, cast: bool, tf32: bool) -> float:
    lost = _omega(weights, contract.arithmetic.flush) if cast else 0.0
    lost += _omega(FORMATS["tf32"], contract.arithmetic.flush) if tf32 else 0.0
    return lost / contract.weights.scale


def dot_error(contract: Contract, c: Constants, terms: int) -> float:
    """c_K: relative to sum |a||b|, the error of one dot product of ``terms`` terms."""
    return _chain_error(contract, c, terms)


def accumulation_error(contract: Contract, c: Constants, keys: int) -> float:
    """c_n: relative to sum p|v|, the error of the P.V accumulation over ``keys`` keys with its rescales."""
    depth = _depth(contract, keys)
    if contract.arithmetic.engine != "fma" and contract.sums.tile is not None:
        # A fresh accumulator per tile, promoted to the compute format by one sum and one rescale.
        return compound(_chain_error(contract, c, min(contract.sums.tile, keys)), c.g(2 * tiles(contract, keys)))
    if contract.arithmetic.engine != "fma":
        chain = _chain_error(contract, c, keys, extra_steps=tiles(contract, keys))
        return compound(chain, c.g(2 * tiles(contract, keys)))
    accumulator = c.u if contract.sums.accumulator is None else format_named(contract.sums.accumulator).unit_roundoff
    return c.g(depth, u=max(c.u, accumulator))


def row_sum_error(contract: Contract, c: Constants, keys: int) -> float:
    """h: relative error of the row sum l over ``keys`` keys."""
    unit = c.u
    if contract.sums.row_sum not in ("unrounded", "rounded"):
        unit = max(unit, format_named(contract.sums.row_sum).unit_roundoff)
    return c.g(_depth(contract, keys), u=unit)


def tiles(contract: Contract, keys: int) -> int:
    """T: how many tiles of keys; ceil(n / 16) unless the contract declares its tile."""
    return max(1, ceil(keys / (contract.sums.tile or 16)))


def rescale_error(contract: Contract, c: Constants, keys: int) -> float:
    """E = -ln(1 - e_exp) - R ln(1 - e_b), R = T - 1 rescales of a running maximum.

    R = 0 where whole rows of scores pass from one call to the next (eager, sdpa_math). Other kernels that divide P
    first know l from an earlier sweep, which may have rescaled it.
    """
    whole_rows = contract.weights.normalised and (contract.scores.stores > 0 or contract.scores.prescale != "none")
    rescales = 0 if whole_rows else tiles(contract, keys) - 1
    return -log1p(-c.e_exp) - rescales * log1p(-c.e_b)


def _depth(contract: Contract, keys: int) -> int:
    return (contract.sums.tile or keys) + 2 * tiles(contract, keys) + 2


def _chain_error(contract: Contract, c: Constants, terms: int, *, extra_steps: int = 0) -> float:
    if contract.arithmetic.engine == "fma":
        return c.g(terms)
    b, fraction, result = _ENGINE_STEPS[contract.arithmetic.engine]
    steps = ceil(terms / b) + extra_steps
    exponent = steps * ((b + 1) * 2.0**-fraction + 2.0**-result)
    return float("inf") if exponent > 1 else exponent * (1 + exponent)
