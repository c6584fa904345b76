"""The file of a store: one SQLite database of keys and values that several processes share.

SQLite does the hard part (atomic commits, concurrent readers and writers, a torn write undone at the next opening).
Here is what it leaves to do: nothing is trusted without its own checksum, nothing waits long for a lock, and whatever
goes wrong turns the file off for this process, with one line.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

FILE = "kept.sqlite"
# "attn" as PRAGMA application_id, and the form of the table: another program's database is left alone.
APPLICATION, FORM = 0x6174746E, 1
LOCK_SECONDS, OPENINGS = 0.2, 9
PENDING_ENTRIES, PENDING_BYTES = 512, 2**22
_DAY = 86400
_MAGIC = b"SQLite format 3\0"


class Database:
    """Values by key. ``trouble`` is empty, or one line that says why nothing is read or written any more."""

    def __init__(self, folder: Path, *, limit: int) -> None:
        self.trouble = ""
        self._path, self._limit = folder / FILE, limit
        self._pending: dict[bytes, bytes] = {}
        self._pending_bytes = 0
        self._used: set[bytes] = set()
        self._connection: sqlite3.Connection | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError("no permission to write")
            self._connection = self._opened_in_time()
        except (OSError, sqlite3.Error, _Foreign) as fault:
            self._off(fault)

    def _opened_in_time(self) -> sqlite3.Connection:
        # Not every statement waits for a lock by itself: several workers begin at once.
        for _ in range(OPENINGS):
            try:
                return self._open()
            except sqlite3.OperationalError as fault:
                if not _busy(fault):
                    raise
                time.sleep(LOCK_SECONDS)
        return self._open()

    def _open(self) -> sqlite3.Connection:
        # SQLite would take a very short file for an empty one.
        if self._path.exists() and _beginning(self._path) not in (b"", _MAGIC):
            raise _Foreign("file is not a database")
        connection = sqlite3.connect(self._path, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            # In this order: who makes the file at the same time names it before the table is there.
            empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
            found = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
            if not empty and found != [APPLICATION, FORM]:
                raise _Foreign("another program's database, or another version's")
            if empty:
                connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
                connection.execute(f"PRAGMA application_id={APPLICATION}")
                connection.execute(f"PRAGMA user_version={FORM}")
            connection.execute("PRAGMA journal_mode=WAL")
            # What a power cut loses is computed again; what it damages has no valid checksum.
            connection.execute("PRAGMA synchronous=OFF")
            connection.execute(
                "CREATE TABLE IF NOT EXISTS kept (key BLOB PRIMARY KEY, used INTEGER, seal BLOB, value BLOB)"
            )
        except (sqlite3.Error, _Foreign):
            connection.close()
            raise
        return connection

    def get(self, key: bytes) -> bytes | None:
        """The value kept under ``key``, if it is there and whole."""
        if key in self._pending:
            return self._pending[key]
        if self._connection is None:
            return None
        try:
            row = self._connection.execute("SELECT seal, value FROM kept WHERE key=?", (key,)).fetchone()
        except sqlite3.Error as fault:
            if not _busy(fault):
                self._off(fault)
            return None
        if row is None:
            return None
        if not isinstance(row[1], bytes) or row[0] != _seal(key, row[1]):
            self.trouble = self.trouble or f"store {self._path}: damaged entries are computed again"
            return None
        self._used.add(key)
        return row[1]

    def put(self, key: bytes, value: bytes) -> None:
        """Keep ``value``; it is written with others, a little later."""
        if self._connection is None or len(value) > self._limit // 16:
            return
        self._pending[key] = value
        self._pending_bytes += len(value)
        if len(self._pending) >= PENDING_ENTRIES or self._pending_bytes >= PENDING_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is pending, in one transaction; where another process holds the file, later or never."""
        if self._connection is None or not self._pending:
            return
        now = int(time.time())
        rows = [(key, now, _seal(key, value), value) for key, value in self._pending.items()]
        try:
            self._transaction("INSERT OR REPLACE INTO kept VALUES (?, ?, ?, ?)", rows)
            self._shrink()
        except sqlite3.Error as fault:
            if not _busy(fault):
                self._off(fault)
            elif self._pending_bytes < 4 * PENDING_BYTES:
                return
        self._pending, self._pending_bytes = {}, 0

    def _transaction(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        assert self._connection is not None
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            self._connection.executemany(statement, rows)
            self._connection.execute("COMMIT")
        except sqlite3.Error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def size(self) -> int:
        """Bytes in use."""
        assert self._connection is not None
        pages, free, size = (
            int(self._connection.execute(f"PRAGMA {name}").fetchone()[0])
            for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size

    def _shrink(self) -> None:
        """Above the limit: without the entries that were not used for longest, down to three quarters of it."""
        assert self._connection is not None
        surplus = self.size() - self._limit
        if surplus <= 0:
            return
        surplus += self._limit // 4
        doomed: list[tuple[bytes]] = []
        for key, size in self._connection.execute("SELECT key, length(value) FROM kept ORDER BY used, rowid"):
            if surplus <= 0:
                break
            doomed.append((key,))
            surplus -= size + 100
        self._transaction("DELETE FROM kept WHERE key=?", doomed)
        self._connection.execute("PRAGMA incremental_vacuum")

    def close(self) -> None:
        """Write the rest, and note what was used today."""
        self.flush()
        if self._connection is None:
            return
        now = int(time.time())
        try:
            used = [(now, key, now - _DAY) for key in self._used]
            self._transaction("UPDATE kept SET used=? WHERE key=? AND used<?", used)
        except sqlite3.Error:
            # An entry that looks older than it is goes earlier: no more than that.
            pass
        try:
            self._connection.close()
        except sqlite3.Error as fault:
            self._off(fault)
        self._connection = None

    def _off(self, fault: Exception) -> None:
        reason = " ".join(str(fault).split()) or type(fault).__name__
        self.trouble = f"store {self._path} is not used: {reason}"
        connection, self._connection, self._pending, self._pending_bytes = self._connection, None, {}, 0
        if connection is not None:
            try:
                connection.close()
            except sqlite3.Error:
                return


class _Foreign(Exception):
    """A file that is no store of this form."""


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(_MAGIC))


def _busy(fault: sqlite3.Error) -> bool:
    return getattr(fault, "sqlite_errorcode", None) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _seal(key: bytes, value: bytes) -> bytes:
    return hashlib.blake2b(key + value, digest_size=8).digest()
