"""What a failing check says: all that a reader needs, exactly, and a command that really reproduces it."""

import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from meta_tests.kernels.command import PLAIN, Done, verify
from properties.message import failure_message
from properties.record import Record
from reports.command.conclude import Conclusion
from reports.command.terminal import property_order, size, summary

KERNEL = (
    PLAIN
    + """

def one_percent(q, k, v, *, scale=None, is_causal=False):
    return attention(q, k, v, scale=scale, is_causal=is_causal) * 1.01


def with_wrong_lse(q, k, v, *, sm_scale=None):
    scores = q.float() @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).float().transpose(-1, -2)
    lse = torch.logsumexp(scores * (q.shape[-1] ** -0.5 if sm_scale is None else sm_scale), -1)
    return attention(q, k, v, scale=sm_scale), lse + 0.5


def dies(q, k, v):
    import os

    if k.shape[2] == 32:
        os._exit(0)
    return attention(q, k, v)
"""
)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("messages")
    (folder / "my kernel.py").write_text(KERNEL)
    words = ("--dtype", "bf16", "--property", "P6", "--convention", "causal_alignment=top_left")
    return verify(folder / "out", f"{folder / 'my kernel.py'}:one_percent", *words)


def failing(done: Done) -> list[Record]:
    found = [r for r in done.records if r.verdict == "FAIL" and r.property != "contract"]
    assert found, done.words
    return found


def test_a_message_names_what_failed_on_what_and_why(done: Done) -> None:
    record = min(failing(done), key=size)
    text = failure_message(record)
    assert text in done.words
    first, *rest = text.splitlines()
    assert first == f"FAIL: one_percent (attention, bf16, cpu) breaks P6: {record.title}"
    assert all(re.match(r"( {2}| {11})[a-z]", line) for line in rest), text
    labels = [line.split()[0] for line in rest if not line.startswith(" " * 4)]
    assert labels == ["what", "case", "made", "worst", "bound", "looks", "saved", "rerun"]
    assert "bfloat16" in text
    assert "contract flash" in text
    for name, ratio in record.forms.items():
        assert f"{name} {ratio:.3g}" in text


def test_values_stand_in_decimal_and_in_hex_and_agree(done: Done) -> None:
    record = failing(done)[0]
    found = re.findall(r"^ +(exact|observed|error) +(\S+) \((\S+)\)$", failure_message(record), re.MULTILINE)
    assert [name for name, _, _ in found] == ["exact", "observed", "error"]
    exact, observed, error = (float.fromhex(text) for _, _, text in found)
    for _, decimal, text in found:
        assert math.isclose(float(decimal), float.fromhex(text), rel_tol=1e-8)
    assert error == abs(observed - exact)
    # One per cent off, up to the rounding of bfloat16.
    assert 0.002 < abs(observed / exact - 1) < 0.02


def test_the_rerun_command_reproduces_the_failure(done: Done) -> None:
    record = failing(done)[0]
    words = shlex.split(record.rerun)
    assert words[:2] == ["attn-oracle", "verify"]
    assert words[2].endswith("my kernel.py:one_percent")
    assert "causal_alignment=top_left" in words
    again = verify(Path(str(record.stem)).parent.parent / "replay", *words[2:])
    assert again.code == 1
    (repeated,) = failing(again)
    same = ("target", "op", "dtype", "property", "case", "detail", "ratio", "worst", "features")
    assert {n: getattr(repeated, n) for n in same} == {n: getattr(record, n) for n in same}


def test_the_rerun_command_of_an_lse_that_comes_unasked_reproduces_too(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL)
    first = verify(tmp_path / "out", f"{tmp_path / 'kernel.py'}:with_wrong_lse", "--dtype", "fp32", "--property", "P8")
    record = failing(first)[0]
    assert record.worst["output"] == "lse"
    again = verify(tmp_path / "replay", *shlex.split(record.rerun)[2:])
    assert [r.case for r in failing(again)] == [record.case]


@pytest.mark.timeout(240)
def test_the_rerun_command_of_a_death_leads_to_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernel.py").write_text(KERNEL)
    first = verify(tmp_path / "out", "kernel.py:dies", "--dtype", "fp32", "--property", "P18", workers=1)
    (record,) = first.of("dies", verdict="ERROR")
    assert "--out out/replay" in record.rerun
    again = verify(tmp_path / "again", *shlex.split(record.rerun)[2:-2], workers=1)
    (repeated,) = again.of("dies", verdict="ERROR")
    assert (repeated.description, repeated.detail) == (record.description, record.detail)


# --- texts from records alone -----------------------------------------------------------------------------------------


def record(**changes: object) -> Record:
    plain = Record("t", "user", "rope", "fp16", "cuda", "P1", "", "c", "rope(...)", "FAIL", "derived", detail="off")
    return replace(plain, **{"rerun": "attn-oracle verify t", **changes})  # type: ignore[arg-type]


def test_a_message_leaves_out_what_a_record_does_not_have() -> None:
    assert failure_message(record(description="", rerun="")) == "FAIL: t (rope, fp16, cuda) breaks P1\n  what     off"


def test_infinite_and_missing_values_are_said_as_such() -> None:
    worst = {"output": "out", "index": [1], "exact": (0.5).hex(), "observed": "nan"}
    text = failure_message(record(worst=worst, ratio=math.inf, forms={"plain": math.inf}))
    assert "observed nan (nan)" in text
    assert "error/bound by form: plain inf" in text
    assert not re.search(r"^ +error", text, re.MULTILINE)
    worst = {"output": "out", "index": [1], "observed": "inf", "gap": (0.25).hex()}
    text = failure_message(record(worst=worst))
    assert "error    0.25 (0x1.0000000000000p-2)" in text
    assert "exact" not in text


@pytest.mark.parametrize(
    ("basis", "words"), [("derived", "derived from contract c"), ("calibrated", "calibrated"), ("exact", "exactly")]
)
def test_the_bound_says_what_it_rests_on(basis: str, words: str) -> None:
    assert words in failure_message(record(basis=basis, contract="c", forms={"plain": 2.0}))
    if basis == "exact":
        assert "holds exactly or not at all" in failure_message(record(basis=basis))
        assert "bound" not in failure_message(record(basis=basis, verdict="ERROR"))


def concluded(*records: Record) -> Conclusion:
    return Conclusion(records, (), (), 0, False, 1)


def test_a_summary_shows_the_smallest_case_of_each_finding() -> None:
    rows = [record(description=f"case of {n}", features={"n": n}) for n in (512, 3, 64)]
    text = summary(concluded(*rows, replace(rows[0], dtype="bf16")), ())
    assert "case of 3" in text
    assert "case of 64" not in text
    assert "3 more failing cases; also in bf16" in text
    assert "4 FAIL" in text


def test_errors_of_one_kind_are_told_once() -> None:
    rows = [record(verdict="ERROR", property=p, detail="raised: no GPU") for p in ("P10", "P2", "P1")]
    text = summary(concluded(*rows), ())
    assert text.count("raised: no GPU") == 1
    assert "2 more failing cases; in P1, P2 too" in text


def test_a_summary_is_no_longer_than_its_messages() -> None:
    rows = [record(property=f"P{n}") for n in range(20)]
    text = summary(concluded(*rows), (), messages=3)
    assert text.count("breaks P") == 3
    assert "17 more findings: see the report" in text


def test_properties_are_listed_in_the_order_of_their_numbers() -> None:
    assert sorted(["P10", "G3", "P2", "contract", "probe"], key=property_order) == [
        "G3",
        "P2",
        "P10",
        "contract",
        "probe",
    ]
