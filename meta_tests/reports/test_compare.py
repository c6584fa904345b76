"""Two runs side by side: unlike ones are refused, the same questions meet, whatever is worse is found and counted."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meta_tests.kernels.command import attn_oracle
from meta_tests.reports.synthetic import ENVIRONMENT, FAILED, PASSED, append, write
from properties.judge.verdict import Verdict
from properties.record import DamagedRecords, Journal, Record
from reports.command.changes import changes, document
from reports.run.asked import asked
from reports.run.compare import Comparison, compare
from reports.run.load import UnlikeRuns
from reports.run.matching import Pair, pair

EDGE = replace(PASSED, case="00000000000000ed", features={"recipe": "normal", "edge": "square", "sk": 9}, examples=1)
OTHER = replace(EDGE, case="00000000000000ee", features={"recipe": "normal", "edge": "heads", "sk": 4})
LOST = replace(EDGE, case="", title="", verdict="ERROR", ratio=None, forms={}, detail="the process died")
UNSUPPORTED = replace(EDGE, case="", description="", features={}, verdict="UNSUPPORTED", ratio=None, forms={})


def run(folder: Path, records: Iterable[Record], **environment: Any) -> Path:
    """A whole run: a worker's records, and the file that its end writes."""
    write(folder, records, environment={**ENVIRONMENT, **environment})
    return write(folder, worker="verdicts", environment=None)


def compared(tmp_path: Path, old: Iterable[Record], new: Iterable[Record], **how: Any) -> Comparison:
    return compare(run(tmp_path / "old", old), run(tmp_path / "new", new, commit="f" * 40), **how)


def lists(found: Comparison) -> dict[str, int]:
    names = ("failures", "cured", "verdicts", "grown", "shrunk", "gone", "fresh", "inexact")
    return {name: len(getattr(found, name)) for name in names if getattr(found, name)}


# --- runs that are not compared ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 8}, "the runs are unlike in seed: 7 in "),
        ({"profile": "deep"}, "unlike in profile: default in "),
        ({"device": "cuda"}, "unlike in device: cpu in "),
        ({"versions": {"python": "3.12.1", "numpy": "2.4.6"}}, "in versions: python 3.11.7 and 3.12.1; --across"),
        ({"versions": {"python": "3.11.7"}}, "in versions: numpy 2.4.6 and None"),
        ({"argv": ["verify", "other.py:attend"]}, "unlike in target: kernel.py:attend in "),
        ({"argv": ["verify", "kernel.py:attend", "sdpa_math"]}, "unlike in target"),
        ({"argv": ["verify", "kernel.py:attend", "--op", "rope"]}, "unlike in op: none stated in "),
        ({"argv": ["verify", "kernel.py:attend", "--dtype", "fp16"]}, "unlike in dtype"),
        ({"argv": ["verify", "kernel.py:attend", "--property=P1"]}, "unlike in property"),
        ({"argv": ["verify", "kernel.py:attend", "--contract", "fp32"]}, "unlike in contract: none stated in "),
        ({"argv": ["verify", "kernel.py:attend", "--convention", "lse_base=2"]}, "unlike in convention"),
        ({"argv": ["verify", "kernel.py:attend", "--conv", "lse_base=2"]}, "unlike in convention"),
        ({"argv": ["verify", "kernel.py:attend", "--case", "x.json"]}, "unlike in case"),
        ({"argv": ["verify", "kernel.py:attend", "--timeout", "5"]}, "unlike in timeout"),
        ({"argv": None}, "does not note the words of its command"),
    ],
)
def test_unlike_runs_are_refused_by_the_input_in_which_they_differ(
    change: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    old, new = run(tmp_path / "old", [PASSED]), run(tmp_path / "new", [PASSED], **change)
    code, printed = attn_oracle("compare", old, new)
    assert (code, printed.count("\n")) == (2, 1), printed
    assert printed.startswith("attn-oracle: ")
    assert message in printed


@pytest.mark.parametrize(
    "words",
    [
        ["--target", "kernel.py:attend"],
        ["/another/place/kernel.py:attend", "--out=b", "--workers", "4"],
        ["kernel.py:attend", "--seed", "7", "--profile", "default", "--device", "cpu", "--json", "all.json"],
    ],
)
def test_where_and_how_fast_a_run_was_made_does_not_matter(words: list[str], tmp_path: Path) -> None:
    old = run(tmp_path / "old", [PASSED])
    more: dict[str, Any] = {"commit": "f" * 40, "dirty": True, "date": "2032-01-01", "cores": 1}
    new = run(tmp_path / "new", [PASSED], argv=["verify", *words], **more)
    assert compare(old, new).worse == 0
    assert compare(old, new).commits == ("0123456789ab", "ffffffffffff with local changes")


def test_the_order_of_options_does_not_matter() -> None:
    one = ["verify", "a", "b", "--dtype", "fp16", "--dtype", "bf16"]
    other = ["verify", "--dty", "bf16", "b", "--dtype=fp16", "--target", "a"]
    assert asked({"argv": one}) == asked({"argv": other})


def test_other_libraries_are_compared_on_request_and_named(tmp_path: Path) -> None:
    versions = {**ENVIRONMENT["versions"], "numpy": "3.0.0", "attn-oracle": "0.2.0"}
    old, new = run(tmp_path / "old", [PASSED]), run(tmp_path / "new", [PASSED], versions=versions, processor="x86")
    with pytest.raises(UnlikeRuns, match=r"numpy 2\.4\.6 and 3\.0\.0; "):
        compare(old, new)
    code, printed = attn_oracle("compare", old, new, "--across-versions")
    assert code == 0
    assert "versions differ: numpy 2.4.6 and 3.0.0\n" in printed
    assert "processor differs: a processor and x86" in printed


def test_the_suites_own_version_may_differ(tmp_path: Path) -> None:
    versions = {**ENVIRONMENT["versions"], "attn-oracle": "0.2.0"}
    assert compare(run(tmp_path / "a", [PASSED]), run(tmp_path / "b", [PASSED], versions=versions)).notes == ()


def _remove(folder: Path) -> None:
    shutil.rmtree(folder)


def _empty(folder: Path) -> None:
    _remove(folder)
    folder.mkdir()


def _file(folder: Path) -> None:
    _remove(folder)
    folder.write_text("a file")


def _garble(folder: Path) -> None:
    (folder / "records-gw0.jsonl").write_bytes(bytes(range(256)) * 9)


def _truncate(folder: Path) -> None:
    path = folder / "records-gw0.jsonl"
    path.write_bytes(path.read_bytes()[:-40])


def _no_environment(folder: Path) -> None:
    _remove(folder)
    write(folder, [PASSED], environment=None)
    write(folder, worker="verdicts", environment=None)


def _no_record(folder: Path) -> None:
    _remove(folder)
    run(folder, [])


def _note(kind: str) -> Callable[[Path], None]:
    return lambda folder: append(folder, json.dumps({"kind": kind, "test": "t", "detail": "two\nlines"}) + "\n")


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (_remove, "no folder "),
    "empty": (_empty, "has no record files (records-*.jsonl)"),
    "no folder": (_file, "no folder "),
    "binary": (_garble, "damaged lines"),
    "truncated": (_truncate, "records-gw0.jsonl has 1 damaged lines"),
    "no environment": (_no_environment, "does not note its environment"),
    "no record": (_no_record, "holds no record"),
    "no end": (lambda f: (f / "records-verdicts.jsonl").unlink(), "has no records-verdicts.jsonl"),
    "interrupted": (_note("interrupted"), "the run was interrupted"),
    "fault": (_note("fault"), "a fault of the suite: t: two lines"),
    "unlike files": (lambda f: append(f, _environment(commit="e" * 40)), "are of unlike runs: commit"),
    "another schema": (lambda f: append(f, '{"kind": "record", "schema": 99}\n'), "records have schema 99"),
    "unreadable": (lambda f: (f / "records-gw9.jsonl").mkdir(), "cannot read"),
}


def _environment(**change: Any) -> str:
    return json.dumps({"kind": "environment", **ENVIRONMENT, **change}) + "\n"


@pytest.mark.parametrize("side", ["old", "new"])
@pytest.mark.parametrize("name", DAMAGE)
def test_a_folder_that_holds_no_whole_run_is_refused_in_one_line(name: str, side: str, tmp_path: Path) -> None:
    folders = {s: run(tmp_path / s, [PASSED]) for s in ("old", "new")}
    assert attn_oracle("compare", *folders.values())[0] == 0
    break_it, message = DAMAGE[name]
    break_it(folders[side])
    code, printed = attn_oracle("compare", *folders.values())
    assert (code, printed.count("\n")) == (2, 1), printed
    assert message in printed
    assert str(folders[side]) in printed or name == "unlike files"


def test_a_folder_is_not_compared_with_itself(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", [PASSED])
    code, printed = attn_oracle("compare", folder, tmp_path / "run" / ".." / "run")
    assert (code, printed.count("\n")) == (2, 1)
    assert "are the same folder" in printed


def test_runs_of_a_seed_that_changed_on_the_way_are_refused(tmp_path: Path) -> None:
    old, new = run(tmp_path / "old", [PASSED]), run(tmp_path / "new", [PASSED])
    append(new, _environment(seed=8))
    with pytest.raises(UnlikeRuns, match="unlike in seed"):
        compare(old, new)


def test_runs_without_a_common_question_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnlikeRuns, match="no question in common"):
        compared(tmp_path, [PASSED], [replace(PASSED, target="another")])


@pytest.mark.parametrize("factor", ["0.5", "0", "-2", "nan", "inf"])
def test_a_factor_below_one_is_wrong_use(factor: str, tmp_path: Path) -> None:
    old, new = run(tmp_path / "old", [PASSED]), run(tmp_path / "new", [PASSED])
    code, printed = attn_oracle("compare", old, new, f"--factor={factor}")
    assert (code, printed.count("\n")) == (2, 1)
    assert "--factor takes a number from 1" in printed


# --- the same question ------------------------------------------------------------------------------------------------


def met(old: Iterable[Record], new: Iterable[Record]) -> list[tuple[str, str]]:
    """Details of the records of each pair, that of the older one first."""
    return sorted((p.old.detail if p.old else "", p.new.detail if p.new else "") for p in pair(old, new))


def test_the_same_case_meets_itself_in_any_order() -> None:
    records = [replace(r, detail=r.case) for r in (EDGE, OTHER, PASSED)]
    assert met(records, records[::-1]) == sorted((r.case, r.case) for r in records)


@pytest.mark.parametrize("name", ["target", "origin", "op", "dtype", "device", "property"])
def test_records_of_another_subject_do_not_meet(name: str) -> None:
    assert [p.old is None or p.new is None for p in pair([PASSED], [replace(PASSED, **{name: "another"})])] == [
        True
    ] * 2


def test_other_features_of_a_case_and_another_title_keep_the_question() -> None:
    assert len(pair([EDGE], [replace(EDGE, features={"edge": "renamed"})])) == 1
    assert len(pair([EDGE], [replace(EDGE, title="another title")])) == 1
    assert len(pair([EDGE], [replace(EDGE, case="another digest")])) == 1
    assert len(pair([EDGE], [replace(EDGE, case="another digest", features={"edge": "another"})])) == 2


def test_two_properties_of_one_number_stay_apart() -> None:
    twin = replace(EDGE, title="another title", detail="twin")
    assert met([EDGE, twin], [twin, EDGE]) == sorted([(EDGE.detail, EDGE.detail), ("twin", "twin")])


def test_a_search_whose_worst_case_moved_is_one_question() -> None:
    moved = replace(PASSED, case="another digest", features={"sk": 3}, description="smaller")
    assert len(pair([EDGE, PASSED], [EDGE, moved])) == 1 + 1
    # A search of a single draw is told by its place, behind the fixed inputs.
    single = replace(PASSED, examples=1)
    assert len(pair([EDGE, single], [EDGE, replace(moved, examples=1)])) == 1 + 1


def test_a_fixed_input_that_was_replaced_does_not_pass_for_the_old_one() -> None:
    assert len(pair([EDGE], [OTHER])) == 2
    assert len(pair([EDGE], [replace(PASSED, case="drawn", features={"sk": 3}, description="drawn")])) == 2


def test_a_lost_call_meets_the_question_that_it_was_made_for() -> None:
    assert len(pair([EDGE, OTHER], [LOST, OTHER])) == 2
    drawn = replace(LOST, features={"sk": 12345}, description="a drawn one")
    assert len(pair([EDGE, PASSED], [EDGE, drawn])) == 2


def test_records_of_one_key_meet_in_order_and_none_is_lost() -> None:
    old = [replace(EDGE, detail=f"old {i}") for i in range(3)]
    new = [replace(EDGE, detail=f"new {i}") for i in range(2)]
    assert met(old, new) == [("old 0", "new 0"), ("old 1", "new 1"), ("old 2", "")]
    assert met(new, old) == [("", "old 2"), ("new 0", "old 0"), ("new 1", "old 1")]


def test_features_tell_records_of_one_case_apart() -> None:
    one, other = (replace(EDGE, features={"edge": "e", "mask": m}, detail=m) for m in ("heads", "sequences"))
    assert met([one, other], [other, one]) == [("heads", "heads"), ("sequences", "sequences")]
    assert met([one, other], [other]) == [("heads", ""), ("sequences", "sequences")]


# --- what changed -----------------------------------------------------------------------------------------------------


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


# --- what is said -----------------------------------------------------------------------------------------------------


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
