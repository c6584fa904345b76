"""How the verdicts come about, in a few paragraphs, and what each of them means."""

from __future__ import annotations

from collections.abc import Iterable

from properties.judge.verdict import Verdict
from reports.page.document import Badge, Block, Facts, Link, Paragraph, Table
from reports.run.load import Run

MEANING: dict[Verdict, str] = {
    Verdict.PASS: "|error| plus the enclosure's radius is within the contract's bound, or the exact property holds.",
    Verdict.FAIL: (
        "|error| minus the enclosure's radius exceeds the bound, or an exact property is broken: a defect, or a "
        "contract that is not kept. Never noise."
    ),
    Verdict.ERROR: "The call raised, hung, crashed or ran out of memory.",
    Verdict.UNDECIDED: "The enclosure stayed too wide to tell at the precision cap. Never counted as a pass.",
    Verdict.VACUOUS: (
        "Within a bound that would also have accepted a trivial output (zeros, the mean of V, the negated output): "
        "proves nothing."
    ),
    Verdict.EXEMPT: (
        "The contract promises no finite value here: its own scores or results may overflow the format. Counted, "
        "never a pass of the property."
    ),
    Verdict.UNSUPPORTED: "The target lacks the option or refuses the input in so many words. Counted and listed.",
    Verdict.WAIVED: "A finding in other people's code, explained beside the target with reason and link. Fails no run.",
    Verdict.STALE_WAIVER: "A waiver that explained nothing in a run that covered it: to be deleted.",
}


def method(run: Run) -> Iterable[Block]:
    """Enclosures, bounds, the three-way decision; the legend of verdicts; sources."""
    yield Paragraph(
        "Inputs are exact: the stored values are what the formula is evaluated on. For every certified output "
        "element the oracle gives an enclosure, an interval that provably holds the exact real result. It evaluates "
        "each op's one formula in float64 with a radius that carries every rounding, and again in ball arithmetic "
        "of growing precision where that radius is too wide for the question."
    )
    yield Paragraph(
        "The bound is the largest error that a kernel can make on this very input if it keeps its contract: which "
        "format the scores, weights, sums, angles and results have, and how they are rounded. It is derived per "
        "element from the contract and the exact intermediate values; it is not a tolerance that somebody chose. A "
        "preset is a set of legal evaluation orders (forms); a target keeps it if one form is kept by all of its "
        "cases. Error / bound above 1 refutes the contract. A bound allows for the worst alignment of all roundings, "
        "which an honest kernel does not come near at long contexts."
    )
    yield Paragraph(
        "Gate G3 is the sharper gate there: the rms error against that of a model kernel, the same formula with "
        "every stage of the contract really rounded. Its limits (1.5 for O in 16 bits, 4 for O in fp32 and for the "
        "LSE) were chosen on simulated honest kernels, not derived, and such verdicts say basis calibrated."
    )
    yield Paragraph(
        "ULP is the spacing of the output's format at the exact value, so that 0.5 is a correctly rounded result; "
        "near zero, where attention cancels, many ULP can be a small error, which is why verdicts rest on the "
        "bound. u is the unit roundoff of the dtype (fp32 2⁻²⁴, fp16 2⁻¹¹, bf16 2⁻⁸). Bias is the mean signed error "
        "in u; its z grows with the number of elements, and a small steady bias can matter in training."
    )
    yield Table(
        ("verdict", "meaning"),
        tuple((Badge(v.value), text) for v, text in MEANING.items()),
        caption="What the verdicts mean",
    )
    yield Facts(
        (
            ("derived", "rests on the contract's bound"),
            ("calibrated", "rests on a threshold that was chosen on simulated honest kernels"),
            ("exact", "rests on a property of bits, shapes or dtypes"),
        )
    )
    yield Paragraph(
        (
            "Background: ",
            Link("FlashAttention-3 on low-precision error", "https://arxiv.org/abs/2407.08608"),
            ", ",
            Link("biased rounding in low-precision attention", "https://arxiv.org/abs/2510.04212"),
            ", ",
            Link("rotary position embedding", "https://arxiv.org/abs/2104.09864"),
            ", ",
            Link("attention sinks", "https://arxiv.org/abs/2309.17453"),
            ", ",
            Link("multi-head latent attention", "https://arxiv.org/abs/2405.04434"),
            ".",
        )
    )
