"""Presets: the contracts that implementations usually keep, by op and name, their forms and the ladder of strictness.

A *preset* is a set of legal *forms* (evaluation orders); a target keeps it if one form is kept by all its cases.
"""

from __future__ import annotations

from dataclasses import fields, replace
from math import exp, isfinite, log
from typing import Any

from oracle.contract.contract import ENGINES, EXPONENTS, Contract, UnknownContract, resolved
from oracle.formats import EIGHT_BITS, Format, format_named

_LAG = 8 * log(2.0)
_ATTENTION: dict[str, tuple[Contract, ...]] = {
    "fp64": (
        Contract("fp64", "plain", compute="fp64", weights="fp64"),
        Contract("fp64", "normalised", compute="fp64", weights="fp64", normalised_p=True),
    ),
    "fp32": (
        Contract("fp32", "plain", weights="fp32"),
        Contract("fp32", "normalised", weights="fp32", normalised_p=True),
        Contract("fp32", "split", weights="fp32", splits=8),
    ),
    "flash": (
        Contract("flash", "plain"),
        Contract("flash", "normalised", normalised_p=True),
        Contract("flash", "split", splits=8),
        Contract("flash", "rounded row sum", row_sum="rounded"),
        Contract("flash", "lazy maximum", lag=_LAG),
    ),
    "tf32": (
        Contract("tf32", "plain", weights="fp32", operands="tf32"),
        Contract("tf32", "normalised", weights="fp32", operands="tf32", normalised_p=True),
    ),
    "sdpa_math": (Contract("sdpa_math", "plain", weights="fp32", qk_prescale="compute", normalised_p=True),),
    "eager": (Contract("eager", "plain", scores="input", score_stores=2, normalised_p=True),),
}
_SOFTMAX: dict[str, tuple[Contract, ...]] = {
    preset: (
        Contract(preset, "natural", compute=preset),
        Contract(preset, "exp2", compute=preset, exponent="exp2"),
        Contract(preset, "from lse", compute=preset, exponent="exp2", from_lse=True),
        Contract(preset, "scaled", compute=preset, exponent="scaled"),
    )
    for preset in ("fp64", "fp32", "input")
}
# How the gradients of the forward presets are usually made: by a fused kernel, which takes D from the output, or by
# automatic differentiation of separate calls, whose softmax takes it from its weights.
_FUSED = {"flash": 1}
_BACKWARD: dict[str, tuple[Contract, ...]] = {
    name: tuple(
        dict.fromkeys(
            replace(form, delta=delta, grad_stores=_FUSED.get(name, 0), label=f"{form.label}, D from {delta}")
            for delta in ("output", "weights")
            for form in (forms if delta == "output" else forms[:1])
        )
    )
    for name, forms in _ATTENTION.items()
}
_BACKWARD["sdpa_math"] = tuple(form for form in _BACKWARD["sdpa_math"] if form.delta == "weights")
_STORES = {"delta": "weights", "grad_stores": 2, "dp_stored": True}
_BACKWARD["flash"] += (replace(_ATTENTION["flash"][0], label="dP and dS stored", **_STORES),)  # type: ignore[arg-type]
_BACKWARD["eager"] = (replace(_ATTENTION["eager"][0], **_STORES),)  # type: ignore[arg-type]
# Separate calls in a 16-bit format usually sum in float32 inside the one that sums.
_SOFTMAX["input"] = (
    *(replace(form, label=f"{form.label}, fp32 sum", row_sum="fp32") for form in _SOFTMAX["input"][:3]),
    *_SOFTMAX["input"],
)
_SOFTMAX_BACKWARD: dict[str, tuple[Contract, ...]] = {
    preset: (Contract(preset, "plain", compute=preset),) for preset in ("fp64", "fp32", "input")
}
_SOFTMAX_BACKWARD["input"] = (
    replace(_SOFTMAX_BACKWARD["input"][0], label="fp32 sum", row_sum="fp32"),
    *_SOFTMAX_BACKWARD["input"],
)
_ROPE = {
    "fp64": (Contract("fp64", "plain", compute="fp64"),),
    "fp32_angle": (Contract("fp32_angle", "plain"),),
    "fp64_angle": (Contract("fp64_angle", "plain", angle="fp64"),),
    "input_table": (Contract("input_table", "plain", table="input"),),
    "input_all": (
        Contract("input_all", "fp32 angle", table="input", rotate="input"),
        Contract("input_all", "plain", angle="input", table="input", rotate="input"),
    ),
}
# Eager code stores whatever passes from one call to the next: up-projected operands and the latent sum too.
_STORED: dict[str, dict[str, str]] = {"eager": {"up": "input", "latent": "input"}}
_MLA = {
    name: tuple(
        replace(f, form=form, label=f"{form} {f.label}", **_STORED.get(name, {}))  # type: ignore[arg-type]
        for form in ("materialised", "absorbed")
        for f in forms
    )
    for name, forms in _ATTENTION.items()
}
# A block of separate calls stores what they pass on; `fp32` is one that keeps everything.
_CALLS = ("flash", "sdpa_math", "eager")


def _of_calls(forms: tuple[Contract, ...]) -> tuple[Contract, ...]:
    return tuple(replace(f, between="input", rotate="input") for f in forms)


_GQA_BLOCK = {name: _of_calls(forms) if name in _CALLS else forms for name, forms in _ATTENTION.items()}
_MLA_BLOCK = {
    name: tuple(replace(f, table="input", up="input", latent="input") for f in _of_calls(forms))
    if name in _CALLS
    else forms
    for name, forms in _MLA.items()
}
# Gradients of mla's core: separate calls store what is projected, the latent sum, and the gradients of both.
_KEPT: dict[str, str] = {"up": "input", "latent": "input"}
_MLA_BACKWARD = {
    name: tuple(
        replace(f, form=form, label=f"{form} {f.label}", **(_KEPT if name in _CALLS else {}))  # type: ignore[arg-type]
        for form in ("materialised", "absorbed")
        for f in forms
    )
    for name, forms in _BACKWARD.items()
}
PRESETS: dict[str, dict[str, tuple[Contract, ...]]] = {
    "attention": _ATTENTION,
    "attention_backward": _BACKWARD,
    "mla_backward": _MLA_BACKWARD,
    "attention_varlen": _ATTENTION,
    "attention_paged": _ATTENTION,
    "mla": _MLA,
    "gqa_block": _GQA_BLOCK,
    "mla_block": _MLA_BLOCK,
    "softmax": _SOFTMAX,
    "log_softmax": _SOFTMAX,
    "logsumexp": _SOFTMAX,
    "softmax_backward": _SOFTMAX_BACKWARD,
    "rope": _ROPE,
    "rope_backward": _ROPE,
    "rope_apply": _ROPE,
}
_LADDERS = {
    "attention": {
        "fp64": ("fp64",),
        "fp32": ("fp32", "sdpa_math", "tf32"),
        "16": ("fp32", "flash", "sdpa_math", "eager"),
        # Separate calls in eight bits do not exist.
        "8": ("fp32", "flash"),
    },
    "softmax": {"fp64": ("fp64",), "fp32": ("fp32",), "16": ("fp32", "input")},
    "rope": {
        "fp64": ("fp64",),
        "fp32": ("fp64_angle", "fp32_angle"),
        "16": ("fp64_angle", "fp32_angle", "input_table", "input_all"),
    },
}
_FAMILY = {
    "mla": "attention",
    "gqa_block": "attention",
    "mla_block": "attention",
    "mla_backward": "attention",
    "attention_backward": "attention",
    "attention_varlen": "attention",
    "attention_paged": "attention",
    "log_softmax": "softmax",
    "logsumexp": "softmax",
    "softmax_backward": "softmax",
    "rope_apply": "rope",
    "rope_backward": "rope",
}


def default_preset(op: str, input_format: str) -> str:
    """The preset to which an undeclared target is held."""
    family = _FAMILY.get(op, op)
    if input_format == "fp64":
        return "fp64"
    if family == "attention":
        return "fp32" if input_format == "fp32" else "flash"
    return {"softmax": "fp32", "rope": "fp32_angle"}[family]


def ladder(op: str, input_format: str) -> tuple[str, ...]:
    """Presets for inputs of this format, strictest first."""
    steps = _LADDERS[_FAMILY.get(op, op)]
    if input_format in EIGHT_BITS:
        return steps["8"]
    return steps[input_format if input_format in steps else "16"]


def preset_forms(op: str, preset: str) -> tuple[Contract, ...]:
    """The legal forms of a preset; UnknownContract lists the valid names."""
    known = PRESETS[op]
    if preset not in known:
        raise UnknownContract(f"unknown contract {preset!r} for {op}; known: {', '.join(known)}")
    return known[preset]


def declared_forms(op: str, declared: str | dict[str, Any] | None, input_format: str) -> tuple[Contract, ...]:
    """The forms a target is held to: its preset's, with the fields that it declares replaced in each.

    ``declared`` is None (the default preset), a preset name, or a dict of fields with an optional ``preset``.
    """
    if input_format in EIGHT_BITS:
        # What attention in eight bits gives is wider than what it takes.
        given = {"preset": declared} if isinstance(declared, str) else declared or {}
        declared = {"output": "bf16", **given}
    if declared is None:
        return preset_forms(op, default_preset(op, input_format))
    if isinstance(declared, str):
        return preset_forms(op, declared)
    known = {f.name for f in fields(Contract)}
    unknown = sorted(set(declared) - known)
    if unknown:
        raise UnknownContract(f"unknown contract field {unknown[0]!r}; known: {', '.join(sorted(known))}")
    base = preset_forms(op, declared.get("preset", default_preset(op, input_format)))
    # A declared evaluation order leaves the other's forms out (all stay if it is unknown, which is reported below).
    base = tuple(form for form in base if form.form == declared.get("form", form.form)) or base
    changed = {k: v for k, v in declared.items() if k != "preset"}
    forms = tuple(dict.fromkeys(_changed(form, changed) for form in base))
    for form in forms:
        _validate(form)
    # Forms whose largest weight overflows its format are not legal ones.
    fitting = tuple(form for form in forms if _largest_weight(form) <= _weights_of(form, input_format).max_finite)
    if not fitting:
        weights = _weights_of(forms[0], input_format)
        largest = f"{_largest_weight(forms[0]):.6g}, the largest weight times weight_scale,"
        raise UnknownContract(f"{largest} does not fit into {weights.name} (at most {weights.max_finite:.6g})")
    return fitting


def _changed(form: Contract, fields: dict[str, Any]) -> Contract:
    """The form with these fields; one whose label says where D comes from says it of the declared place."""
    made = replace(form, **fields)
    stem, says, _ = form.label.partition(", D from ")
    return replace(made, label=f"{stem}{says}{made.delta}") if says else made


def _largest_weight(form: Contract) -> float:
    return form.weight_scale * exp(form.lag)


def _weights_of(form: Contract, input_format: str) -> Format:
    return resolved(form.weights, format_named(input_format))


def _validate(form: Contract) -> None:
    if form.engine not in ENGINES:
        raise UnknownContract(f"unknown engine {form.engine!r}; known: {', '.join(ENGINES)}")
    if form.qk_prescale not in ("none", "compute", "input"):
        raise UnknownContract(f"unknown qk_prescale {form.qk_prescale!r}; known: none, compute, input")
    if form.exponent not in EXPONENTS:
        raise UnknownContract(f"unknown exponent {form.exponent!r}; known: {', '.join(EXPONENTS)}")
    if form.delta not in ("output", "weights"):
        raise UnknownContract(f"unknown delta {form.delta!r}; known: output, weights")
    if form.form not in ("materialised", "absorbed"):
        raise UnknownContract(f"unknown form {form.form!r}; known: materialised, absorbed")
    named = (
        form.compute, form.scores, form.weights, form.accumulator, form.output, form.angle, form.table, form.rotate,
        form.latent, form.up, form.between, form.cache, form.shifted,
    )  # fmt: skip
    if not (isfinite(form.weight_scale) and form.weight_scale > 0):
        raise UnknownContract(f"weight_scale must be a positive number, got {form.weight_scale!r}")
    for name in named:
        if name is not None and name != "input":
            format_named(name)
