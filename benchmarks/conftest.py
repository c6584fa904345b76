"""Times of all benchmarks of a session, by name, for the ratios at its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ratios import table, write

TIMES = pytest.StashKey[dict[str, float]]()
Timed = Callable[..., Any]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TIMES] = {}


@pytest.fixture
def timed(benchmark: Any, request: pytest.FixtureRequest) -> Timed:
    """``timed(name, group, function, rounds=...)`` runs a function and keeps the least time of its rounds."""

    def run(name: str, group: str, function: Callable[[], Any], *, rounds: int = 7) -> Any:
        benchmark.group = group
        result = benchmark.pedantic(function, rounds=rounds, warmup_rounds=1 if rounds > 1 else 0)
        # Without statistics (--benchmark-disable) there is no time to keep.
        if benchmark.stats is not None:
            request.config.stash[TIMES][name] = benchmark.stats.stats.min
        return result

    return run


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    times = config.stash[TIMES]
    if not times:
        return
    path = Path("out") / "benchmark-ratios.json"
    rows = write(times, path)
    if rows:
        terminalreporter.section(f"ratios, least times of this run ({path})")
        terminalreporter.write_line(table(rows))
