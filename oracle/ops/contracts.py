"""Which contract a target of an op is held to: its presets, by default or declared, with declared fields replaced."""

from __future__ import annotations

from dataclasses import fields, replace
from math import exp, isfinite
from typing import Any

from oracle.contract.contract import ENGINES, EXPONENTS, Contract, UnknownContract, resolved
from oracle.formats import EIGHT_BITS, Format, format_named
from oracle.ops.table import op_named


def default_preset(op: str, input_format: str) -> str:
    """The preset to which an undeclared target is held."""
    return op_named(op).presets.default[_width(input_format)]


def ladder(op: str, input_format: str) -> tuple[str, ...]:
    """Presets for inputs of this format, strictest first."""
    return op_named(op).presets.ladder[_width(input_format)]


def _width(input_format: str) -> str:
    if input_format in EIGHT_BITS:
        return "8"
    return input_format if input_format in ("fp64", "fp32") else "16"


def preset_forms(op: str, preset: str) -> tuple[Contract, ...]:
    """The legal forms of a preset; UnknownContract lists the valid names."""
    known = op_named(op).presets.forms
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
