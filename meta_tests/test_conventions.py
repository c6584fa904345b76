"""Conventions: one table of names and values, and probes that find each value on a kernel that has it."""

from typing import Any

import numpy as np
import pytest

from oracle.ops.table import ops
from properties.conventions import probe
from targets.base import Target, target_from
from targets.conventions import CONVENTIONS, wrong_convention
from targets.honest.table import HONEST
from targets.mutants.table import MUTANTS
from targets.probes import PROBES, WIDTHS, contradictions, returns_lse_unasked
from targets.registry import BUILTINS, Unavailable, load_builtin, resolve


def test_each_op_has_its_conventions_and_no_other_name_or_value() -> None:
    assert set(CONVENTIONS) == set(ops())
    for op, known in CONVENTIONS.items():
        for name, values in known.items():
            assert all(wrong_convention(op, name, value) == "" for value in values)
            assert "known: " + ", ".join(values) in wrong_convention(op, name, "nosuch")
        assert f"unknown convention 'nosuch' for {op}" in wrong_convention(op, "nosuch", "x")


def test_probes_are_about_known_conventions() -> None:
    for op, probes in PROBES.items():
        assert set(probes) <= set(CONVENTIONS[op]), op


def kernel(**said: str) -> Target:
    """A numpy attention that follows the conventions it is told, with a mask, an LSE and grouped heads."""

    def attention(
        q: Any, k: Any, v: Any, *, is_causal: bool = False, attn_mask: Any = None, return_lse: bool = False
    ) -> Any:
        if said.get("grouped_heads") == "refused" and q.shape[1] != k.shape[1]:
            raise ValueError("as many KV heads as query heads, please")
        if said.get("unequal_value_dim") == "refused" and q.shape[3] != v.shape[3]:
            raise ValueError("one head dimension, please")
        if int(said.get("width", q.shape[3])) != q.shape[3]:
            raise NotImplementedError(f"head dimension {said['width']} only")
        group = q.shape[1] // k.shape[1]
        k, v = np.repeat(k, group, 1).astype(np.float64), np.repeat(v, group, 1).astype(np.float64)
        scores = q.astype(np.float64) @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
        visible = np.ones(scores.shape, dtype=bool)
        if is_causal:
            sq, sk = scores.shape[-2:]
            visible &= np.tril(visible, sk - sq if said["causal_alignment"] == "bottom_right" else 0)
        if attn_mask is not None:
            visible &= attn_mask
        weights = np.where(visible, np.exp(scores), 0.0)
        total = weights.sum(-1, keepdims=True)
        empty = total[..., 0] == 0
        with np.errstate(all="ignore"):
            out = (weights @ (np.nan_to_num(v) if said["masked_nan"] == "blocked" else v)) / total
            lse = np.log(total[..., 0]) / (np.log(2.0) if said["lse_base"] == "2" else 1.0)
        out[empty] = {"zero": 0.0, "nan": np.nan, "mean": v.mean(axis=2)[0, 0]}[said["empty_row"]]
        lse[empty] = {"-inf": -np.inf, "+inf": np.inf, "finite": -1e30}[said["empty_row_lse"]]
        return (out.astype(q.dtype), lse.astype(np.float32)) if return_lse else out.astype(q.dtype)

    attention.__attn_oracle__ = {"framework": "numpy"}  # type: ignore[attr-defined]
    return target_from(attention, spec="f")


USUAL = {
    "causal_alignment": "top_left",
    "lse_base": "e",
    "empty_row": "zero",
    "empty_row_lse": "-inf",
    "masked_nan": "blocked",
    "grouped_heads": "accepted",
    "unequal_value_dim": "accepted",
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in CONVENTIONS["attention"].items() for v in values])
def test_a_probe_finds_what_a_kernel_does(name: str, value: str) -> None:
    said = USUAL | {name: value}
    target = kernel(**said)
    for dtype in ("fp32", "bf16"):
        assert probe(target, dtype) == said
    assert contradictions(target, "fp32") == []


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_a_kernel_that_knows_few_head_dimensions_is_probed_at_one_of_them(width: int) -> None:
    said = USUAL | {"causal_alignment": "bottom_right"}
    # Dv != D at the one width that it takes is a call like any other.
    assert probe(kernel(**said, width=str(width)), "fp32") == said


def test_a_target_that_never_answers_has_no_conventions() -> None:
    def broken(q: Any, k: Any, v: Any, is_causal: bool = False) -> Any:
        raise ValueError("never")

    assert probe(target_from(broken, spec="f"), "fp32") == {}


def test_declared_conventions_are_taken_at_their_word() -> None:
    target = kernel(**USUAL)
    target.function.__attn_oracle__["conventions"] = {"lse_base": "2"}  # type: ignore[attr-defined]
    declared = target_from(target.function, spec="f")
    assert probe(declared, "fp32") == USUAL | {"lse_base": "2"}
    assert contradictions(declared, "fp32") == ["convention lse_base is declared 2, but tiny calls show e"]


def test_an_lse_that_comes_unasked_is_found() -> None:
    def pair(q: Any, k: Any, v: Any) -> Any:
        return q.copy(), q[..., 0].astype(np.float32)

    def alone(q: Any, k: Any, v: Any) -> Any:
        return q.copy()

    for function, expected in ((pair, True), (alone, False)):
        function.__attn_oracle__ = {"framework": "numpy"}  # type: ignore[attr-defined]
        assert returns_lse_unasked(target_from(function, spec="f"), "fp32") is expected


@pytest.mark.parametrize("builtin", [b for b in BUILTINS if "triton" not in b.requires], ids=lambda b: b.name)
def test_built_in_targets_do_what_they_declare(builtin: Any) -> None:
    try:
        target = load_builtin(builtin)
    except Unavailable as reason:
        pytest.skip(str(reason))
    if "cpu" not in target.devices:
        pytest.skip("not on a CPU")
    for dtype in target.dtypes:
        assert contradictions(target, dtype) == []


def test_honest_variants_do_what_they_declare() -> None:
    for row in HONEST:
        assert contradictions(resolve(row.target), row.dtypes[0]) == [], row.name


def test_convention_mutants_do_the_opposite_of_what_they_declare() -> None:
    # One mutant a convention: the probe that would accept it could not find anything.
    wanted = {
        "causal_top_left": "causal_alignment",
        "lse_base_two": "lse_base",
        "empty_row_nan": "empty_row",
        "lse_plus_inf": "empty_row_lse",
        "softmax_empty_row_nan": "empty_row",
        "logsumexp_base_two": "lse_base",
    }
    rows = {m.name: m for m in MUTANTS}
    for name, convention in wanted.items():
        found = contradictions(resolve(rows[name].target), rows[name].dtypes[0])
        assert any(f"convention {convention} is declared" in text for text in found), (name, found)
