"""Windows, soft caps, ALiBi and sinks of attention's inputs, from a few small numbers; only what a target has.

What targets do differently (`CHOICES` of the op) is taken from the subject's conventions, or left unsaid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from oracle.case import Case
from oracle.formats import Format, StoredArray
from oracle.ops.attention.options import DESCALES
from properties.subject import Subject

Draw = Callable[[st.SearchStrategy[Any]], Any]
NAMES = ("window_size", "softcap", "alibi_slopes", "sinks", "k_descale")
CHOICES_OF = {
    "window_size": ("causal_alignment", "window_left"),
    "softcap": ("softcap_order",),
    "alibi_slopes": ("causal_alignment", "alibi_bias"),
    "sinks": ("lse_sink",),
    "k_descale": (),
}
"""Which choices an option's meaning depends on."""


@dataclass(frozen=True, slots=True)
class Extras:
    """window (left, right), -1 unbounded. softcap. alibi: slopes by ``heads`` [Hq] or also ``sequences`` [B, Hq].

    sink: a logit about which the heads' own lie, one apart. descale: factors of q, k and v, as far as the target takes
    them, for ``heads`` and sequences each their own, or ``one`` for all.
    """

    window: tuple[int, int] | None = None
    softcap: float | None = None
    alibi: str = ""
    sink: float | None = None
    descale: str = ""

    def facts(self) -> dict[str, Any]:
        """What is set, for records."""
        named = {"window": self.window and list(self.window), "softcap": self.softcap, "alibi": self.alibi or None}
        named["descale"] = self.descale or None
        return {name: value for name, value in {**named, "sink": self.sink}.items() if value is not None}


NONE = Extras()
# On both sides of tile borders, at them, and a few keys wide.
WINDOWS = ((3, 0), (0, 0), (-1, 2), (5, -1), (2, 3), (15, 0), (16, 16), (31, 1), (33, 0), (64, 2))
VALUES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "window_size": ("window", WINDOWS),
    "softcap": ("softcap", (5.0, 1.0, 30.0, 50.0)),
    "alibi_slopes": ("alibi", ("heads", "sequences")),
    "sinks": ("sink", (2.0, -3.0, 0.5, 10.0)),
    "k_descale": ("descale", ("heads", "one")),
}
"""Option -> the field of `Extras` and what is drawn for it."""


def held(subject: Subject, names: Sequence[str] = NAMES) -> list[str]:
    """Those of ``names`` that the target has."""
    return [name for name in names if takes(subject, name)]


def takes(subject: Subject, name: str) -> bool:
    """Whether the target has the option; of factors any of the three, and not with inputs in float64 (inexact)."""
    return any(map(subject.has, DESCALES)) and subject.dtype != "fp64" if name in DESCALES else subject.has(name)


def drawn(draw: Draw, subject: Subject, names: Sequence[str], *, one: bool = False) -> Extras:
    """Each option of ``names`` that the target has, in a third of the cases; with ``one`` at least one of them."""
    known = held(subject, names)
    if not known:
        return NONE
    forced = draw(st.sampled_from(known)) if one else ""
    values = {}
    for name in known:
        field, choices = VALUES[name]
        none = () if name == forced else (None,) * (2 * len(choices))
        value = draw(st.sampled_from((*none, *choices)))
        if value is not None:
            values[field] = value
    return Extras(**values)


def option_values(subject: Subject, extras: Extras, *, batch: int, heads: int, kv_heads: int = 1) -> dict[str, Any]:
    """The options of a case: those of ``extras`` that the target has, and what they mean to it."""
    options: dict[str, Any] = {}
    if extras.window is not None and subject.has("window_size"):
        options["window_size"] = extras.window
    if extras.softcap is not None and subject.has("softcap"):
        options["softcap"] = extras.softcap
    if extras.alibi and subject.has("alibi_slopes"):
        options["alibi_slopes"] = slopes(subject.wide, heads, batch if extras.alibi == "sequences" else None)
    if extras.sink is not None and subject.has("sinks"):
        options["sinks"] = subject.wide.store(extras.sink + _unlike(heads) / 2)
    if extras.descale and takes(subject, "k_descale"):
        given = descales(batch, kv_heads, each=extras.descale == "heads")
        options |= {name: factors for name, factors in given.items() if subject.has(name)}
    choices = {choice for name in options if name in CHOICES_OF for choice in CHOICES_OF[name]}
    return options | {name: subject.conventions[name] for name in sorted(choices) if name in subject.conventions}


def factors_by_head(case: Case) -> dict[str, StoredArray]:
    """The case's factors of 8-bit storage that are [B, Hkv]."""
    return {name: case.options[name] for name in DESCALES if isinstance(case.options.get(name), np.ndarray)}


def descales(batch: int, kv_heads: int, *, each: bool) -> dict[str, NDArray[np.float32]]:
    """[B, Hkv] factors of q, k and v that float32 holds, near 1 and no two alike (or one number for all)."""
    usual = dict(zip(DESCALES, (0.75, 1.5, 0.625), strict=True))
    own = (1 + np.arange(kv_heads) / 4) * (1 - np.arange(batch)[:, None] / 8 % 0.5)
    own = own if each else np.ones((batch, kv_heads))
    return {name: (size * own).astype(np.float32) for name, size in usual.items()}


def slopes(fmt: Format, heads: int, batch: int | None = None) -> StoredArray:
    """[Hq] or [B, Hq], 2^-1 and below, no two alike; float32 whose values the format holds."""
    each = 2.0 ** (-1 - np.arange(heads) % 4) * (1 + np.arange(heads) // 4 / 8)
    wanted = each if batch is None else each * (1 + np.arange(batch)[:, None] / 4)
    return fmt.store(wanted).astype(np.float64 if fmt.name == "fp64" else np.float32)


def _unlike(heads: int) -> NDArray[np.float64]:
    """Steps 0, 1, -1, 2, -2, ...: each head's own."""
    return np.array([(h + 1) // 2 * (1 if h % 2 else -1) for h in range(heads)], dtype=np.float64)
