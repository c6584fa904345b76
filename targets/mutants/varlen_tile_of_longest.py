"""The number of splits follows the longest of a call's sequences, though batch invariance is declared.

Reported: flashinfer-ai/flashinfer#2424. Smallest input: a sequence of 16 keys beside one of 34, and again
alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from targets.honest import flash
from targets.honest.describe import describe
from targets.honest.layouts import heads_first, span

KERNELS: dict[int, Callable[..., Any]] = {n: flash.kernel(flash.Steps(splits=n)) for n in (1, 2)}


@describe("attention_varlen", contract={"preset": "flash", "splits": 2}, conventions={"batch_invariant": "yes"})
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_k: int = 0,
    is_causal: bool = False,
    return_lse: bool = False,
) -> flash.Result:
    kernel = KERNELS[1 if int(cu_seqlens_k.diff().max()) <= 16 else 2]
    outs, logs = [], []
    for sequence in range(len(cu_seqlens_q) - 1):
        rows, keys = span(cu_seqlens_q, sequence), span(cu_seqlens_k, sequence)
        out, log = kernel(
            heads_first(q[rows]), heads_first(k[keys]), heads_first(v[keys]), is_causal=is_causal, return_lse=True
        )
        outs.append(out[0].transpose(0, 1))
        logs.append(log[0])
    whole = torch.cat(outs)
    return (whole, torch.cat(logs, dim=1)) if return_lse else whole
