"""Targets that fail in every way a kernel can: each gets its verdict, and the run goes on."""

import ctypes
import signal
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from meta_tests.kernels.command import PLAIN, Done, verify
from properties.record import lost_calls
from targets.calling.target import PATIENCE, Observed, run, target_from
from targets.probing.tiny import tiny_case

# Source of each kernel's body, the verdict that it must get and words that must say why.
KERNELS: dict[str, tuple[str, str, str]] = {
    "raises": ("raise ValueError('no such kernel')", "ERROR", "ValueError: no such kernel"),
    "exits": ("raise SystemExit(3)", "ERROR", "SystemExit: 3"),
    "skips": ("import pytest; pytest.skip('sneaky')", "ERROR", "sneaky"),
    "out_of_memory": ("raise MemoryError('8 EiB')", "ERROR", "MemoryError: 8 EiB"),
    "too_large": ("return torch.empty(2**55)", "ERROR", "allocate"),
    "wrong_shape": ("return attention(q, k, v)[..., :-1]", "FAIL", "shape"),
    "wrong_dtype": ("return attention(q, k, v).double()", "FAIL", "float64"),
    "integers": ("return attention(q, k, v).int()", "FAIL", "int32"),
    "unreadable_dtype": ("return attention(q, k, v).to(torch.float8_e4m3fnuz)", "ERROR", "Float8"),
    "nothing": ("return None", "ERROR", "NoneType"),
    "empty_tuple": ("return ()", "ERROR", "empty tuple"),
    "odd_tuple": ("return 'a', 3", "ERROR", "str"),
    "numpy_array": ("return attention(q, k, v).numpy()", "ERROR", "framework 'numpy'"),
    "meta": ("return torch.empty_like(q, device='meta')", "ERROR", "meta"),
    "view": ("return q.view(q.shape)", "FAIL", "shares memory with input q"),
    "view_in_dict": ("return {'out': v[:, :, :2]}", "FAIL", "shares memory with input v"),
    "nan": ("return torch.full_like(q, float('nan'))", "FAIL", "inf times the bound"),
    "changes_input": ("out = attention(q, k, v); k.zero_(); return out", "FAIL", "input k was changed"),
    "reshapes_input": ("out = attention(q, k, v); q.resize_(1); return out", "FAIL", "input q was changed"),
    "refuses": ("raise NotImplementedError('a GPU only')", "UNSUPPORTED", "a GPU only"),
}
SLOW: dict[str, tuple[str, str, str]] = {
    "slow": ("import time\n    while True: time.sleep(0.01)", "ERROR", "no result after 0.2 s"),
    "slow_and_catching": (
        "import time\n    while True:\n        try: time.sleep(0.01)\n        except Exception: pass",
        "ERROR",
        "no result after 0.2 s",
    ),
}
FINE = {
    "grad": "return attention(q, k, v).requires_grad_()",
    "strided": "return attention(q, k, v).transpose(1, 2).contiguous().transpose(1, 2)",
    "settings": "import numpy, os; numpy.seterr(all='raise'); os.chdir('/'); return attention(q, k, v)",
    "warning": "import warnings; warnings.warn('deprecated'); return attention(q, k, v)",
    "chatty": "print('x' * 10000); return attention(q, k, v)",
}


def write(folder: Path, bodies: dict[str, str]) -> Path:
    path = folder / "kernels.py"
    functions = [f"def {name}(q, k, v):\n    {textwrap.dedent(body)}\n" for name, body in bodies.items()]
    path.write_text(PLAIN + "\n\n" + "\n\n".join(functions))
    return path


def test_each_failure_gets_its_verdict_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, {name: body for name, (body, _, _) in KERNELS.items()} | FINE)
    specs = [f"{path}:{name}" for name in (*KERNELS, *FINE)]
    done = verify(tmp_path / "out", *specs, "--property", "P6", "--property", "P23", "--dtype", "fp32")
    assert done.code == 1
    assert not done.run.faults
    assert not done.run.damaged
    expect(done, KERNELS)
    for name in FINE:
        assert {r.verdict for r in done.of(name)} == {"PASS"}, (name, {r.detail for r in done.of(name)})


def test_slow_calls_end_at_their_deadline(tmp_path: Path) -> None:
    path = write(tmp_path, {name: body for name, (body, _, _) in SLOW.items()})
    words = ("--property", "P23", "--dtype", "fp32", "--timeout", 0.2)
    done = verify(tmp_path / "out", *(f"{path}:{name}" for name in SLOW), *words)
    assert done.code == 1
    expect(done, SLOW)


def expect(done: Done, kernels: dict[str, tuple[str, str, str]]) -> None:
    for name, (_, verdict, why) in kernels.items():
        records = done.of(name)
        assert records, f"{name} has no record"
        expected = {verdict, "PASS"} if name == "nan" else {verdict}
        assert {r.verdict for r in records} <= expected, (name, [(r.property, r.verdict, r.detail) for r in records])
        assert any(why in r.detail for r in records), (name, {r.detail for r in records})


@pytest.mark.timeout(240)
def test_dying_processes_are_replaced_and_their_calls_are_errors(tmp_path: Path) -> None:
    killers = {
        "quits": "import os; os._exit(0)",
        "segfaults": "import ctypes; ctypes.string_at(0)",
        # Holds the interpreter's lock and looks at no signal, so that neither an exception nor a thread can end it.
        "never_returns": "import itertools; return sum(itertools.repeat(0))",
        "dies_on_wide_heads": "import os\n    if q.shape[-1] > 200: os._exit(0)\n    return attention(q, k, v)",
    }
    path = write(tmp_path, killers)
    specs = [f"{path}:{name}" for name in (*killers, "attention")]
    words = ("--property", "P18", "--property", "P23", "--dtype", "fp32", "--timeout", 1)
    done = verify(tmp_path / "out", *specs, *words, workers=2)
    assert done.code == 1
    assert not done.run.faults
    for name in ("quits", "segfaults", "never_returns"):
        records = done.of(name)
        assert {r.verdict for r in records} == {"ERROR"}, name
        assert any(r.detail == "the process died or hung during this call" for r in records), name
        assert all(r.rerun and r.origin == "user" for r in records)
    dead = done.of("dies_on_wide_heads", verdict="ERROR")
    assert [r.property for r in dead] == ["P18"]
    assert "256" in dead[0].description
    assert dead[0].features["d"] == 256
    assert "--property P18" in dead[0].rerun
    # What came before the fatal case was kept, and so was everything about the other targets.
    assert len(done.of("dies_on_wide_heads", verdict="PASS")) > 10
    assert {r.property for r in done.of("attention", verdict="PASS")} == {"P18", "P23"}
    assert lost_calls(tmp_path / "out", "dies_on_wide_heads", "fp32") == [dead[0].detail]


def hang(q: object, k: object, v: object) -> None:
    while True:
        pass


def test_a_target_is_given_up_after_a_few_lost_calls() -> None:
    target = target_from(hang, spec="hang")
    case = tiny_case("attention", "fp32")
    kinds = [_fault(run(target, case, seconds=0.02)) for _ in range(PATIENCE + 2)]
    assert kinds == ["timeout"] * PATIENCE + ["given up"] * 2
    # Another session of the same function starts anew.
    assert _fault(run(target_from(hang, spec="hang"), case, seconds=0.02)) == "timeout"


def _fault(seen: Observed) -> str:
    return "" if seen.fault is None else seen.fault[0]


def numpy_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    scores = q @ np.swapaxes(k, -1, -2) * np.float32(q.shape[-1] ** -0.5)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)) @ v


def test_an_input_that_numpy_code_writes_to_is_seen() -> None:
    def writes(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        out = numpy_attention(q, k, v)
        v[...] = 0
        return out

    for function, expected in ((numpy_attention, ""), (writes, "mutated")):
        function.__attn_oracle__ = {"framework": "numpy"}  # type: ignore[attr-defined]
        assert _fault(run(target_from(function, spec="f"), tiny_case("attention", "fp32"))) == expected


def test_a_mask_that_a_target_writes_to_is_seen() -> None:
    def writes(q: object, k: object, v: object, attn_mask: object = None) -> object:
        attn_mask.fill_(True)  # type: ignore[attr-defined]
        return q.clone()  # type: ignore[attr-defined]

    case = tiny_case("attention", "fp32", queries=3).with_options(attn_mask=np.zeros((1, 1, 3, 3), dtype=bool))
    seen = run(target_from(writes, spec="f"), case)
    assert seen.fault == ("mutated", "input attn_mask was changed by the call")


def test_memory_around_an_input_is_watched_on_demand() -> None:
    import torch

    def overruns(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctypes.memset(k.data_ptr() + k.numel() * k.element_size(), 0, 4)
        return q.clone()

    target, case = target_from(overruns, spec="f"), tiny_case("attention", "fp32", queries=3)
    assert _fault(run(target, case, guarded=True)) == "overrun"


class Elsewhere(Exception):
    """What another alarm raises."""


@pytest.mark.parametrize("catching", [False, True])
def test_the_alarm_of_somebody_else_rings_through(catching: bool) -> None:
    """A limit on the whole test, say, counts the calls in it and is no failure of the target."""

    def ring(*_: object) -> None:
        raise Elsewhere

    def short(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        time.sleep(0.02)
        if catching:
            raise ValueError
        return q.copy()

    short.__attn_oracle__ = {"framework": "numpy"}  # type: ignore[attr-defined]
    target, case = target_from(short, spec="f"), tiny_case("attention", "fp32")
    before = signal.signal(signal.SIGALRM, ring)
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0.3)
    start = time.monotonic()
    try:
        with pytest.raises(Elsewhere):
            while time.monotonic() < start + 3:
                assert _fault(run(target, case)) == ("raised" if catching else "")
        assert 0.25 < time.monotonic() - start < 2
        assert signal.getsignal(signal.SIGALRM) is ring
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, max(left, 0))
