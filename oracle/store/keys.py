"""Names of what is kept: digests of everything that it depends on, the oracle's own source included."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np

# Of each a value may depend on: how floats are computed, and how they are written down.
_PACKAGES = ("numpy", "python-flint", "mpmath", "ml_dtypes", "gmpy2")


@cache
def version(folders: tuple[Path, ...]) -> bytes:
    """Sixteen bytes that change with any source file under ``folders``, a library, the interpreter or the machine.

    The machine counts because a BLAS sums in an order of its own on each kind of processor.
    """
    h = hashlib.blake2b(digest_size=16)
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            content = path.read_bytes()
            h.update(f"{path.relative_to(folder.parent)} {len(content)}\n".encode() + content)
    for name in _PACKAGES:
        h.update(f"{name} {_version_of(name)}\n".encode())
    machine = (sys.version, sys.byteorder, platform.machine(), _processor(), repr(np.finfo(np.float64)))
    h.update("\n".join(machine).encode())
    return h.digest()


def _version_of(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _processor() -> str:
    """Model and abilities of the processor, as far as the system says."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    # The kernels of a BLAS are chosen by these.
    wanted = ("model name", "flags", "Features", "CPU part")
    lines = {line for line in text.splitlines() if line.partition(":")[0].strip() in wanted}
    return "\n".join(sorted(lines))


def key_of(*parts: bytes | str | Iterable[str]) -> bytes:
    """Twenty bytes that name these parts, in this order. No two lists of parts run together."""
    h = hashlib.blake2b(digest_size=20)
    for part in parts:
        data = part if isinstance(part, bytes) else (part if isinstance(part, str) else "\0".join(part)).encode()
        h.update(len(data).to_bytes(8, "little") + data)
    return h.digest()
