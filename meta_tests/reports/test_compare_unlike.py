"""Runs that are not compared: unlike ones, damaged ones, the same one twice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meta_tests.kernels.command import attn_oracle
from meta_tests.reports.synthetic import ENVIRONMENT, PASSED, append, write
from meta_tests.reports.two_runs import compared, run
from properties.options import OPTIONS, Option
from reports.run.asked import asked
from reports.run.compare import compare
from reports.run.load import UnlikeRuns


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
        ({"argv": None}, "new does not note the words of its command"),
        ({"argv": ["verify", "--frobnicate"]}, "new notes a command that this version cannot read: unrecognized"),
        ({"argv": ["verify", "--timeout", "soon"]}, "cannot read: argument --timeout: invalid float value"),
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
        ["--no-store", "kernel.py:attend", "--store", "elsewhere", "--timeout", "60"],
    ],
)
def test_where_and_how_fast_a_run_was_made_does_not_matter(words: list[str], tmp_path: Path) -> None:
    old = run(tmp_path / "old", [PASSED])
    more: dict[str, Any] = {"commit": "f" * 40, "dirty": True, "date": "2032-01-01", "cores": 1}
    new = run(tmp_path / "new", [PASSED], argv=["verify", *words], **more)
    assert compare(old, new).worse == 0
    assert compare(old, new).commits == ("0123456789ab", "ffffffffffff with local changes")


@pytest.mark.parametrize("row", OPTIONS, ids=lambda row: row.flag)
def test_an_option_decides_what_is_examined_unless_it_says_where_or_how_fast(row: Option) -> None:
    noted = {"--seed", "--profile", "--device"}
    value = [] if row.switch else [row.choices[0] if row.choices else "3"]
    differs = asked({"argv": ["verify", row.flag, *value]}) != asked({"argv": ["verify"]})
    assert differs == (row.flag not in {"--out", "--json", "--workers", "--store", "--no-store", *noted})


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
