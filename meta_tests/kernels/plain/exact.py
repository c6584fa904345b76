"""What a reference returns: an output and how large its errors can be."""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Exact(NamedTuple):
    """An output and, per element, how large its errors can be.

    stored: in unit roundoffs of the dtype that outputs and P are stored in. computed: of the compute dtype.
    """

    value: Array
    stored: Array
    computed: Array


def wide(tensor: Any) -> Array:
    return np.asarray(tensor.double().numpy(), dtype=np.float64)


def logsumexp_of(x: Array) -> Array:
    rows = x.reshape(-1, x.shape[-1])
    logs = [m + math.log(math.fsum(np.exp(r - m))) if (m := r.max()) > -math.inf else -math.inf for r in rows]
    return np.array(logs).reshape(x.shape[:-1])


def size(y: Array) -> Array:
    return np.where(np.isfinite(y), np.abs(y), 0.0)
