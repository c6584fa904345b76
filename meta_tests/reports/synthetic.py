"""Record files made by hand, through the same `Journal` that runs write with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from properties.record import Journal, Record

ENVIRONMENT: Mapping[str, Any] = {
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "dirty": False,
    "versions": {"python": "3.11.7", "numpy": "2.4.6"},
    "processor": "a processor",
    "date": "2031-02-03T04:05:06+00:00",
    "argv": ["verify", "kernel.py:attend"],
    "seed": 7,
    "profile": "default",
    "device": "cpu",
}

PASSED = Record(
    target="kernel",
    origin="user",
    op="attention",
    dtype="bf16",
    device="cpu",
    property="P1",
    title="error within the contract's bound",
    case="00112233445566aa",
    description="attention(q[1, 1, 4, 8] bfloat16, k[1, 1, 9, 8] bfloat16, v[1, 1, 9, 8] bfloat16)",
    verdict="PASS",
    basis="derived",
    ratio=0.25,
    detail="within the plain form's bound",
    contract="flash",
    forms={"plain": 0.25, "split": 0.5},
    metrics={
        "exempt": 0,
        "out": {
            "n": 2000, "exact": 1500, "ulp_max": 3.0, "ulp_p999": 2.0, "ulp_mean": 0.5, "normwise": 0.002, "bias": 0.01,
            "z": 1.5, "nonfinite": 0,
        },
    },
    features={"recipe": "normal", "sk": 9},
    datasheet={"conventions": {"causal_alignment": "top_left"}, "interpreted": False},
    rerun="attn-oracle verify kernel.py:attend --op attention --dtype bf16 --property P1 --profile default --seed 7",
    examples=20,
    seconds=0.5,
)  # fmt: skip

FAILED = replace(
    PASSED,
    verdict="FAIL",
    ratio=12.5,
    detail="error is 12.5 times the bound of contract flash",
    case="ffeeddccbbaa0011",
    worst={
        "output": "out",
        "index": [0, 0, 3, 5],
        "observed": "0x1.8p-1",
        "exact": "0x1.0p-1",
        "exact_low": "0x0.0p+0",
        "radius": "0x1p-60",
    },
    stem="out/cases/kernel-bf16-P1-ffeeddccbbaa0011.json",
    rerun="attn-oracle verify kernel.py:attend --property P1 --case out/cases/kernel-bf16-P1-ffeeddccbbaa0011.json",
)


def write(
    folder: Path,
    records: Iterable[Record] = (),
    *,
    worker: str = "gw0",
    environment: Mapping[str, Any] | None = ENVIRONMENT,
    notes: Iterable[tuple[str, Mapping[str, Any]]] = (),
) -> Path:
    """A folder with the records of one worker, an environment line and further notes; the folder."""
    journal = Journal(folder, worker)
    if environment is not None:
        journal.note("environment", environment)
    for kind, row in notes:
        journal.note(kind, row)
    for record in records:
        journal.complete(journal.begin({"target": record.target, "property": record.property}), record)
    journal.close()
    return folder


def append(folder: Path, text: str, *, worker: str = "gw0") -> None:
    """Raw text at the end of a record file."""
    with (folder / f"records-{worker}.jsonl").open("a", encoding="utf-8") as file:
        file.write(text)


def sweeps() -> list[Record]:
    """Records of every sweep that figures are made of, of two targets and dtypes, with awkward values among them."""
    made = []
    for target, dtype, gain in (("kernel", "bf16", 1.0), ("kernel", "fp32", 0.1), ("other", "bf16", 30.0)):
        base = replace(PASSED, target=target, dtype=dtype)

        def one(
            op: str, sweep: str, ratio: float | None, base: Record = base, gain: float = gain, **features: Any
        ) -> Record:
            scaled = None if ratio is None else ratio * gain
            verdict = "FAIL" if scaled is not None and not scaled <= 1 else "PASS"
            metrics = {**base.metrics, "out": {**base.metrics["out"], "normwise": 0.001 * gain}}
            return replace(
                base, op=op, ratio=scaled, verdict=verdict, metrics=metrics, features={"sweep": sweep, **features}
            )

        made += [one("attention", "context", r, sk=sk) for sk, r in ((64, 0.5), (256, 0.2), (1024, 0.0), (4096, 1e-9))]
        made += [
            one("attention", "logits", r, logit_size=s)
            for s, r in ((1.0, 0.1), (-30.0, 0.2), (1e3, 0.5), (1e6, float("inf")))
        ]
        made += [one("attention", "sink", r, sink_mass=m) for m, r in ((0.1, 0.1), (0.9, 0.2), (0.999, 0.4))]
        made += [replace(one("attention", "", 0.3, sink_mass=0.42), features={"real": "layer00", "sink_mass": 0.42})]
        made += [one("softmax", "context", 0.1, sk=64), one("softmax", "logits", 0.1, logit_size=88.0)]
        made += [one("rope", sweep, 0.01 * p, position=p) for sweep in ("position", "drift") for p in (0, 1, 64, 2**20)]
        made += [replace(one("rope", "position", None, position=2**24), verdict="VACUOUS")]
    return [replace(r, rerun=f"attn-oracle verify k.py:f --case out/cases/{i:04d}.json") for i, r in enumerate(made)]
