"""The pytest plugin: options, the parametrisation over targets, dtypes and properties, records and messages.

Loaded by name (``-p properties.plugin``) by the root conftest and by the ``attn-oracle`` command; there is no pytest11
entry point. Under pytest-xdist every worker writes its own record file; a worker that dies in a call leaves the call's
``begin`` line, and the controller turns that into an ERROR before another worker takes over.
"""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from oracle.case import load_case
from oracle.store.kept import opened as open_store
from properties.judge.verdict import BAD, Verdict
from properties.message import failure_message, rerun_command
from properties.ops.table import properties_for
from properties.options import add_to, rerun_words
from properties.property import Property
from properties.record import Journal, Record, finish, lost, lost_calls, unfinished
from properties.search import examine, hunt
from properties.subject import PROFILES, Input, Subject, subject_for
from properties.waivers import waive
from targets.calling.gradient import with_gradients
from targets.calling.registry import BUILTINS, Unavailable, UnknownTarget, load_builtin, resolve_all
from targets.calling.target import BadTarget, Session, Target
from targets.probing.probes import probe, returns_lse_unasked

TARGETS = pytest.StashKey[list[Target]]()
JOURNAL = pytest.StashKey[Journal]()


def pytest_addoption(parser: pytest.Parser) -> None:
    add_to(parser.getgroup("attn-oracle").addoption, suite=True)


@dataclass(frozen=True, slots=True)
class Examination:
    """One parameter of the suite: a property of one target at one dtype."""

    target: Target
    dtype: str
    prop: Property

    @property
    def label(self) -> str:
        return f"{self.target.name}-{self.dtype}-{self.prop.id}"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "examination: a property of a target")


def chosen_targets(config: pytest.Config) -> list[Target]:
    """The targets asked for, else every built-in that can run here. Usage errors end the session with exit code 4."""
    op, device = config.getoption("--op"), config.getoption("--device").partition(":")[0]
    try:
        if config.getoption("--target"):
            found = resolve_all(config.getoption("--target"), op=op)
            saved = config.getoption("--case")
            return found if saved is None else [t for t in found if t.op == load_case(saved).op]
        found = []
        for builtin in BUILTINS:
            if builtin.by_name:
                continue
            try:
                found.append(load_builtin(builtin))
            except Unavailable:
                continue
        return [t for t in with_gradients(found, op=op) if device in t.devices]
    except (UnknownTarget, BadTarget, Unavailable) as error:
        raise pytest.UsageError(str(error)) from error


def chosen_dtypes(target: Target, asked: list[str]) -> tuple[str, ...]:
    """The dtypes at which to examine a target: those asked for that its op and itself take."""
    known = [d for d in asked or target.dtypes if d in target.row.formats]
    return tuple(d for d in known if "dtypes" not in target.stated or d in target.dtypes)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "examination" not in metafunc.fixturenames:
        return
    config = metafunc.config
    if TARGETS not in config.stash:
        config.stash[TARGETS] = chosen_targets(config)
    only = set(config.getoption("property"))
    cases = [
        Examination(target, dtype, prop)
        for target in config.stash[TARGETS]
        for dtype in chosen_dtypes(target, config.getoption("--dtype"))
        for prop in properties_for(target.op)
        if not only or prop.id in only
    ]
    metafunc.parametrize("examination", cases, ids=[_unique(c.label, i, cases) for i, c in enumerate(cases)])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A module of an op that no target has leaves one item without an examination.
    items[:] = [i for i in items if isinstance(_parameter(i), Examination | None)]


def _parameter(item: pytest.Item) -> object:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("examination")


def _unique(label: str, index: int, cases: list[Examination]) -> str:
    same = [i for i, c in enumerate(cases) if c.label == label]
    return label if len(same) == 1 else f"{label}-{same.index(index) + 1}"


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
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
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
    """In the controller, when a worker died: the calls it was in become ERRORs, and a death in no call a fault."""
    config = report.node.config
    folder = records_folder(config)
    worker = report.node.gateway.id
    died = unfinished(folder, file=f"records-{worker}.jsonl")
    for path, row in died:
        finish(path, row, lost(row))
    if not died:
        journal = Journal(folder, "run")
        journal.note("fault", {"test": crashitem, "detail": f"worker {worker} died outside of any call of a target"})
        journal.close()


@pytest.fixture(scope="session")
def subjects(request: pytest.FixtureRequest) -> dict[tuple[str, str], Subject]:
    """Benches made so far; conventions are probed once per target and dtype."""
    return {}


@pytest.fixture
def subject(
    request: pytest.FixtureRequest,
    examination: Examination,
    journal: Journal,
    subjects: dict[tuple[str, str], Subject],
) -> Subject:
    key = (examination.target.name, examination.dtype)
    if key not in subjects:
        subjects[key] = _subject(request.config, examination, journal)
    return subjects[key]


def _subject(config: pytest.Config, examination: Examination, journal: Journal) -> Subject:
    target, dtype, device = examination.target, examination.dtype, config.getoption("--device")
    stated = dict(item.split("=", 1) for item in config.getoption("--convention"))
    seconds = config.getoption("--call-seconds")
    session = Session(
        seconds=seconds,
        lost=lost_calls(records_folder(config), target.name, dtype),
        expendable=hasattr(config, "workerinput"),
        words=rerun_words(vars(config.option)),
    )
    target = replace(target, session=session)
    whole = not config.getoption("--target") and not config.getoption("--dtype")
    profile = PROFILES[config.getoption("--profile")]
    profile = replace(profile, shared=whole and profile.name != "deep")
    contract = config.getoption("--contract")
    plain = subject_for(target, dtype, device=device, contract=contract, profile=profile)
    journal.context = _context(plain, examination.prop, config)
    # The tiny calls that find conventions may be the ones that never return.
    about = {"target": target.name, "op": target.op, "dtype": dtype, "property": "probe", "features": {}}
    serial = journal.begin(about | {"title": "tiny calls that find conventions", "description": "tiny inputs"})
    if returns_lse_unasked(target, dtype, device=device):
        target = replace(target, parameters={**target.parameters, "return_lse": None})
    asked = target if target.forward is None else replace(target.forward, session=session)
    conventions = {**probe(asked, dtype, device=device), **stated}
    journal.complete(serial, None)
    made = subject_for(target, dtype, device=device, contract=contract, conventions=conventions, profile=profile)
    return replace(made, seconds=seconds)


def _context(subject: Subject, prop: Property, config: pytest.Config) -> dict[str, Any]:
    saved = config.getoption("--case") and str(config.getoption("--case"))
    return {
        "origin": subject.target.origin,
        "device": subject.device,
        "title": prop.title,
        "contract": subject.forms[0].preset if subject.forms else "",
        "rerun": rerun_command(subject, prop.id, config.getoption("--seed"), saved),
    }


def check(config: pytest.Config, subject: Subject, prop: Property, journal: Journal) -> list[Record]:
    """Run one examination and fail the test, with the message, where a record is bad and not waived."""
    folder = records_folder(config)
    seed = config.getoption("--seed")
    saved = config.getoption("--case")
    journal.context = _context(subject, prop, config)
    if saved is not None:
        given, title = saved_input(saved)
        if title not in ("", prop.title):
            # Several relations may share a property's id; the case is of one of them.
            pytest.skip(f"the saved case is about: {title}")
        records = [examine(subject, prop, given, seed=seed, journal=journal, folder=folder)]
    else:
        records = hunt(subject, prop, seed=seed, journal=journal, folder=folder)
    bad = [r for r in records if Verdict(r.verdict) in BAD and waive(r) is None]
    if bad:
        pytest.fail("\n".join(failure_message(r) for r in bad[:3]), pytrace=False)
    if all(r.verdict == Verdict.UNSUPPORTED.value for r in records):
        if records:
            journal.note("untested", _untested(records[0]))
        pytest.skip(records[0].detail if records else "nothing to examine")
    return records


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
    return {
        "target": record.target,
        "op": record.op,
        "dtype": record.dtype,
        "property": record.property,
        "reason": record.detail,
    }
