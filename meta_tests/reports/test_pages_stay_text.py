"""Whatever a record says, it stays text on both pages."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meta_tests.reports.pages import _ALLOWED, Page, pages
from meta_tests.reports.synthetic import ENVIRONMENT, FAILED, write
from properties.record import Record
from reports.page import render_html, render_markdown
from reports.page.document import Link, Paragraph, Section
from reports.page.markup import tag

HOSTILE = "<script>alert(1)</script>\"'`|*_[x](javascript:x)\n# <img src=x onerror=y> & --> ]]> \x00\ud800"


def prose(markdown: str) -> str:
    """Markdown without its guards and code spans: where markup would be markup."""
    bare = re.sub(r"^(`{3,})[^`\n]*\n.*?\n\1$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(?<![`\\])(`+)(?!`).*?(?<!`)\1(?!`)", "", bare)


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
