"""The second witness of attention: loops in mpmath written from the definition, no shift, no matrices.

Shares nothing with the formula. exp(S) is summed as it is: mpmath's exponents have no limit, so no maximum is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mpmath
import numpy as np

from oracle.block import Block
from oracle.case import Case
from oracle.formats import FORMATS

DIGITS = 90
Row = dict[str, Any]


def case_of(rng: np.random.Generator, shape: tuple[int, ...], *, dtype: str = "fp64", **options: Any) -> Case:
    """shape: B, Hq, Hkv, Sq, Sk, D, Dv."""
    b, hq, hkv, sq, sk, d, dv = shape
    fmt = FORMATS[dtype]
    shapes = {"q": (b, hq, sq, d), "k": (b, hkv, sk, d), "v": (b, hkv, sk, dv)}
    return Case("attention", {n: fmt.store(rng.standard_normal(s)) for n, s in shapes.items()}, options)


def exact(x: Any) -> Any:
    return mpmath.mpf(float(x))


def may_attend(case: Case, b: int, h: int, i: int, j: int) -> bool:
    """Whether query i may see key j."""
    q, k, options = case.arrays["q"], case.arrays["k"], case.options
    here = position(case, i)
    if options.get("is_causal") and j > here:
        return False
    if options.get("window_size") is not None:
        left, right = options["window_size"]
        if left != -1:
            distance = here - j
            if distance > left or (distance == left and options.get("window_left") == "excluded"):
                return False
        if right != -1 and j - here > right:
            return False
    mask = options.get("attn_mask")
    if mask is None:
        return True
    held = np.broadcast_to(mask, (*q.shape[:3], k.shape[2]))[b, h, i, j]
    return bool(held) if mask.dtype == np.bool_ else bool(held != -np.inf)


def position(case: Case, i: int) -> int:
    """Where query i stands among the keys."""
    ahead = case.arrays["k"].shape[2] - case.arrays["q"].shape[2]
    return i + ahead if case.options.get("causal_alignment") == "bottom_right" else i


def added(case: Case, b: int, h: int, i: int, j: int) -> list[Any]:
    """What is added to a score: additive mask, ALiBi."""
    q, k, options = case.arrays["q"], case.arrays["k"], case.options
    terms = []
    mask = options.get("attn_mask")
    if mask is not None and mask.dtype != np.bool_:
        terms.append(exact(np.broadcast_to(mask, (*q.shape[:3], k.shape[2]))[b, h, i, j]))
    slopes = options.get("alibi_slopes")
    if slopes is not None:
        slope = exact(slopes[b, h] if slopes.ndim == 2 else slopes[h])
        by_index = options.get("alibi_bias") == "key_index"
        terms.append(slope * j if by_index else -slope * abs(position(case, i) - j))
    return terms


def witness(case: Case) -> dict[tuple[int, int, int], Row]:
    """(b, h, i) -> S by visible key, L and O of that row in mpmath; an empty row has neither L nor O.

    ``reach`` is the size of what was added up, so that 10^-DIGITS times it is how far rounding can have moved S and L.
    """
    q, k, v = (case.arrays[name].astype(np.float64) for name in ("q", "k", "v"))
    batch, heads, rows, dim = q.shape
    options = case.options
    result = {}
    with mpmath.workdps(DIGITS):
        given, cap, sinks = options.get("scale"), options.get("softcap"), options.get("sinks")
        alpha = 1 / mpmath.sqrt(dim) if given is None else exact(given)
        for b in range(batch):
            for h in range(heads):
                shared = h // (heads // k.shape[1])
                for i in range(rows):
                    scores = {}
                    reach = mpmath.mpf(1)
                    for j in range(k.shape[2]):
                        if not may_attend(case, b, h, i, j):
                            continue
                        terms = [alpha * exact(q[b, h, i, c]) * exact(k[b, shared, j, c]) for c in range(dim)]
                        others = added(case, b, h, i, j)
                        reach = max(reach, mpmath.fsum(abs(x) for x in terms + others))
                        score = mpmath.fsum(terms)
                        if options.get("softcap_order") == "after_mask":
                            score += mpmath.fsum(others)
                        if cap is not None:
                            score = exact(cap) * mpmath.tanh(score / exact(cap))
                        if options.get("softcap_order") != "after_mask":
                            score += mpmath.fsum(others)
                        scores[j] = score
                    row: Row = {"scores": scores, "reach": reach}
                    if scores:
                        powers = {j: mpmath.exp(s) for j, s in scores.items()}
                        keys = mpmath.fsum(powers.values())
                        sink = mpmath.mpf(0)
                        if sinks is not None and sinks[h] != -np.inf:
                            sink = mpmath.exp(exact(sinks[h]))
                            row["reach"] = max(reach, abs(exact(sinks[h])))
                        total = keys + sink
                        row["lse"] = mpmath.log(keys if options.get("lse_sink") == "excluded" else total)
                        row["out"] = [
                            mpmath.fsum(p * exact(v[b, shared, j, c]) for j, p in powers.items()) / total
                            for c in range(v.shape[-1])
                        ]
                    result[b, h, i] = row
    return result


@dataclass(frozen=True)
class Entry:
    """One exact number of one head: part, row and column in the block, value, and by how much the witness may be
    off."""

    part: str
    row: int
    column: int
    value: Any
    doubt: Any

    def held_by(self, block: Block) -> bool:
        part = block.part(self.part)
        with mpmath.workdps(DIGITS):
            here = self.row, self.column
            mid = mpmath.mpf(float(part.hi[here])) + mpmath.mpf(float(part.lo[here]))
            return bool(abs(self.value - mid) <= mpmath.mpf(float(part.rad[here])) + self.doubt)


def entries(case: Case, block: Block, truths: dict[tuple[int, int, int], Row]) -> list[Entry]:
    """Everything that has a value in one head."""
    found: list[Entry] = []
    v = case.arrays["v"].astype(np.float64)
    largest = float(np.abs(v[np.isfinite(v)]).max())
    for place, row in enumerate(block.rows.tolist()):
        truth = truths[*block.key, row]
        with mpmath.workdps(DIGITS):
            doubt = truth["reach"] * mpmath.mpf(10) ** (5 - DIGITS)
            found += [Entry("scores", place, j, s, doubt) for j, s in truth["scores"].items()]
            if truth["scores"]:
                found.append(Entry("lse", place, 0, truth["lse"], doubt))
                found += [Entry("out", place, c, x, doubt * largest) for c, x in enumerate(truth["out"])]
    return found
