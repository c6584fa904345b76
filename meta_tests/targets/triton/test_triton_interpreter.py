"""The repair of Triton's interpreter: what it refuses, when it applies, and what it leaves behind."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from targets.builtin.triton import interpreter as triton_interpreter
from targets.builtin.triton.flash import attention
from targets.builtin.triton.interpreter import (
    launch,
    prepare_environment,
    repaired_bf16,
)


@triton.jit
def rounding_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(tl.bfloat16, fp_downcast_rounding="rtz"))


@triton.jit
def float8_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(tl.float8e5).to(tl.float32))


@pytest.mark.parametrize("kernel", [rounding_kernel, float8_kernel], ids=["rtz", "float8"])
def test_what_is_not_repaired_is_refused(kernel: object) -> None:
    source = torch.ones(16) if kernel is rounding_kernel else torch.ones(16, dtype=torch.bfloat16)
    out = torch.empty(16, dtype=torch.bfloat16 if kernel is rounding_kernel else torch.float32)
    with repaired_bf16(), pytest.raises(triton.InterpreterError, match="NotImplementedError"):
        launch(kernel, (1,), {"x_ptr": source, "out_ptr": out, "SIZE": 16})


def a_bf16_call() -> torch.Tensor:
    x = torch.ones(1, 1, 2, 2, dtype=torch.bfloat16)
    return attention(x, x, x)


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0"])
def test_other_versions_refuse_bf16_only(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    with pytest.raises(NotImplementedError, match=version):
        a_bf16_call()
    x = torch.ones(1, 1, 2, 2)
    assert torch.equal(attention(x, x, x), x)


def test_a_missing_internal_refuses_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import ScanOps

    monkeypatch.delattr(ScanOps, "cumprod")
    with pytest.raises(NotImplementedError, match="cumprod"):
        a_bf16_call()


def test_a_failed_self_check_refuses_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_interpreter, "_self_check", lambda: False)
    with pytest.raises(NotImplementedError, match="self-check"):
        a_bf16_call()


def test_self_check_fails_without_the_repair() -> None:
    assert not triton_interpreter._self_check.__wrapped__()
    with repaired_bf16():
        assert triton_interpreter._self_check.__wrapped__()


def test_the_interpreter_is_as_before_afterwards() -> None:
    from triton.runtime import interpreter as it

    classes = (it.InterpreterBuilder, it.ReduceOps, it.ScanOps)
    before = [dict(vars(owner)) for owner in classes]
    with pytest.raises(KeyError), repaired_bf16(), repaired_bf16():
        assert [dict(vars(owner)) for owner in classes] != before
        raise KeyError
    assert [dict(vars(owner)) for owner in classes] == before


def test_prepare_environment_cannot_come_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        prepare_environment()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    prepare_environment()


PROGRAM = """
import hashlib, sys
from targets.builtin.triton.interpreter import prepare_environment
if "prepare" in sys.argv:
    prepare_environment()
import torch
from targets.builtin.triton.flash import attention
q = torch.arange(2 * 40 * 24).remainder(97).reshape(1, 2, 40, 24).bfloat16() / 32
out = attention(q, q[:, :1], q[:, :1], is_causal=True)
print(hashlib.sha256(out.view(torch.int16).numpy().tobytes()).hexdigest())
"""


@pytest.mark.parametrize("order", ["prepare", "plain"])
def test_kernels_are_interpreted_whether_or_not_the_environment_says_so(order: str) -> None:
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, sys.path)])
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, order],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    q = torch.arange(2 * 40 * 24).remainder(97).reshape(1, 2, 40, 24).bfloat16() / 32
    here = attention(q, q[:, :1], q[:, :1], is_causal=True)
    assert run.stdout.strip() == hashlib.sha256(here.view(torch.int16).numpy().tobytes()).hexdigest()
