"""Broken attention, by what is broken. `inputs.py` builds the smallest inputs that show it."""
