"""Broken backward passes, by what they are the gradient of. `inputs.py` builds the smallest inputs that show it."""
