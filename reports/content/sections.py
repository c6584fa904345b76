"""The sections of a report, in order. Each is a function of the run; one that breaks spoils only itself."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from properties.judge.verdict import BAD, Verdict
from properties.record import Record
from reports.content import plots
from reports.content.findings import all_findings
from reports.content.method import method
from reports.content.target_pages import anchor, chips, heading, sheet
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
    Strong,
    Table,
    joined,
)
from reports.run.load import Run
from reports.run.summary import by_subject, code_of, dtypes_of, findings, ordered, tally, untested_of


@dataclass(frozen=True, slots=True)
class SectionRow:
    """One section: anchor, title and the function that fills it."""

    id: str
    title: str
    fill: Callable[[Run], Iterable[Block]]


def guarded(id: str, title: str, fill: Callable[[], Iterable[Block]]) -> Section:
    """The section, or the section with an error box in place of its content."""
    try:
        return Section(id, title, tuple(fill()))
    except Exception as error:  # whatever a record holds, the other sections are still worth reading
        text = f"This section could not be made: {type(error).__name__}: {error}"
        return Section(id, title, (Notice("bad", text),))


def sections(run: Run) -> tuple[Section, ...]:
    """All sections of the report on this run."""
    return tuple(guarded(row.id, row.title, lambda row=row: row.fill(run)) for row in SECTIONS)  # type: ignore[misc]


# --- summary --------------------------------------------------------------------------------------------------------


def summary(run: Run) -> Iterable[Block]:
    """The run's verdict, what it covered, and the matrix of targets and dtypes."""
    yield _headline(run)
    if run.faults:
        yield Fold(plural(len(run.faults), "fault"), (Bullets(tuple(Code(fault) for fault in run.faults)),))
    for line in _troubles(run):
        yield Notice("warn", line)
    if run.records:
        yield Paragraph(_coverage(run))
        yield _matrix(run)


def _headline(run: Run) -> Notice:
    counts = tally(run.records)
    bad = sum(counts[v.value] for v in BAD)
    if run.faults:
        told = f"{plural(len(run.faults), 'fault')} of oracle or suite: these results are not complete."
        return Notice("bad", (Strong("The suite itself broke. "), told))
    if bad:
        places = findings(run)
        targets = plural(len({f.subject for f in places}), "target")
        broken = plural(
            len({(f.subject, p) for f in places for p in f.properties}), "broken property", "broken properties"
        )
        shown = joined([Badge(v, n) for v, n in ordered(counts) if Verdict(v) in BAD], " ")
        return Notice("bad", (Strong("Findings. "), *shown, f" in {broken} of {targets}."))
    match code_of(run):
        case 0:
            waived = f", {plural(counts['WAIVED'], 'finding')} waived" if counts["WAIVED"] else ""
            return Notice("good", (Strong("No findings. "), f"Every check that could decide was passed{waived}."))
        case _ if counts["UNDECIDED"]:
            return Notice(
                "warn",
                (
                    Strong("Undecided. "),
                    f"{plural(counts['UNDECIDED'], 'check')} could not be decided; that is no pass.",
                ),
            )
        case _:
            return Notice("warn", (Strong("Nothing was checked. "), "No record holds a verdict on a target."))


def _troubles(run: Run) -> Iterable[Line]:
    if run.interrupted:
        yield "This run was interrupted: what is missing here was not examined."
    if run.damaged:
        where = ", ".join(f"{n} in {name}" for name, n in sorted(run.damaged.items()))
        lost = plural(sum(run.damaged.values()), "damaged record line")
        yield f"{lost} left out ({where}); the counts below lack what they held."
    if run.unknown:
        yield "Lines of unknown kind left out: " + ", ".join(
            f"{n} of {kind!r}" for kind, n in sorted(run.unknown.items())
        )
    if not run.environments:
        yield "No line tells where this run took place: its figures cannot be attributed to a commit or to versions."
    elif any(e.get("dirty") for e in run.environments):
        yield "The checkout had uncommitted changes: this run cannot be repeated from its commit alone."


def _coverage(run: Run) -> Line:
    elements = sum(_elements(r) for r in run.records)
    inputs = sum(r.examples for r in run.records if r.case)
    seconds = sum(r.seconds for r in run.records)
    ops = {r.op for r in run.records if r.op}
    return (
        f"{plural(len(by_subject(run)), 'target')} of {plural(len(ops), 'op')}; {plural(inputs, 'input')} examined, "
        f"{plural(elements, 'output element')} compared with proven enclosures, in {figure(seconds)} s. "
        f"{plural(len(run.untested), 'question')} could not be asked."
    )


def _elements(record: Record) -> int:
    return sum(int(m["n"]) for m in record.metrics.values() if isinstance(m, Mapping) and isinstance(m.get("n"), int))


def _matrix(run: Run) -> Table:
    dtypes = dtypes_of(run.records)
    rows: list[tuple[Line, ...]] = []
    for subject, records in by_subject(run).items():
        cells = [chips(tally(r for r in records if r.dtype == d)) for d in dtypes]
        rows.append(
            (
                Link(subject.target, f"#{anchor(subject)}"),
                subject.op or NOTHING,
                *cells,
                str(len(untested_of(run, subject))),
            )
        )
    head = ("target", "op", *dtypes, "not asked")
    return Table(head, tuple(rows), frozenset({len(head) - 1}), "Verdicts by target and dtype")


# --- the rest -------------------------------------------------------------------------------------------------------


def targets(run: Run) -> Iterable[Block]:
    """A sheet per target and op."""
    for subject, records in by_subject(run).items():
        yield guarded(anchor(subject), heading(subject), lambda s=subject, r=records: sheet(run, s, r).blocks)  # type: ignore[misc]
    if not run.records:
        yield Paragraph("None.")


def figures(run: Run) -> Iterable[Block]:
    """Every figure for which the run has records, with its numbers."""
    drawn = 0
    for row in plots.FIGURES:
        made = guarded(slug("figure", row.id), row.title, lambda row=row: _figure(run, row))  # type: ignore[misc]
        if made.blocks:
            drawn += 1
            yield made
    if not drawn:
        yield Paragraph("None of the sweeps was part of this run.")


def _figure(run: Run, row: plots.FigureRow) -> Iterable[Block]:
    made = plots.plot(run, row)
    if made is None:
        return
    yield made
    if row.sweep == "logits":
        overflow = plots.first_overflow(run, row.ops)
        if overflow is not None:
            yield overflow
    yield Fold("The numbers of this figure", (plots.as_table(made),))


def untested(run: Run) -> Iterable[Block]:
    """What was not asked, of whom, and why."""
    groups: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    names: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for u in run.untested:
        key = (u.target, u.op, u.reason)
        groups[key].add(u.dtype)
        names[key].add(u.property)
    if not groups:
        yield Paragraph(
            "The run names nothing that it could not ask. What the outputs cannot reveal stands with each target."
        )
        return
    rows: list[tuple[Line, ...]] = []
    for (target, op, reason), dtypes in sorted(groups.items()):
        asked = listed(sorted(names[target, op, reason] - {""})) or "everything"
        rows.append((target, op or NOTHING, asked, ", ".join(sorted(dtypes - {""})) or "all", reason))
    yield Table(("target", "op", "property", "dtypes", "reason"), tuple(rows))


def provenance(run: Run) -> Iterable[Block]:
    """Commit, versions, machine, seed and budget of the run."""
    for environment in run.environments:
        pairs: list[tuple[str, Line]] = []
        versions = environment.get("versions")
        for name, value in environment.items():
            if name in ("kind", "versions") or value is None or value == "":
                continue
            text = " ".join(str(v) for v in value) if isinstance(value, list) else _plain(value)
            pairs.append((name, Code(text)))
        if isinstance(versions, Mapping):
            pairs.append(("versions", ", ".join(f"{k} {v}" for k, v in versions.items())))
        yield Facts(tuple(pairs))
    if not run.environments:
        yield Paragraph("Not recorded.")
    files = f"{count(len(run.records))} records read from {run.folder.name or run.folder}"
    yield Paragraph(f"{files}; {plural(sum(run.damaged.values()), 'damaged line')} left out.")


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else json.dumps(value, default=str)


SECTIONS: tuple[SectionRow, ...] = (
    SectionRow("summary", "Summary", summary),
    SectionRow("findings", "Findings", all_findings),
    SectionRow("figures", "Figures", figures),
    SectionRow("targets", "Targets", targets),
    SectionRow("untested", "Not tested", untested),
    SectionRow("method", "Method", method),
    SectionRow("provenance", "Provenance", provenance),
)
