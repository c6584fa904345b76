"""Workers are forked only where children can go on from the state of their parent."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from threadpoolctl import threadpool_limits

from meta_tests.kernels.command import verify
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


COUNTS = """
import json
from pathlib import Path

import torch
from threadpoolctl import threadpool_info


def attention(q, k, v):
    counts = [pool["num_threads"] for pool in threadpool_info()] + [torch.get_num_threads()]
    Path(__file__).with_suffix(".json").write_text(json.dumps(counts))
    return (torch.softmax(q.float() @ k.float().mT * q.shape[-1] ** -0.5, -1) @ v.float()).to(q.dtype)


attention.__attn_oracle__ = {"gradients": False}
"""


@pytest.mark.skipif(not _may_fork("cpu"), reason="workers are not forked here")
def test_a_forked_worker_has_one_thread_though_libraries_were_loaded_with_more(tmp_path: Path) -> None:
    kernel = tmp_path / "counts.py"
    kernel.write_text(COUNTS)
    words = (
        "--target",
        f"{kernel}:attention",
        "--dtype",
        "fp32",
        "--property",
        "P1",
        "--profile",
        "quick",
        "--no-store",
    )
    with threadpool_limits(2):
        assert verify(tmp_path / "out", *words, workers=2).code == 0
    assert set(json.loads(kernel.with_suffix(".json").read_text())) == {1}
