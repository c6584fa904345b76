"""The pytest plugin: options, the parametrisation over targets, dtypes and properties, records and messages.

Loaded by name (``-p properties.plugin``) by the root conftest and by the ``attn-oracle`` command; there is no pytest11 entry point.
Works under pytest-xdist: every worker writes its own record file.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from oracle.case import load_case
from properties.bench import PROFILES, Bench, Input, bench_for
from properties.conventions import probe
from properties.message import failure_message
from properties.property import Property, properties_for
from properties.record import Journal, Record
from properties.search import examine, hunt
from properties.verdict import BAD, Verdict
from properties.waivers import waive
from targets.base import BadTarget, Target
from targets.registry import BUILTINS, Unavailable, UnknownTarget, resolve


TARGETS = pytest.StashKey[list[Target]]()
JOURNAL = pytest.StashKey[Journal]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attn-oracle")
    group.addoption(
        "--target",
        action="append",
        default=[],
        help="built-in name, file.py:function or package.module:attr; repeatable",
    )
    group.addoption("--op", default=None, help="op of a target whose signature does not say")
    group.addoption(
        "--dtype", action="append", default=[], help="fp64, fp32, fp16 or bf16; repeatable (default: the target's)"
    )
    group.addoption("--device", default="cpu", help="cpu or cuda")
    group.addoption("--profile", default="default", choices=sorted(PROFILES), help="how much to try")
    group.addoption("--seed", type=int, default=0, help="seed of every search")
    group.addoption("--contract", default=None, help="hold targets to this preset instead of their own")
    group.addoption(
        "--convention", action="append", default=[], metavar="NAME=VALUE", help="state a convention; repeatable"
    )
    group.addoption(
        "--property", action="append", default=[], dest="properties", help="only these properties; repeatable"
    )
    group.addoption("--case", default=None, help="examine this saved case instead of drawing inputs")
    group.addoption("--records", default="out", help="folder of the record files")
    group.addoption("--timeout-call", type=float, default=60.0, help="seconds that one call of a target may take")


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
    specs = config.getoption("--target")
    op = config.getoption("--op")
    if specs:
        try:
            return [resolve(s, op=op) for s in specs]
        except (UnknownTarget, BadTarget, Unavailable) as error:
            raise pytest.UsageError(str(error)) from error
    found = []
    for builtin in BUILTINS:
        try:
            target = resolve(builtin.name)
        except (Unavailable, ModuleNotFoundError):
            continue
        if config.getoption("--device") in target.devices and op in (None, target.op):
            found.append(target)
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "examination" not in metafunc.fixturenames:
        return
    config = metafunc.config
    wanted_ops = getattr(metafunc.module, "OPS", ())
    if TARGETS not in config.stash:
        config.stash[TARGETS] = chosen_targets(config)
    only = set(config.getoption("properties"))
    cases = []
    for target in config.stash[TARGETS]:
        if target.op not in wanted_ops:
            continue
        for dtype in config.getoption("--dtype") or target.dtypes:
            cases += [Examination(target, dtype, p) for p in properties_for(target.op) if not only or p.id in only]
    metafunc.parametrize("examination", cases, ids=[_unique(c.label, i, cases) for i, c in enumerate(cases)])


def _unique(label: str, index: int, cases: list[Examination]) -> str:
    same = [i for i, c in enumerate(cases) if c.label == label]
    return label if len(same) == 1 else f"{label}-{same.index(index) + 1}"


@pytest.fixture(scope="session")
def journal(request: pytest.FixtureRequest) -> Iterator[Journal]:
    """This worker's record file."""
    worker = getattr(request.config, "workerinput", {}).get("workerid", "main")
    opened = Journal(Path(request.config.getoption("--records")), worker)
    request.config.stash[JOURNAL] = opened
    yield opened
    opened.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Whatever escapes a check is a fault of the oracle or of the suite, never a verdict on the target: it is noted as such."""
    if call.excinfo is not None and JOURNAL in item.config.stash:
        if not isinstance(call.excinfo.value, pytest.fail.Exception | pytest.skip.Exception):
            text = " ".join(f"{call.excinfo.typename}: {call.excinfo.value}".split())[:400]
            item.config.stash[JOURNAL].note("fault", {"test": item.name, "detail": text})
    return (yield)


@pytest.fixture(scope="session")
def benches(request: pytest.FixtureRequest) -> dict[tuple[str, str], Bench]:
    """Benches made so far; conventions are probed once per target and dtype."""
    return {}


@pytest.fixture
def bench(request: pytest.FixtureRequest, examination: Examination, benches: dict[tuple[str, str], Bench]) -> Bench:
    key = (examination.target.spec, examination.dtype)
    if key not in benches:
        benches[key] = _bench(request.config, examination)
    return benches[key]


def _bench(config: pytest.Config, examination: Examination) -> Bench:
    device = config.getoption("--device")
    stated = dict(item.split("=", 1) for item in config.getoption("--convention"))
    conventions = {**probe(examination.target, examination.dtype, device=device), **stated}
    made = bench_for(
        examination.target,
        examination.dtype,
        device=device,
        contract=config.getoption("--contract"),
        conventions=conventions,
        profile=PROFILES[config.getoption("--profile")],
    )
    return made


def check(config: pytest.Config, bench: Bench, prop: Property, journal: Journal) -> list[Record]:
    """Run one examination and fail the test, with the message, where a record is bad and not waived."""
    folder = Path(config.getoption("--records"))
    seed = config.getoption("--seed")
    saved = config.getoption("--case")
    if saved is not None:
        records = [examine(bench, prop, Input(load_case(Path(saved))), seed=seed, journal=journal, folder=folder)]
    else:
        records = hunt(bench, prop, seed=seed, journal=journal, folder=folder)
    bad = [r for r in records if Verdict(r.verdict) in BAD and waive(r) is None]
    if bad:
        pytest.fail("\n".join(failure_message(r) for r in bad[:3]), pytrace=False)
    if all(r.verdict == Verdict.UNSUPPORTED.value for r in records):
        if journal is not None and records:
            journal.note("untested", _untested(records[0]))
        pytest.skip(records[0].detail if records else "nothing to examine")
    return records


def _untested(record: Record) -> dict[str, str]:
    return {
        "target": record.target,
        "op": record.op,
        "dtype": record.dtype,
        "property": record.property,
        "reason": record.detail,
    }
