"""Bounds of whole attention layers."""
