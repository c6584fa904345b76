"""The options of attention, one row each: what is true of an option wherever attention has it.

scale (None: 1/sqrt(D)), is_causal, attn_mask (bool, True = may attend; or additive float), window_size (left, right; -1
is unbounded), softcap, alibi_slopes [Hq] or [B, Hq], sinks [Hq]. q_descale, k_descale, v_descale: factors of 8-bit
storage, float32, one number or [B, Hkv]: what is attended to is q times its factor, and so on, exactly.

What implementations publish differently is an option too, whose first meaning is the default. causal_alignment:
position of query i among the keys, ``top_left`` i or ``bottom_right`` i + Sk - Sq; also for windows and ALiBi.
window_left: whether the key at distance ``left`` is ``included`` or ``excluded``. softcap_order: before or after bias
and ALiBi join. alibi_bias: -slope |distance| or slope j (a row's scores then differ by a constant if no key comes later
than the query, so that O is the same and L is not; with a sink, or a cap after ALiBi, O differs too). lse_sink: whether
L includes the sink's logit.

What an option computes stands in `oracle.ops.attention.case`, how it is drawn and what is said of it in
`properties.ops.attention.options`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from oracle.case import Case
from oracle.formats import FORMATS, Float64Array, Format


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the options of a case must fit: the sizes of their axes ("B", "Hq", ...), and the format of q."""

    axes: Mapping[str, int]
    fmt: Format | None = None

    def shapes(self, dims: str) -> list[tuple[int, ...]]:
        """Those of ``"B Hq"``, shortest first: [Hq] and [B, Hq]."""
        names = dims.split()
        return [tuple(self.axes[name] for name in names[i:]) for i in reversed(range(len(names)))]


Check = Callable[[Any, "Option", Sizes], str]
"""What is wrong with a value, to stand behind the option's name; nothing if it can hold."""


def _anything(value: object, row: Option, sizes: Sizes) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Option:
    """One row.

    default: what leaving it out means. meanings: published values, of which it is one; the first is the default.
    check: see there. depends: options of the latter kind that fix its meaning. aliases: names that parameters have.

    dims: axes of an array, the last ones where it has fewer. spreads: an axis of size 1 stands for all.
    gradient: the output that holds its own. excludes: whether it says which keys a row may attend to.
    parts: with which of two calls that see a part of the keys each it must be, so that their merge is that of all
    keys: with each, with one, or there are no such calls. lacking: relatives that have none: ``gradient``, ``layouts``.
    """

    name: str
    default: object = None
    meanings: tuple[str, ...] = ()
    check: Check = _anything
    depends: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    dims: str = ""
    spreads: bool = False
    gradient: str = ""
    excludes: bool = False
    parts: Literal["each", "one", "none"] = "each"
    lacking: frozenset[str] = frozenset()


def _is_number(x: object, *kinds: type) -> bool:
    # True and False are integers to Python, and an error here.
    return isinstance(x, kinds or (int, float, np.integer, np.floating)) and not isinstance(x, bool)


def finite(value: Any, row: Option, sizes: Sizes) -> str:
    """For any number."""
    return "" if _is_number(value) and np.isfinite(value) else f"must be a finite number, got {value!r}"


def positive(value: Any, row: Option, sizes: Sizes) -> str:
    """For numbers above 0."""
    good = not finite(value, row, sizes) and value > 0
    return "" if good else f"must be a positive number, got {value!r}"


def shaped(value: Any, row: Option, sizes: Sizes) -> str:
    """For arrays of all the row's dimensions, or of the last ones."""
    shapes = sizes.shapes(row.dims)
    if isinstance(value, np.ndarray) and value.shape in shapes:
        return ""
    named = f"[{', '.join(row.dims.split())}] = " if len(shapes) == 1 else ""
    wanted = named + " or ".join(str(list(shape)) for shape in shapes)
    got = f"shape {list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)
    return f"must be an array {wanted}, got {got}"


def _window(value: Any, row: Option, sizes: Sizes) -> str:
    whole = isinstance(value, tuple | list) and all(_is_number(w, int, np.integer) for w in value)
    if not whole or len(value) != 2:
        return f"must be two integers (left, right), got {value!r}"
    return f"{tuple(value)} is negative; -1 means unbounded" if min(value) < -1 else ""


def _mask(value: Any, row: Option, sizes: Sizes) -> str:
    whole = sizes.shapes(row.dims)[-1]
    try:
        fits = np.broadcast_shapes(value.shape, whole) == whole
    except ValueError:
        fits = False
    return "" if fits else f"of shape {list(value.shape)} does not broadcast to [B, Hq, Sq, Sk] {list(whole)}"


def _factor(value: ArrayLike, row: Option, sizes: Sizes) -> str:
    if sizes.fmt is not None and sizes.fmt.name == "fp64":
        return "is for formats of at most 32 bits: its products must be exact"
    values: Float64Array = np.asarray(value, dtype=np.float64)
    heads = sizes.shapes(row.dims)[-1]
    if values.shape not in ((), heads):
        return f"must be a number or an array [B, Hkv] {list(heads)}, got shape {list(values.shape)}"
    normal = np.isfinite(values) & (values >= FORMATS["fp32"].smallest_normal)
    good = (normal & (FORMATS["fp32"].round(values) == values)).all()
    return "" if good else f"must hold positive float32 numbers, got {value!r}"


def _descale(of: str) -> Option:
    lacking = frozenset(("gradient", "layouts"))
    return Option(f"{of}_descale", check=_factor, aliases=(f"descale_{of}",), dims="B Hkv", lacking=lacking)


def _meanings(name: str, *published: str) -> Option:
    return Option(name, default=published[0], meanings=published)


TABLE = (
    Option("scale", check=finite, aliases=("sm_scale", "softmax_scale")),
    Option("is_causal", default=False, depends=("causal_alignment",), aliases=("causal",), excludes=True),
    Option(
        "attn_mask", check=_mask, aliases=("mask",), dims="B Hq Sq Sk", spreads=True, gradient="dbias", excludes=True,
        lacking=frozenset({"layouts"}),
    ),
    Option(
        "window_size", check=_window, depends=("causal_alignment", "window_left"), aliases=("window",), excludes=True
    ),
    Option("softcap", check=positive, depends=("softcap_order",), aliases=("logits_soft_cap",)),
    # A part of the keys sees its queries elsewhere.
    Option("alibi_slopes", check=shaped, depends=("causal_alignment", "alibi_bias"), dims="B Hq", parts="none"),
    Option(
        "sinks", check=shaped, depends=("lse_sink",), aliases=("sink", "s_aux"), dims="Hq", gradient="dsinks",
        parts="one",
    ),
    _descale("q"),
    _descale("k"),
    _descale("v"),
    _meanings("causal_alignment", "top_left", "bottom_right"),
    _meanings("window_left", "included", "excluded"),
    _meanings("softcap_order", "before_mask", "after_mask"),
    _meanings("alibi_bias", "distance", "key_index"),
    _meanings("lse_sink", "included", "excluded"),
)  # fmt: skip
ROWS: Mapping[str, Option] = {row.name: row for row in TABLE}
CHOICES = {row.name: row.meanings for row in TABLE if row.meanings}
"""Options that say which of the published meanings holds."""
DESCALES = tuple(f"{of}_descale" for of in "qkv")
EXCLUDING = tuple(row.name for row in TABLE if row.excludes)
RULES = tuple(row.name for row in TABLE if row.excludes and not row.dims)
"""Options that exclude keys by where these stand."""
UNPARTED = tuple(row.name for row in TABLE if row.parts == "none")
COUNTED_ONCE = tuple(row.name for row in TABLE if row.parts == "one")
"""Options that are one more key, of value 0."""


def defaults(*names: str, lacking: str = "") -> dict[str, Any]:
    """The options with these names (all, without any) with their defaults, but those that a relative lacks."""
    return {row.name: row.default for row in TABLE if row.name in (names or ROWS) and lacking not in row.lacking}


def with_meanings(names: Sequence[str]) -> list[str]:
    """These options and those that fix what they mean."""
    return [*names, *(choice for name in names for choice in ROWS[name].depends)]


def is_set(case: Case, name: str) -> bool:
    """Whether the case gives the option a value."""
    return case.options.get(name) is not None


def check_options(options: Mapping[str, object], known: Mapping[str, object], sizes: Sizes) -> None:
    """ValueError, naming the option and its value, unless every option is one of ``known`` and can hold."""
    unknown = sorted(set(options) - set(known) - {"return_lse"})
    if unknown:
        raise ValueError(f"unknown option {unknown[0]!r}; known: {', '.join(known)}")
    for name, value in options.items():
        row = ROWS.get(name)
        if row is None or (value is None and not row.meanings):
            continue
        if row.meanings and value not in row.meanings:
            raise ValueError(f"unknown {name} {value!r}; known: {', '.join(row.meanings)}")
        wrong = row.check(value, row, sizes)
        if wrong:
            raise ValueError(f"{name} {wrong}")


def chosen(case: Case, name: str) -> str:
    """The published meaning that this case has, of those in `CHOICES`."""
    return str(case.options.get(name, CHOICES[name][0]))


def taken(options: Mapping[str, Any], **places: object) -> dict[str, Any]:
    """The options with these places of their arrays' axes alone, in this order: ``B=[1]``, ``Hq=heads``."""
    found = dict(options)
    for name, value in options.items():
        if name in ROWS and isinstance(value, np.ndarray):
            axes = ROWS[name].dims.split()
            found[name] = _taken(value, axes[len(axes) - value.ndim :], places, spreads=ROWS[name].spreads)
    return found


def _taken(array: NDArray[Any], axes: list[str], places: Mapping[str, Any], *, spreads: bool) -> NDArray[Any]:
    for i, axis in enumerate(axes):
        if axis in places and not (spreads and array.shape[i] == 1):
            array = array.take(places[axis], axis=i)
    return array
