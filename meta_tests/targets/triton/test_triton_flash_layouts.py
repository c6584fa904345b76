"""Variable-length and paged layouts of the Triton attention kernel, interpreted, against float64 and the dense one."""

import pytest
import torch

from meta_tests.targets.test_eager import OPTIONS, case, check_paged, check_varlen
from targets.builtin.triton.flash import attention
from targets.builtin.triton.flash_layouts import attention_paged, attention_varlen

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_varlen_matches_float64(name, dtype):
    check_varlen(attention_varlen, OPTIONS[name], dtype, stores=0, queries=(70, 1), keys=(90, 33))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_paged_matches_float64(name, dtype):
    check_paged(attention_paged, OPTIONS[name], dtype, stores=0, queries=5, lengths=(75, 3), page_size=12)


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "window_size": (30, 0)}])
def test_layouts_have_the_bits_of_the_dense_kernel(options):
    q, k, v = case(torch.bfloat16, queries=70, keys=100)
    out, lse = attention(q[:1], k[:1], v[:1], **options, return_lse=True)
    starts = [torch.tensor([0, n, n]) for n in (70, 100)]  # a second, empty sequence
    packed = [t[0].transpose(0, 1) for t in (q, k, v)]
    other, other_lse = attention_varlen(*packed, *starts, **options, return_lse=True)
    assert torch.equal(other.transpose(0, 1), out[0]) and torch.equal(other_lse, lse[0])
    caches = [t[0].transpose(0, 1).reshape(10, 10, 2, -1) for t in (k, v)]
    table, lengths = torch.arange(10)[None], torch.tensor([100])
    paged, paged_lse = attention_paged(q[:1], *caches, table, lengths, **options, return_lse=True)
    assert torch.equal(paged, out) and torch.equal(paged_lse, lse)


def test_sequences_without_keys_or_queries():
    q, k, v = (t[0].transpose(0, 1) for t in case(torch.float32, queries=6, keys=9))
    starts_q, starts_k = torch.tensor([0, 2, 2, 6]), torch.tensor([0, 0, 4, 9])
    out, lse = attention_varlen(q, k, v, starts_q, starts_k, return_lse=True)
    assert not out[:2].any() and lse[:, :2].isneginf().all() and lse[:, 2:].isfinite().all()
    nothing = attention_varlen(q[:0], k, v, torch.tensor([0, 0]), torch.tensor([0, 9]))
    assert nothing.shape == (0, 4, 12)
    caches = [torch.zeros(1, 4, 2, d) for d in (8, 12)]
    out, lse = attention_paged(
        torch.zeros(1, 4, 3, 8), *caches, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0]), return_lse=True
    )
    assert not out.any() and lse.isneginf().all()


def test_arguments_are_checked():
    q, k, v = (t[0].transpose(0, 1) for t in case(torch.float32, queries=6, keys=9))
    good = torch.tensor([0, 6]), torch.tensor([0, 9])
    wrong = [
        ("must be", (q[None], k, v, *good)),
        ("rise", (q, k, v, torch.tensor([0, 5]), good[1])),
        ("rise", (q, k, v, torch.tensor([0, 7, 6]), good[1])),
        ("sequences", (q, k, v, torch.tensor([0, 2, 6]), good[1])),
        ("multiple", (q[:, :3], k, v, *good)),
    ]
    for message, arguments in wrong:
        with pytest.raises(ValueError, match=message):
            attention_varlen(*arguments)
    q, caches = torch.zeros(1, 4, 3, 8), [torch.zeros(2, 4, 2, d) for d in (8, 12)]
    for message, table, lengths in (
        ("max_blocks", torch.zeros(2, 1), torch.tensor([4])),
        ("need 2 pages", torch.zeros(1, 1, dtype=torch.int32), torch.tensor([5])),
        ("need 2 pages", torch.tensor([[0, 2]]), torch.tensor([5])),
    ):
        with pytest.raises(ValueError, match=message):
            attention_paged(q, *caches, table, lengths)
