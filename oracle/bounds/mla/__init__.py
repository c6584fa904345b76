"""Bounds of multi-head latent attention and of its gradients."""
