"""Broken blocks: projections, rotation and attention in one. `inputs.py` builds the smallest inputs that show it."""
