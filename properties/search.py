"""Examine one property on one subject: its edge inputs one by one, then a Hypothesis search that shrinks what it finds.

Every edge input gives a record. A search gives one: the smallest failing case, or the passing case nearest to its
bound, with the number of cases tried. Shrinking stops after the profile's time: from then on only cases already known
to fail count, which ends Hypothesis' search.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import seed as seeded

from oracle.case import Case, save_case
from oracle.ops.table import op_named
from properties.checks.metamorphic import Unobserved
from properties.diagnosis.engine import diagnose
from properties.judge.verdict import BAD, Basis, Judgement, Verdict
from properties.message import rerun_command
from properties.order import Part, keyed
from properties.property import Property
from properties.record import Journal, Record
from properties.subject import Input, Subject

# An interpreted target meets all of a list that is no longer.
FEW = 6


# Numbers in the inputs of a case that nobody wants smaller before reading it.
SMALL = 4096


class Refuted(Exception):
    """A drawn case broke the property; always the same type and place, so that Hypothesis shrinks one failure."""


def hunt(
    subject: Subject,
    prop: Property,
    *,
    seed: int = 0,
    journal: Journal | None = None,
    folder: Path | None = None,
    part: Part | None = None,
    known: Sequence[str] = (),
    once: bool = False,
) -> list[Record]:
    """All records of ``prop`` on ``subject``, or of a ``part`` of its inputs. Failing cases are saved under
    ``folder``/cases.

    known: diagnoses of the target's earlier failures: what looks like one of them is not shrunk again. once: after
    the first failure only a smaller one is looked for, if it is not small.
    """
    missing, first = prop.missing(subject), part is not None and part.first
    if missing:
        if first:
            return []
        judgement = Judgement(Verdict.UNSUPPORTED, Basis.EXACT, f"the target has no {missing}")
        return [record_of(subject, prop, Input(Case(subject.op, {}, {})), judgement, seed=seed)]
    records: list[Record] = []
    spent = 0.0
    for edge in _edges(subject, prop, part):
        start = time.perf_counter()
        # Failing edges are diagnosed until they have taken as long as the shrinking of a search may.
        explain = spent < subject.profile.shrink_seconds
        # Most failures of one list have the same cause.
        said = tuple(dict.fromkeys((*known, *(record.diagnosis for record in records if record.diagnosis))))
        how: dict[str, Any] = {"seed": seed, "journal": journal, "folder": folder, "explain": explain, "known": said}
        records.append(examine(subject, prop, edge, **how))
        failed = Verdict(records[-1].verdict) in BAD
        if failed and (once or _enough(records, known, subject.profile.enough)):
            break
        spent += time.perf_counter() - start if records[-1].verdict == Verdict.FAIL.value else 0.0
    bad = [record for record in records if Verdict(record.verdict) in BAD]
    if prop.search is None or _enough(bad, known, subject.profile.enough):
        return records
    if (once and bad and not _small(edge)) or not (first or (once and bad)):
        said = tuple(dict.fromkeys((*known, *(record.diagnosis for record in bad if record.diagnosis))))
        found = _search(subject, prop, seed, journal, folder, said)
        # What a search finds to hold after a failure that ended the list would be a pass of what was not asked.
        records += found if not (once and bad) else [r for r in found if Verdict(r.verdict) in BAD]
    return records


def _enough(records: Sequence[Record], known: Sequence[str], limit: int) -> bool:
    """Whether so many cases of one examination have the look of a defect that was known before it."""
    return bool(limit) and sum(bool(r.diagnosis) and r.diagnosis in known for r in records) >= limit


def _small(given_input: Input) -> bool:
    return sum(array.size for array in given_input.case.arrays.values()) <= SMALL


def _edges(subject: Subject, prop: Property, part: Part | None = None) -> Iterator[Input]:
    """The property's list, or those of it that the part asks.

    In the job of all targets an interpreted one meets every other input of a long one.

    Those are the even ones in some dtypes and the odd ones in fp16: one kernel at all its dtypes meets all of them.
    """
    listed = keyed(prop, prop.edges(subject))
    if subject.target.interpreted and subject.profile.shared:
        edges = list(listed)
        listed = iter(edges[int(subject.dtype == "fp16") :: 2] if len(edges) > FEW else edges)
    asked = 0
    for key, edge in listed:
        if part is None or part.asks(key):
            yield edge
            asked += 1
        # What comes after the last of a few need not be made.
        if part is not None and part.first and asked == len(part.keys):
            return


def _examples(subject: Subject) -> int:
    """How many cases a search draws: fewer where an interpreter takes a hundred times as long a call."""
    share = (16 if subject.profile.shared else 4) if subject.target.interpreted else 1
    return max(1, subject.profile.examples // share)


def examine(
    subject: Subject,
    prop: Property,
    given_input: Input,
    *,
    seed: int = 0,
    journal: Journal | None = None,
    folder: Path | None = None,
    explain: bool = True,
    known: Sequence[str] = (),
) -> Record:
    """Judge one input and record it; a failing case is written to disk, and diagnosed unless ``explain`` says no.

    known: diagnoses of earlier inputs, see `properties.diagnosis.engine.diagnose`.
    """
    start = time.perf_counter()
    serial = _begin(journal, subject, prop, given_input)
    judgement = judge(subject, prop, given_input)
    seconds = time.perf_counter() - start
    diagnosis = explained(subject, given_input, judgement, known) if explain else ""
    record = record_of(
        subject, prop, given_input, judgement, seed=seed, folder=folder, seconds=seconds, diagnosis=diagnosis
    )
    if journal is not None:
        journal.complete(serial, record)
    return record


def explained(subject: Subject, given_input: Input, judgement: Judgement, known: Sequence[str] = ()) -> str:
    """The diagnosis of a failing case; empty for anything else."""
    return diagnose(subject, given_input.case, known=known) if judgement.verdict is Verdict.FAIL else ""


def judge(subject: Subject, prop: Property, given_input: Input) -> Judgement:
    """The property's judgement; UNSUPPORTED, without a call, where the case sets an option that the target lacks."""
    lacks = subject.target.lacks(given_input.case)
    if lacks:
        return Judgement(Verdict.UNSUPPORTED, Basis.EXACT, f"the target has no {lacks[0]}")
    refused = op_named(subject.op).refused(given_input.case, subject.conventions)
    if refused:
        return Judgement(Verdict.UNSUPPORTED, Basis.EXACT, f"the target refuses {refused}")
    with warnings.catch_warnings():
        # What a target warns about is its own affair.
        warnings.simplefilter("ignore")
        try:
            return prop.check(subject, given_input)
        except Unobserved as failed:
            return failed.judgement


def _search(
    subject: Subject,
    prop: Property,
    seed: int,
    journal: Journal | None,
    folder: Path | None,
    said: Sequence[str],
) -> list[Record]:
    assert prop.search is not None
    tried, seconds = 0, 0.0
    known: dict[str, Judgement] = {}
    nearest: tuple[Input, Judgement] | None = None
    smallest: tuple[Input, Judgement] | None = None
    stop_shrinking = float("inf")
    # Who has no time for a small case has none for its diagnosis either: such a failure is a verdict alone.
    shrinks = subject.profile.shrink_seconds > 0

    @seeded(seed)
    @settings(
        max_examples=_examples(subject),
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink) if shrinks else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.quiet,
    )
    @given(prop.search(subject))
    def drawn(example: Input) -> None:
        nonlocal tried, nearest, smallest, stop_shrinking, seconds
        digest = example.case.digest()
        if digest not in known:
            if time.perf_counter() > stop_shrinking:
                return
            tried += 1
            start = time.perf_counter()
            serial = _begin(journal, subject, prop, example)
            known[digest] = judge(subject, prop, example)
            if journal is not None:
                journal.complete(serial, None)
            seconds += time.perf_counter() - start
        judgement = known[digest]
        if judgement.verdict in BAD:
            if smallest is None:
                again = bool(said) and explained(subject, example, judgement, said) in said
                stop_shrinking = time.perf_counter() + (0.0 if again else subject.profile.shrink_seconds)
            smallest = (example, judgement)
            raise Refuted
        if nearest is None or _rank(judgement) > _rank(nearest[1]):
            nearest = (example, judgement)

    with contextlib.suppress(Refuted):
        drawn()
    found = smallest or nearest
    if found is None:
        return []
    serial = _begin(journal, subject, prop, found[0])
    diagnosis = explained(subject, *found, said) if shrinks else ""
    record = record_of(
        subject, prop, *found, seed=seed, folder=folder, seconds=seconds, examples=tried, diagnosis=diagnosis
    )
    if journal is not None:
        journal.complete(serial, record)
    return [record]


def _rank(judgement: Judgement) -> tuple[int, float]:
    order = (Verdict.UNSUPPORTED, Verdict.EXEMPT, Verdict.VACUOUS, Verdict.PASS, Verdict.UNDECIDED)
    place = order.index(judgement.verdict) if judgement.verdict in order else len(order)
    return place, judgement.ratio if judgement.ratio is not None else -1.0


def _begin(journal: Journal | None, subject: Subject, prop: Property, given_input: Input) -> int:
    if journal is None:
        return 0
    row: dict[str, object] = {
        "target": subject.target.name,
        "op": subject.op,
        "dtype": subject.dtype,
        "property": prop.id,
        "description": given_input.case.describe(),
        "features": given_input.features,
    }
    return journal.begin(row)


def record_of(
    subject: Subject,
    prop: Property,
    given_input: Input,
    judgement: Judgement,
    *,
    seed: int = 0,
    folder: Path | None = None,
    seconds: float = 0.0,
    examples: int = 1,
    diagnosis: str = "",
) -> Record:
    """The record of one judgement; saves the case where it is bad and ``folder`` is given."""
    case = given_input.case
    stem = None
    if folder is not None and judgement.verdict in BAD and case.arrays:
        name = f"{subject.target.name}-{subject.dtype}-{prop.id}-{case.digest()}".replace("/", "_").replace(":", "_")
        path = folder / "cases" / name
        save_case(
            case, path, note={"title": prop.title, "features": dict(given_input.features), "detail": judgement.detail}
        )
        stem = str(path.with_suffix(".json"))
    return Record(
        target=subject.target.name,
        origin=subject.target.origin,
        op=subject.op,
        dtype=subject.dtype,
        device=subject.device,
        property=prop.id,
        title=prop.title,
        case=case.digest() if case.arrays else "",
        description=case.describe() if case.arrays else "",
        verdict=judgement.verdict.value,
        basis=judgement.basis.value,
        ratio=judgement.ratio,
        detail=judgement.detail,
        contract=subject.forms[0].preset if subject.forms else "",
        forms=judgement.forms,
        metrics=judgement.metrics,
        worst=judgement.worst,
        features=given_input.features,
        datasheet={"conventions": dict(subject.conventions), "interpreted": subject.target.interpreted},
        stem=stem,
        rerun=rerun_command(subject, prop.id, seed, stem),
        examples=examples,
        seconds=seconds,
        diagnosis=diagnosis,
    )
