"""Record files: what is written is read again, and a process that dies in the middle leaves a file that can be used."""

import json
import math
import subprocess
import sys
import textwrap
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meta_tests.kernels.command import attn_oracle
from properties.judge.verdict import Verdict, exit_code
from properties.record import (
    DIED,
    DamagedRecords,
    Journal,
    Record,
    finish,
    lines,
    lost,
    lost_calls,
    unfinished,
)
from reports.command.conclude import conclude, contract_lines
from reports.run.load import load


def record(**changes: Any) -> Record:
    plain = Record(
        target="t",
        origin="user",
        op="attention",
        dtype="fp32",
        device="cpu",
        property="P1",
        title="error within the bound",
        case="0123456789abcdef",
        description="attention(...)",
        verdict="PASS",
        basis="derived",
    )
    return replace(plain, **changes)


def write(folder: Path, *records: Record, worker: str = "gw0") -> None:
    journal = Journal(folder, worker)
    for r in records:
        journal.complete(journal.begin({"target": r.target, "dtype": r.dtype, "property": r.property}), r)
    journal.close()


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    full = record(
        ratio=math.inf,
        detail="line\nbreaks, \u2028 and \udc80 too",
        forms={"plain": 0.1 + 0.2, "split": math.inf},
        metrics={"out": {"ulp_max": 5e-324}},
        worst={"output": "out", "index": [0, 1], "exact": (0.1).hex()},
        features={"sk": 3, "causal": True, "recipe": "normal"},
        datasheet={"conventions": {"lse_base": "e"}},
        stem="out/cases/x.json",
        rerun="attn-oracle verify 'a b.py:f'",
        examples=15,
        seconds=0.25,
        waiver=None,
    )
    write(tmp_path, full, record(property="P2"))
    assert list(load(tmp_path).records) == [full, record(property="P2")]


def test_infinities_and_nans_travel_as_strings_and_come_back_as_numbers(tmp_path: Path) -> None:
    write(tmp_path, record(ratio=-math.inf, forms={"plain": math.nan}, features={"size": math.nan}))
    text = (tmp_path / "records-gw0.jsonl").read_text()
    for line in text.splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    (back,) = load(tmp_path).records
    assert back.ratio == -math.inf
    assert math.isnan(back.forms["plain"])
    assert math.isnan(float(back.features["size"]))


def test_numpy_values_paths_and_odd_keys_are_written(tmp_path: Path) -> None:
    odd = {"a": np.float32(0.5), "b": np.arange(2), "c": Path("x"), 4: {1.5, 2.5}, "d": np.array(np.nan)}
    write(tmp_path, record(features=odd))
    (back,) = load(tmp_path).records
    assert back.features["a"] == 0.5
    assert back.features["b"] == [0, 1]
    assert back.features["c"] == "x"
    assert sorted(back.features["4"]) == [1.5, 2.5]


def test_a_torn_last_line_costs_that_line_only(tmp_path: Path) -> None:
    write(tmp_path, record(), record(property="P2"))
    path = tmp_path / "records-gw0.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    run = load(tmp_path)
    assert [r.property for r in run.records if r.verdict == "PASS"] == ["P1"]
    assert run.damaged == {path.name: 1}
    concluded = conclude(tmp_path, complete=False)
    assert concluded.damaged == 1
    # The call whose record was torn is an ERROR: what became of it is not known.
    assert [(r.property, r.verdict) for r in concluded.records] == [("P1", "PASS"), ("P2", "ERROR")]
    assert list(load(tmp_path).records) == list(concluded.records)


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[1, 2]",
        "3",
        "\x00\xff",
        "[" * 100000,
        '{"kind": "record", "schema": 1}',
        '{"kind": "record", "schema": 1, "target": 3}',
    ],
)
def test_damaged_lines_are_counted_and_left_out(line: str, tmp_path: Path) -> None:
    write(tmp_path, record())
    with (tmp_path / "records-gw0.jsonl").open("a") as file:
        file.write(line + "\n")
    concluded = conclude(tmp_path, complete=False)
    assert [r.verdict for r in concluded.records] == ["PASS"]
    assert concluded.damaged == 1
    assert concluded.code == 0


def test_a_record_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "records-gw0.jsonl").mkdir()
    with pytest.raises(DamagedRecords, match=r"records-gw0\.jsonl"):
        list(lines(tmp_path))
    code, printed = attn_oracle("report", tmp_path)
    assert code == 2
    assert printed.count("\n") == 1


def test_records_of_another_schema_are_refused_in_one_line(tmp_path: Path) -> None:
    write(tmp_path, record(schema=99))
    code, printed = attn_oracle("report", tmp_path)
    assert code == 2
    assert "schema 99" in printed
    assert printed.count("\n") == 1


# --- calls that take their process with them --------------------------------------------------------------------------

ABOUT = {"target": "t", "op": "attention", "dtype": "fp32", "property": "P18", "description": "attention(q[1])"}
CONTEXT = {"origin": "third_party", "device": "cuda", "title": "shapes", "contract": "fp32", "rerun": "attn-oracle ..."}


def die(folder: Path, *, torn: bool = False) -> None:
    """A process that journals two calls and dies in the second."""
    source = f"""
        import os
        from pathlib import Path
        from properties.record import Journal
        journal = Journal(Path({str(folder)!r}), "gw3")
        journal.context = {CONTEXT!r}
        about = {ABOUT | {"features": {"d": 256}}!r}
        journal.complete(journal.begin(about), None)
        journal.begin(about)
        if {torn}:
            journal._file.write('{{"kind": "rec')
            journal._file.flush()
        os._exit(9)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], check=False)
    assert done.returncode == 9


@pytest.mark.parametrize("torn", [False, True])
def test_a_call_that_killed_its_process_becomes_an_error(torn: bool, tmp_path: Path) -> None:
    die(tmp_path, torn=torn)
    write(tmp_path, record())
    assert [(p.name, row["property"]) for p, row in unfinished(tmp_path)] == [("records-gw3.jsonl", "P18")]
    assert unfinished(tmp_path, file="records-gw0.jsonl") == []
    concluded = conclude(tmp_path, complete=False)
    assert concluded.code == 1
    (dead,) = (r for r in concluded.records if r.verdict == "ERROR")
    assert dead.detail == DIED
    assert {n: getattr(dead, n) for n in ABOUT | CONTEXT} == ABOUT | CONTEXT
    assert dead.features == {"d": 256}
    # It is written down, once: whoever reads the files again finds the same.
    assert not unfinished(tmp_path)
    assert list(load(tmp_path).records) == list(concluded.records)
    assert lost_calls(tmp_path, "t", "fp32") == [DIED]
    assert lost_calls(tmp_path, "t", "fp16") == lost_calls(tmp_path, "other", "fp32") == []


def test_after_an_interrupt_open_calls_are_nobodys_fault(tmp_path: Path) -> None:
    die(tmp_path)
    write(tmp_path, record())
    concluded = conclude(tmp_path, complete=True, interrupted=True)
    assert [r.verdict for r in concluded.records] == ["PASS"]
    assert concluded.code == 3
    assert [r.verdict for r in load(tmp_path).records] == ["PASS"]


def test_an_interrupt_does_not_hide_what_was_found(tmp_path: Path) -> None:
    write(tmp_path, record(verdict="FAIL"))
    assert conclude(tmp_path, complete=True, interrupted=True).code == 1


def test_a_fault_of_the_suite_ends_its_calls_without_a_verdict(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "gw0")
    for _ in range(3):
        journal.begin(ABOUT)
    journal.abandon()
    journal.note("fault", {"test": "x", "detail": "y"})
    journal.close()
    concluded = conclude(tmp_path, complete=False)
    assert concluded.code == 3
    assert not concluded.records


def test_timeouts_count_as_lost_calls_and_other_errors_do_not(tmp_path: Path) -> None:
    texts = ("timeout: no result after 5 s", "raised: ValueError: no", DIED)
    write(tmp_path, *(record(verdict="ERROR", detail=text) for text in texts), record(detail="within the bound"))
    assert lost_calls(tmp_path, "t", "fp32") == [texts[0], texts[2]]


def test_finishing_writes_behind_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "records-gw0.jsonl"
    for content in (b"", b'{"kind": "begin", "serial": 1, "pid": 2}\n', b'{"kind": "beg'):
        path.write_bytes(content)
        finish(path, {"serial": 1, "pid": 2}, lost(ABOUT))
        rows = [row for _, row in lines(tmp_path)]
        last = rows[-1]
        assert last is not None
        assert (last["kind"], last["serial"], last["pid"], last["verdict"]) == ("record", 1, 2, "ERROR")


def test_an_unwritable_folder_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DamagedRecords, match="cannot write records to"):
        Journal(tmp_path / "file" / "out")


# --- what records add up to -------------------------------------------------------------------------------------------


def test_exit_codes_of_all_single_verdicts() -> None:
    codes = {v.value: exit_code([v.value]) for v in Verdict}
    assert {v for v, code in codes.items() if code == 1} == {"FAIL", "ERROR", "STALE_WAIVER"}
    assert {v for v, code in codes.items() if code == 0} == {"PASS", "EXEMPT", "WAIVED"}
    assert {v for v, code in codes.items() if code == 3} == {"UNDECIDED", "UNSUPPORTED", "VACUOUS"}
    assert exit_code([]) == 3


def test_one_form_must_be_kept_by_all_cases() -> None:
    def kept(**forms: float) -> Record:
        return record(forms=forms, ratio=min(forms.values()), contract="flash")

    (line,) = contract_lines([kept(plain=0.5, split=2.0), kept(plain=3.0, split=0.5)])
    assert (line.verdict, line.ratio, line.property) == ("FAIL", 2.0, "contract")
    (line,) = contract_lines([kept(plain=0.5, split=2.0), kept(plain=0.9, split=0.5)])
    assert (line.verdict, line.ratio) == ("PASS", 0.9)
    assert "in its plain form by all 2 cases" in line.detail
    # Where nothing is promised, or too little to tell, is so in some forms only.
    for verdict in ("EXEMPT", "VACUOUS"):
        (line,) = contract_lines(
            [kept(plain=0.5, split=0.5), replace(kept(plain=math.inf, split=0.0), verdict=verdict)]
        )
        assert (line.verdict, line.ratio) == ("PASS", 0.5) and "in its split form by all 2 cases" in line.detail
    both = contract_lines([kept(plain=0.5), replace(kept(plain=2.0), dtype="fp16"), record(basis="calibrated")])
    assert [(r.dtype, r.verdict) for r in both] == [("fp16", "FAIL"), ("fp32", "PASS")]


def test_every_field_of_a_record_is_documented() -> None:
    words = (Record.__doc__ or "").replace("\n", " ")
    assert [f.name for f in fields(Record) if f.name not in words] == []
    assert set(asdict(record())) == {f.name for f in fields(Record)}
