"""Exact numbers in, proven enclosures out. The oracle knows no target, no test and no torch.

The vocabulary of the whole project, used in code, documents, reports and messages:

op
    The mathematics: ``softmax``, ``log_softmax``, ``logsumexp``, ``rope``, ``rope_apply``, ``attention``, ``mla``.
target
    One implementation of one op: a callable, what it supports, and the contract that it claims.
case
    The exact input of one call: arrays in a storage dtype plus options (:mod:`oracle.case`).
contract
    The precision that a target claims for each stage (:mod:`oracle.contract.contract`).
observed
    What the target returned, or how it failed.
enclosure
    A proven interval (midpoint ``hi + lo``, radius ``rad``) that holds the exact real result.
bound
    The largest error that a target which keeps its contract can make on this case: derived, never picked.
error
    Distance of observed from enclosure, as an interval: absolute, in ULP, in scaled ULP.
verdict
    PASS, FAIL, UNDECIDED, UNSUPPORTED, ERROR, EXEMPT, VACUOUS, WAIVED, STALE_WAIVER.
record
    One row of evidence: target, op, property, case, error, bound, verdict, environment.

What belongs here: formats, cases, arithmetics, formulas, enclosures, bounds, error metrics.
What does not: anything that calls an implementation under test, draws random inputs, or prints.
"""
