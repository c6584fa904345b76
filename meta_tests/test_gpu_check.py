"""The script for GPU machines, as far as a machine without one can tell: its plan, and that each call of it works."""

import json
import sys
import time
from dataclasses import replace

import pytest
import torch

from benchmarks import gpu_check
from targets.calling.registry import BUILTINS


def test_plan_names_targets_that_run_on_a_gpu(capsys, tmp_path):
    assert gpu_check.main(["--dry-run", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    verified = [line.split()[4] for line in lines if line.startswith("verify")]
    assert verified[:2] == ["triton_flash", "triton_flash_varlen"] and len(set(verified)) == len(verified)
    assert {"sdpa_cudnn", "flex_attention_compiled", "mla_absorbed"} <= set(verified)
    assert not {"sdpa_flash_lse", "seed_rope_numpy"} & set(verified)  # on a CPU only
    assert set(verified) <= {row.name for row in BUILTINS}
    assert {speed.target for speed in gpu_check.speeds()} <= set(verified)
    assert "torch" in json.loads(lines[-1]) and not list(tmp_path.iterdir())


SMALL = {replace(s, batch=1, heads=min(4, s.heads), kv_heads=1, queries=min(s.queries, 16), keys=32, dim=16)
         for s in gpu_check.speeds()}  # fmt: skip


@pytest.mark.parametrize("speed", sorted(SMALL, key=str), ids=lambda s: f"{s.target}-{s.kind}-{s.dtype}")
def test_every_measured_call_works(speed):
    if speed.target.startswith("sdpa") and speed.dtype != "fp32":
        pytest.skip("torch's flash backend takes no grouped heads on a CPU")
    result = gpu_check.prepared(speed, device="cpu")()
    first = result[0] if isinstance(result, tuple) else result
    assert isinstance(first, torch.Tensor) and first.isfinite().all() and first.any()


def test_flops_are_those_of_two_products_and_a_gradient_has_five():
    speed = gpu_check.Speed("x", "forward", "bf16", 2, 3, 1, 5, 7, 11)
    assert speed.flops() == 2 * (2 * 2 * 3 * 5 * 7 * 11)
    assert replace(speed, kind="backward").flops() == 2.5 * speed.flops()
    square = replace(speed, queries=7)
    assert replace(square, is_causal=True).flops() == square.flops() / 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_so(capsys, tmp_path):
    assert gpu_check.main(["--out", str(tmp_path / "out")]) == 2
    assert "CUDA" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_verification_that_takes_too_long_is_stopped(monkeypatch, tmp_path):
    monkeypatch.setattr(
        gpu_check, "verification", lambda *_a, **_k: [sys.executable, "-c", "import time; time.sleep(60)"]
    )
    start = time.monotonic()
    rows = list(gpu_check.verify_all(["one", "two"], tmp_path, until=start + 1, jobs=1))
    assert {row["target"]: row["status"] for row in rows} == {"one": None, "two": None}
    assert time.monotonic() - start < 20 and "time" in (tmp_path / "records" / "one" / "log.txt").read_text()
    monkeypatch.setattr(gpu_check, "verification", lambda *_a, **_k: [sys.executable, "-c", "raise SystemExit(1)"])
    assert [row["status"] for row in gpu_check.verify_all(["one"], tmp_path, until=time.monotonic() + 60, jobs=1)] == [
        1
    ]
