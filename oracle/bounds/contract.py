"""Contracts: the precision that a target claims for each stage, their presets, forms and ladder.

A *preset* is a set of legal *forms* (evaluation orders); a target keeps it if one form is kept by all its cases.
Every field is a claim about the implementation; the numbers that bounds are made of follow from the fields
(`Constants`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import ceil, exp, expm1, frexp, isfinite, log, log1p
from typing import Any

from oracle.formats import FORMATS, Format, format_named

ENGINES = ("fma", "h100", "a100", "hopper_fp8")
EXPONENTS = ("natural", "exp2", "scaled")
# Truncating matrix engines: products a step, fraction bits kept, bits of the running result.
_ENGINE_STEPS = {"h100": (16, 25, 23), "a100": (8, 24, 23), "hopper_fp8": (32, 13, 13)}


class UnknownContract(ValueError):
    """A contract field or preset that does not exist; the message lists the valid ones."""


@dataclass(frozen=True, slots=True)
class Contract:
    """One form of one preset. Format names; None means: the input dtype (or ``compute``, where noted).

    compute: format of dots, exp and sums [fp32, fp64; softmax and rope also the input dtype].
    engine: how matrix products sum [fma, h100, a100, hopper_fp8].
    operands: ``tf32`` if fp32 inputs are multiplied in tf32.
    qk_prescale: ``none``; ``compute`` or ``input`` if q, k are scaled and stored before the product.
    scores, score_stores: format of stored scores (None: compute) and how often they are rounded to it.
    shifted: format in which S - m is stored before exp (None: compute).
    weights, weight_scale, normalised_p: format of P in P.V, factor before its cast, whether P is divided by l first.
    row_sum: ``unrounded``, ``rounded`` (sums the cast P) or the format of the running sum.
    accumulator: format of the P.V accumulator (None: compute).
    tile, splits, lag: keys a tile if every tile has a fresh accumulator; split-KV parts; lag of a lazy maximum, nats.
    exp: largest relative error of exp. tanh, tanh_abs: relative and absolute error of the soft cap's tanh.
    output, output_stores, flush: output format and how often O is rounded to it (2 where it is renormalised for a sink
    after it was stored); whether stages flush subnormals.
    saturate: whether what is too large for the output's format becomes its largest number (else inf, or NaN in e4m3).
    lse: ``natural``, ``base2`` or ``absent``. angle, table, rotate: rope stages (None: compute).
    exponent: softmax: ``natural`` exp(x - m); ``exp2`` by one product with log2 e after or fused with the shift;
    ``scaled`` if x log2 e is rounded before the shift. from_lse: softmax, whether the result is formed from a rounded
    L.
    delta: gradients: where D comes from, ``output`` rowsum(dO o O) or ``weights`` sum_j P dP. grad_stores, dp_stored:
    how often dS is rounded to the input format on its way to the products with k and q, whether dP is.
    form, latent, up: mla: ``materialised`` or ``absorbed``; formats of the latent sum and of up-projected k, v or q
    (None: compute). between: blocks: format of what passes between projections, rotation, attention and output
    projection (None: compute). cache: mla_block: format of the kept latents, each row divided by a factor that makes
    its largest entry the format's largest number (None: as between).
    """

    preset: str = "fp32"
    label: str = "plain"
    compute: str = "fp32"
    engine: str = "fma"
    operands: str | None = None
    qk_prescale: str = "none"
    scores: str | None = None
    score_stores: int = 0
    shifted: str | None = None
    weights: str | None = None
    weight_scale: float = 1.0
    normalised_p: bool = False
    row_sum: str = "unrounded"
    accumulator: str | None = None
    tile: int | None = None
    splits: int = 1
    lag: float = 0.0
    exp: float | None = None
    tanh: float | None = None
    tanh_abs: float | None = None
    output: str | None = None
    output_stores: int = 1
    flush: bool = False
    saturate: bool = False
    lse: str = "natural"
    angle: str | None = None
    table: str | None = None
    rotate: str | None = None
    exponent: str = "natural"
    from_lse: bool = False
    delta: str = "output"
    grad_stores: int = 0
    dp_stored: bool = False
    form: str = "materialised"
    latent: str | None = None
    up: str | None = None
    between: str | None = None
    cache: str | None = None


@dataclass(frozen=True, slots=True)
class Constants:
    """The numbers that one contract gives for one input format.

    u, w: unit roundoff and smallest normal of the compute format. e_exp, e_b, e_log: relative errors of exp, of exp
    in rescales and of log; e_ln: absolute error of log; e_tanh, e_tanh_abs:
    errors of tanh. u_X, omega_X: relative and absolute rounding of X (div:
    division, o:
    output, P: the
    cast weights, S: stored scores, D: stored differences S - m, q, k, v: operands of a product). omega_in: absolute
    error of an entry of q or k, scaled or not, next to zero. w_acc: what one step of the P.V accumulator can lose next
    to zero.
    """

    u: float
    w: float
    e_exp: float
    e_b: float
    e_log: float
    e_ln: float
    e_tanh: float
    e_tanh_abs: float
    u_div: float
    u_o: float
    omega_o: float
    u_P: float
    omega_P: float
    u_S: float
    omega_S: float
    u_D: float
    omega_D: float
    u_q: float
    u_k: float
    u_v: float
    omega_in: float
    omega_v: float
    w_acc: float
    compute: Format
    scores: Format

    def g(self, n: float, *, u: float | None = None) -> float:
        """n u / (1 - n u), inf once n u reaches 1 (Higham's gamma)."""
        unit = self.u if u is None else u
        return n * unit / (1 - n * unit) if n * unit < 1 else float("inf")


def _omega(fmt: Format, flush: bool) -> float:
    return fmt.smallest_normal if flush else fmt.omega


def constants(contract: Contract, input_format: Format) -> Constants:
    """The numbers of ``contract`` for inputs of ``input_format``."""
    compute = _resolve(contract.compute, input_format)
    u = compute.unit_roundoff
    weights = _resolve(contract.weights, input_format)
    scores = compute if contract.scores is None else _resolve(contract.scores, input_format)
    output, shifted = _resolve(contract.output, input_format), _resolve(contract.shifted, input_format)
    cast = weights.precision < compute.precision
    tf32 = contract.operands == "tf32" and input_format.precision > FORMATS["tf32"].precision
    operand = FORMATS["tf32"].unit_roundoff if tf32 else 0.0
    prescale = {"none": 0.0, "compute": u, "input": max(u, input_format.unit_roundoff)}[contract.qk_prescale]
    e_exp = contract.exp if contract.exp is not None else 4 * u
    # Inputs that are flushed or cut to tf32 lose an absolute amount next to zero, and so does a scale multiplied into
    # q.
    lost = input_format.smallest_normal if contract.flush else 0.0
    lost += _omega(FORMATS["tf32"], contract.flush) if tf32 else 0.0
    stored = {"none": 0.0, "compute": 0.0, "input": _omega(input_format, contract.flush)}[contract.qk_prescale]
    accumulator = compute if contract.accumulator is None else _resolve(contract.accumulator, input_format)
    return Constants(
        u=u,
        w=compute.smallest_normal,
        e_exp=e_exp,
        e_b=e_exp,
        e_log=4 * u,
        e_ln=2.0**2.6 * u,
        e_tanh=contract.tanh if contract.tanh is not None else 4 * u,
        # That of 1 - 2 / (e^2x + 1), as kernels without a tanh compute it: exp 2u, sum u, division 4u, argument u.
        e_tanh_abs=contract.tanh_abs if contract.tanh_abs is not None else 8 * u,
        u_div=4 * u,
        u_o=output.unit_roundoff,
        omega_o=_omega(output, contract.flush),
        u_P=_cast_unit(contract, max(weights.unit_roundoff if cast else 0.0, operand), u),
        omega_P=_cast_omega(contract, weights, cast, tf32),
        u_S=scores.unit_roundoff if contract.score_stores else 0.0,
        omega_S=_omega(scores, contract.flush) if contract.score_stores else 0.0,
        u_D=0.0 if contract.shifted is None else shifted.unit_roundoff,
        omega_D=0.0 if contract.shifted is None else _omega(shifted, contract.flush),
        u_q=operand + prescale * (1 + operand),
        u_k=operand + prescale * (1 + operand),
        u_v=operand,
        omega_in=lost + stored + _omega(compute, contract.flush),
        omega_v=lost,
        w_acc=max(compute.smallest_normal, _omega(accumulator, contract.flush)),
        compute=compute,
        scores=scores,
    )


def compound(*errors: float) -> float:
    """(1 + a)(1 + b)... - 1 without the cancellation of that form, which would swallow errors near 2^-53."""
    return float(expm1(sum(log1p(e) for e in errors)))


def _cast_unit(contract: Contract, unit: float, u: float) -> float:
    # A factor that is no power of two is rounded into P before the cast and out of the sum after it.
    return unit if frexp(contract.weight_scale)[0] == 0.5 else compound(unit, u, u)


def _cast_omega(contract: Contract, weights: Format, cast: bool, tf32: bool) -> float:
    lost = _omega(weights, contract.flush) if cast else 0.0
    lost += _omega(FORMATS["tf32"], contract.flush) if tf32 else 0.0
    return lost / contract.weight_scale


def _resolve(name: str | None, input_format: Format) -> Format:
    return input_format if name is None or name == "input" else format_named(name)


def dot_error(contract: Contract, c: Constants, terms: int) -> float:
    """c_K: relative to sum |a||b|, the error of one dot product of ``terms`` terms."""
    return _chain_error(contract, c, terms)


def accumulation_error(contract: Contract, c: Constants, keys: int) -> float:
    """c_n: relative to sum p|v|, the error of the P.V accumulation over ``keys`` keys with its rescales."""
    depth = _depth(contract, keys)
    if contract.engine != "fma" and contract.tile is not None:
        # A fresh accumulator per tile, promoted to the compute format by one sum and one rescale.
        return compound(_chain_error(contract, c, min(contract.tile, keys)), c.g(2 * tiles(contract, keys)))
    if contract.engine != "fma":
        chain = _chain_error(contract, c, keys, extra_steps=tiles(contract, keys))
        return compound(chain, c.g(2 * tiles(contract, keys)))
    accumulator = c.u if contract.accumulator is None else format_named(contract.accumulator).unit_roundoff
    return c.g(depth, u=max(c.u, accumulator))


def row_sum_error(contract: Contract, c: Constants, keys: int) -> float:
    """h: relative error of the row sum l over ``keys`` keys."""
    unit = c.u
    if contract.row_sum not in ("unrounded", "rounded"):
        unit = max(unit, format_named(contract.row_sum).unit_roundoff)
    return c.g(_depth(contract, keys), u=unit)


def tiles(contract: Contract, keys: int) -> int:
    """T: how many tiles of keys; ceil(n / 16) unless the contract declares its tile."""
    return max(1, ceil(keys / (contract.tile or 16)))


def rescale_error(contract: Contract, c: Constants, keys: int) -> float:
    """E = -ln(1 - e_exp) - R ln(1 - e_b), R = T - 1 rescales of a running maximum.

    R = 0 where whole rows of scores pass from one call to the next (eager, sdpa_math). Other kernels that divide P
    first know l from an earlier sweep, which may have rescaled it.
    """
    whole_rows = contract.normalised_p and (contract.score_stores > 0 or contract.qk_prescale != "none")
    rescales = 0 if whole_rows else tiles(contract, keys) - 1
    return -log1p(-c.e_exp) - rescales * log1p(-c.e_b)


def _depth(contract: Contract, keys: int) -> int:
    return (contract.tile or keys) + 2 * tiles(contract, keys) + 2


def _chain_error(contract: Contract, c: Constants, terms: int, *, extra_steps: int = 0) -> float:
    if contract.engine == "fma":
        return c.g(terms)
    b, fraction, result = _ENGINE_STEPS[contract.engine]
    steps = ceil(terms / b) + extra_steps
    exponent = steps * ((b + 1) * 2.0**-fraction + 2.0**-result)
    return float("inf") if exponent > 1 else exponent * (1 + exponent)


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
# Gradients of mla's core in the materialised order; up-projections and the gradients of what they gave are stored.
_MLA_BACKWARD = {
    name: tuple(replace(f, up="input") for f in forms) if name in _CALLS else forms for name, forms in _BACKWARD.items()
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
    forms = tuple(dict.fromkeys(replace(form, **changed) for form in base))
    for form in forms:
        _validate(form)
    # Forms whose largest weight overflows its format are not legal ones.
    fitting = tuple(form for form in forms if _largest_weight(form) <= _weights_of(form, input_format).max_finite)
    if not fitting:
        weights = _weights_of(forms[0], input_format)
        largest = f"{_largest_weight(forms[0]):.6g}, the largest weight times weight_scale,"
        raise UnknownContract(f"{largest} does not fit into {weights.name} (at most {weights.max_finite:.6g})")
    return fitting


def _largest_weight(form: Contract) -> float:
    return form.weight_scale * exp(form.lag)


def _weights_of(form: Contract, input_format: str) -> Format:
    return _resolve(form.weights, format_named(input_format))


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
        form.latent, form.up, form.between, form.cache,
    )  # fmt: skip
    if not (isfinite(form.weight_scale) and form.weight_scale > 0):
        raise UnknownContract(f"weight_scale must be a positive number, got {form.weight_scale!r}")
    for name in named:
        if name is not None and name != "input":
            format_named(name)
