"""Every row of the tables of softmax, rope and mla can fail: a wrong kernel for each, and an honest one that lives.

The wrong kernel has the one defect that the row is about; a mutant of `targets.mutants` is used where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meta_tests.kernels.small_kernels import (
    Array,
    apply_kernel,
    described,
    mla_kernel,
    rope_kernel,
    rounded,
    rows_kernel,
)
from oracle.formats import FORMATS
from properties.judge.verdict import Verdict
from properties.ops.mla import table as mla
from properties.ops.rope import table as rope
from properties.ops.softmax import table as softmax
from properties.property import Property
from properties.search import hunt, judge
from properties.subject import PROFILES, Subject, subject_for
from targets.calling.registry import resolve
from targets.calling.target import Target, target_from
from targets.mutants.table import mutant_named
from targets.probing.probes import probe

SOFTMAX_OPS = ("softmax", "log_softmax", "logsumexp")
TABLES: dict[str, tuple[Property, ...]] = {
    **dict.fromkeys(SOFTMAX_OPS, softmax.PROPERTIES),
    "rope": rope.PROPERTIES,
    "rope_backward": rope.BACKWARD_PROPERTIES,
    "rope_apply": rope.APPLY_PROPERTIES,
    "mla": mla.PROPERTIES,
}
PROFILE = replace(PROFILES["quick"], examples=8, shrink_seconds=0.0, large=512)
Kernel = Callable[..., Any]


def promoted(values: Array, like: Array) -> Array:
    """float32 where the input has 16 bits."""
    return values.astype(np.float32)


def on_a_grid(wide: Array) -> Array:
    return np.rint(64 * wide) / 64


def uneven(e: Array) -> Array:
    """Weights that grow by 5% along the row."""
    return e * np.linspace(1.0, 1.05, e.shape[-1])


def without_last_if_odd(e: Array) -> Array:
    n = e.shape[-1]
    return np.asarray(e[..., : n - 1 if n > 2 and n % 2 else n].sum(axis=-1, keepdims=True))


def close_reciprocal(e: Array) -> Array:
    return np.asarray(e.sum(axis=-1, keepdims=True) * (1 + 2e-4))


def visible_as_minus_20(wide: Array) -> Array:
    return np.where(np.isneginf(wide), -20.0, wide)


def no_nan(wide: Array) -> Array:
    return np.where(np.isnan(wide), -np.inf, wide)


def no_shift(wide: Array) -> Array:
    return np.zeros_like(wide[..., :1])


def half_sum(e: Array) -> Array:
    return np.asarray(e.mean(axis=-1, keepdims=True))


def overwriting(op: str, honest: Kernel) -> Kernel:
    """Doubles its first input in place, after it has been used."""

    def kernel(**inputs: Any) -> Any:
        result = honest(**inputs)
        first = next(iter(inputs.values()))
        first[...] = (2 * first.astype(np.float64)).astype(first.dtype)
        return result

    kernel.__wrapped__ = honest  # type: ignore[attr-defined] - its signature says which inputs there are
    return described(kernel, op, **honest.__attn_oracle__["conventions"])  # type: ignore[attr-defined]


def stale(op: str, honest: Kernel) -> Kernel:
    """Returns what it returned for the first input of the same shape."""
    kept: dict[tuple[int, ...], Any] = {}

    def kernel(x: Array) -> Any:
        return kept.setdefault(x.shape, honest(x))

    return described(kernel, op)


def odd_pairs_short(cos: Array, sin: Array) -> tuple[Array, Array]:
    """The last of an odd number of pairs, from three on, does not turn."""
    if cos.shape[-1] > 2 and cos.shape[-1] % 2:
        cos, sin = cos.copy(), sin.copy()
        cos[..., -1], sin[..., -1] = 1.0, 0.0
    return cos, sin


def in_format(name: str) -> Callable[[Any], Any]:
    return lambda values: FORMATS[name].round(np.asarray(values, dtype=np.float64))


def infinite_beyond_fp16(s: Array) -> Array:
    """Row maxima as fp16 holds them."""
    top = s.max(axis=-1, keepdims=True)
    return np.where(np.abs(top) > 65504.0, np.nan, top)


def one_behind(positions: Array) -> Array:
    """The position before its own, for a single token."""
    return positions - 1 if positions.shape[-2] == 1 else positions


def longest_so_far() -> Callable[[int], int]:
    """The length of the longest call yet."""
    seen = [0]

    def length(n: int) -> int:
        seen[0] = max(seen[0], n)
        return seen[0]

    return length


def squared(scaling: Any) -> Any:
    """Every factor taken twice."""
    return scaling and {**scaling, **({"factor": scaling["factor"] ** 2} if scaling.get("factor") else {})}


def never_one(scaling: Any) -> Any:
    """Factors from 1.5 on, and sequences of the trained length at least."""
    if scaling is None:
        return None
    return {**scaling, "factor": max(1.5, scaling.get("factor") or 1.5)}


def gradient(**steps: Any) -> Kernel:
    return rope_kernel(back=True, **steps)


# (op, id, title or None where the id is unique) -> (wrong kernel or where it is, dtype).
WRONG: dict[tuple[str, str, str | None], tuple[Kernel | str, str]] = {
    ("softmax", "P1", None): (mutant_named("softmax_in_input_dtype").target, "bf16"),
    ("log_softmax", "P1", None): (rows_kernel("log_softmax", total=close_reciprocal), "fp32"),
    ("logsumexp", "P1", None): (rows_kernel("logsumexp", total=close_reciprocal), "fp32"),
    ("softmax", "P2", None): (rows_kernel("softmax", enter=visible_as_minus_20), "fp32"),
    ("log_softmax", "P2", None): (rows_kernel("log_softmax", enter=visible_as_minus_20), "fp32"),
    ("logsumexp", "P2", None): (rows_kernel("logsumexp", enter=no_nan), "fp16"),
    ("softmax", "P5", None): (mutant_named("softmax_implicit_axis").target, "fp32"),
    ("log_softmax", "P5", None): (rows_kernel("log_softmax", total=half_sum), "bf16"),
    ("logsumexp", "P5", None): (rows_kernel("logsumexp", total=half_sum), "bf16"),
    ("logsumexp", "P8", None): (mutant_named("logsumexp_base_two").target, "fp32"),
    ("softmax", "P9", None): (mutant_named("softmax_empty_row_nan").target, "fp32"),
    ("log_softmax", "P9", None): (mutant_named("log_of_softmax").target, "fp16"),
    ("logsumexp", "P9", None): (rows_kernel("logsumexp", shift=no_shift), "fp32"),
    ("softmax", "P15", None): (overwriting("softmax", rows_kernel("softmax")), "fp32"),
    ("log_softmax", "P15", None): (stale("log_softmax", rows_kernel("log_softmax")), "fp32"),
    ("logsumexp", "P15", None): (overwriting("logsumexp", rows_kernel("logsumexp")), "fp16"),
    ("softmax", "P18", None): (mutant_named("softmax_last_odd_entry_left_out").target, "fp16"),
    ("log_softmax", "P18", None): (rows_kernel("log_softmax", total=without_last_if_odd), "fp32"),
    ("logsumexp", "P18", None): (rows_kernel("logsumexp", total=without_last_if_odd), "fp32"),
    **{(op, "P23", None): (rows_kernel(op, leave=promoted), "fp16") for op in SOFTMAX_OPS},
    **{(op, "P25", None): (rows_kernel(op, weights=uneven, enter=on_a_grid), "fp32") for op in SOFTMAX_OPS},
    **{(op, "P28", None): (rows_kernel(op, total=close_reciprocal), "fp32") for op in SOFTMAX_OPS},
    ("rope", "P1", None): (mutant_named("rope_base_10050").target, "fp32"),
    ("rope", "P9", None): (rope_kernel(enter=lambda x: np.clip(x, -300.0, 300.0)), "fp32"),
    ("rope", "P10", None): (mutant_named("rope_single_token_one_behind").target, "fp32"),
    ("rope", "P15", "no side effects, calls independent of each other"): (
        mutant_named("rope_cached_by_length").target,
        "fp32",
    ),
    ("rope", "P15", "a call of another length leaves no trace"): (
        mutant_named("rope_dynamic_keeps_longest").target,
        "fp16",
    ),
    ("rope", "P16", "nothing turns at position 0"): (rope_kernel(positions=lambda p: p + 1), "fp16"),
    ("rope", "P16", "pairs keep their length"): (rope_kernel(table=lambda c, s: (c, 1.02 * s)), "bf16"),
    ("rope", "P16", "a rotation and its inverse give the input"): (
        rope_kernel(table=lambda c, s: (1.02 * c, 1.02 * s)),
        "bf16",
    ),
    ("rope", "P16", "two rotations make one by the sum of positions"): (
        mutant_named("rope_positions_in_bf16").target,
        "bf16",
    ),
    ("rope", "P16", "scores depend on the difference of positions alone"): (
        mutant_named("rope_table_too_short").target,
        "fp32",
    ),
    ("rope", "P16", "the complex product at log-spaced positions"): (mutant_named("rope_sine_negated").target, "bf16"),
    ("rope", "P16", "both layouts are the same up to order"): (mutant_named("rope_layout_ignored").target, "fp16"),
    ("rope", "P16", "different positions rotate differently"): (mutant_named("rope_positions_in_fp16").target, "bf16"),
    ("rope", "P17", None): (mutant_named("rope_rotates_everything").target, "fp16"),
    ("rope", "P18", None): (rope_kernel(table=odd_pairs_short), "fp16"),
    ("rope", "P21", "frequencies and magnitude as the parameters say"): (
        mutant_named("rope_magnitude_ignored").target,
        "bf16",
    ),
    ("rope", "P21", "neutral parameters change nothing"): (mutant_named("rope_dynamic_constant").target, "fp32"),
    ("rope", "P21", "linear scaling divides positions"): (mutant_named("rope_linear_multiplies").target, "fp16"),
    ("rope", "P23", None): (mutant_named("rope_promotes").target, "bf16"),
    ("rope", "P25", None): (rope_kernel(enter=on_a_grid), "fp16"),
    ("rope_backward", "P14", None): (mutant_named("rope_backward_forward_again").target, "bf16"),
    ("rope_backward", "P9", None): (gradient(enter=lambda x: np.clip(x, -300.0, 300.0)), "fp32"),
    ("rope_backward", "P10", None): (gradient(positions=one_behind), "fp32"),
    ("rope_backward", "P15", "no side effects, calls independent of each other"): (
        overwriting("rope_backward", gradient()),
        "fp32",
    ),
    ("rope_backward", "P15", "a call of another length leaves no trace"): (
        gradient(length=longest_so_far()),
        "fp32",
    ),
    ("rope_backward", "P16", "nothing turns at position 0"): (gradient(positions=lambda p: p + 1), "fp16"),
    ("rope_backward", "P16", "pairs keep their length"): (gradient(table=lambda c, s: (c, 1.02 * s)), "bf16"),
    ("rope_backward", "P16", "a rotation and its inverse give the input"): (
        gradient(table=lambda c, s: (1.02 * c, 1.02 * s)),
        "bf16",
    ),
    ("rope_backward", "P16", "two rotations make one by the sum of positions"): (
        gradient(positions=in_format("bf16")),
        "bf16",
    ),
    ("rope_backward", "P16", "both layouts are the same up to order"): (gradient(layout=lambda _: "half"), "fp16"),
    ("rope_backward", "P16", "different positions rotate differently"): (gradient(positions=in_format("fp16")), "bf16"),
    ("rope_backward", "P17", None): (gradient(base=lambda _: 10000.0), "fp16"),
    ("rope_backward", "P18", None): (gradient(table=odd_pairs_short), "fp16"),
    ("rope_backward", "P21", "frequencies and magnitude as the parameters say"): (
        mutant_named("rope_backward_divides_by_magnitude").target,
        "bf16",
    ),
    ("rope_backward", "P21", "neutral parameters change nothing"): (gradient(scaling=never_one), "fp32"),
    ("rope_backward", "P21", "linear scaling divides positions"): (gradient(scaling=squared), "fp16"),
    ("rope_backward", "P23", None): (gradient(leave=promoted), "bf16"),
    ("rope_backward", "P25", None): (gradient(enter=on_a_grid), "fp16"),
    ("rope_apply", "P1", None): (mutant_named("rope_apply_truncates").target, "bf16"),
    ("rope_apply", "P15", None): (overwriting("rope_apply", apply_kernel()), "fp32"),
    ("rope_apply", "P18", None): (apply_kernel(table=odd_pairs_short), "fp16"),
    ("rope_apply", "P23", None): (apply_kernel(leave=promoted), "fp16"),
    ("rope_apply", "P25", None): (apply_kernel(enter=on_a_grid), "fp16"),
    ("mla", "P1", None): (mutant_named("mla_rope_part_omitted").target, "bf16"),
    ("mla", "P4", None): (mla_kernel(reach=1), "bf16"),
    ("mla", "P5", None): (mla_kernel(leave=lambda out, like: rounded(1.02 * out, like)), "fp16"),
    ("mla", "P8", None): (mla_kernel(logarithm=lambda lse: lse * 1.442695), "bf16"),
    ("mla", "P9", None): (mla_kernel(shift=infinite_beyond_fp16), "fp32"),
    ("mla", "P15", None): (overwriting("mla", mla_kernel()), "fp32"),
    ("mla", "P17", None): (mla_kernel(scale=lambda s: 24**-0.5), "bf16"),
    ("mla", "P18", None): (mla_kernel(total=without_last_if_odd), "bf16"),
    ("mla", "P23", None): (mla_kernel(leave=promoted), "bf16"),
    ("mla", "P25", None): (mla_kernel(weights=uneven), "bf16"),
    ("mla", "P26", None): (mutant_named("mla_absorbed_value_heads_reversed").target, "fp32"),
    ("mla", "P28", None): (mla_kernel(total=close_reciprocal), "fp32"),
    ("mla", "G3", None): (mutant_named("mla_output_truncated").target, "bf16"),
}
HONEST: dict[str, Kernel] = {
    **{op: rows_kernel(op) for op in SOFTMAX_OPS},
    "rope": rope_kernel(),
    "rope_backward": rope_kernel(back=True),
    "rope_apply": apply_kernel(),
    "mla": mla_kernel(),
}


def rows() -> list[Any]:
    """(op, row) of every table; only logsumexp is asked for P8."""
    pairs = [(op, row) for op, table in TABLES.items() for row in table]
    return [pytest.param(op, row, id=f"{op}-{row.id}-{row.title[:24]}") for op, row in pairs if asked(op, row)]


def asked(op: str, row: Property) -> bool:
    if (op, row.id) in {(name, "P14") for name in SOFTMAX_OPS}:
        # What torch differentiates is no kernel of numpy's: meta_tests/properties/test_softmax_gradient.py.
        return False
    return row.id != "P8" or op in ("logsumexp", "mla")


def wrong_for(op: str, row: Property) -> tuple[Kernel | str, str]:
    return WRONG[(op, row.id, row.title)] if (op, row.id, row.title) in WRONG else WRONG[(op, row.id, None)]


def subject_of(kernel: Kernel | str, op: str, dtype: str) -> Subject:
    target: Target = (
        resolve(kernel, op=op) if isinstance(kernel, str) else target_from(kernel, spec=f"small {op}", op=op)
    )
    return subject_for(target, dtype, conventions=probe(target, dtype), profile=PROFILE)


def first_failure(subject: Subject, row: Property) -> str:
    """What the first failing input says, edges before the search; an empty string if nothing fails."""
    for edge in row.edges(subject):
        judgement = judge(subject, row, edge)
        if judgement.verdict is Verdict.FAIL:
            return judgement.detail
    records = hunt(subject, replace(row, edges=lambda _: ()), seed=1)
    return next((record.detail for record in records if record.verdict == Verdict.FAIL), "")


def test_every_row_has_a_wrong_kernel() -> None:
    keys = {(op, row.id, row.title) for op, table in TABLES.items() for row in table if asked(op, row)}
    used = {key if key in WRONG else (key[0], key[1], None) for key in keys}
    assert used == set(WRONG)


@pytest.mark.parametrize(("op", "row"), rows())
def test_the_wrong_kernel_fails(op: str, row: Property) -> None:
    detail = first_failure(subject_of(*_ordered(op, row)), row)
    assert detail
    assert "\n" not in detail


def _ordered(op: str, row: Property) -> tuple[Kernel | str, str, str]:
    kernel, dtype = wrong_for(op, row)
    return kernel, op, dtype


@pytest.mark.parametrize(("op", "row"), rows())
def test_the_honest_kernel_lives(op: str, row: Property) -> None:
    dtype = wrong_for(op, row)[1]
    records = hunt(subject_of(HONEST[op], op, dtype), row, seed=2)
    # UNSUPPORTED: one set of frequencies for each sequence (P21), which these kernels do not make.
    legal = {Verdict.PASS, Verdict.VACUOUS, Verdict.EXEMPT, *([Verdict.UNSUPPORTED] if row.id == "P21" else [])}
    assert {record.verdict for record in records} <= legal, [r.detail for r in records if r.verdict not in legal][:2]
    assert any(record.verdict == Verdict.PASS for record in records)


@pytest.mark.parametrize("op", SOFTMAX_OPS[:2])
def test_no_logsumexp_is_asked_of_softmax(op: str) -> None:
    row = next(row for row in softmax.PROPERTIES if row.id == "P8")
    assert {record.verdict for record in hunt(subject_of(HONEST[op], op, "fp32"), row)} == {Verdict.UNSUPPORTED}
