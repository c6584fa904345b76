"""The store: what it gives back is what was kept, and nothing that happens to its file is trusted or fatal."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle.case import Case
from oracle.evaluate import enclose, refine
from oracle.store import database, keys
from oracle.store.database import FILE, Database
from oracle.store.kept import Codec, Store, current, opened
from oracle.store.keys import key_of, version

TEXT: Codec[str] = Codec(lambda text: text.encode(), lambda data: data.decode())
LIMIT = 2**20


def recalled(folder: Path, key: bytes, text: str) -> str:
    """What a store in ``folder`` has under ``key``, ``text`` if it has to ask."""
    with opened(folder, limit=LIMIT) as store:
        return store.recall("text", key, lambda: text, size=len, codec=TEXT)


def filled(folder: Path, *, count: int = 50, size: int = 4000) -> list[bytes]:
    keys = [key_of(str(i)) for i in range(count)]
    held = Database(folder, limit=LIMIT)
    for key in keys:
        held.put(key, key * (size // len(key)))
    held.close()
    assert held.trouble == ""
    return keys


def found(folder: Path, keys: list[bytes]) -> tuple[int, str]:
    """How many keys have the value that `filled` gave them, and the trouble; a wrong value fails."""
    held = Database(folder, limit=LIMIT)
    values = [held.get(key) for key in keys]
    held.close()
    whole = [value for value in values if value is not None]
    assert all(value == key * (len(value) // 20) for key, value in zip(keys, values, strict=True) if value is not None)
    return len(whole), held.trouble


def test_a_value_is_computed_once_in_memory_and_between_runs(tmp_path: Path) -> None:
    assert recalled(tmp_path, b"a", "first") == "first"
    assert recalled(tmp_path, b"a", "second") == "first"
    assert recalled(tmp_path, b"b", "second") == "second"
    with opened(None) as store:
        assert [store.recall("text", b"a", lambda: word, size=len) for word in ("one", "two")] == ["one"] * 2  # noqa: B023
        assert current() is store
    assert current() is None


def test_memory_forgets_what_was_used_least_recently() -> None:
    store = Store(memory=800)

    def ask(key: bytes) -> bool:
        made = []
        store.recall("bytes", key, lambda: made.append(1) or bytes(100), size=len)
        return bool(made)

    assert all(ask(bytes([i])) for i in range(8))
    assert not ask(b"\0")
    assert ask(b"new")
    assert not ask(b"\0") and ask(b"\1")


def test_keys_do_not_run_together() -> None:
    assert len({key_of("ab", "c"), key_of("a", "bc"), key_of("abc"), key_of("ab", "c", "")}) == 4


def test_another_source_another_library_or_another_machine_is_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "code" / "a.py"
    source.parent.mkdir()
    source.write_text("x = 1\n")
    made = [version.__wrapped__((source.parent,))]
    about = source.stat()
    source.write_text("x = 2\n")
    os.utime(source, ns=(about.st_atime_ns, about.st_mtime_ns))
    made.append(version.__wrapped__((source.parent,)))
    monkeypatch.setattr(keys, "_processor", lambda: "another")
    made.append(version.__wrapped__((source.parent,)))
    monkeypatch.setattr(keys, "_version_of", lambda name: "9")
    made.append(version.__wrapped__((source.parent,)))
    assert len(set(made)) == 4


def test_what_another_version_kept_is_not_found(tmp_path: Path) -> None:
    assert recalled(tmp_path, b"a", "first") == "first"
    with opened(tmp_path) as store:
        store.version = b"another"
        assert store.recall("text", b"a", lambda: "second", size=len, codec=TEXT) == "second"


def test_a_damaged_value_is_computed_again_with_one_line(tmp_path: Path) -> None:
    kept = filled(tmp_path)
    with sqlite3.connect(tmp_path / FILE) as file:
        file.execute("UPDATE kept SET value=zeroblob(40) WHERE key=?", (kept[3],))
        file.execute("UPDATE kept SET value=NULL WHERE key=?", (kept[4],))
        file.execute("UPDATE kept SET value=(SELECT value FROM kept WHERE key=?) WHERE key=?", (kept[6], kept[5]))
    count, trouble = found(tmp_path, kept)
    assert count == len(kept) - 3
    assert "damaged entries" in trouble and "\n" not in trouble


@pytest.mark.parametrize("at", [0.0, 0.02, 0.5, 0.9])
@pytest.mark.parametrize("how", ["truncated", "zeros", "noise"])
def test_a_damaged_file_is_never_trusted_and_never_fatal(tmp_path: Path, how: str, at: float) -> None:
    kept = filled(tmp_path)
    path = tmp_path / FILE
    data = bytearray(path.read_bytes())
    start = int(len(data) * at)
    spoiled = np.random.default_rng(0).bytes(8192) if how == "noise" else bytes(8192)
    path.write_bytes(
        data[:start] if how == "truncated" else bytes(data[:start]) + spoiled + bytes(data[start + 8192 :])
    )
    count, trouble = found(tmp_path, kept)
    assert count < len(kept) or how == "zeros"
    assert "\n" not in trouble
    # An empty file is a new store; for anything else there is a line, unless all values are whole.
    assert trouble or count == len(kept) or start == 0
    assert recalled(tmp_path, b"new", "value") == "value"


@pytest.mark.parametrize("content", [b"not a database, but a text of some length" * 50, b"x"])
def test_a_foreign_file_is_left_alone(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    count, trouble = found(tmp_path, [key_of("a")])
    assert count == 0 and "is not used" in trouble
    assert (tmp_path / FILE).read_bytes() == content
    assert recalled(tmp_path, b"a", "value") == "value"


def test_another_programs_database_is_left_alone(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / FILE) as file:
        file.execute("CREATE TABLE kept (key BLOB PRIMARY KEY, used INTEGER, seal BLOB, value BLOB)")
    assert "another program's" in found(tmp_path, [b"a"])[1]


def test_no_folder_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is not used" in found(tmp_path / "file" / "cache", [b"a"])[1]
    assert recalled(tmp_path / "file" / "cache", b"a", "value") == "value"


def test_a_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = filled(tmp_path)
    monkeypatch.setattr(database.os, "access", lambda path, mode: False)
    count, trouble = found(tmp_path, kept)
    assert count == 0 and "no permission" in trouble


def test_a_full_disk_turns_the_file_off_with_one_line(tmp_path: Path) -> None:
    filled(tmp_path)
    held = Database(tmp_path, limit=LIMIT)
    assert held._connection is not None
    held._connection.execute("PRAGMA max_page_count=1")
    for i in range(200):
        held.put(key_of("more", str(i)), bytes(2**16))
    held.close()
    assert "full" in held.trouble and "\n" not in held.trouble
    assert held.get(key_of("0")) is None


def test_a_file_that_another_process_holds_does_not_stop_this_one(tmp_path: Path) -> None:
    kept = filled(tmp_path)
    other = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    held = Database(tmp_path, limit=LIMIT)
    held.put(b"new", b"value")
    held.flush()
    assert held.get(b"new") == b"value"
    other.execute("ROLLBACK")
    other.close()
    held.close()
    assert found(tmp_path, kept)[0] == len(kept)
    assert held.trouble == ""


WRITER = """
import sys
from pathlib import Path
from oracle.store.database import Database
from oracle.store.keys import key_of
held = Database(Path(sys.argv[1]), limit=2**26)
for i in range(600):
    key = key_of(str(i % 300), sys.argv[2] if i % 2 else "both")
    if held.get(key) is None:
        held.put(key, key * 50)
    if i % 20 == 0:
        held.flush()
held.close()
sys.stdout.write(held.trouble)
"""


def test_several_processes_share_a_file(tmp_path: Path) -> None:
    started = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(n)], stdout=subprocess.PIPE, text=True)
        for n in range(3)
    ]
    assert [process.communicate(timeout=60)[0] for process in started] == [""] * 3
    kept = [key_of(str(i), who) for i in range(300) for who in (("0", "1", "2") if i % 2 else ("both",))]
    count, trouble = found(tmp_path, kept)
    assert trouble == ""
    # What a lock kept from being written is computed again; most is there.
    assert count > len(kept) // 2


class Overtaken:
    """A connection behind whose first statement another process makes the whole file."""

    def __init__(self, connection: sqlite3.Connection, folder: Path) -> None:
        self._connection, self._folder = connection, folder

    def __getattr__(self, name: str) -> object:
        return getattr(self._connection, name)

    def execute(self, *words: object) -> object:
        done = self._connection.execute(*words)  # type: ignore[arg-type]
        rows = iter(done.fetchall())
        if self._folder is not None:
            folder, self._folder = self._folder, None  # type: ignore[assignment]
            filled(folder, count=1)
        return type("Rows", (), {"fetchone": lambda _: next(rows, None)})()


def test_a_file_that_appears_while_it_is_looked_at_is_no_other_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, first = sqlite3.connect, [True]

    def connecting(*words: object, **more: object) -> object:
        made = connect(*words, **more)  # type: ignore[call-overload]
        return Overtaken(made, tmp_path) if first and first.pop() else made

    monkeypatch.setattr(database.sqlite3, "connect", connecting)
    held = Database(tmp_path, limit=LIMIT)
    assert held.trouble == ""


def test_the_oldest_entries_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database.time, "time", lambda: 10**9)
    old = filled(tmp_path, count=100)
    monkeypatch.setattr(database.time, "time", lambda: 10**9 + 10 * 86400)
    used = old[40:50]
    assert found(tmp_path, used)[0] == len(used)
    held = Database(tmp_path, limit=LIMIT)
    for i in range(170):
        held.put(key_of("new", str(i)), bytes(3000))
    held.close()
    assert (tmp_path / FILE).stat().st_size < 1.3 * LIMIT
    assert found(tmp_path, used)[0] == len(used)
    assert found(tmp_path, old)[0] < len(old)
    held = Database(tmp_path, limit=LIMIT)
    held.put(b"huge", bytes(LIMIT // 2))
    assert held.get(b"huge") is None
    held.close()


def a_case() -> Case:
    rng = np.random.default_rng(5)
    return Case("attention", {n: rng.standard_normal((1, 2, 9, 8)).astype(np.float32) for n in ("q", "k", "v")})


def test_blocks_of_a_case_are_the_same_with_and_without_a_store() -> None:
    plain = enclose(a_case())
    with opened(None) as store:
        first, second = enclose(a_case()), enclose(a_case())
        assert store.counts["blocks", "memory"] == 1
        assert all(a is b for a, b in zip(first, second, strict=True))
        rows = enclose(a_case(), rows={(0, 1): np.array([2, 3])})
        assert [len(b.rows) for b in rows] == [9, 2]
        which = np.arange(9) == 4
        refined = refine(a_case(), first[0], which, 256)
    assert_same(refined, refine(a_case(), plain[0], which, 256))
    for one, two in zip(plain, first, strict=True):
        assert_same(one, two)


def assert_same(one: Any, two: Any) -> None:
    assert set(one.values) == set(two.values)
    for name in one.values:
        for a, b in zip(one.part(name).parts(), two.part(name).parts(), strict=True):
            assert np.array_equal(a, b, equal_nan=True)


def test_a_case_is_named_by_every_bit() -> None:
    case = a_case()
    changed = case.arrays["v"].copy()
    changed[0, 1, 8, 7] = np.nextafter(changed[0, 1, 8, 7], np.float32(9))
    assert case.identity().startswith(case.digest())
    assert case.identity() == a_case().identity() != case.with_arrays(v=changed).identity()
    assert case.identity() != case.with_options(is_causal=True).identity()
