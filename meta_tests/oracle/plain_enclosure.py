"""Enclosures from plain numbers, for the tests of errors and metrics."""

from __future__ import annotations

import numpy as np

from oracle.enclosure import Enclosure


def enclosure(hi, lo=0.0, rad=0.0, *, shape=None):
    parts = [np.asarray(x, dtype=np.float64) for x in (hi, lo, rad)]
    to = np.broadcast_shapes(*(p.shape for p in parts)) if shape is None else shape
    return Enclosure(*(np.array(np.broadcast_to(p, to)) for p in parts))
