"""Presets: the contracts that implementations usually keep, by name, their forms and the ladder of strictness.

A *preset* is a set of legal *forms* (evaluation orders); a target keeps it if one form is kept by all its cases. The
row of an op names its own (`oracle.ops.op`); `oracle.ops.contracts` picks among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log
from types import MappingProxyType

from oracle.contract.contract import Contract, contract_of

Forms = tuple[Contract, ...]


@dataclass(frozen=True, slots=True)
class Presets:
    """The presets of an op; nothing changes them. By width of the input format (``fp64``, ``fp32``, ``16``, ``8``):
    ladder, presets strictest first, and default, the one to which an undeclared target is held.
    """

    forms: Mapping[str, Forms]
    ladder: Mapping[str, tuple[str, ...]]
    default: Mapping[str, str]

    def __post_init__(self) -> None:
        for name in ("forms", "ladder", "default"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))


_LAG = 8 * log(2.0)
_ATTENTION: dict[str, Forms] = {
    "fp64": (
        contract_of("fp64", "plain", compute="fp64", weights="fp64"),
        contract_of("fp64", "normalised", compute="fp64", weights="fp64", normalised_p=True),
    ),
    "fp32": (
        contract_of("fp32", "plain", weights="fp32"),
        contract_of("fp32", "normalised", weights="fp32", normalised_p=True),
        contract_of("fp32", "split", weights="fp32", splits=8),
    ),
    "flash": (
        contract_of("flash", "plain"),
        contract_of("flash", "normalised", normalised_p=True),
        contract_of("flash", "split", splits=8),
        contract_of("flash", "rounded row sum", row_sum="rounded"),
        contract_of("flash", "lazy maximum", lag=_LAG),
    ),
    "tf32": (
        contract_of("tf32", "plain", weights="fp32", operands="tf32"),
        contract_of("tf32", "normalised", weights="fp32", operands="tf32", normalised_p=True),
    ),
    "sdpa_math": (contract_of("sdpa_math", "plain", weights="fp32", qk_prescale="compute", normalised_p=True),),
    "eager": (contract_of("eager", "plain", scores="input", score_stores=2, normalised_p=True),),
}


def _softmax(preset: str) -> Forms:
    made = (
        contract_of(preset, "natural", compute=preset),
        contract_of(preset, "exp2", compute=preset, exponent="exp2"),
        contract_of(preset, "from lse", compute=preset, exponent="exp2", from_lse=True),
        contract_of(preset, "scaled", compute=preset, exponent="scaled"),
    )
    return (*_summed(made[:3]), *made) if preset == "input" else made


def _softmax_backward(preset: str) -> Forms:
    made = contract_of(preset, "plain", compute=preset)
    return (made.with_fields(label="fp32 sum", row_sum="fp32"), made) if preset == "input" else (made,)


def _summed(forms: Forms) -> Forms:
    # Separate calls in a 16-bit format usually sum in float32 inside the one that sums.
    return tuple(form.with_fields(label=f"{form.label}, fp32 sum", row_sum="fp32") for form in forms)


# Gradients by separate calls that store dP and, once for each product, dS.
_STORES: dict[str, object] = {"delta": "weights", "grad_stores": 2, "dp_stored": True}


def _backward(name: str) -> Forms:
    """How the gradients of a forward preset are usually made: by a fused kernel, which takes D from the output, or by
    automatic differentiation of separate calls, whose softmax takes it from its weights.
    """
    forms, first = _ATTENTION[name], _ATTENTION[name][0]
    if name == "eager":
        return (first.with_fields(**_STORES),)
    stores = 1 if name == "flash" else 0
    made = [*((form, "output") for form in forms if name != "sdpa_math"), (first, "weights")]
    usual = tuple(
        form.with_fields(delta=delta, grad_stores=stores, label=f"{form.label}, D from {delta}") for form, delta in made
    )
    return (*usual, first.with_fields(label="dP and dS stored", **_STORES)) if name == "flash" else usual


_BACKWARD = {name: _backward(name) for name in _ATTENTION}
_ROPE = {
    "fp64": (contract_of("fp64", "plain", compute="fp64"),),
    "fp32_angle": (contract_of("fp32_angle", "plain"),),
    "fp64_angle": (contract_of("fp64_angle", "plain", angle="fp64"),),
    "input_table": (contract_of("input_table", "plain", table="input"),),
    "input_all": (
        contract_of("input_all", "fp32 angle", table="input", rotate="input"),
        contract_of("input_all", "plain", angle="input", table="input", rotate="input"),
    ),
}


def _in_both_orders(forms: Forms, **stored: str) -> Forms:
    return tuple(
        f.with_fields(form=form, label=f"{form} {f.label}", **stored)
        for form in ("materialised", "absorbed")
        for f in forms
    )


# Separate calls store what is projected and the latent sum; eager code always does.
_KEPT = {"up": "input", "latent": "input"}
_CORE = {name: _in_both_orders(forms, **(_KEPT if name == "eager" else {})) for name, forms in _ATTENTION.items()}
# A fused kernel often follows calls that project, whose results are stored.
_STORED_FIRST = tuple(
    f.with_fields(label=f"{f.label}, projections stored") for f in _in_both_orders(_ATTENTION["flash"][:3], **_KEPT)
)
_MLA = {**_CORE, "flash": (*_CORE["flash"], *_STORED_FIRST)}
# A block of separate calls stores what they pass on; `fp32` is one that keeps everything.
_CALLS = ("flash", "sdpa_math", "eager")


def _of_calls(forms: Forms) -> Forms:
    return tuple(f.with_fields(between="input", rotate="input") for f in forms)


_GQA_BLOCK = {name: _of_calls(forms) if name in _CALLS else forms for name, forms in _ATTENTION.items()}
_MLA_BLOCK = {
    name: tuple(f.with_fields(table="input", **_KEPT) for f in _of_calls(forms)) if name in _CALLS else forms
    for name, forms in _CORE.items()
}
# Gradients of mla's core: separate calls store the gradients of both as well.
_MLA_BACKWARD = {name: _in_both_orders(forms, **(_KEPT if name in _CALLS else {})) for name, forms in _BACKWARD.items()}
# FlashAttention's exponent, of the attention of one call: where scores are huge it may leave the range.
_DENSE = {
    **_ATTENTION,
    "fp32": (*_ATTENTION["fp32"], contract_of("fp32", "rounded maximum", weights="fp32", maximum="rounded")),
    "flash": (*_ATTENTION["flash"], contract_of("flash", "rounded maximum", maximum="rounded")),
}
_ATTENTION_LADDER = {
    "fp64": ("fp64",),
    "fp32": ("fp32", "sdpa_math", "tf32"),
    "16": ("fp32", "flash", "sdpa_math", "eager"),
    # Separate calls in eight bits do not exist.
    "8": ("fp32", "flash"),
}
_ATTENTION_DEFAULT = {"fp64": "fp64", "fp32": "fp32", "16": "flash", "8": "flash"}
ATTENTION = Presets(_DENSE, _ATTENTION_LADDER, _ATTENTION_DEFAULT)
ATTENTION_BACKWARD = replace(ATTENTION, forms=_BACKWARD)
MLA = replace(ATTENTION, forms=_MLA)
MLA_BACKWARD = replace(ATTENTION, forms=_MLA_BACKWARD)
GQA_BLOCK = replace(ATTENTION, forms=_GQA_BLOCK)
MLA_BLOCK = replace(ATTENTION, forms=_MLA_BLOCK)
_SOFTMAX_NAMES = ("fp64", "fp32", "input")
SOFTMAX = Presets(
    {name: _softmax(name) for name in _SOFTMAX_NAMES},
    {"fp64": ("fp64",), "fp32": ("fp32",), "16": ("fp32", "input")},
    {"fp64": "fp64", "fp32": "fp32", "16": "fp32"},
)
SOFTMAX_BACKWARD = replace(SOFTMAX, forms={name: _softmax_backward(name) for name in _SOFTMAX_NAMES})
ROPE = Presets(
    _ROPE,
    {
        "fp64": ("fp64",),
        "fp32": ("fp64_angle", "fp32_angle"),
        "16": ("fp64_angle", "fp32_angle", "input_table", "input_all"),
    },
    {"fp64": "fp64", "fp32": "fp32_angle", "16": "fp32_angle"},
)
