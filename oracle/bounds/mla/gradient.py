"""G1 for the gradients of mla's core: those of attention with computed operands, carried through W, in both orders.

Materialised: k^ = k + dk and v^ = v + dv (`oracle.bounds.computed`) enter the scores' eps, dP = dO v^ by |dO| dv, and
dQ = dS k^ by |dS| dk; the rest of dS is `oracle.bounds.attention.gradient`. A gradient g^ = g + e of what W made of c
gives

    dc: sum_h (|W_UK| e_k + |W_UV| e_v) + c_K sum_h (|W_UK| (|dk^C| + e_k) + |W_UV| (|dv| + e_v)) + 2 K w,
    dW: sum_b e^T |c| + c_K sum_b (|g| + e)^T |c| + 2 K w,     K = H (d_h + d_v) of dc, B n of dW

Absorbed: q~ and the cotangent dz = dO W_UV are the computed operands, of which dz enters dP by d(dz) |c| and dv =
P^T dz by P^T d(dz), q~ enters dc' = scale dX^T q~ by scale |dX|^T dq~. With e_q the error of dq~, e_z that of z = P c

    dq^C:  e_q |W_UK|^T + c_K (|dq~| + e_q) |W_UK|^T + 2 K w,   K = d_c
    dW_UK: |q^C|^T e_q + c_K |q^C|^T (|dq~| + e_q) + 2 K w,     K = B Sq
    dW_UV: |dO|^T e_z + c_K |dO|^T (|z| + e_z) + 2 K w
    D from an output: the larger of |dO| b_O + g |dO| (|O| + b_O), O = W_UV z^ stored, and of
    |dz| e_z + d(dz) (|z| + e_z) + g (|dz| + d(dz)) (|z| + e_z), both over all columns

Shares of heads and of sequences may be stored in the output's format before they are added; where calls store what they
pass on, dc's shares through the keys and through the values too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from oracle.block import Block
from oracle.bounds.attention.gradient import settled
from oracle.bounds.bounded import Bounded
from oracle.bounds.mla.gradient_head import ExactHead, HeadErrors, Share, exact_head, head_errors
from oracle.case import Case
from oracle.contract.constants import Constants, constants
from oracle.contract.contract import Contract
from oracle.formats import Float64Array, Format, format_of
from oracle.ops.mla import gradient_case as gradients


def bounds(
    case: Case, block: Block, forms: Sequence[Contract], formats: Mapping[str, Format]
) -> list[dict[str, Bounded]]:
    """One dict per form with the outputs of the block's kind; see `oracle.bounds.table.Bounds`."""
    fmt = format_of(case.arrays["q_nope"])
    rows = block.rows if block.key[0] == gradients.DQ else gradients.all_rows(case)
    with np.errstate(all="ignore"):
        keys = gradients.heads_of(case, block.key)
        whole = np.array_equal(rows, gradients.all_rows(case))
        asked = gradients.Asked(case.digest(), case)
        exact = [] if whole else [exact_head(case, key, rows) for key in keys]
        made = []
        for form in forms:
            parts = [_whole_head(asked, key, form, fmt) for key in keys] if whole else []
            parts = parts or [head_errors(case, one, form, fmt) for one in exact]
            found = _sums(block, parts, form, formats, fmt)
            made.append({n: b for n, b in found.items() if n in formats or not formats})
    return made


# Every block of a head needs all of it: the last few are remembered.
@lru_cache(maxsize=16)
def _whole(asked: gradients.Asked, key: tuple[int, int]) -> ExactHead:
    return exact_head(asked.case, key, gradients.all_rows(asked.case))


@lru_cache(maxsize=256)
def _whole_head(asked: gradients.Asked, key: tuple[int, int], form: Contract, fmt: Format) -> HeadErrors:
    with np.errstate(all="ignore"):
        return head_errors(asked.case, _whole(asked, key), form, fmt)


def _sums(
    block: Block, parts: Sequence[HeadErrors], form: Contract, formats: Mapping[str, Format], fmt: Format
) -> dict[str, Bounded]:
    c, kind = constants(form, fmt), block.key[0]
    if kind == gradients.DQ:
        own = {"dq_nope": parts[0].dq_nope, "dq_pe": parts[0].dq_pe}
        return {
            n: settled(block.part(n).upper_abs(), b, parts[0].broken, form, c, formats.get(n, fmt))
            for n, b in own.items()
        }
    everything = np.array([[any(part.spoiled for part in parts)]])
    if kind == gradients.DC:
        shares = {
            "dc_kv": [share for part in parts for share in _kept(part.dc_kv, form)],
            "dk_pe": [part.dk_pe for part in parts],
        }
    elif kind == gradients.DUK:
        shares = {"dw_uk": [part.dw_uk for part in parts]}
    else:
        shares = {"dw_uv": [part.dw_uv for part in parts]}
    made = {}
    for n, of in shares.items():
        target = formats.get(n, fmt)
        error, too_large = _added(of, c, target)
        made[n] = settled(
            block.part(n).upper_abs(), error[block.rows], everything | too_large[block.rows], form, c, target
        )
    return made


def _kept(paths: tuple[Share, Share], form: Contract) -> Sequence[Share]:
    """dc through keys and values: two shares where calls store what they pass on, else one."""
    return paths if form.latent.up is not None else (paths[0].plus(paths[1]),)


def _added(shares: Sequence[Share], c: Constants, fmt: Format) -> tuple[Float64Array, NDArray[np.bool_]]:
    """The error of a sum whose shares may be stored in the output's format first, and where one may overflow."""
    several = len(shares) > 1
    too_large = np.zeros(shares[0].size.shape, dtype=bool)
    for x in shares if several else ():
        too_large |= x.reach >= fmt.overflow_threshold
    total = sum(x.wrong + (c.u_o * (x.size + x.wrong) + c.omega_o if several else 0.0) for x in shares)
    sizes = sum(x.size for x in shares)
    error = np.asarray(total + c.g(2 * len(shares)) * (sizes + total))
    return error, too_large
