"""The `attn-oracle` command run inside a test: its exit code, what it printed, the records it wrote."""

import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from properties.record import Record
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
