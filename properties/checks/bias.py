"""P19: the signed mean error of O against what a model kernel of the contract errs, with and without ties.

Rounding to nearest has no direction; truncation or a one-sided exp have one, and a training run adds such errors up
(arXiv 2510.04212). Values of one sign keep a direction from cancelling in the mean; several keys that share the row
maximum, so that their weights round alike, are where it is known to appear. Such a direction is honest where the
contract's own model shows it too (a P that is divided before its cast): means are compared, not with zero but with the
model's. The threshold is calibrated, not derived: honest kernels stay below 0.3 of the model's rms error.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from oracle.block import Block
from oracle.case import Case
from oracle.evaluate import PRECISIONS, refine
from oracle.formats import Float64Array, StoredArray
from oracle.ops.table import op_named
from properties.checks.metamorphic import observe
from properties.inputs import strategies
from properties.inputs.recipes import Logits, Recipe
from properties.judge.remembered import judged
from properties.judge.verdict import Basis, Judgement, Verdict
from properties.judge.weigh import exact_blocks
from properties.subject import Input, Subject

LIMIT = 0.5
"""Largest |mean signed error - the model's| / rms error of the model kernel."""
LEAST_VALUES = 512


def edges(subject: Subject) -> Iterator[Input]:
    """One-signed values: plain scores, ties of the maximum, equal scores."""
    # Equal scores make all rows of a head alike: it is heads and columns that count.
    heads, dims, rows = (2, 64, 8) if subject.target.interpreted else (8, 64, 8)
    longest = 128 if subject.target.interpreted else 512
    for kind, size in (("plain", 0.0), ("ties", 12.0), ("offset", 0.0)):
        yield strategies.attention_input(
            subject,
            kv_heads=heads,
            sq=rows,
            sk=longest,
            dims=dims,
            recipe=Recipe("normal" if kind != "offset" else "zeros", 19),
            values=Recipe("one_signed", 7),
            logits=Logits(kind, size),
            features={"sweep": "bias", "ties": kind},
        )


def check(subject: Subject, example: Input) -> Judgement:
    """How far the mean error of |O| lies from the model's, in units of its rms; FAIL beyond `LIMIT` in every form."""
    case = example.case
    out = observe(subject, case)["out"]
    return judged("bias", subject, [(case, {"out": out})], lambda: _compared(subject, case, out))


def _compared(subject: Subject, case: Case, out: StoredArray) -> Judgement:
    blocks = [_sharp(case, block, subject.output.unit_roundoff) for block in exact_blocks(case)]
    model = op_named(case.op).model
    errors = np.concatenate([_signed(block, block.take("out", out).astype(np.float64)).ravel() for block in blocks])
    errors = errors[np.isfinite(errors)]
    if errors.size < LEAST_VALUES:
        return Judgement(Verdict.UNSUPPORTED, Basis.CALIBRATED, f"fewer than {LEAST_VALUES} finite values")
    mean, spread = float(errors.mean()), float(errors.std())
    z = mean / (spread / np.sqrt(errors.size)) if spread else 0.0
    found = []
    for form in subject.forms:
        modelled = [_signed(b, model(case, b.key, b.rows, form)["out"]) for b in blocks]
        held = np.concatenate([m.ravel() for m in modelled])
        rms, apart = float(np.sqrt(np.mean(held**2))), abs(mean - float(held.mean()))
        found.append((apart / rms if rms else (0.0 if apart == 0 else np.inf), form.label))
    ratio, label = min(found)
    figures = {"bias_ratio": ratio, "bias_mean": mean, "bias_z": float(z)}
    detail = f"mean signed error is {ratio:.3g} of the model's rms error from the model's, z {z:.3g} ({label} form)"
    verdict = Verdict.FAIL if ratio > LIMIT else Verdict.PASS
    return Judgement(verdict, Basis.CALIBRATED, detail, ratio / LIMIT, metrics=figures, forms={label: ratio / LIMIT})


def _sharp(case: Case, block: Block, unit: float) -> Block:
    """The block with O known to a small part of a rounding: in float64 a ball errs as much as a kernel."""
    exact = block.part("out")
    vague = np.asarray((exact.rad > unit / 16 * np.abs(exact.hi)).any(axis=1))
    return refine(case, block, vague, PRECISIONS[0])


def _signed(block: Block, y: Float64Array) -> Float64Array:
    """(|y| - |exact|) / |exact| [r, c]: towards or away from zero."""
    exact = block.part("out")
    middle = exact.hi + exact.lo
    with np.errstate(all="ignore"):
        return np.asarray(((y - exact.hi) - exact.lo) * np.sign(middle) / np.abs(middle))
