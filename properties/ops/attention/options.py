"""How the options of attention are tried, and what is said of them: one row each, for inputs, edges and diagnoses.

Inputs come from a few small numbers; only what a target has is set. What targets do differently (`CHOICES`) is taken
from the subject's conventions, or left unsaid. What an option is stands in `oracle.ops.attention.options`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from oracle.case import Case
from oracle.formats import Format, StoredArray
from oracle.ops.attention.options import DESCALES, ROWS
from properties.ops.attention import alternatives
from properties.subject import Subject

Draw = Callable[[st.SearchStrategy[Any]], Any]
Extras = Mapping[str, Any]
"""Option -> the small value that says which input is meant (`Tried.drawn`)."""
NONE: Extras = {}


def _as_it_is(name: str, value: Any, fmt: Format, axes: Mapping[str, int]) -> Any:
    return value


def _none(case: Case) -> Iterator[tuple[str, Case]]:
    yield from ()


@dataclass(frozen=True, slots=True)
class Tried:
    """One row.

    name: the option, or the one that stands for the ``names`` tried with it. words: completes "as if ... were ignored".
    drawn: small values, any of them as likely. fact: what those are called in records (default: the option).
    value: what option ``name`` is for such a value, in the format of masks, for the sizes of axes "B", "Hq", "Hkv".

    edges: list of edge inputs -> values there: ``matter`` (P17), ``decode`` (P10), ``sums`` (P5, P8), ``heads`` (P13),
    ``sequences`` (P11, P12), ``all`` and ``small`` (one, beside those of all others); of packed calls ``packed`` (P17),
    ``packed steps`` (P10), ``packed sums`` (P8). felt: size of the scores at which it shows.

    others: what a case would be if the option were misread, and how that is said. without: dtypes in which it is not
    tried. kept: a head that is explained alone has it as an option, not in its mask, bias or numbers. symmetric: keys
    may be permuted, and scores scaled by powers of two on the way. modelled: G3 gives a verdict with it. limits: small
    value -> the limit that its form falls under.
    """

    name: str
    words: str
    drawn: tuple[Any, ...]
    fact: str = ""
    names: tuple[str, ...] = ()
    value: Callable[[str, Any, Format, Mapping[str, int]], Any] = _as_it_is
    edges: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    felt: float = 0.0
    others: Callable[[Case], Iterator[tuple[str, Case]]] = _none
    without: tuple[str, ...] = ()
    kept: bool = True
    symmetric: bool = False
    modelled: bool = True
    limits: Mapping[Any, str] = field(default_factory=dict)


def slopes(name: str, value: str, fmt: Format, axes: Mapping[str, int]) -> StoredArray:
    """[Hq] or, of ``sequences``, [B, Hq], 2^-1 and below, no two alike; float32 whose values the format holds."""
    heads = np.arange(axes["Hq"])
    wanted = 2.0 ** (-1 - heads % 4) * (1 + heads // 4 / 8)
    if value == "sequences":
        wanted = wanted * (1 + np.arange(axes["B"])[:, None] / 4)
    return fmt.store(wanted).astype(np.float64 if fmt.name == "fp64" else np.float32)


def sinks(name: str, value: float, fmt: Format, axes: Mapping[str, int]) -> StoredArray:
    """[Hq] about the value, in steps 0, 1, -1, 2, -2, ...: each head's own."""
    unlike = np.array([(h + 1) // 2 * (1 if h % 2 else -1) for h in range(axes["Hq"])], dtype=np.float64)
    return fmt.store(value + unlike / 2)


def descales(name: str, value: str, fmt: Format, axes: Mapping[str, int]) -> NDArray[np.float32]:
    """[B, Hkv] factors that float32 holds, near 1 and no two alike (or, for ``one``, one number for all)."""
    own = (1 + np.arange(axes["Hkv"]) / 4) * (1 - np.arange(axes["B"])[:, None] / 8 % 0.5)
    size = dict(zip(DESCALES, (0.75, 1.5, 0.625), strict=True))[name]
    return np.asarray(size * (own if value == "heads" else np.ones(own.shape))).astype(np.float32)


TABLE = (
    Tried(
        "window_size",
        "the window",
        # On both sides of tile borders, at them, and a few keys wide.
        ((3, 0), (0, 0), (-1, 2), (5, -1), (2, 3), (15, 0), (16, 16), (31, 1), (33, 0), (64, 2)),
        fact="window",
        edges={
            "matter": ((4, 0), (0, 3), (-1, 2), (6, -1), (2, 5)), "decode": ((2, -1),), "sums": ((4, 1),),
            "all": ((5, 2),), "small": ((3, 0),), "packed": ((4, 0), (2, 1), (-1, 0)), "packed steps": ((3, -1),),
        },
        others=alternatives.windows,
        kept=False,
    ),
    Tried(
        "softcap",
        "the soft cap",
        (5.0, 1.0, 30.0, 50.0),
        edges={
            "matter": (1.0, 5.0, 30.0), "decode": (2.0,), "sums": (4.0,), "all": (5.0,), "small": (5.0,),
            "packed": (1.0,),
        },
        # Beyond a cap of 30.
        felt=60.0,
        symmetric=True,
        # A tanh made of exp errs by up to 17 times the model's in fp32, without breaking its contract.
        modelled=False,
    ),
    Tried(
        "alibi_slopes",
        "ALiBi",
        ("heads", "sequences"),
        fact="alibi",
        value=slopes,
        edges={
            **dict.fromkeys(("matter", "sums", "heads", "packed"), ("heads", "sequences")),
            **dict.fromkeys(("decode", "all", "small"), ("heads",)), "sequences": ("sequences",),
        },
        others=alternatives.slopes,
        limits={"heads": "slopes_by_head", "sequences": "slopes_by_sequence"},
        kept=False,
    ),
    Tried(
        "sinks",
        "the sink",
        (2.0, -3.0, 0.5, 10.0),
        fact="sink",
        value=sinks,
        edges={
            "matter": (0.5, 5.0), "sums": (0.0, 8.0, -8.0), "heads": (0.0,), "packed sums": (2.0,),
            **dict.fromkeys(("decode", "all", "small", "packed"), (1.0,)),
        },
        others=alternatives.sinks,
        symmetric=True,
    ),
    Tried(
        "k_descale",
        "the factor of k",
        ("heads", "one"),
        fact="descale",
        names=DESCALES,
        value=descales,
        edges={"matter": ("heads", "one"), **dict.fromkeys(("decode", "heads", "all"), ("heads",))},
        others=alternatives.descales,
        # Products with factors are not exact there.
        without=("fp64",),
        kept=False,
    ),
)  # fmt: skip
TRIED: Mapping[str, Tried] = {row.name: row for row in TABLE}
NAMES = tuple(TRIED)
POSITIONED = tuple(name for name in NAMES if "causal_alignment" in ROWS[name].depends)
"""Options that know where a query stands among the keys."""
MEANT = {
    "window_left": {
        "included": "the key at the window's left end were inside",
        "excluded": "the key at the window's left end were outside",
    },
    "softcap_order": {
        "before_mask": "the soft cap were applied before bias and ALiBi",
        "after_mask": "the soft cap were applied after bias and ALiBi",
    },
    "alibi_bias": {
        "distance": "ALiBi were the slope times the distance",
        "key_index": "ALiBi were the slope times the key's index",
    },
    "lse_sink": {"included": "the LSE included the sink", "excluded": "the LSE left the sink out"},
}
"""Published meaning -> what completes "as if" where a target has it and should not."""


def of_row(row: Tried) -> tuple[str, ...]:
    """The options that a row sets."""
    return row.names or (row.name,)


def held(subject: Subject, names: Sequence[str] = NAMES) -> list[str]:
    """Those of ``names`` that the target has."""
    return [name for name in names if takes(subject, name)]


def takes(subject: Subject, name: str) -> bool:
    """Whether the target has the option, or one of those that it stands for, and in this dtype."""
    row = TRIED[name]
    return any(map(subject.has, of_row(row))) and subject.dtype not in row.without


def taken(subject: Subject, row: Tried, value: Any) -> Any:
    """The small value, or the next one whose form the target does not refuse."""
    accepted = (v for v in (value, *row.limits) if subject.conventions.get(row.limits.get(v, "")) != "refused")
    return next(accepted, value) if row.limits else value


def facts(extras: Extras) -> dict[str, Any]:
    """What is set, for records."""
    return {TRIED[n].fact or n: list(v) if isinstance(v, tuple) else v for n, v in extras.items()}


def alone(subject: Subject, edges: str, *, names: Sequence[str] = NAMES) -> Iterator[tuple[Tried, Extras]]:
    """Each option that the target has by itself, at the values of a list of edge inputs."""
    for name in held(subject, names):
        for value in TRIED[name].edges.get(edges, ()):
            yield TRIED[name], {name: value}


def together(edges: str, *, names: Sequence[str] = NAMES) -> Extras:
    """All options of a list of edge inputs at once."""
    return {name: TRIED[name].edges[edges][0] for name in names if edges in TRIED[name].edges}


def drawn(draw: Draw, subject: Subject, names: Sequence[str], *, one: bool = False) -> Extras:
    """Each option of ``names`` that the target has, in a third of the cases; with ``one`` at least one of them."""
    known = held(subject, names)
    if not known:
        return NONE
    forced = draw(st.sampled_from(known)) if one else ""
    values = {}
    for name in known:
        choices = TRIED[name].drawn
        none = () if name == forced else (None,) * (2 * len(choices))
        value = draw(st.sampled_from((*none, *choices)))
        if value is not None:
            values[name] = value
    return values


def basic_values(subject: Subject, *, is_causal: bool, scale: float | None) -> dict[str, object]:
    """Causality and scale as options of a case, as far as the target has them; of any op that attends."""
    options: dict[str, object] = {}
    if is_causal and subject.has("is_causal"):
        last = subject.target.row.options["causal_alignment"]
        options |= {"is_causal": True, "causal_alignment": subject.conventions.get("causal_alignment", last)}
    return options | ({"scale": scale} if scale is not None and subject.has("scale") else {})


def option_values(subject: Subject, extras: Extras, *, batch: int, heads: int, kv_heads: int = 1) -> dict[str, object]:
    """The options of a case: those of ``extras`` that the target has, and what they mean to it."""
    axes, options = {"B": batch, "Hq": heads, "Hkv": kv_heads}, {}
    for row in TABLE:
        for name in of_row(row) if row.name in extras and takes(subject, row.name) else ():
            if subject.has(name):
                options[name] = row.value(name, taken(subject, row, extras[row.name]), subject.wide, axes)
    choices = {choice for name in options for choice in ROWS[name].depends}
    return options | {name: subject.conventions[name] for name in sorted(choices) if name in subject.conventions}
