"""Scaled dot-product attention of heads with masks, windows, caps, biases and sinks, and its gradients."""
