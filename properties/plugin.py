"""The pytest plugin: options, the parametrisation over targets, dtypes and properties, records and messages.

Loaded by name (``-p properties.plugin``) by the root conftest and by the ``attn-oracle`` command; there is no pytest11
entry point. Every worker writes its own record file; a worker that dies in a call leaves the call's ``begin`` line, and
whoever started it turns that into an ERROR before another worker takes over.

What a test found travels in its report (``user_properties``): ``fit``, what the first calls of a target told, and
``bad``, the records that are failures.
"""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from oracle.case import load_case
from oracle.store.kept import opened as open_store
from properties.examinations import Candidate, Examination, candidates, chosen_targets, examinations
from properties.fit import PROPERTY, TITLE, Fit, beyond, fit
from properties.judge.verdict import BAD, Verdict
from properties.message import failure_message, rerun_command
from properties.options import add_to, rerun_words
from properties.order import Part
from properties.record import Journal, Record, bury, lost, lost_calls, plain
from properties.search import examine, hunt
from properties.subject import PROFILES, Input, Subject, subject_for
from properties.waivers import waive
from targets.calling.target import Session, Target

TARGETS = pytest.StashKey[list[Target]]()
JOURNAL = pytest.StashKey[Journal]()
FITS = pytest.StashKey[dict[tuple[str, str], Fit]]()
KNOWN = pytest.StashKey[dict[str, list[str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    add_to(parser.getgroup("attn-oracle").addoption, suite=True)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "examination: a property of a target")
    config.stash[FITS], config.stash[KNOWN] = {}, {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, listed in (("candidate", candidates), ("examination", examinations)):
        if name in metafunc.fixturenames:
            rows = listed(metafunc.config, _targets(metafunc.config))
            labels = [row.label for row in rows]
            metafunc.parametrize(name, rows, ids=[_unique(label, i, labels) for i, label in enumerate(labels)])


def _targets(config: pytest.Config) -> list[Target]:
    if TARGETS not in config.stash:
        config.stash[TARGETS] = chosen_targets(config)
    return config.stash[TARGETS]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A test without anything to ask leaves one item without a parameter.
    items[:] = [i for i in items if isinstance(asked_in(i), Candidate | Examination | None)]


def asked_in(item: pytest.Item) -> object:
    """What a test of the suite asks: a `Candidate`, an `Examination`; None for a test of another kind."""
    callspec = getattr(item, "callspec", None)
    found = {} if callspec is None else callspec.params
    return found.get("examination", found.get("candidate"))


def _unique(label: str, index: int, labels: list[str]) -> str:
    return label if labels.count(label) == 1 else f"{label}-{labels[: index + 1].count(label)}"


def records_folder(config: pytest.Config) -> Path:
    """Where the record files of this run stand."""
    return Path(config.getoption("--records") or "out")


@pytest.fixture(scope="session")
def journal(request: pytest.FixtureRequest) -> Iterator[Journal]:
    """This worker's record file."""
    worker = getattr(request.config, "workerinput", {}).get("workerid", "main")
    opened = Journal(records_folder(request.config), worker)
    request.config.stash[JOURNAL] = opened
    folder, off = request.config.getoption("--store"), request.config.getoption("--no-store")
    with contextlib.nullcontext() if off else open_store(folder) as store:
        yield opened
    if store is not None and store.trouble:
        opened.note("store", {"detail": store.trouble})
    opened.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, object, object]:
    """Whatever escapes a check is a fault of the oracle or of the suite, never a verdict on the target."""
    if call.excinfo is not None and JOURNAL in item.config.stash:
        if not isinstance(call.excinfo.value, pytest.fail.Exception | pytest.skip.Exception | KeyboardInterrupt):
            text = " ".join(f"{call.excinfo.typename}: {call.excinfo.value}".split())[:400]
            last = traceback.extract_tb(call.excinfo.tb)[-1]
            journal = item.config.stash[JOURNAL]
            journal.abandon()
            where = f"{Path(last.filename).parent.name}/{Path(last.filename).name}:{last.lineno}"
            journal.note("fault", {"test": item.name, "detail": f"{text} ({where})"})
    return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: Any, sched: Any) -> None:
    """In xdist's controller, when a worker died: the calls it was in become ERRORs, and a death in no call a fault."""
    found = bury(records_folder(report.node.config), report.node.gateway.id, crashitem)
    report.user_properties = [("bad", [plain(asdict(r)) for r in found])]


@pytest.fixture(scope="session")
def subjects(request: pytest.FixtureRequest) -> dict[tuple[str, str], Subject]:
    """Subjects made so far."""
    return {}


@pytest.fixture
def subject(
    request: pytest.FixtureRequest,
    examination: Examination,
    journal: Journal,
    subjects: dict[tuple[str, str], Subject],
) -> Subject:
    """The subject of an examination; where not even tiny calls of its target succeed the test is skipped."""
    config, key = request.config, (examination.target.name, examination.dtype)
    found = config.stash[FITS].get(key) or settle(config, Candidate(examination.target, examination.dtype), journal)
    if found.misfit:
        pytest.skip(found.misfit)
    if key not in subjects:
        stated = dict(item.split("=", 1) for item in config.getoption("--convention"))
        target = found.taken_by(_with_session(config, examination.target, examination.dtype))
        subjects[key] = _subject(config, target, examination.dtype, {**found.conventions, **stated})
    return subjects[key]


def settle(config: pytest.Config, candidate: Candidate, journal: Journal) -> Fit:
    """The first calls of a target at a dtype; from then on this process knows what they told."""
    target, dtype = _with_session(config, candidate.target, candidate.dtype), candidate.dtype
    subject = _subject(config, target, dtype)
    journal.context = _context(subject, PROPERTY, TITLE, config)
    serial = journal.begin(_about(candidate))
    found = fit(subject)
    journal.complete(serial, None)
    config.stash[FITS][target.name, dtype] = found
    return found


def check_fit(item: pytest.Item, candidate: Candidate, journal: Journal) -> None:
    """`settle`; where nothing can be asked, one record says why, and the test fails or is skipped."""
    found = settle(item.config, candidate, journal)
    item.user_properties.append(("fit", plain(asdict(found))))
    if not found.misfit:
        for reason in beyond(candidate.target.row, found.conventions):
            about = {"target": candidate.target.name, "op": candidate.target.op, "dtype": candidate.dtype}
            journal.note("untested", {**about, "property": "", "reason": reason})
        return
    told = lost({**journal.context, **_about(candidate)})
    record = replace(told, verdict=found.verdict, detail=found.misfit, description=found.description)
    journal.complete(journal.begin(_about(candidate)), record)
    if found.verdict == Verdict.UNSUPPORTED.value:
        journal.note("untested", _untested(record))
        pytest.skip(found.misfit)
    _fail(item, [record])


def _about(candidate: Candidate) -> dict[str, object]:
    told = {"target": candidate.target.name, "op": candidate.target.op, "dtype": candidate.dtype}
    return {**told, "property": PROPERTY, "description": "tiny inputs", "features": {}}


def _fail(item: pytest.Item, bad: list[Record]) -> None:
    item.user_properties.append(("bad", [plain(asdict(r)) for r in bad]))
    pytest.fail("\n".join(failure_message(r) for r in bad[:3]), pytrace=False)


def _with_session(config: pytest.Config, target: Target, dtype: str) -> Target:
    session = Session(
        seconds=config.getoption("--call-seconds"),
        lost=lost_calls(records_folder(config), target.name, dtype),
        expendable=hasattr(config, "workerinput"),
        words=rerun_words(vars(config.option)),
    )
    return replace(target, session=session)


def _subject(
    config: pytest.Config, target: Target, dtype: str, conventions: Mapping[str, str] | None = None
) -> Subject:
    whole = not config.getoption("--target") and not config.getoption("--dtype")
    profile = PROFILES[config.getoption("--profile")]
    profile = replace(profile, shared=whole and profile.name != "deep")
    how: dict[str, Any] = {"device": config.getoption("--device"), "contract": config.getoption("--contract")}
    made = subject_for(target, dtype, conventions=conventions, profile=profile, **how)
    return replace(made, seconds=config.getoption("--call-seconds"))


def _context(subject: Subject, property_id: str, title: str, config: pytest.Config) -> dict[str, object]:
    saved = config.getoption("--case") and str(config.getoption("--case"))
    return {
        "origin": subject.target.origin,
        "device": subject.device,
        "title": title,
        "contract": subject.forms[0].preset if subject.forms else "",
        "rerun": rerun_command(subject, property_id, config.getoption("--seed"), saved),
    }


def check(item: pytest.Item, subject: Subject, part: Part, journal: Journal) -> None:
    """Run one examination and fail the test, with the message, where a record is bad and not waived."""
    config, prop = item.config, part.prop
    folder, seed, saved = records_folder(config), config.getoption("--seed"), config.getoption("--case")
    known = config.stash[KNOWN].setdefault(subject.target.name, [])
    journal.context = _context(subject, prop.id, prop.title, config)
    if saved is not None:
        given, title = saved_input(saved)
        if title not in ("", prop.title):
            # Several relations may share a property's id; the case is of one of them.
            pytest.skip(f"the saved case is about: {title}")
        records = [examine(subject, prop, given, seed=seed, journal=journal, folder=folder)]
    else:
        how: dict[str, Any] = {"part": part, "known": known, "once": bool(config.getoption("maxfail"))}
        records = hunt(subject, prop, seed=seed, journal=journal, folder=folder, **how)
    bad = [r for r in records if Verdict(r.verdict) in BAD and waive(r) is None]
    known += dict.fromkeys(r.diagnosis for r in bad if r.diagnosis and r.diagnosis not in known)
    if bad:
        _fail(item, bad)
    if all(r.verdict == Verdict.UNSUPPORTED.value for r in records):
        if records:
            journal.note("untested", _untested(records[0]))
        pytest.skip(records[0].detail if records else "nothing to examine")


def saved_input(path: Path) -> tuple[Input, str]:
    """A saved case with the facts noted beside it, which some checks draw from, and the title of what it broke.

    Both may be missing. DamagedCase if the case cannot be read.
    """
    case = load_case(path)
    document = path if path.suffix == ".json" else path.with_name(path.name.removesuffix(".safetensors") + ".json")
    note = json.loads(document.read_text(encoding="utf-8")).get("note")
    note = note if isinstance(note, dict) else {}
    features = note.get("features")
    return Input(case, features if isinstance(features, dict) else {}), str(note.get("title") or "")


def _untested(record: Record) -> dict[str, str]:
    return {n: getattr(record, n) for n in ("target", "op", "dtype", "property")} | {"reason": record.detail}
