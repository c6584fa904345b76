"""Bounds of rotations, and of the frequencies that their angles are made of."""
