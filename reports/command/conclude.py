"""The end of a run: what its record files add up to, and its exit code.

Adds what no single check can know: a contract of which no single form is kept by all cases, and waivers that explained
nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oracle.ops.table import op_named
from properties.judge.verdict import Basis, Verdict, exit_code
from properties.record import Journal, Record, finish, lost, unfinished
from properties.waivers import stale, waive
from reports.run.load import Untested, load


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What a run came to.

    records: all of it, waived ones marked, with the run-level ones added. untested: what was not asked, and why.
    faults: what broke in the oracle or the suite. damaged: unreadable lines. interrupted: not all was examined. code:
    the exit code.
    """

    records: tuple[Record, ...]
    untested: tuple[Untested, ...]
    faults: tuple[str, ...]
    damaged: int
    interrupted: bool
    code: int


def conclude(folder: Path, *, complete: bool, interrupted: bool = False) -> Conclusion:
    """Read a run's record files and write its run-level lines.

    ``complete``: every property of its targets was asked. ``interrupted``: somebody stopped it, so that calls that
    never ended are nobody's fault.
    """
    for path, row in unfinished(folder):
        finish(path, row, None if interrupted else lost(row))
    run = load(folder)
    examined = [_waived(r) for r in run.records]
    added = [_waived(r) for r in contract_lines(examined)]
    records = [*examined, *added]
    for waiver in stale(records, complete=complete and not interrupted):
        detail = f"waiver {waiver.key} explained nothing in this run: delete it ({waiver.reason})"
        covered = next(r for r in records if waiver.covers(r))
        added.append(_line(covered, waiver.properties[0], Verdict.STALE_WAIVER, detail))
        records.append(added[-1])
    journal = Journal(folder, "verdicts")
    if interrupted:
        journal.note("interrupted", {})
    for record in added:
        journal.complete(journal.begin({"target": record.target, "property": record.property}), record)
    for record in records:
        if record.waiver is not None:
            journal.note("waiver", _note(record))
    journal.close()
    code = 3 if run.faults else exit_code(r.verdict for r in records)
    if interrupted and code == 0:
        code = 3
    damaged = sum(run.damaged.values())
    return Conclusion(tuple(records), run.untested, run.faults, damaged, interrupted, code)


def _waived(record: Record) -> Record:
    if record.verdict != Verdict.FAIL.value and record.verdict != Verdict.ERROR.value:
        return record
    waiver = waive(record)
    return record if waiver is None else replace(record, verdict=Verdict.WAIVED.value, waiver=waiver.key)


def _note(record: Record) -> dict[str, object]:
    waiver = waive(record)
    why = {} if waiver is None else {"reason": waiver.reason, "link": waiver.link}
    return {"target": record.target, "case": record.case, "property": record.property, "key": record.waiver, **why}


def _line(like: Record, property_id: str, verdict: Verdict, detail: str, **more: Any) -> Record:
    """A record about a whole run, of the same target, dtype and device as another."""
    return Record(
        target=like.target,
        origin=like.origin,
        op=like.op,
        dtype=like.dtype,
        device=like.device,
        property=property_id,
        title=more.pop("title", ""),
        case="",
        description="",
        verdict=verdict.value,
        basis=more.pop("basis", Basis.EXACT.value),
        detail=detail,
        **more,
    )


def _form_kept(op: str, preset: str, worst: Mapping[str, float]) -> tuple[str, float]:
    """The first of the preset's forms, in its own order, that no case exceeds; else the one nearest to it."""
    order = [form.label for form in op_named(op).presets.forms.get(preset, ())]
    kept = [label for label in (*order, *worst) if worst.get(label, float("inf")) <= 1]
    return (kept[0], worst[kept[0]]) if kept else min(worst.items(), key=lambda item: item[1])


def contract_lines(records: Iterable[Record]) -> list[Record]:
    """One record per target and dtype: the form of its contract that all its cases keep, or FAIL without one."""
    groups: dict[tuple[str, str, str, str, str], list[Record]] = defaultdict(list)
    explained: Counter[tuple[str, str, str, str, str]] = Counter()
    for r in records:
        if not r.forms or r.basis != Basis.DERIVED.value:
            continue
        subject = (r.target, r.origin, r.op, r.dtype, r.device)
        # Nothing promised, or too little, is so under some forms only.
        if r.verdict in (Verdict.PASS.value, Verdict.FAIL.value, Verdict.EXEMPT.value, Verdict.VACUOUS.value):
            groups[subject].append(r)
        explained[subject] += r.verdict == Verdict.WAIVED.value
    result = []
    for subject, rows in sorted(groups.items()):
        worst: dict[str, float] = {}
        for r in rows:
            for form, ratio in r.forms.items():
                worst[form] = max(worst.get(form, 0.0), ratio)
        preset = rows[0].contract
        form, ratio = _form_kept(rows[0].op, preset, worst)
        broken = sum(r.verdict == Verdict.FAIL.value for r in rows)
        if broken:
            verdict, detail = Verdict.FAIL, f"contract {preset} is broken by {broken} of {len(rows)} cases"
        elif ratio <= 1:
            verdict, detail = Verdict.PASS, f"contract {preset} kept in its {form} form by all {len(rows)} cases"
        else:
            verdict, detail = Verdict.FAIL, f"no single form of contract {preset} is kept by all {len(rows)} cases"
        if explained[subject]:
            detail += f"; {explained[subject]} more are waived"
        more: dict[str, object] = {"ratio": ratio, "contract": preset, "forms": worst, "basis": Basis.DERIVED.value}
        title = "one form of the contract for all cases"
        result.append(_line(rows[0], "contract", verdict, detail, title=title, **more))
    return result
