"""What a user reads first: what was understood, why nothing fits, failures as they happen, how far a run is."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from meta_tests.kernels.command import PLAIN, attn_oracle, verify
from properties.message import same_defect
from properties.record import Record
from reports.command.live import Live

KERNELS = (
    PLAIN
    + """

def raises(q, k, v, *, block_m=64):
    raise ValueError("no such kernel")


def not_in_bf16(q, k, v):
    if q.dtype == torch.bfloat16:
        raise ValueError("no bfloat16")
    return attention(q, k, v)


def dies(q, k, v):
    import os

    os._exit(0)


def long_only(q, k, v):
    if q.shape[2] < 16:
        raise ValueError("tiles of 16")
    return attention(q, k, v)


def one_percent(q, k, v):
    return attention(q, k, v) * 1.01
"""
)
ONE = ("--property", "P23", "--property", "P6")


@pytest.fixture
def kernel(tmp_path: Path) -> str:
    (tmp_path / "kernels.py").write_text(KERNELS)
    return str(tmp_path / "kernels.py")


@pytest.mark.parametrize("workers", [0, 2])
def test_where_nothing_fits_one_line_says_so(kernel: str, tmp_path: Path, workers: int) -> None:
    done = verify(tmp_path / "out", f"{kernel}:raises", workers=workers)
    assert done.code == 2
    (line,) = [text for text in done.words.splitlines() if text.startswith("attn-oracle: ")]
    assert line.startswith("attn-oracle: raises, raises_backward: not even a tiny call succeeds (in fp32, fp16, bf16)")
    assert line.endswith("raised: ValueError: no such kernel")
    assert {r.property for r in done.records} == {"probe"}
    assert "ignored: block_m" in done.words


def test_a_dtype_that_does_not_fit_is_told_once_and_the_others_go_on(kernel: str, tmp_path: Path) -> None:
    done = verify(tmp_path / "out", f"{kernel}:not_in_bf16", f"{kernel}:attention", *ONE, "--op", "attention")
    assert done.code == 1
    (record,) = done.of("not_in_bf16", verdict="ERROR")
    assert (record.property, record.dtype) == ("probe", "bf16")
    assert {r.dtype for r in done.of("not_in_bf16", verdict="PASS")} == {"fp32", "fp16"}
    assert {r.dtype for r in done.of("attention")} == {"fp32", "fp16", "bf16"}


def test_a_death_in_the_first_call_ends_in_a_record(kernel: str, tmp_path: Path) -> None:
    words = (f"{kernel}:dies", f"{kernel}:attention", "--dtype", "fp32", "--op", "attention", *ONE)
    done = verify(tmp_path / "out", *words, workers=1)
    assert done.code == 1
    assert [r.detail for r in done.of("dies")] == ["the process died or hung during this call"]
    assert {r.verdict for r in done.of("attention")} == {"PASS"}


def test_a_kernel_that_refuses_only_tiny_calls_is_examined(kernel: str, tmp_path: Path) -> None:
    done = verify(tmp_path / "out", f"{kernel}:long_only", "--dtype", "fp32", "--op", "attention", *ONE)
    assert {r.property for r in done.records} - {"contract"} == {"P6", "P23"}


@pytest.mark.parametrize("workers", [0, 2])
def test_exitfirst_stops_at_the_first_failure(kernel: str, tmp_path: Path, workers: int) -> None:
    done = verify(tmp_path / "out", f"{kernel}:one_percent", "--op", "attention", "-x", workers=workers)
    assert done.code == 1
    bad = [r for r in done.records if r.verdict == "FAIL" and r.property != "contract"]
    assert len({(r.property, r.dtype) for r in bad}) <= max(1, workers)
    assert done.words.count("FAIL: one_percent") == 1
    assert not done.run.faults


def test_the_last_failures_alone_are_asked_again(kernel: str, tmp_path: Path) -> None:
    out, spec = tmp_path / "out", f"{kernel}:not_in_bf16"
    verify(out, spec, "--op", "attention", *ONE)
    Path(kernel).write_text(KERNELS.replace("if q.dtype == torch.bfloat16", "if False"))
    again = verify(out, "--last-failed", "--op", "attention", *ONE)
    assert again.code == 0, again.words
    assert {(r.target, r.dtype) for r in again.records} == {("not_in_bf16", "bf16")}
    third = verify(out, "--last-failed")
    assert (third.code, "nothing failed" in third.words) == (2, True)
    assert "holds no earlier run" in attn_oracle("verify", "--last-failed", "--out", tmp_path / "none")[1]


def test_each_target_ends_in_a_line_that_agrees_with_the_exit_code(kernel: str, tmp_path: Path) -> None:
    words = (f"{kernel}:one_percent", f"{kernel}:attention", "--op", "attention", "--dtype", "fp32", *ONE)
    done = verify(tmp_path / "out", *words)
    ends = {line.split()[1]: line.split()[0] for line in done.words.splitlines() if line[:4] in ("PASS", "FAIL")}
    assert (ends["one_percent:"], ends["attention:"]) == ("FAIL", "PASS")
    assert done.code == 1


def test_progress_is_rewritten_on_a_terminal_alone() -> None:
    for terminal in (True, False):
        stream = io.StringIO()
        live = Live(stream, (), terminal=terminal)
        live.pytest_runtest_logstart("test_property[f-bf16-P1]", None)
        assert ("\r" in stream.getvalue()) is terminal
        assert ("f-bf16-P1" in stream.getvalue()) is terminal


def test_one_defect_is_one_whatever_its_numbers() -> None:
    def failing(diagnosis: str, verdict: str = "FAIL") -> tuple[str, str]:
        return same_defect(
            Record("t", "user", "a", "bf16", "cpu", "P1", "x", "c", "", verdict, "derived", diagnosis=diagnosis)
        )

    assert failing("as if the last key was missing") == failing("as if the last 8 keys were missing")
    assert failing("as if the last key was missing") != failing("as if the first key was missing")
    assert failing("wrong in row 1") == failing("wrong in row 2")


def test_a_run_ends_without_a_word_about_leaks(tmp_path: Path) -> None:
    """Bindings that find their objects alive at the end of a process say so, to the user's terminal."""
    words = [sys.executable, "-m", "reports.command.cli", "verify", "triton_rope", "--profile", "quick"]
    words += ["--dtype", "fp32", "--property", "P23", "--no-store", "--out", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "leak" not in done.stdout + done.stderr
