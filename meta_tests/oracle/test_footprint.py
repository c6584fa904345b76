"""Footprints: published figures recomputed from the models' dimensions, and counts against plain loops."""

from __future__ import annotations

from fractions import Fraction

import pytest

from oracle.footprint import (
    DEEPSEEK_67B,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    H100,
    Grouped,
    Latent,
    attention_flops,
    cache_bytes,
    cache_elements,
    compulsory_traffic,
    decode_intensity,
    mla_flops,
    naive_traffic,
    naive_workspace,
    prefill_intensity,
    saving,
    tiled_traffic,
    visible_pairs,
)

V2, V3, B67 = DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_67B
# The module of the second seed: 32 query heads over 8 KV heads of 128.
MHA, GQA, MQA = (Grouped(32, kv, 128, 128) for kv in (32, 8, 1))


def per_token(model):
    return cache_elements(model.layout, model.layers)


# ---- the KV cache


def test_dimensions_are_those_of_the_papers():
    assert (V2.layers, V2.layout) == (
        60,
        Latent(query_heads=128, nope_dim=128, rope_dim=64, value_dim=128, latent_dim=512),
    )
    assert (V3.layers, V3.layout) == (61, V2.layout)
    assert (B67.layers, B67.layout.kv_heads, B67.layout.key_dim, B67.layout.value_dim) == (95, 8, 128, 128)


def test_what_the_ninety_three_percent_is():
    v2, b67 = 60 * (512 + 64), 95 * 2 * 8 * 128
    assert (v2, b67) == (34_560, 194_560)
    assert (per_token(V2), per_token(B67)) == (v2, b67)
    elements = saving(per_token(V2), per_token(B67))
    assert elements == 1 - Fraction(60 * 576, 95 * 2048)
    assert round(float(elements) * 100, 2) == 82.24
    # With 6-bit storage against 16-bit: the paper's figure.
    stored = saving(cache_bytes(V2.layout, 60, bits=6), cache_bytes(B67.layout, 95, bits=16))
    assert stored == 1 - (1 - elements) * Fraction(6, 16)
    assert round(float(stored) * 100, 1) == 93.3
    # Against MHA with V2's own heads.
    mha = cache_elements(V2.layout.as_mha, V2.layers)
    assert mha == 60 * 2 * 128 * 128
    assert round(float(saving(v2, mha)) * 100, 2) == 98.24


def test_v3_against_mha():
    mha = cache_elements(V3.layout.as_mha, V3.layers)
    assert per_token(V3) == 61 * 576
    assert mha == 61 * 2 * 128 * 128
    assert saving(per_token(V3), mha) == 1 - Fraction(576, 2 * 128 * 128)


def test_mla_caches_as_much_as_gqa_with_two_and_a_quarter_groups():
    # arXiv 2405.04434, table 1: 9/2 d_h l for d_c = 4 d_h and d_r = d_h / 2.
    d = V2.layout.nope_dim
    assert V2.layout.latent_dim == 4 * d
    assert V2.layout.rope_dim * 2 == d
    assert V2.layout.cached == Fraction(9, 2) * d == Fraction(9, 4) * Grouped(128, 1, d, d).cached


def test_heads_set_the_cache():
    assert cache_elements(MHA, 1) == 4 * cache_elements(GQA, 1) == 32 * cache_elements(MQA, 1) == 2 * 32 * 128
    assert cache_elements(GQA, 32, 4096) == 32 * 4096 * cache_elements(GQA, 1)
    assert cache_bytes(GQA, 32, bits=16, tokens=65536) == 2 * 8 * 128 * 32 * 65536 * 2 == 8 * 2**30


def test_bytes_fill_up_the_last_one():
    one = Grouped(1, 1, 1, 2)
    assert [cache_bytes(one, 1, bits=b) for b in (1, 2, 3, 6, 8, 16)] == [1, 1, 2, 3, 3, 6]


def test_heads_must_divide():
    for query, kv in ((32, 5), (8, 16), (8, 0), (8, -8)):
        with pytest.raises(ValueError, match=f"{query} query heads are no multiple of {kv}"):
            Grouped(query, kv, 64, 64)


# ---- operations


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_visible_pairs_equal_a_count(alignment):
    for n_q in range(8):
        for n_k in range(8):
            shift = n_k - n_q if alignment == "bottom_right" else 0
            counted = sum(j <= i + shift for i in range(n_q) for j in range(n_k))
            assert visible_pairs(n_q, n_k, is_causal=True, causal_alignment=alignment) == counted
            assert visible_pairs(n_q, n_k) == n_q * n_k
    with pytest.raises(ValueError, match="top_left, bottom_right"):
        visible_pairs(1, 1, is_causal=True, causal_alignment="middle")


def matrix_product(n, k, m, tally):
    tally.append(2 * n * k * m)


@pytest.mark.parametrize("layout", [MHA, GQA, MQA, Grouped(6, 2, 5, 3)])
def test_flops_are_those_of_the_two_products_of_every_head(layout):
    tally = []
    for _ in range(layout.query_heads):
        matrix_product(7, layout.key_dim, 11, tally)
        matrix_product(7, 11, layout.value_dim, tally)
    assert attention_flops(layout, 7, 11) == sum(tally)
    half = attention_flops(layout, 64, 64, pairs=visible_pairs(64, 64, is_causal=True))
    assert half == Fraction(65, 128) * attention_flops(layout, 64, 64)


def test_flops_do_not_depend_on_kv_heads():
    assert attention_flops(MHA, 9, 9) == attention_flops(GQA, 9, 9) == attention_flops(MQA, 9, 9)


@pytest.mark.parametrize("layout", [V2.layout, Latent(3, 5, 2, 7, 11)])
@pytest.mark.parametrize(("n_q", "n_k"), [(1, 50), (13, 13)])
def test_mla_flops_are_those_of_its_products(layout, n_q, n_k):
    made, absorbed = [], []
    for _ in range(layout.query_heads):
        matrix_product(n_k, layout.latent_dim, layout.nope_dim, made)  # k^C = W_UK c
        matrix_product(n_k, layout.latent_dim, layout.value_dim, made)  # v = W_UV c
        matrix_product(n_q, layout.nope_dim, n_k, made)
        matrix_product(n_q, layout.rope_dim, n_k, made)
        matrix_product(n_q, n_k, layout.value_dim, made)
        matrix_product(n_q, layout.nope_dim, layout.latent_dim, absorbed)  # W_UK^T q
        matrix_product(n_q, layout.latent_dim, n_k, absorbed)
        matrix_product(n_q, layout.rope_dim, n_k, absorbed)
        matrix_product(n_q, n_k, layout.latent_dim, absorbed)
        matrix_product(n_q, layout.latent_dim, layout.value_dim, absorbed)  # W_UV times the latent
    assert mla_flops(layout, n_q, n_k, absorbed=False) == sum(made)
    assert mla_flops(layout, n_q, n_k, absorbed=True) == sum(absorbed)


def test_absorbing_pays_in_decoding_and_costs_in_prefill():
    one, many = (1, 8192), (8192, 8192)
    assert mla_flops(V2.layout, *one, absorbed=True) * 50 < mla_flops(V2.layout, *one, absorbed=False)
    assert mla_flops(V2.layout, *many, absorbed=True) > 2 * mla_flops(V2.layout, *many, absorbed=False)


# ---- memory


class Memory:
    """Counts the elements that an algorithm reads and writes."""

    def __init__(self):
        self.moved = 0

    def move(self, *shape):
        size = 1
        for extent in shape:
            size *= extent
        self.moved += size


def naive(layout, n_q, n_k, memory):
    for _ in range(layout.kv_heads):
        memory.move(n_k, layout.key_dim)
        memory.move(n_k, layout.value_dim)
    for _ in range(layout.query_heads):
        memory.move(n_q, layout.key_dim)
        for _ in ("S out", "S in", "P out", "P in"):
            memory.move(n_q, n_k)
        memory.move(n_q, layout.value_dim)


def tiled(layout, n_q, n_k, tile, memory):
    for _ in range(layout.query_heads):
        for start in range(0, n_q, tile):
            rows = min(tile, n_q - start)
            memory.move(rows, layout.key_dim)
            memory.move(n_k, layout.key_dim)
            memory.move(n_k, layout.value_dim)
            memory.move(rows, layout.value_dim)
            memory.move(rows)  # the log-sum-exp


@pytest.mark.parametrize("layout", [MHA, GQA, MQA, Grouped(6, 2, 5, 3)])
@pytest.mark.parametrize(("n_q", "n_k", "tile"), [(1, 100, 16), (33, 33, 16), (64, 128, 64), (5, 7, 1)])
def test_traffic_equals_a_walk_through_the_algorithm(layout, n_q, n_k, tile):
    memory = Memory()
    naive(layout, n_q, n_k, memory)
    assert naive_traffic(layout, n_q, n_k) == memory.moved
    memory = Memory()
    tiled(layout, n_q, n_k, tile, memory)
    assert tiled_traffic(layout, n_q, n_k, tile=tile) == memory.moved
    assert compulsory_traffic(layout, n_q, n_k) <= min(naive_traffic(layout, n_q, n_k), memory.moved)


def test_naive_traffic_and_workspace_grow_with_the_square():
    for n in (4096, 65536):
        assert naive_workspace(MHA, 2 * n, 2 * n) == 4 * naive_workspace(MHA, n, n) == 4 * 32 * n * n
        assert 3.8 < naive_traffic(MHA, 2 * n, 2 * n) / naive_traffic(MHA, n, n) < 4


def test_tiled_traffic_with_a_fixed_tile_does_so_too_but_by_less():
    # What the seeds call O(N^2) against none is, without a cache, a factor: 4 n against (d_k + d_v) n /
    # tile an element.
    n = 65536
    assert 3.9 < tiled_traffic(MHA, 2 * n, 2 * n, tile=128) / tiled_traffic(MHA, n, n, tile=128) < 4
    ratio = Fraction(naive_traffic(MHA, n, n), tiled_traffic(MHA, n, n, tile=128))
    assert abs(ratio - Fraction(4 * 128, 128 + 128)) < Fraction(1, 100)
    assert tiled_traffic(MHA, n, n, tile=n) == compulsory_traffic(MHA, n, n) + 32 * n


# ---- the roofline


def test_the_ridge_of_the_h100():
    assert H100.ridge == Fraction(989 * 10**12, 3_350_000_000_000)
    assert 295 < H100.ridge < 296


def test_decoding_lies_below_the_ridge_whatever_the_length():
    for n in (1, 4096, 10**6):
        # One multiply-add an element read and query head that shares it: the group size, at 16 bits.
        assert [decode_intensity(x, n, bits=16) for x in (MHA, GQA, MQA)] == [1, 4, 32]
        mla = decode_intensity(V2.layout, n, bits=16)
        assert mla == Fraction(128 * (2 * 512 + 64), 512 + 64)
        assert 241 < mla < 242
        assert mla < H100.ridge < decode_intensity(V2.layout, n, bits=16, queries=2)
        assert decode_intensity(V2.layout, n, bits=8) == 2 * mla


def test_naive_prefill_stays_below_the_ridge_and_tiled_reaches_it():
    lengths = [2**k for k in range(7, 18)]
    assert all(prefill_intensity(MHA, n, bits=16, tile=None) < 64 for n in lengths)  # 2 (d_k + d_v) / (4 x 2 bytes)
    # One multiply-add for each query of the tile and element read.
    assert all(prefill_intensity(MHA, n, bits=16, tile=128) < 128 for n in lengths)
    assert prefill_intensity(MHA, 2**17, bits=16, tile=512) > H100.ridge
