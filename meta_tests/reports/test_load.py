"""Record files come back as they were written; what is damaged, unfinished or of another run is noticed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meta_tests.reports.synthetic import ENVIRONMENT, FAILED, PASSED, append, write
from properties.record import Journal
from reports.command.conclude import conclude
from reports.run.load import UnlikeRuns, Untested, load


def test_records_come_back_equal(tmp_path: Path) -> None:
    beyond = replace(FAILED, ratio=math.inf, forms={"plain": math.inf, "split": 2.0})
    assert load(write(tmp_path, [PASSED, beyond])).records == (PASSED, beyond)


def test_records_of_all_workers_are_one_run(tmp_path: Path) -> None:
    write(tmp_path, [PASSED], worker="gw0")
    write(tmp_path, [FAILED], worker="gw1", environment=None)
    assert {r.case for r in load(tmp_path).records} == {PASSED.case, FAILED.case}


def test_an_empty_folder_is_a_run_without_records(tmp_path: Path) -> None:
    run = load(tmp_path)
    assert run.records == ()
    assert run.environments == ()
    assert run.damaged == {}


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "record", "target": "ker',
        "[1, 2]",
        '{"kind": "record", "schema": 1, "target": "kernel"}',
        "\x00\x00\x00",
    ],
)
def test_a_damaged_line_is_counted_and_spoils_no_other(tmp_path: Path, line: str) -> None:
    write(tmp_path, [PASSED])
    append(tmp_path, line + "\n")
    write(tmp_path, [FAILED], environment=None)
    run = load(tmp_path)
    assert run.damaged == {"records-gw0.jsonl": 1}
    assert [r.case for r in run.records] == [PASSED.case, FAILED.case]


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "MAYBE"},
        {"forms": {"plain": "wide"}},
        {"features": [1]},
        {"examples": "many"},
        {"target": None},
    ],
)
def test_a_record_that_is_none_is_damaged(tmp_path: Path, change: dict[str, Any]) -> None:
    write(tmp_path, [PASSED])
    row = json.loads((tmp_path / "records-gw0.jsonl").read_text().splitlines()[-1])
    append(tmp_path, json.dumps(row | change) + "\n")
    run = load(tmp_path)
    assert sum(run.damaged.values()) == 1
    assert len(run.records) == 1


def begun(folder: Path, *, count: int = 1, ended: int = 0) -> None:
    journal = Journal(folder, "gw0")
    for _ in range(count):
        row = {
            "target": "kernel",
            "op": "attention",
            "dtype": "fp16",
            "property": "P9",
            "description": "attention(q[1, 2])",
        }
        serial = journal.begin({**row, "features": {"sk": 3}})
        if ended:
            journal.complete(serial, None)
            ended -= 1
    journal.close()


def test_a_call_that_never_ended_is_an_error_with_its_case(tmp_path: Path) -> None:
    begun(tmp_path, count=3, ended=2)
    (record,) = load(tmp_path).records
    assert (record.verdict, record.target, record.dtype, record.property) == ("ERROR", "kernel", "fp16", "P9")
    assert record.description == "attention(q[1, 2])"
    assert record.features == {"sk": 3}
    assert "died or hung" in record.detail


def test_a_call_that_ended_is_no_error(tmp_path: Path) -> None:
    begun(tmp_path, ended=1)
    assert load(tmp_path).records == ()


def test_a_serial_number_that_begins_again_was_cut_off(tmp_path: Path) -> None:
    row = json.dumps({"kind": "begin", "serial": 1, "pid": 5, "target": "kernel", "property": "P1"})
    (tmp_path / "records-gw0.jsonl").write_text(f"{row}\n{row}\n")
    assert [r.verdict for r in load(tmp_path).records] == ["ERROR", "ERROR"]


def test_a_crash_that_the_end_of_the_run_recorded_counts_once(tmp_path: Path) -> None:
    begun(tmp_path, count=2)
    conclude(tmp_path, complete=False)
    assert [r.verdict for r in load(tmp_path).records] == ["ERROR", "ERROR"]


def test_what_the_end_of_a_run_says_agrees_with_what_is_loaded(tmp_path: Path) -> None:
    write(tmp_path, [PASSED, FAILED])
    begun(tmp_path)
    concluded = conclude(tmp_path, complete=False)
    key = str.casefold
    assert sorted((r.verdict for r in load(tmp_path).records), key=key) == sorted(
        (r.verdict for r in concluded.records), key=key
    )


def test_a_waiver_marks_its_record_and_no_other(tmp_path: Path) -> None:
    other = replace(FAILED, property="P9")
    note = {
        "target": "kernel",
        "case": FAILED.case,
        "property": "P1",
        "key": "known",
        "reason": "upstream",
        "link": "https://x.org/1",
    }
    run = load(write(tmp_path, [FAILED, other, PASSED], notes=[("waiver", note)]))
    assert [(r.verdict, r.waiver) for r in run.records] == [("WAIVED", "known"), ("FAIL", None), ("PASS", None)]
    assert [(w.key, w.reason, w.link) for w in run.waivers] == [("known", "upstream", "https://x.org/1")]


def test_notes_of_other_kinds(tmp_path: Path) -> None:
    untested = {"target": "kernel", "op": "attention", "dtype": "bf16", "property": "P7", "reason": "no return_lse"}
    notes = [
        ("untested", untested),
        ("untested", untested),
        ("fault", {"test": "t", "detail": "boom"}),
        ("novelty", {}),
    ]
    run = load(write(tmp_path, notes=notes))
    assert run.untested == (Untested(**untested),)
    assert run.faults == ("t: boom",)
    assert run.unknown == {"novelty": 1}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"commit": "f" * 40}, "commit"),
        ({"dirty": True}, "dirty"),
        ({"versions": {"python": "3.11.7", "numpy": "2.3.1"}}, "versions of numpy is 2.4.6 and 2.3.1"),
        ({"versions": {"python": "3.11.7"}}, "versions of numpy is 2.4.6 and None"),
    ],
)
def test_unlike_runs_are_refused_in_one_line(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    write(tmp_path, [PASSED], worker="a")
    write(tmp_path, [PASSED], worker="b", environment={**ENVIRONMENT, **change})
    with pytest.raises(UnlikeRuns) as caught:
        load(tmp_path)
    text = str(caught.value)
    assert named in text
    assert "\n" not in text
    assert "records-a.jsonl" in text
    assert "records-b.jsonl" in text


def test_another_schema_is_refused_in_one_line(tmp_path: Path) -> None:
    write(tmp_path, [replace(PASSED, schema=2)])
    with pytest.raises(UnlikeRuns, match=r"records-gw0\.jsonl: records have schema 2, this version reads 1"):
        load(tmp_path)


def test_starts_that_differ_in_time_and_seed_only_are_one_run(tmp_path: Path) -> None:
    write(tmp_path, [PASSED], worker="a")
    write(tmp_path, [FAILED], worker="b", environment={**ENVIRONMENT, "date": "2031-02-03T05:00:00+00:00", "seed": 8})
    assert len(load(tmp_path).records) == 2
