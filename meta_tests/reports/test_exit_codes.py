"""Which exit code a run's verdicts, faults and waivers give."""

import sys
from pathlib import Path
from typing import Any

import pytest

from meta_tests.kernels.command import PLAIN, attn_oracle, judging, told
from properties import waivers
from properties.judge.verdict import Verdict
from properties.waivers import Waiver

PROGRAM = [sys.executable, "-m", "reports.command.cli"]


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    path = tmp_path / "kernel.py"
    path.write_text(PLAIN)
    return path


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ((Verdict.PASS,), 0),
        ((Verdict.EXEMPT,), 0),
        ((Verdict.PASS, Verdict.UNSUPPORTED, Verdict.VACUOUS), 0),
        ((Verdict.PASS, Verdict.FAIL), 1),
        ((Verdict.PASS, Verdict.ERROR), 1),
        ((Verdict.UNDECIDED, Verdict.FAIL), 1),
        ((Verdict.PASS, Verdict.UNDECIDED), 3),
        ((Verdict.UNDECIDED,), 3),
        ((Verdict.UNSUPPORTED,), 3),
        ((Verdict.VACUOUS,), 3),
    ],
)
def test_exit_code_of_verdicts(
    verdicts: tuple[Verdict, ...], code: int, kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = told(monkeypatch, tmp_path / "out", judging(*verdicts))
    assert done.code == code, done.words
    assert sorted(r.verdict for r in done.records if r.property != "contract") == sorted(v.value for v in verdicts)


def test_a_fault_of_the_suite_is_no_verdict_on_the_target(
    kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = judging(Verdict.PASS, raising=ZeroDivisionError("in the oracle"))
    done = told(monkeypatch, tmp_path / "out", (*broken, *judging(Verdict.PASS, Verdict.FAIL)[1:]))
    assert done.code == 3, done.words
    assert [r.verdict for r in done.records] == ["FAIL"]
    assert len(done.run.faults) == 1
    assert "ZeroDivisionError: in the oracle" in done.run.faults[0]
    assert "kernels/command.py:" in done.run.faults[0]
    assert "FAULT" in done.words


def test_a_fault_while_conventions_are_probed_is_a_fault(
    kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> dict[str, str]:
        raise ZeroDivisionError("in a probe")

    monkeypatch.setattr("properties.fit.probe", broken)
    done = told(monkeypatch, tmp_path / "out", judging(Verdict.PASS))
    assert done.code == 3
    assert "in a probe" in done.run.faults[0]
    assert not done.records


def test_a_fault_while_the_command_itself_runs_gives_code_three(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("in the command")

    monkeypatch.setattr("reports.command.cli.check", broken)
    code, printed = attn_oracle("verify")
    assert code == 3
    assert "an internal fault" in printed


def test_a_report_that_fails_keeps_the_findings(kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path) -> tuple[Path, ...]:
        raise ZeroDivisionError("in a page")

    monkeypatch.setattr("reports.command.cli.build", broken)
    done = told(monkeypatch, tmp_path / "out", judging(Verdict.FAIL))
    assert done.code == 3
    assert "breaks P1" in done.words
    assert "the report failed, the records are complete" in done.words


def waiver(contains: str) -> Waiver:
    return Waiver("sdpa_math", "known", ("P1",), ("fp32",), (contains,), "a reason", "https://example.org/1", "q = ...")


@pytest.mark.parametrize(
    ("verdict", "contains", "code", "expected"),
    [
        (Verdict.FAIL, "as told", 0, ["WAIVED"]),
        (Verdict.ERROR, "as told", 0, ["WAIVED"]),
        (Verdict.FAIL, "something else", 1, ["FAIL", "STALE_WAIVER"]),
        (Verdict.PASS, "as told", 1, ["PASS", "STALE_WAIVER"]),
    ],
)
def test_waivers_explain_what_they_match_and_are_stale_otherwise(
    verdict: Verdict,
    contains: str,
    code: int,
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waivers, "waivers_of", lambda target: (waiver(contains),) if target == "sdpa_math" else ())
    words = ("sdpa_math", "--op", "attention", "--dtype", "fp32", "--profile", "default")
    done = told(monkeypatch, tmp_path / "out", judging(verdict), *words)
    assert done.code == code, done.words
    assert sorted(r.verdict for r in done.records) == expected
    if code == 0:
        assert "WAIVED    sdpa_math: known (1 records)" in done.words
        assert [(w.key, w.reason) for w in done.run.waivers] == [("known", "a reason")]


def test_a_partial_run_calls_no_waiver_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waivers, "waivers_of", lambda target: (waiver("never"),))
    for words in (["--profile", "quick"], ["--profile", "default", "--property", "P1"]):
        done = told(monkeypatch, tmp_path / "out", judging(Verdict.PASS), "sdpa_math", "--dtype", "fp32", *words)
        assert done.code == 0, done.words


def test_a_waiver_does_not_reach_a_function_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waivers, "waivers_of", lambda target: (waiver("as told"),))
    (tmp_path / "mine.py").write_text(PLAIN + "\n\nsdpa_math = attention\n")
    words = (f"{tmp_path / 'mine.py'}:sdpa_math", "--dtype", "fp32")
    done = told(monkeypatch, tmp_path / "out", judging(Verdict.FAIL), *words)
    assert done.code == 1
    assert [r.target for r in done.records] == ["sdpa_math"]
