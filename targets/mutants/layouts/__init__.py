"""Broken attention over packed sequences and pages. `inputs.py` builds the smallest inputs that show it."""
