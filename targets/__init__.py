"""Adapters to the code under test: one implementation per file, its heavy imports inside that file.

`base` says what a target is and calls one; `registry` finds targets by name, file, module or entry point. Deliberately
broken kernels live in `mutants`, correct ones that round differently in `honest`. Nothing here judges.
"""
