"""Broken multi-head latent attention. `inputs.py` builds the smallest inputs that show it."""
