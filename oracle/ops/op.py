"""An op as data: the complete row of what is true of it and of no other.

Everything that the other packages ask of an op is read from its row: how a function is recognised and called, what it
may state, the tiny case that probes use, how it is differentiated, which reports show it. Nothing restates it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from oracle.arithmetic.base import Arithmetic, V
from oracle.block import Block, Rows
from oracle.case import Case
from oracle.contract.contract import Contract
from oracle.contract.presets import Presets
from oracle.enclosure import Enclosure
from oracle.formats import STORAGE, Float64Array, Format, StoredArray

Kind = Literal["number", "weight", "distribution", "cos", "sin", "positions", "index"]
"""What an array holds: any numbers; a matrix that mixes its last axis; rows that sum to 1; a table of cosines or sines;
int64 positions; other integers. All but the last two are of the dtype under test."""


def shown(dims: str) -> str:
    """``[B, Hq, Sq, D]`` of ``"B Hq Sq D"``."""
    return f"[{', '.join(dims.split())}]"


@dataclass(frozen=True, slots=True)
class Array:
    """An input. dims: its axes by name, ``"B Hq Sq D"`` (one name is one size); ``...`` any leading axes."""

    dims: str
    kind: Kind = "number"

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.dims.split())

    def sizes(self, array: StoredArray) -> Iterator[tuple[str, int]]:
        """(axis, size) of an array without leading axes."""
        return zip(self.axes, array.shape, strict=False)

    @property
    def is_float(self) -> bool:
        return self.kind not in ("positions", "index")


@dataclass(frozen=True, slots=True)
class Gradient:
    """What makes an op the gradient of another.

    of: that op. cotangent: the input that is none of its. inputs: differentiated input of the other op -> output here.
    options: option with a gradient, where a case sets it -> output here. sums_empty(case, key): whether a block sums
    over rows of the other op's output among which some see no key.
    """

    of: str
    cotangent: str
    inputs: Mapping[str, str]
    options: Mapping[str, str] = field(default_factory=dict)
    sums_empty: Callable[[Case, tuple[int, ...]], bool] = lambda case, key: False


@dataclass(frozen=True, slots=True)
class Tiny:
    """What the smallest ordinary case of an op needs beside the dimensions of its arrays.

    widths: axis -> multiple of the width asked for (1 unless named). counts: axis -> number. options: those that a case
    must have. given: index arrays for the sizes by axis.
    """

    widths: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    given: Callable[[Mapping[str, int]], Mapping[str, StoredArray]] = lambda sizes: {}


Sizes = Mapping[str, int]
Options = Mapping[str, Any]
Calls = Callable[[int, Format], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class Limit:
    """Inputs that an implementation may refuse without being wrong: a shape, or a form or kind of an option.

    said: what they are. meets(size by axis, options): whether a case is one, asked only where it has the ``option``.
    asked(width, format of options): keywords of tiny calls (`targets.probing.tiny`) with such inputs; what refuses all
    of them has the limit. option: without which there is nothing to refuse.
    """

    said: str
    meets: Callable[[Sizes, Options], bool]
    asked: Calls
    option: str = ""


REFUSAL = ("accepted", "refused")
"""The values of a convention that is a limit."""


def no_trivial_outputs(case: Case, block: Block) -> Mapping[str, Enclosure]:
    """For ops whose only trivial outputs are zeros and the negated exact output."""
    return {}


@dataclass(frozen=True, slots=True)
class Op:
    """One row.

    family: whose figures in reports show it. presets: contracts that implementations usually keep. arrays: inputs by
    canonical name, in order. results: dimensions of the outputs, in the order a target returns them.

    options: canonical keyword names with their defaults. conventions: name -> published values of what implementations
    do differently; those that are options fix what a case means and are passed to a function only where ``passed``
    names them. extras: further parameters on which the result does not depend -> what one gets, a value or a function
    of the case. usual: option -> what a function that requires it gets for a case that does not set it, where that is
    not the default.

    blocks, row_count, evaluate: see `oracle.evaluate`; row_count(case, key) is that of one block. together: blocks of
    which it says the same may be evaluated at once, their key then being arrays (None: each alone). output_shapes: name
    -> shape for a case. model: the outputs of one block, [r, c] each, as an honest kernel of the given contract
    computes them; modelled: what it reads of a contract, for inputs of a format: equal where models are equal. width:
    how many numbers a row of a block reads of the longest array, by which large cases are sampled. needed: outputs that
    every target returns, in the dtype of its inputs (default: the first).

    limits: convention with the values ``accepted`` and ``refused`` -> the inputs that it is about.

    formats: those that inputs may have. gradient: of which op it is the gradient. may_alias: an output may be an input
    itself. trivial: outputs of one block that ignore what the op is about, by name (`oracle.vacuity`). tiny: see there.
    """

    name: str
    family: str
    presets: Presets
    arrays: Mapping[str, Array]
    results: Mapping[str, str]
    options: Mapping[str, object]
    blocks: Callable[[Case], list[tuple[int, ...]]]
    row_count: Callable[..., int]
    evaluate: Callable[[Arithmetic[V], Case, Any, Rows], Block]
    output_shapes: Callable[[Case], dict[str, tuple[int, ...]]]
    model: Callable[[Case, Any, Rows, Contract], dict[str, Float64Array]]
    width: Callable[[Case, tuple[int, ...]], int]
    together: Callable[[Case, tuple[int, ...]], Hashable] | None = None
    conventions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    passed: tuple[str, ...] = ()
    extras: Mapping[str, Any] = field(default_factory=dict)
    usual: Mapping[str, Callable[[Case], object]] = field(default_factory=dict)
    needed: Callable[[Case], tuple[str, ...]] | None = None
    modelled: Callable[[Contract, Format], Hashable] = lambda contract, _: contract
    limits: Mapping[str, Limit] = field(default_factory=dict)
    formats: tuple[str, ...] = STORAGE
    gradient: Gradient | None = None
    may_alias: bool = False
    trivial: Callable[[Case, Block], Mapping[str, Enclosure]] = no_trivial_outputs
    tiny: Tiny = field(default_factory=Tiny)

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(self.arrays)

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(self.results)

    @property
    def attends(self) -> bool:
        """Whether its rows attend to keys and leave a log-sum-exp beside the output."""
        return "lse" in self.results

    @property
    def meanings(self) -> frozenset[str]:
        """Options that fix what a case means without being passed to a function."""
        return frozenset(self.options) & frozenset(self.conventions) - frozenset(self.passed)

    @property
    def parameters(self) -> frozenset[str]:
        """Options that a function may have as keyword parameters."""
        return frozenset(self.options) - self.meanings | ({"return_lse"} if self.attends else set())

    def refused(self, case: Case, conventions: Mapping[str, str]) -> str:
        """The limit among these conventions that the case lies beyond, in words, or nothing."""
        stated = [limit for name, limit in self.limits.items() if conventions.get(name) == "refused"]
        if not stated:
            return ""
        sizes = {
            axis: size
            for name, array in self.arrays.items()
            if name in case.arrays
            for axis, size in array.sizes(case.arrays[name])
        }
        held = (x for x in stated if not x.option or case.options.get(x.option) is not None)
        return next((limit.said for limit in held if limit.meets(sizes, case.options)), "")

    def required_outputs(self, case: Case) -> tuple[str, ...]:
        """Outputs that a call with this case must give."""
        return self.outputs[:1] if self.needed is None else self.needed(case)

    def usual_value(self, name: str, case: Case) -> object:
        """What a function that requires this parameter gets for a case that does not set it."""
        found = self.usual.get(name, {"return_lse": False, **self.options, **self.extras}.get(name))
        return found(case) if callable(found) else found

    def is_default(self, name: str, value: object) -> bool:
        """Whether setting the option to this value says nothing."""
        default = {"return_lse": False, **self.options}.get(name)
        return value is None or (default is not None and not isinstance(value, np.ndarray) and bool(value == default))


def check_dims(arrays: Mapping[str, Array], case: Case, names: Sequence[str]) -> dict[str, int]:
    """The size of every axis of these arrays; ValueError, naming the first array that says otherwise than another."""
    known: dict[str, tuple[int, str]] = {}
    for name in names:
        axes, shape = arrays[name].axes, case.arrays[name].shape
        if len(shape) != len(axes):
            raise ValueError(f"{name} must be {shown(arrays[name].dims)}, got shape {list(shape)}")
        for axis, size in zip(axes, shape, strict=True):
            first, owner = known.setdefault(axis, (size, name))
            if size != first:
                raise ValueError(f"{name} has {axis} = {size}, but {owner} has {axis} = {first}")
    return {axis: size for axis, (size, _) in known.items()}
