"""What a run says while it runs: what was understood, each failure as it happens, how far it is.

One defect makes one full message; what is filed under the same later is one short line each. On a terminal the last
line says how far the run is; elsewhere a plain line does so now and then.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, TextIO

import pytest

from oracle.ops.op import REFUSAL
from properties.examinations import Examination
from properties.message import failure_message, filed_under, same_defect
from properties.plugin import asked_in
from properties.record import Record
from reports.command.terminal import property_order, size
from reports.run.load import record_from
from targets.calling.target import Target

# Seconds between two lines that say how far a run is, where no line can be rewritten.
PAUSE = 20.0


class Live:
    """The pytest plugin that speaks: ``fit`` and ``bad`` of each report, see `properties.plugin`.

    stream: where to. named: targets that were asked for by name, of which it is said what they turned out to be.
    """

    def __init__(self, stream: TextIO, named: Iterable[Target], *, terminal: bool) -> None:
        self._stream, self._terminal = stream, terminal
        # A gradient follows the conventions of its forward pass.
        self._named = {t.name for t in named if t.forward is None}
        self._told: Counter[tuple[str, str]] = Counter()
        self._fits: set[tuple[str, str]] = set()
        self._asked: Counter[tuple[str, str]] = Counter()
        self._total = self._done = self._failures = 0
        self._current = ""
        self._start = self._last = time.monotonic()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            asked = asked_in(item)
            if isinstance(asked, Examination):
                self._asked[asked.target.name, asked.dtype] += 1
        self._total = max(self._total, len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        self._total = len(ids)

    def pytest_runtest_logstart(self, nodeid: str, location: object) -> None:
        self._current = nodeid.partition("[")[2].removesuffix("]")
        self.tick()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and not (report.when == "setup" and report.outcome != "passed"):
            return
        self._done += 1
        told: list[tuple[str, Any]] = list(report.user_properties)
        for kind, value in told:
            if kind == "fit":
                self._fit(value)
            elif kind == "bad":
                self._bad([record for record in map(record_from, value) if record is not None])
        self.tick()

    def tick(self) -> None:
        """Say how far the run is, where the time has come."""
        now = time.monotonic()
        if self._terminal:
            self._stream.write(f"\r\x1b[K{self._progress(now)}"[:160])
            self._stream.flush()
        elif now > self._last + PAUSE:
            self._last = now
            self._say(self._progress(now))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _progress(self, now: float) -> str:
        words = [f"[{self._done}/{self._total}] {self._current}"]
        words += [f"{self._failures} failures"] if self._failures else []
        if self._done:
            left = (now - self._start) / self._done * (self._total - self._done)
            words.append(f"about {left:.0f} s left" if left < 120 else f"about {left / 60:.0f} min left")
        return ", ".join(words)

    def _say(self, text: str) -> None:
        self._stream.write(f"\r\x1b[K{text}\n" if self._terminal else f"{text}\n")
        self._stream.flush()

    def _fit(self, found: dict[str, Any]) -> None:
        target, dtype = found["target"], found["dtype"]
        if found["misfit"]:
            # The questions that will not be asked.
            self._total -= self._asked[target, dtype]
        if target not in self._named:
            return
        for statement in found["wrong"]:
            self._say(f"{target} in {dtype}: {statement}")
        # What a target takes needs no word; what it refuses is told.
        told = [f"{name}={value}" for name, value in found["conventions"].items() if value not in REFUSAL]
        beyond = [name for name, value in found["conventions"].items() if value == "refused"]
        shown = ", ".join(told) + (f"; refuses {', '.join(beyond)}" if beyond else "")
        if shown and (target, shown) not in self._fits:
            other = any(name == target for name, _ in self._fits)
            self._say(f"{target}{f' in {dtype}' if other else ''}: found {shown}")
            self._fits.add((target, shown))

    def _bad(self, records: list[Record]) -> None:
        self._failures += len(records)
        groups: dict[tuple[str, str], list[Record]] = {}
        for record in records:
            groups.setdefault(same_defect(record), []).append(record)
        for key, rows in groups.items():
            first = min(rows, key=size)
            if key not in self._told:
                self._say("\n" + failure_message(first) + "\n")
            else:
                for name in sorted({r.property for r in rows}, key=property_order):
                    self._say(f"also {first.target} {name} in {first.dtype}: {filed_under(first)}")
            self._told[key] += len(rows)
