"""What MHA, MQA, GQA and MLA cost: KV cache, floating-point operations, memory traffic. Exact integers.

Counts are of the textbook algorithms, not of any kernel. A multiply-add is two operations; exp, max and
the row sum are left out, as in the FLOP counts of the FlashAttention papers (arXiv 2205.14135, 2307.08691
section 4.1). Sizes are elements; bits and bytes come from a width in bits, so that 6-bit caches need no
rounding. ``n_q`` query positions meet ``n_k`` keys.

Sources: multi-query attention, Shazeer 2019 (arXiv 1911.02150); grouped-query, Ainslie et al. 2023 (arXiv
2305.13245); MLA, DeepSeek-V2 (arXiv 2405.04434, section 2.1 and table 1); roofline, Williams et al. 2009
(CACM 52(4)).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Grouped:
    """MHA (as many KV heads as query heads), MQA (one) or GQA. ValueError if the KV heads do not divide."""

    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.query_heads % self.kv_heads:
            raise ValueError(f"{self.query_heads} query heads are no multiple of {self.kv_heads} KV heads")

    @property
    def cached(self) -> int:
        """Elements a token leaves in one layer's cache: a key and a value for each KV head."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class Latent:
    """MLA: a latent of ``latent_dim`` and one rotated key of ``rope_dim`` shared by all heads."""

    query_heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    latent_dim: int

    @property
    def cached(self) -> int:
        """Elements a token leaves in one layer's cache: c^KV and k^R (arXiv 2405.04434, table 1)."""
        return self.latent_dim + self.rope_dim

    @property
    def as_mha(self) -> Grouped:
        """MHA with the same heads and no rotated part: what the paper's table 1 sets against MLA."""
        return Grouped(self.query_heads, self.query_heads, self.nope_dim, self.value_dim)

    @property
    def materialised(self) -> Grouped:
        """The attention that is left once keys and values of every head are built."""
        return Grouped(self.query_heads, self.query_heads, self.nope_dim + self.rope_dim, self.value_dim)

    @property
    def absorbed(self) -> Grouped:
        """The attention over the latents themselves: one KV head, whose value is part of its key."""
        return Grouped(self.query_heads, 1, self.latent_dim + self.rope_dim, self.latent_dim)


Layout = Grouped | Latent


@dataclass(frozen=True, slots=True)
class Model:
    """The attention of a published model: ``layers`` times ``layout``."""

    name: str
    layers: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class Machine:
    """Peak matrix operations and memory bytes a second."""

    name: str
    flops: int
    bandwidth: int

    @property
    def ridge(self) -> Fraction:
        """Operations a byte from which the machine is bound by arithmetic (roofline)."""
        return Fraction(self.flops, self.bandwidth)


DEEPSEEK_67B = Model("DeepSeek 67B", 95, Grouped(64, 8, 128, 128))
"""arXiv 2401.02954, table 2."""
DEEPSEEK_V2 = Model("DeepSeek-V2", 60, Latent(128, 128, 64, 128, 512))
"""arXiv 2405.04434, section 3.1.2."""
DEEPSEEK_V3 = Model("DeepSeek-V3", 61, Latent(128, 128, 64, 128, 512))
"""arXiv 2412.19437, section 4.2."""
MODELS = (DEEPSEEK_67B, DEEPSEEK_V2, DEEPSEEK_V3)

H100 = Machine("H100 SXM", 989 * 10**12, 335 * 10**10)
"""NVIDIA H100 data sheet: dense fp16 or bf16 tensor cores, HBM3."""


def cache_elements(layout: Layout, layers: int, tokens: int = 1) -> int:
    """Elements in the KV cache of ``tokens`` tokens."""
    return layout.cached * layers * tokens


def cache_bytes(layout: Layout, layers: int, *, bits: int, tokens: int = 1) -> int:
    """Bytes of the KV cache with ``bits`` an element, the last byte filled up."""
    return -(-cache_elements(layout, layers, tokens) * bits // 8)


def saving(small: int, large: int) -> Fraction:
    """The share by which ``small`` is below ``large``, exactly."""
    return 1 - Fraction(small, large)


def visible_pairs(n_q: int, n_k: int, *, is_causal: bool = False, causal_alignment: str = "bottom_right") -> int:
    """Pairs of query and visible key.

    Causal: query i sees keys up to i (`top_left`) or up to i + n_k - n_q (`bottom_right`).
    """
    if not is_causal:
        return n_q * n_k
    if causal_alignment not in ("top_left", "bottom_right"):
        raise ValueError(f"unknown causal_alignment {causal_alignment!r}; known: top_left, bottom_right")
    first = 1 + (n_k - n_q if causal_alignment == "bottom_right" else 0)
    # Row i sees first + i keys, cut to 0 .. n_k.
    return _clipped_sum(first + n_q - 1, n_k) - _clipped_sum(first - 1, n_k)


def _clipped_sum(last: int, top: int) -> int:
    """The sum of min(max(c, 0), top) over all integers c up to ``last``."""
    within = min(max(last, 0), top)
    return within * (within + 1) // 2 + max(last - top, 0) * top


def attention_flops(layout: Grouped, n_q: int, n_k: int, *, pairs: int | None = None) -> int:
    """q k^T and P v: 2 (key_dim + value_dim) operations for each head and visible pair (default: all)."""
    seen = n_q * n_k if pairs is None else pairs
    return 2 * layout.query_heads * seen * (layout.key_dim + layout.value_dim)


def mla_flops(layout: Latent, n_q: int, n_k: int, *, absorbed: bool, pairs: int | None = None) -> int:
    """The core of MLA from q, c^KV and k^R to the heads' outputs.

    Materialised: k^C and v of every key and head, then attention. Absorbed: W_UK^T q, attention over latents,
    W_UV times the weighted latent. The projections outside the core are the same in both and are not counted.
    """
    lifted = n_q if absorbed else n_k
    lifting = 2 * layout.query_heads * lifted * layout.latent_dim * (layout.nope_dim + layout.value_dim)
    core = layout.absorbed if absorbed else layout.materialised
    return lifting + attention_flops(core, n_q, n_k, pairs=pairs)


def compulsory_traffic(layout: Grouped, n_q: int, n_k: int) -> int:
    """Elements that any algorithm moves: q, k and v read once, the output written once."""
    queries = layout.query_heads * n_q * (layout.key_dim + layout.value_dim)
    return queries + layout.cached * n_k


def naive_traffic(layout: Grouped, n_q: int, n_k: int) -> int:
    """Elements moved when S and P are each written to memory and read back, besides the compulsory ones.

    arXiv 2205.14135, algorithm 0. K and V are read once for each KV head; repeating them for every query head
    adds to this.
    """
    return compulsory_traffic(layout, n_q, n_k) + 4 * naive_workspace(layout, n_q, n_k)


def naive_workspace(layout: Grouped, n_q: int, n_k: int) -> int:
    """Elements of S, kept beside inputs and output: quadratic in the length."""
    return layout.query_heads * n_q * n_k


def tiled_traffic(layout: Grouped, n_q: int, n_k: int, *, tile: int) -> int:
    """Elements moved when every tile of ``tile`` queries reads all keys and values; q and output pass once.

    The loop order of FlashAttention-2 (arXiv 2307.08691, algorithm 1), with the row's log-sum-exp written. No
    cache lies between memory and tile, no masked tile is skipped, and each head reads its KV head's keys
    for itself. With a fixed tile this grows with the square of the length too, over ``tile``: what tiling
    keeps linear is the workspace.
    """
    tiles = -(-n_q // tile)
    keys = layout.query_heads * tiles * n_k * (layout.key_dim + layout.value_dim)
    return layout.query_heads * n_q * (layout.key_dim + layout.value_dim + 1) + keys


def decode_intensity(layout: Layout, n_k: int, *, bits: int, queries: int = 1) -> Fraction:
    """Operations a byte of one decoding step over ``n_k`` cached tokens, which are read once.

    Queries, output and weights are not counted. MLA is taken absorbed, without the lifting of the queries:
    what remains as the cache grows.
    """
    core = layout.absorbed if isinstance(layout, Latent) else layout
    return Fraction(attention_flops(core, queries, n_k) * 8, layout.cached * n_k * bits)


def prefill_intensity(layout: Grouped, n: int, *, bits: int, tile: int | None) -> Fraction:
    """Operations a byte of unmasked attention over ``n`` tokens, tiled or (``tile`` None) naive."""
    moved = naive_traffic(layout, n, n) if tile is None else tiled_traffic(layout, n, n, tile=tile)
    return Fraction(attention_flops(layout, n, n) * 8, moved * bits)
