"""Where a run took place: commit, versions, machine. One JSON-ready mapping, recorded with every run."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "attn-oracle",
    "numpy",
    "mpmath",
    "gmpy2",
    "python-flint",
    "ml_dtypes",
    "hypothesis",
    "pytest",
    "torch",
    "triton",
    "transformers",
)


def environment(argv: list[str], **run: object) -> dict[str, object]:
    """Commit and dirty flag of the checkout, versions, processor, device, and the given facts of the run."""
    return {
        **_commit(Path(__file__).resolve().parents[2]),
        "versions": {"python": platform.python_version(), **_versions()},
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "argv": argv,
        **run,
    }


def _versions() -> Mapping[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _commit(root: Path) -> dict[str, object]:
    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(top) != root:
        return {"commit": None, "dirty": None}
    return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or "unknown"
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
