"""Everything that wants a GPU, in one go: verify every target that runs on one, then measure how fast it is.

    python benchmarks/gpu_check.py --out OUT [--minutes 8] [--jobs 8] [--dry-run] [--target NAME ...]

Verification is `attn-oracle verify --device cuda --profile quick`, one command per target, so that a target that
takes its process or the time along leaves the others' records; the records and a report of each lie in
OUT/records/NAME. Timings (triton.testing.do_bench, median of the runs, milliseconds and TFLOP/s of the two products
that every attention needs) lie in OUT/timings.json, with the names of device and versions. Speed is measured first
and takes at most a quarter of the time. The exit status is 1 if any verification failed and 2 if one was not reached.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# The project's own kernels come first, in case the time does not suffice.
FIRST = ("triton_flash", "triton_flash_varlen", "triton_flash_paged", "triton_mla_decode", "triton_rope")


@dataclass(frozen=True)
class Speed:
    """One measurement: target, what is called, dtype, and the sizes of its tensors."""

    target: str
    kind: str  # forward, backward, decode, paged, mla (dim is d_c, beside it d_h = d_v = 128 and d_r = 64) or rope
    dtype: str
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int
    is_causal: bool = False

    def flops(self) -> float:
        """Of the products alone; a causal mask halves those of square problems, a gradient is five products to two."""
        pairs = self.queries * self.keys * (0.5 if self.is_causal and self.queries == self.keys else 1.0)
        products = 4.0 * self.batch * self.heads * pairs * self.dim
        return {"backward": 2.5, "rope": 0.0}.get(self.kind, 1.0) * products


def speeds() -> list[Speed]:
    """What is timed: prefill, its gradient, decoding from a dense and a paged cache, latents, rotation."""
    plan = []
    for dtype in ("bf16", "fp16"):
        for dim in (64, 128):
            shape = (dtype, 4, 16, 4, 4096, 4096, dim, True)
            plan += [Speed(name, "forward", *shape) for name in ("triton_flash", "sdpa_flash")]
            plan += [Speed(name, "backward", *shape) for name in ("triton_flash", "sdpa_flash")]
    plan += [Speed(name, "forward", "fp32", 2, 8, 8, 2048, 2048, 64, True) for name in ("triton_flash", "sdpa_math")]
    plan += [Speed("triton_flash", "decode", "bf16", 16, 32, 8, 1, 8192, 128)]
    plan += [Speed("triton_flash_paged", "paged", "bf16", 16, 32, 8, 1, 8192, 128)]
    plan += [Speed(name, "mla", "bf16", 4, 128, 1, 1, 8192, 512) for name in ("triton_mla_decode", "mla_absorbed")]
    plan += [Speed("triton_rope", "rope", "bf16", 4, 32, 32, 4096, 4096, 128)]
    return plan


def gpu_targets() -> list[str]:
    """Built-in targets that declare CUDA, own kernels first; those that do not load here are left out."""
    from targets.calling.registry import BUILTINS, Unavailable, load_builtin

    names = []
    for row in BUILTINS:
        try:
            target = load_builtin(row)
        except Unavailable:
            continue
        if "cuda" in target.devices and target.framework == "torch":
            names.append(row.name)
    return [*(n for n in FIRST if n in names), *(n for n in names if n not in FIRST)]


def verification(name: str, out: Path, *, seconds: float) -> list[str]:
    """The command line that verifies one target; `seconds` bounds one call of the target."""
    command = [sys.executable, "-m", "reports.command.cli", "verify", name, "--device", "cuda", "--profile", "quick"]
    # One process at a time on the device; compiling a kernel is part of its first call.
    return [*command, "--workers", "1", "--timeout", str(int(seconds)), "--out", str(out / "records" / name)]


def verify(name: str, out: Path, until: float) -> dict[str, Any]:
    """One row: exit status (None: no time left, or not finished in it) and seconds taken."""
    # The proofs are a processor's work, a thread for each command; the device is shared.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_DEFAULT_FP_FUSION": "0", "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    status: int | None = None
    folder = out / "records" / name
    folder.mkdir(parents=True, exist_ok=True)
    if start < until:
        with (folder / "log.txt").open("w") as log:
            try:
                status = subprocess.run(
                    verification(name, out, seconds=120), cwd=ROOT, env=environment, stdout=log,
                    stderr=subprocess.STDOUT, timeout=until - start, check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                log.write("\nstopped: the time that gpu_check was given is over\n")
    return {"target": name, "status": status, "seconds": round(time.monotonic() - start, 1)}


def verify_all(names: list[str], out: Path, *, until: float, jobs: int) -> Iterator[dict[str, Any]]:
    """`verify` for each name, `jobs` at a time, as they end."""
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(verify, name, out, until) for name in names]):
            yield done.result()


def prepared(speed: Speed, *, device: str = "cuda") -> Callable[[], Any]:
    """The call that is timed, on random tensors."""
    import torch

    from targets.calling.registry import BUILTINS, load_builtin

    function = load_builtin(next(row for row in BUILTINS if row.name == speed.target)).function
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[speed.dtype]

    def random(*shape: int) -> Any:
        return torch.randn(shape, dtype=dtype, device=device)

    q = random(speed.batch, speed.heads, speed.queries, speed.dim)
    if speed.kind == "mla":
        heads, latent, nope, rope = speed.heads, speed.dim, 128, 64
        arrays = (
            random(speed.batch, heads, speed.queries, nope), random(speed.batch, heads, speed.queries, rope),
            random(speed.batch, speed.keys, latent), random(speed.batch, speed.keys, rope),
            random(heads, nope, latent) * latent**-0.5, random(heads, nope, latent) * latent**-0.5,
        )  # fmt: skip
        return lambda: function(*arrays)
    if speed.kind == "rope":
        positions = torch.arange(speed.queries, device=device)
        return lambda: function(q, positions)
    if speed.kind == "paged":
        page, pages = 16, speed.batch * speed.keys // 16
        caches = [random(pages, page, speed.kv_heads, speed.dim) for _ in range(2)]
        table = torch.randperm(pages, device=device).view(speed.batch, -1).int()
        lengths = torch.full((speed.batch,), speed.keys, dtype=torch.int32, device=device)
        return lambda: function(q, *caches, table, lengths)
    k, v = (random(speed.batch, speed.kv_heads, speed.keys, speed.dim) for _ in range(2))
    if speed.kind != "backward":
        return lambda: function(q, k, v, is_causal=speed.is_causal)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = function(*leaves, is_causal=speed.is_causal)
    do = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, do, retain_graph=True)


def measure(plan: list[Speed], *, until: float) -> Iterator[dict[str, Any]]:
    """One row per measurement, with `error` in place of numbers where the call fails or the time is over."""
    from triton.testing import do_bench

    for speed in plan:
        row = asdict(speed)
        if time.monotonic() > until:
            yield row | {"error": "no time left"}
            continue
        try:
            milliseconds = float(do_bench(prepared(speed), warmup=20, rep=80, return_mode="median"))
        except Exception as error:  # a measurement that fails is a row of the table too
            yield row | {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
            continue
        yield row | {"ms": milliseconds, "tflops": speed.flops() / milliseconds / 1e9}


def machine() -> dict[str, Any]:
    """Device, its memory, and versions; names only where there is no device."""
    import torch

    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": None}
    if importlib.util.find_spec("triton") is not None:
        found["triton"] = importlib.import_module("triton").__version__
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"device": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything together")
    parser.add_argument("--jobs", type=int, default=max(1, min(8, (os.cpu_count() or 2) - 1)))
    parser.add_argument("--target", action="append", help="verify only these; repeatable")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop; needs no GPU")
    given = parser.parse_args(arguments)
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    names, plan = given.target or gpu_targets(), speeds()
    if given.dry_run:
        for name in names:
            print("verify ", " ".join(verification(name, given.out, seconds=120)[1:]))
        for speed in plan:
            print("measure", *(f"{key}={value}" for key, value in asdict(speed).items()))
        print(json.dumps(machine()))
        return 0
    import torch

    if not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA device; --dry-run shows what would be done", file=sys.stderr)
        return 2
    start = time.monotonic()
    given.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"machine": machine(), "timings": [], "verified": []}

    def keep(kind: str, row: dict[str, Any]) -> None:
        result[kind].append(row)
        print(json.dumps(row), flush=True)
        # After every row: whatever ends this process, what was found before stays.
        (given.out / "timings.json").write_text(json.dumps(result, indent=1) + "\n")

    for row in measure(plan, until=start + 15 * given.minutes):
        keep("timings", row)
    torch.cuda.empty_cache()
    for row in verify_all(names, given.out, until=start + 60 * given.minutes, jobs=given.jobs):
        keep("verified", row)
    statuses = [row["status"] for row in result["verified"]]
    return 2 if None in statuses else int(any(statuses))


if __name__ == "__main__":
    sys.exit(main())
