"""Whole runs with an empty, a warm, a damaged and no store: the same records, and at most one line about the store."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meta_tests.kernels.command import PLAIN, Done, verify
from oracle.case import Case
from oracle.formats import format_of
from oracle.store.database import FILE
from oracle.store.kept import Store, opened
from properties.judge import weigh
from properties.judge.pipeline import certify
from properties.judge.verdict import Judgement, Verdict
from properties.record import lines
from properties.subject import subject_for
from targets.calling.target import target_from

WORDS = ("--dtype", "bf16", "--property", "P1", "--property", "P4", "--property", "P25")


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    path = tmp_path / "kernel.py"
    path.write_text(PLAIN)
    return path


def records(done: Done) -> list[dict[str, Any]]:
    """What a run found, without the time that it took and the folder that it wrote to."""
    rows = [asdict(record) for record in done.records]
    for row in rows:
        for name in ("seconds", "stem", "rerun"):
            del row[name]
    return sorted(rows, key=lambda row: json.dumps(row, sort_keys=True))


def found(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """Filled with the counts of every store that is closed from now on."""
    seen: Counter[tuple[str, str]] = Counter()
    close = Store.close

    def closing(self: Store) -> None:
        seen.update(self.counts)
        close(self)

    monkeypatch.setattr(Store, "close", closing)
    return seen


def test_records_are_the_same_with_an_empty_a_warm_and_no_store(
    kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, kept = f"{kernel}:attention", ("--store", tmp_path / "store")
    without = verify(tmp_path / "a", spec, *WORDS, "--no-store")
    counts = found(monkeypatch)
    empty = verify(tmp_path / "b", spec, *WORDS, *kept)
    assert counts["judgements", "made"] > 10 and not counts["judgements", "disk"]
    counts.clear()
    warm = verify(tmp_path / "c", spec, *WORDS, *kept)
    assert counts["judgements", "disk"] > 10 and not counts["judgements", "made"]
    assert records(without) == records(empty) == records(warm)
    assert without.code == empty.code == warm.code == 0
    assert "store" not in empty.words.replace(str(tmp_path), "") and len(records(warm)) > 10


def judgements(function: Any, case: Case, folder: Path | None) -> tuple[Judgement, Counter[tuple[str, str]]]:
    """What `certify` says of a function at the dtype of the case, and where the store had it from."""
    subject = subject_for(target_from(function, spec="kernel.py:attention"), format_of(case.arrays["q"]).name)
    if folder is None:
        return certify(subject, case), Counter()
    with opened(folder) as store:
        return certify(subject, case), store.counts


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v


def coarse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return plain(q.half(), k.half(), v.half()).to(q.dtype)


def small(dtype: type) -> Case:
    rng = np.random.default_rng(3)
    return Case("attention", {n: rng.standard_normal((1, 2, 17, 8)).astype(dtype) for n in ("q", "k", "v")})


def test_a_failure_is_found_again_and_another_kernel_is_not_taken_for_it(tmp_path: Path) -> None:
    case = small(np.float32)
    good, _ = judgements(plain, case, tmp_path)
    anew, _ = judgements(coarse, case, None)
    bad, first = judgements(coarse, case, tmp_path)
    again, second = judgements(coarse, case, tmp_path)
    assert good.verdict is Verdict.PASS and bad.verdict is Verdict.FAIL
    assert asdict(anew) == asdict(bad) == asdict(again)
    assert first["judgements", "made"] and second["judgements", "disk"] and not second["blocks", "made"]


def test_a_refined_answer_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refined = []
    again = weigh.refine
    monkeypatch.setattr(weigh, "refine", lambda *given: refined.append(given) or again(*given))
    case = small(np.float64)
    found = [judgements(plain, case, folder)[0] for folder in (None, tmp_path, tmp_path)]
    assert len(refined) >= 2
    assert asdict(found[0]) == asdict(found[1]) == asdict(found[2])


def test_another_contract_or_convention_is_another_question(tmp_path: Path) -> None:
    case = small(np.float32)
    target = target_from(plain, spec="kernel.py:attention")
    with opened(tmp_path) as store:
        for options in ({}, {"contract": "tf32"}, {"conventions": {"empty_row": "nan"}}, {}):
            certify(subject_for(target, "fp32", **options), case)
        assert store.counts["judgements", "made"] == 3 and store.counts["judgements", "memory"] == 1
        assert store.counts["blocks", "made"] == 1


def unusable(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / FILE).write_text("not a database " * 100)
    yield "not a database", foreign
    (tmp_path / "file").write_text("")
    yield "is not used", tmp_path / "file" / "below"


def test_a_store_that_cannot_be_used_is_one_line(kernel: Path, tmp_path: Path) -> None:
    words = (f"{kernel}:attention", "--dtype", "bf16", "--property", "P1")
    plain = records(verify(tmp_path / "plain", *words))
    for index, (text, folder) in enumerate(unusable(tmp_path)):
        done = verify(tmp_path / str(index), *words, "--store", folder, workers=2 * (index == 0))
        assert done.code == 0 and records(done) == plain
        told = [line for line in done.words.splitlines() if "store" in line and text in line]
        assert len(told) == 1
    assert [row for _, row in lines(tmp_path / "0") if row is not None and row["kind"] == "store"]


def test_two_runs_at_once(kernel: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "reports.command.cli", "verify", f"{kernel}:attention", *WORDS[:4]]
    command += ["--profile", "quick", "--workers", "0", "--store", str(tmp_path / "store")]
    started = [
        subprocess.Popen([*command, "--out", str(tmp_path / name)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for name in ("a", "b")
    ]
    ended = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert [errors for _, errors in ended] == [b"", b""]
