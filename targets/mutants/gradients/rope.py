"""Backward passes of the rotary embedding."""

from targets.builtin import rope_frequencies_torch as rules
from targets.honest import rope as honest
from targets.mutants.gradients.inputs import one_token
from targets.mutants.mutant import mutant
from targets.mutants.rope.inputs import yarn

rope_backward_forward_again = mutant(
    "rope_backward",
    "P14",
    "The gradient is rotated forward once more: the sign of sin is not changed.",
    smallest=one_token([1.0, 1.0], 1),
)(honest.gradient(honest.Steps(backward=lambda sin: sin)))


rope_backward_divides_by_magnitude = mutant(
    "rope_backward",
    "P21",
    "The gradient is that of an inverse rotation: it is divided by the magnitude instead of multiplied.",
    smallest=one_token([1.0, 1.0], 0, scaling=yarn()),
)(honest.gradient(honest.Steps(magnitude=lambda scaling: 1 / rules.magnitude(scaling))))
