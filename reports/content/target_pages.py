"""One sheet per target and op: its verdicts, key figures, datasheet, what was not tested and what cannot show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from oracle.ops.table import ops
from properties.judge.verdict import BAD, Verdict
from properties.record import Record
from reports.content.blind_spots import seen, spots
from reports.content.wording import NOTHING, count, figure, listed, plural, slug
from reports.page.document import (
    Badge,
    Block,
    Bullets,
    Code,
    Facts,
    Fold,
    Line,
    Link,
    Notice,
    Paragraph,
    Section,
    Table,
    joined,
)
from reports.run.load import Run, Untested
from reports.run.summary import (
    CONTRACT,
    FAMILIES,
    Subject,
    contract_of,
    dtypes_of,
    gravest,
    interpreted,
    model_ratio,
    ordered,
    pooled,
    property_rows,
    tally,
    untested_of,
    worst_ratio,
)


def anchor(subject: Subject) -> str:
    return slug("target", subject.op, subject.target, subject.device)


def findings_anchor(subject: Subject) -> str:
    return slug("findings", subject.op, subject.target, subject.device)


def heading(subject: Subject) -> str:
    """The target's name, its op and device."""
    return f"{subject.target} ({', '.join(w for w in (subject.op, subject.device) if w)})"


def sheet(run: Run, subject: Subject, records: Sequence[Record]) -> Section:
    """Everything the run says about one target of one op on one device."""
    blocks: list[Block] = [_verdict(subject, records)]
    if interpreted(records):
        blocks.append(Notice("warn", "Interpreted on a CPU in numpy's arithmetic: these figures are not GPU figures."))
    blocks += [_properties(records), _figures(records), *_accuracy(records), *_datasheet(records)]
    blocks += _untested(untested_of(run, subject), records)
    hidden = tuple((defect, ": ", reason, ".") for defect, reason in spots(seen(records)))
    blocks.append(Fold(f"What its outputs cannot reveal ({len(hidden)})", (Bullets(hidden),)))
    return Section(anchor(subject), heading(subject), tuple(blocks))


def badges(counts: Mapping[str, int]) -> tuple[Badge, ...]:
    """Verdicts with counts, gravest first."""
    return tuple(Badge(verdict, n) for verdict, n in ordered(counts))


def chips(counts: Mapping[str, int]) -> Line:
    """The same as a line for a cell; a dash for none."""
    return joined(badges(counts), " ") or NOTHING


def _verdict(subject: Subject, records: Sequence[Record]) -> Paragraph:
    counts = tally(records)
    tried = sum(r.examples for r in records if r.property != CONTRACT)
    end: Line = "."
    if any(counts[v.value] for v in BAD):
        end = (": ", Link("its findings", f"#{findings_anchor(subject)}"), ".")
    return Paragraph(joined((chips(counts), joined((f"in {plural(tried, 'examined input')}", end), "")), " "))


def _properties(records: Sequence[Record]) -> Table:
    dtypes = dtypes_of(records)
    rows: list[tuple[Line, ...]] = []
    for row in property_rows(records):
        cells: list[Line] = []
        for dtype in dtypes:
            counts, ratio = row.counts.get(dtype), row.ratios.get(dtype)
            cell = chips(counts) if counts else NOTHING
            cells.append(cell if ratio is None else joined((cell, figure(ratio)), " · "))
        rows.append((row.property, row.title, *cells))
    caption = "Verdicts by property and dtype; the figure is the largest error / bound (G3: rms error / its limit)"
    return Table(("id", "property", *dtypes), tuple(rows), caption=caption)


def _figures(records: Sequence[Record]) -> Table:
    """Worst error / bound, contract and rms ratios: a row each, a column a dtype."""
    dtypes = dtypes_of(records)
    by_dtype = [[r for r in records if r.dtype == d] for d in dtypes]
    rows: list[tuple[Line, ...]] = [
        ("held to contract", *(contract_of(rs)[0] or NOTHING for rs in by_dtype)),
        ("form kept", *(_form(rs) for rs in by_dtype)),
        ("worst error / bound", *(_worst(rs) for rs in by_dtype)),
    ]
    for output in ("out", "lse"):
        ratios = [model_ratio(rs, output) for rs in by_dtype]
        if any(r is not None for r in ratios):
            name = {"out": "O", "lse": "LSE"}[output]
            rows.append((f"rms error of {name} / model kernel's", *(figure(r) for r in ratios)))
    return Table(("", *dtypes), tuple(rows), caption="Contract and worst case")


def _form(records: Sequence[Record]) -> str:
    line = next((r for r in records if r.property == CONTRACT), None)
    if any(r.verdict == Verdict.FAIL.value and r.basis == "derived" for r in records):
        return "none: see findings"
    if line is None:
        return NOTHING
    return next((form for form, ratio in line.forms.items() if ratio <= 1), NOTHING)


def _worst(records: Sequence[Record]) -> str:
    worst = worst_ratio(records)
    return NOTHING if worst is None else f"{figure(worst.ratio)} ({worst.property})"


def _outputs(records: Sequence[Record]) -> list[str]:
    """Outputs of which some record has figures, in the order of their op."""
    row = ops().get(records[0].op) if records else None
    names = ("out",) if row is None else row.outputs
    return [n for n in names if any(isinstance(r.metrics.get(n), dict) for r in records)]


def _accuracy(records: Sequence[Record]) -> list[Block]:
    """ULP figures and bias by dtype, output and kind of input."""
    rows: list[tuple[Line, ...]] = []
    for dtype in dtypes_of(records):
        for output in _outputs(records):
            for family in FAMILIES:
                p = pooled([r for r in records if r.dtype == dtype and family.holds(r)], output)
                if p is None:
                    continue
                broken = f" ({plural(p.nonfinite, 'inf or NaN', 'inf or NaN')})" if p.nonfinite else ""
                figures = (p.ulp_max, p.ulp_p999, p.ulp_mean, *((p.bias, p.z) if family.scaled else (None, None)))
                share = f"{100 * p.exact:.3g} %"
                rows.append((dtype, output, family.name + broken, count(p.n), share, *(figure(f) for f in figures)))
    if not rows:
        return []
    head = (
        *("dtype", "output", "inputs", "elements", "correctly rounded"),
        *("ULP max", "ULP p99.9", "ULP mean", "bias, u", "bias z"),
    )
    caption = (
        "Accuracy: max and p99.9 of the worst case (p99.9: of 1,000 elements or more), mean and bias of all elements; "
        "z as if elements were independent"
    )
    return [Table(head, tuple(rows), frozenset(range(3, 10)), caption)]


def _datasheet(records: Sequence[Record]) -> list[Block]:
    found: dict[str, dict[str, list[str]]] = {}
    for r in records:
        conventions = r.datasheet.get("conventions", {})
        for name, value in conventions.items() if isinstance(conventions, Mapping) else ():
            held = found.setdefault(str(name), {}).setdefault(str(value), [])
            if r.dtype not in held:
                held.append(r.dtype)
    pairs: list[tuple[str, Line]] = []
    for name, values in sorted(found.items()):
        if set(values) == {"accepted"}:
            continue
        told = values if len(values) == 1 else {f"{v} ({listed(d)})": d for v, d in values.items()}
        pairs.append((name.replace("_", " "), joined([Code(v) for v in told], ", ")))
    pairs += _batches(records) if "batch_invariant" not in found else []
    details = dict.fromkeys(f"{r.dtype}: {r.detail}" for r in records if r.property == CONTRACT)
    pairs += [("contract", text) for text in details]
    return [Fold("Datasheet: conventions and contract", (Facts(tuple(pairs)),))] if pairs else []


def _batches(records: Sequence[Record]) -> list[tuple[str, Line]]:
    """Whether a result depends on what is computed beside it, as far as property P11 tried."""
    told = [r for r in records if r.metrics.get("batch_invariant") in (0, 1)]
    varying = sorted({r.dtype for r in told if not r.metrics["batch_invariant"]})
    answer = f"no ({listed(varying)})" if varying else "on every input tried"
    return [("same bits in any batch", answer)] if told else []


def _untested(rows: Sequence[Untested], records: Sequence[Record]) -> list[Block]:
    asked: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        asked.setdefault((row.property, row.reason), set()).add(row.dtype)
    for r in records:
        if r.verdict == Verdict.UNSUPPORTED.value:
            asked.setdefault((r.property, r.detail), set()).add(r.dtype)
    items = tuple(
        (f"{property_id}: {reason}" if property_id else reason)
        + (f" ({listed(sorted(dtypes - {''}))})" if dtypes - {""} else "")
        for (property_id, reason), dtypes in sorted(asked.items())
    )
    return [Fold(f"Not tested ({len(items)})", (Bullets(items),))] if items else []


def overall(records: Sequence[Record]) -> str:
    """The gravest verdict of a subject."""
    return gravest(r.verdict for r in records)
