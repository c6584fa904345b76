"""Counterfactuals of multi-head latent attention: parts of the score, scale, heads, keys, the causal mask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from oracle.block import Rows
from oracle.case import Case
from oracle.formats import format_of
from oracle.ops.mla.case import scale_float
from properties.diagnosis import outputs, stages
from properties.diagnosis.counterfactual import Counterfactual, FailingCase, Hypothesis, Key, Table, of_case
from properties.diagnosis.heads import TILES, last_missing
from properties.inputs.recipes import Logits, plant
from properties.subject import LOG2_E

WIDE = 2**12


def parts(failing: FailingCase) -> Iterator[Counterfactual]:
    """The two parts of a score."""
    case = failing.case
    q_nope, q_pe = case.arrays["q_nope"], case.arrays["q_pe"]
    yield of_case("the rotary part were left out of the scores", case.with_arrays(q_pe=np.zeros_like(q_pe)))
    yield of_case("the content part were left out of the scores", case.with_arrays(q_nope=np.zeros_like(q_nope)))
    yield of_case("the rotary part were subtracted", case.with_arrays(q_pe=-q_pe))


def scales(failing: FailingCase) -> Iterator[Counterfactual]:
    case = failing.case
    d_h, d_r = case.arrays["q_nope"].shape[3], case.arrays["q_pe"].shape[3]
    d_c, d_v = case.arrays["c_kv"].shape[2], case.arrays["w_uv"].shape[1]
    for says, value in scale_choices(scale_float(case), case.options.get("scale"), d_h, d_r, d_c, d_v):
        yield of_case(says, case.with_options(scale=value))


def scale_choices(s: float, given: float | None, d_h: int, d_r: int, d_c: int, d_v: int) -> Iterator[tuple[str, float]]:
    """Numbers that take the place of the scale ``s``."""
    default = (d_h + d_r) ** -0.5
    rows: list[tuple[str, float]] = []
    if given is not None:
        rows.append(("the given scale were ignored", default))
        rows.append(("the default scale were applied on top of the given one", s * default))
    rows += [
        ("the scale were that of the content part alone, 1/sqrt(d_h)", d_h**-0.5),
        ("the scale were that of the rotary part alone, 1/sqrt(d_r)", d_r**-0.5),
        ("the scale were 1/sqrt(d_c + d_r)", (d_c + d_r) ** -0.5),
        ("the scale were 1/sqrt(d_c)", d_c**-0.5),
        ("the scale were 1/sqrt(d_v)", d_v**-0.5),
        ("scores were divided by the scale", 1 / s if s else s),
        ("the scale were 1", 1.0),
        ("the scale were applied twice", s * s),
        ("the scale had the wrong sign", -s),
        ("exp2 were taken without the factor log2(e)", s / LOG2_E),
        ("the factor log2(e) were applied twice", s * LOG2_E),
    ]
    yield from ((says, value) for says, value in rows if value != s)


def heads(failing: FailingCase) -> Iterator[Counterfactual]:
    case = failing.case
    count = case.arrays["w_uk"].shape[0]
    if count == 1:
        return
    yield from weights_of_heads(case, ("w_uv", "w_uk"))
    q_pe = case.arrays["q_pe"]
    first = np.ascontiguousarray(np.broadcast_to(q_pe[:, :1], q_pe.shape))
    yield of_case("every head used the q_pe of head 0", case.with_arrays(q_pe=first))
    for says, step in (("head h read k_pe of key j + h", -1), ("head h read k_pe of key j - h", 1)):

        def source(key: Key, rows: Rows, step: int = step) -> tuple[Case, Key, Rows]:
            return case.with_arrays(k_pe=np.roll(case.arrays["k_pe"], step * key[1], axis=1)), key, rows

        if case.arrays["k_pe"].shape[1] > 1:
            yield Counterfactual(says, source)


def weights_of_heads(case: Case, names: Sequence[str]) -> Iterator[Counterfactual]:
    """Weights [H, .., ..] taken by the wrong heads."""
    for name in names:
        w, word = case.arrays[name], name.upper()
        yield of_case(f"{word} were applied with the heads reversed", case.with_arrays(**{name: w[::-1]}))
        every = np.ascontiguousarray(np.broadcast_to(w[:1], w.shape))
        yield of_case(f"every head used the {word} of head 0", case.with_arrays(**{name: every}))


def keys(failing: FailingCase) -> Iterator[Counterfactual]:
    """Keys that are missing or too many, and values and keys that do not belong together."""
    case = failing.case
    c_kv, k_pe = case.arrays["c_kv"], case.arrays["k_pe"]
    n = c_kv.shape[1]
    # Without keys at the end, a mask that is aligned to the last key would move.
    aligned = case.options.get("is_causal") and case.options.get("causal_alignment") == "bottom_right"
    if not aligned:
        for what, count in last_missing(n, "key", "keys"):
            if count < n:
                left = case.with_arrays(c_kv=c_kv[:, : n - count], k_pe=k_pe[:, : n - count])
                yield of_case(f"{what} missing", left)
    if not case.options.get("is_causal"):
        for t in TILES:
            pad = -n % t
            if pad:
                more = {name: np.pad(a, [(0, 0), (0, pad), (0, 0)]) for name, a in (("c_kv", c_kv), ("k_pe", k_pe))}
                padded = of_case(
                    "the zeros that fill the last tile of {} keys were attended to", case.with_arrays(**more)
                )
                yield replace(padded, choice=str(t))
    if n > 1:
        yield of_case("k_pe were that of the next key", case.with_arrays(k_pe=np.roll(k_pe, -1, axis=1)))
        yield of_case("k_pe were that of the key before", case.with_arrays(k_pe=np.roll(k_pe, 1, axis=1)))


def causal(failing: FailingCase) -> Iterator[Counterfactual]:
    case = failing.case
    if not case.options.get("is_causal"):
        yield of_case("a causal mask were applied that nobody asked for", case.with_options(is_causal=True))
        return
    last = case.options.get("causal_alignment", "top_left") == "bottom_right"
    other, word = ("top_left", "first") if last else ("bottom_right", "last")
    yield of_case("is_causal were ignored", case.without_options("is_causal"))
    yield of_case(f"the causal mask were aligned to the {word} key", case.with_options(causal_alignment=other))


def ranges(case: Case) -> Iterator[Case]:
    """Scores far from zero, along the rotary part."""
    rng = np.random.default_rng(6)
    own = format_of(case.arrays["q_pe"])
    q = rng.standard_normal(case.arrays["q_pe"].shape)
    k = rng.standard_normal(case.arrays["k_pe"].shape)
    for size in (150.0, -150.0, -12e3, -57e3):
        moved, planted = plant(q, k, scale_float(case), Logits("offset", size), 1)
        yield case.with_arrays(q_pe=own.store(moved), k_pe=own.store(planted))


def wider(case: Case) -> Iterator[Case]:
    """Four rows and 128 keys more: every remainder by a tile stays what it is."""
    sq, sk = case.arrays["q_nope"].shape[2], case.arrays["c_kv"].shape[1]
    if sq * sk > WIDE:
        return
    rng = np.random.default_rng(8)
    arrays = {}
    for name, axis, more in (("q_nope", 2, 4), ("q_pe", 2, 4), ("c_kv", 1, 128), ("k_pe", 1, 128)):
        shape = list(case.arrays[name].shape)
        shape[axis] += more
        arrays[name] = format_of(case.arrays[name]).store(rng.standard_normal(shape))
    yield case.with_arrays(**arrays)


HYPOTHESES = (
    Hypothesis("LSE", outputs.log_sum_exps),
    Hypothesis("parts", parts),
    Hypothesis("scale", scales),
    Hypothesis("heads", heads),
    Hypothesis("causal", causal),
    Hypothesis("empty rows", outputs.empty_rows),
    Hypothesis("keys", keys),
    *outputs.WHOLE,
    Hypothesis("layout", outputs.interleaved_heads),
    Hypothesis("maximum", stages.maxima, ranged=True),
    Hypothesis("narrow output", outputs.rounded_output),
    Hypothesis("row sums", outputs.off_row_sums),
)

TABLES = {"mla": Table(HYPOTHESES, (), ranges, wider)}
