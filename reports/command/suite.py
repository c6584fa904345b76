"""Run the property suite in pytest, apart from the user's own pytest settings."""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import properties
from properties.options import forwarded
from targets.calling.target import Target

# pytest's own exit codes.
BROKEN, INTERRUPTED, INTERNAL, USAGE = 1, 2, 3, 4
# Hangs end after --timeout, call by call; this only ends a check that will not end otherwise. Seconds by profile.
_LIMITS = {"quick": 1800, "default": 7200, "deep": 86400}
# They start threads of their own when they are imported or first used, which a forked child waits for in vain.
_THREADED = {"jax", "tensorflow", "paddle", "grpc"}


def run_suite(options: argparse.Namespace, named: Sequence[Target], stream: TextIO) -> int:
    """pytest's exit code; what happens is said on ``stream`` as it happens."""
    import pytest

    from properties.forked import Forked
    from reports.command.live import Live

    folder = Path(properties.__file__).parent
    workers = _workers(options)
    arguments = [
        str(folder),
        "-p", "properties.plugin", "-p", "xdist.plugin", "-p", "pytest_timeout", "-p", "no:faulthandler",
        # It walks all of torch's objects three times at the end, for warnings that are ignored.
        "-p", "no:unraisableexception",
        "-c", str(folder / "suite.ini"),
        f"--rootdir={folder}",
        "-q", "--no-header", "-rN", "--tb=no",
        f"--timeout={_LIMITS[options.profile]}", "--timeout-method=thread",
    ]  # fmt: skip
    live = Live(stream, named, terminal=stream.isatty())
    plugins: list[object] = [live]
    if workers and _may_fork(options.device):
        plugins.append(Forked(workers, _LIMITS[options.profile], live.tick))
    elif workers:
        # Workers that die are replaced as often as it takes: a target is given up after a few lost calls.
        arguments += ["-n", str(workers), "--dist", "worksteal", "--max-worker-restart=9999"]
    # What pytest itself would say is of use only where it breaks.
    words = io.StringIO()
    with _environment(workers), _settled(), contextlib.redirect_stdout(words):
        code = int(pytest.main([*arguments, *forwarded(vars(options))], plugins=plugins))
    if code == INTERNAL:
        sys.stderr.write(words.getvalue())
    return code


def _workers(options: argparse.Namespace) -> int:
    if options.workers is not None:
        return int(options.workers)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if options.case is not None else min(cores, 8)


def _may_fork(device: str) -> bool:
    """Whether children can go on from here: a GPU's driver does not survive that, nor do some libraries' threads."""
    torch = sys.modules.get("torch")
    safe = sys.platform == "linux" and device == "cpu" and not _THREADED & set(sys.modules)
    return safe and not (torch is not None and torch.cuda.is_initialized())


@contextmanager
def _settled() -> Iterator[None]:
    """What is imported stays: the garbage collector need not look at it again, nor write to it in a forked child."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


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
