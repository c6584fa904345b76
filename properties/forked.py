"""Run the suite in processes forked from this one: they start with everything imported, one question is handed out at a
time, and one that dies costs its question alone.

Where forking is not safe (another system than Linux, a GPU in use) pytest-xdist does the same with fresh interpreters.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

import pytest
from _pytest.runner import runtestprotocol
from threadpoolctl import threadpool_limits

from properties.examinations import Candidate, Examination
from properties.fit import Fit
from properties.judge.verdict import Verdict
from properties.plugin import FITS, asked_in, records_folder
from properties.record import DIED, bury, finish, plain, unfinished

_LENGTH = struct.Struct("<I")


@dataclass(slots=True)
class _Worker:
    """A child process: its number, how to talk to it, and what it is busy with since when."""

    pid: int
    name: str
    channel: socket.socket
    item: pytest.Item | None = None
    since: float = field(default_factory=time.monotonic)


class Forked:
    """The pytest plugin that replaces the loop over all tests.

    workers: how many at once. limit: seconds after which a test is ended that does not end by itself. tick: called
    about once a second.
    """

    def __init__(self, workers: int, limit: float, tick: Callable[[], None]) -> None:
        self._count, self._limit, self._tick = workers, limit, tick
        self._started = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        fits = [i for i in session.items if isinstance(asked_in(i), Candidate)]
        self._run(session, fits)
        # Forked anew, workers know what the first calls told.
        self._run(session, [i for i in session.items if _can_be_asked(session, i)])
        return True

    def _run(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        queue = iter(items)
        workers: list[_Worker] = []
        selector = selectors.DefaultSelector()
        try:
            for _ in range(min(self._count, len(items))):
                workers.append(self._start(session, items, queue, selector))
            while workers:
                for key, _ in selector.select(timeout=1.0):
                    worker: _Worker = key.data
                    reports = _received(worker.channel)
                    ended, worker.item = worker.item, worker.item if reports is None else None
                    if reports is None:
                        selector.unregister(worker.channel)
                        self._buried(session, worker)
                        workers.remove(worker)
                        if ended is not None:
                            workers.append(self._start(session, items, queue, selector))
                    else:
                        self._told(session, reports)
                        self._hand_out(session, worker, queue, items)
                self._tick()
                for worker in workers:
                    if worker.item is not None and time.monotonic() > worker.since + self._limit:
                        os.kill(worker.pid, signal.SIGKILL)
        finally:
            for worker in workers:
                self._stopped(session, worker)
            selector.close()

    def _start(
        self,
        session: pytest.Session,
        items: list[pytest.Item],
        queue: Iterator[pytest.Item],
        selector: selectors.BaseSelector,
    ) -> _Worker:
        ours, theirs = socket.socketpair()
        name = f"f{self._started}"
        self._started += 1
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            # Held by somebody else, too, the end of this process would not reach the others.
            for key in (*selector.get_map().values(),):
                key.data.channel.close()
            ours.close()
            _work(session, items, theirs, name)
        theirs.close()
        worker = _Worker(pid, name, ours)
        selector.register(ours, selectors.EVENT_READ, worker)
        self._hand_out(session, worker, queue, items)
        return worker

    def _hand_out(
        self, session: pytest.Session, worker: _Worker, queue: Iterator[pytest.Item], items: list[pytest.Item]
    ) -> None:
        worker.item, worker.since = next(queue, None), time.monotonic()
        if worker.item is None:
            worker.channel.shutdown(socket.SHUT_WR)
            return
        session.config.hook.pytest_runtest_logstart(nodeid=worker.item.nodeid, location=worker.item.location)
        worker.channel.sendall(_LENGTH.pack(items.index(worker.item)))

    def _told(self, session: pytest.Session, reports: list[dict[str, object]]) -> None:
        hook = session.config.hook
        for data in reports:
            report = hook.pytest_report_from_serializable(config=session.config, data=data)
            for kind, value in report.user_properties:
                if kind == "fit":
                    found = Fit(**{**value, "wrong": tuple(value["wrong"])})
                    session.config.stash[FITS][found.target, found.dtype] = found
            hook.pytest_runtest_logreport(report=report)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def _stopped(self, session: pytest.Session, worker: _Worker) -> None:
        """End a worker whose answer nobody waits for any more; the calls that it was in are nobody's fault."""
        os.kill(worker.pid, signal.SIGKILL)
        os.waitpid(worker.pid, 0)
        worker.channel.close()
        for path, row in unfinished(records_folder(session.config), file=f"records-{worker.name}.jsonl"):
            finish(path, row, None)

    def _buried(self, session: pytest.Session, worker: _Worker) -> None:
        """Reap a worker; one that died in a test leaves a report of it."""
        os.waitpid(worker.pid, 0)
        worker.channel.close()
        if worker.item is None:
            return
        found = bury(records_folder(session.config), worker.name, worker.item.name)
        asked = asked_in(worker.item)
        if isinstance(asked, Candidate):
            dead = Fit(asked.target.name, asked.dtype, misfit=DIED, verdict=Verdict.ERROR.value)
            session.config.stash[FITS][dead.target, dead.dtype] = dead
        item, bad = worker.item, [("bad", [plain(asdict(r)) for r in found])]
        report = pytest.TestReport(
            item.nodeid, item.location, {}, "failed", f"worker {worker.name} died", "call", user_properties=bad
        )
        self._told(session, [session.config.hook.pytest_report_to_serializable(config=session.config, report=report)])


def _can_be_asked(session: pytest.Session, item: pytest.Item) -> bool:
    asked = asked_in(item)
    if not isinstance(asked, Examination):
        return False
    found = session.config.stash[FITS].get((asked.target.name, asked.dtype))
    return found is None or not found.misfit


def _work(session: pytest.Session, items: list[pytest.Item], channel: socket.socket, name: str) -> None:
    """The whole life of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Libraries that were loaded before do not look at the environment again: workers with several threads each only
    # wait for one another.
    threadpool_limits(1)
    torch = sys.modules.get("torch")
    if torch is not None:
        # The threads of its pool did not come along.
        torch.set_num_threads(1)
    session.config.workerinput = {"workerid": name}  # type: ignore[attr-defined]
    code = 1
    try:
        while head := _exactly(channel, _LENGTH.size):
            item = items[_LENGTH.unpack(head)[0]]
            # What the next test shares with this one, the record file above all, stays open.
            beside = next((i for i in items if i is not item and i.parent is item.parent), None)
            hook = session.config.hook
            told = runtestprotocol(item, log=False, nextitem=beside)
            rows = [hook.pytest_report_to_serializable(config=session.config, report=report) for report in told]
            text = json.dumps(rows, default=str).encode()
            channel.sendall(_LENGTH.pack(len(text)) + text)
        session._setupstate.teardown_exact(None)
        code = 0
    finally:
        os._exit(code)


def _received(channel: socket.socket) -> list[dict[str, object]] | None:
    """The reports of one test; None from a worker that has gone."""
    head = _exactly(channel, _LENGTH.size)
    body = _exactly(channel, _LENGTH.unpack(head)[0]) if head else b""
    reports: list[dict[str, object]] | None = json.loads(body) if body else None
    return reports


def _exactly(channel: socket.socket, count: int) -> bytes:
    """So many bytes, or none if the other end is gone before the last of them."""
    held = b""
    while len(held) < count:
        try:
            more = channel.recv(count - len(held))
        except ConnectionError:
            return b""
        if not more:
            return b""
        held += more
    return held
