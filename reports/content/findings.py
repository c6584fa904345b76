"""Findings as cards: what broke, its smallest case, its worst element, and the commands that repeat it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby

from properties.judge.verdict import Verdict
from properties.record import Record
from reports.content.target_pages import anchor, badges, findings_anchor, heading
from reports.content.wording import NOTHING, count, difference, exact_value, figure, listed, plural
from reports.page.document import (
    Block,
    Card,
    Code,
    Command,
    Facts,
    Fold,
    Inline,
    Line,
    Link,
    Paragraph,
    Section,
    Strong,
    Table,
)
from reports.run.load import Run, Waiver
from reports.run.summary import Finding, dtypes_of, findings, tally


def all_findings(run: Run) -> Iterable[Block]:
    """Every FAIL and ERROR by target, then what was undecided, and what was waived and why."""
    found = findings(run)
    if not found:
        yield Paragraph("None.")
    for subject, group in groupby(found, key=lambda f: f.subject):
        cards = tuple(_card(f) for f in group)
        yield Section(findings_anchor(subject), heading(subject), cards)
    undecided = findings(run, frozenset({Verdict.UNDECIDED.value}))
    if undecided:
        yield Section("undecided", "Undecided", tuple(_card(f, named=True) for f in undecided))
    waived = findings(run, frozenset({Verdict.WAIVED.value}))
    if waived:
        reasons = {(w.target, w.key): w for w in run.waivers}
        yield Section("waived", "Waived", tuple(_waived(f, reasons) for f in waived))


def _card(finding: Finding, *, named: bool = False) -> Card:
    first, others = finding.records[0], finding.records[1:]
    blocks: list[Block] = [Paragraph(first.detail or NOTHING), _evidence(first)]
    if first.rerun:
        blocks.append(Command(first.rerun))
    if others:
        if any(r.ratio is not None for r in finding.records):
            blocks.append(_spread(finding))
        commands = Command("\n\n".join(_further(r) for r in others))
        blocks.append(Fold(f"All {plural(len(others), 'further case')}", (commands,)))
    return Card(badges(tally(finding.records)), _title(finding, named=named), tuple(blocks))


def _title(finding: Finding, *, named: bool) -> Line:
    dtypes = ", ".join(dtypes_of(finding.records))
    what = " ".join(w for w in (listed(finding.properties), finding.title, dtypes and f"({dtypes})") if w)
    if not named:
        return what
    return Link(finding.subject.target, f"#{anchor(finding.subject)}"), f" {what}"


def _spread(finding: Finding) -> Table:
    """How many cases of one finding there are in each dtype, and the worst of each."""
    rows: list[tuple[Line, ...]] = []
    for dtype in dtypes_of(finding.records) or ("",):
        records = [r for r in finding.records if r.dtype == dtype]
        worst = max(records, key=lambda r: r.ratio if r.ratio is not None else -1.0)
        rows.append((dtype or NOTHING, count(len(records)), figure(worst.ratio), Code(worst.description)))
    return Table(("dtype", "cases", "worst error / bound", "the worst case"), tuple(rows), frozenset({1, 2}))


def _further(record: Record) -> str:
    """One more case as shell lines: what it says as a comment, and the command that repeats it."""
    said = " ".join(f"{record.verdict} {record.detail}: {record.description}".split())
    return f"# {said}\n{record.rerun}".rstrip()


def _evidence(record: Record) -> Facts:
    pairs: list[tuple[str, Line]] = []
    if record.description:
        pairs.append(("smallest case", Code(record.description)))
    made = ", ".join(f"{k} {_short(v)}" for k, v in record.features.items())
    if made:
        pairs.append(("made of", made))
    pairs += _worst(record)
    if record.forms:
        ratios = ", ".join(f"{form} {figure(r)}" for form, r in record.forms.items())
        pairs.append(("error / bound", f"{ratios} (contract {record.contract}, {record.basis})"))
    elif record.ratio is not None:
        pairs.append(("error / bound", f"{figure(record.ratio)} ({record.basis})"))
    if record.stem:
        pairs.append(("saved", Code(record.stem)))
    return Facts(tuple(pairs))


def _short(value: object) -> str:
    return figure(value) if isinstance(value, float) else str(value)


def _worst(record: Record) -> list[tuple[str, Line]]:
    """The worst element: place, observed and exact value in decimal and hex, and their difference."""
    worst = record.worst
    if not worst:
        return []
    index = worst.get("index")
    place = ", ".join(str(i) for i in index) if isinstance(index, list | tuple) else ""
    pairs: list[tuple[str, Line]] = [("worst element", Code(f"{worst.get('output', 'out')}[{place}]"))]
    for name in ("observed", "exact"):
        if worst.get(name) is not None:
            pairs.append((name, Code(exact_value(worst[name]))))
    off = difference(worst.get("observed"), worst.get("exact"), worst.get("exact_low"))
    if off is not None:
        pairs.append(("observed − exact", figure(off)))
    return pairs


def _waived(finding: Finding, reasons: Mapping[tuple[str, str], Waiver]) -> Card:
    card = _card(finding, named=True)
    keys = dict.fromkeys(r.waiver for r in finding.records if r.waiver)
    notes: list[Block] = []
    for key in keys:
        waiver = reasons.get((finding.subject.target, key or ""), Waiver(finding.subject.target, key or ""))
        line: list[Inline] = [Strong(f"Waived ({waiver.key}): "), waiver.reason or "the run recorded no reason"]
        if waiver.link.startswith("https://"):
            line += [" ", Link(waiver.link, waiver.link)]
        notes.append(Paragraph(tuple(line)))
    return Card(card.badges, card.title, (*notes, *card.blocks))
