"""Other cases of attention that a diagnosis asks about: relatives of a case that is right, probes of a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from oracle.case import Case
from oracle.formats import format_of
from oracle.ops.attention.case import scale_float
from properties.diagnosis.heads import Heads
from properties.inputs.recipes import Logits, plant
from properties.ops.attention.relations import blocks_nan
from properties.subject import Subject

# Cases with more (query, key) pairs than this tell enough by themselves.
WIDE = 2**13


def ones(subject: Subject, case: Case) -> Case | None:
    return case.with_arrays(v=np.ones_like(case.arrays["v"]))


def larger(subject: Subject, case: Case) -> Case | None:
    """The same shapes with scores three times as wide in q and in k: what a flat case cannot show."""
    rng = np.random.default_rng(5)
    return case.with_arrays(
        **{n: subject.fmt.store(3.0 * rng.standard_normal(case.arrays[n].shape)) for n in ("q", "k")}
    )


def shifted(subject: Subject, case: Case) -> Case | None:
    """A power of two moved from q to k: the same scores, unless q has an absolute resolution."""
    q, k = (case.arrays[n].astype(np.float64) for n in ("q", "k"))
    moved = {"q": q * 2.0**-6, "k": k * 2.0**6}
    if not all(np.array_equal(subject.fmt.round(a), a) for a in moved.values()):
        return None
    return case.with_arrays(**{n: subject.fmt.store(a) for n, a in moved.items()})


def first_keys(subject: Subject, case: Case) -> Case | None:
    """A third of the keys, as a split of them sees it."""
    k, mask = case.arrays["k"], case.options.get("attn_mask")
    cut = max(1, k.shape[2] // 3)
    if mask is None or cut == k.shape[2]:
        return None
    part = case.with_arrays(k=k[:, :, :cut], v=case.arrays["v"][:, :, :cut])
    return part.with_options(attn_mask=mask[..., :cut] if mask.shape[-1] > 1 else mask)


def spoiled(names: Sequence[str], value: float) -> Callable[[Subject, Case], Case | None]:
    """With ``value`` in one key, or its value, that some row may not attend to."""

    def make(subject: Subject, case: Case) -> Case | None:
        if np.isnan(value) and not blocks_nan(subject, case):
            return None
        q, x = case.arrays["q"], Heads(case)
        rows = np.arange(q.shape[2])
        keys = [(b, h) for b in range(q.shape[0]) for h in range(q.shape[1])]
        hidden = np.flatnonzero(np.any([~x.head(key, rows).visible.all(axis=0) for key in keys], axis=0))
        if not len(hidden):
            return None
        arrays = {n: case.arrays[n].copy() for n in names}
        for array in arrays.values():
            array[:, :, hidden[0]] = min(value, subject.fmt.max_finite / 4) if np.isfinite(value) else value
        return case.with_arrays(**arrays)

    return make


def ranges(case: Case) -> Iterator[Case]:
    """Scores far from zero, and maxima that fall along the keys."""
    rng = np.random.default_rng(6)
    own = format_of(case.arrays["q"])
    q, k = (rng.standard_normal(case.arrays[n].shape) for n in ("q", "k"))
    for kind, size in (
        ("offset", 150.0),
        ("offset", -150.0),
        ("offset", -12e3),
        ("offset", -57e3),
        ("descending", 300.0),
    ):
        if case.arrays["q"].shape[3] > 1 or kind == "offset":
            parts = zip("qk", plant(q, k, scale_float(case), Logits(kind, size), 1), strict=True)
            yield case.with_arrays(**{n: own.store(np.clip(a, -own.max_finite, own.max_finite)) for n, a in parts})


def wider(case: Case) -> Iterator[Case]:
    """Four rows and 128 keys more, so that every remainder by a tile stays what it is; four rows and two keys more."""
    if case.arrays["q"].shape[2] * case.arrays["k"].shape[2] <= WIDE:
        yield _enlarged(case, 128)
        yield _enlarged(case, 2)


def _enlarged(case: Case, more: int) -> Case:
    """Fresh numbers for four rows and ``more`` keys more; masks go on as they begin."""
    rng = np.random.default_rng(8)
    q, k, v = (case.arrays[n] for n in ("q", "k", "v"))
    sq, sk = q.shape[2] + 4, k.shape[2] + more
    arrays = {
        name: format_of(a).store(rng.standard_normal((*a.shape[:2], n, a.shape[3])))
        for name, a, n in (("q", q, sq), ("k", k, sk), ("v", v, sk))
    }
    mask = case.options.get("attn_mask")
    made = case.with_arrays(**arrays)
    if mask is None:
        return made
    for axis, old, new in ((-1, k.shape[2], sk), (-2, q.shape[2], sq)):
        if mask.ndim >= -axis and mask.shape[axis] > 1:
            mask = np.take(mask, np.arange(new) % old, axis=axis)
    return made.with_options(attn_mask=mask)


RELATED: tuple[tuple[str, Callable[[Subject, Case], Case | None]], ...] = (
    ("with V = 1: ", ones),
    ("with larger scores: ", larger),
    ("with q times 2^-6 and k times 2^6: ", shifted),
    ("of the first third of the keys: ", first_keys),
    ("with a huge number in a hidden key: ", spoiled(("k", "v"), 1e30)),
    ("with NaN in the value of a hidden key: ", spoiled(("v",), float("nan"))),
    ("with NaN in a hidden key: ", spoiled(("k",), float("nan"))),
)
