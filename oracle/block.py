"""A block: one head (or one matrix of rows for softmax) evaluated on some of its rows.

Within a block every output row is independent of the others, so that any subset of rows can be certified alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from oracle.arithmetic.ball import Ball
from oracle.arithmetic.base import Arithmetic
from oracle.enclosure import Enclosure

Rows = NDArray[np.int64]
Key = tuple[Any, ...]
"""What names a head, its index; of several that are evaluated at once (a *stack*) int64 [n] axis by axis."""
T = TypeVar("T", bound=np.generic)
CACHED = 2**15
"""Pairs of rows and keys that are evaluated at once at most; a larger block is evaluated alone."""


def at_once(pairs: int) -> int:
    """How many blocks of so many pairs make a stack."""
    return max(1, CACHED // max(1, pairs))


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One head evaluated on some of its rows, or a stack of heads: then all arrays but ``rows`` have a leading axis.

    key: names the block; unless ``at`` says otherwise, its index in the leading dimensions of the outputs. rows [r]:
    which rows. values: the op's named parts as opaque values of ``ar``. empty [r]: rows without a visible key.
    undefined [r]: rows that read a NaN or inf, whose exact value does not exist. visible [r, n] or None. patches:
    parts replaced row by row at higher precision. outputs: those that this block is a part of (None: all of the op's),
    where different outputs have rows of different kinds, as the gradients of queries and of keys have. places: output
    -> index of the block's part of it, where one index is not that of all outputs. stack: the one that the block is
    of, and which of its heads.
    """

    key: Key
    rows: Rows
    ar: Arithmetic[Any]
    values: Mapping[str, Any]
    empty: NDArray[np.bool_]
    undefined: NDArray[np.bool_]
    visible: NDArray[np.bool_] | None = None
    patches: Mapping[str, Enclosure] = field(default_factory=dict)
    at: Key | None = None
    outputs: tuple[str, ...] | None = None
    places: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    stack: tuple[Block, int] | None = None
    _parts: dict[str, Enclosure] = field(default_factory=dict, init=False, repr=False)

    @property
    def index(self) -> Key:
        """Where the block stands in the leading dimensions of its outputs."""
        return self.key if self.at is None else self.at

    def holds(self, output: str) -> bool:
        """Whether the block is a part of this output."""
        return self.outputs is None or output in self.outputs

    def whole(self, name: str, output: NDArray[T]) -> NDArray[T]:
        """The block's part of a whole output array, all rows of it: a view [R, c] where the layout allows one."""
        index = self.places.get(name, self.index)
        held = output[index] if index else output.reshape(-1, self.part(name).hi.shape[1])
        return held[:, None] if held.ndim == 1 else held

    def take(self, name: str, output: NDArray[T]) -> NDArray[T]:
        """[r, c] of a whole output array at the block's rows."""
        return np.asarray(self.whole(name, output)[self.rows])

    def visible_keys(self) -> NDArray[np.bool_]:
        """``visible``; ValueError for an op that has no keys."""
        if self.visible is None:
            raise ValueError("this op has no keys, so nothing says which are visible")
        return self.visible

    def part(self, name: str) -> Enclosure:
        """The enclosure of one named part (``out``, ``lse``, ``scores``, ...)."""
        if name in self.patches:
            return self.patches[name]
        if name not in self._parts:
            if self.stack is not None:
                whole, place = self.stack
                self._parts[name] = whole.part(name).rows(place)
            else:
                with self.ar.working():
                    self._parts[name] = Enclosure(*self.ar.to_enclosure(self.values[name]))
        return self._parts[name]

    def apart(self, keys: Sequence[tuple[int, ...]]) -> list[Block]:
        """The blocks of the heads that a stack consists of, named by ``keys``."""
        return [
            replace(
                self,
                key=key,
                values={name: taken(value, place) for name, value in self.values.items()},
                empty=self.empty[place],
                undefined=self.undefined[place],
                visible=None if self.visible is None else self.visible[place],
                at=None if self.at is None else _index(self.at, place),
                places={name: _index(index, place) for name, index in self.places.items()},
                stack=(self, place),
            )
            for place, key in enumerate(keys)
        ]

    def weight(self) -> int:
        """About how many bytes the block takes, parts that were asked for included."""
        values = sum(_height(value) * _width(value) for value in self.values.values())
        return 8 * 4 * values + (0 if self.visible is None else self.visible.size) + 1000

    def between(self, start: int, stop: int) -> Block:
        """The block of rows start..stop alone; of parts that have no row for each of the block's, all is kept."""
        count, part = len(self.rows), (Ellipsis, slice(start, stop), slice(None))
        with self.ar.working():
            values = {
                name: self.ar.rows(value, start, stop) if _height(value) == count else value
                for name, value in self.values.items()
            }
        patches = {name: patch.rows(part) for name, patch in self.patches.items()}
        visible = None if self.visible is None else self.visible[part]
        return replace(
            self,
            rows=self.rows[start:stop],
            values=values,
            empty=self.empty[..., start:stop],
            undefined=self.undefined[..., start:stop],
            visible=visible,
            patches=patches,
            stack=None,
        )


def taken(value: Any, place: Any) -> Any:
    """One head of a stack's value, or the stack of those at ``place``."""
    if isinstance(value, Ball):
        rad, rel = (r if isinstance(r, float) or r.ndim < 3 else r[place] for r in (value.rad, value.rel))
        return Ball(value.mid[place], rad, rel)
    return value[place]


def _index(index: tuple[object, ...], place: int) -> tuple[object, ...]:
    """One head's of a stack's."""
    return tuple(int(i[place]) if isinstance(i, np.ndarray) else i for i in index)


def _height(value: Any) -> int:
    return int((value.mid if isinstance(value, Ball) else value).shape[-2])


def _width(value: Any) -> int:
    return int((value.mid if isinstance(value, Ball) else value).shape[-1])
