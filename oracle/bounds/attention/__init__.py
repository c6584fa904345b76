"""Bounds of attention's output and LSE, of its gradients and of its packed and paged layouts."""
