"""Conventions: one table of names and values, and probes that find each value on a kernel that has it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from oracle.case import Case
from oracle.ops.attention.row import NAN_BEHIND
from oracle.ops.table import ops
from targets.calling.metadata import wrong_convention
from targets.calling.registry import BUILTINS, Unavailable, load_builtin, resolve
from targets.calling.target import Target, target_from
from targets.honest.table import HONEST
from targets.mutants.table import mutants
from targets.probing.asked import WIDTHS
from targets.probing.probes import contradictions, probe, probes_of, returns_lse_unasked

CONVENTIONS = {name: op.conventions for name, op in ops().items()}


def test_each_op_has_its_conventions_and_no_other_name_or_value() -> None:
    for op, known in CONVENTIONS.items():
        for name, values in known.items():
            assert all(wrong_convention(op, name, value) == "" for value in values)
            assert "known: " + ", ".join(values) in wrong_convention(op, name, "nosuch")
        assert f"unknown convention 'nosuch' for {op}" in wrong_convention(op, "nosuch", "x")


def kernel(**said: str) -> Target:
    """A numpy attention that follows the conventions it is told, with a mask, an LSE and grouped heads."""

    def attention(
        q: Any,
        k: Any,
        v: Any,
        *,
        is_causal: bool = False,
        attn_mask: Any = None,
        window_size: Any = None,
        softcap: float | None = None,
        alibi_slopes: Any = None,
        sinks: Any = None,
        return_lse: bool = False,
    ) -> Any:
        options = {"attn_mask": attn_mask, "alibi_slopes": alibi_slopes}
        beyond = ops()["attention"].refused(Case("attention", {"q": q, "k": k, "v": v}, options), said)
        if beyond:
            raise ValueError(f"no {beyond}, please")
        if int(said.get("width", q.shape[3])) != q.shape[3]:
            raise NotImplementedError(f"head dimension {said['width']} only")
        group = q.shape[1] // k.shape[1]
        k, v = np.repeat(k, group, 1).astype(np.float64), np.repeat(v, group, 1).astype(np.float64)
        options |= {"is_causal": is_causal, "window_size": window_size}
        if all(said[name] == "blocked" for name, excludes in NAN_BEHIND.items() if excludes(options)):
            k, v = np.nan_to_num(k), np.nan_to_num(v)
        scores = q.astype(np.float64) @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
        sq, sk = scores.shape[-2:]
        before = np.arange(sq)[:, None] - np.arange(sk) + (sk - sq if said["causal_alignment"] == "bottom_right" else 0)
        visible, bias = np.ones(scores.shape, dtype=bool), np.zeros(scores.shape)
        if is_causal:
            visible &= before >= 0
        if window_size is not None:
            left, right = (n if n >= 0 else 10**6 for n in window_size)
            visible &= (before <= left - (said["window_left"] == "excluded")) & (-before <= right)
        if attn_mask is not None and attn_mask.dtype == bool:
            visible &= attn_mask
        elif attn_mask is not None:
            bias = bias + attn_mask.astype(np.float64)
        if alibi_slopes is not None:
            reach = np.arange(sk) if said["alibi_bias"] == "key_index" else -np.abs(before)
            bias = bias + alibi_slopes[..., None, None] * reach
        first = softcap if said["softcap_order"] == "before_mask" else None
        scores = (scores if first is None else first * np.tanh(scores / first)) + bias
        if softcap is not None and first is None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.where(visible, np.exp(scores), 0.0)
        summed = total = weights.sum(-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks.astype(np.float64))[:, None, None]
            summed = summed if said["lse_sink"] == "excluded" else total
        empty = total[..., 0] == 0
        with np.errstate(all="ignore"):
            out = (weights @ v) / total
            lse = np.log(summed[..., 0]) / (np.log(2.0) if said["lse_base"] == "2" else 1.0)
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
    **dict.fromkeys(NAN_BEHIND, "blocked"),
    **dict.fromkeys(ops()["attention"].limits, "accepted"),
    "window_left": "included",
    "softcap_order": "before_mask",
    "alibi_bias": "distance",
    "lse_sink": "included",
}


@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n in probes_of(ops()["attention"]) for v in CONVENTIONS["attention"][n]]
)
def test_a_probe_finds_what_a_kernel_does(name: str, value: str) -> None:
    said = USUAL | {name: value}
    target = kernel(**said)
    for dtype in ("fp32", "bf16"):
        # Without boolean masks none shows what a NaN behind one does.
        unknown = {"masked_nan"} if (name, value) == ("boolean_mask", "refused") else set()
        unknown |= {"masked_nan_additive"} if (name, value) == ("additive_mask", "refused") else set()
        assert probe(target, dtype) == {n: v for n, v in said.items() if n not in unknown}
    assert contradictions(target, "fp32") == []


def test_a_declared_refusal_need_not_be_one() -> None:
    target = kernel(**USUAL)
    target.function.__attn_oracle__["conventions"] = {"boolean_mask": "refused"}  # type: ignore[attr-defined]
    assert contradictions(target_from(target.function, spec="f"), "fp32") == []


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_a_kernel_that_knows_few_head_dimensions_is_probed_at_one_of_them(width: int) -> None:
    said = USUAL | {"causal_alignment": "bottom_right"}
    # Dv != D at the one width that it takes is a call like any other.
    assert probe(kernel(**said, width=str(width)), "fp32") == said


def test_a_target_that_never_answers_has_no_conventions() -> None:
    def broken(q: Any, k: Any, v: Any, is_causal: bool = False) -> Any:
        raise ValueError("never")

    assert probe(target_from(broken, spec="f"), "fp32") == {}


def without(target: Target, *names: str) -> Target:
    """The target, of which some parameters are not known."""
    return replace(target, parameters={n: own for n, own in target.parameters.items() if n not in names})


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_an_alignment_shows_through_a_window_or_alibi(alignment: str) -> None:
    target = kernel(**USUAL | {"causal_alignment": alignment})
    for hidden in (("is_causal",), ("is_causal", "window_size")):
        assert probe(without(target, *hidden), "fp32")["causal_alignment"] == alignment
    bare = probe(without(target, "is_causal", "window_size", "alibi_slopes"), "fp32")
    assert "causal_alignment" not in bare
    # A window that no key lies in is an empty row, where there is no mask.
    windowed = probe(without(target, "is_causal", "attn_mask"), "fp32")
    assert (windowed["empty_row"], windowed["empty_row_lse"]) == ("zero", "-inf")


def test_what_no_probe_can_tell_stays_unknown() -> None:
    target = kernel(**USUAL)
    told = {
        "softcap_order": ("attn_mask", "alibi_slopes"),
        "window_left": ("window_size",),
        "lse_sink": ("sinks",),
        "alibi_bias": ("alibi_slopes",),
    }
    for name, by in told.items():
        assert name not in probe(without(target, *by), "fp32")
    silent = replace(target, function=lambda *a, **k: target.function(*a, **k | {"return_lse": False}))
    assert "lse_sink" not in probe(without(silent, "return_lse"), "fp32")


@pytest.mark.parametrize("order", ["before_mask", "after_mask"])
@pytest.mark.parametrize("bias", ["distance", "key_index"])
def test_the_order_of_a_cap_shows_through_alibi(order: str, bias: str) -> None:
    target = kernel(**USUAL | {"softcap_order": order, "alibi_bias": bias})
    assert probe(without(target, "attn_mask"), "fp32")["softcap_order"] == order


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
    rows = {m.name: m for m in mutants()}
    for name, convention in wanted.items():
        found = contradictions(resolve(rows[name].target), rows[name].dtypes[0])
        assert any(f"convention {convention} is declared" in text for text in found), (name, found)
