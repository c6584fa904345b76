"""Packed sequences."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from targets.honest import flash
from targets.honest.describe import describe
from targets.honest.layouts import Gathers, heads_first, slopes_of, span, varlen
from targets.mutants.layouts.inputs import packed
from targets.mutants.mutant import mutant


def by_queries(q_sums: Tensor, k_sums: Tensor, sequence: int) -> slice:
    return span(q_sums.clamp(max=k_sums[-1]), sequence)


varlen_query_lengths_for_keys = mutant(
    "attention_varlen",
    "P1",
    "The prefix sums of the queries are used for the keys too.",
    smallest=packed([1, 1], [2, 1]),
)(varlen(Gathers(keys_of=by_queries)))


def whole_tiles(q_sums: Tensor, k_sums: Tensor, sequence: int) -> slice:
    own = span(k_sums, sequence)
    stop = own.start + -(-(own.stop - own.start) // 4) * 4
    return slice(own.start, min(stop, int(k_sums[-1])))


varlen_neighbour_attended = mutant(
    "attention_varlen",
    "P2",
    "A sequence whose keys do not fill a tile of four also reads those of the next one that lie in it.",
    smallest=packed([1, 1], [1, 1]),
)(varlen(Gathers(keys_of=whole_tiles)))


def first(slopes: Tensor | None, sequence: int) -> Tensor | None:
    return slopes_of(slopes, 0)


varlen_slopes_of_first_sequence = mutant(
    "attention_varlen",
    "P17",
    "Slopes [N, Hq] are read for the first sequence only.",
    smallest=packed([1, 1], [2, 2], alibi_slopes=torch.tensor([[0.0], [1.0]])),
)(varlen(Gathers(slopes_of=first)))


def tiled(query_heads: int, kv_heads: int) -> Tensor:
    return torch.arange(query_heads) % kv_heads


varlen_kv_heads_tiled = mutant(
    "attention_varlen",
    "P13",
    "Packed: KV heads are tiled (0, 1, 0, 1) instead of repeated (0, 0, 1, 1).",
    smallest=packed([1], [1], heads=(4, 2)),
)(varlen(Gathers(attend=flash.kernel(flash.Steps(kv_head=tiled)))))


def in_e4m3(p: Tensor, dtype: torch.dtype) -> Tensor:
    return p.to(torch.float8_e4m3fn).to(dtype)


varlen_weights_in_e4m3 = mutant(
    "attention_varlen",
    "G3",
    "Packed: P is cast to e4m3, which keeps 4 bits, for its product with V: undeclared.",
    smallest=packed([1], [2], scores=[0.0, -0.09375]),
)(varlen(Gathers(attend=flash.kernel(flash.Steps(cast=in_e4m3)))))


KERNELS: dict[int, Callable[..., Any]] = {n: flash.kernel(flash.Steps(splits=n)) for n in (1, 2)}


@mutant(
    "attention_varlen",
    "P11",
    "The number of splits follows the longest of a call's sequences, though batch invariance is declared.",
    reports="Reported: flashinfer-ai/flashinfer#2424.",
    smallest="a sequence of 16 keys beside one of 34, and again alone",
)
@describe("attention_varlen", contract={"preset": "flash", "splits": 2}, conventions={"batch_invariant": "yes"})
def varlen_tile_of_longest(
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
