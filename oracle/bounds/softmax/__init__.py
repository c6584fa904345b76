"""Bounds of softmax, log-softmax, log-sum-exp and of softmax's gradient."""
