"""Latent attention and its gradient, in loops."""

from typing import Any

import numpy as np
import torch

from meta_tests.kernels.plain.attention import attention
from meta_tests.kernels.plain.exact import Exact, wide


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
