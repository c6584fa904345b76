"""Attention over packed and over paged sequences: each sequence is a dense case."""
