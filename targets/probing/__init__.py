"""Tiny calls that find out what a target does where implementations legitimately differ, and the check of a plug-in."""
