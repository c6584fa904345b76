"""Rotary position embedding: the rotation, its frequencies and their published scalings."""
