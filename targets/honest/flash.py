"""FlashAttention's forward pass in plain torch on a CPU, with every step replaceable.

Online softmax over tiles of keys (Dao, arXiv 2307.08691, algorithm 1), optionally over splits of the keys
that are merged by their LSE (Flash-Decoding). Scores, exp, sums and the accumulator are float32 (float64 for
float64 inputs), the weights P are cast to the input dtype before P V, the row sum adds the uncast weights:
the contract `flash`, and `fp32` for float32 inputs, where the cast does nothing.

Shapes: q `[B, Hq, Sq, D]`, k `[B, Hkv, Sk, D]`, v `[B, Hkv, Sk, Dv]`; inside, a tile of scores is
`[B, Hq, Sq, T]`, row statistics are `[B, Hq, Sq, 1]`. Conventions: causal masks are aligned bottom-right, a
boolean mask is True where a query may attend, a row without keys gives 0 and LSE -inf (with a sink: the sink), NaN and
inf in a key or value that a row may not attend to never reach that row. `targets.honest.flash_options` says what
window, soft cap, ALiBi and sinks are.

`Steps` names each decision of the kernel once. An honest variant or a mutant replaces one of them and says
`kernel(Steps(row_sum=...))`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from targets.honest import flash_options
from targets.honest.describe import UP_TO_32_BITS, describe

TILE = 32  # small, so that short test inputs already cross tile borders

Shape = tuple[int, int, int, int]
Masks = tuple[Tensor, ...]
Window = tuple[int, int]
Part = tuple[Tensor, Tensor]
Result = Tensor | tuple[Tensor, Tensor]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def scale_of(given: float | None, head_dim: int) -> float:
    return 1.0 / math.sqrt(max(head_dim, 1)) if given is None else given


def kv_head(query_heads: int, kv_heads: int) -> Tensor:
    """`[Hq]`: the KV head that each query head reads; neighbours share one."""
    return torch.arange(query_heads) // (query_heads // kv_heads)


def causal(rows: int, keys: int) -> Tensor:
    """`[Sq, Sk]`, True where the causal mask lets a query see a key: the last query sees the last key."""
    return torch.arange(keys) <= torch.arange(rows)[:, None] + (keys - rows)


def read_mask(mask: Tensor, shape: Shape) -> Tensor:
    """The caller's mask as a view of `[B, Hq, Sq, Sk]`."""
    return mask.expand(shape)


def scores(q: Tensor, k: Tensor, alpha: float) -> Tensor:
    wide = compute_dtype(q.dtype)
    return (q.to(wide) @ k.to(wide).mT) * alpha


def add_bias(tile: Tensor, bias: Tensor, alpha: float) -> Tensor:
    """Add an additive mask to scores that are already scaled (`alpha` is for those who get this wrong)."""
    return tile + bias.to(tile.dtype)


def exclude(tile: Tensor, seen: Masks) -> Tensor:
    """Selection, not addition: a NaN score of a hidden key disappears too."""
    for mask in seen:
        tile = torch.where(mask, tile, -math.inf)
    return tile


def row_max(old: Tensor, tile: Tensor) -> Tensor:
    return torch.maximum(old, tile.amax(-1, keepdim=True))


def shift(maximum: Tensor) -> Tensor:
    """What is subtracted before exp: the maximum, or 0 while a row has seen no key (-inf - -inf is NaN)."""
    return torch.where(maximum == -math.inf, 0.0, maximum)


def weights(tile: Tensor, base: Tensor) -> Tensor:
    return torch.exp(tile - base)


def rescale(old: Tensor, base: Tensor) -> Tensor:
    """The factor that brings sums taken relative to the maximum `old` to the new `base`."""
    return torch.exp(old - base)


def cast(p: Tensor, dtype: torch.dtype) -> Tensor:
    return p.to(dtype)


def row_sum(total: Tensor, p: Tensor, rounded: Tensor) -> Tensor:
    return total + p.sum(-1, keepdim=True)


def weigh(p: Tensor, v: Tensor, seen: Masks) -> Tensor:
    """P V, where a hidden key adds nothing even if its value is NaN or inf (0 * NaN is NaN)."""
    wide = compute_dtype(v.dtype)
    p, v = p.to(wide), v.to(wide)
    finite = v.isfinite()
    if finite.all():
        return p @ v
    each = p[..., None] * torch.where(finite, 0.0, v)[..., None, :, :]
    for mask in seen:
        each = torch.where(mask[..., None], each, 0.0)
    return p @ torch.where(finite, v, 0.0) + each.sum(-2)


def accumulate(acc: Tensor, product: Tensor) -> Tensor:
    return acc + product


def normalise(acc: Tensor, total: Tensor) -> Tensor:
    """Only a row without keys has a zero sum: the maximum's own weight is 1. NaN stays NaN."""
    return torch.where(total == 0, 0.0, acc / total)


def lse(maximum: Tensor, total: Tensor) -> Tensor:
    return maximum + torch.log(total)


def merge(parts: list[Part]) -> Part:
    """Combine the outputs of disjoint sets of keys by their LSE (Flash-Decoding)."""
    logs = torch.stack([part[1] for part in parts])
    base = shift(logs.amax(0))
    share = torch.exp(logs - base)
    total = share.sum(0)
    out = sum((s * part[0] for s, part in zip(share, parts, strict=True)), torch.zeros(()))
    return normalise(out, total), base + torch.log(total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Every decision of the kernel; a default is what an honest FlashAttention does."""

    tile: int = TILE
    splits: int = 1
    right_to_left: bool = False
    first_max: float = -math.inf
    cap_last: bool = False  # soft cap after bias and ALiBi
    scale_of: Callable[[float | None, int], float] = scale_of
    kv_head: Callable[[int, int], Tensor] = kv_head
    causal: Callable[[int, int], Tensor] = causal
    read_mask: Callable[[Tensor, Shape], Tensor] = read_mask
    scores: Callable[[Tensor, Tensor, float], Tensor] = scores
    window: Callable[[int, int, int, int], Tensor] = flash_options.window
    cap: Callable[[Tensor, float], Tensor] = flash_options.cap
    slopes_of: Callable[[Tensor, int, int], Tensor] = flash_options.slopes_of
    reach: Callable[[int, int], Tensor] = flash_options.reach
    alibi: Callable[[Tensor, Tensor, Tensor], Tensor] = flash_options.alibi
    sink_of: Callable[[Tensor, float], Tensor] = flash_options.sink_of
    sink_in: Callable[[int], bool] = flash_options.sink_in
    add_bias: Callable[[Tensor, Tensor, float], Tensor] = add_bias
    exclude: Callable[[Tensor, Masks], Tensor] = exclude
    row_max: Callable[[Tensor, Tensor], Tensor] = row_max
    shift: Callable[[Tensor], Tensor] = shift
    weights: Callable[[Tensor, Tensor], Tensor] = weights
    rescale: Callable[[Tensor, Tensor], Tensor] = rescale
    cast: Callable[[Tensor, torch.dtype], Tensor] = cast
    row_sum: Callable[[Tensor, Tensor, Tensor], Tensor] = row_sum
    weigh: Callable[[Tensor, Tensor, Masks], Tensor] = weigh
    accumulate: Callable[[Tensor, Tensor], Tensor] = accumulate
    normalise: Callable[[Tensor, Tensor], Tensor] = normalise
    lse: Callable[[Tensor, Tensor], Tensor] = lse
    merge: Callable[[list[Part]], Part] = merge


HONEST = Steps()


@dataclass(frozen=True, slots=True)
class Problem:
    """One call, prepared: KV heads repeated, masks and bias as views of `[B, Hq, Sq, Sk]`.

    softcap: None without. slopes: ALiBi's `[B, Hq]`. sink: `[Hq]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    alpha: float
    masks: Masks
    bias: Tensor | None
    softcap: float | None = None
    slopes: Tensor | None = None
    sink: Tensor | None = None

    def scores(self, steps: Steps, keys: slice) -> tuple[Tensor, Masks]:
        """The masked scores of a tile of keys, and who may see them."""
        tile = steps.scores(self.q, self.k[..., keys, :], self.alpha)
        if self.softcap is not None and not steps.cap_last:
            tile = steps.cap(tile, self.softcap)
        if self.slopes is not None:
            reach = steps.reach(self.q.shape[-2], self.k.shape[-2])
            tile = steps.alibi(tile, self.slopes, reach[:, keys])
        if self.bias is not None:
            tile = steps.add_bias(tile, self.bias[..., keys], self.alpha)
        if self.softcap is not None and steps.cap_last:
            tile = steps.cap(tile, self.softcap)
        seen = tuple(mask[..., keys] for mask in self.masks)
        return steps.exclude(tile, seen), seen

    def start(self, steps: Steps, split: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Maximum and sum `[B, Hq, Sq, 1]` before any key: those of the sink, where this split counts it."""
        rows = (*self.q.shape[:-1], 1)
        if self.sink is None or not steps.sink_in(split):
            return torch.full(rows, steps.first_max, dtype=dtype), torch.zeros(rows, dtype=dtype)
        sink = self.sink.to(dtype)[:, None, None].expand(rows)
        return sink.clone(), (sink != -math.inf).to(dtype)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    steps: Steps,
    scale: float | None,
    is_causal: bool,
    attn_mask: Tensor | None,
    *,
    window_size: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Problem:
    batch, heads, rows, head_dim = q.shape
    shape = (batch, heads, rows, k.shape[-2])
    shared = steps.kv_head(heads, k.shape[1])
    alpha = steps.scale_of(scale, head_dim)
    masks: Masks = ()
    bias = None
    if is_causal:
        masks += (steps.causal(rows, shape[-1]).expand(shape),)
    if window_size is not None:
        masks += (steps.window(rows, shape[-1], *window_size).expand(shape),)
    if attn_mask is not None:
        mask = steps.read_mask(attn_mask, shape)
        bias = None if mask.dtype == torch.bool else mask
        masks += (mask if bias is None else mask != -math.inf,)
    slopes = None if alibi_slopes is None else steps.slopes_of(alibi_slopes, batch, heads)
    sink = None if sinks is None else steps.sink_of(sinks, alpha)
    return Problem(q, k[:, shared], v[:, shared], alpha, masks, bias, softcap, slopes, sink)


def sweep(problem: Problem, steps: Steps, keys: range, weights_dtype: torch.dtype, split: int = 0) -> Part:
    """Output `[B, Hq, Sq, Dv]` and LSE `[B, Hq, Sq, 1]` of some keys, in the compute dtype."""
    wide = compute_dtype(problem.q.dtype)
    maximum, total = problem.start(steps, split, wide)
    acc = torch.zeros((*problem.q.shape[:-1], problem.v.shape[-1]), dtype=wide)
    starts = keys[:: steps.tile]
    for start in reversed(starts) if steps.right_to_left else starts:
        here = slice(start, min(start + steps.tile, keys.stop))
        tile, seen = problem.scores(steps, here)
        old, maximum = maximum, steps.row_max(maximum, tile)
        base = steps.shift(maximum)
        p = steps.weights(tile, base)
        rounded = steps.cast(p, weights_dtype)
        factor = steps.rescale(old, base)
        total = steps.row_sum(total * factor, p, rounded)
        acc = steps.accumulate(acc * factor, steps.weigh(rounded, problem.v[..., here, :], seen))
    return steps.normalise(acc, total), steps.lse(maximum, total)


def attend(problem: Problem, steps: Steps, weights_dtype: torch.dtype) -> Part:
    """All keys, in `steps.splits` contiguous parts: O `[B, Hq, Sq, Dv]` unrounded, LSE `[B, Hq, Sq]`."""
    keys = problem.k.shape[-2]
    borders = [keys * i // steps.splits for i in range(steps.splits + 1)]
    parts = [sweep(problem, steps, range(a, b), weights_dtype, i) for i, (a, b) in enumerate(pairwise(borders))]
    out, log = parts[0] if len(parts) == 1 else steps.merge(parts)
    return out, log.squeeze(-1)


def kernel(
    steps: Steps = HONEST,
    *,
    dtypes: tuple[str, ...] = UP_TO_32_BITS,
    contract: str | dict[str, object] | None = None,
    conventions: dict[str, str] | None = None,
) -> Callable[..., Result]:
    """A target function with these steps; the rest describes it (`describe`)."""

    @describe("attention", dtypes=dtypes, contract=contract, conventions=conventions)
    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        attn_mask: Tensor | None = None,
        window_size: Window | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
    ) -> Result:
        problem = prepare(
            q, k, v, steps, scale, is_causal, attn_mask,
            window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        )  # fmt: skip
        out, log = attend(problem, steps, q.dtype)
        out = out.to(q.dtype)
        return (out, log) if return_lse else out

    return attention


attention = kernel(dtypes=("fp64", *UP_TO_32_BITS))
