"""The table of options: command line, plugin and rerun commands say the same, because they are derived from it."""

import argparse

import pytest

from properties import options
from properties.options import OPTIONS, Option, add_to, forwarded, rerun_words
from reports.command.options import parsed


def given(*words: str) -> dict[str, object]:
    return vars(parsed(["verify", *words]))


def in_suite(words: list[str]) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_to(parser.add_argument, suite=True)
    parser.add_argument("-x", "--exitfirst", action="store_true")
    return vars(parser.parse_args(words))


ALL = (
    *("kernel.py:f", "--target", "g", "--op", "rope", "--dtype", "bf16", "--dtype", "fp32", "--device", "cuda:1"),
    *("--contract", "flash", "--convention", "lse_base=2", "--profile", "quick", "--seed", "7", "--property", "P1"),
    *("--case", "x.json", "--timeout", "0.5", "--out", "there", "--only", "f-bf16-P1", "-x"),
)


def test_what_the_command_is_told_reaches_the_suite() -> None:
    for words in ((), ALL):
        values = given(*words)
        assert in_suite(forwarded(values)) == {row.dest: values[row.dest] for row in OPTIONS if row.suite is not None}
    assert in_suite([])["seed"] == 0
    assert len(forwarded(given())) == 0


def test_a_rerun_command_repeats_what_decides_a_judgement_and_nothing_else() -> None:
    stated = ["--op", "rope", "--contract", "flash", "--convention", "lse_base=2", "--timeout", "0.5"]
    assert list(rerun_words(given(*ALL))) == stated
    assert rerun_words(given()) == ()


def test_no_two_rows_share_a_name() -> None:
    assert len({row.dest for row in OPTIONS}) == len(OPTIONS)
    assert all(row.help for row in OPTIONS)


def test_a_new_row_is_all_that_a_new_option_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (
        Option("--quietly", "say less", switch=True),
        Option("--share", "of it", type=float, metavar="X", rerun=True),
    )
    monkeypatch.setattr(options, "OPTIONS", (*OPTIONS, *rows))
    values = given("--quietly", "--share", "0.25")
    assert forwarded(values) == ["--quietly", "--share=0.25"]
    assert rerun_words(values) == ("--share", "0.25")
    assert in_suite(forwarded(values))["quietly"] is True
