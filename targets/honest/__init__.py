"""Honest variants: correct kernels that round, order and split in ways the contracts allow. They must live.

Here belong torch CPU kernels that keep a declared contract, and the table (`table.py`, which imports no
torch) that lists them. What is wrong on purpose belongs to `targets.mutants`; many mutants are one of these
kernels with one step replaced. A failing honest variant means that a bound, a probe or a property is wrong.
"""
