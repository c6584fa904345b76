"""Softmax, log-softmax and log-sum-exp of rows, and the gradient of softmax."""
