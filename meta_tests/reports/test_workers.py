"""Workers are forked only where children can go on from the state of their parent."""

import sys
from types import ModuleType

import pytest

from reports.command.suite import _may_fork


def test_forking_needs_linux_and_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert _may_fork("cpu")
    assert not _may_fork("cuda")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not _may_fork("cpu")


@pytest.mark.parametrize("name", ["jax", "tensorflow", "paddle"])
def test_no_fork_beside_a_library_with_threads_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert not _may_fork("cpu")


def test_no_fork_of_a_driver_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not _may_fork("cpu")
