"""Where an output is wrong, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from meta_tests.properties.diagnosis.cases import (
    attention_case,
    attention_with,
    broken,
)
from properties.diagnosis.counterfactual import FailingCase, failing_case
from properties.diagnosis.where import pattern, where_wrong


def failing_with(change: Callable[..., tuple[Tensor, Tensor]], *, dtype: str = "bf16", **shape: Any) -> FailingCase:
    subject = broken(attention_with(change), "attention", dtype)
    case = attention_case(subject, **shape)
    return failing_case(subject, case, subject.call(case).outputs)


def with_values(where: Any, value: float) -> Callable[..., tuple[Tensor, Tensor]]:
    def change(out: Tensor, lse: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        out = out.clone()
        out[where] = value
        return out, lse

    return change


@pytest.mark.parametrize(
    ("where", "value", "text"),
    [
        ((0, 1), 9.0, "wrong only in the output, not the LSE, head 1"),
        ((0, slice(None), -1), 9.0, "wrong only in the output, not the LSE, the last row"),
        ((0, 0, slice(3, None)), 9.0, "wrong only in the output, not the LSE, head 0, rows >= 3"),
        ((..., slice(8, None)), 9.0, "wrong only in the output, not the LSE, columns >= 8"),
        ((..., slice(0, None, 4)), 9.0, "wrong only in the output, not the LSE, columns 0 modulo 4"),
        (
            (0, slice(None), 1),
            float("nan"),
            "wrong only in the output, not the LSE, row 1; inf or NaN wherever it is wrong",
        ),
    ],
)
def test_the_place_is_told(where: Any, value: float, text: str) -> None:
    assert where_wrong(failing_with(with_values(where, value), sq=6)) == text


def test_an_output_that_is_wrong_everywhere_is_called_so() -> None:
    assert where_wrong(failing_with(lambda out, lse, q: (out + 9, lse + 9))) == "wrong everywhere"


@pytest.mark.parametrize(
    ("wrong", "every", "text"),
    [
        ([], 8, ""),
        (list(range(8)), 8, ""),
        ([7], 8, "the last row"),
        ([0], 8, "the first row"),
        ([3], 8, "row 3"),
        ([1], 2, "row 1"),
        ([4, 5, 7], 8, "rows >= 4"),
        ([2, 3, 4], 8, "rows 2 .. 4"),
        ([0, 1, 2, 3], 8, "rows <= 3"),
        ([1, 3, 5, 7], 8, "rows 1 modulo 2"),
        ([0, 9], 16, "rows 0, 9"),
        ([0, 5, 6, 11, 15], 16, ""),
    ],
)
def test_patterns_of_indices(wrong: list[int], every: int, text: str) -> None:
    assert pattern(wrong, list(range(every)), "row", "rows") == text
