"""Both pages hold what they must, are well formed, and need nothing else."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from meta_tests.reports.pages import _ALLOWED, FULL, Page, pages
from meta_tests.reports.synthetic import FAILED, PASSED, write
from properties.judge.verdict import Verdict
from reports.page import render_html, render_markdown
from reports.page.document import Code, Command, Section, Table

UNTESTED = {"target": "absent", "op": "", "dtype": "", "property": "", "reason": "needs the module triton"}


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return pages(write(tmp_path_factory.mktemp("full"), FULL, notes=[("untested", UNTESTED)]))


def test_the_page_is_well_formed(full: tuple[str, str]) -> None:
    page = Page(full[1])
    assert page.faults == []
    assert set(page.tags) <= _ALLOWED, set(page.tags) - _ALLOWED


def test_the_check_of_form_can_fail() -> None:
    assert Page("<p><b>x</p></b>").faults
    assert Page("<p>").faults
    assert Page('<p id="a" id="b"></p>').faults
    assert not Page("<p>x<br/></p>").faults


def test_the_page_needs_nothing_else(full: tuple[str, str]) -> None:
    page = Page(full[1])
    assert page.values("src") == []
    assert all(h.startswith(("#", "https://arxiv.org/")) for h in page.values("href"))
    assert not [key for _, key, _ in page.attributes if key.startswith("on")]
    assert "@import" not in full[1]
    assert "url(" not in full[1]
    assert any("default-src 'none'" in value for value in page.values("content"))


def test_links_within_the_page_lead_somewhere(full: tuple[str, str]) -> None:
    page = Page(full[1])
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    inner = {h[1:] for h in page.values("href") if h.startswith("#")}
    assert inner
    assert inner <= set(ids)
    anchors = set(re.findall(r'<a id="([^"]+)"></a>', full[0]))
    assert set(re.findall(r"\]\(#([^)]+)\)", full[0])) <= anchors


def test_every_finding_stands_in_both_pages_with_its_command(full: tuple[str, str]) -> None:
    text = Page(full[1]).text
    bad = [r for r in FULL if r.verdict in ("FAIL", "ERROR")]
    assert bad
    for record in bad:
        assert record.rerun in text
        assert record.rerun in full[0]
        assert record.detail in text
    for fact in ("0.75 (0x1.8p-1)", "0.5 (0x1.0p-1)", "out[0, 0, 3, 5]", FAILED.description, str(FAILED.stem)):
        assert fact in text
        assert fact in full[0]


def test_findings_come_before_figures_and_sheets(full: tuple[str, str]) -> None:
    order = [
        full[1].index(f'<section id="{name}"')
        for name in ("summary", "findings", "figures", "targets", "untested", "method")
    ]
    assert order == sorted(order)


def test_the_sheet_of_a_target_says_what_it_must(full: tuple[str, str]) -> None:
    text = Page(full[1]).text
    for fact in (
        "top_left",
        "held to contract",
        "0.97",
        "ULP p99.9",
        "log2(e)",
        "the target has no return_lse",
        "needs the module triton",
    ):
        assert fact in text, fact


@pytest.mark.parametrize(
    ("same", "stated", "expected"),
    [
        ((1.0, 1.0), {}, "on every input tried"),
        ((1.0, 0.0), {}, "no (fp32)"),
        ((), {}, None),
        ((1.0,), {"batch_invariant": "yes"}, None),
    ],
)
def test_the_datasheet_says_whether_a_batch_matters(
    tmp_path: Path, same: tuple[float, ...], stated: dict[str, str], expected: str | None
) -> None:
    sheet = {"conventions": stated}
    rows = [
        replace(PASSED, property="P11", dtype=dtype, metrics={"batch_invariant": value}, datasheet=sheet)
        for dtype, value in zip(("bf16", "fp32"), same, strict=False)
    ]
    text = Page(pages(write(tmp_path, [PASSED, *rows]))[1]).text
    assert ("same bits in any batch" in text) is (expected is not None)
    assert expected is None or expected in text


def test_every_verdict_is_explained(full: tuple[str, str]) -> None:
    legend = full[0][full[0].index("What the verdicts mean") :]
    for verdict in Verdict:
        assert re.search(rf"^\| (\*\*)?{verdict.value.replace('_', '.?_')}(\*\*)? \|", legend, re.MULTILINE), verdict


def test_nothing_is_headlined_that_hides_faults(full: tuple[str, str]) -> None:
    for page in full:
        assert not re.search(r"cosine|allclose|within atol", page, re.IGNORECASE)


def test_pages_are_the_same_each_time(tmp_path: Path, full: tuple[str, str]) -> None:
    again = write(tmp_path / "again", FULL, notes=[("untested", UNTESTED)])
    first = pages(again)
    assert pages(again) == first


def test_tables_in_markdown_have_as_many_cells_in_each_row(full: tuple[str, str]) -> None:
    for table in re.findall(r"(?:^\|.*\|\n?)+", full[0], re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.strip().splitlines()}
        assert len(widths) == 1, table


def test_both_pages_hold_the_same_blocks() -> None:
    section = Section(
        "s", "Title", (Table(("a|b", "c"), ((Code("x|y"), "z|w"),), caption="cap"), Command("run `this`"))
    )
    markdown = render_markdown.page("t", (section,))
    text = Page(render_html.page("t", "b", (section,))).text
    for piece in ("Title", "cap", "run `this`"):
        assert piece in markdown
        assert piece in text
    assert "a\\|b" in markdown
    assert "`x\\|y`" in markdown
    assert "z\\|w" in markdown
    assert "a|b" in text
