"""Kernels that are broken on purpose, one defect per file, and the table of the properties that kill them.

A mutant is a correct kernel (`targets.honest`) with one step replaced, so that nothing but the defect can
explain its death: it neither crashes nor returns another shape. `table.py` imports no torch. `smallest.py`
has an input for each mutant on which it differs from its honest counterpart. "Confirmed" in a docstring means
that the cause was stated by a maintainer or stands in a merged fix, "reported" that it is the reporter's
analysis.
"""
