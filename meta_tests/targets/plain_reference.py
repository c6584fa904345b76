"""The ops once more, in float64 loops written from their definitions: shares nothing with the kernels under
test.

Each function takes the target's own keyword arguments and returns one `Exact` per output.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
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


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Any = None,
    return_lse: bool = False,
    top_left: bool = False,
) -> list[Exact]:
    """Causal masks are aligned bottom-right unless `top_left`; an empty row is 0 with LSE -inf."""
    q, k, v = wide(q), wide(k), wide(v)
    batch, heads, rows, dim = q.shape
    keys = k.shape[2]
    alpha = dim**-0.5 if scale is None else scale
    mask: Any = None
    if attn_mask is not None:
        mask = np.broadcast_to(attn_mask.double().numpy(), (batch, heads, rows, keys))
    boolean = attn_mask is not None and not attn_mask.is_floating_point()
    out = Exact(*(np.zeros((batch, heads, rows, v.shape[3])) for _ in range(3)))
    log = Exact(np.full((batch, heads, rows), -math.inf), *(np.zeros((batch, heads, rows)) for _ in range(2)))
    for b in range(batch):
        for h in range(heads):
            shared = h * k.shape[1] // heads
            for i in range(rows):
                last = keys - 1 if not is_causal else (i if top_left else i + keys - rows)
                seen = [j for j in range(keys) if j <= last and not (boolean and not mask[b, h, i, j])]
                bias = np.array([0.0 if mask is None or boolean else mask[b, h, i, j] for j in seen])
                s = np.array([alpha * math.fsum(q[b, h, i] * k[b, shared, j]) for j in seen]) + bias
                if not seen or np.all(s == -math.inf):
                    continue
                p = np.exp(s - s.max())
                total = p.sum()
                p /= total
                values = np.abs(v[b, shared, seen])
                size = max(alpha * np.abs(q[b, h, i] * k[b, shared, j]).sum() for j in seen)
                size = (dim + 6) * (size + np.abs(s[s > -math.inf]).max(initial=0.0))
                out.value[b, h, i] = p @ v[b, shared, seen]
                out.stored[b, h, i] = p @ values + np.abs(out.value[b, h, i])
                out.computed[b, h, i] = size * (p @ values) + (len(seen) + 10) * (p @ values)
                log.value[b, h, i] = s.max() + np.log(total)
                log.stored[b, h, i] = np.abs(log.value[b, h, i])
                log.computed[b, h, i] = size + len(seen) + 10
    return [out, log] if return_lse else [out]


def mla(
    q_nope: Any,
    q_pe: Any,
    c_kv: Any,
    k_pe: Any,
    w_uk: Any,
    w_uv: Any,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    return_lse: bool = False,
) -> list[Exact]:
    heads = q_nope.shape[1]
    content = torch.einsum("hdc,bsc->bhsd", w_uk.double(), c_kv.double())
    values = torch.einsum("hdc,bsc->bhsd", w_uv.double(), c_kv.double())
    k = torch.cat((content, k_pe.double()[:, None].repeat(1, heads, 1, 1)), -1)
    q = torch.cat((q_nope.double(), q_pe.double()), -1)
    return attention(q, k, values, scale=scale, is_causal=is_causal, return_lse=return_lse)


def _turn(x: Array, cos: Array, sin: Array, angle: Array, layout: str) -> Exact:
    """`angle`: the roundings of the angle, in radians."""
    half = cos.shape[-1]
    y, stored, computed = x.copy(), np.zeros_like(x), np.zeros_like(x)
    for i in range(half):
        a, b = (i, i + half) if layout == "half" else (2 * i, 2 * i + 1)
        c, s = cos[..., i], sin[..., i]
        y[..., a], y[..., b] = x[..., a] * c - x[..., b] * s, x[..., a] * s + x[..., b] * c
        computed[..., a] = computed[..., b] = (np.abs(x[..., a]) + np.abs(x[..., b])) * (4 + angle[..., i])
        for entry in (a, b):
            stored[..., entry] = np.abs(y[..., entry])
    return Exact(y, stored, computed)


def rope(
    x: Any, positions: Any, *, base: float = 10000.0, layout: str = "half", rotary_dim: int | None = None
) -> list[Exact]:
    x = wide(x)
    half = (x.shape[-1] if rotary_dim is None else rotary_dim) // 2
    places = positions.numpy().astype(np.float64)
    places = places[:, None] if places.ndim == 2 else places
    shape = (*x.shape[:-1], half)
    angle = np.broadcast_to(np.stack([places * float(base) ** (-i / half) for i in range(half)], -1), shape)
    roundings = np.abs(angle) * [2.0 + 3 * i / half * math.log(base) for i in range(half)]
    return [_turn(x, np.cos(angle), np.sin(angle), roundings, layout)]


def rope_apply(x: Any, cos: Any, sin: Any, *, layout: str = "half") -> list[Exact]:
    x = wide(x)
    shape = (*x.shape[:-1], cos.shape[-1])
    tables = np.broadcast_to(wide(cos), shape), np.broadcast_to(wide(sin), shape)
    return [_turn(x, *tables, np.zeros(shape), layout)]


def _logsumexp(x: Array) -> Array:
    rows = x.reshape(-1, x.shape[-1])
    logs = [m + math.log(math.fsum(np.exp(r - m))) if (m := r.max()) > -math.inf else -math.inf for r in rows]
    return np.array(logs).reshape(x.shape[:-1])


def _size(y: Array) -> Array:
    return np.where(np.isfinite(y), np.abs(y), 0.0)


def logsumexp(x: Any) -> list[Exact]:
    log = _logsumexp(wide(x))
    return [Exact(log, _size(log), _size(log) + x.shape[-1] + 10)]


def log_softmax(x: Any) -> list[Exact]:
    x = wide(x)
    log = _logsumexp(x)[..., None]
    y = np.where(x == -math.inf, -math.inf, x - np.where(log == -math.inf, 0.0, log))
    return [Exact(y, _size(y), _size(y) + _size(log) + x.shape[-1] + 10)]


def softmax(x: Any) -> list[Exact]:
    log, _, roundings = log_softmax(x)[0]
    y = np.exp(log)
    return [Exact(y, y, y * roundings)]
