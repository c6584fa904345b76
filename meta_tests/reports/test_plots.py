"""Figures show the worst case of each place, mark what failed, and lose no value that their axes cannot hold."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from meta_tests.reports.synthetic import PASSED, sweeps
from properties.record import Record
from reports.content.plots import ATTENTION, FIGURES, as_table, first_overflow, plot, points
from reports.page import svg
from reports.page.document import Panel, Plot, Point, Series
from reports.run.load import Run

FIGURE = {row.id: row for row in FIGURES}


def run_of(*records: Record) -> Run:
    return Run(Path("out"), records)


@pytest.fixture(scope="module")
def swept() -> Run:
    return run_of(*sweeps())


@pytest.mark.parametrize("row", FIGURES, ids=lambda row: row.id)
def test_every_figure_can_be_drawn_and_has_its_numbers(row: object, swept: Run) -> None:
    made = plot(swept, row)  # type: ignore[arg-type]
    assert made is not None
    assert {s.name for p in made.panels for s in p.series} == {"kernel", "other"}
    assert [p.title for p in made.panels] == ["fp32", "bf16"]
    for panel in made.panels:
        drawn = svg.panel(made, panel)
        assert drawn.count("<title>") == sum(len(s.points) + len(s.loose) for s in panel.series)
        assert "nan" not in drawn
        assert "inf" not in drawn
    assert len(as_table(made).rows) == 3


@pytest.mark.parametrize("row", FIGURES, ids=lambda row: row.id)
def test_a_figure_without_records_is_left_out(row: object) -> None:
    assert plot(run_of(PASSED), row) is None  # type: ignore[arg-type]


def test_a_point_is_the_worst_of_its_place() -> None:
    here = [
        replace(PASSED, ratio=r, verdict=v, features={"x": 2.0})
        for r, v in ((0.5, "PASS"), (3.0, "FAIL"), (None, "EXEMPT"))
    ]
    there = replace(PASSED, ratio=0.1, features={"x": 1.0})
    skipped = replace(PASSED, ratio=9.0, verdict="UNSUPPORTED", features={"x": 3.0})
    found = points([*here, there, skipped], lambda r: r.features["x"], lambda r: r.ratio)
    assert found == (Point(1.0, 0.1, "PASS", 1), Point(2.0, 3.0, "FAIL", 3))


def test_a_call_that_failed_without_a_figure_still_has_a_mark() -> None:
    crashed = replace(PASSED, ratio=None, verdict="ERROR", features={"x": 2.0})
    assert points([crashed], lambda r: 2.0, lambda r: r.ratio) == (Point(2.0, None, "ERROR", 1),)


def figure_of(*marks: Point, scale: str = "log", reference: tuple[float, str] | None = (1.0, "the bound")) -> Plot:
    panel = Panel("bf16", (Series("kernel", marks),))
    return Plot("f", "t", "n", "x", "y", (panel,), ("kernel",), scale, (1e-4, 1e4), reference)  # type: ignore[arg-type]


def places(drawn: str) -> list[tuple[float, float]]:
    return [(float(a), float(b)) for a, b in re.findall(r"translate\(([-0-9.]+) ([-0-9.]+)\)", drawn)]


def test_larger_values_stand_higher_and_further_right() -> None:
    made = figure_of(Point(1, 0.01, "PASS"), Point(10, 0.1, "PASS"), Point(100, 0.5, "PASS"))
    marks = places(svg.panel(made, made.panels[0]))
    assert [m[0] for m in marks] == sorted({m[0] for m in marks})
    assert [m[1] for m in marks] == sorted({m[1] for m in marks}, reverse=True)


def test_zero_infinity_and_what_lies_beyond_stand_in_strips_of_their_own() -> None:
    values = (0.0, 1e-9, 1e-4, 0.5, 1e4, 1e9, math.inf)
    made = figure_of(*(Point(10.0**i, v, "PASS") for i, v in enumerate(values)))
    drawn = svg.panel(made, made.panels[0])
    down = [y for _, y in places(drawn)]
    assert down[0] == down[1] == svg.HEIGHT - svg.BOTTOM - svg.BAND / 2
    assert down[5] == down[6] == svg.TOP + svg.BAND / 2
    assert down[0] - svg.BAND / 2 >= down[2] > down[3] > down[4] >= down[5] + svg.BAND / 2
    assert "more, ∞" in drawn
    assert "less, 0" in drawn
    inside = figure_of(Point(1, 0.5, "PASS"))
    assert "more, ∞" not in svg.panel(inside, inside.panels[0])


def test_position_zero_stands_left_of_a_logarithmic_axis() -> None:
    made = figure_of(Point(0, 0.5, "PASS"), Point(1, 0.5, "PASS"))
    left, right = places(svg.panel(made, made.panels[0]))
    assert left[0] == svg.LEFT + svg.BAND / 2
    assert right[0] >= svg.LEFT + svg.BAND


def test_shares_near_zero_and_one_are_spread() -> None:
    made = figure_of(*(Point(m, 0.5, "PASS") for m in (0.0, 0.1, 0.5, 0.9, 1.0)), scale="share")
    across = [x for x, _ in places(svg.panel(made, made.panels[0]))]
    assert across == sorted(set(across))
    assert across[2] - across[1] == pytest.approx(across[3] - across[2], abs=0.2)


def test_the_bound_is_drawn_even_where_all_values_are_far_below() -> None:
    made = figure_of(Point(1, 1e-3, "PASS"))
    drawn = svg.panel(made, made.panels[0])
    assert 'class="bound"' in drawn
    assert ">the bound<" in drawn
    plain = figure_of(Point(1, 1e-3, "PASS"), reference=None)
    assert 'class="bound"' not in svg.panel(plain, plain.panels[0])


@pytest.mark.parametrize(
    ("verdict", "mark"),
    [
        ("FAIL", 'class="cross"'),
        ("ERROR", 'class="cross"'),
        ("WAIVED", "cross waived"),
        ("EXEMPT", "c0 hollow"),
        ("VACUOUS", "c0 pale"),
        ("UNDECIDED", "c0 unsure"),
    ],
)
def test_verdicts_other_than_pass_have_their_own_mark_and_a_key(verdict: str, mark: str) -> None:
    for shown, expected in ((verdict, True), ("PASS", False)):
        made = figure_of(Point(1, 0.5, shown))
        assert (mark in svg.panel(made, made.panels[0])) is expected
        assert bool(list(svg.key([shown]))) is expected


def test_one_value_and_no_value_make_a_figure() -> None:
    for marks in ((Point(5, 2.0, "PASS"),), (Point(5, None, "ERROR"),), (Point(0, 0.0, "PASS"),)):
        made = figure_of(*marks, reference=None)
        assert len(places(svg.panel(made, made.panels[0]))) == 1


def test_a_target_has_one_colour_and_shape_in_all_figures(swept: Run) -> None:
    # The figure of one target only, from a run with two.
    alone = run_of(*(r for r in swept.records if r.target == "other" or r.features.get("sweep") == "sink"))
    looks = set()
    for name in ("context", "sink"):
        made = plot(alone, FIGURE[name])
        assert made is not None
        looks |= {index for index, shown in made.shown if shown == "other"}
    assert len(looks) == 1


def test_many_targets_all_look_different() -> None:
    looks = {(svg.swatch(i).replace("\n", "")) for i in range(60)}
    assert len(looks) == 60


def test_first_overflow_names_the_smallest_size_of_each_kind() -> None:
    def at(size: float, verdict: str, **more: object) -> Record:
        return replace(PASSED, verdict=verdict, features={"sweep": "logits", "logit_size": size}, **more)

    run = run_of(
        at(1.0, "PASS"), at(-300.0, "EXEMPT"), at(88.0, "PASS", metrics={"exempt": 2}),
        at(1e3, "FAIL", ratio=2.0), at(1e4, "FAIL", ratio=math.inf),
    )  # fmt: skip
    table = first_overflow(run, ATTENTION)
    assert table is not None
    assert table.rows == (("kernel", "bf16", "88", "10,000", "1,000"),)
    calm = first_overflow(run_of(at(1.0, "PASS"), at(1e6, "PASS")), ATTENTION)
    assert calm is not None
    assert set(calm.rows[0][2:]) == {"none to 10⁶"}


def test_a_ratio_that_is_no_number_is_no_figure() -> None:
    strange = replace(PASSED, ratio=math.nan, features={"sweep": "context", "sk": 64})
    assert plot(run_of(strange), FIGURE["context-bound"]) is None
