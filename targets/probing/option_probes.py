"""Probes of what windows, soft caps, ALiBi, sinks and masks mean to a target: tiny calls against each meaning.

With as many queries as keys the alignment does not enter. What a target without the option, or without an output that
tells, means by it stays unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.case import Case
from oracle.evaluate import enclose
from oracle.formats import Format, beside
from oracle.ops.attention.options import CHOICES
from targets.calling.target import Observed, run
from targets.probing.asked import Asked
from targets.probing.tiny import tiny_case

_CLOSE = 0.05


def window_left(asked: Asked) -> str | None:
    if not asked.has("window_size"):
        return None
    return _only("window_left", asked, queries=3, window_size=(1, 0))


def softcap_order(asked: Asked) -> str | None:
    """Told by a cap of 1 and a bias beyond it: an additive mask, else ALiBi in either of its meanings."""
    if not asked.has("softcap"):
        return None
    answer = None
    if asked.has("attn_mask"):
        mask = beside(asked.dtype).store(np.array([[[[0.0, 3.0, -2.0]]]]))
        answer = _only("softcap_order", asked, queries=1, softcap=1.0, attn_mask=mask)
    if answer is None and asked.has("alibi_slopes"):
        found = {
            _only("softcap_order", asked, queries=3, softcap=1.0, alibi_slopes=_slopes(asked), alibi_bias=bias)
            for bias in CHOICES["alibi_bias"]
        } - {None}
        answer = found.pop() if len(found) == 1 else None
    return answer


def alibi_bias(asked: Asked) -> str | None:
    """Told by the LSE of a causal call, whose outputs are alike; else by the output for keys behind their query."""
    if not asked.has("alibi_slopes"):
        return None
    if asked.has("is_causal"):
        told = _by_lse("alibi_bias", asked, queries=3, alibi_slopes=_slopes(asked), is_causal=True)
        if told is not None:
            return told
    return _only("alibi_bias", asked, queries=3, alibi_slopes=_slopes(asked))


def lse_sink(asked: Asked) -> str | None:
    if not asked.has("sinks"):
        return None
    return _by_lse("lse_sink", asked, queries=1, sinks=beside(asked.dtype).store(np.array([2.0])))


def alignment(asked: Asked) -> str | None:
    """By a window that ends at the query, else by ALiBi, which is another one on both sides of it."""
    answer = None
    if asked.has("window_size"):
        answer = _only("causal_alignment", asked, window_size=(-1, 0))
    if answer is None and asked.has("alibi_slopes"):
        answer = _only("causal_alignment", asked, alibi_slopes=_slopes(asked))
    return answer


def empty_by_window(asked: Asked, aligned: str | None) -> tuple[Case, Observed, int] | None:
    """A call with three queries and one key of which one row sees none: case, what came of it, and that row."""
    if aligned is None or not asked.has("window_size"):
        return None
    case, seen = asked.call(queries=3, keys=1, window_size=(1, 1), causal_alignment=aligned)
    return (case, seen, 2 if aligned == "top_left" else 0) if seen.fault is None else None


def _slopes(asked: Asked) -> NDArray[np.float32]:
    """A slope of 1 in the form that the target takes, [Hq] or else [B, Hq]."""
    ones = np.ones(1, dtype=np.float32)
    return ones if asked.call(alibi_slopes=ones)[1].fault is None else ones[None]


def _masked_nan(name: str) -> Callable[[Asked], str | None]:
    """Asks whether a NaN in the last of three keys reaches a row that may not attend to it."""

    def asks(asked: Asked) -> str | None:
        options = _HIDE_THE_LAST_KEY[name](beside(asked.dtype))
        if not all(map(asked.has, options)):
            return None
        case = tiny_case(asked.target.op, asked.dtype, width=asked.width, **options)
        # Keys that are packed or in pages, or latents, stand elsewhere.
        spoiled = {n: a.copy() for n, a in case.arrays.items() if n in ("k", "v") and a.ndim == 4}
        if not spoiled:
            return None
        for array in spoiled.values():
            array[0, 0, 2] = np.nan
        seen = run(asked.target, case.with_arrays(**spoiled), device=asked.device)
        if seen.fault is not None:
            return None
        return "leaks" if np.isnan(seen.outputs["out"][0, 0, 0].astype(np.float64)).any() else "blocked"

    return asks


_SEEN = np.array([[[[True, True, False], [True, True, True]]]])
# Of two queries the first sees no key behind the second one, wherever causal rules and windows are aligned.
_HIDE_THE_LAST_KEY: Mapping[str, Callable[[Format], Mapping[str, Any]]] = {
    "masked_nan": lambda wide: {"attn_mask": _SEEN},
    "masked_nan_additive": lambda wide: {"attn_mask": wide.store(np.where(_SEEN, 0.0, -np.inf))},
    "masked_nan_causal": lambda wide: {"is_causal": True},
    "masked_nan_window": lambda wide: {"window_size": (-1, 0)},
}


OPTION_PROBES: Mapping[str, Callable[[Asked], str | None]] = {
    "window_left": window_left,
    "softcap_order": softcap_order,
    "alibi_bias": alibi_bias,
    "lse_sink": lse_sink,
    **{name: _masked_nan(name) for name in _HIDE_THE_LAST_KEY},
}


def _only(name: str, asked: Asked, **options: object) -> str | None:
    """The one meaning that the output follows; None where none or several do."""
    return _one(name, lambda meant: _follows(asked, "out", options | {name: meant}))


def _by_lse(name: str, asked: Asked, **options: object) -> str | None:
    """The one meaning that the LSE follows, in the base that it has without the option."""
    units = [u for u in (1.0, float(np.log(2.0))) if _follows(asked, "lse", {"queries": 3}, unit=u)]
    return _one(name, lambda meant: any(_follows(asked, "lse", options | {name: meant}, unit=u) for u in units))


def _one(name: str, follows: Callable[[str], bool]) -> str | None:
    kept = [meant for meant in CHOICES[name] if follows(meant)]
    return kept[0] if len(kept) == 1 else None


def _follows(asked: Asked, output: str, options: dict[str, object], *, unit: float = 1.0) -> bool:
    """Whether the output, in this unit, is what the options mean exactly."""
    case, seen = asked.call(**options)
    if seen.fault is not None or output not in seen.outputs:
        return False
    given = seen.outputs[output].astype(np.float64)
    exact = np.stack([block.part(output).hi for block in enclose(case)])
    if given.size != exact.size:
        return False
    return bool(np.allclose(given * unit, exact.reshape(given.shape), atol=_CLOSE, rtol=_CLOSE))
