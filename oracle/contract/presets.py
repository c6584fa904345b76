"""Presets: the contracts that implementations usually keep, by name, their forms and the ladder of strictness.

A *preset* is a set of legal *forms* (evaluation orders); a target keeps it if one form is kept by all its cases. The
row of an op names its own (`oracle.ops.op`); `oracle.ops.contracts` picks among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log

from oracle.contract.contract import Contract


@dataclass(frozen=True, slots=True)
class Presets:
    """The presets of an op. By width of the input format (``fp64``, ``fp32``, ``16``, ``8``): ladder, presets strictest
    first, and default, the one to which an undeclared target is held.
    """

    forms: Mapping[str, tuple[Contract, ...]]
    ladder: Mapping[str, tuple[str, ...]]
    default: Mapping[str, str]


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
_ATTENTION_LADDER = {
    "fp64": ("fp64",),
    "fp32": ("fp32", "sdpa_math", "tf32"),
    "16": ("fp32", "flash", "sdpa_math", "eager"),
    # Separate calls in eight bits do not exist.
    "8": ("fp32", "flash"),
}
_ATTENTION_DEFAULT = {"fp64": "fp64", "fp32": "fp32", "16": "flash", "8": "flash"}
ATTENTION = Presets(_ATTENTION, _ATTENTION_LADDER, _ATTENTION_DEFAULT)
ATTENTION_BACKWARD = replace(ATTENTION, forms=_BACKWARD)
MLA = replace(ATTENTION, forms=_MLA)
MLA_BACKWARD = replace(ATTENTION, forms=_MLA_BACKWARD)
GQA_BLOCK = replace(ATTENTION, forms=_GQA_BLOCK)
MLA_BLOCK = replace(ATTENTION, forms=_MLA_BLOCK)
SOFTMAX = Presets(
    _SOFTMAX,
    {"fp64": ("fp64",), "fp32": ("fp32",), "16": ("fp32", "input")},
    {"fp64": "fp64", "fp32": "fp32", "16": "fp32"},
)
SOFTMAX_BACKWARD = replace(SOFTMAX, forms=_SOFTMAX_BACKWARD)
ROPE = Presets(
    _ROPE,
    {
        "fp64": ("fp64",),
        "fp32": ("fp64_angle", "fp32_angle"),
        "16": ("fp64_angle", "fp32_angle", "input_table", "input_all"),
    },
    {"fp64": "fp64", "fp32": "fp32_angle", "16": "fp32_angle"},
)
