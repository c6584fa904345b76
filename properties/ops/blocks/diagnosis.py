"""Counterfactuals of whole blocks, gqa_block and mla_block: visibility, rotation, scale, heads, norms, what is kept.

Most are the block on other inputs. Where no inputs have the defect, the formula itself is evaluated with one step
changed (`properties.ops.blocks.changed_steps`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from oracle.case import Case
from oracle.formats import FORMATS, Float64Array, Format, format_of
from oracle.ops.blocks import gqa_case as gqa_block_case
from oracle.ops.blocks import mla_case as mla_block_case
from properties.diagnosis import outputs
from properties.diagnosis.counterfactual import Counterfactual, FailingCase, Hypothesis, Table, of_case
from properties.ops.attention.diagnosis import kv_heads_read, scale_choices
from properties.ops.blocks.changed_steps import ChangedStep, with_step
from properties.ops.mla import diagnosis as latent
from properties.ops.rope.diagnosis_scaling import choices

E4M3 = FORMATS["e4m3"]


# --- both blocks ---


def causal(failing: FailingCase) -> Iterator[Counterfactual]:
    length = failing.case.arrays["x"].shape[1]
    if length > 1:
        yield with_step(failing, "the causal mask were ignored", ChangedStep(more=length))
        yield with_step(failing, "the causal mask let each query see one more key", ChangedStep(more=1))


def rotations(failing: FailingCase) -> Iterator[Counterfactual]:
    yield with_step(failing, "keys were not rotated", ChangedStep(key=np.zeros_like))
    yield with_step(failing, "queries were not rotated", ChangedStep(query=np.zeros_like))
    if failing.case.op == "gqa_block":
        yield from _given_tables(failing.case)
    else:
        yield from _positions(failing)


def _given_tables(case: Case) -> Iterator[Counterfactual]:
    cos, sin = case.arrays["cos"], case.arrays["sin"]
    yield of_case(
        "nothing were rotated (positions ignored)", case.with_arrays(cos=np.ones_like(cos), sin=np.zeros_like(sin))
    )
    yield of_case("the sign of sin were flipped", case.with_arrays(sin=-sin))
    yield of_case("cos and sin had changed places", case.with_arrays(cos=sin, sin=cos))
    dim = 2 * cos.shape[1]
    order = np.concatenate([np.arange(0, dim, 2), np.arange(1, dim, 2)])
    turned = {
        n: case.arrays[n].reshape(-1, dim, case.arrays[n].shape[1])[:, order].reshape(case.arrays[n].shape)
        for n in ("w_q", "w_k")
    }
    if dim > 2:
        yield of_case("the layout were interleaved", case.with_arrays(**turned))


def _positions(failing: FailingCase) -> Iterator[Counterfactual]:
    case, p = failing.case, failing.case.arrays["positions"]
    other = "interleaved" if mla_block_case.chosen(case, "layout") == "half" else "half"
    yield of_case(f"the layout were {other}", case.with_options(layout=other))
    yield of_case("nothing were rotated (positions ignored)", case.with_arrays(positions=np.zeros_like(p)))
    yield of_case("the sign of sin were flipped", case.with_arrays(positions=-p))
    for says, side in (("queries", "query"), ("keys", "key")):
        for words, moved in (("counted their positions from 0", _from_zero), ("were one position ahead", _ahead)):
            yield with_step(failing, f"{says} {words}", ChangedStep(**{side: moved}))  # type: ignore[arg-type]
    if p.ndim == 2 and len(p) > 1:
        first = np.ascontiguousarray(np.broadcast_to(p[:1], p.shape))
        yield of_case("all sequences used the positions of the first", case.with_arrays(positions=first))
    if case.options.get("base") is not None:
        yield of_case("base were ignored and 10000 used", case.without_options("base"))


def scaled(failing: FailingCase) -> Iterator[Counterfactual]:
    """Parameters of scaled frequencies ignored or misread; the softmax scale stays what it is."""
    case = failing.case
    if case.options.get("scaling") is None:
        return
    fixed = case.with_options(scale=mla_block_case.scale_float(case))
    yield of_case("scaling were ignored", fixed.without_options("scaling"))
    # The shared key as a case of rope.
    x, dim = case.arrays["x"], case.arrays["w_kr"].shape[0]
    key = np.zeros((len(x), 1, x.shape[1], dim), dtype=x.dtype)
    options = {name: case.options[name] for name in ("base", "layout", "scaling") if case.options.get(name) is not None}
    for says, parameters in choices(Case("rope", {"x": key, "positions": case.arrays["positions"]}, options)):
        yield of_case(says, fixed.with_options(scaling=parameters))


def _from_zero(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.arange(len(positions), dtype=np.int64)


def _ahead(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    return positions + 1


def scales(failing: FailingCase) -> Iterator[Counterfactual]:
    case = failing.case
    if case.op == "gqa_block":
        n = gqa_block_case.sizes(case)
        s, w_q = n.dim**-0.5, case.arrays["w_q"].astype(np.float64)
        for says, value in scale_choices(s, None, n.dim, n.dim, n.heads):
            yield of_case(says, case.with_arrays(w_q=w_q * (value / s)))
        return
    sizes = (
        case.arrays["w_uk"].shape[1],
        case.arrays["w_kr"].shape[0],
        case.arrays["w_uk"].shape[2],
        case.arrays["w_uv"].shape[1],
    )
    s, given, bare = mla_block_case.scale_float(case), case.options.get("scale"), (sizes[0] + sizes[1]) ** -0.5
    if given is None and abs(s - bare) > 1e-9 * bare:
        yield of_case("the scale lacked YaRN's factor", case.with_options(scale=bare))
        yield of_case("the scale held the root of YaRN's factor", case.with_options(scale=float(np.sqrt(s * bare))))
    for says, value in latent.scale_choices(s, given, *sizes):
        yield of_case(says, case.with_options(scale=value))


def heads(failing: FailingCase) -> Iterator[Counterfactual]:
    case, w_o = failing.case, failing.case.arrays["w_o"]
    if case.op == "gqa_block":
        n = gqa_block_case.sizes(case)
        count = n.heads
        by_head = {name: case.arrays[name].reshape(n.kv_heads, n.dim, -1) for name in ("w_k", "w_v")}
        for says, of_k, of_v in kv_heads_read(n.heads, n.kv_heads):
            moved = {name: np.concatenate(by_head[name][of]) for name, of in (("w_k", of_k), ("w_v", of_v))}
            yield of_case(says, case.with_arrays(**moved).with_options(num_kv_heads=n.heads))
    else:
        count = case.arrays["w_uk"].shape[0]
        if count > 1:
            yield from latent.weights_of_heads(case, ("w_uk", "w_uv", "w_uq", "w_qr"))
    width = w_o.shape[1] // count
    if count > 1:
        whole = w_o.reshape(-1, count, width)
        yield of_case(
            "the heads' outputs were in reverse order", case.with_arrays(w_o=whole[:, ::-1].reshape(w_o.shape))
        )
    if count > 1 and width > 1:
        mixed = w_o.reshape(-1, width, count).swapaxes(1, 2).reshape(w_o.shape)
        yield of_case("the heads' outputs were joined entry by entry", case.with_arrays(w_o=mixed))


def operands(failing: FailingCase) -> Iterator[Counterfactual]:
    """gqa_block: q and k as stored in a narrow format once they are rotated."""
    case = failing.case
    own = format_of(case.arrays["x"])
    for name in ("e4m3", "bf16", "fp16"):
        fmt = FORMATS[name]
        if fmt.precision < own.precision:
            made = of_case(f"rotated q and k were stored in {name}", _of_operands(case, fmt))
            yield replace(made, contract={"rotate": name})


def _of_operands(case: Case, fmt: Format) -> Case:
    """The block of x = [q k v] as they are after their rotation, which projections pick out and nothing turns again."""
    own, dim = format_of(case.arrays["x"]), gqa_block_case.sizes(case).dim
    wide = {name: a.astype(np.float64) for name, a in case.arrays.items()}
    cos, sin = (np.concatenate([wide[name]] * 2, axis=1)[:, None] for name in ("cos", "sin"))
    parts = []
    for name in ("w_q", "w_k", "w_v"):
        part = own.round(wide["x"] @ wide[name].T)
        if name != "w_v":
            heads = part.reshape(*part.shape[:2], -1, dim)
            across = np.concatenate([-heads[..., dim // 2 :], heads[..., : dim // 2]], axis=-1)
            part = fmt.round(own.round(heads * cos + across * sin)).reshape(part.shape)
        parts.append(np.where(np.isfinite(part), part, 0.0))
    picks = np.split(np.eye(sum(part.shape[2] for part in parts)), np.cumsum([part.shape[2] for part in parts])[:-1])
    weights = dict(zip(("w_q", "w_k", "w_v"), picks, strict=True))
    still = {"cos": np.ones_like(wide["cos"]), "sin": np.zeros_like(wide["sin"])}
    return case.with_arrays(x=np.concatenate(parts, axis=2), **weights, **still)


def wider(case: Case) -> Iterator[Case]:
    """Weights that pick one entry each, with a sign: where nothing cancels, bounds are tight and defects tell."""
    rng = np.random.default_rng(8)
    arrays = {"x": rng.standard_normal(case.arrays["x"].shape)}
    for name, a in case.arrays.items():
        if name.startswith("w_"):
            picked = rng.integers(0, a.shape[-1], (*a.shape[:-1], 1))
            arrays[name] = np.where(np.arange(a.shape[-1]) == picked, rng.choice([-1.0, 1.0], picked.shape), 0.0)
    yield case.with_arrays(**{name: format_of(case.arrays[name]).store(a) for name, a in arrays.items()})


# --- norms and latents ---


def norms(failing: FailingCase) -> Iterator[Counterfactual]:
    case = failing.case
    held = [name for name in mla_block_case.NORMS if case.options.get(name) is not None]
    for name in held:
        yield of_case(f"{name} were missing", case.without_options(name))
        gain = np.ones_like(case.options[name])
        yield of_case(f"the gain of {name} were ignored", case.with_options(**{name: gain}))
    if len(held) == 2:
        yield of_case("both norms were missing", case.without_options(*held))
    if not held:
        return
    eps = float(mla_block_case.chosen(case, "eps"))
    yield with_step(failing, "eps stood outside the root of the norm", ChangedStep(norm=partial(_rooted, outside=True)))
    yield with_step(
        failing, "the norm divided by the sum of squares, not their mean", ChangedStep(norm=partial(_rooted, width=1))
    )
    for says, other in (("eps were ignored", 1e-300), ("eps were 1e-05", 1e-5), ("eps were 1e-06", 1e-6)):
        if other != eps:
            yield of_case(says, case.with_options(eps=other))


def _rooted(
    c: Float64Array, gain: Float64Array, eps: float, *, outside: bool = False, width: int | None = None
) -> Float64Array:
    mean = (c * c).sum(axis=1, keepdims=True) / (c.shape[1] if width is None else width)
    root = np.sqrt(mean) + eps if outside else np.sqrt(mean + eps)
    return np.asarray(c / root * gain)


def kept(failing: FailingCase) -> Iterator[Counterfactual]:
    def saturated(c: Float64Array) -> Float64Array:
        return E4M3.round(np.clip(c, -E4M3.max_finite, E4M3.max_finite))

    yield with_step(failing, "latents were kept in e4m3 without a factor", ChangedStep(keep=saturated))
    yield with_step(
        failing,
        f"latents beyond {E4M3.max_finite:g} were cut off",
        ChangedStep(keep=lambda c: np.clip(c, -E4M3.max_finite, E4M3.max_finite)),
    )


_SHARED = (
    Hypothesis("causal", causal),
    Hypothesis("rotation", rotations),
    Hypothesis("scale", scales),
    Hypothesis("heads", heads),
)
_OUTPUT = (
    *outputs.WHOLE,
    Hypothesis("narrow output", outputs.rounded_output),
)

TABLES = {
    "gqa_block": Table((*_SHARED, Hypothesis("operands", operands), *_OUTPUT), wider=wider),
    "mla_block": Table(
        (*_SHARED, Hypothesis("scaling", scaled), Hypothesis("norms", norms), Hypothesis("latents", kept), *_OUTPUT),
        wider=wider,
    ),
}
