"""Empty, damaged, interrupted, waived and large runs, and pages of which a part is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meta_tests.reports.pages import FULL, Page, pages
from meta_tests.reports.synthetic import ENVIRONMENT, FAILED, PASSED, append, sweeps, write
from properties.record import Record
from reports.content import sections
from reports.page import render_html
from reports.page.build import build
from reports.page.document import Panel, Paragraph, Plot, Section
from reports.run.load import UnlikeRuns


def test_an_empty_folder_gives_pages_that_say_so(tmp_path: Path) -> None:
    markdown, html = pages(tmp_path)
    assert "Nothing was checked" in markdown
    assert "Nothing was checked" in Page(html).text
    assert Page(html).faults == []


def test_damaged_lines_and_crashes_are_shown(tmp_path: Path) -> None:
    write(tmp_path, [PASSED])
    append(
        tmp_path,
        '{"kind": "record"\n'
        '{"kind": "begin", "serial": 99, "pid": 1, "target": "kernel", "op": "attention", "property": "P9"}\n',
    )
    for text in pages(tmp_path):
        assert "1 damaged record line" in text
        assert "ERROR 1" in text
        assert "died or hung" in text


def test_an_interrupted_run_says_so(tmp_path: Path) -> None:
    whole = pages(write(tmp_path / "whole", [PASSED]))
    part = pages(write(tmp_path / "part", [PASSED], notes=[("interrupted", {})]))
    for text, other in zip(part, whole, strict=True):
        assert "was interrupted" in text
        assert "was interrupted" not in other


def test_unlike_runs_give_no_page(tmp_path: Path) -> None:
    write(tmp_path, [PASSED], worker="a")
    write(tmp_path, [PASSED], worker="b", environment={**ENVIRONMENT, "commit": "0" * 40})
    with pytest.raises(UnlikeRuns):
        build(tmp_path)
    assert not (tmp_path / "report.md").exists()


@pytest.mark.parametrize(
    ("records", "notes", "said"),
    [
        ([PASSED], [], "No findings."),
        ([PASSED, FAILED], [], "Findings."),
        ([replace(PASSED, verdict="UNDECIDED")], [], "Undecided."),
        ([replace(PASSED, verdict="UNSUPPORTED")], [], "Nothing was checked."),
        ([PASSED], [("fault", {"test": "t", "detail": "ZeroDivisionError"})], "The suite itself broke."),
    ],
)
def test_the_headline_is_the_verdict_of_the_run(
    tmp_path: Path, records: list[Record], notes: list[Any], said: str
) -> None:
    markdown, html = pages(write(tmp_path, records, notes=notes))
    assert f"**{said}**" in markdown
    assert f"<strong>{said} </strong>" in html


def test_a_waived_finding_stands_with_its_reason_and_fails_nothing(tmp_path: Path) -> None:
    note = {
        "target": "kernel",
        "case": FAILED.case,
        "property": "P1",
        "key": "known",
        "reason": "fixed upstream",
        "link": "https://x.org/7",
    }
    markdown, html = pages(write(tmp_path, [PASSED, FAILED], notes=[("waiver", note)]))
    page = Page(html)
    assert "No findings." in page.text
    assert "1 finding waived" in page.text
    for text in (markdown, page.text):
        assert "known" in text
        assert "fixed upstream" in text
        assert FAILED.rerun in text
    assert "https://x.org/7" in page.values("href")


def raising(run: object) -> list[Any]:
    raise KeyError("lost")


@pytest.mark.parametrize("broken", range(len(sections.SECTIONS)))
def test_a_broken_section_spoils_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: int) -> None:
    rows = list(sections.SECTIONS)
    rows[broken] = replace(rows[broken], fill=raising)
    monkeypatch.setattr(sections, "SECTIONS", tuple(rows))
    markdown, html = pages(write(tmp_path, FULL))
    page = Page(html)
    assert page.faults == []
    assert page.text.count("KeyError") == 1
    assert markdown.count("KeyError") == 1
    assert [t for t in (r.title for r in rows) if f"<h2>{t}</h2>" not in html] == []


@pytest.mark.parametrize("name", ["sheet", "_figure"])
def test_a_broken_part_spoils_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    right: Callable[..., Any] = getattr(sections, name)
    calls = []

    def second_fails(*arguments: Any) -> Any:
        calls.append(arguments)
        return raising(None) if len(calls) == 2 else right(*arguments)

    monkeypatch.setattr(sections, name, second_fails)
    _, html = pages(write(tmp_path, FULL))
    assert len(calls) > 2
    assert Page(html).text.count("KeyError") == 1


def test_a_figure_that_cannot_be_drawn_leaves_the_rest() -> None:
    impossible = Plot("f", "t", "n", "x", "y", (Panel("p", ("no series",)),), ())  # type: ignore[arg-type]
    section = Section("s", "Title", (Paragraph("before"), impossible, Paragraph("after")))
    page = Page(render_html.page("t", "b", (section,)))
    assert "could not be drawn" in page.text
    assert "before" in page.text
    assert "after" in page.text


def test_a_large_run_stays_a_small_page(tmp_path: Path) -> None:
    records = []
    for number in range(14):
        for dtype in ("fp64", "fp32", "bf16", "fp16"):
            records += [
                replace(r, target=f"kernel_{number}", dtype=dtype)
                for r in sweeps()
                if r.target == "kernel" and r.dtype == "bf16"
            ]
            records += [
                replace(FAILED, target=f"kernel_{number}", dtype=dtype, property=f"P{i % 28}", case=f"{i:016x}")
                for i in range(60)
            ]
    markdown, html = build(write(tmp_path, records))
    assert html.stat().st_size < 3_000_000
    assert markdown.stat().st_size < 3_000_000
