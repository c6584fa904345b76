"""Which figures a report has: one row each, saying which records it is made of and what stands on its axes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from oracle.formats import FORMATS
from oracle.ops.table import ops
from properties.judge.verdict import BAD, Verdict
from properties.record import Record
from reports.content.wording import NOTHING, figure
from reports.page.document import Line, Panel, Plot, Point, Scale, Series, Table
from reports.run.load import Run, finite, number
from reports.run.summary import dtypes_of, gravest, largest

Measure = Callable[[Record], float | None]
BOUND = (1.0, "the bound")
ATTENTION = frozenset(name for name, op in ops().items() if op.attends)
SOFTMAX = frozenset(name for name, op in ops().items() if op.family == "softmax" and op.gradient is None)
ROPE = frozenset(name for name, op in ops().items() if op.family == "rope")


@dataclass(frozen=True, slots=True)
class FigureRow:
    """One figure: records of these ``ops`` whose ``sweep`` feature is this one, x and y of each.

    loose: further records of these ops that have this feature.
    """

    id: str
    title: str
    note: str
    sweep: str
    ops: frozenset[str]
    x: Measure
    y: Measure
    x_label: str
    y_label: str
    x_scale: Scale = "log"
    y_range: tuple[float, float] = (1e-4, 1e4)
    reference: tuple[float, str] | None = None
    loose: str = ""


def feature(*names: str) -> Measure:
    """The magnitude of the first of these features that the record has."""

    def read(record: Record) -> float | None:
        value = next((v for n in names if (v := finite(record.features.get(n))) is not None), None)
        return None if value is None else abs(value)

    return read


def ratio(record: Record) -> float | None:
    """Largest error / bound."""
    return record.ratio


def relative_error(record: Record) -> float | None:
    """||error|| / ||exact|| of O over the whole case, in unit roundoffs of the dtype: 0.3 to 0.6 is one rounding."""
    out = record.metrics.get("out")
    value = number(out.get("normwise")) if isinstance(out, Mapping) else None
    return None if value is None or record.dtype not in FORMATS else value / FORMATS[record.dtype].unit_roundoff


_IN_U = "‖error‖ / ‖exact‖, in u of the dtype"
_TO_BOUND = "largest error / bound"
_WORST = "Each mark is the worst case at that place."

FIGURES: tuple[FigureRow, ...] = (
    FigureRow(
        "context",
        "Error against context length",
        "Relative error of O over all certified rows, in unit roundoffs u. One rounding of the result alone gives "
        f"0.3 to 0.6. {_WORST}",
        "context",
        ATTENTION,
        feature("sk"),
        relative_error,
        "keys (Sk)",
        _IN_U,
    ),
    FigureRow(
        "context-bound",
        "Error / bound against context length",
        "How much of its allowance a target uses. The bound allows for the worst alignment of all roundings: with "
        "growing context an honest kernel falls below it, down to the share that the rounding of the result alone "
        f"takes. {_WORST}",
        "context",
        ATTENTION,
        feature("sk"),
        ratio,
        "keys (Sk)",
        _TO_BOUND,
        reference=BOUND,
    ),
    FigureRow(
        "logits",
        "Error / bound against logit size",
        f"Common offsets of both signs, one peak, and row maxima that grow or fall along the keys. {_WORST}",
        "logits",
        ATTENTION,
        feature("logit_size", "size"),
        ratio,
        "size of the planted logit, nats",
        _TO_BOUND,
        reference=BOUND,
    ),
    FigureRow(
        "row-length",
        "Softmax: error / bound against row length",
        f"Rows of scores ever longer, plain and with one entry that takes half of the mass. {_WORST}",
        "context",
        SOFTMAX,
        feature("sk", "n"),
        ratio,
        "row length",
        _TO_BOUND,
        reference=BOUND,
    ),
    FigureRow(
        "softmax-logits",
        "Softmax: error / bound against logit size",
        f"Common offsets of both signs, one peak, rising and falling rows. {_WORST}",
        "logits",
        SOFTMAX,
        feature("logit_size", "size"),
        ratio,
        "size of the logit, nats",
        _TO_BOUND,
        reference=BOUND,
    ),
    FigureRow(
        "position",
        "RoPE: error against position",
        f"Relative error of the rotated vector, in unit roundoffs u: how good the angle is far out. {_WORST}",
        "position",
        ROPE,
        feature("position"),
        relative_error,
        "position, tokens",
        _IN_U,
        y_range=(1e-3, 1e9),
    ),
    FigureRow(
        "position-bound",
        "RoPE: error / bound against position",
        "The bound grows with the error that the contract allows to the angle; where it allows any rotation, the "
        "verdict is VACUOUS.",
        "position",
        ROPE,
        feature("position"),
        ratio,
        "position, tokens",
        _TO_BOUND,
        reference=BOUND,
    ),
    FigureRow(
        "drift",
        "RoPE: drift of the relative-position property",
        "Change of q·k when both positions move by the same step; in exact arithmetic it depends on their distance "
        "only.",
        "drift",
        ROPE,
        feature("position"),
        ratio,
        "common step of both positions, tokens",
        "drift / allowed drift",
        reference=(1.0, "allowed"),
    ),
    FigureRow(
        "sink",
        "Error / bound against attention-sink mass",
        "Share of the weight that the first key takes. Stars are heads of a trained model (largest sink mass of the "
        "layer).",
        "sink",
        ATTENTION,
        feature("sink_mass"),
        ratio,
        "weight on the first key",
        _TO_BOUND,
        x_scale="share",
        reference=BOUND,
        loose="real",
    ),
    FigureRow(
        "sink-error",
        "Error against attention-sink mass",
        "Relative error of O in unit roundoffs u. A sink with small values leaves O to the few other keys.",
        "sink",
        ATTENTION,
        feature("sink_mass"),
        relative_error,
        "weight on the first key",
        _IN_U,
        x_scale="share",
        loose="real",
    ),
)


def plot(run: Run, row: FigureRow) -> Plot | None:
    """The figure of this row; None where the run has no record for it."""
    records = [r for r in run.records if r.op in row.ops]
    chosen = [r for r in records if r.features.get("sweep") == row.sweep]
    if not chosen:
        return None
    loose = [r for r in records if row.loose and row.loose in r.features and r.features.get("sweep") != row.sweep]
    several = len({r.device for r in chosen}) > 1
    panels = []
    for dtype in dtypes_of(chosen):
        named: dict[str, tuple[list[Record], list[Record]]] = defaultdict(lambda: ([], []))
        for place, group in enumerate((chosen, loose)):
            for r in group:
                if r.dtype == dtype:
                    named[_name(r, several)][place].append(r)
        series = [
            Series(name, points(a, row.x, row.y), points(b, row.x, row.y)) for name, (a, b) in sorted(named.items())
        ]
        series = [s for s in series if s.points or s.loose]
        if series:
            panels.append(Panel(dtype, tuple(series)))
    if not panels:
        return None
    names = tuple(sorted({_name(r, several) for r in records}))
    return Plot(
        row.id,
        row.title,
        row.note,
        row.x_label,
        row.y_label,
        tuple(panels),
        names,
        row.x_scale,
        row.y_range,
        row.reference,
    )


def _name(record: Record, several: bool) -> str:
    return f"{record.target} ({record.device})" if several else record.target


def points(records: Iterable[Record], x: Measure, y: Measure) -> tuple[Point, ...]:
    """One point a place: the worst y and the gravest verdict there. Records that were not examined have no point."""
    places: dict[float, list[Record]] = defaultdict(list)
    for record in records:
        place = x(record)
        if place is not None and record.verdict != Verdict.UNSUPPORTED.value:
            places[place].append(record)
    found = []
    for place, rows in sorted(places.items()):
        worst = largest(y(r) for r in rows)
        verdict = gravest(r.verdict for r in rows)
        if worst is not None or verdict in (Verdict.FAIL.value, Verdict.ERROR.value):
            found.append(Point(place, worst, verdict, len(rows)))
    return tuple(found)


def as_table(drawn: Plot) -> Table:
    """The numbers of a figure: a row a target and dtype, a column a place."""
    places = sorted({p.x for panel in drawn.panels for s in panel.series for p in s.points})
    rows: list[tuple[Line, ...]] = []
    for panel in drawn.panels:
        for series in panel.series:
            at = {p.x: p for p in series.points}
            rows.append((series.name, panel.title, *(_cell(at.get(x)) for x in places)))
    head = ("target", "dtype", *(figure(x) for x in places))
    return Table(head, tuple(rows), frozenset(range(2, len(head))), f"{drawn.y_label}, by {drawn.x_label}")


def _cell(point: Point | None) -> str:
    if point is None:
        return NOTHING
    mark = "" if point.verdict == Verdict.PASS.value else f" {point.verdict}"
    return figure(point.y) + mark


def first_overflow(run: Run, ops: frozenset[str]) -> Table | None:
    """From which logit size on a target overflows where its contract permits it, and where it breaks its bound."""
    groups: dict[tuple[str, str], list[tuple[float, Record]]] = defaultdict(list)
    for r in run.records:
        size = feature("logit_size", "size")(r)
        if (
            r.op in ops
            and r.features.get("sweep") == "logits"
            and size is not None
            and r.verdict != Verdict.UNSUPPORTED.value
        ):
            groups[r.target, r.dtype].append((size, r))
    if not groups:
        return None
    rows: list[tuple[Line, ...]] = []
    for (target, dtype), pairs in sorted(
        groups.items(), key=lambda item: (item[0][0], dtypes_of(r for _, r in item[1]))
    ):
        largest_size = max(size for size, _ in pairs)
        none = f"none to {figure(largest_size)}"
        rows.append((target, dtype, *(_first(pairs, test) or none for test in (_exempt, _nonfinite, _broken))))
    head = ("target", "dtype", "first EXEMPT element", "first inf or NaN that is a defect", "first FAIL or ERROR")
    return Table(head, tuple(rows), frozenset({2, 3, 4}), "First overflow: smallest logit size, in nats")


def _first(pairs: list[tuple[float, Record]], test: Callable[[Record], bool]) -> str:
    sizes = [size for size, record in pairs if test(record)]
    return figure(min(sizes)) if sizes else ""


def _exempt(record: Record) -> bool:
    return record.verdict == Verdict.EXEMPT.value or (finite(record.metrics.get("exempt")) or 0) > 0


def _nonfinite(record: Record) -> bool:
    outputs = [m for m in record.metrics.values() if isinstance(m, Mapping)]
    infinite = record.ratio is not None and math.isinf(record.ratio)
    return record.verdict in BAD and (infinite or any((finite(m.get("nonfinite")) or 0) > 0 for m in outputs))


def _broken(record: Record) -> bool:
    return record.verdict in BAD
