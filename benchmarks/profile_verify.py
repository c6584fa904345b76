"""Where a run of ``verify`` spends its time: timers at the seams, processor time, each second counted once.

    python -m benchmarks.profile_verify [--warm] [TARGET ...] [further words of `attn-oracle verify`]

Without a target it verifies a correct attention function of plain torch, with its gradients, in the quick profile and
this process (no workers), with an empty store; ``--warm``: with the store that the same run has filled before. The unit
is ``python -c "import torch, hypothesis, pytest"``.
"""

from __future__ import annotations

import contextlib
import io
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

UNIT = "import torch, hypothesis, pytest"
KERNEL = """
import torch


def attention(q, k, v, *, scale=None, is_causal=False):
    group = q.shape[1] // k.shape[1]
    k, values = k.repeat_interleave(group, 1).float(), v.repeat_interleave(group, 1).float()
    scores = q.float() @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        hidden = ~torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        scores = scores.masked_fill(hidden, float("-inf"))
    return (torch.softmax(scores, -1) @ values).to(q.dtype)
"""
SEAMS = (
    ("targets.probing.probes", "probe", "probing"),
    ("targets.probing.probes", "returns_lse_unasked", "probing"),
    ("targets.calling.target", "run", "target calls"),
    ("oracle.evaluate", "enclose", "enclosures"),
    ("oracle.evaluate", "refine", "enclosures, refined"),
    ("properties.diagnosis.engine", "diagnose", "diagnosis"),
    ("properties.search", "_edges", "edge inputs"),
    ("properties.search", "_search", "Hypothesis: drawing, shrinking"),
    ("properties.search", "judge", "judging: errors, relations, verdicts"),
    ("properties.search", "record_of", "records and journal"),
    ("reports.command.cli", "_pages", "report"),
    ("reports.command.conclude", "conclude", "report"),
    ("oracle.store.keys", "version", "store: version of the source"),
)
"""(module, function, share): a function under the name that other modules import it by."""


@dataclass(slots=True)
class Clock:
    """Processor seconds and calls by share; a share that another is inside of stands still meanwhile."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    inside: list[str] = field(default_factory=lambda: ["pytest and the rest"])
    since: float = field(default_factory=time.process_time)

    def _turn(self) -> None:
        now = time.process_time()
        self.seconds[self.inside[-1]] += now - self.since
        self.since = now

    @contextlib.contextmanager
    def share(self, name: str) -> Iterator[None]:
        self._turn()
        self.inside.append(name)
        self.calls[name] += 1
        try:
            yield
        finally:
            self._turn()
            self.inside.pop()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.share(name):
                result = function(*args, **kwargs)
                # A generator works when it is read.
                return iter(list(result)) if isinstance(result, Iterator) else result

        return run

    def stop(self) -> None:
        self._turn()


def _replace_everywhere(original: Any, replacement: Any) -> None:
    """In every loaded module that imported the function by name."""
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is original:
                setattr(module, name, replacement)


def instrument(clock: Clock) -> None:
    """Timers at all `SEAMS`, at the rows of the tables of bounds and ops, at the journal and at digests."""
    for module, name, share in SEAMS:
        original = getattr(import_module(module), name)
        _replace_everywhere(original, clock.timed(share, original))
    rows = import_module("oracle.bounds.table")._BOUNDS
    rows.update({op: clock.timed("bounds", function) for op, function in rows.items()})
    table = import_module("oracle.ops.table")._OPS
    table.update({n: replace(op, model=clock.timed("model kernels", op.model)) for n, op in table.items()})
    journal: Any = import_module("properties.record").Journal
    for name in ("begin", "complete"):
        setattr(journal, name, clock.timed("records and journal", getattr(journal, name)))
    database: Any = import_module("oracle.store.database").Database
    for name in ("get", "put", "flush", "close"):
        setattr(database, name, clock.timed("store: file", getattr(database, name)))
    case: Any = import_module("oracle.case").Case
    case.identity = clock.timed("digests", case.identity)


def unit() -> tuple[float, float]:
    """(wall, processor) seconds of the unit; the least of three."""
    walls, processor = [], []
    for _ in range(3):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([sys.executable, "-c", UNIT], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        walls.append(time.perf_counter() - start)
        processor.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(walls), min(processor)


def table(clock: Clock, one: float) -> str:
    """The shares as a table in Markdown, largest first."""
    total = sum(clock.seconds.values())
    lines = ["| share | seconds | of all | units | calls |", "|---|---:|---:|---:|---:|"]
    for name, spent in sorted(clock.seconds.items(), key=lambda pair: -pair[1]):
        calls = clock.calls.get(name, 0) or ""
        lines.append(f"| {name} | {spent:.2f} | {spent / total:.1%} | {spent / one:.2f} | {calls} |")
    lines.append(f"| all | {total:.2f} | 100% | {total / one:.1f} | |")
    return "\n".join(lines)


def profile(words: Sequence[str]) -> tuple[Clock, int]:
    """One run of ``verify`` in this process, with these words."""
    clock = Clock()
    with clock.share("start-up: imports"):
        import hypothesis  # noqa: F401
        import pytest  # noqa: F401
        import torch  # noqa: F401

        cli: Any = import_module("reports.command.cli")
        for module in ("properties.plugin", "reports.page.build", *(name for name, _, _ in SEAMS)):
            import_module(module)
    instrument(clock)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = cli.main(["verify", *words])
    clock.stop()
    sys.stderr.write(printed.getvalue()[-600:])
    return clock, code


def main() -> int:
    words = [w for w in sys.argv[1:] if w != "--warm"]
    _, one = unit()
    with tempfile.TemporaryDirectory() as folder:
        kernel = Path(folder) / "plain_torch.py"
        kernel.write_text(KERNEL)
        if not any(not w.startswith("-") for w in words):
            words = [f"{kernel}:attention", "--profile", "quick", "--seed", "0", "--workers", "0", *words]
        words += ["--out", str(Path(folder) / "out"), "--store", str(Path(folder) / "store")]
        if "--warm" in sys.argv:
            command = [sys.executable, "-m", "reports.command.cli", "verify", *words]
            subprocess.run(command, check=False, capture_output=True)
        clock, code = profile(words)
    print(f"unit: {one:.2f} s of processor time (python -c {UNIT!r})\n")
    print(table(clock, one))
    return code


if __name__ == "__main__":
    sys.exit(main())
