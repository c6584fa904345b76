"""The command: what it refuses and how, which exit code a run's verdicts give, and that it runs anywhere."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oracle
from meta_tests.kernels.command import PLAIN, Done, attn_oracle, verify
from oracle.case import Case, save_case
from properties import waivers
from properties.judge.verdict import Basis, Judgement, Verdict
from properties.ops.table import _TABLES
from properties.property import Property
from properties.record import lines
from properties.subject import Input, Subject
from properties.waivers import Waiver

PROGRAM = [sys.executable, "-m", "reports.command.cli"]


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    path = tmp_path / "kernel.py"
    path.write_text(PLAIN)
    return path


# --- requests that cannot be carried out ------------------------------------------------------------------------------

KERNEL = "KERNEL:attention"
WRONG_USE: dict[str, tuple[list[str], str]] = {
    "target": (["nosuch"], "unknown target 'nosuch'; known: sdpa_math"),
    "file": (["nosuch.py:f"], "no file 'nosuch.py'"),
    "function": (["KERNEL:nosuch"], "has no 'nosuch'; it has: attention"),
    "no function": (["KERNEL"], "names no function"),
    "module": (["no.such.module:f"], "no module 'no.such.module'"),
    "not callable": (["KERNEL:torch.__name__"], "is str, not a function"),
    "no signature": (["KERNEL:torch.softmax"], "--op"),
    "op": ([KERNEL, "--op", "nosuch"], "unknown op 'nosuch'; known: attention, attention_backward"),
    "op of a built-in": (["sdpa_math", "--op", "rope"], "sdpa_math is of op attention, not rope"),
    "dtype": ([KERNEL, "--dtype", "fp8"], "unknown dtype 'fp8'; known: fp64, fp32, fp16, bf16"),
    "undeclared dtype": (["eager_attention_fp32", "--dtype", "fp64"], "declares no fp64; it takes fp32, fp16, bf16"),
    "device": ([KERNEL, "--device", "tpu"], "unknown device 'tpu'; known: cpu, cuda, cuda:N"),
    "device number": ([KERNEL, "--device", "cuda:x"], "unknown device 'cuda:x'"),
    "device of a target": (["sdpa_cudnn"], "sdpa_cudnn runs on cuda, not on cpu"),
    "contract": ([KERNEL, "--contract", "flsh"], "unknown contract 'flsh' for attention; known: fp64, fp32, flash"),
    "convention": ([KERNEL, "--convention", "alignment=top_left"], "unknown convention 'alignment' for attention"),
    "convention value": ([KERNEL, "--convention", "lse_base=10"], "'10' of convention lse_base; known: e, 2"),
    "convention form": ([KERNEL, "--convention", "lse_base"], "--convention takes NAME=VALUE"),
    "property": ([KERNEL, "--property", "P99"], "unknown property 'P99' of attention; known:"),
    "profile": ([KERNEL, "--profile", "slow"], "invalid choice: 'slow'"),
    "timeout": ([KERNEL, "--timeout", "0"], "--timeout takes a positive number"),
    "workers": ([KERNEL, "--workers", "-1"], "--workers takes a number from 0"),
    "case": ([KERNEL, "--property", "P1", "--case", "nosuch.json"], "cannot read case nosuch.json"),
    "json": ([KERNEL, "--json", "nosuch/x.json"], "cannot write nosuch/x.json"),
    "out": ([KERNEL, "--out", "KERNEL"], "cannot write records to"),
    "command": (["--frobnicate"], "unrecognized arguments"),
}


@pytest.mark.parametrize("name", WRONG_USE)
def test_wrong_use_is_said_in_one_line_and_gives_code_two(
    name: str, kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words, message = WRONG_USE[name]
    code, printed = attn_oracle("verify", *(w.replace("KERNEL", str(kernel)) for w in words))
    assert code == 2
    last = printed.strip().splitlines()[-1]
    assert last.startswith("attn-oracle")
    assert message in last, printed
    assert "Traceback" not in printed
    assert not list((tmp_path / "out").glob("records-gw*"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nonexistent_module", "ModuleNotFoundError: No module named 'nonexistent_module'"),
        ("def f(q k):", "SyntaxError"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
        ("def f(q, k, v, positions): pass", "required parameter 'positions' is unknown; attention knows alibi_slopes,"),
        ("def f(a, b): pass", "f(a, b) fits no op; name one with --op: attention, attention_backward"),
        ("def softmax(x, dim): pass\nf = softmax", "required parameter 'dim' is unknown; softmax knows x"),
        ("def f(q, k, v): pass\nf.__attn_oracle__ = {'dtypes': 'fp32'}", "dtypes must be a tuple"),
        ("class f:\n    def __init__(self, heads): pass", "is a class whose instances need heads"),
    ],
)
def test_a_file_that_cannot_be_used_is_said_in_one_line(source: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(source)
    code, printed = attn_oracle("verify", f"{tmp_path / 'bad.py'}:f", "--out", tmp_path / "out")
    assert code == 2
    assert printed.count("\n") == 1
    assert message in printed
    assert not (tmp_path / "out").exists()


def test_a_case_must_fit_what_it_is_replayed_on(kernel: Path, tmp_path: Path) -> None:
    x = np.ones((2, 4), dtype=np.float32)
    save_case(Case("softmax", {"x": x}), tmp_path / "cases" / "rows")
    q = np.ones((1, 1, 2, 4), dtype=np.float32)
    save_case(Case("attention", {"q": q, "k": q, "v": q}), tmp_path / "cases" / "heads")
    spec = f"{kernel}:attention"
    for words, message in (
        (["rows.json", spec, "--property", "P1"], "the saved case is of op softmax, attention of attention"),
        (["heads.json", spec], "--case needs a TARGET and a --property"),
        (["heads.json", "--property", "P1"], "--case needs a TARGET and a --property"),
        (["heads.json", spec, "--property", "P1", "--dtype", "bf16"], "is in fp32, not in bf16"),
    ):
        code, printed = attn_oracle("verify", *words[1:], "--case", tmp_path / "cases" / words[0])
        assert (code, message in printed) == (2, True), printed
    torn = tmp_path / "cases" / "heads.safetensors"
    torn.write_bytes(torn.read_bytes()[:-5])
    code, printed = attn_oracle("verify", spec, "--property", "P1", "--case", tmp_path / "cases" / "heads.json")
    assert code == 2
    assert "cannot read case" in printed
    assert printed.count("\n") == 1


def test_report_refuses_what_is_no_run(tmp_path: Path) -> None:
    assert attn_oracle("report", tmp_path / "nosuch")[0] == 2
    code, printed = attn_oracle("report", tmp_path)
    assert code == 2
    assert "has no record files" in printed


def test_targets_lists_what_there_is() -> None:
    code, printed = attn_oracle("targets", "seed_rope_numpy", "sdpa_cudnn", "--json")
    rows = {row["name"]: row for row in json.loads(printed)}
    assert code == 0
    assert rows["seed_rope_numpy"] == {
        "name": "seed_rope_numpy",
        "origin": "own",
        "op": "rope",
        "dtypes": ["fp32", "fp16", "bf16"],
        "devices": ["cpu"],
        "options": ["base", "layout", "scaling"],
        "description": rows["seed_rope_numpy"]["description"],
    }
    assert rows["sdpa_cudnn"]["devices"] == ["cuda"]


def test_targets_that_do_not_conform_are_said_so(tmp_path: Path) -> None:
    short = "\n\ndef short(q, k, v):\n    return attention(q, k, v)[..., :-1]\n"
    (tmp_path / "kernel.py").write_text(PLAIN + short)
    code, printed = attn_oracle("targets", "--check", f"{tmp_path / 'kernel.py'}:attention")
    assert (code, "does not conform" in printed) == (0, False)
    code, printed = attn_oracle("targets", "--check", f"{tmp_path / 'kernel.py'}:short")
    assert code == 1
    assert printed.count("does not conform") == 3
    assert "out has shape [1, 1, 2, 15], expected [1, 1, 2, 16]" in printed


# --- exit codes -------------------------------------------------------------------------------------------------------


def judging(*verdicts: Verdict, detail: str = "as told", raising: BaseException | None = None) -> tuple[Property, ...]:
    """A property table whose checks say what they are told to say, one input each."""

    def edges(subject: Subject) -> Iterable[Input]:
        q = np.ones((1, 1, 1, 4), dtype=subject.fmt.dtype)
        yield Input(Case("attention", {"q": q, "k": q, "v": q}))

    def check(verdict: Verdict) -> Callable[[Subject, Input], Judgement]:
        def told(subject: Subject, given: Input) -> Judgement:
            if raising is not None:
                raise raising
            return Judgement(verdict, Basis.EXACT, detail)

        return told

    return tuple(
        Property(f"P{number}", "told", check(verdict), edges=edges) for number, verdict in enumerate(verdicts, start=1)
    )


def told(monkeypatch: pytest.MonkeyPatch, out: Path, table: tuple[Property, ...], *words: object) -> Done:
    monkeypatch.setitem(_TABLES, "attention", table)
    return verify(out, *(words or (f"{out.parent / 'kernel.py'}:attention", "--dtype", "fp32")))


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
    assert "reports/test_cli.py:" in done.run.faults[0]
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

    monkeypatch.setattr("reports.page.build.build", broken)
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


# --- what a run writes ------------------------------------------------------------------------------------------------


def test_functions_of_the_same_name_stay_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = []
    for folder, name in (("a", "one.py"), ("a", "two.py"), ("b", "one.py")):
        path = tmp_path / folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(PLAIN)
        specs.append(f"{path}:attention")
    done = told(monkeypatch, tmp_path / "out", judging(Verdict.FAIL), *specs, specs[0], "--dtype", "fp32")
    assert sorted(r.target for r in done.records) == sorted([specs[0], specs[2], "two.attention"])
    assert {r.rerun.split()[2] for r in done.records} == set(specs)
    assert len({r.stem for r in done.records}) == 3


def test_json_holds_every_record(kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = judging(Verdict.PASS, Verdict.FAIL)
    words = (f"{kernel}:attention", "--dtype", "fp32", "--json", tmp_path / "all.json")
    done = told(monkeypatch, tmp_path / "out", table, *words)
    rows = json.loads((tmp_path / "all.json").read_text())
    assert [(r["property"], r["verdict"]) for r in rows] == [("P1", "PASS"), ("P2", "FAIL")]
    assert done.run.environments[0]["argv"][0] == "verify"


def test_a_replay_leaves_the_run_it_comes_from_alone(
    kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = told(monkeypatch, tmp_path / "out", judging(Verdict.FAIL))
    stem = done.records[0].stem
    before = {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    code, _ = attn_oracle("verify", f"{kernel}:attention", "--property", "P1", "--case", stem, "--workers", 0)
    assert code == 1
    assert {p: p.read_bytes() for p in before} == before
    assert {r.case for r in verify_records(tmp_path / "out" / "replay")} == {done.records[0].case}
    # Over its own folder, the case that is replayed survives.
    again = verify(tmp_path / "out", f"{kernel}:attention", "--property", "P1", "--case", stem)
    assert again.code == 1
    assert Path(str(stem)).is_file()


def test_the_rerun_command_says_all_that_decided_how_the_target_was_judged(
    kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = ["--op", "attention", "--contract", "fp64", "--convention", "lse_base=2", "--timeout", "7"]
    done = told(monkeypatch, tmp_path / "out", judging(Verdict.FAIL), f"{kernel}:attention", "--dtype", "fp32", *stated)
    words = shlex.split(done.records[0].rerun)
    assert words[:3] == ["attn-oracle", "verify", f"{kernel}:attention"]
    asked = list(zip(words[3::2], words[4::2], strict=True))
    assert asked == [
        ("--dtype", "fp32"),
        ("--property", "P1"),
        *zip(stated[::2], stated[1::2], strict=True),
        ("--case", str(done.records[0].stem)),
    ]


def test_a_replay_asks_the_one_relation_that_the_case_broke(
    kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, other = judging(Verdict.FAIL, Verdict.FAIL)
    table = (replace(broken, title="this one"), replace(other, id="P1", title="another one"))
    q = np.ones((1, 1, 1, 4), dtype=np.float32)
    case = Case("attention", {"q": q, "k": q, "v": q})
    for note, expected in (({"title": "another one"}, ["another one"]), ({}, ["this one", "another one"])):
        _, document = save_case(case, tmp_path / "cases" / "x", note=note)
        words = (f"{kernel}:attention", "--property", "P1", "--case", document)
        done = told(monkeypatch, tmp_path / "out", table, *words)
        assert done.code == 1
        assert [r.title for r in done.records] == expected


def verify_records(folder: Path) -> list[Any]:
    from reports.run.load import load

    return list(load(folder).records)


def test_a_new_run_replaces_the_records_of_the_old_one_and_nothing_else(
    kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    told(monkeypatch, out, judging(Verdict.FAIL))
    (out / "records-gw7.jsonl").write_text('{"kind": "fault", "test": "old", "detail": "old"}\n')
    (out / "notes.txt").write_text("mine")
    done = told(monkeypatch, out, judging(Verdict.PASS))
    assert done.code == 0
    assert not done.run.faults
    assert not list((out / "cases").iterdir())
    assert (out / "notes.txt").read_text() == "mine"


# --- other processes, other places ------------------------------------------------------------------------------------


def spawn(words: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(oracle.__file__).parent.parent)
    return subprocess.run(
        [*PROGRAM, *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_users_own_pytest_settings_do_not_reach_the_suite(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(PLAIN)
    (tmp_path / "conftest.py").write_text("raise RuntimeError('the conftest of somebody else')\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\nfilterwarnings = error\n")
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '--no-such-option'\n")
    (tmp_path / "test_attention.py").write_text("raise RuntimeError('a test of somebody else')\n")
    words = ["verify", "kernel.py:attention", "--property", "P23", "--profile", "quick", "--workers", "2"]
    done = spawn(words, tmp_path, PYTEST_ADDOPTS="--no-such-option", PYTEST_PLUGINS="nosuchplugin")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "report.md").is_file()
    assert "PASS      attention: " in done.stdout
    assert {p.name for p in tmp_path.iterdir()} - {"__pycache__", "out"} == {
        "kernel.py",
        "conftest.py",
        "pytest.ini",
        "pyproject.toml",
        "test_attention.py",
    }


def test_an_interrupt_keeps_the_records_and_blames_nobody(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(PLAIN)
    out = tmp_path / "out"
    root = str(Path(oracle.__file__).parent.parent)
    process = subprocess.Popen(
        [*PROGRAM, "verify", "kernel.py:attention", "--dtype", "fp32", "--workers", "2", "--out", str(out)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    end = time.monotonic() + 120
    while time.monotonic() < end and sum(r is not None and r["kind"] == "record" for _, r in lines(out)) < 10:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 3, printed
    assert "interrupted: only a part was examined" in printed
    assert (out / "report.md").is_file()
    kept = verify_records(out)
    assert len(kept) >= 10
    assert {r.verdict for r in kept} <= {"PASS", "VACUOUS", "EXEMPT"}


@pytest.mark.deep
def test_the_command_runs_from_plain_copies_of_its_packages(tmp_path: Path) -> None:
    import shutil

    root = Path(oracle.__file__).parent.parent
    site = tmp_path / "site"
    for package in ("oracle", "targets", "properties", "reports"):
        shutil.copytree(root / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "kernel.py").write_text(PLAIN)
    done = spawn(["verify", "kernel.py:attention", "--profile", "quick"], tmp_path, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stdout + done.stderr
