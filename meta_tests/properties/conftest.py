"""What these tests ask of a case again and again is computed once: tables of one op ask all its kernels the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oracle.store import kept


@pytest.fixture(scope="session")
def shared_store() -> kept.Store:
    """Blocks, bounds and judgements of every test of this process, in memory."""
    return kept.Store(memory=2**29)


@pytest.fixture(autouse=True)
def _asked_once(request: pytest.FixtureRequest, shared_store: kept.Store) -> Iterator[None]:
    """Keep what a case has for an answer while a test runs, but not where a test changes the suite itself."""
    if "monkeypatch" in request.fixturenames:
        yield
        return
    with kept.used(shared_store):
        yield
