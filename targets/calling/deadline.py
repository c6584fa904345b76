"""An end to calls that are too slow: an exception where the interpreter runs, else the end of the process."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Seconds after its deadline at which a call that never returns to Python takes its process with it.
GRACE = 5.0


class Overdue(BaseException):
    """Raised inside a call that is too slow. No Exception: a target that catches all of those must not swallow it."""


@contextmanager
def deadline(seconds: float, *, expendable: bool = False) -> Iterator[None]:
    """`Overdue` in the main thread after ``seconds``; in other threads, and in code that never returns, no effect.

    With ``expendable`` code that never returns to Python is ended too, `GRACE` seconds later, with its process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise Overdue(f"no result after {seconds:g} s")

    # Somebody else's alarm, a test's own limit say, stands still meanwhile.
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    before = signal.signal(signal.SIGALRM, ring)
    start = time.monotonic()
    # The watchdog is a thread of its own in C, which needs neither the interpreter nor its lock; it wants a file to
    # write to until it is cancelled.
    nowhere = open(os.devnull, "w") if expendable else None  # noqa: SIM115
    try:
        if nowhere is not None:
            faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=nowhere)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if nowhere is not None:
            faulthandler.cancel_dump_traceback_later()
            nowhere.close()
        if left:
            left -= time.monotonic() - start
            if left > 0:
                signal.setitimer(signal.ITIMER_REAL, left)
            else:
                signal.raise_signal(signal.SIGALRM)
