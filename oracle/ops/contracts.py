"""Which contract a target of an op is held to: its presets, by default or declared, with declared fields replaced."""

from __future__ import annotations

from math import exp
from typing import Any

from oracle.contract.contract import Contract, UnknownContract, resolved
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
    if preset not in tuple(known):
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
    base = preset_forms(op, declared.get("preset", default_preset(op, input_format)))
    # A declared evaluation order leaves the other's forms out (all stay if it is unknown, which is reported below).
    base = tuple(form for form in base if form.latent.form == declared.get("form", form.latent.form)) or base
    changed = {k: v for k, v in declared.items() if k != "preset"}
    forms = tuple(dict.fromkeys(_changed(form, changed) for form in base))
    # Forms whose largest weight overflows its format are not legal ones.
    fitting = tuple(form for form in forms if _largest_weight(form) <= _weights_of(form, input_format).max_finite)
    if not fitting:
        weights = _weights_of(forms[0], input_format)
        largest = f"{_largest_weight(forms[0]):.6g}, the largest weight times weight_scale,"
        raise UnknownContract(f"{largest} does not fit into {weights.name} (at most {weights.max_finite:.6g})")
    return fitting


def _changed(form: Contract, fields: dict[str, object]) -> Contract:
    """The form with these fields; one whose label says where D comes from says it of the declared place."""
    made = form.with_fields(**fields)
    stem, says, _ = form.label.partition(", D from ")
    return made.with_fields(label=f"{stem}{says}{made.gradient.delta}") if says else made


def _largest_weight(form: Contract) -> float:
    return form.weights.scale * exp(form.sums.lag)


def _weights_of(form: Contract, input_format: str) -> Format:
    return resolved(form.weights.cast_to, format_named(input_format))
