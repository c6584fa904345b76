"""Eager attention, dense, variable-length and paged, against float64 written out apart from it."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from meta_tests.kernels.dense_reference import attention as reference
from targets.builtin import eager, eager_layouts

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window_size": (7, 2)},
    "softcap": {"softcap": 0.7},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "sinks": {"sinks": torch.tensor([-1.0, 0.5, 3.0, -20.0])},
    "together": {
        "is_causal": True, "window_size": (9, -1), "softcap": 1.5, "scale": 0.4,
        "alibi_slopes": torch.tensor([[0.5, 0.25, 0.125, 0.0625], [1.0, 0.0, 0.5, 0.25]]),
        "sinks": torch.tensor([-1.0, 0.5, 3.0, -20.0]),
    },
}  # fmt: skip
MASKS = {
    "boolean": torch.rand(2, 1, 19, 26, generator=torch.Generator().manual_seed(1)) < 0.7,
    "added": torch.randn(19, 26, generator=torch.Generator().manual_seed(2)),
}
MASKS["added"].fill_diagonal_(-math.inf)


def case(dtype, queries=19, keys=26):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 12))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def holds(function, tensors, *, stores, **options):
    out, lse = function(*tensors, return_lse=True, **options)
    exact = reference(*tensors, stores=stores, **options)
    infinite = np.isneginf(exact.lse)
    assert out.dtype == tensors[0].dtype and (lse.numpy()[infinite] == -np.inf).all()
    error = np.abs(lse.double().numpy()[~infinite] - exact.lse[~infinite])
    near = np.abs(out.double().numpy() - exact.out) <= exact.out_bound(stored=stores > 0)
    return bool(near.all() and (error <= exact.lse_bound()[~infinite]).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*OPTIONS, *MASKS])
def test_matches_float64(name, dtype):
    options = {"attn_mask": MASKS[name]} if name in MASKS else OPTIONS[name]
    tensors = case(dtype)
    # Raw, scaled, divided, tanh, multiplied, biased: each one rounding to the inputs' dtype.
    assert holds(eager.attention, tensors, stores=6, **options)
    if dtype != torch.float64:
        assert holds(eager.attention_fp32, tensors, stores=0, **options)


@pytest.mark.parametrize("name", [*OPTIONS, *MASKS])
def test_the_bounds_tell_right_from_wrong(name):
    options = {"attn_mask": MASKS[name]} if name in MASKS else OPTIONS[name]
    tensors = case(torch.float32)
    for wrong in ({"scale": 0.6}, {"window_size": (6, 2)}, {"top_left": True, "is_causal": True}):
        exact = reference(*tensors, stores=6, **(options | wrong))
        out = eager.attention(*tensors, **options).double().numpy()
        assert not (np.abs(out - exact.out) <= exact.out_bound()).all()


@pytest.mark.parametrize("function", [eager.attention, eager.attention_fp32])
def test_empty_rows_and_gradients(function):
    q, k, v = case(torch.float32, queries=30)
    for sinks in (None, torch.tensor([-1.0, 0.5, 3.0, -20.0])):
        out, lse = function(q.requires_grad_(), k, v, is_causal=True, sinks=sinks, return_lse=True)
        assert not out[:, :, :4].any()
        assert (lse[:, :, 0] == (-math.inf if sinks is None else sinks)).all()
        out.sum().backward()
        assert q.grad.isfinite().all() and q.grad[:, :, 5:].any()


def dense_parts(options, sequences, queries, keys):
    """Each sequence as a dense call of the reference's."""
    for n in range(sequences):
        slopes = options.get("alibi_slopes")
        own = {} if slopes is None else {"alibi_slopes": slopes if slopes.ndim == 1 else slopes[n : n + 1]}
        yield n, queries[n], keys[n], options | own


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_varlen_is_each_sequence_alone(name, dtype):
    check_varlen(eager_layouts.attention_varlen, OPTIONS[name], dtype, stores=6)


def check_varlen(function, options, dtype, *, stores, queries=(7, 5), keys=(11, 2)):
    options = {k: v[:, :4] if k == "alibi_slopes" and v.ndim == 2 else v for k, v in options.items()}
    q, k, v = case(dtype, queries=sum(queries), keys=sum(keys))
    q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))  # [total, H, D], not contiguous
    starts = [torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32) for lengths in (queries, keys)]
    out, lse = function(q, k, v, *starts, **options, return_lse=True)
    assert out.shape == (sum(queries), 4, 12) and lse.shape == (4, sum(queries))
    places = [list(pairwise(s.tolist())) for s in starts]
    for _, rows, cols, own in dense_parts(options, len(queries), *places):
        one = [t[slice(*place)].transpose(0, 1)[None] for t, place in ((q, rows), (k, cols), (v, cols))]
        exact = reference(*one, **own, stores=stores)
        part = out[slice(*rows)].transpose(0, 1)[None].double().numpy()
        assert (np.abs(part - exact.out) <= exact.out_bound()).all()
        log = lse[:, slice(*rows)][None].double().numpy()
        infinite = np.isneginf(exact.lse)
        assert (log[infinite] == -np.inf).all()
        assert (np.abs(log[~infinite] - exact.lse[~infinite]) <= exact.lse_bound()[~infinite]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_paged_is_each_sequence_alone(name, dtype):
    check_paged(eager_layouts.attention_paged, OPTIONS[name], dtype, stores=6)


def check_paged(function, options, dtype, *, stores, queries=3, lengths=(11, 2), page_size=4):
    """Pages lie in no order, what nobody may read is NaN, and the first sequence's table is longer than needed."""
    generator = torch.Generator().manual_seed(3)
    kv = [torch.randn(2, max(lengths), 2, d, generator=generator, dtype=torch.float64).to(dtype) for d in (8, 12)]
    q = torch.randn(2, 4, queries, 8, generator=generator, dtype=torch.float64).to(dtype)
    order = torch.randperm(9, generator=generator).tolist()
    width = -(-max(lengths) // page_size) + 1
    table = torch.full((2, width), -7, dtype=torch.int32)
    caches = [torch.full((9, page_size, 2, t.shape[-1]), math.nan, dtype=dtype) for t in kv]
    for n, length in enumerate(lengths):
        for j in range(length):
            if j % page_size == 0:
                table[n, j // page_size] = order.pop()
            for cache, t in zip(caches, kv, strict=True):
                cache[table[n, j // page_size], j % page_size] = t[n, j]
    out, lse = function(q, *caches, table, torch.tensor(lengths, dtype=torch.int32), **options, return_lse=True)
    assert out.shape == (2, 4, queries, 12) and lse.shape == (2, 4, queries)
    for n, length, _, own in dense_parts(options, 2, lengths, lengths):
        one = [q[n : n + 1], *(t[n : n + 1, :length].transpose(1, 2) for t in kv)]
        exact = reference(*one, **own, stores=stores)
        part = out[n : n + 1].double().numpy()
        assert (np.abs(part - exact.out) <= exact.out_bound()).all()
        infinite = np.isneginf(exact.lse)
        log = lse[n : n + 1].double().numpy()
        assert (log[infinite] == -np.inf).all()
        assert (np.abs(log[~infinite] - exact.lse[~infinite]) <= exact.lse_bound()[~infinite]).all()


@pytest.mark.parametrize("check", [check_varlen, check_paged])
def test_the_checks_of_layouts_can_fail(check):
    def shifted(q, *rest, is_causal, **options):
        function = eager_layouts.attention_varlen if check is check_varlen else eager_layouts.attention_paged
        return function(q, *rest, window_size=(-1, 1), **options)

    function = eager_layouts.attention_varlen if check is check_varlen else eager_layouts.attention_paged
    check(function, OPTIONS["causal"], torch.bfloat16, stores=6)
    with pytest.raises(AssertionError):
        check(shifted, OPTIONS["causal"], torch.bfloat16, stores=6)
