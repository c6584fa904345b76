"""The smallest ordinary case of an op, made from its row: what probes and tests call a target with."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from oracle.case import Case
from oracle.formats import FORMATS, StoredArray
from oracle.ops.op import Array
from oracle.ops.table import op_named

Fill = Callable[[np.random.Generator, tuple[int, ...]], StoredArray]
_PRODUCT = re.compile(r"(\w+)([*/+])(\w+)")


def tiny_case(
    op: str,
    dtype: str,
    *,
    width: int = 16,
    heads: int = 1,
    kv_heads: int = 1,
    queries: int = 2,
    keys: int = 3,
    value_dims: int | None = None,
    **options: object,
) -> Case:
    """An ordinary case of an op as small as can be: normal numbers, scaled so that scores and outputs are near 1."""
    row, fmt, rng = op_named(op), FORMATS[dtype], np.random.default_rng(7)
    size = {"B": 1, "N": 1, "H": heads, "Hq": heads, "Hkv": kv_heads, "Dv": value_dims or width}
    size |= dict.fromkeys(("...", "S", "Sq", "total_q"), queries) | dict.fromkeys(("Sk", "total_k"), keys)
    size |= {axis: int(width * share) for axis, share in row.tiny.widths.items()}
    size |= row.tiny.counts
    given = row.tiny.given(size)
    arrays = {}
    for name, array in row.arrays.items():
        values = given[name] if name in given else _FILLS[array.kind](rng, _shape(array, size, width))
        arrays[name] = fmt.store(values) if array.is_float else values
    return Case(op, arrays, {**row.tiny.options, **options})


def _shape(array: Array, size: Mapping[str, int], width: int) -> tuple[int, ...]:
    """Sizes of the axes; one that nobody sized is a width."""
    return tuple(_extent(axis, size, width) for axis in array.axes)


def _extent(axis: str, size: Mapping[str, int], width: int) -> int:
    joined = _PRODUCT.fullmatch(axis)
    if joined is None:
        return int(axis) if axis.isdigit() else size.get(axis, width)
    a, b = (_extent(part, size, width) for part in joined.group(1, 3))
    return {"*": a * b, "/": a // max(b, 1), "+": a + b}[joined.group(2)]


def _turns(shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Angles [S, pairs] of `_positions`."""
    return np.asarray(_positions(shape[0])[:, None] * 0.7 ** np.arange(shape[1]))


def _positions(count: int) -> NDArray[np.int64]:
    return 3 + 8 * np.arange(count, dtype=np.int64)


def _distribution(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    weights = np.exp(rng.standard_normal(shape))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


_FILLS: Mapping[str, Fill] = {
    "number": lambda rng, shape: rng.standard_normal(shape),
    "weight": lambda rng, shape: np.asarray(rng.standard_normal(shape) / np.sqrt(shape[-1])),
    "distribution": _distribution,
    "cos": lambda rng, shape: np.cos(_turns(shape)),
    "sin": lambda rng, shape: np.sin(_turns(shape)),
    "positions": lambda rng, shape: _positions(shape[0]),
}
