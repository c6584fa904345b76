"""Two runs side by side: whatever is worse is found and counted, and the listing says the worst first."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meta_tests.kernels.command import attn_oracle
from meta_tests.reports.synthetic import FAILED, PASSED
from meta_tests.reports.two_runs import EDGE, LOST, OTHER, compared, run
from properties.judge.verdict import Verdict
from properties.record import DamagedRecords, Journal, Record
from reports.command.changes import changes, document
from reports.run.compare import Comparison, compare
from reports.run.matching import Pair

UNSUPPORTED = replace(EDGE, case="", description="", features={}, verdict="UNSUPPORTED", ratio=None, forms={})


def lists(found: Comparison) -> dict[str, int]:
    names = ("failures", "cured", "verdicts", "grown", "shrunk", "gone", "fresh", "inexact")
    return {name: len(getattr(found, name)) for name in names if getattr(found, name)}


def at(verdict: str, ratio: float | None = 0.25) -> Record:
    return replace(EDGE, verdict=verdict, ratio=ratio)


def test_identical_runs_differ_in_nothing(tmp_path: Path) -> None:
    records = [PASSED, EDGE, FAILED, at("UNSUPPORTED", None), at("FAIL", math.inf), at("FAIL", math.nan)]
    found = compared(tmp_path, records, records, exact=True)
    assert (lists(found), found.worse, found.common) == ({}, 0, 6)


@pytest.mark.parametrize(
    ("old", "new", "expected", "worse"),
    [
        ("PASS", "FAIL", "failures", True),
        ("PASS", "ERROR", "failures", True),
        ("PASS", "UNDECIDED", "failures", True),
        ("PASS", "STALE_WAIVER", "failures", True),
        ("UNSUPPORTED", "FAIL", "failures", True),
        ("WAIVED", "FAIL", "failures", True),
        ("FAIL", "PASS", "cured", False),
        ("ERROR", "EXEMPT", "cured", False),
        ("STALE_WAIVER", "PASS", "cured", False),
        ("FAIL", "WAIVED", "cured", False),
        ("FAIL", "UNSUPPORTED", "verdicts", False),
        ("FAIL", "ERROR", "verdicts", True),
        ("UNDECIDED", "FAIL", "verdicts", True),
        ("PASS", "VACUOUS", "verdicts", True),
        ("PASS", "UNSUPPORTED", "verdicts", True),
        ("PASS", "WAIVED", "verdicts", True),
        ("VACUOUS", "PASS", "verdicts", False),
        ("UNSUPPORTED", "WAIVED", "verdicts", False),
    ],
)
def test_a_change_of_verdict_is_listed_and_counts_where_it_is_for_the_worse(
    old: str, new: str, expected: str, worse: bool, tmp_path: Path
) -> None:
    found = compared(tmp_path, [at(old), OTHER], [at(new), OTHER])
    assert (lists(found), found.worse) == ({expected: 1}, int(worse))
    code, printed = attn_oracle("compare", tmp_path / "old", tmp_path / "new")
    assert code == int(worse)
    assert f"kernel attention bf16 P1 case {EDGE.case}: {old} 0.25 -> {new} 0.25" in printed


def test_every_verdict_has_its_place(tmp_path: Path) -> None:
    for number, verdict in enumerate(Verdict):
        compared(tmp_path / str(number), [at("PASS")], [at(verdict.value)])


@pytest.mark.parametrize(
    ("old", "new", "expected", "worse"),
    [
        (0.25, 0.51, "grown", True),
        (0.25, 0.5, "inexact", False),
        (0.25, 0.125, "inexact", False),
        (0.25, 0.12, "shrunk", False),
        (0.0, 1e-300, "grown", True),
        (1e-300, 0.0, "shrunk", False),
        (0.25, math.inf, "grown", True),
        (0.25, math.nan, "grown", True),
        (math.nan, 0.25, "shrunk", False),
        (math.inf, 0.25, "shrunk", False),
        (math.inf, 0.0, "shrunk", False),
        (0.25, math.nextafter(0.25, 1), "inexact", False),
        (math.nan, math.inf, "inexact", False),
        (None, 0.25, "inexact", False),
        (0.25, None, "inexact", False),
    ],
)
@pytest.mark.parametrize("verdict", ["PASS", "FAIL", "WAIVED"])
def test_error_that_grew_beyond_the_factor_is_worse(
    old: float | None, new: float | None, expected: str, worse: bool, verdict: str, tmp_path: Path
) -> None:
    found = compared(tmp_path, [at(verdict, old), OTHER], [at(verdict, new), OTHER])
    assert (lists(found), found.worse) == ({expected: 1}, int(worse))
    assert attn_oracle("compare", tmp_path / "old", tmp_path / "new")[0] == int(worse)
    assert attn_oracle("compare", tmp_path / "old", tmp_path / "new", "--exact")[0] == 1


@pytest.mark.parametrize(("factor", "code"), [("1", 1), ("1.5", 1), ("1.7", 0), ("1e300", 0)])
def test_the_factor_is_the_users(factor: str, code: int, tmp_path: Path) -> None:
    compared(tmp_path, [at("PASS", 0.25)], [at("PASS", 0.4)])
    assert attn_oracle("compare", tmp_path / "old", tmp_path / "new", "--factor", factor)[0] == code


@pytest.mark.parametrize(
    ("record", "gone", "fresh"),
    [
        (OTHER, True, False),
        (replace(OTHER, verdict="WAIVED"), True, False),
        (replace(OTHER, verdict="VACUOUS"), True, False),
        (UNSUPPORTED, False, False),
        (replace(OTHER, verdict="FAIL"), False, True),
        (replace(LOST, target="other"), False, True),
    ],
)
def test_a_question_asked_no_more_is_lost_and_a_new_one_must_hold(
    record: Record, gone: bool, fresh: bool, tmp_path: Path
) -> None:
    found = compared(tmp_path / "gone", [EDGE, record], [EDGE])
    assert (lists(found), found.worse) == ({"gone": 1}, int(gone))
    assert attn_oracle("compare", tmp_path / "gone" / "old", tmp_path / "gone" / "new")[0] == int(gone)
    found = compared(tmp_path / "fresh", [EDGE], [EDGE, record])
    assert (lists(found), found.worse) == ({"failures" if fresh else "fresh": 1}, int(fresh))
    assert attn_oracle("compare", tmp_path / "fresh" / "old", tmp_path / "fresh" / "new")[0] == int(fresh)
    for name in ("gone", "fresh"):
        assert attn_oracle("compare", tmp_path / name / "old", tmp_path / name / "new", "--exact")[0] == 1


def test_a_call_that_took_its_process_with_it_is_a_new_failure(tmp_path: Path) -> None:
    old, new = run(tmp_path / "old", [EDGE, OTHER]), run(tmp_path / "new", [OTHER])
    journal = Journal(new, "gw1")
    named = {n: getattr(EDGE, n) for n in ("target", "op", "dtype", "property", "description", "features")}
    journal.begin({**named, "origin": "user"})
    journal.close()
    found = compare(old, new)
    assert (lists(found), found.common) == ({"failures": 1}, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"ratio": math.nextafter(0.25, 1)},
        {"forms": {"plain": 0.25, "split": math.nextafter(0.5, 1)}},
        {"forms": {"plain": 0.25}},
        {"case": "another digest"},
    ],
)
def test_exact_runs_agree_to_the_last_digit_of_every_form(change: dict[str, Any], tmp_path: Path) -> None:
    found = compared(tmp_path, [EDGE], [replace(EDGE, **change)])
    assert (lists(found), found.worse) == ({"inexact": 1}, 0)
    code, printed = attn_oracle("compare", tmp_path / "old", tmp_path / "new", "--exact")
    assert code == 1
    assert "different: 1" in printed


def test_what_only_tells_how_a_record_was_made_is_no_difference(tmp_path: Path) -> None:
    change: dict[str, Any] = {"seconds": 9.0, "rerun": "another", "stem": "elsewhere.json", "detail": "in other words"}
    assert lists(compared(tmp_path, [EDGE], [replace(EDGE, **change)], exact=True)) == {}


def test_a_run_of_some_targets_is_compared_with_one_of_all_on_request(tmp_path: Path) -> None:
    whole = replace(EDGE, property="contract", title="one form", case="", features={}, ratio=0.9)
    old = run(tmp_path / "old", [EDGE, OTHER, replace(EDGE, target="another"), whole], argv=["verify"])
    words = ["verify", "kernel.py:attend", "--dtype", "bf16"]
    new = run(tmp_path / "new", [at("FAIL"), OTHER, replace(whole, ratio=0.1)], argv=words)
    code, printed = attn_oracle("compare", old, new)
    assert code == 2
    assert "--common compares what both asked" in printed
    found = compare(old, new, common=True)
    assert (lists(found), found.common, found.worse) == ({"failures": 1}, 2, 1)
    # What changes the questions themselves is refused all the same.
    shutil.rmtree(new)
    run(new, [EDGE], argv=[*words, "--contract", "fp32"])
    code, printed = attn_oracle("compare", old, new, "--common")
    assert (code, "unlike in contract" in printed) == (2, True)


def test_the_worst_comes_first_and_the_rest_is_counted(tmp_path: Path) -> None:
    old = [replace(EDGE, case=f"{i:016x}", features={"edge": i}, ratio=0.01) for i in range(30)]
    new = [replace(r, verdict="FAIL", ratio=1.0 + i) for i, r in enumerate(old[:-1])]
    new.append(replace(old[-1], verdict="ERROR", ratio=None, detail="raised: two\nlines " + "x" * 300))
    found = compared(tmp_path, old, new)
    lines = changes(found, most=3).splitlines()
    assert lines[2] == "new failures: 30"
    assert "PASS 0.01 -> ERROR; raised: two lines xxx" in lines[3]
    assert "PASS 0.01 -> FAIL 29;" in lines[4]
    assert "PASS 0.01 -> FAIL 28;" in lines[5]
    assert lines[6] == "  ... and 27 more"
    assert lines[7] == "30 records in both runs; worse: 30"
    assert max(map(len, lines)) < 250


def test_the_largest_growth_and_the_largest_gain_come_first(tmp_path: Path) -> None:
    ratios = [(0.1, 0.3), (0.0, 1e-9), (0.1, 0.9), (0.9, 0.1), (0.9, 0.3), (0.9, 0.0)]
    old = [replace(EDGE, case=f"{i}", features={"edge": i}, ratio=a) for i, (a, _) in enumerate(ratios)]
    new = [replace(r, ratio=b) for r, (_, b) in zip(old, ratios, strict=True)]
    found = compared(tmp_path, old, new)
    assert [p.record.case for p in found.grown] == ["1", "2", "0"]
    assert [p.record.case for p in found.shrunk] == ["5", "3", "4"]


def test_what_was_lost_comes_before_what_never_held_and_the_larger_error_first(tmp_path: Path) -> None:
    gone = [replace(EDGE, case=str(i), features={"edge": i}, verdict=v) for i, v in enumerate(("FAIL", "PASS"))]
    fresh = [replace(EDGE, case=str(7 + i), features={"edge": 7 + i}, verdict="FAIL", ratio=2.0 + i) for i in range(3)]
    found = compared(tmp_path, [OTHER, *gone], [OTHER, *fresh[::-1]])
    assert [p.record.verdict for p in found.gone] == ["PASS", "FAIL"]
    assert [p.record.ratio for p in found.failures] == [4.0, 3.0, 2.0]
    # What broke from PASS is worse than what broke as an explained failure.
    old = [replace(EDGE, case=str(i), features={"edge": i}, verdict=v) for i, v in enumerate(("WAIVED", "PASS"))]
    found = compared(tmp_path / "more", old, [replace(r, verdict="FAIL") for r in old])
    assert [p.record.case for p in found.failures] == ["1", "0"]


def test_small_differences_are_counted_and_shown_only_where_they_count(tmp_path: Path) -> None:
    found = compared(tmp_path, [EDGE], [replace(EDGE, ratio=0.2500001)])
    assert "PASS 0.25 -> PASS 0.2500001" not in changes(found)
    assert "other differences of error/bound or of the case: 1" in changes(found)
    assert "PASS 0.25 -> PASS 0.2500001" in changes(replace(found, exact=True))


def test_a_case_that_moved_and_a_side_that_did_not_ask_are_said(tmp_path: Path) -> None:
    moved = replace(PASSED, case="another digest", features={"sk": 3}, description="smaller", ratio=0.9)
    found = compared(tmp_path, [PASSED, OTHER], [moved, replace(UNSUPPORTED, title="a third")])
    said = changes(found)
    assert f"case {PASSED.case} -> another digest: PASS 0.25 -> PASS 0.9" in said
    assert f"case {OTHER.case}: PASS 0.25 -> not asked; {OTHER.title}" in said
    assert "case no case: not asked -> UNSUPPORTED" in said


def test_json_holds_every_list_whole(tmp_path: Path) -> None:
    old = [replace(EDGE, case=f"{i}", features={"edge": i}) for i in range(30)]
    found = compared(tmp_path, old, [replace(r, verdict="FAIL", ratio=math.inf) for r in old])
    code, _ = attn_oracle("compare", tmp_path / "old", tmp_path / "new", "--json", tmp_path / "all.json")
    assert code == 1
    held = json.loads((tmp_path / "all.json").read_text())
    assert held == json.loads(json.dumps(document(found)))
    assert (held["worse"], held["common"], len(held["lists"]["new failures"])) == (30, 30, 30)
    assert held["lists"]["new failures"][0]["new"]["ratio"] == "inf"
    code, printed = attn_oracle("compare", tmp_path / "old", tmp_path / "new", "--json", tmp_path / "nosuch" / "x.json")
    assert (code, "cannot write" in printed) == (2, True)


def test_comparing_changes_no_file(tmp_path: Path) -> None:
    compared(tmp_path, [EDGE, PASSED], [OTHER, FAILED])
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    attn_oracle("compare", tmp_path / "old", tmp_path / "new")
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_pair_is_named_by_its_newer_record() -> None:
    assert Pair(EDGE, OTHER).record is OTHER
    assert Pair(EDGE, None).record is EDGE


def test_damage_is_no_unlikeness(tmp_path: Path) -> None:
    with pytest.raises(DamagedRecords):
        compare(tmp_path / "nosuch", run(tmp_path / "new", [EDGE]))
