"""The ops once more, in float64 loops written from their definitions: shares nothing with the kernels under
test.

Each function takes the target's own keyword arguments and returns one `Exact` per output.
"""

import math
from typing import Any, NamedTuple

import mpmath
import numpy as np
import torch
from numpy.typing import NDArray

from meta_tests.witnesses import rope as rope_witness

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
    x: Any,
    positions: Any,
    *,
    base: float = 10000.0,
    layout: str = "half",
    rotary_dim: int | None = None,
    scaling: Any = None,
    sign: float = 1.0,
) -> list[Exact]:
    """`sign` of sin: -1 for the gradient."""
    x = wide(x)
    half = (x.shape[-1] if rotary_dim is None else rotary_dim) // 2
    places = positions.numpy().astype(np.float64)
    if scaling is None or "mrope_section" not in scaling:
        places = np.stack([places] * 3)
    places = places[:, :, None] if places.ndim == 3 else places
    length = int(places.max()) + 1
    with mpmath.workprec(100):
        theta = [float(rope_witness.frequency(i, 2 * half, base, scaling, length)) for i in range(half)]
        size = float(rope_witness.size(scaling))
    shape = (*x.shape[:-1], half)
    turned = [places[rope_witness.axis(i, scaling)] * theta[i] for i in range(half)]
    angle = np.broadcast_to(np.stack(turned, -1), shape)
    # Blended frequencies magnify the rounding of what they are blended by.
    blended = 40 if scaling is not None and scaling["rope_type"] in ("yarn", "llama3") else 10 if scaling else 0
    roundings = np.abs(angle) * [2.0 + blended + 4 * i / half * math.log(base) for i in range(half)]
    made = _turn(x, size * np.cos(angle), sign * size * np.sin(angle), roundings, layout)
    return [made._replace(computed=made.computed * max(size, 1.0) + 16 * made.stored * (size != 1))]


def rope_backward(dy: Any, positions: Any, **options: Any) -> list[Exact]:
    return rope(dy, positions, **options, sign=-1.0)


def rope_apply(x: Any, cos: Any, sin: Any, *, layout: str = "half") -> list[Exact]:
    x = wide(x)
    shape = (*x.shape[:-1], cos.shape[-1])
    tables = np.broadcast_to(wide(cos), shape), np.broadcast_to(wide(sin), shape)
    return [_turn(x, *tables, np.zeros(shape), layout)]


def mla_backward(
    q_nope: Any, q_pe: Any, c_kv: Any, k_pe: Any, w_uk: Any, w_uv: Any, do: Any, *, scale: float | None = None,
    is_causal: bool = False,
) -> list[Exact]:  # fmt: skip
    q_nope, q_pe, c_kv, k_pe, w_uk, w_uv, do = (wide(a) for a in (q_nope, q_pe, c_kv, k_pe, w_uk, w_uv, do))
    alpha = (q_nope.shape[-1] + q_pe.shape[-1]) ** -0.5 if scale is None else scale
    key, value = (np.einsum("bjc,hdc->bhjd", c_kv, w) for w in (w_uk, w_uv))
    s = np.einsum("bhid,bhjd->bhij", q_nope, key) + np.einsum("bhid,bjd->bhij", q_pe, k_pe)
    rows, keys = s.shape[2:]
    s = np.where(np.triu(np.ones((rows, keys), dtype=bool), keys - rows + 1) & is_causal, -np.inf, alpha * s)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - np.where(np.isneginf(top), 0.0, top))
    total = p.sum(-1, keepdims=True)
    p = p / np.where(total == 0, 1.0, total)
    dp = np.einsum("bhid,bhjd->bhij", do, value)
    ds = alpha * p * (dp - (p * dp).sum(-1, keepdims=True))
    dk, dv = np.einsum("bhij,bhid->bhjd", ds, q_nope), np.einsum("bhij,bhid->bhjd", p, do)
    values = [
        np.einsum("bhij,bhjd->bhid", ds, key), np.einsum("bhij,bjd->bhid", ds, k_pe),
        np.einsum("bhjd,hdc->bjc", dk, w_uk) + np.einsum("bhjd,hdc->bjc", dv, w_uv),
        np.einsum("bhij,bhid->bjd", ds, q_pe), np.einsum("bhjd,bjc->hdc", dk, c_kv),
        np.einsum("bhjd,bjc->hdc", dv, c_kv),
    ]  # fmt: skip
    # One size for all: whatever any factor of any gradient may reach.
    sizes = [np.abs(a).max() for a in (q_nope, q_pe, c_kv, k_pe, w_uk, w_uv, do)]
    most = (1 + max(sizes)) ** 3 * (1 + np.abs(dp).max()) * (rows + keys + len(w_uk))
    return [Exact(v, np.abs(v) + 0.05 * most, np.full(v.shape, most * 20)) for v in values]


def gqa_block(
    x: Any, w_q: Any, w_k: Any, w_v: Any, w_o: Any, cos: Any, sin: Any, *, num_heads: int, num_kv_heads: int
) -> list[Exact]:
    x, w_q, w_k, w_v, w_o, cos, sin = (wide(a) for a in (x, w_q, w_k, w_v, w_o, cos, sin))
    dim = len(w_q) // num_heads
    q, k, v = (np.einsum("bse,oe->bso", x, w) for w in (w_q, w_k, w_v))
    sizes = [np.einsum("bse,oe->bso", np.abs(x), np.abs(w)) for w in (w_q, w_k, w_v)]

    def turned(a: Array, head: int) -> Array:
        first, second = a[..., head * dim : head * dim + dim // 2], a[..., head * dim + dim // 2 : (head + 1) * dim]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    hidden = np.triu(np.ones((x.shape[1], x.shape[1]), dtype=bool), 1)
    outs, spreads = [], []
    for h in range(num_heads):
        g = h // (num_heads // num_kv_heads)
        query, key, value = turned(q, h), turned(k, g), v[..., g * dim : (g + 1) * dim]
        s = np.where(hidden, -np.inf, np.einsum("bid,bjd->bij", query, key) / math.sqrt(dim))
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        outs.append(p @ value)
        # Scores err by roundings of every stored factor, values by their own.
        most = (np.abs(sizes[0]).max() * np.abs(sizes[1]).max()) * math.sqrt(dim)
        spreads.append((8 + 8 * most) * (p @ sizes[2][..., g * dim : (g + 1) * dim]))
    y = np.concatenate(outs, -1) @ w_o.T
    size = np.concatenate(spreads, -1) @ np.abs(w_o).T
    return [Exact(y, np.abs(y) + size, (x.shape[-1] + len(w_q) + x.shape[1] + 20) * size)]


def mla_block(
    x: Any, positions: Any, w_dkv: Any, w_uk: Any, w_uv: Any, w_kr: Any, w_dq: Any, w_uq: Any, w_qr: Any, w_o: Any,
    *, base: float = 10000.0, layout: str = "half", scale: float | None = None, norm_kv: Any = None,
    norm_q: Any = None, eps: float = 1e-6, scaling: Any = None,
) -> list[Exact]:  # fmt: skip
    x, w_dkv, w_uk, w_uv, w_kr, w_dq, w_uq, w_qr, w_o = (
        wide(a) for a in (x, w_dkv, w_uk, w_uv, w_kr, w_dq, w_uq, w_qr, w_o)
    )
    d_h, d_r = w_uk.shape[1], len(w_kr)
    length = int(positions.max()) + 1
    with mpmath.workprec(80):
        theta = np.array([float(rope_witness.frequency(i, d_r, base, scaling, length)) for i in range(d_r // 2)])
        magnitude = float(rope_witness.size(scaling))
    angle = np.broadcast_to(positions.numpy()[..., None] * theta, (*x.shape[:2], d_r // 2))
    tempered = 1.0
    if scaling is not None and scaling.get("mscale_all_dim"):
        tempered += 0.1 * scaling["mscale_all_dim"] * math.log(max(scaling["factor"], 1.0))
    alpha = tempered**2 * (d_h + d_r) ** -0.5 if scale is None else scale

    def norm(c: Array, gain: Any) -> Array:
        return c if gain is None else c / np.sqrt((c * c).mean(-1, keepdims=True) + eps) * wide(gain)

    def turned(a: Array) -> Array:
        return _turn(a, magnitude * np.cos(angle), magnitude * np.sin(angle), np.zeros(angle.shape), layout).value

    c_kv, c_q = norm(x @ w_dkv.T, norm_kv), norm(x @ w_dq.T, norm_q)
    k_pe = turned(x @ w_kr.T)
    hidden = np.triu(np.ones((x.shape[1], x.shape[1]), dtype=bool), 1)
    outs, spreads = [], []
    for uk, uv, uq, qr in zip(w_uk, w_uv, w_uq, w_qr, strict=True):
        nope, rope_part = c_q @ uq.T, turned(c_q @ qr.T)
        s = np.einsum("bid,bjd->bij", nope, c_kv @ uk.T) + np.einsum("bid,bjd->bij", rope_part, k_pe)
        s = np.where(hidden, -np.inf, alpha * s)
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        outs.append(p @ (c_kv @ uv.T))
        # Scores err by roundings of every stored factor, values by their own.
        most = [np.abs(a).max() for a in (c_q, c_kv, k_pe)]
        size = alpha * (d_h * np.abs(uk).sum(1).max() * most[1] + d_r * most[2]) * most[0]
        size *= max(np.abs(uq).sum(1).max(), np.abs(qr).sum(1).max())
        spreads.append((10 + 16 * size) * (p @ (np.abs(c_kv) @ np.abs(uv).T)))
    y = np.concatenate(outs, -1) @ w_o.T
    size = np.concatenate(spreads, -1) @ np.abs(w_o).T
    turns = 20 * np.abs(angle).max()
    return [Exact(y, np.abs(y) + size, (x.shape[-1] + c_kv.shape[-1] + x.shape[1] + 40 + turns) * size)]


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
