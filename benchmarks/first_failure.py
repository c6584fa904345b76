"""How long a user waits for the first failure of a broken kernel; a unit is importing torch, hypothesis and pytest.

    python benchmarks/first_failure.py [--every N]

Runs `attn-oracle verify MUTANT -x --profile quick --no-store` for every Nth mutant, to the command's end, which comes
after the failure is told; the unit is measured again beside each.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from targets.mutants.table import mutants

UNIT = ("-c", "import torch, hypothesis, pytest")


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds by the clock and of processor time, and the exit code."""

    wall: float
    processor: float
    code: int


def spent(*words: str) -> Spent:
    """One Python process and what it starts."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, *words], env=os.environ, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Spent(time.perf_counter() - start, processor, done.returncode)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1)
    rows = mutants()[:: parser.parse_args().every]
    walls, processors, missed = [], [], []
    with tempfile.TemporaryDirectory() as out:
        for row in rows:
            unit = spent(*UNIT)
            words = ["verify", row.target, "--op", row.op, "-x", "--profile", "quick", "--no-store", "--out", out]
            if row.dtypes[0] not in ("fp32", "fp16", "bf16"):
                words += ["--dtype", row.dtypes[0]]
            one = spent("-m", "reports.command.cli", *words)
            walls.append((one.wall / unit.wall, row.name))
            processors.append((one.processor / unit.processor, row.name))
            missed += [row.name] if one.code != 1 else []
            told = f"{walls[-1][0]:.1f} by the clock, {processors[-1][0]:.1f} in processor time, exit {one.code}"
            print(f"{row.name}: {told}", flush=True)
    for what, found in (("by the clock", walls), ("in processor time", processors)):
        ratios = [ratio for ratio, _ in found]
        worst, name = max(found)
        print(f"{what}: median {statistics.median(ratios):.2f}, worst {worst:.1f} ({name}) of {len(found)}")
    print(f"without a failure: {', '.join(missed) or 'none'}")


if __name__ == "__main__":
    main()
