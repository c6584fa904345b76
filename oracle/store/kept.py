"""The store that a run has opened: least recently used values in memory, encoded ones on disk as well."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import oracle
from oracle.store.database import Database
from oracle.store.keys import key_of, version

T = TypeVar("T")
MEMORY_BYTES = 2**27
DISK_BYTES = 2**29


@dataclass(frozen=True, slots=True)
class Codec(Generic[T]):
    """How a value is written down: exactly. decode raises ValueError, KeyError or TypeError for bytes that are none."""

    encode: Callable[[T], bytes]
    decode: Callable[[bytes], T]


class Store:
    """Values by key; what a key stands for is computed once.

    counts: how often a kind of value was found in ``memory``, on ``disk`` or ``made``.
    """

    def __init__(self, database: Database | None = None, *, memory: int = MEMORY_BYTES) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._database = database
        self._memory: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        self._held, self._most = 0, memory
        self.version = version((Path(oracle.__file__).parent,))

    @property
    def trouble(self) -> str:
        """One line about the file, or nothing."""
        return "" if self._database is None else self._database.trouble

    def recall(
        self, kind: str, key: bytes, make: Callable[[], T], *, size: Callable[[T], int], codec: Codec[T] | None = None
    ) -> T:
        """The value that ``make`` gives, which must depend on ``key`` and on the oracle's source alone.

        size: bytes that it takes in memory. Nobody may change a value: it is handed out again.
        """
        name = key_of(self.version, kind, key)
        if name in self._memory:
            self._memory.move_to_end(name)
            self.counts[kind, "memory"] += 1
            found: T = self._memory[name][0]
            return found
        value = self._read(name, codec)
        self.counts[kind, "made" if value is None else "disk"] += 1
        if value is None:
            value = make()
            if codec is not None and self._database is not None:
                self._database.put(name, codec.encode(value))
        self._remember(name, value, size(value))
        return value

    def _read(self, name: bytes, codec: Codec[T] | None) -> T | None:
        data = None if codec is None or self._database is None else self._database.get(name)
        if data is None or codec is None:
            return None
        try:
            return codec.decode(data)
        except (ValueError, KeyError, TypeError):
            return None

    def _remember(self, name: bytes, value: object, size: int) -> None:
        if size > self._most // 8:
            return
        self._memory[name] = value, size
        self._held += size
        while self._held > self._most:
            _, (_, freed) = self._memory.popitem(last=False)
            self._held -= freed

    def close(self) -> None:
        """Write down what is pending; the memory is given back."""
        self._memory.clear()
        if self._database is not None:
            self._database.close()


_OPEN: list[Store] = []


def default_folder() -> Path:
    """Where a user's caches are kept (XDG_CACHE_HOME, by default ~/.cache)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attn-oracle"


def current() -> Store | None:
    """The store that is open, if one is."""
    return _OPEN[-1] if _OPEN else None


@contextmanager
def used(store: Store) -> Iterator[Store]:
    """``store`` is `current` meanwhile; it stays open."""
    _OPEN.append(store)
    try:
        yield store
    finally:
        _OPEN.remove(store)


@contextmanager
def opened(folder: Path | None, *, limit: int = DISK_BYTES) -> Iterator[Store]:
    """A store with its file in ``folder`` (None: in memory alone), which is `current` meanwhile."""
    store = Store(None if folder is None else Database(folder, limit=limit))
    try:
        with used(store):
            yield store
    finally:
        store.close()
