"""Softmax and its relatives, row by row."""

import math
from typing import Any

import numpy as np

from meta_tests.kernels.plain.exact import Array, Exact, logsumexp_of, size, wide


def logsumexp(x: Any) -> list[Exact]:
    log = logsumexp_of(wide(x))
    return [Exact(log, size(log), size(log) + x.shape[-1] + 10)]


def log_softmax(x: Any) -> list[Exact]:
    x = wide(x)
    log = logsumexp_of(x)[..., None]
    y = np.where(x == -math.inf, -math.inf, x - np.where(log == -math.inf, 0.0, log))
    return [Exact(y, size(y), size(y) + size(log) + x.shape[-1] + 10)]


def softmax_backward(y: Any, dy: Any) -> list[Exact]:
    y, dy = wide(y), wide(dy)
    inner = np.array([math.fsum(a * b) for a, b in zip(_rows(y), _rows(dy), strict=True)])
    size = np.abs(_rows(y) * _rows(dy)).sum(axis=1)
    shape = (*y.shape[:-1], 1)
    inner, size = inner.reshape(shape), size.reshape(shape)
    dx = y * (dy - inner)
    return [Exact(dx, np.abs(dx), (y.shape[-1] + 4) * np.abs(y) * (np.abs(dy) + size))]


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def softmax(x: Any) -> list[Exact]:
    log, _, roundings = log_softmax(x)[0]
    y = np.exp(log)
    return [Exact(y, y, y * roundings)]
