"""Two runs and how they compare, for the tests of comparison."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from meta_tests.reports.synthetic import ENVIRONMENT, PASSED, write
from properties.record import Record
from reports.run.compare import Comparison, compare

EDGE = replace(PASSED, case="00000000000000ed", features={"recipe": "normal", "edge": "square", "sk": 9}, examples=1)
OTHER = replace(EDGE, case="00000000000000ee", features={"recipe": "normal", "edge": "heads", "sk": 4})
LOST = replace(EDGE, case="", title="", verdict="ERROR", ratio=None, forms={}, detail="the process died")


def run(folder: Path, records: Iterable[Record], **environment: Any) -> Path:
    """A whole run: a worker's records, and the file that its end writes."""
    write(folder, records, environment={**ENVIRONMENT, **environment})
    return write(folder, worker="verdicts", environment=None)


def compared(tmp_path: Path, old: Iterable[Record], new: Iterable[Record], **how: Any) -> Comparison:
    return compare(run(tmp_path / "old", old), run(tmp_path / "new", new, commit="f" * 40), **how)
