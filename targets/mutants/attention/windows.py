"""Sliding windows: their two ends, decoding, and rows behind them."""

import torch
from torch import Tensor

from targets.honest import flash_options
from targets.honest.flash import Steps, kernel
from targets.mutants.attention.inputs import ONE, TWO_KEYS, ZERO, one_head
from targets.mutants.mutant import mutant


def wider(rows: int, keys: int, left: int, right: int) -> Tensor:
    return flash_options.window(rows, keys, left + 1 if left >= 0 else left, right)


window_one_key_too_far = mutant(
    "attention",
    "P4",
    "The window reaches one key further to the left than asked for.",
    smallest=one_head([[0.0], [0.0]], *TWO_KEYS, window_size=(0, 0)),
)(kernel(Steps(window=wider)))


def shorter(rows: int, keys: int, left: int, right: int) -> Tensor:
    return flash_options.window(rows, keys, left - 1 if rows == 1 and left > 0 else left, right)


window_one_key_short_in_decode = mutant(
    "attention",
    "P4",
    "With a single query the window misses the key at its left end: the cache's length is taken for the position.",
    smallest=one_head(ZERO, *TWO_KEYS, window_size=(1, 0)),
)(kernel(Steps(window=shorter)))


def unbounded(rows: int, keys: int, left: int, right: int) -> Tensor:
    return flash_options.window(rows, keys, left, -1)


window_without_right_end = mutant(
    "attention",
    "P4",
    "The window's right bound is dropped.",
    smallest=one_head([[0.0], [0.0]], *TWO_KEYS, window_size=(1, 0)),
)(kernel(Steps(window=unbounded)))


def everything(rows: int, keys: int, left: int, right: int) -> Tensor:
    return torch.ones(rows, keys, dtype=torch.bool)


window_ignored = mutant(
    "attention",
    "P17",
    "A window changes nothing.",
    smallest=one_head([[0.0], [0.0]], *TWO_KEYS, window_size=(0, 0)),
)(kernel(Steps(window=everything)))


def prefill_only(rows: int, keys: int, left: int, right: int) -> Tensor:
    if rows == 1:
        return torch.ones(rows, keys, dtype=torch.bool)
    return flash_options.window(rows, keys, left, right)


window_ignored_in_decode = mutant(
    "attention",
    "P18",
    "The kernel for a single query knows no window.",
    smallest=one_head(ZERO, *TWO_KEYS, window_size=(0, 0)),
)(kernel(Steps(window=prefill_only)))


def never_empty(rows: int, keys: int, left: int, right: int) -> Tensor:
    seen = flash_options.window(rows, keys, left, right)
    return seen | ~seen.any(-1, keepdim=True)


window_empty_row_sees_all = mutant(
    "attention",
    "P3",
    "Where the window lies past all keys the row attends to all of them: its first tile is never skipped.",
    smallest=one_head([[0.0], [0.0]], ZERO, ONE, window_size=(0, 0)),
)(kernel(Steps(window=never_empty)))
