"""In which order questions are asked: what kills most for its cost comes first, measured on the mutants.

The *first look* at a target is a short list of edge inputs, a greedy cover of the mutants by kills per second
(`benchmarks/kill_matrix.py` measures, `cover` chooses). It is asked in every dtype before anything else; then each
property is asked in every dtype before the next, the most telling first. Which records a run gives does not depend on
the order.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

from properties.ops.table import properties_for
from properties.property import Property
from properties.subject import Input

TABLE = Path(__file__).parent / "data" / "first_look.json"
_DTYPES = re.compile(r"\b(float64|float32|float16|bfloat16|float8_e4m3fn|float8_e5m2)\b")
_BETWEEN = " | "
LIMIT = 0.4
"""Seconds: what costs more is no first look."""
# What a question costs beside its check: an item of the suite, a record.
_OVERHEAD = 0.01


def keyed(prop: Property, edges: Iterable[Input]) -> Iterator[tuple[str, Input]]:
    """The edge inputs of a property, each with a name that is the same in every dtype and for every target."""
    seen: Counter[str] = Counter()
    for edge in edges:
        name = f"{question(prop)}{_BETWEEN}{_DTYPES.sub('*', edge.case.describe())}"
        seen[name] += 1
        yield f"{name} #{seen[name]}", edge


def question(prop: Property) -> str:
    """What identifies a property within its op: several rows may share an id."""
    return f"{prop.id} {prop.title}"


def _asked_by(key: str) -> str:
    return key.partition(_BETWEEN)[0]


@dataclass(frozen=True, slots=True)
class Part:
    """A property, and which of its edge inputs: those of the first look alone, or all others and the search."""

    prop: Property
    first: bool
    keys: frozenset[str]

    def asks(self, key: str) -> bool:
        """Whether this part asks the edge input of this name."""
        return (key in self.keys) == self.first


def parts(op: str, chosen: Callable[[Property], bool]) -> list[Part]:
    """The parts of the chosen properties of ``op``, in the order in which they are asked."""
    rows = {question(prop): prop for prop in properties_for(op) if chosen(prop)}
    first = [key for key in _table()["first"].get(op, ()) if _asked_by(key) in rows]
    ranked = [name for name in _table()["rank"].get(op, ()) if name in rows]
    looks = [Part(rows[name], True, frozenset(keys)) for name, keys in groupby(first, key=_asked_by)]
    return looks + [Part(rows[name], False, frozenset(first)) for name in dict.fromkeys((*ranked, *rows))]


@cache
def _table() -> Mapping[str, Mapping[str, Sequence[str]]]:
    table: Mapping[str, Mapping[str, Sequence[str]]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def cover(costs: Mapping[str, float], kills: Mapping[str, Sequence[str]], *, limit: float) -> list[str]:
    """Keys that together kill every mutant that can be killed, chosen greedily by kills per second.

    costs: seconds by key. kills: mutant -> the keys that kill it. Keys that cost more than ``limit`` are left out.
    """
    cheap = {key: cost for key, cost in costs.items() if cost <= limit}
    left = {mutant: set(keys) & set(cheap) for mutant, keys in kills.items()}
    chosen: list[str] = []
    while True:
        counts = Counter(key for keys in left.values() for key in keys)
        if not counts:
            return chosen
        best = min(counts, key=lambda key: (-counts[key] / (cheap[key] + _OVERHEAD), key))
        chosen.append(best)
        left = {mutant: keys for mutant, keys in left.items() if best not in keys}


def rank(costs: Mapping[str, float], kills: Mapping[str, Sequence[str]]) -> list[str]:
    """The questions of an op by mutants killed per second of all their edge inputs."""
    seconds: dict[str, float] = {}
    for key, cost in costs.items():
        seconds[_asked_by(key)] = seconds.get(_asked_by(key), 0.0) + cost + _OVERHEAD
    killed: Counter[str] = Counter()
    for keys in kills.values():
        killed.update({_asked_by(key) for key in keys})
    return sorted(seconds, key=lambda name: (-killed[name] / seconds[name], name))
