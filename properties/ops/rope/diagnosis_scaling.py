"""Counterfactuals of scaled rotary frequencies: each is the same case with other parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from oracle.case import Case
from oracle.ops.rope.case import check, rotation, sequence_length, size_of
from properties.diagnosis.counterfactual import Counterfactual, FailingCase, of_case

Parameters = dict[str, Any]


def scalings(failing: FailingCase) -> Iterator[Counterfactual]:
    """Parameters ignored or misread; only those that are a case of their own."""
    case = failing.case
    given = case.options.get("scaling")
    if given is None:
        return
    yield of_case("scaling were ignored", _plain(case))
    for says, parameters in choices(case):
        yield of_case(says, case.with_options(scaling=parameters))
    if rotation(case).scaling.sections is not None:
        yield from _axes(case)


def choices(case: Case) -> Iterator[tuple[str, Parameters]]:
    """Parameters that take the place of those of a scaled rotation, as far as they are possible ones."""
    for says, parameters in _others(case, dict(case.options["scaling"])):
        try:
            check(case.with_options(scaling=parameters))
        except ValueError:
            continue
        yield says, parameters


def _plain(case: Case) -> Case:
    """The case without scaling; of three positions the first is left."""
    if rotation(case).scaling.sections is not None:
        case = case.with_arrays(positions=np.ascontiguousarray(case.arrays["positions"][0]))
    return case.without_options("scaling")


def _others(case: Case, given: Parameters) -> Iterator[tuple[str, Parameters]]:
    kind, size = given["rope_type"], size_of(case)
    if size != 1:
        yield "the magnitude were left out", {**given, "attention_factor": 1.0}
        yield "the magnitude counted twice", {**given, "attention_factor": size**2}
        yield "the result were divided by the magnitude", {**given, "attention_factor": 1 / size}
    if "attention_factor" in given:
        yield "attention_factor were ignored", {k: v for k, v in given.items() if k != "attention_factor"}
    match kind:
        case "linear":
            yield "positions were multiplied by the factor", {**given, "factor": 1 / given["factor"]}
        case "dynamic":
            trained = int(given["max_position_embeddings"])
            yield "the base did not grow", {**given, "seq_len": trained}
            yield from _lengths(case, given, trained, int(given["factor"] * trained))
        case "longrope":
            trained = int(given["original_max_position_embeddings"])
            yield "the short factors were used", {**given, "seq_len": trained}
            yield "the long factors were used", {**given, "seq_len": trained + 1}
        case "yarn":
            ramp = given.get("ramp", "dimension")
            other = "rotations" if ramp == "dimension" else "dimension"
            yield f"the ramp ran by {other} instead of by {ramp}", {**given, "ramp": other}
            whole = given.get("truncate", True)
            yield f"truncate were {not whole}", {**given, "truncate": not whole}
            yield "beta_fast and beta_slow were 32 and 1", {**given, "beta_fast": 32, "beta_slow": 1}
            yield "all frequencies were divided by the factor", _all_divided(given, size)


def _lengths(case: Case, given: Parameters, trained: int, longest: int) -> Iterator[tuple[str, Parameters]]:
    yield f"the sequence had the longest length, {longest}", {**given, "seq_len": longest}
    length = sequence_length(case, (0, 0))
    for name, other in (("one longer", length + 1), ("one shorter", length - 1)):
        yield f"the sequence were {name}", {**given, "seq_len": max(other, 1)}
    if given.get("seq_len") == "sequence":
        yield "the longest sequence of the call set the base of all", {**given, "seq_len": "call"}
    elif case.arrays["positions"].ndim == 2:
        yield "each sequence set its own base", {**given, "seq_len": "sequence"}


def _all_divided(given: Parameters, size: float) -> Parameters:
    """yarn without a ramp: every pair counts as a slow one."""
    huge = {"beta_fast": 2e9, "beta_slow": 1e9, "ramp": "rotations"}
    return {**given, **huge, "attention_factor": size}


def _axes(case: Case) -> Iterator[Counterfactual]:
    positions, given = case.arrays["positions"], dict(case.options["scaling"])
    names = ("time", "height", "width")
    for axis, name in enumerate(names):
        moved = np.ascontiguousarray(np.broadcast_to(positions[axis], positions.shape))
        yield of_case(f"all pairs turned by {name}", case.with_arrays(positions=moved))
    for first, second in ((1, 2), (0, 1), (0, 2)):
        order = [0, 1, 2]
        order[first], order[second] = second, first
        moved = np.ascontiguousarray(positions[order])
        yield of_case(f"{names[first]} and {names[second]} had changed places", case.with_arrays(positions=moved))
    other = case.with_options(scaling={**given, "mrope_interleaved": not given.get("mrope_interleaved", False)})
    try:
        check(other)
    except ValueError:
        return
    yield of_case("the sections were " + ("runs" if given.get("mrope_interleaved") else "interleaved"), other)
