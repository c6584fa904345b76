"""Questions that several ops ask in the same way."""
