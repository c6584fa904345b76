"""Gate G3: rms error against the rms error of a model kernel of the same contract, on fixed configurations.

The sharpest gate at long contexts, where a rigorous bound must allow for the worst alignment of roundings and an honest
kernel stays far below it. Thresholds are calibrated, not derived (basis ``calibrated``): a ratio above 1.5 for O and
for gradients in 16 bits, 4 for them in fp32 and 4 for the LSE fails; so does, in 16 bits, an error that follows the
sign of the values (`properties.checks.direction`), which a form with more noise cannot hide. It gives a verdict under
``flash`` and ``fp32``, as far as the model follows the contract; elsewhere the ratio is reported.

Measured on honest kernels, as ratios to the model: gradients of attention 0.70 to 1.03 in 16 bits and 0.95 to 1.45 in
fp32 (torch's flash backward on a CPU, whose 16-bit exp is off by 5e-5: 1.21), mla 0.86 to 1.0 and 0.48 to 0.95, its
gradients 0.68 to 1.17 and 0.54 to 1.19; all are held to attention's limits. Gradients with P in e4m3 are at 78 or more,
with P truncated at 1.9 to 2.1.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from oracle.block import Block
from oracle.case import Case
from oracle.contract.contract import Contract
from oracle.enclosure import Enclosure
from oracle.formats import Float64Array
from oracle.ops.attention.options import is_set
from oracle.ops.table import op_named
from properties.checks import direction
from properties.checks.metamorphic import Outputs, observe
from properties.inputs import strategies
from properties.inputs.recipes import Logits, Recipe
from properties.judge.remembered import judged
from properties.judge.verdict import Basis, Judgement, Verdict
from properties.judge.weigh import exact_blocks
from properties.ops.attention.options import TABLE
from properties.subject import Input, Subject

Modelled = Mapping[tuple[int, ...], Mapping[str, Float64Array]]
LEAST_VALUES = 512
NARROW, WIDE, LSE = 1.5, 4.0, 4.0
JUDGED = ("flash", "fp32")


def edges(subject: Subject) -> Iterator[Input]:
    """Long plain rows, one with a scale that is no power of two, and rows with a needle; 512 LSE values, more of O."""
    longest = 256 if subject.target.interpreted else min(subject.profile.large, 4096)
    heads = 2 if subject.target.interpreted else 8
    rows = 512 // heads
    for sk, dims, kind in ((longest // 4, 80, "plain"), (longest, 64, "plain"), (longest, 64, "needle")):
        yield strategies.attention_input(
            subject,
            kv_heads=heads,
            sq=rows,
            sk=sk,
            dims=dims,
            recipe=Recipe("normal", sk),
            logits=Logits(kind, float(np.log(sk)) if kind != "plain" else 0.0),
            features={"sweep": "model"},
        )


def check(subject: Subject, example: Input) -> Judgement:
    """The pooled rms ratio of O and of L, under the form whose model is nearest."""
    case = example.case
    outputs = observe(subject, case)
    return judged("model gate", subject, [(case, outputs)], lambda: _compared(subject, case, outputs))


def _compared(subject: Subject, case: Case, outputs: Outputs) -> Judgement:
    op = op_named(case.op)
    held = {name: value.astype(np.float64) / subject.nat(name) for name, value in outputs.items()}
    blocks = exact_blocks(case)
    parts = [(block, n, block.part(n), block.take(n, v)) for block in blocks for n, v in held.items() if block.holds(n)]
    counts = {name: sum(own.size for _, n, _, own in parts if n == name) for name in outputs}
    squares = {name: _squares((e, own) for _, n, e, own in parts if n == name) for name in outputs}
    narrow = [n for n in outputs if n != "lse" and counts[n] >= LEAST_VALUES and _is_narrow(subject)]
    best: tuple[float, dict[str, float], dict[str, float], str] | None = None
    firsts: dict[Hashable, Contract] = {}
    for form in subject.forms:
        # Forms that differ in nothing that a model has share one: the first speaks for all.
        firsts.setdefault(op.modelled(form, subject.fmt), form)
    for form in firsts.values():
        modelled = {b.key: op.model(case, b.key, b.rows, form) for b in blocks}
        of_model = {n: _squares((e, modelled[b.key][n]) for b, name, e, _ in parts if name == n) for n in outputs}
        ratios = {n: _ratio(squares[n], of_model[n]) for n in outputs if counts[n] >= LEAST_VALUES}
        turned = {n: _apart([(b, e, own) for b, name, e, own in parts if name == n], n, modelled) for n in narrow}
        worst = max((r / _limit(name, subject) for name, r in ratios.items()), default=0.0)
        worst = max(worst, *(t / direction.LIMIT for t in turned.values()), 0.0)
        if best is None or worst < best[0]:
            best = (worst, ratios, turned, form.label)
    if best is None or not best[1]:
        return Judgement(Verdict.UNSUPPORTED, Basis.CALIBRATED, f"fewer than {LEAST_VALUES} values to compare")
    worst, ratios, turned, label = best
    told = [f"{n} rms is {r:.3g} of the model's" for n, r in ratios.items()]
    told += [f"the errors of {n} follow its sign (T {t:.3g})" for n, t in turned.items() if t > direction.LIMIT]
    detail = f"{', '.join(told)} ({label} form)"
    figures = {f"model_ratio_{n}": r for n, r in ratios.items()} | {f"direction_{n}": t for n, t in turned.items()}
    apart = any(is_set(case, row.name) for row in TABLE if not row.modelled)
    judged = not apart and all(map(_followed, subject.forms))
    verdict = Verdict.FAIL if judged and worst > 1 else Verdict.PASS
    return Judgement(verdict, Basis.CALIBRATED, detail, worst, metrics=figures, forms={label: worst})


def _squares(pairs: Iterable[tuple[Enclosure, Float64Array]]) -> float:
    """Sum of squared distances."""
    return sum(float((exact.distance(values) ** 2).sum()) for exact, values in pairs)


def _apart(parts: Sequence[tuple[Block, Enclosure, Float64Array]], name: str, modelled: Modelled) -> float:
    """`direction.apart` of one output."""
    ours = [(own - e.hi) - e.lo for _, e, own in parts]
    models = [(modelled[b.key][name] - e.hi) - e.lo for b, e, _ in parts]
    return direction.apart(ours, models, [e.hi for _, e, _ in parts])


def _followed(form: Contract) -> bool:
    """Whether the model rounds where this form says."""
    unit = form.arithmetic
    plain = form.scores.prescale == "none" and unit.operands is None and unit.engine == "fma"
    # The model's exp and tanh are nearly exact; it rounds O once.
    exact = unit.exp is None and unit.tanh is None and unit.tanh_abs is None and form.output.stores == 1
    return form.preset in JUDGED and plain and exact and not unit.flush


def _ratio(target: float, model: float) -> float:
    if model == 0:
        return 1.0 if target == 0 else float("inf")
    return float(np.sqrt(target / model))


def _is_narrow(subject: Subject) -> bool:
    return subject.output.name not in ("fp32", "fp64")


def _limit(name: str, subject: Subject) -> float:
    if name == "lse":
        return LSE
    return NARROW if _is_narrow(subject) else WIDE
