"""Run the property suite in pytest, apart from the user's own pytest settings."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import properties
from properties.options import forwarded

# pytest's own exit codes.
BROKEN, INTERRUPTED, INTERNAL, USAGE = 1, 2, 3, 4
# Hangs end after --timeout, call by call; this only ends a check that will not end otherwise. Seconds by profile.
_LIMITS = {"quick": 1800, "default": 7200, "deep": 86400}


def run_suite(options: argparse.Namespace) -> int:
    """pytest's exit code."""
    import pytest

    folder = Path(properties.__file__).parent
    workers = options.workers if options.workers is not None else min(_cores(), 8)
    arguments = [
        str(folder),
        "-p", "properties.plugin", "-p", "xdist.plugin", "-p", "pytest_timeout", "-p", "no:faulthandler",
        "-c", str(folder / "suite.ini"),
        f"--rootdir={folder}",
        "-q", "--no-header", "-rN", "--tb=no",
        f"--timeout={_LIMITS[options.profile]}", "--timeout-method=thread",
    ]  # fmt: skip
    # Workers that die are replaced as often as it takes: a target is given up after a few lost calls.
    arguments += ["-n", str(workers), "--dist", "worksteal", "--max-worker-restart=9999"] if workers > 0 else []
    with _environment(workers):
        return int(pytest.main([*arguments, *forwarded(vars(options))]))


@contextmanager
def _environment(workers: int) -> Iterator[None]:
    """The user's own pytest settings and plug-ins kept out, one thread a worker; all as before afterwards."""
    before = dict(os.environ)
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        os.environ.pop(name, None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    if workers > 1:
        # Several workers of several threads each only wait for one another.
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ.setdefault(name, "1")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
