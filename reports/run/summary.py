"""What a run's records add up to: counts, findings, and per target its properties, key figures and contract."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from properties.judge.verdict import BAD, Verdict, exit_code
from properties.record import Record
from reports.content.wording import case_size
from reports.run.load import Run, Untested, finite, number

GRAVEST_FIRST = tuple(
    Verdict(name)
    for name in ("FAIL", "ERROR", "STALE_WAIVER", "UNDECIDED", "WAIVED", "VACUOUS", "EXEMPT", "PASS", "UNSUPPORTED")
)
_GRAVITY = {v.value: i for i, v in enumerate(GRAVEST_FIRST)}
DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "e4m3", "e5m2")
CONTRACT = "contract"
"""The property name of the run-level records that say which form of its contract a target kept."""


def gravest(verdicts: Iterable[str]) -> str:
    """The verdict to show for several; UNSUPPORTED for none."""
    return min(verdicts, key=lambda v: _GRAVITY[v], default=Verdict.UNSUPPORTED.value)


def ordered(counts: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Verdicts with their counts, gravest first."""
    return tuple((v.value, counts[v.value]) for v in GRAVEST_FIRST if counts.get(v.value))


def code_of(run: Run) -> int:
    """The exit code that the run's verdicts give."""
    return 3 if run.faults else exit_code(r.verdict for r in run.records)


@dataclass(frozen=True, slots=True, order=True)
class Subject:
    """One target of one op on one device."""

    op: str
    target: str
    device: str


def subject_of(record: Record) -> Subject:
    return Subject(record.op, record.target, record.device)


def by_subject(run: Run) -> dict[Subject, tuple[Record, ...]]:
    """The records of each subject, by op and name. Run-level records that name no op follow their target."""
    groups: dict[Subject, list[Record]] = defaultdict(list)
    for record in run.records:
        if record.op:
            groups[subject_of(record)].append(record)
    homes = {s.target: s for s in sorted(groups, reverse=True)}
    for record in run.records:
        if not record.op:
            groups[homes.get(record.target, subject_of(record))].append(record)
    return {subject: tuple(groups[subject]) for subject in sorted(groups)}


def untested_of(run: Run, subject: Subject) -> tuple[Untested, ...]:
    return tuple(u for u in run.untested if u.target == subject.target and u.op in ("", subject.op))


def dtypes_of(records: Iterable[Record]) -> tuple[str, ...]:
    """Dtypes in their usual order, unknown ones last."""
    found = {r.dtype for r in records if r.dtype}
    return tuple(sorted(found, key=lambda d: (DTYPES.index(d) if d in DTYPES else len(DTYPES), d)))


def tally(records: Iterable[Record]) -> Counter[str]:
    return Counter(r.verdict for r in records)


@dataclass(frozen=True, slots=True)
class Finding:
    """Records of one subject and verdict with one property in common, or (ERROR) one cause; the smallest case first."""

    subject: Subject
    verdict: str
    properties: tuple[str, ...]
    title: str
    records: tuple[Record, ...]


_BAD_NAMES: frozenset[str] = frozenset({str(bad.value) for bad in BAD})


def findings(run: Run, verdicts: frozenset[str] = _BAD_NAMES) -> tuple[Finding, ...]:
    """All records of these verdicts, grouped, in order of op, target and property."""
    groups: dict[tuple[Subject, str, str], list[Record]] = defaultdict(list)
    for subject, rows in by_subject(run).items():
        for record in rows:
            if record.verdict in verdicts:
                groups[subject, record.verdict, _cause(record)].append(record)
    found = []
    for (subject, verdict, _), records in groups.items():
        records.sort(key=lambda r: (case_size(r.description), r.description, r.dtype))
        properties = tuple(sorted({r.property for r in records}, key=property_order))
        title = next((r.title for r in records if r.title), "") if len(properties) == 1 else ""
        found.append(Finding(subject, verdict, properties, title, tuple(records)))
    return tuple(sorted(found, key=lambda f: (f.subject, property_order(f.properties[0]), _GRAVITY[f.verdict])))


def _cause(record: Record) -> str:
    """What makes findings one: the property; for calls that raised, the message without its numbers."""
    if record.verdict != Verdict.ERROR.value:
        return f"{record.property} {record.title}"
    return re.sub(
        r"\d+", "#", record.detail[record.detail.find("raised:") :] if "raised:" in record.detail else record.detail
    )


def property_order(property_id: str) -> tuple[int, str, int, str]:
    """P before G before the rest, by number."""
    head, digits = property_id[:1], property_id[1:]
    place = {"P": 0, "G": 1}.get(head, 2) if digits.isdigit() else 2
    return place, head, int(digits) if digits.isdigit() and len(digits) < 9 else 0, property_id


@dataclass(frozen=True, slots=True)
class PropertyRow:
    """Verdicts of one property by dtype, and its worst ratio by dtype."""

    property: str
    title: str
    counts: Mapping[str, Counter[str]]
    ratios: Mapping[str, float | None]


def property_rows(records: Sequence[Record]) -> tuple[PropertyRow, ...]:
    """The properties of one subject, in catalogue order; those that share an id are told apart by their titles."""
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        groups[record.property, record.title].append(record)
    rows = []
    for (property_id, title), group in sorted(groups.items(), key=lambda item: property_order(item[0][0])):
        by_dtype = {d: [r for r in group if r.dtype == d] for d in dtypes_of(group)}
        counts = {d: tally(rs) for d, rs in by_dtype.items()}
        ratios = {d: largest(r.ratio for r in rs) for d, rs in by_dtype.items()}
        rows.append(PropertyRow(property_id, title, counts, ratios))
    return tuple(rows)


def largest(values: Iterable[float | None]) -> float | None:
    """The largest of what is known; None if nothing is."""
    return max((v for v in values if v is not None and not math.isnan(v)), default=None)


@dataclass(frozen=True, slots=True)
class Pooled:
    """Figures of one output, pooled over records: ``n`` elements in ``cases`` cases.

    exact: share of elements that are the correctly rounded result. ulp_max: of the worst case. ulp_p999: of the worst
    case of at least a thousand elements. ulp_mean, bias (in unit roundoffs): over all elements. z: of the bias, as if
    elements and cases were independent. nonfinite: inf or NaN where a number is due.
    """

    cases: int
    n: int
    exact: float
    ulp_max: float | None
    ulp_p999: float | None
    ulp_mean: float | None
    bias: float | None
    z: float | None
    nonfinite: int


# A 99.9% quantile of fewer elements is their maximum.
_QUANTILE_NEEDS = 1000


def pooled(records: Iterable[Record], output: str) -> Pooled | None:
    """The pooled figures of ``output``, None where no record has any."""
    rows = [m for r in records if isinstance(m := r.metrics.get(output), Mapping) and _size(m) > 0]
    if not rows:
        return None
    sizes = [_size(m) for m in rows]
    scores = [z for m in rows if (z := finite(m.get("z"))) is not None]
    return Pooled(
        len(rows),
        sum(sizes),
        # `exact` counts infinities that are the rounded result, `n` does not.
        _total(rows, "exact") / (sum(sizes) + _total(rows, "overflowed")),
        largest(number(m.get("ulp_max")) for m in rows),
        largest(number(m.get("ulp_p999")) for m in rows if _size(m) >= _QUANTILE_NEEDS),
        _mean(rows, sizes, "ulp_mean"),
        _mean(rows, sizes, "bias"),
        sum(scores) / math.sqrt(len(scores)) if scores else None,
        int(_total(rows, "nonfinite")),
    )


def _total(rows: Sequence[Mapping[str, object]], name: str) -> float:
    return sum(finite(m.get(name)) or 0 for m in rows)


def _size(metrics: Mapping[str, object]) -> int:
    return int(finite(metrics.get("n")) or 0)


def _mean(rows: Sequence[Mapping[str, object]], sizes: Sequence[int], name: str) -> float | None:
    known = [
        (v, n) for m, n in zip(rows, sizes, strict=True) if (v := number(m.get(name))) is not None and not math.isnan(v)
    ]
    return sum(v * n for v, n in known) / sum(n for _, n in known) if known else None


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of inputs. ``scaled``: of ordinary magnitude, so that an absolute error in u means something."""

    name: str
    holds: Callable[[Record], bool]
    scaled: bool = True


def _unusual(record: Record) -> bool:
    # The position sweep of RoPE goes on to where an fp32 angle is worth nothing; it has a figure of its own.
    return "real" in record.features or record.features.get("sweep") == "position"


# Figures of hostile inputs say nothing about a model, and the other way round.
FAMILIES: tuple[Family, ...] = (
    # A gradient's own is P14.
    Family("ordinary (P1, P14)", lambda r: r.property in ("P1", "P14") and not _unusual(r)),
    Family("of a trained model", lambda r: "real" in r.features),
    Family("extreme (P9)", lambda r: r.property == "P9", scaled=False),
)


def model_ratio(records: Iterable[Record], output: str) -> float | None:
    """The largest rms error of G3, in rms errors of the model kernel."""
    return largest(number(r.metrics.get(f"model_ratio_{output}")) for r in records if r.property == "G3")


def worst_ratio(records: Iterable[Record]) -> Record | None:
    """The record nearest to its derived bound, or furthest beyond it."""
    derived = [r for r in records if r.basis == "derived" and r.ratio is not None and r.property != CONTRACT]
    return max(
        derived, key=lambda r: r.ratio if r.ratio is not None and not math.isnan(r.ratio) else -1.0, default=None
    )


def contract_of(records: Iterable[Record]) -> tuple[str, str]:
    """(preset held to, what the run says about its forms); empty strings where the records do not tell."""
    rows = list(records)
    preset = next((r.contract for r in rows if r.contract), "")
    return preset, next((r.detail for r in rows if r.property == CONTRACT), "")


def returns_lse(records: Iterable[Record]) -> bool:
    return any("lse" in r.metrics or "model_ratio_lse" in r.metrics for r in records)


def interpreted(records: Iterable[Record]) -> bool:
    return any(bool(r.datasheet.get("interpreted")) for r in records)
