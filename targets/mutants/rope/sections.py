"""Positions by axis: sections of pairs that turn by time, height and width."""

from torch import Tensor

from oracle.ops.rope.parameters import RopeParameters
from targets.builtin import rope_frequencies_torch as rules
from targets.honest import rope as honest
from targets.mutants.mutant import mutant
from targets.mutants.rope.inputs import by_axis


def swapped(positions: Tensor, frequency: Tensor, scaling: RopeParameters) -> Tensor:
    return rules.angles(positions[[0, 2, 1]], frequency, scaling)


rope_sections_swapped = mutant(
    "rope",
    "P21",
    "Height and width change places: pairs of the one turn by the position of the other.",
    smallest=by_axis([1.0] * 4, {"rope_type": "default", "mrope_section": [0, 1, 1]}),
)(honest.kernel(honest.Steps(by_axis=swapped)))


def in_runs(positions: Tensor, frequency: Tensor, scaling: RopeParameters) -> Tensor:
    return rules.angles(positions, frequency, {**scaling, "mrope_interleaved": False})


rope_sections_never_interleaved = mutant(
    "rope",
    "P21",
    "Interleaved sections are read as three runs of pairs.",
    reports="Confirmed: vllm-project/vllm-gaudi#1437.",
    smallest=by_axis([1.0] * 12, {"rope_type": "default", "mrope_section": [2, 2, 2], "mrope_interleaved": True}),
)(honest.kernel(honest.Steps(by_axis=in_runs)))
