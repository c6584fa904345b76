"""Counterfactuals of attention: keys, heads, scale, operands; the table.

Masks: `properties.ops.attention.diagnosis_masks`; maxima, rescaling and narrow stages: `properties.diagnosis.stages`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.formats import FORMATS, format_of
from oracle.ops.attention.case import scale_float
from properties.diagnosis import outputs, stages
from properties.diagnosis.counterfactual import Counterfactual, FailingCase, Hypothesis, Table
from properties.diagnosis.heads import TILES, Head, Heads, last_missing, of_head
from properties.ops.attention import diagnosis_masks as seen
from properties.ops.attention import diagnosis_probes as probes
from properties.ops.attention.diagnosis_options import options
from properties.subject import LOG2_E

# --- keys ---


def _only(keep: Any) -> Callable[[Head], Head]:
    return lambda h: replace(h, visible=h.visible & keep)


def missing_keys(failing: FailingCase) -> Iterator[Counterfactual]:
    x = Heads(failing.case)
    n = x.keys
    j = np.arange(n)
    for what, count in last_missing(n, "key", "keys"):
        if count < n:
            yield of_head(x, f"{what} missing", _only(j < n - count))
    for t in TILES:
        if n >= t:
            yield of_head(x, "the last key of every full tile of {} were missing", _only(j % t != t - 1), choice=str(t))
        if n > t:
            yield of_head(x, f"keys from {t} on were missing", _only(j < t))
            yield of_head(x, f"the first {t} keys were missing", _only(j >= t))
    if n > 1:
        yield of_head(x, "the first key was missing", _only(j > 0))
        key = x.key_that_is_missing(failing)
        if key is not None:
            yield of_head(x, f"key {key} was missing", _only(j != key))


def padded_keys(failing: FailingCase) -> Iterator[Counterfactual]:
    """Zeros behind the last key that are attended to."""
    x = Heads(failing.case)

    def padded(pad: int) -> Callable[[Head], Head]:
        def make(h: Head) -> Head:
            k, v = (np.pad(a, [(0, pad), (0, 0)]) for a in (h.k, h.v))
            bias = None if h.bias is None else np.pad(h.bias, [(0, 0), (0, pad)])
            return replace(h, k=k, v=v, visible=np.pad(h.visible, [(0, 0), (0, pad)], constant_values=True), bias=bias)

        return make

    pads: dict[int, list[str]] = {}
    for t in TILES:
        pads.setdefault(-x.keys % t, []).append(str(t))
    for pad, tiles in pads.items():
        if pad:
            says = "the zeros that fill the last tile of {} keys were attended to"
            yield of_head(x, says, padded(pad), choice=" or ".join(tiles))


def value_order(failing: FailingCase) -> Iterator[Counterfactual]:
    x = Heads(failing.case)
    n = x.keys
    if n == 1:
        return

    def ordered(order: NDArray[np.int64]) -> Callable[[Head], Head]:
        return lambda h: replace(h, v=h.v[order])

    yield of_head(x, "each key had the value of the next", ordered(np.roll(np.arange(n), -1)))
    yield of_head(x, "each key had the value of the one before", ordered(np.roll(np.arange(n), 1)))
    yield of_head(x, "the order of values were reversed", ordered(np.arange(n)[::-1]))
    for first, t in x.tiles_that_changed_places(failing):
        order = np.arange(n)
        order[first : first + 2 * t] = np.roll(order[first : first + 2 * t], t)
        tiles = f"keys {first} .. {first + t - 1} and {first + t} .. {first + 2 * t - 1}"
        yield of_head(x, f"the values of {tiles} had changed places", ordered(order))
    if failing.case.arrays["k"].shape == failing.case.arrays["v"].shape:
        yield of_head(x, "k and v had changed places", lambda h: replace(h, k=h.v, v=h.k))


def uniform(failing: FailingCase) -> Iterator[Counterfactual]:
    x = Heads(failing.case)
    yield of_head(x, "all weights were equal (the mean of V)", lambda h: replace(h, scale=0.0, bias=None))
    yield of_head(
        x,
        "all weights were equal, those of hidden keys included",
        lambda h: replace(h, scale=0.0, bias=None, visible=np.ones_like(h.visible)),
    )


# --- heads and dimensions ---


def head_mapping(failing: FailingCase) -> Iterator[Counterfactual]:
    x = Heads(failing.case)
    heads, shared = failing.case.arrays["q"].shape[1], failing.case.arrays["k"].shape[1]
    for says, of_k, of_v in kv_heads_read(heads, shared):

        def make(head: Head, of_k: Any = of_k, of_v: Any = of_v) -> Head:
            k, v = (failing.case.arrays[n][head.key[0]] for n in ("k", "v"))
            return replace(head, k=k[of_k[head.key[1]]], v=v[of_v[head.key[1]]])

        yield of_head(x, says, make)


def kv_heads_read(heads: int, shared: int) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.int64]]]:
    """Which KV head's K, and whose V, each query head may read by mistake."""
    h = np.arange(heads)
    right = h // (heads // shared)
    if shared == 1:
        return
    yield "KV heads were tiled (h mod Hkv) instead of repeated", h % shared, h % shared
    yield "the number of KV heads were the size of a group (h // Hkv)", h // shared % shared, h // shared % shared
    yield "every query head read KV head 0", 0 * h, 0 * h
    yield "the order of KV heads were reversed", shared - 1 - right, shared - 1 - right
    yield "K came from the KV heads in reverse order, V did not", shared - 1 - right, right
    yield "V came from the KV heads in reverse order, K did not", right, shared - 1 - right


def dimensions(failing: FailingCase) -> Iterator[Counterfactual]:
    x = Heads(failing.case)
    d, s = failing.case.arrays["q"].shape[3], scale_float(failing.case)
    for n in sorted({*TILES, 8, 96, d - 1, d // 2}):
        if 0 < n < d:
            says = f"scores read the first {n} entries of a head only"
            yield of_head(x, says, partial(_cut, n=n, scale=s))
            if failing.case.options.get("scale") is None:
                yield of_head(x, f"{says}, and the scale were that of {n}", partial(_cut, n=n, scale=None))


def _cut(h: Head, n: int, scale: float | None) -> Head:
    return replace(h, q=h.q[:, :n], k=h.k[:, :n], scale=scale)


# --- scale ---


def scales(failing: FailingCase) -> Iterator[Counterfactual]:
    case = failing.case
    q, v = case.arrays["q"], case.arrays["v"]
    given = case.options.get("scale")
    s = scale_float(case)
    for says, value in scale_choices(s, given, q.shape[3], v.shape[3], q.shape[1]):
        if value != s:
            yield of_head(Heads(case), says, partial(_scaled, scale=value))


def _scaled(h: Head, scale: float) -> Head:
    return replace(h, scale=scale)


def scale_choices(s: float, given: float | None, d: int, dv: int, heads: int) -> Iterator[tuple[str, float]]:
    """Numbers that take the place of the scale ``s`` of heads of ``d`` entries."""
    default = 1.0 / float(np.sqrt(d))
    if given is not None:
        yield "the given scale were ignored", default
        yield "the default scale were applied on top of the given one", s * default
    yield "the scale were 1", 1.0
    yield "the scale were applied twice", s * s
    yield "the scale were 1/D", 1.0 / d
    yield "scores were divided by the scale", 1.0 / s if s else s
    yield "the square root of the scale were applied", float(np.sqrt(abs(s)))
    yield "the scale were that of Dv", dv**-0.5
    yield "the scale were that of all heads together", (heads * d) ** -0.5
    yield "the scale had the wrong sign", -s
    yield "exp2 were taken without the factor log2(e)", s / LOG2_E
    yield "the factor log2(e) were applied twice", s * LOG2_E
    for digits in ("1.442", "1.44", "1.4427"):
        yield f"log2(e) were {digits}", s * float(digits) / LOG2_E
    padded = {-(-d // m) * m for m in (8, 16, 32, 64, 128)} | {1 << (d - 1).bit_length()}
    for p in sorted(padded - {d}):
        yield f"the scale were made from D padded to {p}", p**-0.5
    for n in ("fp16", "bf16"):
        yield f"the scale were rounded to {n}", float(FORMATS[n].round(s))


# --- q, k, v in fewer bits ---


def narrow_inputs(failing: FailingCase) -> Iterator[Counterfactual]:
    """Operands that pass through a narrower format: exact values change, so their place is here."""
    x = Heads(failing.case)
    own, s = format_of(failing.case.arrays["q"]), scale_float(failing.case)

    def passed(name: str, which: Sequence[str]) -> Callable[[Head], Head]:
        def make(h: Head) -> Head:
            parts: dict[str, Any] = {n: own.store(FORMATS[name].round(getattr(h, n).astype(np.float64))) for n in which}
            return replace(h, **parts)

        return make

    for name in ("tf32", "fp16", "bf16"):
        if FORMATS[name].precision < own.precision:
            yield of_head(x, f"q and k were rounded to {name}", passed(name, ("q", "k")))
            yield of_head(x, f"q, k and v were rounded to {name}", passed(name, ("q", "k", "v")))
            yield of_head(x, f"v were rounded to {name}", passed(name, ("v",)))

    def prescaled(h: Head) -> Head:
        wide = h.q.astype(np.float64) * s
        # As a kernel does it: a product in float32, then the cast.
        wide = wide if own.name == "fp64" else (h.q.astype(np.float32) * np.float32(s)).astype(np.float64)
        return replace(h, q=own.store(wide), scale=1.0)

    def rooted(h: Head) -> Head:
        root = float(np.sqrt(abs(s)))
        q, k = (own.store(a.astype(np.float64) * root) for a in (h.q, h.k))
        return replace(h, q=q, k=k, scale=1.0 if s > 0 else -1.0)

    yield of_head(x, "q times the scale were rounded to the input's format", prescaled)
    yield of_head(x, "q and k, each times the root of the scale, were rounded to the input's format", rooted)
    for bits in (4, 6, 8, 10):

        def gridded(h: Head, step: float = 2.0**-bits) -> Head:
            return replace(h, q=own.store(np.rint(h.q.astype(np.float64) / step) * step))

        yield of_head(x, f"q were rounded to multiples of 2^-{bits}", gridded)


HYPOTHESES = (
    Hypothesis("LSE", outputs.log_sum_exps),
    Hypothesis("options", options),
    Hypothesis("scale", scales),
    Hypothesis("heads", head_mapping),
    Hypothesis("causal", seen.causal),
    Hypothesis("mask", seen.masks),
    Hypothesis("soft exclusion", seen.soft_exclusion),
    Hypothesis("leaks", seen.leaks),
    Hypothesis("empty rows", outputs.empty_rows),
    Hypothesis("missing keys", missing_keys),
    Hypothesis("padded keys", padded_keys),
    Hypothesis("order of values", value_order),
    Hypothesis("dimensions", dimensions),
    Hypothesis("uniform", uniform),
    *outputs.WHOLE,
    Hypothesis("layout", outputs.interleaved_heads),
    Hypothesis("maximum", stages.maxima, ranged=True),
    Hypothesis("rescaling", stages.rescaling),
    Hypothesis("narrow inputs", narrow_inputs),
    Hypothesis("stages", stages.rounded_stages),
    Hypothesis("narrow output", outputs.rounded_output),
    Hypothesis("row sums", outputs.off_row_sums),
    Hypothesis("fitted scale", stages.other_scale, ranged=True),
)

TABLES = {"attention": Table(HYPOTHESES, probes.RELATED, probes.ranges, probes.wider)}
