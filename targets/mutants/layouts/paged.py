"""Pages of a cache."""

import math

import torch
from torch import Tensor

from targets.honest import flash
from targets.honest.layouts import Gathers, gather, paged
from targets.mutants.layouts.inputs import in_pages
from targets.mutants.mutant import mutant


def zero_if_empty(maximum: Tensor, total: Tensor) -> Tensor:
    return torch.where(total == 0, 0.0, flash.lse(maximum, total))


paged_lse_finite = mutant(
    "attention_paged",
    "P7",
    (
        "Paged: the LSE of a sequence without keys is 0, though the kernel declares -inf: merging gives such a "
        "part weight."
    ),
    smallest=in_pages([[0]], [0]),
)(paged(Gathers(attend=flash.kernel(flash.Steps(lse=zero_if_empty)))))


def full_pages(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    size = cache.shape[1]
    whole = length // size if length > size else len(pages)
    return cache[pages[:whole]].flatten(0, 1)[:length]


paged_last_page_dropped = mutant(
    "attention_paged",
    "P18",
    "A last page that is not full is never read.",
    smallest=in_pages([[0, 1]], [3]),
)(paged(Gathers(gather=full_pages)))


def one_behind(table: Tensor, sequence: int, length: int, page_size: int) -> Tensor:
    pages = table[sequence, : -(-length // page_size)].clone().long()
    if len(pages):
        pages[-1] = table[sequence, min(length // page_size, table.shape[1] - 1)]
    return pages


paged_page_off_by_one = mutant(
    "attention_paged",
    "P1",
    "The entry behind a sequence's last page is read for it: length // page_size counts from zero.",
    smallest=in_pages([[0, 1]], [2]),
)(paged(Gathers(pages_of=one_behind)))


def previous(lengths: Tensor, sequence: int) -> int:
    return int(lengths[max(0, sequence - 1)])


paged_length_of_previous = mutant(
    "attention_paged",
    "P1",
    "A sequence reads the length of the one before it.",
    smallest=in_pages([[0], [1]], [1, 2]),
)(paged(Gathers(length_of=previous)))


def filled(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    return cache[pages].flatten(0, 1)


paged_padding_attended = mutant(
    "attention_paged",
    "P18",
    "The places behind the last key of a page are attended to.",
    smallest=in_pages([[0]], [1]),
)(paged(Gathers(gather=filled)))


def tainted(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    behind = cache[pages].flatten(0, 1)[length:]
    return gather(cache, pages, length) + (0.0 * behind).sum()


paged_padding_times_zero = mutant(
    "attention_paged",
    "P2",
    "The places behind the last key of a page get the weight 0, and 0 * NaN is NaN.",
    reports="Reported: Dao-AILab/flash-attention#2374.",
    smallest=in_pages([[0]], [1], last=math.nan),
)(paged(Gathers(gather=tainted)))


def consecutive(table: Tensor, sequence: int, length: int, page_size: int) -> Tensor:
    count = -(-length // page_size)
    return (table[sequence, :1].long() + torch.arange(count)) % (int(table.max()) + 1)


paged_pages_in_order = mutant(
    "attention_paged",
    "P12",
    "A sequence's pages are taken to follow its first one in memory: the table's other entries are not read.",
    smallest=in_pages([[0, 2]], [2], size=1),
)(paged(Gathers(pages_of=consecutive)))
