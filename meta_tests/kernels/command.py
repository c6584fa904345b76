"""The `attn-oracle` command run inside a test: its exit code, what it printed, the records it wrote."""

import contextlib
import io
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from oracle.case import Case
from properties.judge.verdict import Basis, Judgement, Verdict
from properties.ops.table import _TABLES
from properties.property import Property
from properties.record import Record
from properties.subject import Input, Subject
from reports.command.cli import main
from reports.run.load import Run, load

# A correct kernel, and what the fake ones in these tests are made from.
PLAIN = """
import torch


def attention(q, k, v, *, scale=None, is_causal=False):
    group = q.shape[1] // k.shape[1]
    k, values = k.repeat_interleave(group, 1).float(), v.repeat_interleave(group, 1).float()
    scores = q.float() @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        hidden = ~torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        scores = scores.masked_fill(hidden, float("-inf"))
    return (torch.softmax(scores, -1) @ values).to(q.dtype)


attention.__attn_oracle__ = {"gradients": False}
"""


@dataclass(frozen=True)
class Done:
    """One finished run. words: what it printed, output and errors together."""

    code: int
    words: str
    run: Run

    @property
    def records(self) -> tuple[Record, ...]:
        return self.run.records

    def of(self, target: str, *, verdict: str | None = None) -> list[Record]:
        """The records of one target, the run-level ones aside."""
        return [
            r for r in self.records if r.target == target and r.property != "contract" and verdict in (None, r.verdict)
        ]


@contextlib.contextmanager
def _import_state() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if name.startswith("attn_oracle_target_"):
                del sys.modules[name]


def attn_oracle(*words: object) -> tuple[int, str]:
    """Exit code and printed text of the command, run in this process."""
    # Tests change the suite's own code in this process: nothing that they compute may be found by another run.
    kept = () if words[:1] != ("verify",) or {"--store", "--no-store"} & set(words) else ("--no-store",)
    printed = io.StringIO()
    with _import_state(), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            code = main([str(w) for w in (*words, *kept)])
        except SystemExit as leaving:
            # argparse speaks for itself.
            code = int(leaving.code or 0)
    return code, printed.getvalue()


def verify(out: Path, *words: object, workers: int = 0) -> Done:
    """`attn-oracle verify` in the quick profile (unless ``words`` say otherwise) with records in ``out``."""
    profile = () if "--profile" in words else ("--profile", "quick")
    code, printed = attn_oracle("verify", *words, *profile, "--workers", workers, "--out", out)
    found = load(out) if out.is_dir() else Run(out)
    return Done(code, printed, found)


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


def verify_records(folder: Path) -> list[Record]:
    return list(load(folder).records)
