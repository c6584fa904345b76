"""The Triton rotary embedding, interpreted, against float64 rotation written out here."""

import math

import numpy as np
import pytest
import torch

from targets.builtin.triton.rope import DTYPES, TILE, frequencies, rope

U = 2.0**-24
UNIT = {torch.float32: U, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
HALF_SUBNORMAL = {torch.float32: 2.0**-150, torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134}
LAYOUTS = ("half", "interleaved")


def columns(rotary_dim, layout):
    pair = np.arange(rotary_dim // 2)
    return (pair, pair + rotary_dim // 2) if layout == "half" else (2 * pair, 2 * pair + 1)


def reference(x, positions, *, base=10000.0, layout="half", rotary_dim=None):
    """(out, bound) in float64: frequencies, angle, table, rotation in float32, the output rounded once.

    A frequency is off by u (the one of pair 0 is exactly 1), the angle by u more, and by u more for a
    position beyond 2^24; cos and sin by that angle and by 4u; the rotation by two roundings.
    """
    dtype = x.dtype
    rotary_dim = x.shape[-1] if rotary_dim is None else rotary_dim
    x, positions = x.double().numpy(), positions.numpy()
    positions = np.broadcast_to(positions, (x.shape[0], x.shape[2]))[:, None, :, None]
    pair = np.arange(rotary_dim // 2)
    angle = positions * np.power(float(base), -2.0 * pair / rotary_dim)
    d_angle = np.abs(angle) * (np.where(pair == 0, 0.0, U) + U + np.where(np.abs(positions) > 2**24, U, 0.0)) * (1 + U)
    d_table = np.minimum(2.0, d_angle) + 4 * U
    first, second = columns(rotary_dim, layout)
    a, b = x[..., first], x[..., second]
    c, s = np.cos(angle), np.sin(angle)
    out, bound = x.copy(), np.zeros_like(x)
    for where, left, right, value in ((first, c, -s, a * c - b * s), (second, s, c, a * s + b * c)):
        spread = np.abs(a) * (np.abs(left) + d_table) + np.abs(b) * (np.abs(right) + d_table)
        inner = (np.abs(a) + np.abs(b)) * d_table + (2 * U + U * U) * spread + 2.0**-149
        out[..., where] = value
        bound[..., where] = inner + UNIT[dtype] * (np.abs(value) + inner) + HALF_SUBNORMAL[dtype]
    return out, bound


def case(shape, dtype, *, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def check(x, positions, **options):
    got = rope(x, positions, **options)
    out, bound = reference(x, positions, **options)
    assert got.dtype == x.dtype and got.shape == x.shape and got.is_contiguous()
    assert (np.abs(got.double().numpy() - out) <= bound).all()
    return got


POSITIONS = torch.tensor([0, 1, 2, 40, 1000, 4097, 65537, 10**6 + 3, 2**24 - 1, 2**24])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, None), (64, 32), (80, 20), (6, 6), (2, None), (7, 4), (128, 126)])
def test_matches_float64(dim, rotary_dim, layout, dtype):
    x = case((2, 3, 10, dim), dtype)
    check(x, POSITIONS, layout=layout, rotary_dim=rotary_dim)
    check(x, POSITIONS, layout=layout, rotary_dim=rotary_dim, base=500000.0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_beyond_float32_integers(layout):
    check(
        case((1, 1, 3, 32), torch.float32),
        torch.tensor([2**24 + 1, 2**31 + 129, -(2**26) - 5]),
        layout=layout,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_rows_than_one_tile_and_positions_per_batch(dtype):
    rows = 2 * TILE + 1
    x = case((2, 2, rows, 12), dtype)
    positions = torch.stack([torch.arange(rows), 700 - 3 * torch.arange(rows)])
    got = check(x, positions)
    for batch in range(2):
        assert torch.equal(got[batch : batch + 1], rope(x[batch : batch + 1], positions[batch]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("step", "sign", "options"),
    [
        (0, 1, {"layout": "interleaved"}),
        (0, 1, {"base": 10050.0}),
        (0, 1, {"rotary_dim": 32}),
        (0, -1, {}),
        (1, 1, {}),
    ],
    ids=["layout", "base", "rotary_dim", "sign", "position"],
)
def test_the_bound_above_tells_right_from_wrong(step, sign, options, dtype):
    x, positions = case((1, 1, 10, 64), dtype), POSITIONS.clamp(max=10**5)
    out, bound = reference(x, sign * positions + step, **options)
    assert not (np.abs(rope(x, positions).double().numpy() - out) <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_does_not_turn_keeps_its_bits(layout, dtype):
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    x = case((1, 2, 70, 24), dtype)
    tail = torch.randint(torch.iinfo(integer).min, torch.iinfo(integer).max, (1, 2, 70, 14), dtype=integer)
    x[..., 10:] = tail.view(dtype)  # every pattern: NaN with payloads, infinities, subnormals
    got = rope(x, torch.arange(70), layout=layout, rotary_dim=10)
    assert torch.equal(got.view(integer)[..., 10:], tail)
    at_zero = rope(x, torch.zeros(70, dtype=torch.int64), layout=layout, rotary_dim=10)
    assert torch.equal(at_zero[..., :10], x[..., :10])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts_are_permutations_of_each_other(dtype):
    x = case((1, 2, 10, 48), dtype)
    first, second = columns(32, "interleaved")
    order = torch.from_numpy(np.concatenate([first, second, np.arange(32, 48)]))
    permuted = rope(x[..., order], POSITIONS, layout="half", rotary_dim=32)
    assert torch.equal(permuted, rope(x, POSITIONS, layout="interleaved", rotary_dim=32)[..., order])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layout_in_memory_does_not_matter(dtype):
    x = case((2, 3, 10, 20), dtype)
    expected = rope(x, POSITIONS, rotary_dim=12)
    inside = torch.nn.functional.pad(x, (3, 2, 5, 4), value=torch.nan)[:, :, 5:-4, 3:-2]
    variants = [x.transpose(1, 2).contiguous().transpose(1, 2), x.mT.contiguous().mT, inside]
    for variant in variants:
        copy = variant.clone()
        assert not variant.is_contiguous()
        assert torch.equal(rope(variant, POSITIONS, rotary_dim=12), expected)
        assert torch.equal(variant, copy)
    every_second = torch.stack([POSITIONS, POSITIONS + 1], dim=-1)[..., 0]
    assert torch.equal(rope(x, every_second, rotary_dim=12), expected)
    shared = x[:1, :1].expand(2, 3, 10, 20)
    assert torch.equal(rope(shared, POSITIONS), rope(shared.contiguous(), POSITIONS))


def test_frequencies_are_the_nearest_float32():
    for dim in (2, 6, 20, 64, 128, 256):
        for base in (10000.0, 500000.0, 1e6):
            got = frequencies(dim, base)
            exact = [math.exp(-2 * i / dim * math.log(base)) for i in range(dim // 2)]
            error = (got.double() - torch.tensor(exact, dtype=torch.float64)).abs()
            assert (error <= (U + 2.0**-48) * torch.tensor(exact)).all() and got[0] == 1.0


def test_empty_and_wrong_arguments():
    x, positions = case((1, 2, 5, 8), torch.float32), torch.arange(5)
    assert rope(x[:, :, :0], positions[:0]).shape == (1, 2, 0, 8)
    wrong = [
        (TypeError, "fp32", (x.double(), positions), {}),
        (TypeError, "int64", (x, positions.int()), {}),
        (ValueError, r"\[B, H, S, D\]", (x[0], positions), {}),
        (ValueError, r"\[S\]", (x, positions[:4]), {}),
        (ValueError, r"\[S\]", (x, positions.expand(2, 5)), {}),
        (ValueError, "'half' or 'interleaved'", (x, positions), {"layout": "neox"}),
        (ValueError, "even", (x, positions), {"rotary_dim": 3}),
        (ValueError, "even", (x, positions), {"rotary_dim": 10}),
        (ValueError, "even", (x, positions), {"rotary_dim": 0}),
        (ValueError, "even", (x[..., :7], positions), {}),
    ]
    for error, message, tensors, options in wrong:
        with pytest.raises(error, match=message):
            rope(*tensors, **options)


def test_declares_its_contract():
    claims = rope.__attn_oracle__
    assert claims["op"] == "rope" and claims["contract"] == "fp32_angle"
    assert claims["dtypes"] == tuple(DTYPES.values())
