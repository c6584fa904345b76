"""Broken softmax, log-softmax and logsumexp. `inputs.py` builds the smallest inputs that show it."""
