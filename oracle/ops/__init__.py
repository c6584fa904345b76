"""One file per op: its formula over the `Arithmetic` protocol, its options, special values and sources.

What does not belong here: error bounds (`oracle.bounds`), anything that knows one number system.
"""
