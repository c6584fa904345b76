"""What a run writes, what a rerun repeats, and that it runs anywhere."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import oracle
from meta_tests.kernels.command import PLAIN, attn_oracle, judging, told, verify, verify_records
from oracle.case import Case, save_case
from properties.judge.verdict import Verdict
from properties.record import lines

PROGRAM = [sys.executable, "-m", "reports.command.cli"]


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    path = tmp_path / "kernel.py"
    path.write_text(PLAIN)
    return path


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
        # A shell that starts these tests in the background lets them ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
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
