"""Broken rotary embeddings. `inputs.py` builds the smallest inputs that show it."""
