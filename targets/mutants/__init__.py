"""Kernels that are broken on purpose, and the table of the properties that kill them.

A mutant is a correct kernel (`targets.honest`) with one step replaced, so that nothing but the defect can
explain its death: it neither crashes nor returns another shape. Modules stand by op and theme, a mutant is one block
of one module (`mutant.py` says which facts it states), and `table.py` reads them all without importing torch.
"""
