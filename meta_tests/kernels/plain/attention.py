"""Attention over heads, packed sequences and pages, and its gradient, in loops."""

import math
from typing import Any

import numpy as np
import torch

from meta_tests.kernels.plain.exact import Exact, wide


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Any = None,
    window_size: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    return_lse: bool = False,
    top_left: bool = False,
    other_options: bool = False,
) -> list[Exact]:
    """Queries are aligned bottom-right unless `top_left`; an empty row is 0 with LSE -inf, or that of its sink.

    `other_options`: the left end of a window is outside, a soft cap comes last, ALiBi adds slope j, L knows no sink.
    """
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
                at = i if top_left else i + keys - rows
                left, right = (-1, -1) if window_size is None else window_size
                first = at - left + other_options if left >= 0 else 0
                last = min(keys - 1, at if is_causal else keys, at + right if right >= 0 else keys)
                seen = [j for j in range(max(0, first), last + 1) if not (boolean and not mask[b, h, i, j])]
                bias = np.array([0.0 if mask is None or boolean else mask[b, h, i, j] for j in seen])
                if alibi_slopes is not None:
                    slope = float(alibi_slopes[b, h] if alibi_slopes.ndim == 2 else alibi_slopes[h])
                    bias = bias + [slope * (j if other_options else -abs(at - j)) for j in seen]
                s = np.array([alpha * math.fsum(q[b, h, i] * k[b, shared, j]) for j in seen])
                largest = np.abs(bias[bias > -math.inf]).max(initial=0.0)
                if softcap is not None and not other_options:
                    s = softcap * np.tanh(s / softcap)
                s = s + bias
                hidden = s == -math.inf
                if softcap is not None and other_options:
                    s = np.where(hidden, s, softcap * np.tanh(s / softcap))
                sink = -math.inf if sinks is None else float(sinks[h])
                if np.all(hidden):
                    log.value[b, h, i] = -math.inf if other_options else sink
                    continue
                top = max(s.max(), sink)
                p = np.exp(s - top)
                keyed = p.sum()
                total = keyed + math.exp(sink - top)
                p /= total
                values = np.abs(v[b, shared, seen])
                size = max(alpha * np.abs(q[b, h, i] * k[b, shared, j]).sum() for j in seen)
                size = (dim + 6) * (size + np.abs(s[~hidden]).max(initial=0.0) + largest)
                size += 0.0 if sinks is None else 6 * abs(sink)
                out.value[b, h, i] = p @ v[b, shared, seen]
                out.stored[b, h, i] = p @ values + np.abs(out.value[b, h, i])
                out.computed[b, h, i] = size * (p @ values) + (len(seen) + 10) * (p @ values)
                log.value[b, h, i] = top + math.log(keyed if other_options else total)
                log.stored[b, h, i] = np.abs(log.value[b, h, i])
                log.computed[b, h, i] = size + len(seen) + 10
    return [out, log] if return_lse else [out]


def attention_varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, **options: Any) -> list[Exact]:
    parts = []
    for n in range(len(cu_seqlens_q) - 1):
        taken = [t[sums[n] : sums[n + 1]].transpose(0, 1)[None] for t, sums in (
            (q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k)
        )]  # fmt: skip
        parts.append(attention(*taken, **_of_sequence(options, n)))
    out = Exact(*(np.concatenate([p[0][i][0].swapaxes(0, 1) for p in parts]) for i in range(3)))
    if not options.get("return_lse"):
        return [out]
    return [out, Exact(*(np.concatenate([p[1][i][0] for p in parts], axis=1) for i in range(3)))]


def attention_paged(
    q: Any, k_cache: Any, v_cache: Any, block_table: Any, cache_seqlens: Any, **options: Any
) -> list[Exact]:
    parts = []
    for n, length in enumerate(cache_seqlens.tolist()):
        places = [(int(block_table[n, j // k_cache.shape[1]]), j % k_cache.shape[1]) for j in range(length)]
        k, v = (
            torch.stack([cache[place] for place in places], 1)[None] if places
            else cache.new_zeros(1, cache.shape[2], 0, cache.shape[3]) for cache in (k_cache, v_cache)
        )  # fmt: skip
        parts.append(attention(q[n : n + 1], k, v, **_of_sequence(options, n)))
    return [Exact(*(np.concatenate(columns) for columns in zip(*one, strict=True))) for one in zip(*parts, strict=True)]


def _of_sequence(options: dict[str, Any], n: int) -> dict[str, Any]:
    slopes = options.get("alibi_slopes")
    return options if slopes is None or slopes.ndim == 1 else options | {"alibi_slopes": slopes[n]}


def attention_backward(
    q: Any,
    k: Any,
    v: Any,
    do: Any,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Any = None,
    window_size: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
) -> list[Exact]:
    """dq, dk, dv (, dbias) (, dsinks) row by row from the derivative of softmax; aligned bottom-right."""
    q, k, v, do = wide(q), wide(k), wide(v), wide(do)
    batch, heads, rows, dim = q.shape
    keys = k.shape[2]
    alpha = dim**-0.5 if scale is None else scale
    mask = None if attn_mask is None else np.broadcast_to(attn_mask.double().numpy(), (batch, heads, rows, keys))
    boolean = attn_mask is not None and not attn_mask.is_floating_point()
    found = {"dq": np.zeros(q.shape), "dk": np.zeros(k.shape), "dv": np.zeros(v.shape)}
    if mask is not None and not boolean:
        found["dbias"] = np.zeros((batch, heads, rows, keys))
    if sinks is not None:
        found["dsinks"] = np.zeros(heads)
    size = {name: np.zeros(a.shape) for name, a in found.items()}

    def add(name: str, place: Any, value: Any, magnitude: Any) -> None:
        found[name][place] += value
        size[name][place] += magnitude

    for b, h, i in np.ndindex(batch, heads, rows):
        g, at = h * k.shape[1] // heads, i + keys - rows
        left, right = (-1, -1) if window_size is None else window_size
        first = at - left if left >= 0 else 0
        last = min(keys - 1, at if is_causal else keys, at + right if right >= 0 else keys)
        seen = [j for j in range(max(0, first), last + 1) if not (boolean and not mask[b, h, i, j])]
        if not seen:
            continue
        s = np.array([alpha * math.fsum(q[b, h, i] * k[b, g, j]) for j in seen])
        slope = np.ones(len(seen))
        if softcap is not None:
            t = np.tanh(s / softcap)
            s, slope = softcap * t, 1 - t**2
        if mask is not None and not boolean:
            s = s + mask[b, h, i, seen]
        if alibi_slopes is not None:
            s = s - float(alibi_slopes[h]) * np.array([abs(at - j) for j in seen])
        logits = s if sinks is None else np.append(s, float(sinks[h]))
        weights = np.exp(logits - logits.max())
        weights = weights / weights.sum()
        p = weights[: len(seen)]
        dp = np.array([math.fsum(do[b, h, i] * v[b, g, j]) for j in seen])
        delta = math.fsum(p * dp)
        ds = p * (dp - delta)
        # What D is a sum of: dO o O where it comes from the output.
        spread = math.fsum(np.abs(do[b, h, i]) * np.abs(p @ v[b, g, seen]))
        near = p * (np.abs(v[b, g, seen]) @ np.abs(do[b, h, i]) + spread)
        for j, x, y, w, c in zip(seen, ds * slope, near, p, ds, strict=True):
            add("dq", (b, h, i), alpha * x * k[b, g, j], alpha * y * np.abs(k[b, g, j]))
            add("dk", (b, g, j), alpha * x * q[b, h, i], alpha * y * np.abs(q[b, h, i]))
            add("dv", (b, g, j), w * do[b, h, i], w * np.abs(do[b, h, i]))
            if "dbias" in found:
                add("dbias", (b, h, i, j), c, y)
        if sinks is not None:
            add("dsinks", h, -weights[-1] * delta, weights[-1] * spread)
    return [Exact(value, 4 * size[name], 16 * size[name]) for name, value in found.items()]
