"""Both pages hold what they must, are well formed, need nothing else, and stay text whatever a record says."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meta_tests.reports.synthetic import ENVIRONMENT, FAILED, PASSED, append, sweeps, write
from properties.judge.verdict import Verdict
from properties.record import Record
from reports.content import sections
from reports.page import render_html, render_markdown
from reports.page.build import build
from reports.page.document import Code, Command, Link, Panel, Paragraph, Plot, Section, Table
from reports.page.markup import tag
from reports.run.load import UnlikeRuns

HOSTILE = "<script>alert(1)</script>\"'`|*_[x](javascript:x)\n# <img src=x onerror=y> & --> ]]> \x00\ud800"
_VOID = {"meta", "br", "hr", "img", "link", "input", "line", "circle", "path", "rect", "polyline", "use"}
_ALLOWED = {
    "html", "head", "meta", "title", "style", "body", "header", "main", "nav", "section", "h1", "h2", "h3", "h4", "h5",
    "h6", "p", "a", "span", "strong", "code", "pre", "ul", "li", "dl", "dt", "dd", "div", "table", "thead", "tbody",
    "tr", "th", "td", "details", "summary", "article", "figure", "figcaption", "svg", "g", "path", "line", "rect",
    "polyline", "text",
}  # fmt: skip


class Page(HTMLParser):
    """An HTML page taken apart; `faults` says what is not well formed."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.faults: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.pieces: list[str] = []
        self.feed(source)
        self.close()
        self.faults += [f"{name} is never closed" for name in self.open]

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[name] += 1
        self.attributes += [(name, key, value or "") for key, value in attrs]
        if len({key for key, _ in attrs}) < len(attrs):
            self.faults.append(f"{name} has an attribute twice")
        if name not in _VOID:
            self.open.append(name)

    def handle_startendtag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[name] += 1
        self.attributes += [(name, key, value or "") for key, value in attrs]

    def handle_endtag(self, name: str) -> None:
        if not self.open or self.open.pop() != name:
            self.faults.append(f"{name} closes something else")

    def handle_data(self, data: str) -> None:
        self.pieces.append(data)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def values(self, key: str) -> list[str]:
        return [value for _, k, value in self.attributes if k == key]


def pages(folder: Path) -> tuple[str, str]:
    markdown, html = build(folder)
    assert (markdown.name, html.name) == ("report.md", "report.html")
    return markdown.read_text(encoding="utf-8"), html.read_text(encoding="utf-8")


def prose(markdown: str) -> str:
    """Markdown without its guards and code spans: where markup would be markup."""
    bare = re.sub(r"^(`{3,})[^`\n]*\n.*?\n\1$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(?<![`\\])(`+)(?!`).*?(?<!`)\1(?!`)", "", bare)


FULL = [
    PASSED,
    FAILED,
    replace(
        FAILED,
        dtype="fp16",
        property="P9",
        ratio=float("inf"),
        rerun="attn-oracle verify k.py:f --property P9 --case 'a b.json'",
    ),
    replace(
        FAILED,
        verdict="ERROR",
        detail="raised: ValueError: no",
        worst={},
        rerun="attn-oracle verify k.py:f --property P18",
    ),
    replace(
        PASSED, verdict="UNDECIDED", detail="undecided at 2048 bits", rerun="attn-oracle verify k.py:f --property P8"
    ),
    replace(PASSED, verdict="EXEMPT"),
    replace(PASSED, verdict="VACUOUS"),
    replace(PASSED, verdict="UNSUPPORTED", property="P7", detail="the target has no return_lse"),
    replace(PASSED, property="G3", basis="calibrated", metrics={"model_ratio_out": 0.97, "model_ratio_lse": 1.1}),
    replace(PASSED, property="contract", detail="contract flash kept in its plain form by all 9 cases"),
    *sweeps(),
]
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


# --- what records may hold ------------------------------------------------------------------------------------------


def hostile_record() -> Record:
    return replace(
        FAILED,
        **dict.fromkeys(("target", "origin", "op", "dtype", "device", "property", "title"), HOSTILE),
        **dict.fromkeys(("case", "detail", "contract", "stem"), HOSTILE),
        description=HOSTILE,
        rerun=f"attn-oracle {HOSTILE}",
        forms={HOSTILE: 2.0},
        metrics={HOSTILE: {"n": 3}, "out": {"n": HOSTILE, "normwise": HOSTILE}},
        worst={"output": HOSTILE, "index": [HOSTILE], "observed": HOSTILE, "exact": HOSTILE},
        features={HOSTILE: HOSTILE, "sweep": "context", "sk": 64, "real": HOSTILE},
        datasheet={"conventions": {HOSTILE: HOSTILE}},
    )  # fmt: skip


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    bad = hostile_record()
    records = [
        bad,
        replace(bad, verdict="PASS"),
        replace(bad, verdict="ERROR"),
        replace(bad, op="attention", dtype="bf16"),
    ]
    row = dict.fromkeys(
        ("target", "op", "dtype", "property", "reason", "test", "detail", "key", "case", "link"), HOSTILE
    )
    notes = [("untested", row), ("fault", row), ("waiver", row), (HOSTILE, row)]
    environment = {
        **ENVIRONMENT,
        "versions": {HOSTILE: HOSTILE},
        "processor": HOSTILE,
        "argv": [HOSTILE],
        HOSTILE: HOSTILE,
    }
    return pages(write(tmp_path_factory.mktemp("hostile"), records, notes=notes, environment=environment))


def test_hostile_text_stays_text_in_html(hostile: tuple[str, str]) -> None:
    page = Page(hostile[1])
    assert page.faults == []
    assert set(page.tags) <= _ALLOWED
    assert not [key for _, key, _ in page.attributes if key.startswith("on")]
    assert all(h.startswith(("#", "https://arxiv.org/")) for h in page.values("href"))
    assert "<script>alert(1)</script>" in page.text
    assert not re.search("This (section|part) could not be", page.text)


def test_hostile_text_stays_text_in_markdown(hostile: tuple[str, str]) -> None:
    bare = prose(hostile[0])
    assert re.sub(r'<a id="[a-z0-9-]+"></a>', "", bare).replace("\\<", "").count("<") == 0
    assert not re.search(r"(?<!\\)\]\((?!#|https://arxiv)", bare)
    assert not re.search(r"^ {0,3}# <img", bare, re.MULTILINE)
    guards = re.findall(r"^(`{3,})", hostile[0], re.MULTILINE)
    assert len(guards) % 2 == 0
    assert "\x00" not in hostile[0]


def test_the_check_of_markdown_can_fail() -> None:
    assert "<b>" in prose("text <b> `code`")
    assert "<b>" not in prose("text `<b>`")
    assert "<b>" not in prose("```sh\n<b>\n```")


@example(HOSTILE)
@example("&lt;&quot;")
@given(st.text())
def test_any_text_in_html_is_that_text(text: str) -> None:
    page = Page(tag("p", text, title=text))
    kept = "".join("�" if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t" else c for c in text)
    assert page.faults == []
    assert page.text == kept
    assert page.attributes == [("p", "title", kept)]


@given(st.text(alphabet="`ab |<"))
def test_no_text_ends_its_code_span(text: str) -> None:
    span = render_markdown.code(text)
    guard = re.match(r"`+", span)
    assert guard is not None
    assert span.endswith(guard.group())
    inner = span[len(guard.group()) : -len(guard.group())]
    assert guard.group() not in re.findall(r"`+", inner)


@given(st.text(alphabet="`a\n"))
def test_no_text_ends_its_fence(text: str) -> None:
    first, *inner, last = render_markdown.guarded(text).split("\n")
    assert set(last) == {"`"}
    assert first == last + "sh"
    assert not any(line.strip().startswith(last) for line in inner)


@given(st.text())
def test_escaped_text_is_one_line_without_live_markup(text: str) -> None:
    shown = render_markdown.escaped(text)
    assert "\n" not in shown
    assert not re.search(r"(?<!\\)(?:\\\\)*[<`*|\[]", shown)


@pytest.mark.parametrize(
    "href",
    [
        "javascript:alert(1)",
        "http://x.org",
        "https://x.org/ onclick=1",
        "#A b",
        'https://x.org/"',
        "data:text/html,x",
        "https://x)y",
    ],
)
def test_only_plain_links_are_links(href: str) -> None:
    section = Section("s", "t", (Paragraph(Link("name", href)),))
    assert Page(render_html.page("t", "b", (section,))).values("href") == ["#s"]
    assert f"]({href}" not in render_markdown.page("t", (section,))


# --- runs that are not whole ----------------------------------------------------------------------------------------


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
