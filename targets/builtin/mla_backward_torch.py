"""The gradients of multi-head latent attention's core by torch.autograd through a materialised forward pass.

The forward pass runs in float32 (float64 for float64 inputs) and casts what it builds per head, k^C and v, to the
inputs' dtype, as a training step in that dtype does; everything else is kept, so that the gradients are rounded where
they pass those casts and when they are returned.
"""

from __future__ import annotations

import torch

from targets.calling.declare import declare

Tensor = torch.Tensor


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def mla_backward(
    q_nope: Tensor,
    q_pe: Tensor,
    c_kv: Tensor,
    k_pe: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    do: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
) -> dict[str, Tensor]:
    """Gradients dq_nope .. dw_uv of sum(do * out), in the shapes of the inputs; causal masks are aligned top-left."""
    given = {"q_nope": q_nope, "q_pe": q_pe, "c_kv": c_kv, "k_pe": k_pe, "w_uk": w_uk, "w_uv": w_uv}
    leaves = {n: t.detach().clone().requires_grad_() for n, t in given.items()}
    with torch.enable_grad():
        latent = _wide(leaves["c_kv"])[:, None]
        k_nope, v = ((latent @ _wide(leaves[n]).mT).to(c_kv.dtype) for n in ("w_uk", "w_uv"))
        scores = _wide(leaves["q_nope"]) @ _wide(k_nope).mT
        scores = scores + _wide(leaves["q_pe"]) @ _wide(leaves["k_pe"])[:, None].mT
        scores = scores * ((q_nope.shape[-1] + q_pe.shape[-1]) ** -0.5 if scale is None else scale)
        if is_causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        out = torch.softmax(scores, -1) @ _wide(v)
    found = torch.autograd.grad(out, list(leaves.values()), _wide(do))
    return {f"d{n}": g for n, g in zip(leaves, found, strict=True)}


declare(
    mla_backward,
    {
        "op": "mla_backward",
        "dtypes": ("fp64", "fp32", "fp16", "bf16"),
        "contract": {"delta": "weights"},
        "conventions": {"causal_alignment": "top_left"},
        "description": "torch.autograd through materialised latent attention",
    },
)
